"""Loading a Hugging Face model that was saved with swapped attention."""

from __future__ import annotations

import inspect
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any, ClassVar
from zipfile import is_zipfile

import torch
from torch import Tensor, nn

from attention_modules.extras import needed_for
from attention_modules.hosts.base import MARK, PLAN
from attention_modules.hosts.model.heads import as_held
from attention_modules.hosts.query import lose_query
from attention_modules.mechanism import Mechanism, available_mechanisms, mechanism_class, short_name
from attention_modules.swap import swap_attention

_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def load_pretrained(
    cls: Any,
    folder: str | os.PathLike[str],
    *args: Any,
    mechanism: Mechanism | Mapping[str, Mechanism] | None = None,
    **kwargs: Any,
) -> Any:
    """A Hugging Face model from a folder that ``save_pretrained`` of a swapped model wrote, swapped as it was.

    The folder also holds the query rows of layers whose mechanism uses no query, for :func:`restore_attention`.

    Args:
        cls: the model's class, or an Auto class such as ``AutoModelForImageClassification``; it may have another head.
        folder: the folder, or a name on the hub.
        *args: for ``cls.from_pretrained``, as are further keywords.
        mechanism: in place of mechanisms that are not registered by a short name, which are never imported because
            the folder says so, and of those whose options could not be written; where there are several, a mapping by
            the names that ``attnswap.json`` has for them.

    Raises:
        ValueError: if the folder has no ``attnswap.json``, or it has another form, names an unknown mechanism or
            another than ``mechanism``, or is of other weights than those that are loaded; if ``mechanism`` has no
            place, or ``device_map`` spreads the model over several devices.
        TypeError: if a mechanism does not take the options that the file holds.
        OSError: if there is no such folder, or it has no weights.
        ModuleNotFoundError: without the extra ``hf``.

    Example:
        >>> from attnswap import load_pretrained, swap_attention
        >>> import tempfile, transformers
        >>> config = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> model = transformers.BertModel(config)
        >>> report = swap_attention(model, "symmetric")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)
        ...     loaded = load_pretrained(transformers.BertModel, folder)
        >>> type(loaded.encoder.layer[0].attention.self.mechanism).__name__
        'SymmetricAttention'
    """
    with needed_for("load_pretrained", "hf"):
        import transformers  # noqa: F401
    hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
    plan = _read_plan(folder, hub)
    if kwargs.get("gguf_file") is not None:
        raise ValueError(f"gguf_file= names other weights than those that were saved with {PLAN}: leave it out")
    swaps, tensors = _swaps(folder, plan, mechanism), _read_tensors(folder, hub, plan, kwargs)
    plain: Any = _model_class(cls, folder, hub, kwargs.get("config"))

    class Loaded(plain):  # type: ignore[misc, valid-type]
        _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [
            *(plain._keys_to_ignore_on_load_unexpected or ()),
            r"(^|\.)mechanism\.",
        ]

    Loaded.__name__, Loaded.__qualname__, Loaded.__module__ = plain.__name__, plain.__qualname__, plain.__module__
    loaded = Loaded.from_pretrained(folder, *args, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded  # a tuple with output_loading_info=True
    model.__class__ = plain
    _check_as_saved(model)
    places = _places(model, plan.names)
    _tell_what_is_causal(model, plan, places, folder, hub)
    if len(swaps) > 1:  # a mechanism may read the values of layers whose turn is to come
        swap_attention(model, "softmax", where=list(places.values()))
    for swap in swaps:
        swap.carry_out(model, places, tensors)
    return loaded


def _tell_what_is_causal(
    model: Any, plan: _Plan, places: Mapping[str, str], folder: str | os.PathLike[str], hub: Mapping[str, Any]
) -> None:
    """Give layers their ``is_causal`` of then, which a user may have set, unless the configuration has changed."""
    from transformers import PretrainedConfig

    saved = PretrainedConfig.get_config_dict(folder, **hub)[0]
    same = saved.get("is_decoder", False) == getattr(model.config, "is_decoder", False)
    for each in plan.layers:
        if "is_causal" in each and each["name"] in places:
            layer = model.get_submodule(places[each["name"]])
            if same or not hasattr(layer, "is_causal"):
                layer.is_causal = each["is_causal"]


def _check_as_saved(model: Any) -> None:
    """Refuse what from_pretrained made of other weights than were looked at, or of weights on several devices.

    Raises:
        ValueError: naming the cause.
    """
    if other := getattr(model.config, "transformers_weights", None):
        raise ValueError(
            f"config.json has transformers_weights={other!r}, by which transformers loads this file in place of the "
            f"weights that were saved with {PLAN}: take it out"
        )
    if any("_hf_hook" in vars(module) for module in model.modules()):
        raise ValueError(
            "device_map spreads the model over several devices, and accelerate's hooks then keep its layers as they "
            "are: load it onto one device, and call accelerate.dispatch_model(model, device_map) on what you get"
        )


@dataclass(frozen=True)
class _Plan:
    """The swapped layers, and the file that lists them."""

    layers: Sequence[Mapping[str, Any]]
    content: bytes

    @property
    def names(self) -> list[str]:
        """Of the layers."""
        return [layer["name"] for layer in self.layers]


@dataclass(frozen=True)
class _Swap:
    """One mechanism with its options, and the layers that have it; ``lost`` are those whose query rows are unknown."""

    recorded: str
    mechanism: Mechanism
    options: Mapping[str, Any]
    names: Sequence[str]
    lost: Sequence[str]

    def carry_out(
        self, model: nn.Module, of_model: Mapping[str, str], tensors: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Swap the layers, and give their mechanisms the tensors that the folder has for them.

        Raises:
            ValueError: if the mechanism has another name than the file says (a class may have moved to another module),
                or other tensors.
        """
        places = {name: of_model[name] for name in self.names if name in of_model}
        if not places:
            return
        swap_attention(model, self.mechanism, where=list(places.values()), **self.options)
        for name, place in places.items():
            layer: Any = model.get_submodule(place)
            found = short_name(type(layer.mechanism))
            if found.rpartition(".")[2] != self.recorded.rpartition(".")[2]:
                raise ValueError(
                    f"mechanism= gives {found}, and {PLAN} has {self.recorded!r} for {', '.join(self.names)}: give "
                    "that one, or, where there are several, a mapping by their names"
                )
            try:
                layer.mechanism.load_state_dict(as_held(tensors[name], layer.mechanism))
            except RuntimeError as error:
                raise ValueError(f"the folder does not have the tensors of {found} in {name!r}: {error}") from error
            if name in self.lost:
                lose_query(layer, layer.dropped_query)


def _places(model: Any, names: Sequence[str]) -> dict[str, str]:
    """The saved layers' names in this model, which may have another head than the saved one, or be a part of it.

    Raises:
        ValueError: if it has none of them.
    """
    known, prefix = {name for name, _ in model.named_modules()}, f"{model.base_model_prefix}."
    found = {}
    for name in names:
        candidates = name, prefix + name, name.removeprefix(prefix)
        if place := next((each for each in candidates if each in known), None):
            found[name] = place
    if not found:
        raise ValueError(
            f"{PLAN} is of other layers than {type(model).__name__} has: it names {', '.join(names[:3])}, ...; give "
            "the class that was saved"
        )
    if absent := [name for name in names if name not in found]:
        warnings.warn(
            f"{type(model).__name__} has no {', '.join(absent[:3])}{', ...' if len(absent) > 3 else ''}, which "
            f"{PLAN} names too: {len(found)} of {len(names)} layers are swapped",
            stacklevel=3,
        )
    return found


def _swaps(folder: object, plan: _Plan, mechanism: Mechanism | Mapping[str, Mechanism] | None) -> list[_Swap]:
    """The swaps of a plan, one for each mechanism with its options.

    Raises:
        ValueError: if a mechanism is not known, or one that is given has no place.
    """
    taken: set[str] = set()
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for layer in plan.layers:
        groups.setdefault(json.dumps([layer["mechanism"], layer["options"]], sort_keys=True), []).append(layer)
    swaps = []
    for layers in groups.values():
        name, options = layers[0]["mechanism"], layers[0]["options"]
        names, lost = [layer["name"] for layer in layers], [layer["name"] for layer in layers if not layer["query"]]
        given = mechanism.get(name) if isinstance(mechanism, Mapping) else mechanism
        if name in available_mechanisms() and options is not None:
            swaps.append(_Swap(name, name, options, names, lost))
        elif given is not None and not (options is None and _takes_options(given)):
            taken.add(name)
            swaps.append(_Swap(name, given, options or {}, names, lost))
        else:
            why = (
                f"no options of {name!r}, as they are no plain data, and others would compute something else. Give a "
                "callable that takes an AttentionSpec and builds it as it was, as mechanism="
                if options is None
                else f"the mechanism {name!r}, which is not registered here: {_cure(name)}"
            )
            raise ValueError(f"{PLAN} of {folder} names for {', '.join(names)} {why}")
    unused = {*mechanism} - taken if isinstance(mechanism, Mapping) else mechanism is not None and not taken
    if unused:
        recorded = ", ".join(sorted({swap.recorded for swap in swaps}))
        raise ValueError(
            f"mechanism={mechanism!r} has no place: {PLAN} of {folder} names {recorded}, of which registered ones are "
            "built by their names; leave out what is not asked for"
        )
    return swaps


def _takes_options(mechanism: Any) -> bool:
    """Whether a mechanism, by name or class, has options, which its class alone does not say."""
    kind = mechanism_class(mechanism) if isinstance(mechanism, str) else mechanism
    return isinstance(kind, type) and len(inspect.signature(kind).parameters) > 1  # the first is the spec


def _cure(name: str) -> str:
    """How to load a mechanism of this name: a dotted one is that of a class or function, which no import registers."""
    if "." in name:
        return (
            f"it is known by its import path, and nothing is imported because a file says so. Give {name} itself as "
            "mechanism="
        )
    return "import the package that registers this name first, or give the class or function as mechanism="


def _read_plan(folder: str | os.PathLike[str], hub: Mapping[str, Any]) -> _Plan:
    """The layers that ``attnswap.json`` lists.

    Raises:
        ValueError: if there is no such file, or it has another form.
    """
    from transformers.utils import cached_file

    path = cached_file(
        os.fspath(folder),
        PLAN,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **hub,
    )
    if path is None:
        raise ValueError(
            f"{folder} has no {PLAN}, so that no swapped model was saved there by save_pretrained, or one with plain "
            "softmax alone; load it with from_pretrained, and call swap_attention"
        )
    try:
        raw = _content(path)
        content = json.loads(raw)
        layers = content["layers"]
        known = content["format"] == 3 and all(_is_layer(layer) for layer in layers)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} is no list of swapped layers that save_pretrained wrote: {error!r}") from error
    if not known or not layers or len({layer["name"] for layer in layers}) < len(layers):
        raise ValueError(
            f"{path} must hold format 3 and layers, each once, with 'name', 'mechanism', 'options' and 'query'; save "
            "the model anew, or load it with the version of attnswap that wrote it"
        )
    return _Plan(layers, raw)


def _content(path: str) -> bytes:
    """What is in a file that was found.

    Raises:
        FileNotFoundError: if it is gone since.
    """
    try:
        return Path(path).read_bytes()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path} was removed while it was to be loaded, as by another process that saves a model there: load it "
            "once that is done"
        ) from error


def _read_tensors(
    folder: str | os.PathLike[str], hub: Mapping[str, Any], plan: _Plan, options: Mapping[str, Any]
) -> dict[str, dict[str, Tensor]]:
    """The tensors of each layer's mechanism, where the weights were saved with this plan.

    transformers may rename what a file holds; the mark of a layer stands beside its mechanism's tensors all the same.

    Args:
        folder: where they are.
        hub: how it is found.
        plan: of the folder.
        options: of from_pretrained, which choose among the weights of the folder.

    Raises:
        ValueError: if the weights are damaged, or were saved without a swap or with another one, as where an earlier or
            later model was written into the folder in part.
    """
    from attention_modules.hosts.huggingface.saving import mark_of

    def find(name: str) -> str | None:
        from transformers.utils import cached_file

        quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        return cached_file(os.fspath(folder), name, **quiet, **hub)

    try:
        read = dict(_weights(find, options, lambda key: ".mechanism." in f".{key}"))
        marks = {key.removesuffix(MARK): read.pop(key).tolist() for key in [*read] if key.endswith(f".{MARK}")}
    except FileNotFoundError:
        raise
    except Exception as error:  # of json, safetensors and pickle
        raise ValueError(f"the weights of {folder} cannot be read ({type(error).__name__}: {error})") from error
    if not marks:
        raise ValueError(
            f"{PLAN} of {folder} is not of the weights beside it, which were saved without swapped attention; load "
            f"them with from_pretrained, or remove {PLAN}"
        )
    expected = [mark_of(plan.content, index).tolist() for index in range(len(plan.layers))]
    if sorted(marks.values(), key=str) != sorted(expected, key=str):
        raise ValueError(
            f"{PLAN} of {folder} is not of the weights beside it: {PLAN} names {len(plan.layers)} swapped layers "
            f"({', '.join(plan.names[:3])}, ...), and the weights have marks of {len(marks)} that say otherwise, as "
            "those of another save do, or weights that were cast; save the model again"
        )
    return {
        plan.names[index]: {key.removeprefix(prefix): read[key] for key in read if key.startswith(prefix)}
        for prefix, (_, index) in marks.items()
    }


def _weights(
    find: Callable[[str], str | None], options: Mapping[str, Any], wanted: Callable[[str], bool]
) -> Iterator[tuple[str, Tensor]]:
    """The wanted tensors of the files that transformers takes from a folder, in its order of preference, by key."""
    from safetensors import safe_open
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

    variant = options.get("variant")

    def named(name: str) -> str:
        start, dot, end = name.rpartition(".")
        return f"{start}{dot}{variant}.{end}" if variant else name

    safe, pickled = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
    asked = options.get("use_safetensors")
    kinds = [safe, pickled] if asked is None else [safe if asked else pickled]
    for whole, index in kinds:
        if found := find(named(whole)):
            files = [found]
        elif found := find(named(index)):
            shards = sorted({*json.loads(_content(found))["weight_map"].values()})
            for shard in shards:
                _check_inside(shard, found)
            files = [file for shard in shards if (file := find(shard)) is not None]
            if len(files) < len(shards):
                raise ValueError(f"{named(index)} names {len(shards)} files, of which {len(files)} are there")
        else:
            continue
        for file in files:
            if file.endswith(".safetensors"):
                with safe_open(file, framework="pt") as opened:
                    yield from ((key, opened.get_tensor(key)) for key in filter(wanted, opened.keys()))
            else:
                state = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
                yield from ((key, state[key]) for key in filter(wanted, state))
        return
    raise FileNotFoundError(f"beside {PLAN} there is no {', nor '.join(named(whole) for whole, _ in kinds)}")


def _check_inside(shard: Any, index: str) -> None:
    """Check that an index names a file beside it or below; a link of the hub's cache is beside it, wherever it leads.

    Raises:
        ValueError: if it names a file elsewhere, or a folder of the path is a link out of the index's folder.
    """
    path, folder = PurePath(str(shard)), Path(index).parent
    inside = isinstance(shard, str) and not (path.is_absolute() or {"..", ""} & {*shard.replace("\\", "/").split("/")})
    if (
        not inside
        or PureWindowsPath(shard).drive
        or not (folder / path).parent.resolve().is_relative_to(folder.resolve())
    ):
        raise ValueError(
            f"{index} names {shard!r}, which is no file of the index's folder: move the file there, and name it so"
        )


def _is_layer(layer: Any) -> bool:
    return (
        isinstance(layer, dict)
        and layer.keys() - {"is_causal"} == {"name", "mechanism", "options", "query"}
        and isinstance(layer["query"], bool)
        and isinstance(layer.get("is_causal", False), bool)
        and isinstance(layer["name"], str)
        and isinstance(layer["mechanism"], str)
        and isinstance(layer["options"], (dict, type(None)))
        and re.fullmatch(r"[^*?[\]]+", layer["name"]) is not None  # no pattern
        and not {"model", "mechanism", "spec", "where", "layers", "exclude"} & set(layer["options"] or ())
    )


def _model_class(cls: Any, folder: str | os.PathLike[str], hub: Mapping[str, Any], config: Any) -> type:
    """The class itself, or the one that an Auto class would build, from a configuration or its place where given.

    Raises:
        TypeError: if it is neither.
        ValueError: if the Auto class has none for this configuration.
    """
    from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

    if isinstance(cls, type) and issubclass(cls, PreTrainedModel):
        return cls
    mapping = getattr(cls, "_model_mapping", None)
    if mapping is None:
        raise TypeError(f"cls must be a class of Hugging Face models or one of their Auto classes, got {cls!r}")
    if not isinstance(config, PretrainedConfig):
        place = folder if config is None else config
        config = AutoConfig.from_pretrained(place, trust_remote_code=False, **hub)  # it would ask, and then run it
    if type(config) not in mapping:
        raise ValueError(f"{cls.__name__} has no model for the {type(config).__name__} of {folder}; give its class")
    found = mapping[type(config)]
    choices = found if isinstance(found, (list, tuple)) else (found,)
    named = [choice for choice in choices if choice.__name__ in (config.architectures or ())]
    return (*named, *choices)[0]
