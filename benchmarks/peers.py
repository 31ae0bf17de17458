"""A training step of our tasks beside what a user would take in their place.

Run from the repository's root: ``python -m benchmarks.peers``. Ours runs under Lightning's Trainer; the peer's step, on
the same batch, is taken in turn with ours in the same process, each time that Lightning asks for the next batch. The
peers come from PyPI: ``pip install 'attnswap[hf,mmseg]'`` and ``pip install --no-deps litgpt==0.5.13`` (it pins older
versions of two packages, which its models do not need). A peer that is not installed is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.common import write_results
from lightning_tasks import ImageClassificationTask, LanguageModelingTask, SegmentationTask
from lightning_tasks.compare.workers import start_context

WARM_UP = 1
DIM, HEADS, IMAGE_CLASSES, PIXEL_CLASSES = 128, 8, 1000, 150
MMSEG_CONFIG = "segmenter_vit-t_mask_8xb1-160k_ade20k-512x512"
ADAMW: dict[str, Any] = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3, "fused": True}}
SGD: dict[str, Any] = {"class_path": "torch.optim.SGD", "init_args": {"lr": 1e-3, "momentum": 0.9}}

Batch = tuple[Tensor, Tensor]
Peer = tuple[nn.Module, Callable[[], object]]


@dataclass(frozen=True)
class Contest:
    """One of our tasks against one peer.

    Args:
        name: what is compared.
        task: builds ours.
        peer: builds the peer's model and its training step, from our batch.
        batch: what both train on.
        rounds: timed steps of each.
        goal: how many times as fast ours is to be.
    """

    name: str
    task: Callable[[], pl.LightningModule]
    peer: Callable[[Batch], Peer]
    batch: Callable[[], Batch]
    rounds: int
    goal: float


@dataclass(frozen=True)
class Text:
    """A language model's shape: layers, tokens T, vocabulary V, and windows a batch."""

    layers: int
    tokens: int
    vocabulary: int
    windows: int

    def __str__(self) -> str:
        return f"{self.layers} layers, T {self.tokens}, V {self.vocabulary:,}, batch {self.windows}"

    def batch(self) -> Batch:
        """Random tokens and the ones that follow them."""
        tokens = torch.randint(self.vocabulary, (self.windows, self.tokens + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def task(self, **options: Any) -> pl.LightningModule:
        """Ours, without dropout."""
        sizes = {"num_layers": self.layers, "dim": DIM, "num_heads": HEADS, "mlp_dim": 4 * DIM}
        arguments = {**sizes, "num_tokens": self.tokens, "dropout": 0.0, **options}
        model = {"class_path": "lightning_tasks.models.TransformerLM", "init_args": arguments}
        return LanguageModelingTask(model, vocab_size=self.vocabulary, optimizer=ADAMW)

    def litgpt(self, batch: Batch) -> Peer:
        """litgpt's GPT in the step of its `pretrain`: learned weights as ours, without rotary positions."""
        from litgpt.config import Config
        from litgpt.model import GPT
        from litgpt.utils import chunked_cross_entropy

        config = Config(
            block_size=self.tokens,
            padded_vocab_size=self.vocabulary,
            n_layer=self.layers,
            n_head=HEADS,
            n_embd=DIM,
            rotary_percentage=0.0,
            parallel_residual=False,
        )
        model = GPT(config)
        return model, _bare_step(model, lambda: chunked_cross_entropy(model(batch[0]), batch[1]))

    def gpt2(self, batch: Batch) -> Peer:
        """transformers' GPT-2 with its own loss and its SDPA attention."""
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=self.vocabulary,
            n_positions=self.tokens,
            n_embd=DIM,
            n_layer=self.layers,
            n_head=HEADS,
            activation_function="relu",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
        model = GPT2LMHeadModel(config)
        inputs, labels = batch  # shifted already
        return model, _bare_step(model, lambda: model(input_ids=inputs, shift_labels=labels, labels=labels).loss)


@dataclass(frozen=True)
class Images:
    """Images of H = W pixels, and how many per batch."""

    size: int
    count: int

    def classified(self) -> Batch:
        """Random images and labels."""
        return torch.rand(self.count, 3, self.size, self.size), torch.randint(IMAGE_CLASSES, (self.count,))

    def masked(self) -> Batch:
        """Random images and masks."""
        shape = (self.count, self.size, self.size)
        return torch.rand(self.count, 3, self.size, self.size), torch.randint(PIXEL_CLASSES, shape)

    def classification(self) -> pl.LightningModule:
        """DeiT-tiny with DeiT's mixup, cutmix and label smoothing."""
        return ImageClassificationTask(
            "deit_tiny_patch16_224",
            num_classes=IMAGE_CLASSES,
            model_options={"img_size": self.size, "drop_path_rate": 0.1},
            mixup=0.8,
            cutmix=1.0,
            label_smoothing=0.1,
            optimizer=ADAMW,
        )

    def timm(self, batch: Batch) -> Peer:
        """timm's model in a bare loop: its mixup, its loss, its groups of parameters; images come normalized."""
        import timm
        from timm.data.mixup import Mixup
        from timm.loss import SoftTargetCrossEntropy
        from timm.optim import param_groups_weight_decay

        model = timm.create_model(
            "deit_tiny_patch16_224", num_classes=IMAGE_CLASSES, img_size=self.size, drop_path_rate=0.1
        )
        mix = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=IMAGE_CLASSES)
        loss_fn = SoftTargetCrossEntropy()
        images, labels = batch[0].clone(), batch[1]

        def loss() -> Tensor:
            mixed, targets = mix(images, labels)
            return loss_fn(model(mixed), targets)

        return model, _bare_step(model, loss, param_groups_weight_decay(model, 0.01))

    def segmentation(self) -> pl.LightningModule:
        """Segmenter with ViT-tiny and a mask transformer of two layers."""
        model = {
            "backbone": "vit_tiny_patch16_224",
            "img_size": self.size,
            "backbone_options": {"drop_path_rate": 0.1},
        }
        return SegmentationTask(model, num_classes=PIXEL_CLASSES, optimizer=SGD, param_groups=[])

    def mmsegmentation(self, batch: Batch) -> Peer:
        """Segmenter ViT-T of mmsegmentation in its own `train_step`, which its loop calls."""
        from lightning_tasks.models.mmseg_config import config_file, load_mmseg, model_config, set_crop_size

        load_mmseg()
        from mmengine.optim import OptimWrapper
        from mmengine.registry import DefaultScope
        from mmengine.structures import PixelData
        from mmseg.registry import MODELS
        from mmseg.structures import SegDataSample

        config = model_config(config_file(MMSEG_CONFIG), {})
        config.pretrained = None
        set_crop_size(config, self.size)
        with DefaultScope.overwrite_default_scope("mmseg"):
            model: Any = MODELS.build(config)
            model.init_weights()
        samples = [SegDataSample(gt_sem_seg=PixelData(data=mask[None])) for mask in batch[1]]
        data = {"inputs": list((batch[0].flip(1) * 255).byte()), "data_samples": samples}
        wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), **SGD["init_args"]))
        return model, lambda: model.train_step(data, wrapper)


def _bare_step(model: nn.Module, loss: Callable[[], Tensor], groups: Any = None) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters() if groups is None else groups, **ADAMW["init_args"])

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


SMALL, LARGE = Text(2, 64, 4_000, 32), Text(16, 256, 33_278, 8)
CLASSIFIED, MASKED = Images(224, 16), Images(512, 2)


def contests() -> dict[str, Contest]:
    """All, by the name that `--only` takes."""
    found = {}
    for key, shape, rounds, goal in (("small", SMALL, 30, 1.3), ("large", LARGE, 4, 2.0)):
        for peer, task in (
            ("litgpt", partial(shape.task, positions="sinusoidal")),
            ("gpt2", partial(shape.task, tied=True)),
        ):
            name = f"language model, {shape}; {'litgpt GPT' if peer == 'litgpt' else 'transformers GPT-2'}"
            found[f"{peer}_{key}"] = Contest(name, task, getattr(shape, peer), shape.batch, rounds, goal)
    words = f"DeiT-tiny, {CLASSIFIED.size} pixels, batch {CLASSIFIED.count}; timm, bare loop"
    found["timm"] = Contest(words, CLASSIFIED.classification, CLASSIFIED.timm, CLASSIFIED.classified, 7, 1.1)
    words = f"Segmenter ViT-T, {MASKED.size} pixels, batch {MASKED.count}; mmsegmentation"
    found["mmseg"] = Contest(words, MASKED.segmentation, MASKED.mmsegmentation, MASKED.masked, 5, 1.2)
    return found


class Turns(Dataset[Batch]):
    """One batch again and again; the peer takes its step whenever it is asked for, and both are timed.

    Ours is all that happens from here to the next batch: the step, its hooks, its logging, the progress bar.
    """

    def __init__(self, batch: Batch, peer: Callable[[], object], rounds: int) -> None:
        self.batch, self.peer, self.rounds = batch, peer, WARM_UP + rounds
        self.ours: list[tuple[float, float]] = []
        self.theirs: list[tuple[float, float]] = []

    def __len__(self) -> int:
        return self.rounds + 1  # the last one only ends our last step

    def __getitem__(self, index: int) -> Batch:
        if index:
            self.ours.append(self._since_start())
        if index < self.rounds:
            self._start = _clocks()
            self.peer()
            self.theirs.append(self._since_start())
        self._start = _clocks()
        return self.batch

    def _since_start(self) -> tuple[float, float]:
        return tuple(now - before for now, before in zip(_clocks(), self._start, strict=True))  # type: ignore[return-value]


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    said = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        warnings.simplefilter("ignore")
        yield


def measure(contest: Contest, threads: int, rounds: int | None = None) -> dict[str, str]:
    """A row of the table.

    Raises:
        ModuleNotFoundError: if the peer is not installed.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    batch = contest.batch()
    with _quiet(), tempfile.TemporaryDirectory() as folder:
        model, step = contest.peer(batch)
        turns = Turns(batch, step, rounds or contest.rounds)
        task = contest.task()
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=CSVLogger(folder),
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        trainer.fit(task, DataLoader(turns, batch_size=None))
    ours, theirs = turns.ours[WARM_UP:], turns.theirs[WARM_UP:]
    wall, cpu = ([b[clock] / a[clock] for a, b in zip(ours, theirs, strict=False)] for clock in (0, 1))
    low, middle, high = statistics.quantiles(wall, n=4) if len(wall) > 1 else wall * 3
    return {
        "compared": contest.name,
        "parameters, ours": f"{_parameters(task):,}",
        "parameters, theirs": f"{_parameters(model):,}",
        "ours, ms": f"{1e3 * statistics.median(each[0] for each in ours):.0f}",
        "theirs, ms": f"{1e3 * statistics.median(each[0] for each in theirs):.0f}",
        "theirs / ours": f"{middle:.2f}",
        "quartiles": f"{low:.2f} to {high:.2f}",
        "of CPU time": f"{statistics.median(cpu):.2f}",
        "goal": f"{contest.goal:g}",
        "rounds": str(len(wall)),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def _parameters(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters() if each.requires_grad)


NOTES = f"""\
Medians of wall-clock time of a training step (forward, loss, backward, update), ours and the peer's in turn in one
process, on the same batch in float32, without gradient clipping; "theirs / ours" is the median of the ratios of
neighboring steps (above 1: ours is faster), beside their quartiles, and "of CPU time" the median ratio of the
process' CPU time. The first round does not count. Load: the machine's mean load of the last minute at the
end of a row.

- Each row is measured in a new process: after large tensors were freed, forms that allocate much become faster.
- Ours is a task under Lightning's Trainer with its progress bar and CSVLogger; its step is all that happens between
  two batches. The peers' steps are bare: they log nothing.
- Language models: width {DIM}, {HEADS} heads, MLP of {4 * DIM}, no dropout, fused AdamW. litgpt's GPT takes the
  step of its `pretrain` (its loss in chunks of 128 tokens), with untied embeddings and rotary positions off; it has
  GELU, ours ReLU and sinusoidal positions. transformers' GPT-2 has ReLU and tied embeddings and learned positions
  as ours, SDPA attention, and its own loss.
- DeiT-tiny: the same timm model, mixup 0.8, cutmix 1, label smoothing 0.1, drop path 0.1, fused AdamW and timm's
  groups of parameters in both. The bare loop gets images that are normalized, and measures no accuracy; ours does
  both.
- Segmenter: `{MMSEG_CONFIG}` in mmsegmentation's own `train_step` against SegmentationTask, drop path 0.1, SGD with
  momentum. Its data preprocessor normalizes bytes, its head logs the accuracy a pixel."""


def main(args: list[str] | None = None) -> None:
    """Measure, print and write ``benchmarks/results/peers.md`` and ``.csv``."""
    known = contests()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=known, default=list(known), help="which ones (default: all)")
    parser.add_argument("--rounds", type=int, help="timed steps of each (default: by comparison)")
    parser.add_argument("--print_only", action="store_true", help="write no file")
    options = parser.parse_args(args)
    command = " ".join(["python -m benchmarks.peers", *(sys.argv[1:] if args is None else args)])
    rows = []
    # A row is measured in a new process: large tensors that an earlier row freed change what malloc does.
    with ProcessPoolExecutor(1, mp_context=start_context(), max_tasks_per_child=1) as processes:
        for name in options.only:
            try:
                rows.append(processes.submit(measure, known[name], options.threads, options.rounds).result())
            except ModuleNotFoundError as error:
                print(f"{name} is left out: {error}", flush=True)
                continue
            print(rows[-1], flush=True)
            if not options.print_only:  # after each row, as all take long
                write_results("peers", "A training step beside its peers", command, rows, NOTES)


if __name__ == "__main__":
    main()
