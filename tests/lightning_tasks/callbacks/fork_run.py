"""A module that was swapped by hand trains in a forked process."""

from attention_modules import RPCAttention, swap_attention
from tests.lightning_tasks.callbacks.modules import TinyLM, fit

if __name__ == "__main__":
    module = TinyLM()
    swap_attention(module, "rpc")
    fit(module, max_steps=1, strategy="ddp_fork")
    assert sum(isinstance(each, RPCAttention) for each in module.modules()) == 2
