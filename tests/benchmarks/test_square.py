"""Our Square with rules of the library, as the benchmark asks it."""

import csv
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks import common, square
from lightning_tasks.robustness.attacks.square import square_share

MODEL = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 4))
IMAGES = torch.rand(5, 3, 8, 8)
OURS = square.OURS._inside, square.OURS._REDRAWS, square.OURS.square_share


@pytest.mark.parametrize("name", [name for name in square.ATTACKS if name.startswith("ours")])
def test_a_rule_holds_inside_its_call_alone(name, monkeypatch):
    seen, attack = [], square.OURS.square

    def watched(*given, **options):
        seen.append((square.OURS._inside, square.OURS._REDRAWS, square.OURS.square_share))
        return attack(*given, **options)

    monkeypatch.setattr(square.OURS, "square", watched)
    points = square.ATTACKS[name](MODEL, IMAGES, MODEL(IMAGES).argmax(1), eps=8 / 255, queries=20, seed=0)
    assert (points - IMAGES).abs().max() <= 8 / 255 + 1e-6
    theirs = {"places": square.inner, "draws": 1, "schedule": square.as_of_ten_thousand}
    own = dict(zip(theirs, OURS, strict=True))
    rules = {"all three": theirs, "ours": {}}.get(name.removeprefix("ours, "))
    rules = {name.split()[1]: theirs[name.split()[1]]} if rules is None else rules
    assert seen == [tuple((own | rules).values())]
    assert (square.OURS._inside, square.OURS._REDRAWS, square.OURS.square_share) == OURS


def test_places_of_the_library_end_before_the_border():
    generator = torch.Generator()
    assert not square.inner(8, 3, 1000, generator)[:, -1].any()
    assert square.OURS._inside(8, 3, 1000, generator)[:, -1].any()


def test_the_table_has_a_row_for_each_search_and_says_how_it_was_made(tmp_path, monkeypatch, capsys):
    pytest.importorskip("pyautoattack")
    data = SimpleNamespace(
        prepare_data=lambda: None,
        setup=lambda stage: None,
        test_dataloader=lambda: [(IMAGES, MODEL(IMAGES).argmax(1))],
    )
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(square, "CIFAR10DataModule", lambda **options: data)
    monkeypatch.setattr(square.ImageClassificationTask, "load_from_checkpoint", lambda path, **options: MODEL)
    given = {"images": "5", "queries": "3", "eps": "0.001", "seeds": "2", "made_by": "fit it", "name": "tiny"}
    square.main(["a.ckpt", *(text for name, value in given.items() for text in (f"--{name}", value))])
    with (tmp_path / "tiny.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["Square"] for row in rows] == [*square.ATTACKS]
    assert {row["left, %, by seed"] for row in rows} == {"100.0, 100.0"}, "so near nothing is lost"
    text = (tmp_path / "tiny.md").read_text()
    assert "CHECKPOINT --images 5 --queries 3 --eps 0.001 --seeds 2 --made_by 'fit it' --name tiny`" in text
    assert "The checkpoint is that of `fit it`, which is right on 100.0% of these images." in text
    with pytest.raises(SystemExit):
        square.main(["a.ckpt", "--seeds", "0"])
    assert "--seeds is 0, and must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(("query", "library", "ours"), [(0, 1, 1), (4999, 128, 512), (40, 2, 4)])
def test_the_schedule_of_the_library_is_that_of_ten_thousand_queries(query, library, ours):
    assert square.as_of_ten_thousand(0.8, query, 5000) == 0.8 / library
    assert square_share(0.8, query, 5000) == 0.8 / ours


def test_the_library_keeps_that_schedule():
    library = pytest.importorskip("pyautoattack")
    attack = library.AutoAttack(nn.Identity(), eps=0.1, version="custom", attacks=["square"], device="cpu").square
    assert [attack.p_selection(query) for query in (0, 40, 4999)] == [0.8, 0.4, 0.8 / 128]
