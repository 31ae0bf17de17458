"""Configurations of mmsegmentation: found by name or path, and changed as a description of a model asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from attention_modules.mechanism import nearest
from lightning_tasks.models.mmcv_ops import provide_ops
from lightning_tasks.training.hparams import import_object
from lightning_tasks.training.kinds import check_kind

_TEST_CFG = ("mode", "crop_size", "stride")


def load_mmseg() -> Any:
    """The package `mmseg`, with the stand-in for compiled operators where it needs one.

    Raises:
        ModuleNotFoundError: if the extra is not installed.
    """
    try:
        provide_ops()
        import mmseg
        import mmseg.models
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"a model of mmsegmentation needs the extra: pip install 'attnswap[mmseg]' ({error})", name=error.name
        ) from error
    return mmseg


def shipped_configs() -> dict[str, Path]:
    """mmsegmentation's own configurations of models: name -> file."""
    root = Path(load_mmseg().__file__).parent / ".mim" / "configs"
    files = (path for path in sorted(root.rglob("*.py")) if "_base_" not in path.parts)
    return {path.stem: path for path in files}


def config_file(name: str) -> Path:
    """The file of a configuration: what ``name`` names among the shipped ones, else the path that it is.

    Raises:
        FileNotFoundError: if it ends in .py, and there is no such file.
        ValueError: if no shipped configuration has this name; the text gives the nearest.
    """
    if not isinstance(name, str):
        raise ValueError(f"mmseg_config is {name!r}: give the name of a configuration, or the path of one")
    shipped = shipped_configs()
    if name in shipped:
        return shipped[name]
    if name.endswith(".py"):
        if not Path(name).is_file():
            hint = (
                f"; without .py it is one that mmsegmentation ships: {stem}"
                if (stem := Path(name).stem) in shipped
                else ""
            )
            raise FileNotFoundError(f"mmseg_config={name}: no such file{hint}")
        return Path(name)
    near = nearest(name, shipped, beginnings=True)
    hint = f"the nearest are {', '.join(near)}" if near else "its folder .mim/configs has them"
    raise ValueError(f"mmsegmentation has no configuration {name!r}; {hint}. A file of your own is a path with .py")


def model_config(file: Path, options: Mapping[str, Any]) -> Any:
    """The section `model` of a configuration, a file of Python that is run.

    Args:
        file: the configuration.
        options: changes by dotted path, as ``--cfg-options`` of mmsegmentation's tools: ``{"model.backbone.num_layers":
            6}``; a number in a path is an index of a list.

    Raises:
        ValueError: if the file cannot be read or has no model with a backbone, or an option cannot be set, or would
            change nothing, as it is no part of the model.
    """
    from mmengine.config import Config

    try:
        config = Config.fromfile(file)
    except Exception as error:  # whatever a file that is run raises
        raise ValueError(f"mmseg_config={file} cannot be read: {type(error).__name__}: {error}") from error
    if outside := [name for name in options if not name.startswith("model.") and name != "model"]:
        raise ValueError(
            f"cfg_options has {outside[0]!r}, and of a configuration the model alone is used: begin with model., as in "
            "model.backbone.num_layers"
        )
    known = {*_TEST_CFG, *((config.get("model") or {}).get("test_cfg") or {})}
    try:
        config.merge_from_dict(dict(options))
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"cfg_options {dict(options)} do not fit {file.name}: {error}") from error
    if "model" not in config:
        raise ValueError(f"mmseg_config={file}: it has no `model`")
    if unknown := [name for name in config.model.get("test_cfg") or {} if name not in known]:  # nothing would read it
        raise ValueError(f"cfg_options has model.test_cfg.{unknown[0]}; that section has {', '.join(sorted(known))}")
    if "backbone" not in config.model:
        raise ValueError(f"mmseg_config={file}: its model ({config.model.get('type')}) has no `backbone`; give another")
    return config.model


def check_types(config: Any) -> None:
    """Check every "type" that is a dotted path: mmengine would import and call whatever it names.

    Raises:
        ValueError: if it names nothing.
        TypeError: if it is neither registered nor a class of modules.
    """
    from mmengine.registry import MODELS

    for section in _sections(config):
        name = section.get("type")
        if not isinstance(name, str) or "." not in name:
            continue
        scope, _, registered = name.partition(".")
        if scope != MODELS.scope and scope not in MODELS.children:
            with suppress(ImportError):
                import_module(f"{scope}.registry")  # as mmengine does for a library of OpenMMLab's
        registry = MODELS if scope == MODELS.scope else MODELS.children.get(scope)
        if registry is None or registered not in registry.module_dict:
            check_kind(import_object(name), "type", name)


def without_pretrained(config: Any) -> None:
    """Take out what would read weights, anywhere in a section of a configuration."""
    for section in _sections(config):
        if "pretrained" in section:
            section["pretrained"] = None
        if section.get("init_cfg") and _reads_weights(section["init_cfg"]):
            section["init_cfg"] = None


def set_num_classes(config: Any, num_classes: int) -> None:
    """Give every head this number of classes."""
    for name in ("decode_head", "auxiliary_head"):
        for section in _sections(config.get(name)):
            if "num_classes" in section:
                section["num_classes"] = num_classes


def set_crop_size(config: Any, size: int) -> None:
    """Build for crops of ``size`` pixels: the positions, what training pads to, and the windows with their stride."""
    if "img_size" in config.backbone:
        config.backbone.img_size = (size, size)
    if (config.get("data_preprocessor") or {}).get("size") is not None:
        config.data_preprocessor.size = (size, size)
    windows = config.get("test_cfg", {})
    if windows.get("mode") == "slide":
        windows.stride = tuple(max(1, size * s // c) for s, c in zip(windows.stride, windows.crop_size, strict=True))
        windows.crop_size = (size, size)


def _reads_weights(init: Any) -> bool:
    return any(entry.get("type") == "Pretrained" for entry in (init if isinstance(init, list) else [init]))


def _sections(config: Any) -> Iterator[Any]:
    """Every mapping in a section, itself included."""
    if isinstance(config, Mapping):
        yield config
        config = list(config.values())
    if isinstance(config, (list, tuple)):
        for entry in config:
            yield from _sections(entry)
