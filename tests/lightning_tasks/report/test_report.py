"""`attnswap report`: what the page says of runs, that it needs no network, and what it refuses."""

import json
import math
import re

import numpy as np
import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger

from attention_modules import swap_attention
from lightning_tasks.__main__ import main
from lightning_tasks.callbacks import AttentionMonitor, SwapAttention
from lightning_tasks.report.page import final_table, order, robustness_notes, robustness_table
from lightning_tasks.report.svg import heat_map, layer_metrics
from lightning_tasks.runs.divergence import SKIPPED, diverged_cells
from lightning_tasks.runs.log import merge_epochs
from lightning_tasks.runs.robustness import Row, write_csv
from lightning_tasks.runs.run import Run, read_run
from lightning_tasks.runs.settings import differences, flatten, read_run_settings, swapped
from tests.lightning_tasks.callbacks.modules import TinyLM, batches, fit
from tests.lightning_tasks.report.report_folders import SWAP, report, run_folder
from tests.rows import each_row

HOSTILE = "<script>alert('$x$')</script>"


def test_runs_that_differ_in_the_seed_are_one_configuration(tmp_path):
    seeds = [run_folder(tmp_path / "a" / f"version_{seed}", seed, seed / 10) for seed in (0, 1)]
    other = run_folder(tmp_path / "b" / "version_0", data={"name": HOSTILE}, model={"lr": 0.5})
    rows = [Row("clean", "", "", "accuracy", value, 10) for value in (0.5, 0.7)]
    for folder, row in zip(seeds, rows, strict=True):
        write_csv([row], folder / "robustness.csv")
    text, found = report(tmp_path, *seeds, other)
    assert "3 runs of 2" in " ".join(text.split())
    assert "<title>attnswap report: 3 runs of 2 configurations</title>" in text
    rows = found.rows
    assert "val/loss 2.05 ± 0.071 (2) 2" in rows
    assert "model.lr – 0.5" in rows
    assert "a rpc (iterations 4) in layers 0" in rows
    assert "clean, accuracy 60.0% ± 14.1" in rows
    assert not any(row.startswith("seed_everything") or "logger" in row for row in rows)
    assert text.count('<figure role="img"') == 2 + 2  # two curves; a heat map per configuration
    referred = set(re.findall(r"""url\(#([^)]+)\)|href="#([^"]+)""", text))
    ids = re.findall(r' id="([^"]+)"', text)
    assert referred
    assert all(ids.count(one or other) == 1 for one, other in referred)


def test_a_run_that_logged_nothing_is_said(tmp_path):
    silent = run_folder(tmp_path / "b" / "version_0", 1)
    (silent / "metrics.csv").write_text("")
    text, _ = report(tmp_path, run_folder(tmp_path / "a" / "version_0", 0, 0.1), silent)
    assert f"{silent}/metrics.csv holds no number" in " ".join(text.split())


def test_a_run_of_a_script_says_what_was_swapped_and_what_heads_did(tmp_path):
    """No configuration is saved there: the callback's own hyper-parameters, and the monitor's table."""
    logger = CSVLogger(tmp_path, name="script")
    callbacks = [SwapAttention("rpc", {"iterations": 2}, layers=[1]), AttentionMonitor(every_n_steps=1)]
    fit(TinyLM(), callbacks, batches(3), batches(1), logger=logger)
    settings = read_run_settings(tmp_path / "script" / "version_0")
    assert swapped(settings) == ["rpc (iterations 2) in layers net.encoder.layers.1.self_attn"]
    assert settings["model"]["lr"] == 0.1  # what the module keeps is there as before
    run = read_run(tmp_path / "script" / "version_0")
    values = {row["step"]: row["value"] for row in run.rows if row["metric"] == "attention/entropy/layer_01/head_01"}
    assert list(values) == [0, 1, 2]
    text, found = report(tmp_path, tmp_path / "script" / "version_0")
    assert "script rpc (iterations 2) in layers net.encoder.layers.1.self_attn" in found.rows
    for name in ("attention/entropy by head", "val/attention/entropy by head"):
        assert f"<b>{name}</b>" in text
    assert not any("head_0" in row for row in found.rows)  # heat maps alone: they are too many for a table


def test_a_table_of_heads_that_cannot_be_read_is_named(tmp_path, capsys):
    folder = run_folder(tmp_path / "run")
    (folder / "attention_heads.csv").write_text("step,layer\n0,1\n")
    with pytest.raises(SystemExit):
        report(tmp_path, folder)
    assert re.search("attention_heads.csv cannot be read: KeyError", " ".join(capsys.readouterr().err.split()))


def test_the_page_is_escaped_and_needs_no_network(tmp_path):
    folder = run_folder(tmp_path / "<b>bold" / "version_0", data={"name": HOSTILE})
    other = run_folder(tmp_path / "plain" / "version_0")
    log = folder / "metrics.csv"
    log.write_text(log.read_text().replace("val/loss", f"val/{HOSTILE}"))
    text, found = report(tmp_path, folder, other)
    assert "script" not in found.tags
    assert "<b>bold" not in text
    assert "&lt;script&gt;" in text
    assert "&lt;b&gt;bold" in text
    assert all(address.startswith(("#", "data:")) for address in found.addresses)
    assert not re.search(r"@import|url\((?!#)", text)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    assert "currentColor" in text


def test_a_comparison_by_its_table_alone(tmp_path):
    folder = tmp_path / "compared"
    folder.mkdir()
    lines = [
        f"{config},{seed},5,val/loss,{seed + add}" for config, add in (("plain", 0), ("rpc", 1)) for seed in (1, 3)
    ]
    (folder / "results.csv").write_text("\n".join(["config,seed,step,metric,value", *lines]))
    head = "metric,config,seeds,mean,std,reference,pairs,difference,low,high,detectable"
    (folder / "summary.csv").write_text(
        f"{head}\nval/loss,plain,2,2,1,,0,,,,\nval/loss,rpc,2,3,1,plain,2,1,0.5,1.5,2\n"
    )
    _, found = report(tmp_path, folder)
    rows = found.rows
    assert "val/loss 2 ± 1.4 (2) 3 ± 1.4 (2)" in rows
    assert "val/loss rpc plain too few pairs 1 [0.5, 1.5] 2 0.02504 2" in rows
    assert "plain not known: the folder has neither config.yaml nor hyper-parameters" in rows


def test_a_comparison_that_is_not_finished(tmp_path):
    cells = tmp_path / "compared" / "cells"
    run = run_folder(cells / "rpc" / "seed_0" / "runs" / "recipe" / "version_0")
    result = {"config": "rpc!", "seed": 0, "rows": [{"step": 1, "metric": "val/loss", "value": float("nan")}]}
    (run.parents[2] / "result.json").write_text(json.dumps(result))
    (cells / "rpc" / "seed_1").mkdir()
    text, found = report(tmp_path, tmp_path / "compared")
    assert "not finished: rpc/seed_1" in text
    rows = found.rows
    assert "val/loss not finite" in rows
    assert "rpc! rpc (iterations 4) in layers 0" in rows


@each_row(
    ("file", "content", "message"),
    [
        (None, None, "no such folder"),
        ("other.txt", "", "no folder of a run or comparison"),
        ("metrics.csv", "step,loss\n0,nought\n", "metrics.csv cannot be read: ValueError.*nought"),
        ("metrics.csv", "loss\n1\n", "metrics.csv cannot be read: .*no column step, but loss"),
        ("metrics.csv", "step,loss\n0,1,2\n", "metrics.csv cannot be read"),
        ("config.yaml", "a: [", "config.yaml cannot be read"),
        ("config.yaml", "- 1", "config.yaml holds list"),
        ("hparams.yaml", "swapped_attention: [3]", r"hparams.yaml cannot be read.*list of mappings, got \[3\]"),
        ("hparams.yaml", "swapped_attention: 3", "hparams.yaml cannot be read.*list of mappings, got 3"),
        ("hparams.yaml", "swapped_attention: [{layers: [a]}]", "hparams.yaml cannot be read.*KeyError: 'mechanism'"),
        ("config.yaml", "a: {class_path: SwapAttention, init_args: {layers: 1}}", "config.yaml cannot be read.*'int'"),
        ("robustness.csv", "a,b\n", "robustness.csv cannot be read.*columns"),
        ("results.csv", "config,seed\nrpc,0\n", "results.csv cannot be read: KeyError"),
        ("results.csv", "config,seed,step,metric,value\n", "no cell of this comparison is finished"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, capsys, file, content, message):
    folder = tmp_path / "bad run"
    if file is not None:
        folder.mkdir()
        (folder / "metrics.csv").write_text("step,loss\n0,1\n")
        (folder / file).write_text(content)
        if file == "other.txt":
            (folder / "metrics.csv").unlink()
    with pytest.raises(SystemExit) as stop:
        report(tmp_path, run_folder(tmp_path / "good"), folder)
    assert stop.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(message, said)
    assert str(folder) in said
    assert not list(tmp_path.glob("report.html*"))


def test_aliases_that_stand_for_very_many_values_are_refused(tmp_path, capsys):
    folder = run_folder(tmp_path / "a", 0)
    rows = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    (folder / "config.yaml").write_text("\n".join(rows))
    with pytest.raises(SystemExit) as stop:
        main(["report", str(folder), "--output", str(tmp_path / "page.html")])
    assert stop.value.code == 2
    assert re.search(r"config.yaml stands for more than 1000000 values, as its aliases", capsys.readouterr().err)
    (folder / "config.yaml").write_text("a: &a [*a]")
    with pytest.raises(SystemExit):
        main(["report", str(folder), "--output", str(tmp_path / "page.html")])
    assert "config.yaml is nested more than" in capsys.readouterr().err


def test_the_output_must_be_a_file_in_a_folder(tmp_path, capsys):
    folder = run_folder(tmp_path / "run")
    with pytest.raises(SystemExit):
        main(["report", str(folder), "--output", str(tmp_path / "absent" / "report.html")])
    assert "give a file in a folder that is there" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["report", str(folder), "--output", str(tmp_path)])
    assert "is a folder: give a file, as" in capsys.readouterr().err


def test_epoch_means_of_step_values_are_left_out():
    rows = [{"metric": name, "step": 0, "value": 1.0} for name in ("loss_step", "loss_epoch", "acc_epoch")]
    assert [row["metric"] for row in merge_epochs(rows)] == ["loss", "acc_epoch"]


def test_heat_map_is_a_mean_over_seeds_with_gaps():
    names = ["val/x/layer_10", "val/x/layer_02", "x/layer_00/pass_1", "val/x/mean"]
    found = layer_metrics(names)
    assert found == {"val/x": ["val/x/layer_02", "val/x/layer_10"], "x by pass": ["x/layer_00/pass_1"]}
    rows = [
        {"metric": "val/x/layer_02", "step": step, "value": value} for step, value in ((1, 2.0), (1, 4.0), (0, 1.0))
    ]
    steps, values = heat_map([*rows, {"metric": "val/x/layer_10", "step": 1, "value": 7.0}], found["val/x"])
    assert steps == [0, 1]
    np.testing.assert_array_equal(values, [[1.0, 3.0], [np.nan, 7.0]])


def test_one_callback_more_does_not_shift_the_others():
    other = {"class_path": "x.Other", "init_args": {"a": 1}}
    settings = {"one": {"callbacks": [SWAP]}, "two": {"callbacks": [other, SWAP]}}
    assert differences(settings) == {"callbacks[Other]": [None, "yes"]}
    settings["two"]["model"] = {"init_args": {"lr": 1, "num_classes": 10}}  # of a resumed run, which names its classes
    settings["one"] = {"callbacks": [SWAP, {**other, "init_args": {"a": 2}}], "model": {"init_args": {"lr": 2}}}
    settings["two"]["ckpt_path"] = "last.ckpt"
    found = differences(settings)
    assert list(found.items()) == [("model.lr", ["2", "1"]), ("callbacks[Other].a", ["2", "1"])]
    assert flatten({"callbacks": [other, other]})["callbacks[Other 2].a"] == "1"


def test_swaps_of_models_and_callbacks():
    model = {"mechanism": "symmetric", "options": None, "layers": [1], "scheduler_interval": "step"}
    model["other_attention"] = "rpc"
    assert swapped({"trainer": {"callbacks": [SWAP]}, "model": {"init_args": model}}) == [
        "rpc (iterations 4) in layers 0",
        "symmetric in layers 1, rpc in the others",
    ]
    assert swapped({"model": {"mechanism": "softmax", "options": {}}}) == ["nothing that the settings say: softmax"]


def test_a_swap_that_another_replaced_is_not_named(tmp_path):
    """A module that was swapped before, as a task's own `mechanism` does it, and a callback that comes after it."""
    module, logger = TinyLM(), CSVLogger(tmp_path, name="script")
    swap_attention(module, "symmetric")
    fit(module, [SwapAttention("rpc", iterations=2, layers=[1])], batches(1), batches(1), logger=logger)
    folder = tmp_path / "script" / "version_0"
    layers = "net.encoder.layers.{}.self_attn"
    texts = [f"symmetric in layers {layers.format(0)}", f"rpc (iterations 2) in layers {layers.format(1)}"]
    assert swapped(read_run_settings(folder)) == texts
    model = {"mechanism": "symmetric", "options": {}, "scheduler_interval": "step"}
    told = {"model": model, "trainer": {"callbacks": [SWAP]}}
    (folder / "config.yaml").write_text(yaml.safe_dump(told))
    assert swapped(read_run_settings(folder)) == texts
    assert differences({"one": told, "two": read_run_settings(folder)}) == {}
    (folder / "hparams.yaml").unlink()
    assert len(swapped(read_run_settings(folder))) == 2


def test_hyper_parameters_of_foreign_modules_are_never_built(tmp_path):
    (tmp_path / "hparams.yaml").write_text(
        "act: !!python/name:torch.nn.GELU ''\nsize: !!python/tuple [1, 2]\n"
        f"run: !!python/object/apply:os.system ['touch {tmp_path}/built']\n"
    )
    known = {"act": "torch.nn.GELU", "size": [1, 2], "run": [f"touch {tmp_path}/built"]}
    assert read_run_settings(tmp_path) == {"model": known}
    assert not (tmp_path / "built").exists()


def test_scores_come_before_what_monitors_logged():
    metrics = ["attention/entropy/mean", "train/loss", "val/attention/entropy/mean", "val/top1", "val/loss"]
    assert order(metrics) == [
        "val/loss",
        "val/top1",
        "train/loss",
        "val/attention/entropy/mean",
        "attention/entropy/mean",
    ]


def test_the_score_of_a_run_that_diverged_is_no_number():
    rows = [
        {"config": "a", "seed": seed, "step": 1, "metric": metric, "value": value}
        for seed, loss in enumerate((1.0, 1.1, float("nan")))
        for metric, value in (("val/loss", loss), ("val/top1", 0.8 - 0.35 * seed))
    ]
    found = final_table(rows, ["a"], ["val/top1"], diverged_cells(rows))
    assert found == [("val/top1", [("not finite", 3)])]
    assert final_table(rows, ["a"], ["val/top1"]) == [("val/top1", [("0.45 ± 0.35", 3)])]


def test_a_perplexity_that_is_infinite_in_one_run_has_no_mean(tmp_path):
    rows = [Row("clean", "", "", "perplexity", value) for value in (math.inf, 20.0)]
    runs = [Run("a", seed, tmp_path, [], None, [row]) for seed, row in enumerate(rows)]
    assert robustness_table(runs, ["a"]) == [(("clean", "", "", "perplexity"), ["not finite"])]
    assert robustness_table(runs[:1], ["a"])[0][1] == ["not finite"]


def test_what_was_measured_on_other_samples_is_said(tmp_path):
    whole = [Row("mean corruption", "", "", "accuracy", 0.5, 500)]
    part = [Row("mean corruption", "", "", "accuracy", 0.9, 500, note="2 of 15 corruptions")]
    runs = [Run(name, 0, tmp_path, [], None, rows) for name, rows in (("a", whole), ("b", part))]
    (text,) = robustness_notes(runs, ["a", "b"])
    assert text == "mean corruption, accuracy: a: 500 samples; b: 500 samples, 2 of 15 corruptions"
    assert robustness_notes(runs[:1], ["a"]) == []
    seeds = [Run("a", seed, tmp_path, [], None, rows) for seed, rows in enumerate((whole, part))]
    assert robustness_table(seeds, ["a"])[0][1] == ["of several sets"]


def test_the_robustness_of_a_run_that_diverged_is_no_number(tmp_path):
    unmeasured = Row("mean corruption", "", "", "accuracy", float("nan"), note="28 pixels are too few")
    runs = [
        Run("a", seed, tmp_path, [], None, [Row("clean", "", "", "accuracy", 0.8 - 0.35 * seed, 10), unmeasured])
        for seed in (0, 1, 2)
    ]
    lost = {("a", 2): "val/loss is nan at step 1"}
    for found, clean in ((runs, "NaN"), (runs[:2], "62.5% ± 24.7")):
        shown = {test: cells for (test, *_), cells in robustness_table(found, ["a"], lost)}
        assert shown == {"clean": [clean], "mean corruption": ["not measured"]}


def test_a_page_has_no_score_of_a_run_that_diverged(tmp_path):
    seeds = [run_folder(tmp_path / "a" / f"version_{seed}", seed, offset) for seed, offset in enumerate((0, np.nan))]
    for folder in seeds:
        log = folder / "metrics.csv"
        head, *lines = log.read_text().splitlines()
        log.write_text("\n".join([f"{head},val/top1,{SKIPPED}", *(f"{line},0.8,3" for line in lines)]) + "\n")
        write_csv([Row("clean", "", "", "accuracy", 0.5, 10)], folder / "robustness.csv")
    text, found = report(tmp_path, *seeds)
    assert "a (1 of 2 diverged)</li>" in text
    assert "val/top1 not finite (2)" in found.rows
    assert f"{SKIPPED} 3 ± 0 (2)" in found.rows, "what the guard says is no score"
    assert "clean, accuracy NaN" in found.rows
