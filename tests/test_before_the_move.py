"""Files that attnswap wrote before its modules moved to where they are: they resume, test, load and report as then.

`data/before_the_move` was written by commit 1d5daec. `resumed.json` has what that commit logged last, from the same
checkpoints; `outputs.pt` has outputs of the models that are stored.
"""

import csv
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from attention_modules import load_pretrained
from lightning_tasks import load_swapped
from lightning_tasks.__main__ import main
from tests.foreign_module import EncoderModule

KEPT = Path(__file__).resolve().parent / "data" / "before_the_move"
MORE = {
    "classification": "--trainer.max_epochs=3",
    "language_modeling": "--trainer.max_steps=6",
    "segmentation": "--trainer.max_epochs=3",
    "token_selection": "--trainer.max_epochs=2",
}


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A copy of the files, as the working folder."""
    monkeypatch.setattr(sys, "argv", ["attnswap"])
    monkeypatch.chdir(tmp_path)
    shutil.copytree(KEPT, tmp_path, dirs_exist_ok=True)
    return tmp_path


def last_values(log: Path) -> dict[str, float]:
    """The last value of each metric that is no time."""
    values: dict[str, float] = {}
    with log.open(newline="") as file:
        for row in csv.DictReader(file):
            values |= {name: float(text) for name, text in row.items() if text and "seconds" not in name}
    return values


def number(text: str) -> float | str:
    """The number that a text is, else the text."""
    try:
        return float(text)
    except ValueError:
        return text


def resume(name: str, folder: Path) -> dict[str, float]:
    """Go on with a run from its saved configuration and checkpoint, and return what it logged last."""
    run = folder / "trained" / name / "version_0"
    (checkpoint,) = (run / "checkpoints").glob("*.ckpt")
    options = ["--ckpt_path", str(checkpoint), MORE[name], "--trainer.default_root_dir", str(folder / "more")]
    main(["fit", "--config", str(run / "config.yaml"), "--trainer.logger", "null", *options])
    (log,) = (folder / "more").rglob("metrics.csv")
    return last_values(log)


@pytest.mark.parametrize("name", MORE)
def test_a_run_resumes(name, kept):
    expected = json.loads((KEPT / "resumed.json").read_text())[name]
    near = 0.1 if name == "language_modeling" else 1e-3  # its text is the source of the Python that runs
    assert resume(name, kept) == pytest.approx(expected, rel=near, abs=1e-4)


def test_a_checkpoint_alone_describes_its_model(kept):
    (checkpoint,) = kept.glob("trained/classification/version_0/checkpoints/*.ckpt")
    data = ["--data", "attnswap.datamodules.DigitsDataModule", "--data.batch_size", "400"]
    trainer = ["--trainer.default_root_dir", str(kept / "more"), "--trainer.enable_progress_bar", "false"]
    model = ["--model", "lightning_tasks.ImageClassificationTask"]
    main(["validate", *model, *data, *trainer, "--ckpt_path", str(checkpoint)])
    (log,) = (kept / "more").rglob("metrics.csv")
    before = last_values(kept / "trained" / "classification" / "version_0" / "metrics.csv")
    assert last_values(log)["val/loss"] == pytest.approx(before["val/loss"], rel=1e-4)


def test_runs_and_a_comparison_are_reported(kept):
    runs = sorted(str(path) for path in kept.glob("trained/*/version_*"))
    main(["report", *runs, "comparison", "--output", "report.html"])
    page = (kept / "report.html").read_text()
    for text in ("classification", "segmentation", "symmetric", "0.000395", "fgsm", "qk_spectrum", "val/miou"):
        assert text in page, text


def test_a_finished_comparison_is_read_and_not_run_again(kept, capsys):
    cells = {path: path.stat().st_mtime_ns for path in kept.glob("comparison/cells/*/*/result.json")}
    folder = kept / "comparison"
    summary = (folder / "summary.csv").read_text()
    main(["compare", "conf/comparison.yaml", "--seeds", "0:2", "--output", "comparison"])
    assert len(cells) == 6
    assert cells == {path: path.stat().st_mtime_ns for path in kept.glob("comparison/cells/*/*/result.json")}
    columns, *before = csv.reader(summary.splitlines())
    known = csv.DictReader((folder / "summary.csv").read_text().splitlines())  # which has more of them by now
    after = [row[column] for row in known for column in columns]
    before = [cell for row in before for cell in row]
    assert len(before) == len(after)
    for one, other in zip(before, after, strict=True):  # another scipy gives other last digits
        assert number(one) == (
            other if isinstance(number(one), str) else pytest.approx(number(other), 1e-8, nan_ok=True)
        )


def test_swapped_models_load(kept):
    outputs = torch.load(kept / "outputs.pt", weights_only=True)
    x = torch.arange(32.0).reshape(1, 4, 8) / 32
    with torch.no_grad():
        foreign = load_swapped(EncoderModule, kept / "foreign.ckpt").eval()(x)
        pickled = torch.load(kept / "pickled.pt", weights_only=False)(x)
    torch.testing.assert_close(foreign, outputs["foreign"])
    torch.testing.assert_close(pickled, outputs["pickled"])


def test_a_saved_huggingface_model_of_an_earlier_format_is_refused_by_name(kept):
    """Its mechanisms lie in a file of their own, which loaders of the weights pass by."""
    transformers = pytest.importorskip("transformers")
    with pytest.raises(
        ValueError, match=r"attnswap.json must hold format 3 .*; save the model anew, or load it with the"
    ):
        load_pretrained(transformers.BertModel, kept / "bert")
