"""`attnswap workspace` describes a workspace that the library accepts, whose panels show what monitors log."""

import re

import pytest

from lightning_tasks.__main__ import main
from lightning_tasks.cli.boards.workspace import SECTIONS, workspace_of

LOGGED = """
train/loss val/loss val/perplexity val/top1 val/miou attention/entropy/layer_00 val/attention/entropy/layer_11
attention/effective_support/layer_00 val/attention/sink/layer_01 attention/token_similarity/layer_00
attention/largest_logit/layer_00 qk_clip/clipped_heads qk_spectrum/variance/layer_00 qk_spectrum/scale/layer_00
val/lipschitz/layer_00 locater/penalty locater/penalty_1 robustness/fgsm/4_255/accuracy
""".split()  # noqa: SIM905


def test_every_panel_shows_something_that_is_logged_and_each_name_has_one():
    patterns = [pattern for plots in SECTIONS.values() for pattern in plots.values()]
    for name in LOGGED:
        assert sum(re.fullmatch(pattern, name) is not None for pattern in patterns) == 1, name
    shown = [pattern for pattern in patterns if any(re.fullmatch(pattern, name) for name in LOGGED)]
    assert patterns[-1] not in shown, "a comparison's are in the summary of its run"
    assert shown == patterns[:-1]


def test_the_library_takes_the_workspace():
    pytest.importorskip("wandb_workspaces")
    view = workspace_of("team", "attention")._to_model()
    sections = view.spec.section.panel_bank_config.sections
    assert [section.name for section in sections][: len(SECTIONS)] == [*SECTIONS]
    drawn = [panel for section in sections for panel in section.panels]
    assert len(drawn) == sum(map(len, SECTIONS.values()))
    assert view.model_dump_json()


@pytest.mark.parametrize("project", ["attention", "/attention", "team/", "team/a/b"])
def test_a_project_is_named_with_its_entity(project, capsys):
    with pytest.raises(SystemExit):
        main(["workspace", project])
    assert f"{project!r} must be ENTITY/PROJECT" in capsys.readouterr().err
