"""What W&B gets of a tested classifier, read from the files of an offline run: two tables and a figure."""

import csv
import json

import pytest
from attnswap.datamodules import DigitsDataModule
from lightning.pytorch.loggers import CSVLogger

from lightning_tasks import ImageClassificationTask
from lightning_tasks.callbacks import RobustnessEvaluation
from tests.lightning_tasks.language_data import trainer

TINY = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 1, "num_heads": 2}


@pytest.fixture(scope="module")
def tested(tmp_path_factory):
    """The folder of a run whose classifier was tested, and the files of its W&B run."""
    pytest.importorskip("wandb")
    from lightning.pytorch.loggers import WandbLogger

    folder = tmp_path_factory.mktemp("tested")
    loggers = [CSVLogger(folder, name="run"), WandbLogger(save_dir=str(folder), offline=True)]
    robustness = RobustnessEvaluation(num_images=10, attacks=["fgsm"], eps=["4/255"], corruptions=[])
    module = ImageClassificationTask(model_options=TINY)
    run = trainer(folder, logger=loggers, callbacks=[robustness])
    run.test(module, DigitsDataModule(batch_size=120), verbose=False)
    loggers[1].experiment.finish()
    (files,) = folder.glob("wandb/offline-run-*/files")
    return folder / "run" / "version_0", files


def rows_of(path):
    """The rows of a CSV file, as text."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def logged(files, name):
    """The rows of a table as W&B has it, as text."""
    (path,) = files.glob(f"media/table/{name}_*.table.json")
    table = json.loads(path.read_text())
    return [
        {key: "" if each is None else str(each) for key, each in zip(table["columns"], row, strict=True)}
        for row in table["data"]
    ]


def test_classes(tested):
    folder, files = tested
    rows = logged(files, "test/classes")
    assert rows == rows_of(folder / "test_classes.csv")
    assert [row["name"] for row in rows] == list("0123456789")
    assert sum(int(row["samples"]) for row in rows) == 360


def test_confusion(tested):
    folder, files = tested
    (figure,) = files.glob("media/images/test/confusion_*.png")
    assert figure.read_bytes() == (folder / "test_confusion.png").read_bytes()


def test_robustness(tested):
    folder, files = tested
    ours, theirs = rows_of(folder / "robustness.csv"), logged(files, "robustness")
    assert [row["test"] for row in theirs] == [row["test"] for row in ours]
    assert [row["test"] for row in ours] == ["clean", "input gradient", "input gradient", "attack"]
    for one, other in zip(theirs, ours, strict=True):
        assert [*one] == [*other][:-1]  # without which image is right
        assert float(one["value"]) == pytest.approx(float(other["value"]), abs=1e-4)
