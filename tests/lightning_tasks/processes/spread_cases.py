"""Language models whose heads are spread (``tensor_parallel_size``), which a test starts on two processes: FOLDER."""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_tasks import ImageClassificationTask, LanguageModelingTask
from lightning_tasks.callbacks import AttentionMonitor, LocAteR, SpectrumMonitor, SwapAttention
from tests.lightning_tasks.language_data import TOKENS, RandomText, windows
from tests.lightning_tasks.processes.process_cases import SGD, TINY, RandomImages

STALL = timedelta(seconds=60)
SIZES = {"num_layers": 2, "dim": 16, "num_heads": 4, "mlp_dim": 12, "num_tokens": TOKENS, "dropout": 0.0}
ADAM = {"class_path": "AdamW", "init_args": {"lr": 0.01, "eps": 1e-3}}  # eps: see SGD of process_cases
# What is in the task, what a callback puts into the first layer, further sizes, and options of the trainer.
TAKEN: dict[str, tuple[dict[str, Any], list[Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({"optimizer": ADAM}, [], {"tied": True}, {}),
    "rpc": ({"mechanism": "rpc"}, [], {}, {}),
    "scaled": ({"mechanism": "scaled"}, [("rpc", {})], {}, {"gradient_clip_val": 0.1}),
    "value_residual": ({"mechanism": "value_residual"}, [], {"norm": "post"}, {}),
    "gated": ({"mechanism": "ssmax", "layers": [1]}, [("gated", {"bias": 0.5})], {"attn_head_dim": 6}, {}),
    "dropout": ({"optimizer": ADAM}, [], {"dropout": 0.5}, {}),
}
REFUSED: dict[str, tuple[dict[str, Any], list[Any], dict[str, Any], dict[str, Any]]] = {
    "talking_heads": ({}, [("talking_heads", {})], {}, {}),
    "differential": ({"mechanism": "differential", "options": {"pairs": "heads"}}, [], {}, {}),
    "heads": ({}, [], {"num_heads": 1}, {}),
    "features": ({}, [], {"mlp_dim": 13}, {}),
    "monitor": ({}, [AttentionMonitor()], {}, {}),
    "locater": ({}, [LocAteR(0.1)], {}, {}),
    "spectrum": ({}, [SpectrumMonitor()], {}, {}),
}


class SameText(RandomText):
    """All of it in each process."""

    def train_dataloader(self):
        data = TensorDataset(*windows(self.train_windows, 0))
        sampler = DistributedSampler(data, 1, 0, shuffle=False)
        return DataLoader(data, batch_size=self.batch_size, sampler=sampler)


def trainer_of(callbacks: list[Any], processes: int, **options: Any) -> pl.Trainer:
    swaps = [SwapAttention(*each, layers=[0]) if isinstance(each, tuple) else each for each in callbacks]
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    strategy: Any = ModelParallelStrategy(1, processes, timeout=STALL) if processes > 1 else "auto"
    given = {"accelerator": "cpu", "devices": processes, "strategy": strategy, "max_epochs": 3}
    return pl.Trainer(callbacks=swaps, **{**given, **quiet, **options})


def task_of(options: dict[str, Any], sizes: dict[str, Any]) -> LanguageModelingTask:
    model = {"class_path": "lightning_tasks.models.TransformerLM", "init_args": {**SIZES, **sizes}}
    task = LanguageModelingTask(model, **{"optimizer": SGD, **options})
    task.hparams["chunk_size"] = None  # as under ModelParallelStrategy
    build = task.build_model

    def build_double() -> Any:
        built = build().double()
        generator = torch.Generator().manual_seed(1)
        for name, parameter in built.named_parameters():
            if ".mechanism." in name:  # others than at the start, where tables are zero
                parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        return built

    task.build_model = build_double  # type: ignore[method-assign]
    return task


def whole(weight: Any) -> torch.Tensor:
    return (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach().clone()


def fit(case: tuple[Any, ...], processes: int, save: Path | None = None) -> dict[str, Any]:
    """What was logged and the whole weights; each process draws other initial weights, of which the first's count."""
    options, callbacks, sizes, given = case
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.manual_seed(3 + rank)
    task, run = task_of(options, sizes), trainer_of(callbacks, processes, **given)
    run.fit(task, SameText(4, 12, 7))
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    if save is not None:
        run.save_checkpoint(save)
    weights = {name: whole(weight) for name, weight in task.named_parameters()}
    local = {name: weight.to_local().clone() for name, weight in task.named_parameters() if hasattr(weight, "to_local")}
    return {"logged": logged, "weights": weights, "local": local}


def loaded(folder: Path, processes: int) -> dict[str, Any]:
    """The checkpoint of two processes on so many: its loss, its weights, and a fit that goes on."""
    options, callbacks, sizes, given = TAKEN["scaled"]
    ckpt = {"ckpt_path": folder / "scaled.ckpt", "weights_only": False}
    strategy = ModelParallelStrategy(1, processes, timeout=STALL)
    run = trainer_of(callbacks, processes, **{**given, "strategy": strategy, "max_epochs": 4})
    task = task_of(options, sizes)
    run.validate(task, SameText(4, 12, 7), verbose=False, **ckpt)
    found: dict[str, Any] = {"loss": float(run.callback_metrics["val/loss"])}
    found["weights"] = {name: whole(weight) for name, weight in task.named_parameters()}
    strategy = ModelParallelStrategy(1, processes, timeout=STALL)
    run = trainer_of(callbacks, processes, **{**given, "strategy": strategy, "max_epochs": 4})
    task = task_of(options, sizes)
    run.fit(task, SameText(4, 12, 7), **ckpt)
    found["after"] = {name: whole(weight) for name, weight in task.named_parameters()}
    return found


def error_of(action: Any) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return ""


def images() -> None:
    task = ImageClassificationTask("vit_tiny_patch16_224", model_options=TINY, optimizer=SGD)
    trainer_of([], 2).fit(task, RandomImages(2, 4, 4))


def main(folder: Path, processes: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    saved = {"scaled": folder / "scaled.ckpt"} if processes > 1 else {}
    found = {name: fit(case, processes, saved.get(name)) for name, case in TAKEN.items()}
    if processes > 1:
        found |= {f"refused {name}": error_of(lambda: fit(case, 2)) for name, case in REFUSED.items()}  # noqa: B023
        found["refused images"] = error_of(images)
        found["refused batches"] = error_of(lambda: trainer_of([], 2).fit(task_of({}, {}), RandomText(4, 16, 7)))
        found["again"] = loaded(folder, 2)
    return found


if __name__ == "__main__":
    place, processes = Path(sys.argv[1]), int(sys.argv[2])
    result = main(place, 2) if processes > 1 else loaded(place, 1)
    torch.save(result, place / (f"found_{torch.distributed.get_rank()}.pt" if processes > 1 else "loaded.pt"))
