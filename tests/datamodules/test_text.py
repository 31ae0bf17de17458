import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from attnswap.datamodules import PythonSourceDataModule, TextDataModule, WikiTextDataModule
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DistributedSampler

from tests.datamodules.conftest import SPLITS, write_split

NAME = "wikitext-2-v1"


@pytest.fixture
def data(wikitext_root, cache):
    return WikiTextDataModule(NAME, root=wikitext_root, num_tokens=2, batch_size=3, cache_dir=cache)


class Recorder(L.LightningModule):
    """Records the inputs of each training epoch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.epochs: dict[int, list[int]] = {}

    def training_step(self, batch):
        self.epochs.setdefault(self.current_epoch, []).extend(batch[1].flatten().tolist())
        return self.weight * 1.0

    def validation_step(self, batch):
        assert batch[0].dtype == torch.int64

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(data, folder, max_epochs, checkpoint=None):
    L.seed_everything(7)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=max_epochs,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Recorder()
    trainer.fit(model, datamodule=data, ckpt_path=checkpoint)
    path = folder / f"after_{max_epochs}.ckpt"
    trainer.save_checkpoint(path)
    return model.epochs, path


def test_epochs_differ_repeat_by_seed_and_go_on_after_resuming(data, tmp_path):
    whole, _ = fit(data, tmp_path, 3)
    first, checkpoint = fit(data, tmp_path, 2)
    rest, _ = fit(data, tmp_path, 3, checkpoint)
    assert whole[0] != whole[1]
    assert sorted(whole[0]) == sorted(whole[1])
    assert {**first, **rest} == whole
    assert list(rest) == [2]


def test_held_out_windows_come_in_order(data):
    data.setup()
    targets = torch.cat([targets.flatten() for _, targets in data.val_dataloader()])
    assert targets[targets >= 0].tolist() == data.tokens("validation").tolist()
    assert data.decode(targets) == "the cat <unk>\n\n"


def test_held_out_windows_fill_up_for_several_processes(data, monkeypatch):
    data.setup()
    monkeypatch.setattr(type(data), "world_size", 4)
    windows = data.val_dataloader().dataset
    shares = [list(DistributedSampler(windows, 4, rank, shuffle=False)) for rank in range(4)]
    assert sorted(index for share in shares for index in share) == list(range(len(windows)))  # none twice
    counted = torch.cat([windows.__getitems__(share)[1].flatten() for share in shares])
    assert (counted >= 0).sum() == len(data.tokens("validation"))


class RankRecorder(L.LightningModule):
    """Writes the targets that each process sees."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def _record(self, kind, batch):
        with open(self.folder / f"{kind}_{self.global_rank}", "a") as file:
            file.write(json.dumps(batch[1].tolist()) + "\n")

    def training_step(self, batch):
        self._record("train", batch)
        return self.weight * 1.0

    def validation_step(self, batch):
        self._record("validation", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def counted(batches):
    return sorted(target for batch in batches for window in batch for target in window if target >= 0)


def record(folder, root, cache, batch_size, **trainer_arguments):
    folder.mkdir()
    L.seed_everything(7)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, num_sanity_val_steps=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **trainer_arguments,
    )  # fmt: skip
    data = WikiTextDataModule(NAME, root=root, num_tokens=2, batch_size=batch_size, cache_dir=cache)
    trainer.fit(RankRecorder(folder), datamodule=data)


FORKED = """
import sys
from pathlib import Path
from tests.datamodules.test_text import record
record(*map(Path, sys.argv[1:]), 2, strategy="ddp_fork", devices=2)
"""


def test_two_processes_share_the_batches_of_one(wikitext_root, cache, tmp_path):
    def read(kind, split, rank=0):
        return [json.loads(line) for line in (tmp_path / kind / f"{split}_{rank}").read_text().splitlines()]

    record(tmp_path / "one", wikitext_root, cache, 4)
    # Forked from a process of its own: this one has threads and files of other tests.
    command = [sys.executable, "-c", FORKED, tmp_path / "two", wikitext_root, cache]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    for one, first, second in zip(read("one", "train"), read("two", "train"), read("two", "train", 1), strict=True):
        assert sorted(one) == sorted(first + second)
    alone, shared = read("one", "validation"), read("two", "validation") + read("two", "validation", 1)
    assert counted(alone) == counted(shared)


def test_loader_workers_give_the_same_batches(data, wikitext_root, cache):
    data.setup()
    workers = WikiTextDataModule(NAME, root=wikitext_root, num_tokens=2, batch_size=3, num_workers=1, cache_dir=cache)
    workers.setup()
    for alone, other in zip(data.train_dataloader(), workers.train_dataloader(), strict=True):
        assert torch.equal(alone[0], other[0])
        assert torch.equal(alone[1], other[1])


@pytest.mark.parametrize(
    "use", [lambda data: data.vocab_size, lambda data: data.tokens("train"), lambda data: data.decode([1])]
)
def test_before_setup_the_cure_is_named(data, use):
    with pytest.raises(RuntimeError, match=r"WikiTextDataModule is not set up: call setup\(\)"):
        use(data)


def test_it_prints_what_it_holds(data):
    assert "not set up" in str(data)
    data.setup()
    assert "wikitext-2-v1" in repr(data)
    assert "vocabulary 10" in str(data)
    assert "train 16, validation 5, test 3 tokens" in str(data)


@pytest.mark.parametrize("cls", [PythonSourceDataModule, WikiTextDataModule])
def test_it_is_built_from_a_configuration(cls, tmp_path):
    arguments = {"num_tokens": 16, "vocab_size": None, "cache_dir": str(tmp_path)}
    config = {"data": {"class_path": f"attnswap.datamodules.{cls.__name__}", "init_args": arguments}}
    cli = LightningCLI(
        BoringModel,
        TextDataModule,
        subclass_mode_data=True,
        run=False,
        args=config,
        trainer_defaults={"accelerator": "cpu", "logger": False},
    )
    data = cli.datamodule
    assert isinstance(data, cls)
    assert (data.num_tokens, data.max_vocab_size, data.cache_dir) == (16, None, tmp_path)


def test_memory_does_not_grow_with_the_text(tmp_path, cache):
    line = " " + " ".join(f"word{index}" for index in range(50)) + " \n"

    def peak(lines: int) -> int:
        root = tmp_path / str(lines)
        for split in SPLITS:
            write_split(root / "wikitext" / NAME, split, [line] * (lines if split == "train" else 1))
        tracemalloc.start()
        try:
            WikiTextDataModule(NAME, root=root, cache_dir=cache).prepare_data()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(16_000) < 1.5 * peak(4_000)
