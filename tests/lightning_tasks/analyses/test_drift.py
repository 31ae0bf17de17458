"""`attnswap drift`: what it writes, and what it refuses."""

import csv
import math
import shutil

import pytest

pytest.importorskip("transformers")

from attention_modules.hosts.base import PLAN
from lightning_tasks.__main__ import main
from lightning_tasks.analyses.made_by import read_made_by


@pytest.fixture
def tiny(bert, texts, tmp_path):
    """The arguments of a small run."""
    arguments = ["drift", "--model", bert, "--root", texts, "--data", "gutenberg", "--sequences", 3, "--length", 8]
    return [*map(str, arguments), "--output", str(tmp_path)]


def table(output):
    with (output / "drift.csv").open() as file:
        return list(csv.DictReader(file))


def test_each_layer_and_all_together(tiny, tmp_path, capsys):
    main([*tiny, "--mechanism", "softmax,symmetric,value_residual"])
    rows = table(tmp_path)
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    assert layers[-1] == "all"
    assert len(rows) == 3 * len(layers)
    softmax, symmetric = ([row for row in rows if row["mechanism"] == name] for name in ("softmax", "symmetric"))
    assert all(float(row["output_error"]) < 1e-6 for row in softmax)
    assert all(float(row["output_error"]) > 1e-4 for row in symmetric)
    assert all(math.isnan(float(row["output_kl"])) for row in rows)  # a model without a head
    assert "first of its stack" in rows[2 * len(layers)]["refused"]
    summary = (tmp_path / "summary.md").read_text()
    assert capsys.readouterr().out == summary
    assert "## symmetric" in summary
    assert "Not swapped alone: " in summary
    assert (tmp_path / "drift.png").read_bytes()[:4] == b"\x89PNG"
    (made,) = read_made_by(tmp_path)
    assert made.command.startswith("attnswap drift --model ")


def test_options_and_layers(tiny, tmp_path):
    main([*tiny, "--mechanism", "rpc", "--options", "{iterations: 2, lam: 1.0}", "--layers", "1"])
    one, together = table(tmp_path)
    assert one["options"] == "{iterations: 2, lam: 1.0}"
    assert one["output_error"] == together["output_error"]


def test_a_folder_that_was_saved_swapped_is_refused(tiny, bert, tmp_path, capsys):
    shutil.copytree(bert, tmp_path / "model")
    (tmp_path / "model" / PLAN).write_text("{}")
    arguments = [str(tmp_path / "model") if one == str(bert) else one for one in tiny]
    with pytest.raises(SystemExit):
        main([*arguments, "--mechanism", "sink"])
    assert "was saved with swapped attention (attnswap.json)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mechanism", "nothing"], "unknown attention mechanism 'nothing'"),
        (["--mechanism", "rpc,,sink"], "none twice"),
        (["--mechanism", "rpc,sink", "--options", "{iterations: 3}"], "give one --mechanism"),
        (["--mechanism", "rpc", "--options", "{iterations: 0}"], "must be an integer of at least 1"),
        (["--mechanism", "rpc", "--options", "[1]"], "must be a mapping"),
        (["--mechanism", "sink", "--length", "0"], "--length must be at least 1"),
        (["--mechanism", "sink", "--layers", "9"], "9"),
    ],
)
def test_what_makes_no_sense_is_refused(tiny, tmp_path, arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*tiny, *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "drift.csv").exists()
