"""What an analysis looks at: a model of any origin, its layers, and the text or the pictures that it is shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attention_modules import AttentionSwapError
from attention_modules.hosts import attention_layers
from datamodules import AGNewsDataModule, CIFAR10DataModule, GutenbergDataModule
from datamodules.tokenizers import DEFAULT_BPE_SIZE
from lightning_tasks.layer_call import LayerCall, eager
from lightning_tasks.models.causal_lm import position_limit
from lightning_tasks.models.timm_model import build_timm_model, check_model_name, normalisation

TEXTS: dict[str, Any] = {"gutenberg": GutenbergDataModule, "ag_news": AGNewsDataModule}
PICTURES: dict[str, Any] = {"cifar10": CIFAR10DataModule}
DATA = (*TEXTS, *PICTURES)
OWN_TOKENIZERS = ("word", "bpe")


@dataclass(frozen=True)
class Subject:
    """A model in eval mode, in float32.

    Args:
        model: the model.
        run: the forward pass, of token ids ``[B, n]`` or of pictures ``[B, 3, H, W]`` in [0, 1].
        img_size: H = W of its pictures; None for a model of text.
        num_positions: the longest input in tokens, where the model bounds it.
    """

    model: nn.Module
    run: Callable[[Tensor], Any]
    img_size: int | None
    num_positions: int | None


@dataclass(frozen=True)
class Layer:
    """A layer by its name in the model; ``num_heads`` where a host knows it."""

    name: str
    module: nn.Module
    num_heads: int | None


def load_subject(name: str, random: bool = False, seed: int = 0) -> Subject:
    """A model by name or path.

    A checkpoint (``.ckpt``) of one of our tasks, a timm model by name, or a Hugging Face model by name or folder;
    where ``random``, initialised with ``seed``, and then a Hugging Face model type ("bert", "gpt2") with its default
    sizes is a name too. The global random state is not touched.

    Raises:
        ValueError: if it cannot be loaded, or takes neither text nor pictures.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _load(name, random).float().eval().requires_grad_(False)
    task = getattr(model, "model", None) if name.endswith(".ckpt") else None
    if task is not None and hasattr(task, "pretrained_cfg"):  # it normalises pictures itself
        return Subject(model, model, _img_size(task), None)
    if hasattr(model, "pretrained_cfg"):
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in normalisation(model, 3, None, None))
        return Subject(model, lambda x: model((x - mean.to(x)) / std.to(x)), _img_size(model), None)
    if getattr(model, "main_input_name", None) == "pixel_values":
        return Subject(model, lambda x: model((x - 0.5) / 0.5), int(model.config.image_size), None)
    if _embedding(model) is None:
        raise ValueError(f"{name} ({type(model).__name__}) takes neither tokens nor pictures, as far as can be told")
    return Subject(model, model, None, position_limit(model if task is None else task))


def _load(name: str, random: bool) -> nn.Module:
    if name.endswith(".ckpt"):
        from lightning_tasks.loading import load_module

        if random:
            raise ValueError(f"{name} is a checkpoint, which is trained: leave out --random, or name a model")
        if not Path(name).is_file():
            raise ValueError(f"--model {name}: no such file; give the path of a .ckpt file")
        return load_module(name)
    if _is_timm(name):
        return _or_refuse(name, lambda: build_timm_model(check_model_name(name), 1000, not random, {}))
    try:
        from transformers import CONFIG_MAPPING, AutoConfig, AutoModel
    except ImportError as error:
        raise ValueError(f"{name} is no timm model, and Hugging Face's need: pip install 'attnswap[hf]'") from error

    def build() -> nn.Module:
        if not random:
            model: Any = AutoModel.from_pretrained(name)
        else:
            known = name in CONFIG_MAPPING
            model = AutoModel.from_config(AutoConfig.for_model(name) if known else AutoConfig.from_pretrained(name))
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
        said = re.sub(r"\s+", " ", str(error))[:300]
        raise ValueError(
            f"--model {name} could not be loaded. Give a folder with config.json and weights, a name that timm or "
            f"Hugging Face know, or a .ckpt file; --random needs no weights. It was said: {said}"
        ) from error


def _img_size(model: Any) -> int:
    size = getattr(getattr(model, "patch_embed", None), "img_size", None) or model.pretrained_cfg["input_size"][1:]
    return int(size[0])


def _embedding(model: Any) -> nn.Embedding | None:
    """The embedding of token ids, the first one where the model does not say."""
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
    return [Layer(layer.name, layer.module, layer.spec.num_heads) for layer in found]


def token_stream(
    data: str, model_name: str, model: nn.Module, tokenizer: str | None = None, root: str | None = None
) -> Tensor:
    """The ids of the training text of ``data`` in one stream, ``[tokens]``.

    Args:
        data: a key of ``TEXTS``.
        model_name: what the model was loaded from.
        model: whose vocabulary bounds the ids.
        tokenizer: "word" or "bpe", trained on this text; a name or folder of a Hugging Face tokenizer, which adds no
            special tokens; None for the model's own.
        root: folder with data sets, as the data module takes it.

    Raises:
        ValueError: if the text is empty, the tokenizer does not load, or the model has no embedding for an id.
        FileNotFoundError: if the text is missing.
    """
    embedding = _embedding(model)
    size = 0 if embedding is None else embedding.num_embeddings
    if tokenizer in OWN_TOKENIZERS:
        limit = size if tokenizer == "word" else min(size, DEFAULT_BPE_SIZE)
        module = TEXTS[data](root=root, tokenizer=tokenizer, vocab_size=limit)
        module.setup()
        ids = np.asarray(module.tokens("train"))
    else:
        module = TEXTS[data](root=root)
        module.source_identity()  # says what is missing
        lines = [f"{line.rstrip()}\n" for batch in module.lines("train") for line in batch if line.strip()]
        if not lines:
            raise ValueError(f"the text of {data} is empty: {module.where}")
        encode = _pretrained_tokenizer(model_name if tokenizer is None else tokenizer)
        ids = np.fromiter(chain.from_iterable(encode(lines)), dtype=np.int64)
    if len(ids) and int(ids.max()) >= size:
        raise ValueError(
            f"the tokenizer gives id {int(ids.max())} and the model has embeddings for {size} ids: give --tokenizer "
            "the model's own"
        )
    return torch.from_numpy(ids.astype(np.int64))


def _pretrained_tokenizer(name: str) -> Callable[[Sequence[str]], list[list[int]]]:
    try:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # as for models
        said = re.sub(r"\s+", " ", str(error))[:300]
        raise ValueError(
            f"no tokenizer could be loaded from {name}: give --tokenizer bpe (or word), trained on the text, or the "
            f"folder or name of one. It was said: {said}"
        ) from error
    return lambda lines: loaded(list(lines), add_special_tokens=False, verbose=False)["input_ids"]


def apart(stream: Tensor, count: int, length: int, data: str) -> Tensor:
    """``count`` sequences of ``length`` tokens that do not overlap, evenly over the stream, ``[count, length]``.

    A shorter sequence is the beginning of a longer one.

    Raises:
        ValueError: if the stream is too short.
    """
    stride = len(stream) // count
    if stride < length:
        raise ValueError(
            f"{data} has {len(stream)} tokens, and {count} sequences of {length} that do not overlap need "
            f"{count * length}: give fewer --sequences, or shorter ones"
        )
    return torch.stack([stream[start * stride : start * stride + length] for start in range(count)])


def pictures(data: str, count: int, img_size: int, root: str | None = None) -> Tensor:
    """The first test pictures of ``data``, ``[count, 3, H, W]`` in [0, 1].

    Raises:
        ValueError: if there are fewer.
        FileNotFoundError: if the data is missing.
    """
    module = PICTURES[data](root=root, batch_size=count, num_workers=0, img_size=img_size)
    module.setup("test")
    images = next(iter(module.test_dataloader()))[0]
    if len(images) < count:
        raise ValueError(f"{data} has {len(images)} test pictures that can be read, {count} were asked for")
    return images


def check_data(subject: Subject, data: str) -> None:
    """Raise a ValueError where the model takes text and the data are pictures, or the other way round."""
    wanted = TEXTS if subject.img_size is None else PICTURES
    if data not in wanted:
        kind = "text" if subject.img_size is None else "pictures"
        raise ValueError(f"{type(subject.model).__name__} takes {kind}: give --data {' or '.join(wanted)}, got {data}")


class _Seen(Exception):
    """All layers were called: the rest of the forward pass is not needed."""


def layer_calls(subject: Subject, inputs: Tensor, layers: Sequence[Layer], max_tokens: int | None) -> list[LayerCall]:
    """The call of each layer in one forward pass, cut to ``max_tokens`` tokens.

    Raises:
        ValueError: if a layer is not called, its input is no sequence of tokens or too short, or the model refuses.
    """
    calls: dict[int, LayerCall] = {}

    def observe(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if index not in calls:
                try:
                    calls[index] = LayerCall.of(module, args, kwargs, layers[index].num_heads, max_tokens=max_tokens)
                except ValueError as error:
                    raise ValueError(f"layer {layers[index].name!r}: {error}; choose others with --layers") from error
                if len(calls) == len(layers):
                    raise _Seen

        return hook

    handles = [
        layer.module.register_forward_pre_hook(observe(index), with_kwargs=True) for index, layer in enumerate(layers)
    ]
    try:
        with torch.no_grad(), eager():
            subject.run(inputs)
    except _Seen:
        pass
    except (IndexError, RuntimeError) as error:
        raise ValueError(f"the model refuses an input of shape {list(inputs.shape)}: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    for index, layer in enumerate(layers):
        if index not in calls:
            raise ValueError(f"layer {layer.name!r} is not called on its own: choose others with --layers")
        if max_tokens is not None and calls[index].tokens < max_tokens:
            raise ValueError(
                f"layer {layer.name!r} is given {calls[index].tokens} tokens, {max_tokens} were asked for: give "
                "shorter --lengths"
            )
    return [calls[index] for index in range(len(layers))]
