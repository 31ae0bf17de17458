"""Loading a Hugging Face model that was saved with swapped attention."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from attention_modules.extras import needed_for
from attention_modules.hosts.base import MARK, PLAN
from attention_modules.hosts.query import lose_query
from attention_modules.mechanism import Mechanism, available_mechanisms, short_name
from attention_modules.swap import swap_attention

_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def load_pretrained(
    cls: Any, folder: str | os.PathLike[str], *args: Any, mechanism: Mechanism | None = None, **kwargs: Any
) -> Any:
    """A Hugging Face model from a folder that ``save_pretrained`` of a swapped model wrote, swapped as it was.

    The folder does not hold the query rows of layers whose mechanism uses no query, so that
    :func:`restore_attention` refuses those layers.

    Args:
        cls: the model's class, or an Auto class such as ``AutoModelForImageClassification``.
        folder: the folder, or a name on the hub.
        *args: for ``cls.from_pretrained``, as are further keywords.
        mechanism: in place of mechanisms that are not registered by a short name, which are never imported because
            the folder says so, and of those whose options could not be written.

    Raises:
        ValueError: if the folder has no ``attnswap.json``, or it has another form, names an unknown mechanism or
            another than ``mechanism``, or is of other weights than those in the folder.
        TypeError: if a mechanism does not take the options that the file holds.
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
    swaps = _swaps(folder, _read_plan(folder, hub), mechanism)
    _refuse_other_weights(folder, hub, {name for swap in swaps for name in swap.names})
    plain: Any = _model_class(cls, folder, hub)

    class Loaded(plain):  # type: ignore[misc, valid-type]
        _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [
            *(plain._keys_to_ignore_on_load_unexpected or ()),
            rf"\.{MARK}$",
        ]

        def __init__(self, *init_args: Any, **init_kwargs: Any) -> None:
            super().__init__(*init_args, **init_kwargs)
            for swap in swaps:
                swap.carry_out(self)

    Loaded.__name__, Loaded.__qualname__, Loaded.__module__ = plain.__name__, plain.__qualname__, plain.__module__
    loaded = Loaded.from_pretrained(folder, *args, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded  # a tuple with output_loading_info=True
    model.__class__ = plain
    for swap in swaps:
        swap.settle(model)
    return loaded


@dataclass(frozen=True)
class _Swap:
    """One mechanism with its options, and the layers that have it."""

    recorded: str
    mechanism: Mechanism
    options: Mapping[str, Any]
    names: Sequence[str]

    def carry_out(self, model: nn.Module) -> None:
        """Swap the layers.

        Raises:
            ValueError: if the mechanism has another name than the file says; a class may have moved to another module.
        """
        swap_attention(model, self.mechanism, where=list(self.names), **self.options)
        layer: Any = model.get_submodule(self.names[0])
        found = short_name(type(layer.mechanism))
        if found.rpartition(".")[2] != self.recorded.rpartition(".")[2]:
            raise ValueError(
                f"mechanism= gives {found}, and {PLAN} has {self.recorded!r} for {', '.join(self.names)}: give that "
                f"one, or, where it was renamed, write its new name into {PLAN}"
            )

    def settle(self, model: nn.Module) -> None:
        """Build the mechanisms anew, now that the layers are real: transformers built them on the meta device.

        It loads what is in the file; other buffers of a mechanism have no values unless they are computed again.
        """
        layers: list[Any] = [model.get_submodule(name) for name in self.names]
        states = [layer.mechanism.state_dict() for layer in layers]
        for layer in layers:
            lose_query(layer, layer.dropped_query)
        self.carry_out(model)
        for layer, state in zip(layers, states, strict=True):
            layer.mechanism.load_state_dict(state)


def _swaps(folder: object, plan: Sequence[Mapping[str, Any]], given: Mechanism | None) -> list[_Swap]:
    """The swaps of a plan, one for each mechanism with its options."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for layer in plan:
        groups.setdefault(json.dumps([layer["mechanism"], layer["options"]], sort_keys=True), []).append(layer)
    swaps = []
    for layers in groups.values():
        name, options = layers[0]["mechanism"], layers[0]["options"]
        names = [layer["name"] for layer in layers]
        if name in available_mechanisms() and options is not None:
            swaps.append(_Swap(name, name, options, names))
        elif given is not None:
            swaps.append(_Swap(name, given, options or {}, names))
        else:
            why = (
                f"the mechanism {name!r}, which is not registered here. Import its package, or give the class or "
                "function as mechanism="
                if name not in available_mechanisms()
                else f"no options of {name!r}, as they are no plain data. Give a callable that takes an AttentionSpec "
                "as mechanism="
            )
            raise ValueError(f"{PLAN} of {folder} names for {', '.join(names)} {why}")
    return swaps


def _read_plan(folder: str | os.PathLike[str], hub: Mapping[str, Any]) -> list[dict[str, Any]]:
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
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        layers = content["layers"]
        known = content["format"] == 1 and all(_is_layer(layer) for layer in layers)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} is no list of swapped layers that save_pretrained wrote: {error!r}") from error
    if not known or not layers or len({layer["name"] for layer in layers}) < len(layers):
        raise ValueError(
            f"{path} must hold format 1 and layers, each once, with 'name', 'mechanism' and 'options'; save the model "
            "anew, or load it with the version of attnswap that wrote it"
        )
    return layers


def _refuse_other_weights(folder: str | os.PathLike[str], hub: Mapping[str, Any], names: set[str]) -> None:
    """Refuse a plan that an earlier model left beside weights which were saved without a swap.

    Raises:
        ValueError: if no weight in the folder's safetensors files is marked, or others than the plan names.
    """
    from safetensors import safe_open
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

    found = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False, **hub}
    keys: Sequence[str] = ()
    if (index := cached_file(os.fspath(folder), SAFE_WEIGHTS_INDEX_NAME, **found)) is not None:
        with open(index, encoding="utf-8") as file:
            keys = list(json.load(file)["weight_map"])
    elif (weights := cached_file(os.fspath(folder), SAFE_WEIGHTS_NAME, **found)) is not None:
        with safe_open(weights, framework="pt") as file:
            keys = list(file.keys())
    marked = {key.removesuffix(f".mechanism.{MARK}") for key in keys if key.endswith(f".{MARK}")}
    if keys and not marked:
        raise ValueError(
            f"{PLAN} of {folder} is not of the weights beside it, which were saved without swapped attention; load "
            f"them with from_pretrained, or remove {PLAN}"
        )
    if keys and len(marked) != len(names):
        raise ValueError(
            f"{PLAN} of {folder} is not of the weights beside it: it names {len(names)} swapped layers, and the "
            f"weights are of {len(marked)} ({', '.join(sorted(marked)[:3])}, ...); save the model again"
        )


def _is_layer(layer: Any) -> bool:
    return (
        isinstance(layer, dict)
        and layer.keys() == {"name", "mechanism", "options"}
        and isinstance(layer["name"], str)
        and isinstance(layer["mechanism"], str)
        and isinstance(layer["options"], (dict, type(None)))
        and re.fullmatch(r"[\w.]+", layer["name"]) is not None  # no pattern
        and not {"model", "mechanism", "spec", "where", "layers", "exclude"} & set(layer["options"] or ())
    )


def _model_class(cls: Any, folder: str | os.PathLike[str], hub: Mapping[str, Any]) -> type:
    """The class itself, or the one that an Auto class would build.

    Raises:
        TypeError: if it is neither.
        ValueError: if the Auto class has none for this configuration.
    """
    from transformers import AutoConfig, PreTrainedModel

    if isinstance(cls, type) and issubclass(cls, PreTrainedModel):
        return cls
    mapping = getattr(cls, "_model_mapping", None)
    if mapping is None:
        raise TypeError(f"cls must be a class of Hugging Face models or one of their Auto classes, got {cls!r}")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, **hub)  # it would ask, and then run it
    if type(config) not in mapping:
        raise ValueError(f"{cls.__name__} has no model for the {type(config).__name__} of {folder}; give its class")
    found = mapping[type(config)]
    choices = found if isinstance(found, (list, tuple)) else (found,)
    named = [choice for choice in choices if choice.__name__ in (config.architectures or ())]
    return (*named, *choices)[0]
