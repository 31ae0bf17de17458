"""`attnswap workspace`: a W&B workspace with a section for what each kind of callback logs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from attention_modules.extras import needed_for
from lightning_tasks.errors import UsageError, reason

# By section, titles of line plots and the names that each shows, as a regular expression.
SECTIONS = {
    "Loss": {
        "loss": r"(train|val)/loss(_step|_epoch)?",
        "perplexity": "val/perplexity",
        "accuracy": r"(train|val)/top[15]",
        "mean intersection over union": "val/miou",
    },
    "Attention": {
        "entropy by layer": r"(val/)?attention/entropy/layer_\d+",
        "effective number of tokens": r"(val/)?attention/effective_support/layer_\d+",
        "sink": r"(val/)?attention/sink/layer_\d+",
        "similarity of tokens": r"(val/)?attention/token_similarity/layer_\d+",
        "largest logit": r"attention/largest_logit/layer_\d+",
        "clipped heads": "qk_clip/clipped_heads",
    },
    "Spectra": {
        "variance": r"qk_spectrum/variance/layer_\d+",
        "scale": r"qk_spectrum/scale/layer_\d+",
        "Lipschitz constants": r"val/lipschitz/layer_\d+",
        "penalty": r"locater/penalty.*",
    },
    "Robustness": {"accuracy under attack and corruption": r"robustness/.*/accuracy"},
    "Comparison": {"differences": r"verdict/.*/difference"},
}


def parser() -> argparse.ArgumentParser:
    """The parser of `attnswap workspace`."""
    arguments = argparse.ArgumentParser(
        prog="attnswap workspace",
        allow_abbrev=False,
        description="Make a W&B workspace in a project, with sections of loss, attention, spectra, robustness and "
        "comparison. It needs the extra [wandb] and a key for the server.",
    )
    arguments.add_argument("project", metavar="ENTITY/PROJECT", help="where it is made")
    arguments.add_argument("--name", default="attnswap", help="of the workspace (default: %(default)s)")
    return arguments


def workspace_of(entity: str, project: str, name: str = "attnswap") -> Any:
    """The workspace, as the library `wandb-workspaces` describes it; nothing is sent.

    Raises:
        ModuleNotFoundError: without the extra ``wandb``.
    """
    with needed_for("attnswap workspace", "wandb"):
        import wandb_workspaces.reports.v2 as panels
        import wandb_workspaces.workspaces as workspaces

    def section(place: int, title: str, plots: dict[str, str]) -> Any:
        drawn: list[Any] = [panels.LinePlot(title=each, metric_regex=f"^{names}$") for each, names in plots.items()]
        return workspaces.Section(name=title, panels=drawn, is_open=place < 2)

    sections = [section(place, title, plots) for place, (title, plots) in enumerate(SECTIONS.items())]
    return workspaces.Workspace(entity=entity, project=project, name=name, sections=sections)


def main(arguments: Sequence[str]) -> None:
    """Run `attnswap workspace` with these arguments.

    Raises:
        UsageError: ENTITY/PROJECT is of another form, or the server refuses it.
    """
    options = parser().parse_args(list(arguments))
    entity, slash, project = options.project.partition("/")
    if not (entity and slash and project) or "/" in project:
        raise UsageError(f"{options.project!r} must be ENTITY/PROJECT, as my-team/attention")
    workspace = workspace_of(entity, project, options.name)
    try:
        workspace.save()
    except Exception as error:  # of the network, or of W&B
        raise UsageError(f"W&B did not take the workspace: {reason(error)}; `wandb login` saves a key") from error
    print(f"workspace: {workspace.url}")
