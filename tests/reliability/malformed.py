"""Malformed configurations and command lines: what the command makes of them.

python -m tests.reliability.malformed [--cases 10000] [--seed 0]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

SECONDS = 60  # after which a case counts as one that hangs
TEXT = {
    "seed_everything": 1,
    "model": {
        "class_path": "lightning_tasks.LanguageModelingTask",
        "init_args": {
            "model": {
                "class_path": "lightning_tasks.models.TransformerLM",
                "init_args": {"num_layers": 1, "num_heads": 2, "dim": 8, "mlp_dim": 8, "num_tokens": 8, "dropout": 0.1},
            },
            "mechanism": "rpc",
            "options": {"iterations": 2, "lam": 4.0},
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01, "betas": [0.9, 0.99]}},
            "scheduler": {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1}},
            "param_groups": [{"match": "*norm*", "weight_decay": 0.0}],
        },
    },
    "data": {"class_path": "tests.lightning_tasks.demo.DemoText", "init_args": {}},
}
IMAGES = {
    "seed_everything": 1,
    "model": {
        "class_path": "lightning_tasks.ImageClassificationTask",
        "init_args": {
            "model": "vit_tiny_patch16_224",
            "mechanism": "symmetric",
            "layers": [0],
            "model_options": {
                "img_size": 8,
                "patch_size": 4,
                "in_chans": 1,
                "embed_dim": 8,
                "depth": 1,
                "num_heads": 2,
            },
            "label_smoothing": 0.1,
            "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
        },
    },
    "data": {
        "class_path": "attnswap.datamodules.DigitsDataModule",
        "init_args": {"batch_size": 8, "train_transform": {"scale": [0.8, 1.0], "hflip": 0.0}},
    },
}
MASKS = {
    "seed_everything": 1,
    "model": {
        "class_path": "lightning_tasks.SegmentationTask",
        "init_args": {
            "model": {
                "backbone": "vit_tiny_patch16_224",
                "img_size": 16,
                "backbone_options": {"patch_size": 8, "embed_dim": 8, "depth": 1, "num_heads": 2},
                "decoder": "linear",
            },
            "mechanism": "rpc",
            "options": {"iterations": 2, "lam": 4.0},
            "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
        },
    },
    "data": {
        "class_path": "attnswap.datamodules.DigitScenesDataModule",
        "init_args": {"batch_size": 2, "img_size": 16, "crop_size": 16, "num_train": 2, "num_val": 2, "num_test": 2},
    },
}
TRAINER = {
    "accelerator": "cpu",
    "devices": 1,
    "max_steps": 1,
    "max_epochs": 1,
    "limit_train_batches": 2,
    "limit_val_batches": 1,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "gradient_clip_val": 1.0,
    "callbacks": [
        {
            "class_path": "lightning_tasks.callbacks.SpectrumMonitor",
            "init_args": {"every_n_steps": 1, "exclude": ["x"]},
        },
        {"class_path": "lightning_tasks.callbacks.AttentionMonitor", "init_args": {"statistics": ["entropy"]}},
    ],
}
COMPARISON = {
    "base": "base.yaml",
    "variants": {"one": {"model.mechanism": "softmax", "model.options": {}}, "two": None},
    "settings": {"trainer.max_steps": 1},
    "references": {"two": ["one"]},
    "test": False,
    "metrics": ["val/loss"],
}
LAST = "\nmodel:"  # the section behind the trainer's, without which a run takes hours
VALUES: list[Any] = [
    *(None, {}, [], [3], [[]], [None], "", "x", "None", "null", "-", "--", "{", "*", "😀", "a" * 5000, "1e3", "0x10"),
    *(0, -1, -(10**18), 1.5, -0.5, float("nan"), float("inf"), float("-inf"), True, False),
    *({"x": 1}, {"class_path": "x"}, {"class_path": 3}, {"class_path": None}, {"class_path": "torch.nn.Linear"}),
    *({"class_path": "no.such.Class", "init_args": {}}, {"class_path": "torch.optim.SGD", "init_args": []}),
    *({"init_args": {}}, {"class_path": "lightning_tasks"}, {"": ""}, {"a": {"b": {"c": []}}}, [{"class_path": "x"}]),
    *(10**30, 2**63, 2**64),
]
# What would be done, and would take hours or start other processes.
MODEST = {"num_layers", "depth", "max_steps", "num_train", "num_val", "num_test", "iterations", "img_size", "crop_size"}
MODEST |= {"patch_size", "dim", "mlp_dim", "embed_dim", "num_tokens", "num_heads", "batch_size", "in_chans", "devices"}
OPTIONS = [
    *("--seed_everything", "--ckpt_path", "--init_from", "--trainer", "--model", "--data", "--config"),
    *("--trainer.devices", "--trainer.accelerator", "--trainer.precision", "--trainer.max_epochs", "--trainer.logger"),
    *("--trainer.callbacks", "--trainer.plugins", "--trainer.profiler", "--trainer.val_check_interval"),
    *("--trainer.default_root_dir", "--trainer.gradient_clip_algorithm", "--trainer.max_time", "--trainer.bench"),
    *("--model.optimizer", "--model.optimizer.lr", "--model.optimizer.betas", "--model.scheduler", "--model.mechanism"),
    *("--model.options", "--model.options.lam", "--model.model", "--model.chunk_size", "--nothing"),
    *("--model.model.init_args.dim", "--model.param_groups", "--data.batch_size", "--data.num_workers", "--data.root"),
    *("--weights_only", "--trainer.callbacks+", "--trainer.strategy", "--model.scheduler_interval", "--print_config"),
]
WORDS = [
    *("", "x", "-1", "0", "1.5", "null", "nan", "1e400", "[]", "{}", "[3]", "{x: 1}", "[", "{", "}", ":", "😀", "\t"),
    *("true", "99999999999999999999", "https://example.org/a.ckpt", ".", "..", "/", "/dev/null", "/proc/self/mem"),
    *("none.ckpt", "odd.ckpt", "base.yaml", "last", "best", "hpc", "registry:x", "s3://bucket/a.ckpt", "file:///x"),
    *("torch.optim.SGD", "os.getcwd", "a.b.c", '{"class_path": "x"}', '{"class_path": 3}', "[" * 3000, "{a: " * 500),
    *("gpu", "tpu", "cpu", "auto", "16", "bf16-mixed", "0:3", "a" * 5000, "\x00", "&a [*a]", "!!python/name:os.system"),
]
SEEDS = [
    *("0:99999999999", "-3:2", "-1", "5:1", "0:0", "a:b", "0:1:2", "", ",", "1,1", "1,,2", "4294967296", "1e3", "😀"),
    *("0", "0:2", "3,4", "99999999999999999999999", "0.5", ":", "1:", ":1", " 1 "),
]


@dataclass
class Case:
    """A command line, and the files that it finds in its folder."""

    arguments: list[str]
    files: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Outcome:
    """How a case ended: the exit code (None: it returned), the end of stderr, and what is wrong with that, if it is."""

    code: int | None
    printed: str
    fault: str = ""


def mutated(config: Any, source: random.Random) -> Any:
    """A copy of nested data in which one place has another value, is gone, or has a new neighbor."""
    config = copy.deepcopy(config)
    node, place = source.choice(list(_places(config)))
    how = source.random()
    if how < 0.75:
        values = [value for value in VALUES if place not in MODEST or not _would_be_done(value)]
        node[place] = copy.deepcopy(source.choice(values))
    elif how < 0.9 or isinstance(node, list):
        del node[place]
    else:
        key = source.choice(["x", "", "init_args", "class_path", 3, None, True, "a.b", "dict_kwargs"])
        node[key] = copy.deepcopy(source.choice(VALUES))
    return config


def _would_be_done(value: Any) -> bool:
    return isinstance(value, (int, float)) and (value > 1000 or value == 1.5)


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    for place in node.keys() if isinstance(node, dict) else range(len(node)):
        yield node, place
        if isinstance(node[place], (dict, list)):
            yield from _places(node[place])


def torn(text: str, source: random.Random) -> bytes:
    """A file whose bytes are not those of any configuration."""
    place = source.randrange(len(text))
    pieces = [
        "\t",
        "[",
        "{",
        ": :",
        "\x00",
        "&a [*a]\n",
        "'",
        '"',
        "!!python/object:os.system {}\n",
        "- ",
        "%",
        "---\n",
    ]
    return source.choice(
        [
            lambda: text[: max(place, text.find(LAST))].encode(),
            lambda: (text[:place] + source.choice(pieces) + text[place:]).encode(),
            lambda: text[:place].encode() + bytes([source.randrange(128, 256)]) + text[place:].encode(),
            lambda: b"",
            lambda: b"[" * source.choice([50, 3000]),
            lambda: b"model: " + b"{a: " * 3000 + b"}" * 3000,
            lambda: b"\n".join(
                b"%s: &%s [%s]" % (b"abcdefghi"[i : i + 1] * 2, b"abcdefghi"[i : i + 1], _aliases(i)) for i in range(9)
            ),
            lambda: b"a: &a [*a]",
            lambda: b"- 1\n- 2",
            lambda: b"3",
            lambda: source.randbytes(200),
        ]
    )()


def _aliases(depth: int) -> bytes:
    return b"x" if depth == 0 else b",".join([b"*" + b"abcdefghi"[depth - 1 : depth]] * 9)


def draw(source: random.Random) -> Case:
    """A random case."""
    base = {"trainer": TRAINER, **source.choice([TEXT, TEXT, IMAGES, MASKS])}
    whole = {"base.yaml": _yaml(base), "odd.ckpt": b"no checkpoint"}
    fit = ["fit", "--config", "base.yaml"]
    kind = source.random()
    if kind < 0.3:
        config = mutated(base, source)
        if config.get("trainer") in (None, {}, {"init_args": {}}):  # whose defaults are 1,000 epochs
            fit.append("--trainer.max_steps=1")
        return Case(fit, {**whole, "base.yaml": _yaml(config)})
    if kind < 0.45:
        return Case(fit, {**whole, "base.yaml": torn(_yaml(base).decode(), source)})
    if kind < 0.7:
        option, word = source.choice(OPTIONS), source.choice(WORDS)
        if option == "--data.num_workers" and word == "99999999999999999999":
            word = "-1"
        command = source.choice(["fit"] * 5 + ["validate", "test", "predict", "show-batch"])
        form = source.choice([[f"{option}={word}"], [option, word], [option]])
        return Case([command, "--config", "base.yaml", *form], whole)
    if kind < 0.95:
        comparison = _yaml(COMPARISON)
        if source.random() < 0.6:
            comparison = _yaml(mutated(COMPARISON, source))
        elif source.random() < 0.5:
            comparison = torn(comparison.decode(), source)
        further = source.choice(
            [
                [],
                [f"--seeds={source.choice(SEEDS)}"],
                [f"--set={source.choice(OPTIONS).lstrip('-')}={source.choice(WORDS)}"],
                [f"--metrics={source.choice(WORDS)}"],
                [f"--jobs={source.choice(WORDS)}"],
            ]
        )
        return Case(["compare", "compare.yaml", "--output=out", *further], {**whole, "compare.yaml": comparison})
    words = [source.choice([*WORDS, *OPTIONS]) for _ in range(source.randrange(4))]
    return Case([source.choice(["report", "analyze", "recipes", "show-batch", "fit", "x", ""]), *words], whole)


def _yaml(content: Any) -> bytes:
    return yaml.safe_dump(content, allow_unicode=True, sort_keys=False).encode()


class Hang(BaseException):
    """A case took too long."""


class Runner:
    """Runs cases in this process, in one folder, with one parser for each subcommand."""

    def __init__(self) -> None:
        from lightning_tasks.cli import fit as cli

        self._parsers: dict[str, tuple[Any, ...]] = {}
        self._kind, self._set_up = cli.AttnswapCLI, cli.AttnswapCLI.setup_parser
        self._last: list[Any] = []

    def run(self, case: Case) -> Outcome:
        """The outcome of a case, in a new folder; the working folder is as before afterwards."""
        from lightning_tasks.__main__ import main
        from lightning_tasks.cli import fit as cli
        from lightning_tasks.compare import command as compare

        before, printed = Path.cwd(), io.StringIO()
        self._last.clear()
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            for name, content in case.files.items():
                Path(folder, name).write_bytes(content)
            os.chdir(folder)
            stack.callback(os.chdir, before)
            stack.enter_context(contextlib.redirect_stdout(printed))
            stack.enter_context(contextlib.redirect_stderr(printed))
            stack.enter_context(mock.patch.object(sys, "argv", ["attnswap"]))
            # or every wrong name of a model is asked for on the Hugging Face Hub
            stack.enter_context(mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True))
            stack.enter_context(mock.patch.object(cli.AttnswapCLI, "setup_parser", self._setup_parser()))
            stack.enter_context(mock.patch.object(compare, "run_cells", return_value=[]))
            stack.enter_context(mock.patch.object(cli.AttnswapCLI, "after_instantiate_classes", self._note()))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            previous = signal.signal(signal.SIGALRM, _hang)
            stack.callback(signal.signal, signal.SIGALRM, previous)
            signal.alarm(SECONDS)
            stack.callback(signal.alarm, 0)
            try:
                main(case.arguments)
                code: int | None = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) or end.code is None else 1
                if isinstance(end.code, str):
                    printed.write(f"attnswap: {end.code}")
            except BaseException:
                return Outcome(None, printed.getvalue()[-300:], traceback.format_exc())
        return Outcome(code, printed.getvalue()[-600:], self._fault(code or 0, case, printed.getvalue()))

    def _fault(self, code: int, case: Case, printed: str) -> str:
        if code and "error:" not in printed and "attnswap:" not in printed:
            return f"it ends with {code} and does not say why"
        if code not in (0, 1, 2):
            return f"it ends with {code}"
        if code == 0 and case.arguments[0] == "fit" and self._last:
            trainer = self._last[-1].trainer
            idle = 0 in (trainer.max_steps, trainer.max_epochs, trainer.limit_train_batches)
            if not trainer.global_step and not idle:
                return "it ends with 0 and has done no step"
        return "it shows a traceback" if "Traceback (most" in printed else ""

    def _note(self) -> Any:
        return lambda command: self._last.append(command)

    def _setup_parser(self) -> Any:
        parsers, set_up = self._parsers, self._set_up

        def setup_parser(self: Any, *args: Any) -> None:
            (command,) = self.subcommands()
            if command not in parsers:
                set_up(self, *args)
                parsers[command] = self.parser, self._subcommand_parsers, self._subcommand_method_arguments
            self.parser, self._subcommand_parsers, self._subcommand_method_arguments = parsers[command]

        return setup_parser


def _hang(number: int, frame: Any) -> None:
    raise Hang(f"not done after {SECONDS} s")


def main() -> None:
    """Run the cases, and print what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    runner, codes, faults, started = Runner(), Counter[int | None](), 0, time.monotonic()
    for number in range(options.first, options.first + options.cases):
        case = draw(random.Random(f"{options.seed}:{number}"))
        begun = time.monotonic()
        outcome = runner.run(case)
        codes[outcome.code] += 1
        if time.monotonic() - begun > 10:
            print(f"case {number}: {time.monotonic() - begun:.0f} s: {json.dumps(case.arguments)[:300]}", flush=True)
        if outcome.fault:
            faults += 1
            print(f"case {number}: {json.dumps(case.arguments)[:300]}\n{outcome.fault}\n{outcome.printed}", flush=True)
    print(f"{options.cases} cases in {time.monotonic() - started:.0f} s, {faults} faults, exit codes {dict(codes)}")
    raise SystemExit(faults > 0)


if __name__ == "__main__":
    main()
