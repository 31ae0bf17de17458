"""Optimizers, parameter groups and schedules from plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from lightning_tasks.hparams import Spec, build, plain_spec


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], rules: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Optimizer groups: one a rule, in order, after one with all that no rule matches.

    Args:
        named: parameters by name.
        rules: each ``{"match": GLOB, option: value, ...}``; a parameter belongs to the first rule that matches its
            name, and gets that rule's optimizer options, e.g. ``{"match": "*norm*", "weight_decay": 0.0}``.

    Raises:
        ValueError: if a rule has no "match", or a rule gets no parameter.
    """
    for rule in rules:
        if "match" not in rule:
            raise ValueError(f"a rule of param_groups needs the key 'match' (a glob of names), got {dict(rule)}")
    groups: list[dict[str, Any]] = [{**rule, "params": []} for rule in rules]
    rest: list[nn.Parameter] = []
    for name, parameter in named:
        group = next((group for group in groups if fnmatchcase(name, group["match"])), None)
        (rest if group is None else group["params"]).append(parameter)
    for group in groups:
        pattern = group.pop("match")
        if not group["params"]:
            raise ValueError(f"param_groups: {pattern!r} matches no parameter that an earlier rule left")
    return [{"params": rest}, *groups] if rest else groups


def build_scheduler(spec: Spec, optimizer: Optimizer) -> Any:
    """A schedule on ``optimizer``; entries under "schedulers" (SequentialLR, ChainedScheduler) are built first."""
    arguments = {key: value for key, value in spec["init_args"].items() if key != "optimizer"}  # a parser's blank
    if "schedulers" in arguments:
        inner = [plain_spec(entry, lr_scheduler, what="scheduler") for entry in arguments["schedulers"]]
        arguments["schedulers"] = [build_scheduler(entry, optimizer) for entry in inner]
    return build({**spec, "init_args": arguments}, optimizer=optimizer)


def optimizer_spec(value: Any) -> Spec:
    """Plain data of an optimizer; bare names are those of :mod:`torch.optim`. Raises as :func:`plain_spec`."""
    return plain_spec(value, torch.optim, what="optimizer")


def scheduler_spec(value: Any) -> Spec | None:
    """Plain data of a schedule or None; bare names are those of :mod:`torch.optim.lr_scheduler`."""
    return None if value is None else plain_spec(value, lr_scheduler, what="scheduler")
