"""What a tiny model of transformers shows of its swapped layers."""

from __future__ import annotations

import contextlib
import copy
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attention_modules.hosts.base import AttentionSwapError
from attention_modules.hosts.discovery import survey
from attention_modules.pretrained import load_pretrained
from attention_modules.swap import restore_attention, swap_attention
from tests.attention_modules.hosts.huggingface.tiny import BATCH, NotBuilt, ids, run

EQUAL = 1e-5
NEW_TOKENS = 4


@dataclass
class Shown:
    """What was seen of one model."""

    layers: set[str] = field(default_factory=set)
    left: dict[str, str] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    symmetric: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def difference(got: list[Tensor], expected: list[Tensor], keep: Tensor | None = None) -> float:
    """The largest difference, relative to the largest number of its tensor; infinite where the shapes differ."""
    worst = 0.0
    for mine, plain in zip(got, expected, strict=True):
        if mine.shape[-1:] == (0,):  # an attention map that nobody asked for
            continue
        if mine.shape != plain.shape:
            return float("inf")
        if keep is not None and plain.shape[:2] == keep.shape:
            mine, plain = mine[keep], plain[keep]
        finite = torch.isfinite(plain)
        if not torch.equal(finite, torch.isfinite(mine)):
            return float("inf")
        if finite.any():
            scale = plain[finite].abs().max().clamp_min(1.0)
            worst = max(worst, ((mine - plain)[finite].abs().max() / scale).item())
    return worst


def gradients(model: nn.Module, inputs: dict[str, Any], given: list[bool] | None = None) -> list[Tensor]:
    """The gradient of each Parameter, of a sum of squares of all outputs at kept tokens."""
    model.zero_grad()
    keep = _kept(inputs)
    total = torch.zeros(())
    outputs = run(model, inputs)
    for out, counts in zip(outputs, given or [True] * len(outputs), strict=True):
        if out.requires_grad and counts:
            out = out[keep] if keep is not None and out.shape[:2] == keep.shape else out
            out = out[torch.isfinite(out)]
            total = total + out.square().mean() / out.detach().square().mean().clamp_min(1.0)
    if total.requires_grad:
        total.backward()
    return [torch.zeros(1) if each.grad is None else each.grad.clone() for each in model.parameters()]


def _kept(inputs: dict[str, Any]) -> Tensor | None:
    mask = inputs.get("attention_mask")
    return None if mask is None else mask.bool()


def called(model: nn.Module, work: Callable[[], Any]) -> tuple[set[str], Any]:
    """Names of the swapped layers whose mechanism ran, and what the work gave."""
    names: set[str] = set()
    handles = []
    for layer in attention_layers_of(model):
        hook = lambda *_, name=layer.name: names.add(name)  # noqa: E731
        handles.append(layer.module.mechanism.register_forward_hook(hook))
    try:
        return names, work()
    finally:
        for handle in handles:
            handle.remove()


def attention_layers_of(model: nn.Module) -> list[Any]:
    """Swapped layers, cross-attention among them."""
    return [layer for layer in survey(model).layers if hasattr(layer.module, "mechanism")]


def everywhere(model: nn.Module) -> list[str]:
    """Names of every layer that a host understands, by which `where` takes cross-attention too."""
    return [layer.name for layer in survey(model).layers]


def exercise(model: nn.Module, inputs: dict[str, Any]) -> Shown:
    """Swap softmax, sink and symmetric attention in, and out again, and compare."""
    shown = Shown()
    made = generated(model, inputs)  # first, as some models keep the positions of what they wrote (Qwen's Thinker)
    with torch.no_grad():
        plain, again = run(model, inputs), run(model, inputs)
    if difference(again, plain) > EQUAL:
        raise NotBuilt(f"run {type(model).__name__}: its output is random")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    keep = _kept(inputs)
    try:
        report = swap_attention(model, "softmax", where=everywhere(model))
    except AttentionSwapError as error:
        shown.left = {skipped.kind: skipped.reason for skipped in survey(model).others}
        shown.problems.append(f"refused: {error}")
        return shown
    shown.left = {skipped.kind: skipped.reason for skipped in report.skipped}
    try:
        with torch.no_grad():
            names, softmax = called(model, lambda: run(model, inputs))
    except RuntimeError as error:  # refused at the call, as cross-attention of wider queries is
        if "leave this layer out of the swap" not in str(error):
            raise
        restore_attention(model)
        report = swap_attention(model, "softmax")
        shown.left = {skipped.kind: str(error) for skipped in report.skipped}
        with torch.no_grad():
            names, softmax = called(model, lambda: run(model, inputs))
    kinds = {layer.name: layer.module.plain_class.__name__ for layer in attention_layers_of(model)}
    if not names:
        raise NotBuilt(f"run {type(model).__name__}: none of its attention layers is called")
    shown.layers = {kinds[name] for name in names}
    shown.worst["forward"] = difference(softmax, plain, keep)
    given = [out.shape[-1:] != (0,) for out in softmax]  # a swapped layer gives no attention map that nobody asked for
    slopes, of_writing = gradients(model, inputs, given), {}
    for cache, plainly in made.items():
        try:
            mine = written(model, plainly.prompt, cache)
        except Exception as error:  # the plain model could
            shown.problems.append(f"generate {cache}: {type(error).__name__}: {str(error)[:150]}")
            continue
        same = torch.equal(mine.tokens, plainly.tokens)
        of_writing[f"generate {cache}"] = difference(mine.logits, plainly.logits) if same else float("inf")
    restore_attention(model)
    shown.worst["backward"] = difference(slopes, gradients(model, inputs, given))
    shown.worst |= of_writing
    shown.problems += [f"{what} differs by {worst:.1e}" for what, worst in shown.worst.items() if not worst <= EQUAL]
    with torch.no_grad():
        _check_sink(model, inputs, plain, names, shown)
        _check_symmetric(model, inputs, names, shown)
        _check_restored(model, inputs, plain, state, shown)
    return shown


def _check_sink(model: nn.Module, inputs: dict[str, Any], plain: list[Tensor], names: set[str], shown: Shown) -> None:
    """A mechanism with a query and parameters changes the output, and a step on them changes it again."""
    swap_attention(model, "sink", where=sorted(names))
    first = run(model, inputs)
    if difference(first, plain) < 1e-6:
        shown.problems.append("sink changes nothing")
    with torch.enable_grad():
        gradients(model, inputs)
    sinks = [layer.module.mechanism.sink for layer in attention_layers_of(model)]
    slopes = [torch.zeros(1) if sink.grad is None else sink.grad for sink in sinks]
    if not all(torch.isfinite(slope).all() for slope in slopes) or not any(slope.any() for slope in slopes):
        shown.problems.append("sink has no gradient")
    for sink, slope in zip(sinks, slopes, strict=True):
        sink -= slope / slope.norm().clamp_min(1e-12)
    if difference(run(model, inputs), first) == 0:
        shown.problems.append("sink does not train")
    _check_saved(model, inputs, "sink", shown)
    restore_attention(model)


def _check_saved(model: Any, inputs: dict[str, Any], name: str, shown: Shown) -> None:
    """The swapped model is the same when it is saved and loaded."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that swapped layers are saved
        try:
            model.save_pretrained(folder)
            loaded = load_pretrained(type(model), folder).train(model.training)
            for mine, other in zip(model.modules(), loaded.modules(), strict=True):
                if hasattr(mine, "rope_deltas"):  # positions of what it wrote, which no file holds
                    other.rope_deltas = mine.rope_deltas
            worst = difference(run(loaded, inputs), run(model, inputs))
        except Exception as error:
            shown.problems.append(f"{name} saved and loaded: {type(error).__name__}: {str(error)[:150]}")
        else:
            if not worst <= EQUAL:
                shown.problems.append(f"{name} saved and loaded differs by {worst:.1e}")


def _check_symmetric(model: nn.Module, inputs: dict[str, Any], names: set[str], shown: Shown) -> None:
    """Symmetric attention equals softmax attention whose query projection is the key's, where a layer takes it."""
    takes = []
    for layer in survey(model).layers:
        if layer.name in names and layer.host.name == "Hugging Face":
            kind = type(layer.module).__name__
            try:
                swap_attention(model, "symmetric", where=[layer.name])
            except AttentionSwapError as error:
                if layer.cross:  # for the class, the layers say it that are among one sequence
                    shown.symmetric.setdefault(kind, str(error))
                else:
                    shown.symmetric[kind] = str(error)
            else:
                restore_attention(model)
                shown.symmetric[kind] = ""
                takes.append(layer.name)
    if not takes:
        return
    twin = copy.deepcopy(model)
    for layer in survey(twin).layers:
        if layer.name in takes:
            for query, key in (layer.host.qk_rows(layer.module), layer.host.qk_biases(layer.module)):
                if query is not None and key is None:  # Whisper's keys have no bias
                    getattr(query.owner, query.tensor).data.zero_()
                elif query is not None and key is not None:
                    held, source = getattr(query.owner, query.tensor).data, getattr(key.owner, key.tensor).data
                    held, source = (
                        each.t() if query.transposed and each.dim() > 1 else each for each in (held, source)
                    )
                    held[query.features()] = source[key.features()].clone()
    try:
        expected = run(twin, inputs)
        swap_attention(model, "symmetric", where=takes)
        worst = difference(run(model, inputs), expected, _kept(inputs))
    except Exception as error:
        shown.problems.append(f"symmetric: {type(error).__name__}: {str(error)[:150]}")
    else:
        if not worst <= EQUAL:
            shown.problems.append(f"symmetric differs from softmax of equal projections by {worst:.1e}")
        _check_saved(model, inputs, "symmetric", shown)
    restore_attention(model)


def _check_restored(
    model: nn.Module, inputs: dict[str, Any], plain: list[Tensor], state: dict[str, Tensor], shown: Shown
) -> None:
    """After all that, the model is bitwise unchanged."""
    after = model.state_dict()
    if list(after) != list(state) or not all(torch.equal(after[name], value) for name, value in state.items()):
        shown.problems.append("restored weights differ")
    outputs = zip(run(model, inputs), plain, strict=True)
    if not all(torch.equal(mine, was) or mine.isnan().any() for mine, was in outputs):
        shown.problems.append("restored output differs")


@dataclass
class Written:
    """What a model wrote greedily."""

    prompt: dict[str, Any]
    tokens: Tensor
    logits: list[Tensor]


def generated(model: Any, inputs: dict[str, Any]) -> dict[str, Written]:
    """What a plain model writes, by the kind of cache; of those with which it can."""
    found: dict[str, Written] = {}
    if not hasattr(model, "can_generate") or not model.can_generate():
        return found
    mask = torch.ones(BATCH, 6, dtype=torch.long)
    mask[1, :2] = 0
    prompts = [{name: value for name, value in inputs.items() if name != "decoder_input_ids"}]
    if model.main_input_name == "input_ids":
        prompts.insert(0, {"input_ids": ids(2, 6), "attention_mask": mask})
    for cache in ("dynamic", "static"):
        begun = time.process_time()
        for prompt in prompts:
            with contextlib.suppress(Exception):
                found[cache] = written(model, prompt, cache)
                break
        if time.process_time() - begun > 10:
            break
    return found


def written(model: Any, prompt: dict[str, Any], cache: str) -> Written:
    """What a model writes with a kind of cache; an error is the model's own, or the swap's."""
    torch.manual_seed(0)
    more: dict[str, Any] = {"cache_implementation": "static"} if cache == "static" else {}
    settings = model.generation_config
    if model.config.is_encoder_decoder and settings.decoder_start_token_id is None and settings.bos_token_id is None:
        more["decoder_start_token_id"] = 1  # which a tokenizer's files would bring
    out = model.generate(
        **prompt,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        use_cache=True,
        return_dict_in_generate=True,
        output_logits=True,
        eos_token_id=None,
        pad_token_id=0,
        **more,
        disable_compile=True,
    )
    return Written(prompt, out.sequences, list(out.logits))
