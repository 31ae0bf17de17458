"""Training in a forked process: a module that was swapped by hand works, one that a callback must swap is refused."""

from attention_modules import RPCAttention, swap_attention
from lightning_tasks.callbacks import SwapAttention
from tests.lightning_tasks.callbacks.modules import TinyLM, fit

if __name__ == "__main__":
    try:
        fit(TinyLM(), [SwapAttention("scaled", {"num_tokens": 6})], max_steps=1, strategy="ddp_fork")
    except Exception as error:  # the launcher wraps what the process raised in an exception of its own
        print(error)
    module = TinyLM()
    swap_attention(module, "rpc")
    fit(module, max_steps=1, strategy="ddp_fork")
    assert sum(isinstance(each, RPCAttention) for each in module.modules()) == 2
