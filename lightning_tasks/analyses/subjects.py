"""What an analysis looks at: a model of any origin, its layers, and what these are given in a forward pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from attention_modules import AttentionSwapError, load_pretrained, swap_attention
from attention_modules.hosts import attention_layers
from attention_modules.hosts.base import PLAN, Host
from attention_modules.hosts.layer_call import LayerCall
from attention_modules.mechanism import check_options, mechanism_class
from lightning_tasks.errors import UsageError
from lightning_tasks.image_classification import ImageClassificationTask
from lightning_tasks.models.causal_lm import position_limit
from lightning_tasks.models.segmenter import Segmenter
from lightning_tasks.models.timm_model import build_timm_model, check_model_name, normalization
from lightning_tasks.training.eager import eager


@dataclass(frozen=True)
class Subject:
    """A model in eval mode, in float32.

    Args:
        model: the model.
        prepare: what the model takes, of token ids ``[B, n]`` or of images ``[B, in_chans, H, W]`` in [0, 1].
        img_size: H = W of its images; None for a model of text.
        num_positions: the longest input in tokens, where the model bounds it.
        in_chans: channels of its images.
        plain: the model as it was loaded, where ``model`` has another mechanism in the layers of ``held``.
        held: names of layers whose outputs are those of ``plain``, so that all layers have its inputs.
    """

    model: nn.Module
    prepare: Callable[[Tensor], Tensor]
    img_size: int | None
    num_positions: int | None
    in_chans: int = 3
    plain: nn.Module | None = None
    held: Sequence[str] = ()

    def forward(self, inputs: Tensor) -> None:
        """Run the model on these inputs, for what its hooks see.

        Raises:
            ValueError: if it refuses them.
        """
        try:
            with torch.no_grad(), eager():
                self._run(self.prepare(inputs))
        except UsageError:  # a hook's
            raise
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            shape = list(inputs.shape)
            raise ValueError(f"{type(self.model).__name__} refuses inputs {shape}: {shortened(error)}") from error

    def _run(self, given: Tensor) -> None:
        if self.plain is None:
            self.model(given)
            return
        outputs: dict[str, list[Any]] = {name: [] for name in self.held}
        with _hooked(self.plain, {name: partial(_keep, kept) for name, kept in outputs.items()}):
            self.plain(given)
        with _hooked(self.model, {name: partial(_put_back, iter(kept)) for name, kept in outputs.items()}):
            self.model(given)


def _keep(kept: list[Any], module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    kept.append(output)


def _put_back(kept: Iterator[Any], module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return next(kept)


@contextmanager
def _hooked(model: nn.Module, hooks: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    handles = [model.get_submodule(name).register_forward_hook(hook) for name, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Layer:
    """A layer by its name in the model; ``num_heads`` and ``host`` where a host knows it."""

    name: str
    module: nn.Module
    num_heads: int | None
    host: Host | None = None


def load_subject(
    name: str, random: bool = False, seed: int = 0, trust_checkpoint: bool = False, keep_swap: bool = False
) -> Subject:
    """A model by name or path.

    A checkpoint (``.ckpt``) of one of our tasks, a timm model by name, or a Hugging Face model by name or folder;
    where ``random``, initialized with ``seed``, and then a Hugging Face model type ("bert", "gpt2") with its default
    sizes is a name too. The global random state is not touched. What a checkpoint may name is said at
    :func:`~lightning_tasks.load_swapped`. A folder of a model that was saved swapped is refused, or, with
    ``keep_swap``, swapped as it was.

    Raises:
        ValueError: if it cannot be loaded, or takes neither text nor images.
    """
    model: Any = load_model(name, random, seed, trust_checkpoint, keep_swap)
    task = getattr(model, "model", None) if name.endswith(".ckpt") else None
    if isinstance(task, Segmenter):  # images of one window, all in one pass
        return Subject(task, _as_they_are, task.img_size, None)
    if isinstance(model, ImageClassificationTask):  # it normalizes images itself
        return Subject(model, _as_they_are, _img_size(name, task), None, model.in_chans)
    network = model if task is None else task
    if hasattr(network, "pretrained_cfg"):
        in_chans = getattr(model, "in_chans", 3)
        mean, std = normalization(network, in_chans, None, None)
        if network is not model:
            rank_zero_warn(
                f"{type(model).__name__} does not say how its images are prepared: they are normalized with mean "
                f"{mean} and std {std}, of its network's pretrained_cfg. Where its data or its forward do otherwise, "
                "call the function in Python with images of your own (attnswap.explore, attention_maps)"
            )
        return Subject(model, _normalizing(mean, std), _img_size(name, network), None, in_chans)
    if getattr(model, "main_input_name", None) == "pixel_values":
        return Subject(model, _normalizing(*_of_processor(name)), _side(name, model.config.image_size), None)
    if token_embedding(model) is None:
        raise ValueError(f"{name} ({type(model).__name__}) takes neither tokens nor images, as far as can be told")
    return Subject(model, _as_they_are, None, position_limit(model if task is None else task))


def _normalizing(mean: Sequence[float], std: Sequence[float]) -> Callable[[Tensor], Tensor]:
    means, stds = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    return lambda x: (x - means.to(x)) / stds.to(x)


def _of_processor(name: str) -> tuple[list[float], list[float]]:
    """Mean and standard deviation by which the processor of a Hugging Face model normalizes; 0.5 where it has none."""
    from transformers.image_processing_utils import BaseImageProcessor

    said: dict[str, Any] = {}
    if "/" in name or Path(name).is_dir():  # else a type of models, which has no processor
        try:
            said, _ = BaseImageProcessor.get_image_processor_dict(name)
        except (OSError, ValueError) as error:
            rank_zero_warn(f"{name} has no image processor that can be read: images get mean and std 0.5 ({error})")
    if said.get("do_normalize") is False:
        return [0.0], [1.0]
    mean, std = said.get("image_mean") or 0.5, said.get("image_std") or 0.5
    return [*mean] if isinstance(mean, Sequence) else [mean], [*std] if isinstance(std, Sequence) else [std]


def load_model(
    name: str, random: bool = False, seed: int = 0, trust_checkpoint: bool = False, keep_swap: bool = False
) -> nn.Module:
    """The model of :func:`load_subject`, whatever it takes, in eval mode and float32.

    Raises:
        ValueError: if it cannot be loaded.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _load(name, random, trust_checkpoint, keep_swap).float().eval().requires_grad_(False)


def _as_they_are(inputs: Tensor) -> Tensor:
    return inputs


def with_mechanism(
    subject: Subject, layers: str | None, mechanism: str, options: Mapping[str, Any], seed: int = 0
) -> Subject:
    """The subject with a mechanism in the chosen layers, at the inputs that the layers have without it.

    Each forward pass runs the model as it was, too, and the layers' outputs are replaced by those: what a mechanism
    does to one layer is not mixed with what it did to those before. The weights are those that the model has; what the
    mechanism adds is initialized with ``seed``.

    Raises:
        ValueError: if a layer is no attention layer that a host knows, or cannot take the mechanism.
        TypeError: if the mechanism does not take these options.
    """
    names = [layer.name for layer in choose_layers(subject.model, layers)]
    known = {layer.name: layer for layer in attention_layers(subject.model)}
    if strange := [name for name in names if name not in known]:
        raise ValueError(
            f"--mechanism {mechanism} needs attention layers that a host knows, and {strange[0]!r} is none: choose "
            "others with --layers"
        )
    plain, model = subject.model, deepcopy(subject.model)
    check_options(mechanism_class(mechanism), options)
    if unswapped := [name for name in names if known[name].mechanism is None]:
        swap_attention(plain, "softmax", where=unswapped)  # as fused paths of whole blocks call no attention layer
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        swap_attention(model, mechanism, where=names, **options)
    model.requires_grad_(False)
    return replace(subject, model=model, plain=plain, held=names)


def _load(name: str, random: bool, trust_checkpoint: bool, keep_swap: bool) -> nn.Module:
    if name.endswith(".ckpt"):
        from lightning_tasks.files.load import load_module

        if random:
            raise ValueError(f"{name} is a checkpoint, which is trained: leave out --random, or name a model")
        if not Path(name).is_file():
            raise ValueError(f"--model {name}: no such file; give the path of a .ckpt file")
        return load_module(name, trust_checkpoint=trust_checkpoint)
    if _is_timm(name):
        return _or_refuse(name, lambda: build_timm_model(check_model_name(name), 1000, not random, {}))
    try:
        from transformers import CONFIG_MAPPING, AutoConfig, AutoModel
    except ImportError as error:
        raise ValueError(f"{name} is no timm model, and Hugging Face's need: pip install 'attnswap[hf]'") from error

    if (Path(name) / PLAN).is_file() and keep_swap:
        return _or_refuse(name, lambda: load_pretrained(AutoModel, name))
    if (Path(name) / PLAN).is_file():
        raise ValueError(
            f"--model {name} was saved with swapped attention ({PLAN}), which this command would leave out: give the "
            "folder of the plain model, and name the mechanism by --mechanism"
        )

    def build() -> nn.Module:
        model: Any
        if not random:
            model, loaded = AutoModel.from_pretrained(name, output_loading_info=True, trust_remote_code=False)
            missing = sorted(key for key in loaded["missing_keys"] if "pooler" not in key)  # which is after all layers
            if missing:
                raise ValueError(f"{len(missing)} parameters have no weights there, and would be random: {missing[0]}")
        else:
            known = name in CONFIG_MAPPING
            config = AutoConfig.for_model(name) if known else AutoConfig.from_pretrained(name, trust_remote_code=False)
            model = AutoModel.from_config(config, trust_remote_code=False)
        model.config.use_cache = False
        return model

    return _or_refuse(name, build)


def _is_timm(name: str) -> bool:
    import timm

    return name.startswith(("hf-hub:timm/", "local-dir:")) or timm.is_model(name.partition(".")[0])


def _or_refuse(name: str, build: Callable[[], nn.Module]) -> nn.Module:
    try:
        return build()
    except Exception as error:  # hubs and their clients raise errors of many kinds
        raise ValueError(
            f"--model {name} could not be loaded. Give a folder with config.json and weights, a name that timm or "
            f"Hugging Face know, or a .ckpt file; --random needs no weights. It was said: {shortened(error)}"
        ) from error


def shortened(error: Exception) -> str:
    """The beginning of what it says, on one line."""
    return re.sub(r"\s+", " ", str(error))[:300]


def _img_size(name: str, model: Any) -> int:
    size = getattr(getattr(model, "patch_embed", None), "img_size", None) or model.pretrained_cfg["input_size"][1:]
    return _side(name, size)


def _side(name: str, size: Any) -> int:
    """H = W of images, of a configuration's number or pair.

    Raises:
        ValueError: if they differ.
    """
    sides = [*size] if isinstance(size, Sequence) else [size]
    if len(set(sides)) > 1:
        raise ValueError(f"{name} takes images of {' x '.join(map(str, sides))}, and the command makes square ones")
    return int(sides[0])


def token_embedding(model: Any) -> nn.Embedding | None:
    """The embedding of token ids, the first one where the model does not say; None where there is none."""
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        return None
    if hasattr(model, "get_input_embeddings"):
        return model.get_input_embeddings()
    return next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)


def choose_layers(model: nn.Module, text: str | None) -> list[Layer]:
    """Layers from "0,5,-1" (counted among the attention layers that a host understands), globs of names, or all.

    Globs reach any module, so that a model whose attention no host knows can be looked at too.

    Raises:
        ValueError: if there is no such layer.
    """
    parts = [] if text in (None, "all") else [part.strip() for part in str(text).split(",")]
    if "" in parts:
        raise ValueError(f"--layers {text!r} has an empty part: give numbers as 0,5,-1, globs of names, or all")
    try:
        indices = [int(part) for part in parts]
    except ValueError:
        named = dict(model.named_modules())
        for part in parts:
            if not any(fnmatchcase(name, part) for name in named):
                raise ValueError(f"--layers {part!r} matches no module; names are like {list(named)[1:8]}") from None
        return [
            Layer(name, module, None)
            for name, module in named.items()
            if any(fnmatchcase(name, part) for part in parts)
        ]
    try:
        found = attention_layers(model, layers=indices or None)
    except AttentionSwapError as error:
        raise ValueError(f"{error}. --layers also takes names of modules, as 'encoder.*.attention'") from error
    return [Layer(layer.name, layer.module, layer.spec.num_heads, layer.host) for layer in found]


class _Seen(Exception):
    """All layers were called: the rest of the forward pass is not needed."""


def layer_calls(subject: Subject, inputs: Tensor, layers: Sequence[Layer], max_tokens: int) -> list[LayerCall]:
    """The call of each layer in one forward pass, cut to ``max_tokens`` tokens.

    Raises:
        ValueError: if a layer is not called, its input is no sequence of tokens or too short, or the model refuses.
    """
    calls: dict[int, LayerCall] = {}

    def observe(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if index not in calls:
                try:
                    heads, host = layers[index].num_heads, layers[index].host
                    calls[index] = LayerCall.of(module, args, kwargs, heads, max_tokens=max_tokens, host=host)
                except ValueError as error:
                    raise UsageError(f"layer {layers[index].name!r}: {error}; choose others with --layers") from error
                if len(calls) == len(layers):
                    raise _Seen

        return hook

    handles = [
        layer.module.register_forward_pre_hook(observe(index), with_kwargs=True) for index, layer in enumerate(layers)
    ]
    try:
        subject.forward(inputs)
    except _Seen:
        pass
    finally:
        for handle in handles:
            handle.remove()
    for index, layer in enumerate(layers):
        if index not in calls:
            raise ValueError(f"layer {layer.name!r} is not called on its own: choose others with --layers")
        if calls[index].tokens < max_tokens:
            raise ValueError(
                f"layer {layer.name!r} is given {calls[index].tokens} tokens, {max_tokens} were asked for: give "
                "shorter --lengths"
            )
    return [calls[index] for index in range(len(layers))]
