"""The scripts of examples/ run as they are, and stay short enough to copy."""

import runpy
from pathlib import Path

import matplotlib
import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LAST_LINE = {
    "swap_a_vit": "restored, bitwise: True",
    "own_mechanism": "val/attention/entropy/mean",
    "compare_two_mechanisms": "symmetric - softmax: 95% interval [",
    "positional_or_semantic": "meaning wins in all 3 draws from alpha = 0.75 on",
}
FILES = {"swap_a_vit": ["attention.png"], "positional_or_semantic": ["transition.png"]}


SLOW = ("compare_two_mechanisms", "positional_or_semantic")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in LAST_LINE]
)
@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers", "ignore:.*`SLURM.*")
def test_an_example_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with matplotlib.rc_context({"backend": "agg"}):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith(LAST_LINE[name])
    assert [path.name for path in tmp_path.iterdir()] == FILES.get(name, [])


def test_every_example_is_run_and_short():
    files = sorted(EXAMPLES.glob("*.py"))
    assert {path.stem for path in files} == set(LAST_LINE)
    for path in files:
        assert len(path.read_text(encoding="utf-8").splitlines()) < 60, path.name
