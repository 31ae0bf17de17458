"""Folders of runs and comparisons that somebody else wrote, or that a machine left as it went down."""

import json
import os
import re

import pytest

import lightning_tasks.report.page as report_module
from lightning_tasks.analyses.inputs import mechanism_options
from lightning_tasks.compare.cell import Cell
from lightning_tasks.compare.formats import write_summary
from lightning_tasks.compare.tables import write_curves, write_results
from lightning_tasks.errors import UsageError
from lightning_tasks.recipes.variants import read_variants
from lightning_tasks.runs.heads import read_heads, write_heads
from lightning_tasks.runs.safe_files import read_result
from tests.lightning_tasks.report.report_folders import report, run_folder
from tests.rows import each_row

ROW = {"step": 0, "metric": "val/loss", "value": 1.0}
CELL = {"config": "a", "seed": 0, "rows": [ROW]}
HEADS = "step,name,layer,head_00\n"
SUMMARY = "metric,config,mean,pairs"
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 9))


def refusal(capsys, tmp_path, *folders):
    with pytest.raises(SystemExit) as stop:
        report(tmp_path, *folders)
    assert stop.value.code == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    assert "ATTNSWAP_TRACEBACK" not in said  # an error that nobody foresaw
    assert not (tmp_path / "report.html").exists()
    return said


def cell(folder, content=None, place="a/seed_0"):
    result = folder / "cells" / place / "result.json"
    result.parent.mkdir(parents=True)
    result.write_text(json.dumps(CELL) if content is None else content)
    return result


@pytest.mark.parametrize(
    "name", ["config.yaml", "hparams.yaml", "metrics.csv", "robustness.csv", "attention_heads.csv"]
)
def test_a_link_out_of_a_run_is_not_read(tmp_path, capsys, name):
    run = run_folder(tmp_path / "run")
    (run / "config.yaml").rename(tmp_path / "secret")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(tmp_path / "secret")
    said = refusal(capsys, tmp_path, run)
    assert re.search(f"run/{name} is a link out of .*/run, to .*/secret: put a copy", said)


@pytest.mark.parametrize("link", ["cells", "cells/a", "cells/a/seed_0/runs", "results.csv"])
def test_a_link_out_of_a_comparison_is_not_read(tmp_path, capsys, link):
    outside = tmp_path / "outside"
    if link == "results.csv":
        cell(tmp_path / "out")
        outside.write_text("aws_secret: 1\n")
    elif link.endswith("runs"):
        cell(tmp_path / "out")
        run_folder(outside / "version_0")
    else:
        cell(tmp_path / "whole")
        outside = tmp_path / "whole" / link
        (tmp_path / "out" / link).parent.mkdir(parents=True)
    (tmp_path / "out" / link).symlink_to(outside)
    assert "is a link out of" in refusal(capsys, tmp_path, tmp_path / "out")


def test_a_folder_that_is_a_link_itself_and_links_within_it_are_read(tmp_path):
    run = run_folder(tmp_path / "run")
    (run / "metrics.csv").rename(run / "log")
    (run / "metrics.csv").symlink_to("log")
    (tmp_path / "latest").symlink_to(run)
    _, found = report(tmp_path, tmp_path / "latest")
    assert "val/loss 2" in found.rows


@each_row(
    ("content", "says"),
    [
        ("", "Expecting value"),
        ("\0" * 9, "Expecting value"),
        ("[" * 100_000, "recursion"),
        ("[]", "it holds no result"),
        (json.dumps({**CELL, "rows": "abc"}), "rows are str"),
        (json.dumps({**CELL, "seed": 1.5}), "seed is 1.5"),
        (json.dumps({**CELL, "seconds": 10**400}), "too large"),
        (json.dumps({**CELL, "config": [1]}), "config is list"),
        (json.dumps({**CELL, "config": "\ud800"}), "surrogates"),
        *(
            (json.dumps({**CELL, "rows": [{**ROW, **change}]}), says)
            for change, says in [
                ({"value": "1"}, "value str"),
                ({"value": True}, "value bool"),
                ({"value": 10**400}, "too large"),
                ({"step": 0.5}, "step float"),
                ({"step": 2**70}, f"the step {2**70}"),
                ({"metric": None}, "metric NoneType"),
                ({"metric": "\ud800"}, "surrogates"),
                ({"config": "another", "seed": 7}, "other keys than step, metric and value"),
            ]
        ),
    ],
)
def test_a_result_that_no_cell_wrote_is_named_with_the_cure(tmp_path, capsys, content, says):
    path = cell(tmp_path / "out", content)
    said = refusal(capsys, tmp_path, tmp_path / "out")
    assert re.search(f"{path} is damaged .*{says}.*; delete it, and its cell is run again", said)
    with pytest.raises(UsageError, match=r"is damaged .*; delete it, and its cell is run again"):
        Cell("a", os.devnull, (), 0, str(tmp_path / "out")).is_finished()


def test_a_result_without_what_pairs_it_is_not_believed(tmp_path):
    cell(tmp_path / "out", json.dumps({**CELL, "fingerprint": "f"}))
    with pytest.raises(UsageError, match="has fingerprint, initial_weights, training_data, rows"):
        Cell("a", os.devnull, (), 0, str(tmp_path / "out")).is_finished()


def test_two_results_of_one_cell_are_named(tmp_path, capsys):
    first, second = cell(tmp_path / "out"), cell(tmp_path / "out", place="b/seed_0")
    assert f"{second} is of the configuration and seed of {first}" in refusal(capsys, tmp_path, tmp_path / "out")


@each_row(
    ("file", "content", "says"),
    [
        ("run/config.yaml", MERGES, "more than 1000000 entries, as its merge keys"),
        ("run/config.yaml", f"a: 0x{'f' * 6000}\n", "4300 digits"),
        ("run/config.yaml", "a: 1\n" * 300_000, "1,500,000 bytes, and at most 1,048,576"),
        ("run/config.yaml", "[" * 1500, "recursion"),
        ("run/config.yaml", "a: !!bool foo", "it is no bool .KeyError: 'foo'.*line 1, column 4"),
        ("run/config.yaml", "a: !!timestamp foo", "it is no timestamp"),
        ("run/config.yaml", "a: !!int ''", "it is no int"),
        ("run/config.yaml", f"a: {'59:' * 300}59.5", "it is no float .OverflowError"),
        ("run/config.yaml", "a: 2024-99-99", "it is no timestamp .ValueError: month"),
        ("run/attention_heads.csv", HEADS + f"{10**30},x,0,1\n", "the step"),
        ("run/attention_heads.csv", HEADS + "".join(f"{i},x,{i},1\n" for i in range(900)), "900 steps, 900 layers"),
        ("run/attention_heads.csv", HEADS + "0,x\n", "line 2 has another number"),
        ("run/robustness.csv", "", "columns are None"),
        ("run/metrics.csv", f"step{',m' * 100_000}\n", "100,001 columns"),
        ("run/metrics.csv", "step,m\n1,=1+1\n", "=1\\+1"),
        ("run/metrics.csv", "step,m\n\0,\0\n", "invalid literal"),
        ("results.csv", f"config,seed,step,metric,value\na,0,{10**400},m,1\n", "the step"),
        ("summary.csv", f"{SUMMARY}\nval/loss,a,1,3\n", "KeyError: 'difference'"),
        ("summary.csv", f"{SUMMARY}\nval/loss,a\n", "row 1 has another number of values"),
    ],
)
def test_a_file_that_no_run_wrote_is_named(tmp_path, capsys, file, content, says):
    out = tmp_path / "out"
    run_folder(out / "run")
    (out / file).write_text(content)
    if "run/" not in file and file != "results.csv":
        (out / "results.csv").write_text("config,seed,step,metric,value\na,0,0,val/loss,1\n")
    said = refusal(capsys, tmp_path, out / "run" if "run/" in file else out)
    assert re.search(f"{out / file} .*{says}", said)


def test_a_log_of_many_gigabytes_is_refused_unread(tmp_path, capsys):
    run = run_folder(tmp_path / "run")
    os.truncate(run / "metrics.csv", 1 << 34)  # holds no blocks
    assert "run/metrics.csv has 17,179,869,184 bytes, and at most 268,435,456" in refusal(capsys, tmp_path, run)


def test_a_pipe_in_the_place_of_a_file_does_not_stop_a_report(tmp_path):
    run = run_folder(tmp_path / "run")
    (run / "config.yaml").unlink()
    os.mkfifo(run / "config.yaml")
    assert "val/loss 2" in report(tmp_path, run)[1].rows


def test_names_from_files_are_text_on_the_page(tmp_path):
    evil = "--></svg></title><script>alert(1)</script>"
    rows = [{"step": step, "metric": metric, "value": 1.0} for step in (0, 1) for metric in (evil, f"{evil}/layer_0")]
    folder = tmp_path / "out"
    cell(folder, json.dumps({"config": evil, "seed": 0, "rows": rows}))
    run = run_folder(folder / "cells/a/seed_0/runs/v", model={evil: f"</pre>{evil}", "half": "\ud800"})
    (run / "attention_heads.csv").write_text(f'{HEADS}0,"{evil}",0,1\n1,"{evil}",0,1\n')
    text, found = report(tmp_path, folder)
    assert not {"script", "title>"} & found.tags
    assert "&lt;script&gt;" in text
    assert not [address for address in found.addresses if not address.startswith(("#", "data:image/png;"))]


def test_names_of_many_layers_take_bounded_time(tmp_path, monkeypatch):
    monkeypatch.setattr(report_module, "MOST_CURVES", 2)
    run = run_folder(tmp_path / "run")
    names = [f"m{i}/layer_0,n{i}_step,n{i}_epoch" for i in range(3000)]
    lines = [f"step,{','.join(names)}", *(f"{step}{',1' * 9000}" for step in (0, 1))]
    (run / "metrics.csv").write_text("\n".join(lines) + "\n")
    text, _ = report(tmp_path, run)
    assert "drawn are the first 2 of the 3000 names that monitors logged by layer" in text


def test_tables_replace_links_and_write_through_none(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    out = tmp_path / "out"
    out.mkdir()
    for name in ("results.csv", "summary.csv", "summary.md", "tables.tex", "curves.png"):
        (out / name).symlink_to(victim)
        (out / f"{name}.partial").symlink_to(victim)
    (out / "results.partial").symlink_to(victim)
    rows = [{"config": "a", "seed": 0, **ROW}]
    write_results(rows, out / "results.csv")
    write_summary([], {}, out)
    write_curves(rows, ["a"], ["val/loss"], out / "curves.png")
    assert victim.read_text() == "mine"
    assert not any(
        (out / name).is_symlink() for name in ("results.csv", "summary.csv", "summary.md", "tables.tex", "curves.png")
    )


@each_row("value", ["!!bool foo", "2024-99-99"])
def test_a_value_that_is_none_of_its_tag_is_named_wherever_yaml_is_read(tmp_path, value):
    (tmp_path / "c.yaml").write_text(f"variants:\n  a: {value}\n")
    with pytest.raises(UsageError, match=r"c\.yaml is no YAML: it is no (?s:.*)line 2, column 6"):
        read_variants(str(tmp_path / "c.yaml"))
    with pytest.raises(UsageError, match=r"--options .* is neither JSON nor YAML: it is no"):
        mechanism_options(f"a: {value}")


def test_a_whole_number_beyond_64_bits_is_a_value_like_others(tmp_path):
    path = cell(tmp_path / "out", json.dumps({**CELL, "rows": [{**ROW, "value": 10**30}]}))
    assert read_result(path)["rows"] == [{**ROW, "value": 1e30}]
    assert "val/loss 1e+30" in report(tmp_path, tmp_path / "out")[1].rows


def test_merge_keys_of_a_comparison_file_are_bounded(tmp_path):
    (tmp_path / "c.yaml").write_text(MERGES)
    with pytest.raises(UsageError, match="merge keys repeat others"):
        read_variants(str(tmp_path / "c.yaml"))


@pytest.mark.parametrize("cut", ["4,x,0,0.", "4,x", "4"])
def test_a_line_of_heads_that_was_cut_is_no_value_and_stops_no_resumed_run(tmp_path, cut):
    path = tmp_path / "attention_heads.csv"
    path.write_text(f"{HEADS}0,x,0,0.25\n{cut}")
    steps, _, values = read_heads(path)["x"]
    assert (steps, values.tolist()) == ([0], [[[0.25]]])
    write_heads(path, {"x": ([8], [0], values)}, set())
    steps, _, values = read_heads(path)["x"]
    assert (steps, values[:, 0, 0].tolist()) == ([0, 8], [0.25, 0.25])


@each_row("value", ["2020-01-01", "!!binary aGk=", "!!set {a}", "{2020-01-01: 1}", '"\\uD800"'])
def test_a_value_of_a_comparison_that_is_no_plain_data_is_named(tmp_path, value):
    (tmp_path / "base.yaml").write_text("model: {class_path: x}\n")
    (tmp_path / "c.yaml").write_text(f"base: {tmp_path}/base.yaml\nvariants: {{a: {{x: {value}}}}}\n")
    with pytest.raises(UsageError, match=r"c\.yaml: a name or value is no plain data"):
        read_variants(str(tmp_path / "c.yaml"))


def test_a_comparison_file_of_many_gigabytes_is_refused_unread(tmp_path):
    (tmp_path / "c.yaml").touch()
    os.truncate(tmp_path / "c.yaml", 1 << 34)
    with pytest.raises(UsageError, match=r"c\.yaml has 17,179,869,184 bytes"):
        read_variants(str(tmp_path / "c.yaml"))
