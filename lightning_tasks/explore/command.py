"""`attnswap explore`: models by name or checkpoint, images or lines of text, and the page of their maps."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import join
from typing import Any

import numpy as np
import torch
from attnswap.datamodules.shared.folder import find_images
from attnswap.datamodules.shared.images import MODES, in_mode
from PIL import Image, ImageOps
from torch import Tensor, nn

from attention_modules import swap_attention
from attention_modules.analysis.model_maps import Inputs, Layers
from attention_modules.hosts import attention_layers
from attention_modules.hosts.discovery import survey
from attention_modules.teacher import shared_copy
from lightning_tasks.analyses.inputs import mechanism_options, pretrained_tokenizer
from lightning_tasks.analyses.subjects import Subject, load_subject, token_embedding
from lightning_tasks.errors import UsageError
from lightning_tasks.explore.arguments import parser
from lightning_tasks.explore.collect import MOST_MODELS, Shown
from lightning_tasks.explore.page import check_output, explore_shown
from lightning_tasks.training.eager import eager

OWN = "own"
_MOST_UNKNOWN = 0.5  # share of unknown tokens up to which a tokenizer fits a text


def main(arguments: Sequence[str]) -> None:
    """Run `attnswap explore` with these arguments.

    Raises:
        UsageError: numbers that make no sense, a mechanism that there is not or that has no map, nothing that can be
            read, models of different kinds, a page that would be too large, or an output that is no file.
        ValueError: a model that does not load.
        SystemExit: arguments that the parser refuses.
    """
    options = parser().parse_args(list(arguments))
    for name in ("count", "length"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} must be at least 1, got {getattr(options, name)}")
    check_output(options.output)
    rows, layers = _numbers("--rows", options.rows), _layers(options.layers)
    mechanisms = [_mechanism(text) for text in options.mechanism or [OWN]]
    if len(options.models) * len(mechanisms) > MOST_MODELS:
        raise UsageError(
            f"{len(options.models)} models with {len(mechanisms)} mechanisms each are more than the {MOST_MODELS} "
            "that a page shows: leave some out"
        )
    given = _pictures(options.images, options.count) if options.images else _lines(options.text, options.count)
    shown: list[Shown] = []
    page: dict[str, Any] = {"names": list(given)}
    for name in options.models:
        subject = load_subject(name, options.random, options.seed, options.trust_checkpoint, keep_swap=True)
        inputs, beside = (_images if options.images else _text)(name, subject, list(given.values()), options)
        if "tokens" in page and page["tokens"] != beside["tokens"]:
            raise UsageError(f"{name} has other tokens than {options.models[0]}: compare models of one tokenizer")
        page = {**beside, **page}  # pictures are those that the first model gets
        if layers is None and getattr(getattr(subject.model, "config", None), "is_encoder_decoder", False):
            layers = [layer.name for layer in survey(subject.model).layers]  # cross-attention, too
        for text, mechanism, built in mechanisms:
            model = subject.model if mechanism == OWN else _swapped(subject.model, text, mechanism, built, options)
            shown.append(Shown(_label(name, text, options), model, inputs, _about(name, text, options)))
    page |= {"made_by": join(["attnswap", "explore", *arguments])}
    if len(options.models) == 1 and options.mechanism:  # whose names on the page are the mechanisms alone
        page |= {"title": f"{Path(options.models[0]).name}: "}
    with eager():
        found = explore_shown(shown, **page, layers=layers, rows=rows)
    path = found.save(options.output)
    print(f"explore: {path} ({path.stat().st_size:,} bytes)")


def _numbers(option: str, text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{option} {text!r} must be numbers with commas between, as 0,5,-1") from None


def _layers(text: str | None) -> Layers | None:
    if text is None or any(part.strip().lstrip("-").isdigit() for part in text.split(",")):
        return _numbers("--layers", text)
    return [part.strip() for part in text.split(",")]


def _mechanism(text: str) -> tuple[str, str, dict[str, Any]]:
    name, _, options = text.strip().partition(" ")
    return text, name, mechanism_options(options or None)


def _label(name: str, text: str, options: Any) -> str:
    same = [Path(each).name for each in options.models].count(Path(name).name) > 1
    model = name if same else Path(name).name
    if len(options.models) == 1 and options.mechanism:
        return text
    return f"{model}, {text}" if options.mechanism else model


def _about(name: str, text: str, options: Any) -> dict[str, str]:
    weights = f"random, seed {options.seed}" if options.random else "its own"
    swapped = "as it is" if text == OWN else f"{text}, put in with these weights"
    return {"checkpoint" if name.endswith(".ckpt") else "model": name, "weights": weights, "attention": swapped}


def _swapped(model: nn.Module, text: str, mechanism: str, built: Mapping[str, Any], options: Any) -> nn.Module:
    """A copy of a model, which shares its weights, with the mechanism in the chosen layers."""
    layers, copy = _layers(options.layers), shared_copy(model)
    by_name = layers is not None and isinstance(layers[0], str)  # type: ignore[index]
    where: dict[str, Any] = {"where" if by_name else "layers": layers}
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            swap_attention(copy, mechanism, **where, **built)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--mechanism {text}: {error}") from error
    return copy.eval()


def _pictures(folder: Path, count: int) -> dict[str, Any]:
    """The first images of a folder that can be read, by their paths in it."""
    try:
        files, _ = find_images(folder)
    except (OSError, ValueError) as error:
        raise UsageError(f"--images: {error}") from error
    found: dict[str, Image.Image] = {}
    damaged = []
    for index in range(len(files)):
        if len(found) == count:
            break
        try:
            found[str(Path(files.name(index)).relative_to(folder))] = in_mode(files.read(index), "RGB")
        except Exception as error:  # of its decoder
            damaged.append(f"{files.name(index)} ({type(error).__name__}: {error})")
    if not found:
        raise UsageError(f"--images {folder}: none of its {len(files):,} images can be read, e.g. {damaged[0]}")
    if damaged:
        warnings.warn(f"{len(damaged):,} images cannot be read and are left out: {damaged[0]}", stacklevel=2)
    return found


def _images(
    name: str, subject: Subject, pictures: Sequence[Image.Image], options: Any
) -> tuple[Inputs, dict[str, Any]]:
    if subject.img_size is None:
        raise UsageError(f"{name} ({type(subject.model).__name__}) takes text: give --text FILE")
    size, mode = (subject.img_size, subject.img_size), MODES[subject.in_chans]
    fitted = [ImageOps.fit(picture, size, Image.Resampling.BICUBIC).convert(mode) for picture in pictures]
    pixels = np.stack([np.asarray(picture).reshape(*size, -1) for picture in fitted])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    return subject.prepare(images), {"images": images}


def _lines(file: Path, count: int) -> dict[str, Any]:
    """The first lines of a text that are not empty, by their numbers and first words."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text {file} cannot be read as UTF-8: {error}") from error
    found = {f"line {number}: {line.strip()[:60]}": line for number, line in enumerate(lines, 1) if line.strip()}
    if not found:
        raise UsageError(f"--text {file} has no line that is not empty")
    return dict(list(found.items())[:count])


def _text(name: str, subject: Subject, lines: Sequence[str], options: Any) -> tuple[Inputs, dict[str, Any]]:
    if subject.img_size is not None:
        raise UsageError(f"{name} ({type(subject.model).__name__}) takes images: give --images FOLDER")
    where = options.tokenizer or name
    try:
        tokenizer = pretrained_tokenizer(where)
    except ValueError as error:
        raise UsageError(f"{error}. Give --tokenizer the folder, name or .json file of one") from error
    config = getattr(subject.model, "config", None)
    most = min(options.length, subject.num_positions or options.length)

    def encoded(texts: Sequence[str]) -> tuple[dict[str, Tensor], list[list[str]]]:
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.convert_ids_to_tokens(0)
        tokenizer.padding_side = "right"
        found = tokenizer(list(texts), truncation=True, max_length=most, padding=True, return_tensors="pt")
        ids, unknown = found["input_ids"], tokenizer.unk_token_id
        special = set(tokenizer.all_special_ids) - {unknown}
        words = [each for row in ids.tolist() for each in row if each not in special]
        if not words or words.count(unknown) > _MOST_UNKNOWN * len(words):  # an empty tokenizer gives no error
            raise UsageError(f"the tokenizer of {where} lacks most of {options.text}: give --tokenizer of another")
        size = getattr(token_embedding(subject.model), "num_embeddings", 0)
        if int(ids.max()) >= size:
            raise UsageError(
                f"the tokenizer of {where} gives id {int(ids.max())}, and {name} has embeddings for {size} ids: give "
                "--tokenizer the model's own"
            )
        names = [list(map(str, tokenizer.convert_ids_to_tokens(row))) for row in ids.tolist()]
        plain = [[name.replace("Ġ", " ").replace("▁", " ") for name in row] for row in names]  # marks of a space
        return {"input_ids": ids, "attention_mask": found["attention_mask"]}, plain

    if not getattr(config, "is_encoder_decoder", False):
        inputs, names = encoded(lines)
        return _given(name, subject.model, inputs), {"tokens": names}
    if not all("\t" in line for line in lines):
        raise UsageError(f"{name} has an encoder and a decoder: give lines of --text as SOURCE, a tab, TARGET")
    inputs, source = encoded([line.partition("\t")[0] for line in lines])
    target, names = encoded([line.partition("\t")[2] for line in lines])
    inputs |= {f"decoder_{key}": value for key, value in target.items()}
    return inputs, {"tokens": names, "source_tokens": source}


def _given(name: str, model: nn.Module, inputs: dict[str, Tensor]) -> Inputs:
    """What a model of text takes: of a module of somebody's own, whose first argument is the tokens, the mask too."""
    if not name.endswith(".ckpt"):
        return inputs
    first, *others = inspect.signature(model.forward).parameters.values()
    by_name = first.kind in (first.POSITIONAL_OR_KEYWORD, first.KEYWORD_ONLY)
    if by_name and "attention_mask" in [each.name for each in others]:
        return {first.name: inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    if not inputs["attention_mask"].all() and not all(layer.spec.is_causal for layer in attention_layers(model)):
        warnings.warn(
            f"the forward of {type(model).__name__} takes no attention_mask: unless it hides them itself, tokens of a "
            "line see the padding behind it, where another one is longer; give lines of one length, or --count 1",
            stacklevel=2,
        )
    return inputs["input_ids"]
