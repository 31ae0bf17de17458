"""`attnswap predict --ckpt_path CHECKPOINT --images FOLDER`."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from sklearn.datasets import load_digits

from lightning_tasks import ImageClassificationTask
from lightning_tasks.__main__ import main
from lightning_tasks.cli.predict_images import arguments_of_run, sections_of_run
from lightning_tasks.errors import UsageError

TINY = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 1, "num_heads": 2}
QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]


def fit(monkeypatch, folder, *arguments):
    monkeypatch.chdir(folder)
    main(["fit", *arguments, *QUIET, "--trainer.max_steps=1", "--trainer.limit_val_batches=0"])
    (checkpoint,) = Path("runs").rglob("*.ckpt")
    return (folder / checkpoint).resolve()


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["attnswap"])
        options = f"--model.model_options={json.dumps(TINY)}"
        return fit(patch, tmp_path_factory.mktemp("run"), "--config", "quickstart/classification", options)


@pytest.fixture
def folder(tmp_path):
    """Digits under any names, flat and nested, of other sizes and modes, a torn one, and a text."""
    place = tmp_path / "my images"
    (place / "deep" / "er").mkdir(parents=True)
    digits = (load_digits().images * 15).astype(np.uint8)
    Image.fromarray(digits[0]).save(place / "zero.png")
    Image.fromarray(digits[1]).resize((40, 32)).convert("RGB").save(place / "deep" / "one, really.JPG")
    Image.fromarray(digits[2]).save(place / "deep" / "er" / "no_suffix", format="PNG")
    (place / "torn.png").write_bytes(b"no image")
    (place / "notes.txt").write_text("none")
    return place


def rows(table):
    with open(table, newline="") as file:
        return list(csv.DictReader(file))


def test_any_folder_is_classified_by_what_the_run_says(classifier, folder, capsys, said):
    with pytest.warns(UserWarning, match=r"1 of 4 images cannot be read .*torn\.png"):
        main(["predict", "--ckpt_path", str(classifier), "--images", str(folder), *QUIET])
    (table,) = Path("runs/classification").rglob("predictions.csv")  # the recipe's, whose run lies elsewhere
    assert "images" not in yaml.safe_load((table.parent / "config.yaml").read_text())  # which may run with others
    found = rows(table)
    names = ["deep/er/no_suffix", "deep/one, really.JPG", "zero.png"]
    assert [row["sample"] for row in found] == [str(folder / name) for name in names]
    assert all(row["name"] in "0123456789" and 0 < float(row["probability"]) < 1 for row in found)
    assert "predictions: 3 in" in capsys.readouterr().out
    assert any("files that are no images are left out: 1 of .txt" in line for line in said)
    task = ImageClassificationTask.load_from_checkpoint(classifier, map_location="cpu").eval()
    pixels = torch.tensor(np.asarray(Image.open(folder / "zero.png")))[None, None].float() / 255
    with torch.no_grad():
        share, number = task(pixels).softmax(-1)[0].max(0)
    assert (int(found[-1]["class"]), found[-1]["probability"]) == (int(number), f"{share:.6f}")


def test_the_configuration_of_a_run_may_be_given(classifier, folder, capsys):
    config = next(place / "config.yaml" for place in Path(classifier).parents if (place / "config.yaml").is_file())
    assert yaml.safe_load(config.read_text())["model"]["init_args"]["num_classes"] is None
    with pytest.warns(UserWarning, match="1 of 4 images"):
        main(["predict", "--config", str(config), "--ckpt_path", str(classifier), "--images", str(folder), *QUIET])
    assert "predictions: 3 in" in capsys.readouterr().out


def test_the_checkpoint_has_the_names_of_the_classes(classifier):
    assert torch.load(classifier, weights_only=True)["class_names"] == list("0123456789")
    task = ImageClassificationTask.load_from_checkpoint(classifier, map_location="cpu")
    assert list(task.class_names) == list("0123456789")


def test_masks_of_a_folder(tmp_path, monkeypatch):
    data = ["--data.num_train=8", "--data.num_val=2", "--data.num_test=2", "--data.batch_size=4"]
    recipe = ["--config", "quickstart/segmentation", *data, "--trainer.callbacks=null"]
    checkpoint = fit(monkeypatch, tmp_path, *recipe)
    place = tmp_path / "scenes"
    place.mkdir()
    for name, size in (("a.png", (32, 32)), ("b.png", (48, 40))):
        Image.fromarray(np.full((*size[::-1], 3), 90, np.uint8)).save(place / name)
    main(["predict", "--ckpt_path", str(checkpoint), "--images", str(place), *QUIET])
    (table,) = Path("runs").rglob("predictions.csv")
    found = rows(table)
    assert [Path(row["sample"]).name for row in found] == ["a.png", "b.png"]
    assert [Image.open(table.parent / row["mask"]).size for row in found] == [(32, 32), (48, 40)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--images", "nowhere", "--ckpt_path", "CKPT"], "--images nowhere: no such folder"),
        (["--images", "."], "--images needs --ckpt_path FILE"),
        (["--images", ".", "--ckpt_path", "last"], "--images needs --ckpt_path FILE"),
        (["--images", ".", "--ckpt_path", "no.ckpt"], "--ckpt_path no.ckpt: no such file"),
        (["--images", ".", "--ckpt_path", "alone.ckpt"], "the configuration of its run is neither .* --config RECIPE"),
    ],
)
def test_refusals_name_the_cure(classifier, arguments, text):
    Path("alone.ckpt").touch()
    with pytest.raises(UsageError, match=text):
        arguments_of_run(["predict", *[str(classifier) if each == "CKPT" else each for each in arguments]])


def test_a_folder_without_images_is_refused(classifier, tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    with pytest.raises(SystemExit) as stop:
        main(["predict", "--ckpt_path", str(classifier), "--images", "texts", *QUIET])
    assert stop.value.code == 2
    assert "texts has no images" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize("section", ["model", "data"])
def test_the_configuration_beside_a_checkpoint_is_data(classifier, section, tmp_path):
    """It names no class of the folder, which would be imported; what is given by --config does."""
    Path("evil_beside.py").write_text("raise SystemExit('ran')")
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(classifier, tmp_path / "checkpoints" / "x.ckpt")
    settings = yaml.safe_load((classifier.parent.parent / "config.yaml").read_text())
    asked = ["predict", "--ckpt_path", str(classifier), "--images", "."]
    assert sections_of_run(asked)["model"] == {"class_path": settings["model"]["class_path"]}  # no text that is parsed
    settings[section]["class_path"] = "evil_beside.Evil"
    Path("config.yaml").write_text(yaml.safe_dump(settings))
    asked = ["predict", "--ckpt_path", "checkpoints/x.ckpt", "--images", "."]
    with pytest.raises(ValueError, match=r"evil_beside.*--trust_checkpoint"):
        arguments_of_run(asked)
    assert "evil_beside.Evil" in " ".join(arguments_of_run([*asked, "--trust_checkpoint"]))
