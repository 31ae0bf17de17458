"""What an analysis shows a model: sequences of a text that do not overlap, or images; and how they are named."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
import yaml
from attnswap.datamodules import AGNewsDataModule, CIFAR10DataModule, DigitsDataModule, GutenbergDataModule
from attnswap.datamodules.shared.tokenizers import DEFAULT_BPE_SIZE
from torch import Tensor, nn

from attention_modules.extras import needed_for
from lightning_tasks.analyses.subjects import Subject, load_subject, shortened, token_embedding, with_mechanism
from lightning_tasks.bounded_yaml import SettingsLoader
from lightning_tasks.errors import UsageError

TEXTS: dict[str, Any] = {"gutenberg": GutenbergDataModule, "ag_news": AGNewsDataModule}
SPLITS = ("train", "validation", "test")
IMAGES: dict[str, Any] = {"cifar10": CIFAR10DataModule, "digits": DigitsDataModule}
_MOST_UNKNOWN = 0.5  # share of unknown words up to which a tokenizer fits a text
EMBEDDED = ("digits",)
MODEL = "Hugging Face or timm model (folder or name), or a .ckpt file"
OWN_TOKENIZERS = {"bpe": "BPE trained on it", "word": "its words"}


@dataclass(frozen=True)
class Inputs:
    """What a model is shown.

    Args:
        values: token ids ``[count, length]``, or images ``[count, C, H, W]`` in [0, 1].
        kind: "text" or "images".
        described: what they are, in words.
    """

    values: Tensor
    kind: str
    described: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that name a model, its layers and what it is shown."""
    parser.add_argument("--model", required=True, help=MODEL)
    add_weights(parser)
    parser.add_argument("--data", required=True, choices=(*TEXTS, *IMAGES), help="text; images for a vision model")
    parser.add_argument(
        "--split", choices=SPLITS, help="of the text (default: train); images are the first of the test split"
    )
    parser.add_argument("--root", help="folder with data sets (default: $ATTNSWAP_DATA)")
    parser.add_argument(
        "--tokenizer",
        help="bpe or word (trained on the text), or the folder or name of a Hugging Face tokenizer (default: the "
        "model's own; bpe for random weights)",
    )


def add_weights(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which weights a model has, and which of its layers are meant."""
    parser.add_argument(
        "--trust_checkpoint",
        action="store_true",
        help="import and call whatever the .ckpt file names; without it, only classes of attnswap, torch, torchvision, "
        "lightning, timm and transformers",
    )
    parser.add_argument("--random", action="store_true", help="random weights; --model bert or gpt2 is then enough")
    parser.add_argument("--seed", type=int, default=0, help="of random weights (default: %(default)s)")
    parser.add_argument("--layers", help="0,5,-1 among the attention layers, or globs of names (default: all)")


def add_mechanism(parser: argparse.ArgumentParser) -> None:
    """The arguments that name a mechanism for the chosen layers."""
    parser.add_argument(
        "--mechanism",
        help="put this into the chosen layers (l2, sinkhorn, ..., or an import path), with the weights that there are, "
        "and measure them at the inputs that they have without it",
    )
    add_options(parser)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The argument that holds a mechanism's options."""
    parser.add_argument("--options", help="""of the mechanism, as JSON or YAML: '{"iterations": 5}'""")


def read_subject(options: Any) -> Subject:
    """The model that :func:`add_arguments` names, with what :func:`add_mechanism` names in the chosen layers.

    Raises:
        UsageError: options that are no mapping, or without a mechanism.
        ValueError: as :func:`load_subject` and :func:`with_mechanism`.
    """
    if options.options is not None and options.mechanism is None:
        raise UsageError(f"--options {options.options} has no --mechanism that it is for: name it, or leave it out")
    given = mechanism_options(options.options)
    subject = load_subject(options.model, options.random, options.seed, options.trust_checkpoint)
    if options.mechanism is None:
        return subject
    try:
        return with_mechanism(subject, options.layers, options.mechanism, given, options.seed)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--mechanism {options.mechanism}: {error}") from error


def mechanism_options(text: str | None) -> dict[str, Any]:
    """Options of a mechanism from JSON or YAML."""
    try:
        found = yaml.load("{}" if text is None else text, Loader=SettingsLoader)
    except yaml.YAMLError as error:
        raise UsageError(f"--options {text} is neither JSON nor YAML: {shortened(error)}") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise UsageError(f"--options {text} must be a mapping, as '{{\"iterations\": 5}}'")
    return found


def described_weights(options: Any) -> str:
    """Where the weights come from, and what was put into the layers."""
    weights = f"random weights, seed {options.seed}" if options.random else "its own weights"
    if options.mechanism is None:
        return weights
    given = "" if options.options is None else f" {options.options}"
    return f"{weights}, {options.mechanism}{given} in its layers at the inputs that they have without it"


def read_inputs(options: Any, subject: Subject, count: int, length: int, span: int | None = None) -> Inputs:
    """What :func:`add_arguments` names: ``count`` sequences of ``length`` tokens, or images.

    Args:
        options: the arguments.
        subject: the model.
        count: how many.
        length: the most tokens that the model is shown at once.
        span: tokens that a sequence has, where several parts of it are shown; None for ``length``.

    Raises:
        UsageError: if the data is not of the kind that the model takes, or the model has too few positions.
        ValueError: as :func:`token_stream`, :func:`apart` and :func:`first_images`.
        FileNotFoundError: missing data.
    """
    wanted = TEXTS if subject.img_size is None else IMAGES
    kind = "text" if subject.img_size is None else "images"
    if options.data not in wanted:
        name = type(subject.model).__name__
        raise UsageError(f"{name} takes {kind}: give --data {' or '.join(wanted)}, got {options.data}")
    if options.data in EMBEDDED and options.root is not None:
        raise UsageError(f"--root {options.root}: {options.data} is in an installed package; leave it out")
    if options.split is not None and kind == "images":
        raise UsageError(f"--split {options.split} is of text, and images are those of the test split: leave it out")
    if subject.img_size is not None:
        shown = first_images(options.data, count, subject.img_size, subject.in_chans, options.root)
        return Inputs(shown, kind, f"the first {count} test images, at {subject.img_size} pixels")
    if subject.num_positions is not None and length > subject.num_positions:
        raise UsageError(
            f"{length} tokens are asked for, and {options.model} has {subject.num_positions} positions: give fewer"
        )
    tokenizer = options.tokenizer or ("bpe" if options.random else None)
    split = options.split or "train"
    stream = token_stream(options.data, options.model, subject.model, tokenizer, options.root, split)
    tokens = "the model's tokenizer" if tokenizer is None else OWN_TOKENIZERS.get(tokenizer, f"tokenizer {tokenizer}")
    text = "training text" if split == "train" else f"{split} text"
    described = f"{count} sequences of the {text} that do not overlap, {tokens}, no special tokens"
    return Inputs(apart(stream, count, span or length, options.data), kind, described)


def token_stream(
    data: str,
    model_name: str,
    model: nn.Module,
    tokenizer: str | None = None,
    root: str | None = None,
    split: str = "train",
) -> Tensor:
    """The ids of the text of ``data`` in one stream, ``[tokens]``.

    Args:
        data: a key of ``TEXTS``.
        model_name: what the model was loaded from.
        model: whose vocabulary bounds the ids.
        tokenizer: "word" or "bpe", trained on the training text; a name or folder of a Hugging Face tokenizer, which
            adds no special tokens; None for the model's own.
        root: folder with data sets, as the data module takes it.
        split: one of ``SPLITS``.

    Raises:
        ModuleNotFoundError: if a Hugging Face tokenizer is asked for, and the extra ``hf`` is not installed.
        ValueError: if the text is empty, the tokenizer does not load or does not know most of the text, or the model
            has no embedding for an id.
        FileNotFoundError: if the text is missing.
    """
    embedding = token_embedding(model)
    size = 0 if embedding is None else embedding.num_embeddings
    if tokenizer in OWN_TOKENIZERS:
        limit = size if tokenizer == "word" else min(size, DEFAULT_BPE_SIZE)
        module = TEXTS[data](root=root, tokenizer=tokenizer, vocab_size=limit)
        module.setup()
        ids = np.asarray(module.tokens(split))
    else:
        module = TEXTS[data](root=root)
        module.source_identity()  # says what is missing
        lines = [f"{line.rstrip()}\n" for batch in module.lines(split) for line in batch if line.strip()]
        if not lines:
            part = "training" if split == "train" else split
            raise ValueError(f"the {part} part of the text of {data} is empty, or has no whole line: {module.where}")
        where = model_name if tokenizer is None else tokenizer
        loaded = pretrained_tokenizer(where)
        encoded = loaded(lines, add_special_tokens=False, verbose=False)["input_ids"]
        ids = np.fromiter(chain.from_iterable(encoded), dtype=np.int64)
        missed = float((ids == loaded.unk_token_id).mean()) if len(ids) else 1.0
        if missed > _MOST_UNKNOWN:  # a folder without a vocabulary gives an empty tokenizer, and no error
            raise ValueError(
                f"the tokenizer in {where} lacks {missed:.0%} of {data}: has it a vocabulary, of its language? "
                "Give --tokenizer bpe (or word), trained on the text, or the folder or name of another"
            )
    if len(ids) and int(ids.max()) >= size:
        raise ValueError(
            f"the tokenizer gives id {int(ids.max())} and the model has embeddings for {size} ids: give --tokenizer "
            "the model's own"
        )
    return torch.from_numpy(ids.astype(np.int64))


def pretrained_tokenizer(name: str) -> Any:
    """The Hugging Face tokenizer of a folder or name, or of a file that the library `tokenizers` wrote.

    Raises:
        ModuleNotFoundError: without the extra ``hf``.
        ValueError: if there is none.
    """
    with needed_for(f"the tokenizer {name}", "hf"):
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    try:
        if name.endswith(".json"):
            return PreTrainedTokenizerFast(tokenizer_file=name)
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # of many kinds, as for models
        raise ValueError(
            f"no tokenizer could be loaded from {name}: give --tokenizer bpe (or word), trained on the text, or the "
            f"folder or name of one. It was said: {shortened(error)}"
        ) from error


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


def first_images(data: str, count: int, img_size: int, in_chans: int, root: str | None = None) -> Tensor:
    """The first test images of ``data``, ``[count, in_chans, H, W]`` in [0, 1].

    Raises:
        ValueError: if there are fewer, or ``in_chans`` is neither 1 nor 3.
        FileNotFoundError: if the data is missing.
    """
    where = {} if root is None else {"root": root}
    module = IMAGES[data](batch_size=count, num_workers=0, img_size=img_size, in_chans=in_chans, **where)
    module.setup("test")
    images = next(iter(module.test_dataloader()))[0]
    if len(images) < count:
        raise ValueError(f"{data} has {len(images)} test images that can be read, {count} were asked for")
    return images
