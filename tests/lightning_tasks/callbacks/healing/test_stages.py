"""Stages and annealing as plain data."""

import pytest
import torch
from torch.nn import functional as F

from attention_modules.base import AttentionSpec
from attention_modules.mechanism import build_mechanism
from lightning_tasks.callbacks import Heal, SwapAttention
from lightning_tasks.callbacks.healing.anneal import Anneal
from lightning_tasks.callbacks.healing.stages import Stage, stage_at, stages_of
from tests.lightning_tasks.callbacks.healing.healed import Task, data
from tests.lightning_tasks.callbacks.modules import fit
from tests.rows import each_row

LAYERS = {"match": "layers", "steps": 2}


def test_the_stage_of_a_step():
    stages = stages_of([LAYERS, {"match": "logits", "steps": 3}, {"match": "task"}])
    assert [stage_at(stages, step) for step in range(8)] == [0, 0, 1, 1, 1, 2, 2, 2]
    assert stage_at(stages_of([LAYERS]), 9) == 0  # the last goes on
    assert (stages[0].train, stages[1].train) == ("attention", "all")


@each_row(
    ("given", "said"),
    [
        ({"match": "task"}, "list of mappings"),
        ([], "list of mappings"),
        (["layers"], "a stage is a mapping with match"),
        ([{"steps": 3}], "a stage is a mapping with match"),
        ([{"match": "layers", "step": 3}], "got {'match': 'layers', 'step': 3}"),
        ([{"match": "map"}], "match must be one of maps, layers, output, logits, task"),
        ([{"match": "layers"}, {"match": "task"}], "stage 1 of 2 has no steps="),
        ([{"match": "task", "steps": 0}], "steps must be an integer of at least 1, got 0"),
        ([{"match": "task", "steps": True}], "steps must be an integer"),
        ([{"match": "output", "temperature": 2.0}], "temperature is an option of match logits"),
        ([{"match": "layers", "task_weight": 2.0}], "task_weight is an option of match output and logits"),
        ([{"match": "logits", "temperature": 0.0}], "temperature must be above 0"),
        ([{"match": "logits", "task_weight": float("nan")}], "task_weight must be a finite number"),
        ([{"match": "task", "lr_scale": "2"}], "lr_scale must be a finite number"),
        ([{"match": "task", "train": []}], "train must be new, attention, all, a glob of names or several"),
        ([{"match": "task", "train": 3}], "train must be new"),
    ],
)
def test_what_is_no_stage_is_refused(given, said):
    with pytest.raises((TypeError, ValueError), match=said):
        Heal(given)


def test_which_parameters_train():
    names = ["net.attn.qkv.weight", "net.attn.mechanism.sink", "net.head.weight"]
    chosen = {train: Stage("task", train=train).chosen(names, ["net.attn"]) for train in ("new", "attention", "all")}
    assert chosen == {"new": {names[1]}, "attention": set(names[:2]), "all": set(names)}
    assert Stage("task", train=("*.head.*", "*sink")).chosen(names, ["net.attn"]) == {names[1], names[2]}


@each_row(
    ("given", "said"),
    [
        ({"lam": [0.0, 0.8]}, "anneal must be a mapping such as"),
        ({"steps": 5}, "anneal must be a mapping such as"),
        ([0.0, 0.8], "anneal must be a mapping such as"),
        ({"lam": 0.8, "steps": 5}, "two numbers, the first value and the last, got 0.8"),
        ({"lam": [0.0, float("inf")], "steps": 5}, "must be a finite number, got inf"),
        ({"lam": [0.0, 0.8], "steps": 0}, "must be an integer of at least 1"),
    ],
)
def test_what_is_no_annealing_is_refused(given, said):
    with pytest.raises((TypeError, ValueError), match=said):
        Heal([{"match": "task"}], anneal=given)


def tempered(q, k, v, attn_mask=None, is_causal=False, dropout_p=0.0, scale=None, *, temperature=2.0):
    return F.scaled_dot_product_attention(q / temperature, k, v, attn_mask, dropout_p, is_causal, scale=scale)


@pytest.mark.parametrize("options", [{}, {"temperature": 2.0}])
def test_the_option_of_a_function_goes_from_the_first_value_to_the_last(options):
    mechanism = build_mechanism(tempered, AttentionSpec(dim=8, num_heads=2, head_dim=4), **options)
    anneal = Anneal.of({"temperature": [1.0, 2.0], "steps": 4})
    anneal.check({"attn": mechanism})
    x = torch.randn(3, 1, 2, 5, 4)
    for step, value in enumerate([1.0, 1.25, 1.5, 1.75, 2.0, 2.0]):
        anneal.apply([mechanism], step)
        torch.testing.assert_close(mechanism(*x), tempered(*x, temperature=value))


def test_values_go_from_the_first_to_the_last():
    spec = AttentionSpec(dim=8, num_heads=2, head_dim=4)
    mechanism = build_mechanism("rpc", spec, iterations=6, lam=2.0)
    anneal = Anneal.of({"lam": [4, 2], "iterations": [2, 6], "steps": 4})
    anneal.check({"attn": mechanism})
    seen = []
    for step in (0, 1, 2, 4, 9):
        anneal.apply([mechanism], step)
        seen.append((mechanism.lam, mechanism.iterations))
    assert seen == [(4.0, 2), (3.5, 3), (3.0, 4), (2.0, 6), (2.0, 6)]
    assert isinstance(mechanism.iterations, int)


@each_row(
    ("mechanism", "options", "anneal", "said"),
    [
        ("rpc", {"lam": 2.0}, {"lam": [0.5, 1.0]}, "ends at 1, and the mechanism of 'net.encoder.*was built with 2.0"),
        ("rpc", {"lam": 2.0}, {"lam": [-1.0, 2.0]}, "lam must be"),
        ("entmax", {"alpha": 2.0}, {"alpha": [1.5, 2.0]}, "EntmaxAttention does not take 1.66667 on the way: alpha"),
        ("sink", {}, {"alpha": [0.5, 1.0]}, "no swapped layer has"),
        ("rpc", {}, {"lam": [0.5, 1.0]}, "lam of RPCAttention is None, no number; give the mechanism its last value"),
        ("sink", {}, {"start": [-1.0, 0.0]}, "SinkAttention reads start once, when it is built .as an initial value"),
        ("gated", {}, {"bias": [-1.0, 0.0]}, "GatedAttention reads bias once, when it is built"),
        (tempered, {}, {"temperature": [0.5, 1.0]}, "of 'net.encoder.*was built with 2.0.*temperature=1"),
        (tempered, {}, {"scale": [0.5, 1.0]}, r"a number of this name \(tempered\)"),
    ],
)
def test_annealing_that_no_mechanism_takes_is_refused(mechanism, options, anneal, said):
    callbacks = [SwapAttention(mechanism, options), Heal([{"match": "task"}], anneal={**anneal, "steps": 3})]
    with pytest.raises(ValueError, match=said):
        fit(Task(), callbacks, data())


def test_a_fit_anneals_logs_and_warns_where_it_stops_early():
    module = Task()
    heal = Heal([{"match": "task"}], anneal={"lam": [8.0, 2.0], "steps": 6})
    with pytest.warns(UserWarning, match="ended at step 3, before the last of 6 steps"):
        trainer = fit(module, [SwapAttention("rpc", lam=2.0), heal], data(), max_steps=3)
    assert trainer.callback_metrics["heal/lam"] == 6.0
    assert module.net.encoder.layers[0].self_attn.mechanism.lam == 6.0
    fit(module, [heal], data(8), max_steps=6)  # after whose last step comes no batch with the last value
    assert module.net.encoder.layers[0].self_attn.mechanism.lam == 2.0
