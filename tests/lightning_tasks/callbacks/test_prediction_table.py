"""The table of predictions: what stands in it, where, in which order, and what becomes of samples that are missing."""

import csv
import json
import os
from types import SimpleNamespace

import pytest
import torch
from attnswap.datamodules import DigitsDataModule, ImageNetDataModule
from attnswap.datamodules.shared.folder import FolderDataModule
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from lightning_tasks import ImageClassificationTask, LanguageModelingTask
from lightning_tasks.__main__ import main
from lightning_tasks.callbacks import PredictionTable
from tests.datamodules.image_files import write_class_folders
from tests.lightning_tasks.demo import DemoModule
from tests.lightning_tasks.language_data import SMALL, RandomText, trainer, windows

TINY = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 1, "num_heads": 2}


def task(**options):
    return ImageClassificationTask(**{"model_options": TINY, "num_classes": 10, **options})


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_predictions_of_digits_are_those_of_the_model(tmp_path, capsys):
    run = trainer(tmp_path, callbacks=[PredictionTable()], logger=CSVLogger(tmp_path, name="run"))
    probabilities = torch.cat(run.predict(task(), DigitsDataModule(batch_size=100)))
    path = tmp_path / "run" / "version_0" / "predictions.csv"
    assert f"predictions: 360 in {path}" in capsys.readouterr().out
    rows = read(path)
    assert list(rows[0]) == ["index", "sample", "class", "name", "probability", "top5", "top5_probabilities"]
    assert [row["index"] for row in rows] == [str(index) for index in range(360)]
    assert rows[7]["sample"] == "image 7"
    best = probabilities.topk(5)
    for row, shares, classes in zip(rows, best.values.tolist(), best.indices.tolist(), strict=True):
        assert (row["class"], row["name"]) == (str(classes[0]), str(classes[0]))
        assert float(row["probability"]) == pytest.approx(shares[0], abs=1e-6)
        assert row["top5"].split() == [str(index) for index in classes]
        assert [float(share) for share in row["top5_probabilities"].split()] == pytest.approx(shares, abs=1e-6)
    assert not list(path.parent.glob("*.part*"))


def test_the_command_writes_them_without_a_logger_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["attnswap"])
    arguments = ["--model=lightning_tasks.ImageClassificationTask", f"--model.model_options={json.dumps(TINY)}"]
    arguments += ["--data=attnswap.datamodules.DigitsDataModule", "--data.batch_size=200", "--trainer.accelerator=cpu"]
    main(["predict", *arguments, "--trainer.enable_progress_bar=false"])
    (first,) = tmp_path.rglob("predictions.csv")
    assert first.parent.name == "version_0"
    for name in ("predictions.csv", "predictions_1.csv"):  # what is there is not overwritten
        main(["predict", *arguments, "--trainer.logger=false", "--trainer.enable_progress_bar=false"])
        assert f"predictions: 360 in {name}" in capsys.readouterr().out.replace(f"{tmp_path}/", "")
        assert len(read(tmp_path / name)) == 360


def test_a_second_prediction_in_a_run_s_folder_keeps_the_first(tmp_path):
    run = trainer(tmp_path, callbacks=[PredictionTable()], logger=CSVLogger(tmp_path, name="run"))
    module = task()
    for count in (10, 20):
        run.predict(module, DataLoader(TensorDataset(torch.rand(count, 1, 8, 8), torch.zeros(count).long()), 5))
    tables = {path.name: len(read(path)) for path in (tmp_path / "run" / "version_0").glob("predictions*.csv")}
    assert tables == {"predictions.csv": 10, "predictions_1.csv": 20}


def test_a_loader_that_stands_alone_in_a_list_names_its_samples(tmp_path):
    data = DigitsDataModule(batch_size=100)
    trainer(tmp_path, callbacks=[PredictionTable()]).predict(task(), data)
    for several in ([data.test_dataloader()], {"a": data.test_dataloader()}):
        trainer(tmp_path, callbacks=[PredictionTable()]).predict(task(), several)
    first, *others = (list(read(path)[7].values())[:2] for path in sorted(tmp_path.glob("predictions*.csv")))
    assert first == ["7", "image 7"]
    assert others == [first] * 2


def test_rows_of_another_order_keep_their_columns_and_of_other_names_are_refused(tmp_path):
    class Rows(DemoModule):
        given = ({"a": 1, "b": 2}, {"b": 4, "a": 3}, {"a": 5})

        def predict_step(self, batch, batch_idx):
            return self.given[batch_idx]

        def prediction_rows(self, prediction, batch):
            return [prediction] * len(batch[0])

    data = DataLoader(TensorDataset(torch.arange(3)), batch_size=1)
    run = trainer(tmp_path, callbacks=[PredictionTable()], limit_predict_batches=2)
    run.predict(Rows(), data)
    assert [(row["a"], row["b"]) for row in read(tmp_path / "predictions.csv")] == [("1", "2"), ("3", "4")]
    with pytest.raises(ValueError, match="gave index, a, b before, and index, a now"):
        trainer(tmp_path, callbacks=[PredictionTable()]).predict(Rows(), data)


def test_images_that_cannot_be_read_keep_the_others_in_place(tmp_path):
    for split in ("train", "val"):
        write_class_folders(tmp_path / "images" / split, {"cat": 2, "dog": 3})
    broken = tmp_path / "images" / "val" / "dog" / "dog_0.JPEG"
    broken.write_bytes(broken.read_bytes()[:200])
    data = ImageNetDataModule(root=str(tmp_path), folder="images", batch_size=2, img_size=8, num_workers=0)
    module = task(num_classes=None, model_options={**TINY, "in_chans": 3})
    run = trainer(tmp_path, callbacks=[PredictionTable()])
    with pytest.warns(UserWarning, match="cannot be read"):
        run.predict(module, data)
    rows = read(tmp_path / "predictions.csv")
    assert [row["index"] for row in rows] == ["0", "1", "3", "4"]
    names = [row["sample"].rsplit("/", 1)[-1] for row in rows]
    assert names == ["cat_0.JPEG", "cat_1.JPEG", "dog_1.JPEG", "dog_2.JPEG"]
    assert {row["name"] for row in rows} <= {"cat", "dog"}
    assert "top2" in rows[0]


def test_a_name_that_is_no_unicode_stands_in_the_table(tmp_path):
    write_class_folders(tmp_path / "images", {"cat": 1})
    (tmp_path / "images/cat/cat_0.JPEG").rename(os.fsdecode(bytes(tmp_path / "images/cat") + b"/\xff.jpg"))
    data = FolderDataModule(ImageNetDataModule(root=str(tmp_path), img_size=8, num_workers=0), tmp_path / "images")
    module = task(model_options={**TINY, "in_chans": 3})
    trainer(tmp_path, callbacks=[PredictionTable()]).predict(module, data)
    (row,) = read(tmp_path / "predictions.csv")
    assert row["sample"] == f"{tmp_path}/images/cat/\\udcff.jpg"


def test_the_parts_of_several_processes_make_one_table(tmp_path):
    """A distributed sampler deals indices out in turn, and repeats some at the end."""
    ranks = []
    for rank, indices in enumerate([[0, 2, 4], [1, 3, 0]]):
        strategy = SimpleNamespace(broadcast=lambda path: path, barrier=lambda: None)
        loggers = [CSVLogger(tmp_path, name="", version="")]
        run = SimpleNamespace(loggers=loggers, fast_dev_run=0, strategy=strategy, world_size=2)
        run.global_rank, run.is_global_zero, run.predict_dataloaders = rank, rank == 0, None
        run.default_root_dir = tmp_path
        module = SimpleNamespace(prediction_rows=lambda prediction, batch: [{"value": each} for each in prediction])
        table = PredictionTable()
        table.on_predict_start(run, module)
        table.write_on_batch_end(run, module, [10 * index for index in indices], indices, None, 0, 0)
        ranks.append((table, run, module))
    for table, run, module in reversed(ranks):
        table.on_predict_end(run, module)
    rows = [(row["index"], row["value"]) for row in read(tmp_path / "predictions.csv")]
    assert rows == [("0", "0"), ("1", "10"), ("2", "20"), ("3", "30"), ("4", "40")]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_language_model_gives_the_loss_of_each_window(tmp_path):
    module = LanguageModelingTask(SMALL)
    run = trainer(tmp_path, callbacks=[PredictionTable()])
    losses = -torch.cat(run.predict(module, RandomText()))
    rows = read(tmp_path / "predictions.csv")
    counts = (windows(7, 2)[1] != -100).sum(1)
    assert [int(row["tokens"]) for row in rows] == counts.tolist()
    assert [float(row["loss"]) for row in rows] == pytest.approx((losses.sum(1) / counts).tolist(), abs=1e-5)


def test_of_several_loaders_there_is_no_table(tmp_path):
    class Own(DemoModule):
        def predict_step(self, batch, batch_idx, dataloader_idx=0):
            return batch

        def prediction_rows(self, prediction, batch):
            return [{"class": int(each)} for each in batch]

    loaders = [torch.utils.data.DataLoader([0]), torch.utils.data.DataLoader([0])]
    with pytest.warns(UserWarning, match="not written: a table is of one loader, and there are 2"):
        trainer(tmp_path, callbacks=[PredictionTable()]).predict(Own(), loaders)
    assert not list(tmp_path.rglob("predictions*"))


def test_a_module_that_says_no_rows_is_named(tmp_path):
    run = trainer(tmp_path, callbacks=[PredictionTable()])
    with pytest.warns(UserWarning, match="not written: DemoModule has no prediction_rows"):
        PredictionTable().on_predict_start(run, DemoModule())
    assert not list(tmp_path.iterdir())
