"""Checkpoints and recipes that try to run a program: `python -m tests.reliability.hostile_files [COUNT]`.

Each file names a program at some place, in some spelling, and is opened through some door; the program writes a file,
the canary. A file counts as refused where the door raised and there is no canary.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import io
import itertools
import json
import os
import pickle
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

COUNT = 200
SEED = 14
PACKAGE = "hostile_package"
SCHEDULES = "torch.optim.lr_scheduler"

_PACKAGE_SOURCE = """
from pathlib import Path
Path(r"{canary}").touch()
from torch import nn, optim
from attention_modules.mechanism import AttentionMechanism
from lightning_tasks import LanguageModelingTask
class Net(nn.Module): pass
class Steps(optim.Optimizer): pass
class Rate(optim.lr_scheduler.LRScheduler): pass
class Mechanism(AttentionMechanism): pass
class Task(LanguageModelingTask): pass
def run(*args, **kwargs): return None
"""


class Reduced:
    """Pickles as a call of a program."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


class Trap:
    """A folder with a canary that is yet to be written, and what would write it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.canary = folder, folder / "canary"
        self.command = f"touch {self.canary}"
        package = folder / PACKAGE
        package.mkdir(exist_ok=True)
        source = _PACKAGE_SOURCE.format(canary=self.canary)
        (package / "__init__.py").write_text(source)
        (package / "inner.py").write_text(source)
        touch = f"from pathlib import Path\nPath(r'{self.canary}').touch()\n"
        (folder / "script.py").write_text(touch)
        (folder / "hubconf.py").write_text(f"{touch}def net(**kwargs): pass\n")
        (folder / "mmseg_file.py").write_text(f"{touch}model = dict(type='EncoderDecoder', backbone=dict())\n")
        (folder / "remote.py").write_text(f"{touch}class Net: pass\n")
        (folder / "config.json").write_text(
            json.dumps({"model_type": "nothing", "auto_map": {"AutoConfig": "remote.Net"}})
        )
        (folder / "code.pkl").write_bytes(pickle.dumps(Reduced(self.command)))
        torch.save(Reduced(self.command), folder / "code.pt")

    def sprung(self) -> bool:
        """Whether there is a canary; it is taken away, and the package can be imported anew."""
        there = self.canary.exists()
        self.canary.unlink(missing_ok=True)
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]
        return there

    def spellings(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Name -> (class_path, init_args): each writes the canary when it is imported or called."""
        shell = {"args": ["sh", "-c", self.command]}
        pickled = str(self.folder / "code.pt")
        return {
            "program": ("subprocess.check_output", shell),
            "process": ("subprocess.Popen", shell),
            "shell": ("os.system", {"command": self.command}),
            "script": ("runpy.run_path", {"path_name": str(self.folder / "script.py")}),
            "import": ("importlib.import_module", {"name": PACKAGE}),
            "re-exported program": ("torch.utils.cpp_extension.subprocess.check_output", shell),
            "re-exported shell": ("torch.serialization.os.system", {"command": self.command}),
            "re-exported class": ("torch.utils.cpp_extension.subprocess.Popen", shell),
            "pickle": ("torch.load", {"f": pickled, "weights_only": False}),
            "pickle of a task": (
                "lightning.pytorch.LightningModule.load_from_checkpoint",
                {"checkpoint_path": pickled, "weights_only": False},
            ),
            "pickle of a library": ("torch.serialization.pickle.loads", {}),
            "hub": ("torch.hub.load", {"repo_or_dir": str(self.folder), "model": "net", "source": "local"}),
            "remote code": (
                "transformers.dynamic_module_utils.get_class_from_dynamic_module",
                {"class_reference": "remote.Net", "pretrained_model_name_or_path": str(self.folder)},
            ),
            "pickle of another library": ("mmengine.load", {"file": str(self.folder / "code.pkl")}),
            "package": (f"{PACKAGE}.Net", {}),
            "inner module": (f"{PACKAGE}.inner.Mechanism", {}),
            "function of a package": (f"{PACKAGE}.run", {}),
            "private": ("torch._utils.os.system", {"command": self.command}),
        }


IMPORTED = ("package", "inner module", "function of a package")  # a user's own recipe may name these


@functools.cache
def _language_model() -> dict[str, Any]:
    from lightning_tasks import LanguageModelingTask

    model = {"class_path": "lightning_tasks.models.TransformerLM", "init_args": {"num_layers": 1, "dim": 8}}
    return dict(LanguageModelingTask(model=model, vocab_size=5).hparams)


@functools.cache
def _images() -> dict[str, Any]:
    from lightning_tasks import ImageClassificationTask

    return dict(ImageClassificationTask(model="vit_tiny_patch16_224", num_classes=2).hparams)


def _with(place: str) -> Callable[[dict[str, Any], Any], None]:
    def put(hparams: dict[str, Any], value: Any) -> None:
        hparams[place] = value

    return put


def _in_schedule(depth: int) -> Callable[[dict[str, Any], Any], None]:
    def put(hparams: dict[str, Any], value: Any) -> None:
        for _ in range(depth):
            arguments = {"schedulers": [{"class_path": f"{SCHEDULES}.ConstantLR", "init_args": {}}, value]}
            value = {"class_path": f"{SCHEDULES}.ChainedScheduler", "init_args": arguments}
        hparams["scheduler"] = value

    return put


def _in_model(hparams: dict[str, Any], value: Any) -> None:
    hparams["model"]["init_args"]["dropout"] = value


def _in_options(name: str) -> Callable[[dict[str, Any], Any], None]:
    def put(hparams: dict[str, Any], value: Any) -> None:
        hparams[name] = {"lam": [1.0, {"deeper": value}]}

    return put


def _in_groups(hparams: dict[str, Any], value: Any) -> None:
    hparams["param_groups"] = [{"match": "*", "lr": value}]


PLACES: dict[str, tuple[str, Callable[[dict[str, Any], Any], None]]] = {
    "model": ("LanguageModelingTask", _with("model")),
    "model's argument": ("LanguageModelingTask", _in_model),
    "mechanism": ("LanguageModelingTask", _with("mechanism")),
    "other_attention": ("ImageClassificationTask", _with("other_attention")),
    "options": ("LanguageModelingTask", _in_options("options")),
    "model_options": ("ImageClassificationTask", _in_options("model_options")),
    "optimizer": ("LanguageModelingTask", _with("optimizer")),
    "optimizer of images": ("ImageClassificationTask", _with("optimizer")),
    "scheduler": ("LanguageModelingTask", _with("scheduler")),
    "scheduler in a scheduler": ("LanguageModelingTask", _in_schedule(1)),
    "scheduler three deep": ("LanguageModelingTask", _in_schedule(3)),
    "param_groups": ("LanguageModelingTask", _in_groups),
}
STRINGS = ("model", "mechanism", "other_attention", "optimizer", "scheduler", "scheduler in a scheduler")


@dataclass(frozen=True)
class Case:
    """One hostile file: what is in it, and how it is opened."""

    place: str
    spelling: str
    form: str
    door: str

    def __str__(self) -> str:
        return f"{self.door}: {self.spelling} as {self.form} at {self.place}"


def cases(count: int = COUNT) -> list[Case]:
    """The first `count` cases in a fixed order that soon has every place, spelling, form and door."""
    spellings = list(Trap(Path(tempfile.mkdtemp())).spellings())
    every = [
        Case(place, spelling, form, door)
        for place, spelling, form, door in itertools.product(PLACES, spellings, ("spec", "string"), DOORS)
        if (form == "spec" or place in STRINGS) and not (door == "recipe" and spelling in IMPORTED)
    ]
    every += [
        Case(place, spelling, "string", door)
        for place, spelling, door in itertools.product(ENDS, spellings, CHECKPOINTS)
        if place == "_class_path" or door != "--ckpt_path"  # the command reads nothing of the others
    ]
    drawn = random.Random(SEED).sample(every, len(every))
    chosen: list[Case] = []
    for field in ("place", "spelling", "door"):  # one of each first
        seen: set[str] = set()
        for case in drawn:
            if getattr(case, field) not in seen and case not in chosen:
                seen.add(getattr(case, field))
                chosen.append(case)
    return [*chosen, *(case for case in drawn if case not in chosen)][:count]


def checkpoint_of(case: Case, trap: Trap) -> dict[str, Any]:
    """The content of the hostile checkpoint."""
    path, arguments = trap.spellings()[case.spelling]
    task, put = PLACES.get(case.place, ("LanguageModelingTask", None))
    hparams = copy.deepcopy(_HPARAMS[task]())
    content: dict[str, Any] = {
        "pytorch-lightning_version": "2.6.0",
        "state_dict": {},
        "loops": {},
        "epoch": 0,
        "global_step": 0,
        "optimizer_states": [],
        "lr_schedulers": [],
        "callbacks": {},
    }
    hparams["_class_path"] = f"lightning_tasks.{task}"
    if put is not None:
        put(hparams, path if case.form == "string" else {"class_path": path, "init_args": arguments})
    elif case.place in ("_class_path", "_instantiator"):
        hparams[case.place] = path
    elif case.place == "plan":
        plan = {"mechanism": path, "options": arguments, "selection": "", "layers": ["model.layers.0.attn"]}
        content["callbacks"]["SwapAttention{}"] = {"plan": plan}
    else:
        content[case.place] = {"optimizer": {"class_path": path, "init_args": arguments}}
    return {**content, "hyper_parameters": hparams}


# What a recipe has in these places is data, which is never built.
UNBUILT = ("model's argument", "options", "model_options", "param_groups")
REFUSALS = (
    "It was not called",
    "was not called",
    "was not imported",
    "was not found",
    "is not allowed, denied by",  # jsonargparse
    "cannot be stored in a checkpoint",
)
ENDS = ("_class_path", "_instantiator", "plan", "module_arguments", "hparams")
_HPARAMS = {"LanguageModelingTask": _language_model, "ImageClassificationTask": _images}


def _used(module: Any) -> None:
    """Everything that a run would build."""
    module.configure_model()
    module.configure_optimizers()


def _python(content: dict[str, Any], folder: Path) -> None:
    import lightning_tasks

    images = "model_options" in content["hyper_parameters"]
    task = lightning_tasks.ImageClassificationTask if images else lightning_tasks.LanguageModelingTask
    torch.save(content, folder / "evil.ckpt")
    _used(task.load_from_checkpoint(folder / "evil.ckpt"))


def _analysis(content: dict[str, Any], folder: Path) -> None:
    from lightning_tasks.analyses.subjects import load_subject

    torch.save(content, folder / "evil.ckpt")
    load_subject(str(folder / "evil.ckpt"))


def _swapped(content: dict[str, Any], folder: Path) -> None:
    from lightning_tasks import LanguageModelingTask, load_swapped

    torch.save(content, folder / "evil.ckpt")
    _used(load_swapped(LanguageModelingTask, folder / "evil.ckpt"))


def _command(content: dict[str, Any], folder: Path) -> None:
    from lightning_tasks.cli.fit import _command_line, _ParsingCLI

    torch.save(content, folder / "evil.ckpt")
    arguments = [
        "validate",
        "--ckpt_path",
        str(folder / "evil.ckpt"),
        "--data",
        "attnswap.datamodules.DigitsDataModule",
    ]
    task = "ImageClassification" if "model_options" in content["hyper_parameters"] else "LanguageModeling"
    arguments += ["--model", f"lightning_tasks.{task}Task"]
    cli = _command_line(_ParsingCLI, arguments, ())
    _used(_built(cli))


def _recipe(content: dict[str, Any], folder: Path) -> None:
    import yaml

    from lightning_tasks.cli.fit import _command_line, _ParsingCLI

    hparams = dict(content["hyper_parameters"])
    task = hparams.pop("_class_path")
    recipe = {"model": {"class_path": task, "init_args": hparams}, "data": "attnswap.datamodules.DigitsDataModule"}
    (folder / "evil.yaml").write_text(yaml.safe_dump(recipe))
    _used(_built(_command_line(_ParsingCLI, ["fit", "--config", str(folder / "evil.yaml")], ())))


def _built(cli: Any) -> Any:
    section = cli.config[cli.config.subcommand]
    return cli.parser.instantiate_classes(cli.config)[cli.config.subcommand].model if section else None


CHECKPOINTS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "load_from_checkpoint": _python,
    "attnswap analyze": _analysis,
    "load_swapped": _swapped,
    "--ckpt_path": _command,
}
DOORS = {**CHECKPOINTS, "recipe": _recipe}


def opened(case: Case, trap: Trap) -> str:
    """Open the hostile file: "" where it was refused, else what went wrong."""
    trap.sprung()
    try:
        with quiet():
            DOORS[case.door](checkpoint_of(case, trap), trap.folder)
        said = ""
    except Exception as error:
        said = str(error)
    if trap.sprung():
        return f"{case}: the canary was written"
    if case.door == "recipe" and case.place in UNBUILT:
        return ""
    return "" if any(text in said for text in REFUSALS) else f"{case}: not refused by the rule, but {said[:300]!r}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without output and warnings, in which libraries say much of such files."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def trapped(folder: Path) -> Iterator[Trap]:
    """A trap whose package can be imported."""
    sys.path.insert(0, str(folder))
    try:
        yield Trap(folder)
    finally:
        sys.path.remove(str(folder))


def main() -> None:
    """Open every file, and print how many were refused."""
    parser = argparse.ArgumentParser(description="Open checkpoints and recipes that try to run a program.")
    parser.add_argument("count", type=int, nargs="?", default=COUNT, help=f"how many files, {COUNT} by default")
    count = parser.parse_args().count
    faults = []
    with tempfile.TemporaryDirectory() as folder, trapped(Path(folder)) as trap:
        chosen = cases(count)
        for case in chosen:
            if fault := opened(case, trap):
                faults.append(fault)
    doors = Counter(case.door for case in chosen)
    for fault in faults:
        print(fault)
    print(f"{len(chosen) - len(faults)} of {len(chosen)} hostile files refused, no canary")
    print(", ".join(f"{name}: {number}" for name, number in doors.items()))
    print(f"{len({case.place for case in chosen})} places, {len({case.spelling for case in chosen})} spellings")
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
