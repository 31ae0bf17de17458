"""Malformed configurations and command lines: never a traceback, never exit code 0 for what was not done."""

import json
import random

import pytest
import yaml

from tests.reliability.malformed import COMPARISON, TEXT, TRAINER, Case, Runner, draw


@pytest.fixture(scope="module")
def runner():
    return Runner()


def check(runner, cases):
    """Whether any leaves a fault, and with which codes they end."""
    faults, codes = {}, []
    for number, case in cases:
        outcome = runner.run(case)
        codes.append(outcome.code)
        if outcome.fault:
            faults[number] = f"{json.dumps(case.arguments)}\n{outcome.fault}\n{outcome.printed}"
    assert not faults, "\n".join(f"case {number}: {text}" for number, text in faults.items())
    return codes


def test_random_cases(runner):
    """Most are refused, some turn out to be valid and run."""
    codes = check(runner, ((number, draw(random.Random(f"0:{number}"))) for number in range(40)))
    assert codes.count(2) > 20
    assert 0 in codes


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 10_000, 500))
def test_many_random_cases(runner, first):
    check(runner, ((number, draw(random.Random(f"1:{number}"))) for number in range(first, first + 500)))


COMPARE = ["compare", "compare.yaml", "--output=out"]
KNOWN = {
    "huge seeds": ([*COMPARE, "--seeds=0:99999999999"], {}, "0:99999999999"),
    "negative seeds": ([*COMPARE, "--seeds=-3:2"], {}, "-3"),
    "metrics that are no names": (COMPARE, {"compare.yaml": {**COMPARISON, "metrics": [3]}}, "metrics"),
    "deep YAML": (None, {"base.yaml": b"model: " + b"{a: " * 3000 + b"}" * 3000}, "more than 100 levels deep"),
    "a long name": (["--init_from=" + "a" * 300], {}, "no such file"),
    "a folder": (["--ckpt_path=."], {}, "--ckpt_path . is a folder"),
    "a URL": (["--ckpt_path=https://example.org/a.ckpt"], {}, "is a URL"),
    "betas": (["--model.optimizer.init_args.betas={}"], {}, "betas"),
    "exclude": (
        ['--trainer.callbacks={"class_path": "SwapAttention", "init_args": {"mechanism": "rpc", "exclude": 5}}'],
        {},
        "exclude",
    ),
    "devices": (["--trainer.devices=x"], {}, "devices"),
    "model": (["--model.model={}"], {}, "model"),
    "backbone": (
        ["--model=lightning_tasks.SegmentationTask", '--model.model={"backbone": 0, "img_size": 16}'],
        {},
        "backbone",
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_case_that_had_a_traceback_names_what_is_wrong(runner, name):
    arguments, files, text = KNOWN[name]
    base = {"trainer": TRAINER, **TEXT}
    contents = {"base.yaml": base, "compare.yaml": COMPARISON, **files}
    written = {
        file: value if isinstance(value, bytes) else yaml.safe_dump(value).encode() for file, value in contents.items()
    }
    fit = ["fit", "--config", "base.yaml"]
    whole = arguments if arguments and arguments[0] == "compare" else [*fit, *(arguments or [])]
    outcome = runner.run(Case(whole, written))
    assert outcome.code == 2, outcome
    assert not outcome.fault, outcome
    line = outcome.printed[outcome.printed.index("attnswap: error: ") :]
    assert text in line
