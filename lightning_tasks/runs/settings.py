"""The settings of runs: read from their folders, flattened, compared, and searched for what was swapped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_tasks.bounded_yaml import BoundedLoader
from lightning_tasks.errors import UsageError, reason
from lightning_tasks.files.swaps import SWAPPED
from lightning_tasks.recipes import check_size
from lightning_tasks.runs.safe_files import MOST_SETTINGS_BYTES, refuse_foreign

# What says where, how often and in how many goes a run was made, and nothing of what was done in it. The number of
# classes follows from the data where it is not given, and then stands in the settings of a resumed run alone.
_OF_THE_RUN = (
    *("seed_everything", "trainer.default_root_dir", "trainer.logger", "ckpt_path", "model.num_classes"),
    SWAPPED,  # which follows from the others
)
_ENTRY = re.compile(r"[^\[]*\[[^\]]*\]")


class _Reader(BoundedLoader):
    """YAML in which what a foreign module kept (classes, tuples) is read as plain data, and never built."""


def _plain(loader: _Reader, tag: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return f"{tag.rpartition(':')[2]} {loader.construct_scalar(node)}".strip()
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return loader.construct_mapping(node, deep=True) if isinstance(node, yaml.MappingNode) else tag


_Reader.add_multi_constructor("tag:yaml.org,2002:python/", _plain)
_Reader.add_multi_constructor("!", _plain)


def read_run_settings(folder: Path) -> dict[str, Any] | None:
    """The configuration that a run saved, else the module's hyper-parameters under `model`, else None.

    Beside a configuration stands, as `swapped_attention`, what its swaps came to.

    Raises:
        UsageError: the file holds something else than settings, names a swap in another form than ours, is too large,
            or is a link out of the folder.
    """
    config, hparams = folder / "config.yaml", folder / "hparams.yaml"
    given, logged = _read(config, folder), _read(hparams, folder)
    if given and SWAPPED in logged:
        _check_swaps({SWAPPED: logged[SWAPPED]}, hparams)
        given[SWAPPED] = logged[SWAPPED]
    if given or logged:
        settings = given or {"model": logged}
        _check_swaps(settings, config if given else hparams)
        return settings
    return None


def _read(path: Path, folder: Path) -> dict[str, Any]:
    """The settings in a file; none where there is no file."""
    if not path.is_file():
        return {}
    refuse_foreign(path, folder, MOST_SETTINGS_BYTES)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Reader)
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {reason(error)}") from error
    check_size(content, path)
    if content is not None and not isinstance(content, dict):
        raise UsageError(f"{path} holds {type(content).__name__} where settings (`name: value`) are needed")
    return content or {}


def _check_swaps(settings: dict[str, Any], path: Path) -> None:
    try:
        swapped(settings)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: what it says was swapped: {reason(error)}") from error


def saved_seed(settings: dict[str, Any] | None) -> int | None:
    """The seed that a run was started with, None where its settings name none."""
    seed = (settings or {}).get("seed_everything")
    return seed if isinstance(seed, int) and not isinstance(seed, bool) else None


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested settings by dotted name, as text; an entry of a list of classes is named by its class, not by its place.

    So a callback more in one run does not make all later ones differ.
    """
    if isinstance(value, Mapping) and value:
        found: dict[str, str] = {}
        for key, entry in value.items():
            inner = prefix if key == "init_args" else f"{prefix}.{key}" if prefix else str(key)
            found |= flatten(entry, inner)
        return found
    if isinstance(value, Sequence) and value and all(isinstance(e, Mapping) and "class_path" in e for e in value):
        found = {}
        seen: dict[str, int] = {}
        for entry in value:
            kind = str(entry["class_path"]).rpartition(".")[2]
            seen[kind] = seen.get(kind, 0) + 1
            found |= flatten(entry, f"{prefix}[{kind}{'' if seen[kind] == 1 else f' {seen[kind]}'}]")
        return found
    return {prefix: "none" if value is None else str(value)}


def same_but_for_the_run(settings: dict[str, Any]) -> dict[str, str]:
    """The flat settings without the seed, the loggers and folders."""
    return {
        name: value
        for name, value in flatten(settings).items()
        if not any(name == own or name.startswith((f"{own}.", f"{own}[")) for own in _OF_THE_RUN)
    }


def differences(settings: Mapping[str, dict[str, Any] | None]) -> dict[str, list[str | None]]:
    """Of configurations by name, each setting that is not the same in all whose settings are known; the model's first.

    Returns:
        By setting, its text in each configuration, None where it has none. A callback that not all have is one row.
    """
    flat = [None if each is None else same_but_for_the_run(each) for each in settings.values()]
    entries = [{_entry(name) for name in each} for each in flat if each is not None]
    shared = set.intersection(*entries) if entries else set()
    flat = [None if each is None else _with_lone_entries_short(each, shared) for each in flat]
    known = [each for each in flat if each is not None]
    names = sorted(
        dict.fromkeys(name for each in known for name in each), key=lambda name: not name.startswith("model")
    )
    return {
        name: [None if each is None else each.get(name) for each in flat]
        for name in names
        if len({each.get(name) for each in known}) > 1
    }


def _entry(name: str) -> str | None:
    """The entry of a list of classes that a flat setting is of, as "trainer.callbacks[RunSummary]"."""
    found = _ENTRY.match(name)
    return None if found is None else found[0]


def _with_lone_entries_short(flat: dict[str, str], shared: set[str | None]) -> dict[str, str]:
    """The settings with one "yes" for all those of an entry that not every configuration has."""
    short: dict[str, str] = {}
    for name, value in flat.items():
        entry = _entry(name)
        short |= {name: value} if entry is None or entry in shared else {entry: "yes"}
    return short


def swapped(settings: dict[str, Any] | None) -> list[str]:
    """What was put into which attention layers, in words: as it was logged for each layer, else as the settings say."""
    if settings is None:
        return ["not known: the folder has neither config.yaml nor hyper-parameters"]
    plain = "softmax in all layers"  # what models have where a callback swaps, too
    model = settings.get("model")
    logged = next((each[SWAPPED] for each in (settings, model) if isinstance(each, Mapping) and SWAPPED in each), None)
    found = _swaps(settings) if logged is None else _logged(logged)
    texts = [text for text in dict.fromkeys(found) if text != plain]
    return texts or ["nothing that the settings say: softmax"]


def _swaps(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if str(value.get("class_path", "")).rpartition(".")[2] == "SwapAttention":
            given = value.get("init_args") or {}
            options = {**(given.get("options") or {}), **(value.get("dict_kwargs") or {})}
            yield _swap_text(given.get("mechanism"), options, given.get("layers"), given.get("where"))
        elif isinstance(value.get("mechanism"), str) and "scheduler_interval" in value:  # a task's
            text = _swap_text(value["mechanism"], value.get("options"), value.get("layers"), None)
            other = value.get("other_attention")
            yield f"{text}, {other} in the others" if other else text
    if isinstance(value, (Mapping, list)):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _swaps(entry)


def _logged(plans: Any) -> Iterator[str]:
    """What acted in which layers when a fit began: what came after, and replaced, what the settings say."""
    if not isinstance(plans, list) or not all(isinstance(plan, Mapping) for plan in plans):
        raise TypeError(f"{SWAPPED} must be a list of mappings, got {plans!r}")
    for plan in plans:
        yield _swap_text(plan["mechanism"], plan["options"], plan["layers"], None)


def _swap_text(mechanism: Any, options: Any, layers: Any, where: Any) -> str:
    name = str(mechanism).rpartition(".")[2]
    if isinstance(options, Mapping) and options:
        name += f" ({', '.join(f'{key} {value}' for key, value in options.items())})"
    place = "all layers" if layers is None else f"layers {', '.join(map(str, layers))}"
    return f"{name} in {place}" + (f" of {where}" if where else "")
