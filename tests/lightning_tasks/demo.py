"""A module that trains in milliseconds and logs, for tests of the command."""

import os
import threading
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel

from tests.lightning_tasks.language_data import TOKENS, RandomText


class DemoModule(BoringModel):
    def __init__(
        self,
        width: int = 32,
        rate: float = 0.1,
        note: str = "none",
        init_bias: bool = False,
        optimizer: str = "SGD",
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if note == "fail":
            raise ValueError("the module's own")
        self.layer = torch.nn.Linear(width, 2)
        if init_bias:
            torch.nn.init.ones_(self.layer.bias)

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        self.log("train/loss", output["loss"], on_step=True)
        return output

    def validation_step(self, batch, batch_idx):
        loss = super().validation_step(batch, batch_idx)["x"]
        self.log("val/loss", loss)
        self.log("val/perplexity", loss.exp())

    def test_step(self, batch, batch_idx):
        self.log("test/loss", super().test_step(batch, batch_idx)["y"])

    def configure_optimizers(self):
        name, _, without = self.hparams.optimizer.partition("_without_")
        trained = [parameter for key, parameter in self.named_parameters() if not without or without not in key]
        return getattr(torch.optim, name)(trained, lr=self.hparams.rate)


class FreezeAll(Callback):
    """Leaves nothing to train in attention layers."""

    def setup(self, trainer, pl_module, stage):
        pl_module.configure_model()
        for name, parameter in pl_module.named_parameters():
            parameter.requires_grad_("attn" not in name)


class KeepTested(Callback):
    """Writes the weights that the test uses into `folder`."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder) / "tested.pt"

    def on_test_start(self, trainer, pl_module):
        torch.save(pl_module.state_dict(), self.path)


class EditFile(Callback):
    """Adds a setting to a YAML file as a fit begins."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_train_start(self, trainer, pl_module):
        self.path.write_text(self.path.read_text() + "\nckpt_path: other\n")


def make_monitor() -> Callback:
    """A callback that a function makes."""
    return Callback()


class Hold(Callback):
    """Says in `folder` that a fit began (a file `held_` and the seed), and holds it until a file `release` is there."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_start(self, trainer, pl_module):
        (self.folder / f"held_{torch.initial_seed()}").touch()
        while not (self.folder / "release").exists():
            time.sleep(0.05)


class Signal(Callback):
    """Sends a signal to its own process, or to that of a rank alone, within a training or a validation step."""

    def __init__(self, number: int, step: int, validating: bool = False, rank: int | None = None) -> None:
        self.number, self.step, self.validating, self.rank = number, step, validating, rank

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step and not self.validating and self.rank in (None, trainer.global_rank):
            os.kill(os.getpid(), self.number)

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if trainer.global_step == self.step and self.validating and batch_idx == 0:
            os.kill(os.getpid(), self.number)


class WriteDevice(Callback):
    """Writes into `folder` what the process sees of the CUDA devices."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_start(self, trainer, pl_module):
        (self.folder / "device.txt").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))


class LeaveThread(Callback):
    """Leaves a thread that runs for a long time."""

    def on_fit_end(self, trainer, pl_module):
        threading.Thread(target=time.sleep, args=(600,)).start()


class WriteState(Callback):
    """Counts the fits of this process, and changes a switch of torch; writes both, as they were, into `folder`."""

    fits = 0

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_start(self, trainer, pl_module):
        WriteState.fits += 1
        (self.folder / "state.txt").write_text(f"{self.fits} {torch.get_default_dtype()}")
        torch.set_default_dtype(torch.float64)


class DemoText(RandomText):
    """Random text that says how long its windows are, as the text data modules do."""

    num_tokens = TOKENS
