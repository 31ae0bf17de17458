"""What other people's projects do with callbacks: Hydra's lists, a network compiled in setup, processes that fork."""

from __future__ import annotations

import inspect
import itertools
import re
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import lightning_tasks.callbacks as callbacks
from attention_modules import AttentionMechanism, AttentionSwapError
from lightning_tasks.callbacks import SwapAttention, swap_now
from tests.lightning_tasks.callbacks.modules import TinyLM, batches, fit, network, weights_of
from tests.lightning_tasks.programs import run_ranks
from tests.rows import each_row

CHOICE: dict[str, Any] = {"where": ["net.*"], "layers": [0, 1], "exclude": ["*.1.*"]}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "AttentionDiversification": CHOICE,
    "AttentionMapLogger": {"heads": [0], "queries": [1, 2], **CHOICE},
    "AttentionMonitor": {"statistics": ["entropy", "sink"], "stages": ["train"], **CHOICE},
    "DAMPenalty": {"weight": 0.1, **CHOICE},
    "EntropyRegularizer": {"weight": 0.1, "floor": 0.5, **CHOICE},
    "FreezeQK": CHOICE,
    "KernelPCAMonitor": CHOICE,
    "LipschitzMonitor": CHOICE,
    "LocAteR": {"weight": 0.1, **CHOICE},
    "LogitMonitor": CHOICE,
    "PursuitMonitor": CHOICE,
    "QKClip": CHOICE,
    "QKWeightDecay": {"weight_decay": 0.1, "fade_steps": 10, **CHOICE},
    "RobustnessEvaluation": {
        "attacks": ["fgsm", {"name": "pgd", "steps": 3}],
        "eps": ["1/255", 0.01],
        "corruptions": ["gaussian_noise"],
        "severities": [1, 3],
        "word_swap_keep": [1, 2],
    },
    "SigmaReparam": CHOICE,
    "SpectrumMonitor": CHOICE,
    "SwapAttention": {"mechanism": "rpc", "options": {"iterations": 3}, **CHOICE},
}


def kept(callback: Any) -> dict[str, Any]:
    """The callback's own attributes as plain data can be compared."""
    return {name: value for name, value in vars(callback).items() if isinstance(value, (str, int, float, list, tuple))}


def test_the_table_has_every_callback_that_takes_lists() -> None:
    takes = {
        name
        for name in callbacks.__all__
        if {"where", "attacks"} & set(inspect.signature(getattr(callbacks, name)).parameters)
    }
    assert takes == set(ARGUMENTS)


@each_row(("make", "name"), itertools.product([OmegaConf.create, lambda given: {**given, "layers": (0, 1)}], ARGUMENTS))
def test_lists_and_dicts_of_any_make_are_taken(name: str, make: Any) -> None:
    cls, given = getattr(callbacks, name), ARGUMENTS[name]
    plain = cls(**given)
    if "layers" not in given:
        make = OmegaConf.create
    got = cls(**make(given))
    assert kept(got) == kept(plain)
    assert got.state_key == plain.state_key
    assert not any(type(value).__module__.startswith("omegaconf") for value in vars(got).values())


FLAGS = [
    (name, argument)
    for name in callbacks.__all__
    for argument, given in inspect.signature(getattr(callbacks, name)).parameters.items()
    if isinstance(given.default, bool)
]


@each_row(("name", "flag"), FLAGS)
def test_words_are_no_flags(name: str, flag: str) -> None:
    """They would all count as true."""
    for word in ("false", "no", ""):
        with pytest.raises(
            ValueError, match=f"^{flag} must be True or False, got '{word}', a string: write it without"
        ):
            getattr(callbacks, name)(**{**ARGUMENTS.get(name, {}), flag: word})
    with pytest.raises(ValueError, match=f"^{flag} must be True or False, got 1$"):
        getattr(callbacks, name)(**{**ARGUMENTS.get(name, {}), flag: 1})
    assert getattr(getattr(callbacks, name)(**{**ARGUMENTS.get(name, {}), flag: True}), flag) is True


def test_one_name_to_leave_out_is_no_list_of_letters() -> None:
    assert SwapAttention("softmax", exclude="*.1.*").exclude == ["*.1.*"]


class CompiledInSetup(TinyLM):
    """As lightning-hydra-template has it."""

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.net["encoder"] = torch.compile(self.net["encoder"], backend="eager")


def kinds(module: torch.nn.Module) -> list[str]:
    return [type(each).__name__ for each in module.modules() if isinstance(each, AttentionMechanism)]


@pytest.mark.parametrize("where", [None, "net.encoder.layers.*"])
def test_a_network_of_init_is_swapped_before_setup_compiles_it(where: str | None) -> None:
    straight = TinyLM()
    fit(straight, [SwapAttention("symmetric", where=where)], max_steps=2)
    module, swap = CompiledInSetup(), SwapAttention("symmetric", where=where)
    fit(module, [swap], max_steps=2)
    assert kinds(module) == ["SymmetricAttention"] * 2
    assert "_orig_mod" not in str(swap.state_dict())
    torch.testing.assert_close(weights_of(module), weights_of(straight))
    mechanisms = [id(each) for each in module.modules() if isinstance(each, AttentionMechanism)]
    swap.report = None
    trainer = fit(TinyLM(), max_steps=1)
    trainer.callbacks.append(swap)
    trainer.test(module, batches(1), verbose=False)
    assert [id(each) for each in module.modules() if isinstance(each, AttentionMechanism)] == mechanisms


class BuiltAndCompiledInSetup(TinyLM):
    """Nothing stands before its setup, and all is compiled after it."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.built, self.asks = self.net, asks
        del self.net

    def setup(self, stage: str) -> None:
        if "net" not in self._modules:
            self.net = self.built
            del self.built
            if self.asks:
                swap_now(self)
            self.net["encoder"] = torch.compile(self.net["encoder"], backend="eager")


def test_a_network_that_setup_builds_and_compiles_is_swapped_between() -> None:
    with pytest.raises(AttentionSwapError, match=r"net\.encoder was compiled before .*swap_now\(self\)"):
        fit(BuiltAndCompiledInSetup(asks=False), [SwapAttention("symmetric", where="net.*")], max_steps=1)
    module = BuiltAndCompiledInSetup(asks=True)
    fit(module, [SwapAttention("symmetric", where="net.*")], max_steps=1)
    assert kinds(module) == ["SymmetricAttention"] * 2


class BuildsHalfInSetup(TinyLM):
    """A second network comes in setup."""

    def setup(self, stage: str) -> None:
        if not hasattr(self, "second"):
            self.second = network(1)


def test_layers_that_setup_adds_are_swapped_too() -> None:
    module, swap = BuildsHalfInSetup(), SwapAttention("rpc")
    fit(module, [swap], max_steps=1)
    assert kinds(module) == ["RPCAttention"] * 3
    assert len(swap.state_dict()["plan"]["layers"]) == 3


def test_positions_that_setup_shifts_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"layers=\[0\] was counted .*second\.encoder.*name the layers by where="):
        fit(BuildsHalfInSetup(), [SwapAttention("rpc", layers=[0])], max_steps=1)


class RebuiltInSetup(TinyLM):
    """What __init__ built is thrown away."""

    def setup(self, stage: str) -> None:
        self.net = network()


def test_a_network_that_setup_builds_anew_is_swapped_again() -> None:
    module = RebuiltInSetup()
    fit(module, [SwapAttention("rpc")], max_steps=1)
    assert kinds(module) == ["RPCAttention"] * 2


def test_forked_processes_refuse_the_callback_and_train_what_its_error_advises() -> None:
    (said,) = run_ranks(
        "tests.lightning_tasks.callbacks.fork_run", ranks=1
    )  # once autograd started, none can be forked
    assert re.search(r"strategy 'fork' trains in processes of its own.*strategy=.ddp.*swap_attent", said), said
    assert "SigmaReparam: strategy 'fork' trains in processes of its own" in said


def test_a_function_for_configurations_that_have_no_callbacks() -> None:
    from hydra.utils import instantiate

    config = OmegaConf.create(
        {
            "_target_": "attention_modules.swapped",
            "model": {"_target_": "tests.lightning_tasks.callbacks.modules.network"},
            "mechanism": "rpc",
            "iterations": 2,
            "layers": [1],
            "where": ["encoder.*"],
        }
    )
    model = instantiate(config)
    assert kinds(model) == ["RPCAttention"]
    assert model["encoder"].layers[1].self_attn.mechanism.iterations == 2
