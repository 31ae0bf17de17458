"""Training in a forked process: what was built or swapped by hand works, what a callback must change is refused."""

import torch
from torch.utils.data import DataLoader

from attention_modules import RPCAttention, swap_attention
from lightning_tasks.callbacks import SigmaReparam, SwapAttention
from tests.lightning_tasks.callbacks.modules import TinyLM, fit
from tests.lightning_tasks.test_base import Regression

if __name__ == "__main__":
    for callback in (SwapAttention("scaled", {"num_tokens": 6}), SigmaReparam()):
        try:
            fit(TinyLM(), [callback], max_steps=1, strategy="ddp_fork")
        except Exception as error:  # the launcher wraps what the process raised in an exception of its own
            print(error)
    module = TinyLM()
    swap_attention(module, "rpc")
    fit(module, max_steps=1, strategy="ddp_fork")
    assert sum(isinstance(each, RPCAttention) for each in module.modules()) == 2
    task, known = Regression(), Regression()
    data = DataLoader(torch.ones(8, 3), batch_size=4)
    for each, strategy in ((task, "ddp_fork"), (known, "auto")):
        torch.manual_seed(0)
        fit(each, max_steps=2, strategy=strategy, loader=data)
    assert all(map(torch.equal, task.state_dict().values(), known.state_dict().values()))
    assert len([*task.parameters()]) == 4
