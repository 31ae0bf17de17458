"""What each place takes: what a `class_path` stands for is looked at before it is called, wherever it comes from."""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, get_type_hints

import jsonargparse

from attention_modules.function import is_attention_function
from lightning_tasks.training.hparams import Spec, build, import_object, plain_spec

LIBRARIES = frozenset(
    {"attention_modules", "lightning_tasks", "attnswap"}
    | {"torch", "torchvision", "torchmetrics", "lightning", "pytorch_lightning", "timm", "transformers"}
)
"""Packages of which named factories are called, and no other function."""


@dataclass(frozen=True)
class Kind:
    """What a place takes: subclasses of `classes` that are none of `others`, and what named functions build.

    All are named by where they were defined. Of a file, no `readers`: they read files or run what they download.
    """

    words: str
    classes: tuple[str, ...]
    others: tuple[str, ...] = ()
    factories: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()

    def takes(self, target: type) -> bool:
        """Whether a class is of this kind."""
        return issubclass(target, _imported(self.classes)) and not issubclass(target, _imported(self.others))


def _of_lightning(name: str) -> tuple[str, str]:
    return f"lightning.pytorch.{name}", f"pytorch_lightning.{name}"


_AUTO = "transformers.models.auto.auto_factory._BaseAutoModelClass"
_SCHEDULES = ("torch.optim.lr_scheduler.LRScheduler", "timm.scheduler.scheduler.Scheduler")
_NAMED = "scheduler constant_schedule constant_schedule_with_warmup linear_schedule_with_warmup wsd_schedule "
_NAMED += "cosine_schedule_with_warmup cosine_with_hard_restarts_schedule_with_warmup inverse_sqrt_schedule "
_NAMED += "polynomial_decay_schedule_with_warmup cosine_with_min_lr_schedule_with_warmup reduce_on_plateau_schedule"
_TASK = Kind("a subclass of LightningModule", _of_lightning("LightningModule"))
_MECHANISM = Kind(
    "a subclass of AttentionMechanism or a function of (q, k, v, ...)", ("attention_modules.base.AttentionMechanism",)
)
_SCHEDULER = Kind(
    "a subclass of torch.optim.lr_scheduler.LRScheduler or timm.scheduler.Scheduler",
    _SCHEDULES,
    factories=(
        "timm.scheduler.scheduler_factory.create_scheduler_v2",
        *(f"transformers.optimization.get_{name}" for name in _NAMED.split()),
    ),
)
KINDS = {
    "_class_path": _TASK,
    "hyper_parameters": _TASK,
    "model": Kind(
        "a subclass of torch.nn.Module (and no LightningModule)",
        ("torch.nn.Module",),
        others=_TASK.classes,
        readers=(
            *("timm.models._factory.create_model", f"{_AUTO}.from_config", f"{_AUTO}.from_pretrained"),
            "transformers.modeling_utils.PreTrainedModel.from_pretrained",
        ),
    ),
    "optimizer": Kind(
        "a subclass of torch.optim.Optimizer",
        ("torch.optim.Optimizer",),
        factories=("timm.optim._optim_factory.create_optimizer_v2",),
    ),
    "scheduler": _SCHEDULER,
    "schedulers": _SCHEDULER,
    "other_attention": _MECHANISM,
    "mechanism": _MECHANISM,
    "callbacks": Kind("a subclass of lightning.pytorch.Callback", _of_lightning("Callback")),
    "data": Kind("a subclass of lightning.pytorch.LightningDataModule", _of_lightning("LightningDataModule")),
}
"""What each place takes, by its name; a string there is a name as well."""

_ANY = Kind(
    "a subclass of nn.Module, Optimizer, LRScheduler, Callback or LightningDataModule",
    ("torch.nn.Module", "torch.optim.Optimizer", *_SCHEDULES, *KINDS["callbacks"].classes, *KINDS["data"].classes),
)


def check_kind(target: Any, place: str, path: str = "") -> None:
    """Check that what a name stands for is of the kind that its place takes, before it is called.

    Functions count where they are named factories, code of the user's that is not installed, or of an installed package
    and annotated to return the kind (a mechanism: one of (q, k, v, ...)); none of the standard library or `LIBRARIES`.

    Args:
        target: what the name stands for.
        place: "optimizer", "scheduler.schedulers[0]", ...; the last name in it is looked up in `KINDS`.
        path: the name.

    Raises:
        TypeError: if it is not of this kind.
    """
    kind = kind_of(place)
    known = (*kind.factories, *kind.readers)
    if isinstance(target, type):
        if kind.takes(target):
            return
    elif defined_as(target) in known or (kind is not _ANY and _is_users_own(target, kind)):
        return
    names = ", ".join(name.rpartition(".")[2] for name in known)
    raise TypeError(
        f"{place} names {path or defined_as(target)!r}, which is {described(target)}: it must be {kind.words}"
        f"{f', or one of {names} or a function of your own' if names else ''}. It was not called"
    )


def checked_spec(value: Any, *modules: ModuleType, place: str) -> Spec:
    """As :func:`~lightning_tasks.training.hparams.plain_spec`; raises as :func:`check_kind` too."""
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


def build_typed_classes_only() -> None:
    """Have the command line build a class only where an argument's type asks for one, as jsonargparse 5 will.

    Until then it calls any "class_path" inside arguments that are annotated Any, and only warns of `os`, `pickle`, ...
    """
    jsonargparse.set_parsing_settings(instantiate_subclass_spec_in_any=False, import_path_denylist=[])


def kind_of(place: str) -> Kind:
    """The kind of a place, by the last name in it."""
    return KINDS.get(last_name(place), _ANY)


def last_name(place: str) -> str:
    """The name by which a place is known: "schedulers" of "scheduler.schedulers[0]"."""
    return place.rpartition(".")[2].partition("[")[0]


def _imported(paths: tuple[str, ...]) -> tuple[type, ...]:
    """The classes at these paths, as far as their modules are imported; others have no subclass yet."""
    pairs = ((sys.modules.get(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in paths)
    return tuple(getattr(module, name) for module, name in pairs if module is not None and hasattr(module, name))


def defined_as(target: Any) -> str:
    """The path under which a class or function was defined."""
    function = target.__func__ if isinstance(target, MethodType) else target
    return f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', type(target).__name__)}"


def described(target: Any) -> str:
    """In words, something that is not of the kind that was needed."""
    kind = "a function" if callable(target) else f"a {type(target).__name__}"
    return "another class" if isinstance(target, type) else kind


def _is_users_own(target: Any, kind: Kind) -> bool:
    """Whether it is a function of the user's own code, or an installed one that attends or is annotated to fit."""
    package = defined_as(target).partition(".")[0]
    attends = kind is _MECHANISM and is_attention_function(target)
    known = package in LIBRARIES or (package in sys.stdlib_module_names and package != "__main__")
    if known or not isinstance(target, (FunctionType, MethodType)):
        return attends and package == "attention_modules"
    try:
        returned = get_type_hints(target).get("return")
    except Exception:  # annotations that cannot be evaluated
        returned = None
    return attends or is_users_module(package) or (isinstance(returned, type) and kind.takes(returned))


def is_users_module(package: str) -> bool:
    """Whether the running program imported this package, and it is not installed: its own code, which ran already."""
    module = sys.modules.get(package)
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    if package == "__main__" or file is None or package in sys.stdlib_module_names:
        return package == "__main__"
    folders = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")}
    return not any(Path(file).is_relative_to(folder) for folder in folders)
