"""A killed evaluation continues; rows of other weights, settings or data are not used."""

import importlib
import inspect
import json
import linecache
import os
import signal
import sys
from dataclasses import asdict
from importlib.metadata import version

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from PIL import Image

from attention_modules import swap_attention
from lightning_tasks.callbacks import RobustnessEvaluation
from lightning_tasks.errors import UsageError
from lightning_tasks.robustness.attacks.table import ATTACKS
from lightning_tasks.robustness.images import corruption_measurement
from lightning_tasks.robustness.subject import Subject
from lightning_tasks.runs import measurements as suite
from lightning_tasks.runs.measurements import RowStore, fingerprint
from lightning_tasks.runs.robustness import Row, read_csv
from tests.lightning_tasks.callbacks.robustness.evaluations import QUICK, evaluate, trainer, values
from tests.lightning_tasks.robustness.modules import TinyClassifier, TinyImages


def test_a_killed_run_goes_on_with_what_is_done(tmp_path, module, counted):
    calls, failing = counted
    whole = values(evaluate(tmp_path / "whole", module))
    calls.clear()
    failing.add("square")
    with pytest.raises(SystemExit):  # Lightning's for an interrupt
        evaluate(tmp_path / "cut", module)
    assert calls == ["fgsm", "fgsm", "square"]
    assert [row.name for row in read_csv(tmp_path / "cut/demo/version_0/robustness.csv")] == [*[""] * 3, *["fgsm"] * 2]
    failing.clear()
    calls.clear()
    assert values(evaluate(tmp_path / "cut", module)) == whole
    assert calls == ["square", "square"]
    calls.clear()
    assert values(evaluate(tmp_path / "cut", module)) == whole
    assert calls == []
    assert len((tmp_path / "cut/demo/robustness_rows.jsonl").read_text().splitlines()) == 6


def test_a_terminated_run_ends_within_a_measurement_and_keeps_what_is_done(tmp_path, module, monkeypatch):
    def terminated(*args, original=ATTACKS["square"].function, **options):
        signal.raise_signal(signal.SIGTERM)  # to which Lightning only sets a flag outside of training
        return original(*args, **options)

    terminated.__signature__ = inspect.signature(ATTACKS["square"].function)
    monkeypatch.setitem(ATTACKS, "square", type(ATTACKS["fgsm"])(terminated, False, ATTACKS["square"].passes))
    with pytest.raises(SIGTERMException):
        evaluate(tmp_path, module, TinyImages(), eps=["4/255"])
    done = [row.name for row in read_csv(tmp_path / "demo/version_0/robustness.csv")]
    assert done == ["", "", "", "fgsm"]


def test_rows_stay_in_a_run_folder_of_another_name(tmp_path, module):
    runner = trainer(tmp_path / "run", RobustnessEvaluation(**QUICK), logger=False)
    runner.test(module, TinyImages(), verbose=False)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert (tmp_path / "run" / "robustness_rows.jsonl").is_file()


def test_rows_of_folders_whose_content_changed_are_not_used(folders, tmp_path, module):
    def samples():
        rows = evaluate(tmp_path, module, attacks=[], ood={"far": str(folders / "outside")}, rows=str(kept))
        return len(kept.read_text().splitlines()), next(row.value for row in rows if row.metric == "auroc")

    kept, first = tmp_path / "rows.jsonl", folders / "outside" / "x" / "0.png"
    before = samples()
    assert samples() == before
    stat = first.stat()
    Image.new("RGB", (14, 14), (255, 0, 0)).save(first)
    first.write_bytes(first.read_bytes().ljust(stat.st_size, b"\0"))  # the same size,
    os.utime(first, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # and the same time
    assert first.stat().st_size == stat.st_size
    assert samples()[0] == before[0] + 1


def test_rows_of_other_weights_settings_or_data_are_not_used(tmp_path, module, counted):
    calls, _ = counted
    one = {"attacks": [{"name": "pgd", "steps": 2}], "eps": ["4/255"], "rows": str(tmp_path / "rows.jsonl")}

    def ran(changed, data=None, **options):
        calls.clear()
        evaluate(tmp_path, changed, data, **{**one, **options})
        return len(calls)

    assert ran(module) == 1
    assert ran(module) == 0
    assert ran(module, num_images=20) == 1
    assert ran(module, TinyImages(seed=2)) == 1
    assert ran(module, seed=3) == 1
    assert ran(module, attacks=[{"name": "pgd", "steps": 3}]) == 1
    assert ran(module, eps=["5/255"]) == 1
    assert ran(module, eps=["5/255", "4/255"]) == 0  # each alone is known
    assert ran(module, eps=[0.0313725]) == ran(module, eps=[8 / 255]) == 1  # which the table writes alike
    swap_attention(module, "rpc", iterations=2, lam=4.0)
    assert ran(module) == 1
    assert ran(module) == 0
    swap_attention(module, "rpc", iterations=3, lam=4.0)  # the same weights
    assert ran(module) == 1
    with torch.no_grad():
        next(module.parameters()).add_(1e-6)
    assert ran(module) == 1


def test_a_line_that_was_cut_short_is_measured_again(tmp_path, module, counted):
    calls, _ = counted
    rows = tmp_path / "rows.jsonl"
    whole = values(evaluate(tmp_path, module, rows=str(rows)))
    rows.write_bytes(rows.read_bytes()[:-40])
    calls.clear()
    with pytest.warns(UserWarning, match="line 6, is cut short"):
        assert values(evaluate(tmp_path, module, rows=str(rows))) == whole
    assert len(calls) == 1
    calls.clear()
    with pytest.warns(UserWarning, match="line 6"):
        evaluate(tmp_path, module, rows=str(rows))
    assert calls == []
    assert json.loads(rows.read_text().splitlines()[-1])["rows"][0]["name"] == "square"


@pytest.mark.parametrize(
    "change",
    [
        {"value": "abc"},
        {"value": None},
        {"value": True},
        {"value": 10**400},
        {"samples": "zz"},
        {"note": 1},
        {"of_a_later_version": 1},
    ],
)
def test_a_row_of_other_types_is_measured_again(tmp_path, change):
    path, row = tmp_path / "rows.jsonl", Row("clean", "", "", "perplexity", float("inf"), 10)
    RowStore(path, Row).add("key", [row])
    assert RowStore(path, Row).rows("key")[0].value == float("inf")
    path.write_text(json.dumps({"key": "key", "rows": [{**asdict(row), **change}]}) + "\n")
    with pytest.warns(UserWarning, match="line 1, .* values of other types: measured again"):
        assert RowStore(path, Row).rows("key") is None
    path.write_text('{"key": "key", "rows": ["x"]}\n')
    with pytest.warns(UserWarning, match="line 1, .* values of other types: measured again"):
        RowStore(path, Row)


def test_a_line_that_is_nested_without_end_is_passed_over(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("[" * 100_000 + "\n")
    with pytest.warns(UserWarning, match="line 1, is cut short"):
        RowStore(path, Row)


@pytest.mark.parametrize("target", ["victim", "absent"])
def test_kept_rows_are_not_read_or_written_through_a_link(tmp_path, module, target):
    folder = tmp_path / "demo"
    folder.mkdir()
    (tmp_path / "victim").write_text("mine\n")
    (folder / "robustness_rows.jsonl").symlink_to(tmp_path / target)
    with pytest.raises(UsageError, match=r"robustness_rows.jsonl (is a link out of|cannot be read)"):
        evaluate(tmp_path, module)
    assert (tmp_path / "victim").read_text() == "mine\n"
    assert not (tmp_path / "absent").exists()


def test_the_tables_replace_links(tmp_path, module):
    (tmp_path / "victim").write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    for name in ("robustness.csv", "robustness.md"):
        (run / name).symlink_to(tmp_path / "victim")
    trainer(run, RobustnessEvaluation(**QUICK), logger=False).test(module, TinyImages(), verbose=False)
    assert (tmp_path / "victim").read_text() == "mine"
    assert (run / "robustness.md").read_text().startswith("| test |")


def test_a_test_that_fails_or_has_no_batch_leaves_no_table_of_an_earlier_one(tmp_path, module, monkeypatch):
    evaluation = RobustnessEvaluation(**{**QUICK, "attacks": []})

    def fails(*batch):
        raise RuntimeError("no test")

    def measure(**options):
        trainer(tmp_path, evaluation, **options).test(module, TinyImages(), verbose=False)

    measure()
    assert evaluation.table
    measure(limit_test_batches=0)
    assert evaluation.table == []
    measure()
    monkeypatch.setattr(module, "test_step", fails)
    with pytest.raises(RuntimeError, match="no test"):
        measure()
    assert evaluation.table == []


def test_another_version_of_a_library_makes_another_fingerprint(monkeypatch):
    module = torch.nn.Linear(2, 2)
    for name in ("torch", "torchvision", "timm", "transformers", "torchmetrics", "numpy", "pillow"):
        before = fingerprint(module, [])
        monkeypatch.setattr(suite, "version", lambda asked, name=name: "0.0.1" if asked == name else version(asked))
        assert fingerprint(module, []) != before
        monkeypatch.undo()
    subject = Subject(module, torch.rand(1, 3, 32, 32), torch.zeros(1, dtype=torch.int64), torch.device("cpu"))
    before = corruption_measurement(subject, "fog", 1).what
    monkeypatch.setattr(suite, "version", lambda asked: "0.0.1")
    assert corruption_measurement(subject, "fog", 1).what != before


def test_a_buffer_that_no_checkpoint_holds_makes_another_fingerprint():
    module = torch.nn.Module()
    module.register_buffer("mean", torch.zeros(3), persistent=False)
    before = fingerprint(module, [])
    assert fingerprint(module, []) == before
    module.mean += 0.5
    assert fingerprint(module, []) != before


class Shifted(TinyClassifier):
    shift = 0.0

    def forward(self, images):
        return super().forward(images - self.shift)


@pytest.mark.parametrize(
    "shift",
    [
        *(0.25, (0.25, 0.5), [0.25], {"red": 0.25}, torch.tensor([0.25]), np.array([0.25]), [torch.ones(2).bool()]),
        *(np.array(["cat", "dog"]), np.array([1.0, 2.0])[::-1], np.array([None, 1]), np.array([1.0], dtype=">f8")),
        *(torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr(), torch.ones(2, device="meta"), np.str_("it")),
        *({"scale": None, "window": 3}, {1, 2}, [frozenset("ab")], torch.float16, slice(3), range(4), 2j, None),
    ],
)
def test_rows_of_another_forward_pass_are_not_used(shift):
    """By what is in no state."""
    module, again = Shifted(), Shifted()
    again.load_state_dict(module.state_dict())
    identity = fingerprint(module, [])
    module.shift = again.shift = shift
    assert fingerprint(module, []) == fingerprint(again, []) != identity
    again.shift = [shift, 1]
    assert fingerprint(module, []) != fingerprint(again, [])
    again.shift = [shift]
    again.shift.append(again.shift)
    assert fingerprint(again, []) == identity, "a list that holds itself is passed over"


def test_rows_of_code_that_was_changed_are_not_used(tmp_path, monkeypatch):
    path = tmp_path / "changing_model.py"
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for scale, default in (("2.0", "1"), ("3.0", "1"), ("3.0", "2")):
        path.write_text(
            f"import torch\n\nclass Net(torch.nn.Module):\n    def forward(self, images, more={default}):\n"
            f"        return images * {scale} * more\n"
        )
        linecache.checkcache()
        sys.modules.pop("changing_model", None)
        importlib.invalidate_caches()
        found.append(fingerprint(importlib.import_module("changing_model").Net(), []))
    assert len({*found}) == 3
