"""Rebuilding a module whose attention was swapped while it trained."""

from __future__ import annotations

import contextlib
import inspect
from argparse import ArgumentError
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl

from attention_modules.mechanisms.shared.options import check_flag
from attention_modules.stabilizers.sigma import renew_averaged, reparametrize_like
from lightning_tasks.files.names import TRUST_IT, allowed_names, closed_imports
from lightning_tasks.files.stored import check_checkpoint, check_stored
from lightning_tasks.files.swaps import carry_out, overrides, saved_plans
from lightning_tasks.files.weights import read_checkpoint
from lightning_tasks.recipes import read_settings
from lightning_tasks.training.hparams import import_object

Module = TypeVar("Module", bound=pl.LightningModule)


def load_swapped(cls: type[Module], path: str | Path, *, trust_checkpoint: bool = False, **kwargs: Any) -> Module:
    """A module from a checkpoint that a trainer with :class:`SwapAttention` wrote, swapped as it was there.

    What ``SigmaReparam`` put on is there again, too.

    The network must be built by ``__init__`` or ``configure_model``, as ``cls.load_from_checkpoint`` asks too: only a
    trainer calls ``setup``, which may need its data.

    Args:
        cls: the module's own class, of either Lightning package.
        path: the checkpoint.
        trust_checkpoint: whether what the checkpoint names may be imported and called wherever it comes from. Without
            it, only classes of attnswap, torch.nn, torch.optim, torchvision, torchmetrics, lightning, timm,
            transformers, the package of ``cls`` and modules of the user's that are imported already.
        **kwargs: for ``cls.load_from_checkpoint``: ``map_location``, ``strict``, ``weights_only`` and hyper-parameters.

    Raises:
        ValueError: if the checkpoint holds no swap or names what it may not, the network is not there before
            ``setup``, or its class is a subclass with a ``configure_model`` of its own.

    Example:
        The checkpoint of a foreign module that trained with ``SwapAttention``:

        >>> from attnswap import load_swapped
        >>> module = load_swapped(MyModule, "runs/version_0/checkpoints/last.ckpt")  # doctest: +SKIP
    """
    check_flag("trust_checkpoint", trust_checkpoint)
    weights_only = kwargs.get("weights_only") is not False
    content = read_checkpoint(path, weights_only, cure="pass weights_only=False")
    allowed = None if trust_checkpoint or not weights_only else allowed_names(cls, kwargs)
    check_checkpoint(content, allowed, path, kwargs.get("hparams_file"))
    if not saved_plans(content):
        if "callbacks" not in content:
            raise ValueError(
                f"{path} holds weights alone (save_weights_only), and no plan of a swap: where SwapAttention took "
                f"part, give {cls.__name__}(...) to a trainer with the same SwapAttention: trainer.test(..., "
                "ckpt_path=...)"
            )
        raise ValueError(
            f"{path} holds no swap: the trainer that saved it had no SwapAttention. Use "
            f"{cls.__name__}.load_from_checkpoint; if its model was swapped (by hand, or by an earlier trainer), swap "
            "the module, and load its state dict"
        )
    return _load(cls, path, content, allowed, **{**kwargs, "weights_only": weights_only})


def load_module(
    path: str | Path, default: type[pl.LightningModule] | None = None, trust_checkpoint: bool = False
) -> pl.LightningModule:
    """The module in a checkpoint, swapped as it was there.

    Its class is the one that the checkpoint names, else ``default``, else that in the config.yaml of the run whose
    folder ``checkpoints`` it lies in.

    Args:
        path: the checkpoint.
        default: the class where it names none.
        trust_checkpoint: as for :func:`load_swapped`.

    Raises:
        ValueError: if there is no class, and as :func:`load_swapped`.
    """
    check_flag("trust_checkpoint", trust_checkpoint)
    content = read_checkpoint(path)
    allowed = None if trust_checkpoint else allowed_names(default)
    check_checkpoint(content, allowed, path)
    named = content.get("hyper_parameters", {}).get("_class_path")
    run = Path(path).resolve().parent.parent
    if named is None and default is None and (run / "config.yaml").is_file():
        model = read_settings(run / "config.yaml").get("model")
        named = model.get("class_path") if isinstance(model, dict) else None
        check_stored({"_class_path": named}, allowed, run / "config.yaml", "model")
    cls = default if named is None else import_object(named)
    if cls is None:
        raise ValueError(f"{path} does not say what module it holds: leave it in its run's folder, beside config.yaml")
    return _load(cls, path, content, allowed, map_location="cpu", weights_only=True)


def _load(
    cls: type[Module], path: str | Path, content: dict[str, Any], allowed: Collection[str] | None, **kwargs: Any
) -> Module:
    """The module of a checkpoint that is checked already, with the plans that it holds carried out."""
    if "trust_checkpoint" in inspect.signature(cls.load_from_checkpoint).parameters:
        kwargs["trust_checkpoint"] = True  # for our tasks, which check names themselves
    stored = content.get("hyper_parameters", {})
    try:
        with closed_imports(allowed, stored, kwargs), _swapping(cls, content) as swapped:
            module = cls.load_from_checkpoint(path, **kwargs)
    except ArgumentError as error:
        raise ValueError(f"{path}: {error}; {TRUST_IT}") from error
    if saved_plans(content) and not any(each is module for each in swapped):
        raise ValueError(
            f"{path} holds a {type(module).__name__}, whose configure_model is not that of {cls.__name__}, so that it "
            f"was not swapped; give {type(module).__name__}"
        )
    renew_averaged(module)
    return module


@contextlib.contextmanager
def _swapping(cls: type[pl.LightningModule], content: dict[str, Any]) -> Iterator[list[pl.LightningModule]]:
    """Swap what a class builds as a checkpoint's plans say; the list gets each module that was.

    Lightning calls configure_model after __init__ and before it loads weights: the one moment to swap. The class itself
    gets the hook, as what the command line saved asks for that class and takes no other.
    """
    plans = saved_plans(content)
    swapped: list[pl.LightningModule] = []
    original, own = cls.configure_model, "configure_model" in vars(cls)

    def configure_model(self: pl.LightningModule) -> None:
        original(self)  # type: ignore[arg-type]
        names = {name for name, _ in self.named_modules()}
        missing = [name for plan in plans for name in plan["layers"] if name not in names]
        if missing and overrides(self, "setup"):
            raise ValueError(
                f"{cls.__name__} has no {missing[0]!r} yet: it builds its network in setup(), which nothing calls when "
                "a checkpoint is loaded. Build it in __init__ or configure_model, or keep SwapAttention among the "
                f"trainer's callbacks and give the trainer the checkpoint: trainer.test({cls.__name__}(...), "
                "ckpt_path=...)"
            )
        for plan in plans:
            carry_out(self, plan)
        reparametrize_like(self, content.get("state_dict", {}))
        swapped.append(self)

    if not plans:
        yield swapped
        return
    cls.configure_model = configure_model  # type: ignore[assignment, method-assign]
    try:
        yield swapped
    finally:
        if own:
            cls.configure_model = original  # type: ignore[method-assign]
        else:
            del cls.configure_model
