"""Causal language models of any origin: how one is built from plain data, and how its loss is computed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import lightning_tasks.models as own_models
from attention_modules.extras import needed_for
from attention_modules.hosts.base import PLAN
from attention_modules.hosts.sdpa.rehearsed import rehearsed
from attention_modules.hosts.weights import computes_more
from attention_modules.mechanism import Mechanism
from attention_modules.pretrained import load_pretrained
from attention_modules.sharing import SharedValues
from lightning_tasks.errors import reason
from lightning_tasks.models.losses import IGNORE_INDEX, chunked_cross_entropy, token_log_probabilities
from lightning_tasks.training.hparams import Spec, import_object, plain_data
from lightning_tasks.training.kept_layers import Layers, chosen_names
from lightning_tasks.training.kinds import check_kind, checked_build, checked_spec
from lightning_tasks.training.mechanisms import swap_layers, swap_rest


def model_spec(value: Any) -> str | Spec:
    """Plain data of a model.

    A class (or its name) becomes ``{class_path, init_args}``, a Hugging Face config its dict with ``model_type``; the
    name or folder of a pretrained Hugging Face model stays a string.

    Raises:
        TypeError: if it is a module that is built already, or cannot be stored.
        ValueError: if a class path names nothing.
    """
    if isinstance(value, nn.Module):
        raise TypeError(
            f"model must say how to build one, got a {type(value).__name__} that is built; give its class or "
            "{'class_path': ..., 'init_args': {...}}, so that a checkpoint can build it again"
        )
    if isinstance(value, Mapping) and "model_type" in value:
        return plain_data(value, "model")
    if hasattr(value, "to_diff_dict"):
        return plain_data({**value.to_diff_dict(), "model_type": value.model_type}, "model")
    if isinstance(value, str) and ("/" in value or Path(value).is_dir()):
        return value
    try:
        return checked_spec(value, own_models, place="model")
    except ValueError:
        if isinstance(value, str):
            return value
        raise


def build_causal_lm(
    spec: str | Spec,
    vocab_size: int,
    attention: Mechanism,
    options: Mapping[str, Any],
    layers: Layers,
    other: Mechanism = "softmax",
    other_options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A model from what :func:`model_spec` returned, with a mechanism in the chosen layers, and another in the rest.

    A class whose constructor takes ``attention`` gets the first there; in any other model plain attention is swapped.

    Raises:
        ValueError: if a pretrained model cannot be loaded, or has fewer token ids than ``vocab_size``.
    """
    if isinstance(spec, dict) and "class_path" in spec:
        target = import_object(spec["class_path"])
        check_kind(target, "model", spec["class_path"])
        accepted = inspect.signature(target).parameters
        extra: dict[str, Any] = {"vocab_size": vocab_size} if "vocab_size" in accepted else {}
        if "attention" in accepted and not isinstance(layers, dict):
            chosen = {"attention": attention, "attention_options": dict(options), "attention_layers": layers}
            model = checked_build(spec, "model", **extra, **chosen)
            swap_rest(model, chosen_names(model, layers), other, other_options)
            return model
        model = checked_build(spec, "model", **extra)
    else:
        model = _hugging_face(spec, vocab_size)
    swap_layers(model, attention, options, layers, other, other_options)
    return model


def _hugging_face(spec: str | Spec, vocab_size: int) -> nn.Module:
    with needed_for("a Hugging Face model", "hf"):
        from transformers import AutoConfig, AutoModelForCausalLM

    if isinstance(spec, dict):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**{**spec, "vocab_size": vocab_size}), trust_remote_code=False
        )
    dtype = torch.get_default_dtype()  # as the trainer's precision has it, and not the file
    try:
        model: Any
        if (Path(spec) / PLAN).is_file():  # it was saved with swapped attention, and is trained on with it
            model = load_pretrained(AutoModelForCausalLM, spec, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(spec, trust_remote_code=False, dtype=dtype)
    except Exception as error:  # of the hub's client, its transport, or a folder that holds something else
        raise ValueError(
            f"{spec!r} names no class of lightning_tasks.models, and could not be loaded as a pretrained Hugging Face "
            f"model ({reason(error)}). Check the name, the network and $HF_HUB_OFFLINE; or give the folder of a saved "
            "model, or a configuration (a dict with 'model_type') to start from new weights"
        ) from error
    model.train()  # it comes in eval mode, without dropout
    known = model.get_input_embeddings().weight.size(0)
    if known < vocab_size:
        raise ValueError(
            f"{spec} knows {known} token ids and the data has {vocab_size}; "
            "tokenize the data with the model's own tokenizer"
        )
    return model


def position_limit(model: Any) -> int | None:
    """The longest input in tokens that a model has positions for; None where rope or ALiBi bound nothing."""
    config = getattr(model, "config", None)
    if getattr(config, "rope_parameters", None) is not None:
        return None
    own = getattr(model, "num_tokens", None)
    limit = getattr(config, "max_position_embeddings", None) if own is None else own
    if not isinstance(limit, int) or limit <= 0:
        return None
    tables = (part for name, part in model.named_modules() if name.rpartition(".")[2] == "position_embeddings")
    padding = next((part.padding_idx for part in tables if isinstance(part, nn.Embedding)), None)
    return limit if padding is None else limit - padding - 1  # those of RoBERTa count from behind the padding's


def check_window(model: Any, num_tokens: int) -> None:
    """Check that a model has a position for each token of a window; rope and ALiBi bound nothing.

    Raises:
        ValueError: if it has fewer positions.
    """
    limit = position_limit(model)
    if limit is not None and limit < num_tokens:
        own = getattr(model, "num_tokens", None)
        cure = (
            "a larger num_tokens" if own is not None else "more positions (max_position_embeddings; GPT-2: n_positions)"
        )
        raise ValueError(
            f"the windows have {num_tokens} tokens and {type(model).__name__} has {limit} positions; shorten "
            f"the windows (num_tokens of the data), or build the model with {cure}"
        )


def _head(model: Any) -> nn.Linear | None:
    """The linear map from hidden states to logits, where there is one, and its weight and bias are all of it."""
    if hasattr(model, "hidden"):
        head = getattr(model, "head", None)
    else:
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return head if isinstance(head, nn.Linear) and computes_more(head) is None else None


def _hidden(model: Any, inputs: Tensor) -> Tensor:
    """What the head sees, ``[B, N, D]``."""
    if hasattr(model, "hidden"):
        return model.hidden(inputs)
    return model.base_model(inputs, use_cache=False).last_hidden_state


def _logits(model: nn.Module, inputs: Tensor) -> Tensor:
    """``[B, N, V]``, also of a Hugging Face model."""
    output = model(inputs)
    return output if isinstance(output, Tensor) else output.logits


def has_plain_head(model: nn.Module) -> bool:
    """Whether the logits are ``head(hidden(tokens))`` and nothing else: some models cap, scale or transform them.

    Found by trying in training, with a head that answers with known values: the head is given what `hidden` makes, of
    the same Parameters, and its answer is returned as it is, without a Parameter. Then the loss can be computed in
    chunks. The model stays as it was.
    """
    head = _head(model)
    if head is None or head.weight.is_meta:
        return False
    tokens = torch.tensor([[0, head.out_features - 1]], device=head.weight.device)
    answer = torch.linspace(-100, 100, head.out_features, device=head.weight.device).to(head.weight.dtype)
    answer = answer.expand(1, 2, -1)
    seen: list[Tensor] = []

    def record(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        seen.append(args[0])
        return answer

    def tried(run: Callable[[Any, Tensor], Tensor]) -> Tensor:  # each draws the same numbers
        with rehearsed(model) as parts, torch.enable_grad():
            for part in parts:
                vars(part)["training"] = True
            head.register_forward_hook(record)
            return run(model, tokens)

    logits, hidden = tried(_logits), tried(_hidden)
    if len(seen) != 1 or seen[0].shape != hidden.shape or not torch.equal(logits, answer) or logits.requires_grad:
        return False
    return torch.allclose(seen[0], hidden, rtol=1e-3, atol=1e-5) and _leaves(seen[0]) == _leaves(hidden)


def _leaves(made: Tensor) -> set[int]:
    """The tensors with gradients of which it is made, by their identity."""
    seen, found, waiting = set[Any](), set[int](), [made.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found |= {id(node.variable)} if hasattr(node, "variable") else set()
            waiting += [before for before, _ in node.next_functions]
    return found


def bypassed(model: nn.Module) -> str:
    """What a loss in chunks passes by, as it calls neither the model's forward nor its head's; "" where nothing."""
    whole = getattr(model, "_orig_mod", model)
    inside = [hook for part in whole.modules() if part is not whole for hook in part._forward_hooks.values()]
    shared = [held for hook in inside if isinstance(held := getattr(hook, "__self__", None), SharedValues)]
    for name, module in (("model", whole), ("head", _head(whole))):
        kinds = ("forward", "forward_pre", "backward", "backward_pre")
        hooks = [hook for kind in kinds for hook in getattr(module, f"_{kind}_hooks", {}).values()]
        # Of those by which layers share values, a module inside has others.
        if any(not getattr(hook, "only_watches", getattr(hook, "__self__", None) in shared) for hook in hooks):
            return f"hooks of the {name}"
        if getattr(module, "_compiled_call_impl", None) is not None or whole is not model:
            return f"the compilation of the {name}"
    return ""


def loss_sum(model: nn.Module, inputs: Tensor, targets: Tensor, chunk_size: int | None) -> Tensor:
    """Sum of the token losses in nats, a scalar.

    Args:
        model: a causal language model.
        inputs: token ids ``[B, N]``.
        targets: next tokens ``[B, N]``, -100 where none counts.
        chunk_size: tokens whose logits exist together, for a model that :func:`has_plain_head`; None for all tokens.
    """
    check_window(model, inputs.size(1))
    head = _head(model)
    if chunk_size is None or head is None:
        logits = _logits(model, inputs).flatten(0, 1).float()
        return functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    hidden = _hidden(model, inputs)
    return chunked_cross_entropy(hidden, head.weight, targets, head.bias, reduction="sum", chunk_size=chunk_size)


@torch.no_grad()
def log_probabilities(model: nn.Module, inputs: Tensor, targets: Tensor, chunk_size: int | None) -> Tensor:
    """ln p of each target ``[B, N]`` in nats, 0 where it is ignored; arguments as for :func:`loss_sum`."""
    check_window(model, inputs.size(1))
    head = _head(model)
    if chunk_size is None or head is None:
        logits = _logits(model, inputs).flatten(0, 1).float()
        losses = functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
        return -losses.view(targets.shape)
    return token_log_probabilities(_hidden(model, inputs), head.weight, targets, head.bias, chunk_size=chunk_size)
