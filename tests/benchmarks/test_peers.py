"""The benchmark beside peers, at tiny sizes; nothing of time is asserted."""

import csv
from dataclasses import replace

import pytest
import torch

from benchmarks import common, peers

TINY = peers.Text(1, 8, 50, 2)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(peers, "SMALL", TINY)
    monkeypatch.setattr(peers, "LARGE", TINY)
    monkeypatch.setattr(peers, "CLASSIFIED", peers.Images(32, 2))
    monkeypatch.setattr(peers, "MASKED", peers.Images(32, 1))


@pytest.mark.slow
def test_a_row_a_peer_with_as_many_parameters(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    peers.main(["--threads", "1", "--rounds", "2"])
    left_out = [line for line in capsys.readouterr().out.splitlines() if "is left out" in line]
    with (tmp_path / "peers.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) + len(left_out) == len(peers.contests())
    assert all(float(row["theirs / ours"]) > 0 and row["rounds"] == "2" for row in rows)
    for row in rows:
        ours, theirs = (int(row[name].replace(",", "")) for name in ("parameters, ours", "parameters, theirs"))
        assert abs(ours - theirs) <= 200
    assert "--rounds 2" in (tmp_path / "peers.md").read_text()


def missing(batch):
    raise ModuleNotFoundError("No module named 'litgpt'")


def test_a_peer_that_is_not_installed_is_left_out_and_said(tiny, monkeypatch, capsys):
    contest = replace(peers.contests()["litgpt_small"], peer=missing)
    monkeypatch.setattr(peers, "contests", lambda: {"litgpt_small": contest})
    peers.main(["--threads", "1", "--only", "litgpt_small", "--print_only"])
    assert "litgpt_small is left out: No module named 'litgpt'" in capsys.readouterr().out


@pytest.mark.parametrize("peer", ["litgpt", "gpt2"])
def test_a_peer_takes_the_same_targets(peer):
    """The first loss on tokens that say nothing is near that of a guess, for next tokens that are shifted once."""
    if peer == "litgpt":
        pytest.importorskip("litgpt")
    torch.manual_seed(0)
    batch = TINY.batch()
    model, step = getattr(TINY, peer)(batch)
    for _ in range(150):
        step()
    with torch.no_grad():
        out = model(batch[0])
    logits = out if isinstance(out, torch.Tensor) else out.logits
    assert (logits.argmax(-1) == batch[1]).float().mean() > 0.9
