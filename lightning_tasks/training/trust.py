"""What a name in a file may stand for: the rule for every `class_path`, wherever it comes from.

What a name stands for is looked at before it is called: it must be of the kind that its place asks for
(:func:`check_kind`). What a checkpoint names is looked at before it is imported too, as importing a module runs it
(:func:`check_origin`): only packages that are known here count, and those that the user's own configuration names.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, get_type_hints

import jsonargparse

from attention_modules.function import is_attention_function
from attention_modules.mechanism import is_registered
from lightning_tasks.training.hparams import Spec, build, find_module, import_object, plain_spec
from lightning_tasks.working_folder import comes_from_working_folder

LIBRARIES = frozenset(
    {"attention_modules", "lightning_tasks", "attnswap"}
    | {"torch", "torchvision", "torchmetrics", "lightning", "pytorch_lightning", "timm", "transformers"}
)
"""Packages whose classes a checkpoint may name."""

_PARTS = {"torch": ("torch.nn.", "torch.optim.")}  # the rest of torch holds what compiles, sends and reads files
TRUST_IT = "if you trust the file, give --trust_checkpoint (in Python: trust_checkpoint=True)"
GIVE_IT = f"give the argument yourself, on the command line or by keyword, or, {TRUST_IT}"


def cure_of(place: str, path: object) -> str:
    """The cure where a name in this place is refused; what a callback swapped is no argument that one can give."""
    if not place.endswith(".plan.mechanism"):
        return GIVE_IT
    module = str(path).rpartition(".")[0]
    if module in sys.modules and _is_users_module(module.partition(".")[0]):
        return f"put @register_mechanism(NAME) above the function before you load the file; or, {TRUST_IT}"
    return (
        "before you load the file, import the module that defines it (a function needs @register_mechanism(NAME) above "
        f"it there); or, {TRUST_IT}"
    )


@dataclass(frozen=True)
class Kind:
    """What a place takes.

    Args:
        words: how messages call it.
        classes: dotted paths of base classes; one that is not imported yet has no subclass.
        others: dotted paths of base classes whose subclasses belong elsewhere.
        factories: functions, by the module and name that they were defined with, which build one from plain data.
        readers: further ones, which read files or run what they download: not from a checkpoint.
    """

    words: str
    classes: tuple[str, ...]
    others: tuple[str, ...] = ()
    factories: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()

    def takes(self, target: type) -> bool:
        """Whether a class is of this kind."""
        return issubclass(target, _imported(self.classes)) and not issubclass(target, _imported(self.others))


_TASKS = ("lightning.pytorch.LightningModule", "pytorch_lightning.LightningModule")
_DATA = ("lightning.pytorch.LightningDataModule", "pytorch_lightning.LightningDataModule")
_CALLBACKS = ("lightning.pytorch.Callback", "pytorch_lightning.Callback")
_SCHEDULES = ("torch.optim.lr_scheduler.LRScheduler", "timm.scheduler.scheduler.Scheduler")
_MECHANISM = Kind(
    "a subclass of AttentionMechanism or a function of (q, k, v, ...)", ("attention_modules.base.AttentionMechanism",)
)
_MODEL = Kind(
    "a subclass of torch.nn.Module (and no LightningModule)",
    ("torch.nn.Module",),
    others=_TASKS,
    readers=(
        "timm.models._factory.create_model",
        "transformers.models.auto.auto_factory._BaseAutoModelClass.from_config",
        "transformers.models.auto.auto_factory._BaseAutoModelClass.from_pretrained",
        "transformers.modeling_utils.PreTrainedModel.from_pretrained",
    ),
)
_OPTIMIZER = Kind(
    "a subclass of torch.optim.Optimizer",
    ("torch.optim.Optimizer",),
    factories=("timm.optim._optim_factory.create_optimizer_v2",),
)
_SCHEDULER = Kind(
    "a subclass of torch.optim.lr_scheduler.LRScheduler or timm.scheduler.Scheduler",
    _SCHEDULES,
    factories=(
        "timm.scheduler.scheduler_factory.create_scheduler_v2",
        "transformers.optimization.get_scheduler",
        *(
            f"transformers.optimization.get_{name}"
            for name in (
                *("constant_schedule", "constant_schedule_with_warmup", "linear_schedule_with_warmup"),
                *("cosine_schedule_with_warmup", "cosine_with_hard_restarts_schedule_with_warmup"),
                *("polynomial_decay_schedule_with_warmup", "inverse_sqrt_schedule", "wsd_schedule"),
                *("cosine_with_min_lr_schedule_with_warmup", "reduce_on_plateau_schedule"),
            )
        ),
    ),
)
_TASK = Kind("a subclass of LightningModule", _TASKS)

KINDS = {
    "_class_path": _TASK,
    "hyper_parameters": _TASK,
    "model": _MODEL,
    "optimizer": _OPTIMIZER,
    "scheduler": _SCHEDULER,
    "schedulers": _SCHEDULER,
    "other_attention": _MECHANISM,
    "mechanism": _MECHANISM,
    "callbacks": Kind("a subclass of lightning.pytorch.Callback", _CALLBACKS),
    "data": Kind("a subclass of lightning.pytorch.LightningDataModule", _DATA),
}
"""What each place takes, by its name; a string there is a name as well."""

_ANY = Kind(
    "a subclass of nn.Module, Optimizer, LRScheduler, Callback or LightningDataModule",
    ("torch.nn.Module", "torch.optim.Optimizer", *_SCHEDULES, *_CALLBACKS, *_DATA),
)


def check_kind(target: Any, place: str, path: str = "") -> None:
    """Check that what a name stands for is of the kind that its place takes, before it is called.

    A function counts where it is one of the named factories, one of code of the user's that is not installed, or one of
    an installed package that is annotated to return the kind; where a mechanism is needed, also one of (q, k, v, ...)
    of an installed package or of ours. None counts of the standard library, and no other one of `LIBRARIES`. What it
    returns is then checked as well (:func:`checked_build`).

    Args:
        target: what the name stands for.
        place: "optimizer", "scheduler.schedulers[0]", ...; the last name in it is looked up in `KINDS`.
        path: the name.

    Raises:
        TypeError: if it is not of this kind.
    """
    kind = kind_of(place)
    if isinstance(target, type):
        if kind.takes(target):
            return
    elif kind is not _ANY and (_defined_as(target) in kind.factories + kind.readers or _is_users_own(target, kind)):
        return
    raise TypeError(
        f"{place} names {path or _defined_as(target)!r}, which is {_described(target)}: it must be {kind.words}"
        f"{_or_factory(kind)}. It was not called"
    )


def checked_spec(value: Any, *modules: ModuleType, place: str) -> Spec:
    """As :func:`~lightning_tasks.training.hparams.plain_spec`, of the kind that its place takes.

    Raises:
        TypeError, ValueError: as there, and as :func:`check_kind`.
    """
    spec = plain_spec(value, *modules, what=place)
    check_kind(import_object(spec["class_path"]), place, spec["class_path"])
    return spec


def checked_build(spec: Spec, place: str, *args: Any, **extra: Any) -> Any:
    """As :func:`~lightning_tasks.training.hparams.build`; what is called and what it returns are of its place's kind.

    Raises:
        TypeError: as there, and as :func:`check_kind`.
    """
    path = spec["class_path"]
    check_kind(import_object(path), place, path)
    built = build(spec, *args, **extra)
    first = built[0] if isinstance(built, tuple) and built else built  # create_scheduler_v2 adds the number of epochs
    if not kind_of(place).takes(type(first)):
        raise TypeError(f"{place}: {path} built a {type(first).__name__}; it must build {kind_of(place).words}")
    return built


def check_origin(path: str, allowed: Collection[str], place: str) -> None:
    """Check that a checkpoint may have this name imported.

    Args:
        path: the dotted path.
        allowed: top-level packages beside `LIBRARIES`, see :func:`allowed_packages`.
        place: where it stands.

    Raises:
        ValueError: if it is in another package, or private there, or of torch neither in torch.nn nor in torch.optim.
    """
    package, *parts = path.split(".")
    check_package(path, path, allowed, place)
    if not _is_library(package) and package not in allowed and not _is_loaded(path):
        raise ValueError(
            f"{place} names {path!r}, which your program has not imported as a class, or a function under "
            f"@register_mechanism(NAME); it was not imported; {cure_of(place, path)}"
        )
    if any(part.startswith("_") or not part for part in parts):
        raise ValueError(f"{place} names {path!r}, which is private and was not imported; {cure_of(place, path)}")


def stored_object(path: Any, allowed: Collection[str], place: str) -> Any:
    """What a name in a checkpoint stands for: of an allowed package, and of the kind that its place takes.

    A function as a mechanism counts where the user's own configuration names this very function, or where
    :func:`attention_modules.register_mechanism` says in her code that it is one.

    Raises:
        ValueError: as :func:`check_origin`, also where an allowed module has the name from another package.
        TypeError: as :func:`check_kind`.
    """
    if not isinstance(path, str) or "." not in path:  # by a bare name the command line takes any class that is loaded
        raise TypeError(f"{place} has {path!r} where a dotted path is needed; {cure_of(place, path)}")
    check_origin(path, allowed, place)
    found: Any
    found, names = find_module(path)
    for name in names:
        if not isinstance(found, (ModuleType, type)) or not hasattr(found, name):
            raise ValueError(f"{place} names {path!r}, which was not found: {found!r} has no {name!r}")
        found = getattr(found, name)
        home = found.__name__ if isinstance(found, ModuleType) else str(getattr(found, "__module__", None))
        check_package(home, path, allowed, place)
    kind = kind_of(place)
    named = is_attention_function(found) and not {path, _defined_as(found)}.isdisjoint(allowed)
    mechanism = kind is _MECHANISM and (named or is_registered(found))
    if not isinstance(found, type) and _defined_as(found) not in kind.factories and not mechanism:
        known = " that @register_mechanism(NAME) registers" if kind is _MECHANISM else ""
        raise TypeError(
            f"{place} names {path!r}, which is {_described(found)}: from a checkpoint it must be {kind.words}{known}. "
            f"It was not called; {cure_of(place, path)}"
        )
    check_kind(found, place, path)
    return found


def check_package(home: str, path: str, allowed: Collection[str], place: str) -> None:
    """Check that a checkpoint may name something of a package.

    Args:
        home: the dotted path of the module that it is defined in, or its own.
        path: the name.
        allowed: as for :func:`check_origin`.
        place: where it stands.

    Raises:
        ValueError: if the package is neither one of `LIBRARIES`, nor allowed, nor code of the user's own that is
            imported; or if it is torch, and the home is neither in torch.nn nor in torch.optim.
    """
    package = home.partition(".")[0]
    if not _is_library(package) and package not in allowed and not _is_users_module(package):
        raise ValueError(
            f"{place} names {path!r}, and a checkpoint may name nothing of the package {package!r}: it is neither "
            "attnswap, torch, torchvision, torchmetrics, lightning, timm nor transformers, nor does your own "
            f"configuration name it. It was not called; {cure_of(place, path)}"
        )
    if not f"{home}.".startswith(_PARTS.get(package, "")):
        raise ValueError(
            f"{place} names {path!r}, and of torch a checkpoint may name what is in torch.nn and torch.optim. It was "
            f"not called; {cure_of(place, path)}"
        )


def is_allowed(path: str, allowed: Collection[str]) -> bool:
    """Whether :func:`check_origin` lets a name pass."""
    try:
        check_origin(path, allowed, "")
    except ValueError:
        return False
    return True


def build_typed_classes_only() -> None:
    """Have the command line build a class only where an argument's type asks for one, as jsonargparse 5 will.

    Until then it calls whatever a "class_path" names, functions too, inside arguments that are annotated Any; and it
    only warns of names that no configuration needs (its list has `os`, `subprocess`, `pickle`, ...), which it then
    refuses, from whatever file, string or argument they come.
    """
    jsonargparse.set_parsing_settings(instantiate_subclass_spec_in_any=False, import_path_denylist=[])


def kind_of(place: str) -> Kind:
    """The kind of a place, by the last name in it."""
    return KINDS.get(last_name(place), _ANY)


def last_name(place: str) -> str:
    """The name by which a place is known: "schedulers" of "scheduler.schedulers[0]"."""
    return place.rpartition(".")[2].partition("[")[0]


def _imported(paths: tuple[str, ...]) -> tuple[type, ...]:
    """The classes at these paths, as far as their modules are imported."""
    pairs = ((sys.modules.get(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in paths)
    return tuple(getattr(module, name) for module, name in pairs if module is not None and hasattr(module, name))


def _defined_as(target: Any) -> str:
    function = target.__func__ if isinstance(target, MethodType) else target
    return f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', type(target).__name__)}"


def _is_users_own(target: Any, kind: Kind) -> bool:
    """Whether it is a function of the user's own code, or an installed one that attends or is annotated to fit."""
    package = _defined_as(target).partition(".")[0]
    attends = kind is _MECHANISM and is_attention_function(target)
    if attends and package == "attention_modules":
        return True
    known = package in LIBRARIES or (package in sys.stdlib_module_names and package != "__main__")
    if not isinstance(target, (FunctionType, MethodType)) or known:
        return False
    try:
        returned = get_type_hints(target).get("return")
    except Exception:  # annotations that cannot be evaluated
        returned = None
    return attends or _is_users_module(package) or (isinstance(returned, type) and kind.takes(returned))


def _is_library(package: str) -> bool:
    """Whether a package is one of `LIBRARIES`; one that is not installed may be a file of the working folder."""
    return package in LIBRARIES and not comes_from_working_folder(package)


def _is_users_module(package: str) -> bool:
    """Whether the running program imported this package, and it is not installed: its own code, which ran already."""
    module = sys.modules.get(package)
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    if package == "__main__":
        return True
    if module is None or file is None or package in sys.stdlib_module_names:
        return False
    folders = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")}
    return not any(Path(file).is_relative_to(folder) for folder in folders)


def _is_loaded(path: str) -> bool:
    """Whether a path is that of a class, or of a registered function, in a module that is imported already."""
    parts = path.split(".")
    loaded = [size for size in range(1, len(parts)) if ".".join(parts[:size]) in sys.modules]
    if not loaded:
        return False
    found = getattr(sys.modules[".".join(parts[: loaded[-1]])], parts[loaded[-1]], None)
    return isinstance(found, type) or is_registered(found)


def _described(target: Any) -> str:
    if isinstance(target, type):
        return "another class"
    return "a function" if callable(target) else f"a {type(target).__name__}"


def _or_factory(kind: Kind) -> str:
    known = [name.rpartition(".")[2] for name in (*kind.factories, *kind.readers)]
    return f", or one of {', '.join(known)} or a function of your own" if known else ""
