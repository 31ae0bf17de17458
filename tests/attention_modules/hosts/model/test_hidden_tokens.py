"""What no row may see, itself or through other tokens and layers, changes nothing there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attention_modules import mechanism_class, swap_attention
from tests.attention_modules.hosts.cases import (
    BATCH,
    DIM,
    ENCODER,
    HEADS,
    HOSTS,
    MECHANISMS,
    PADDING_ALONE,
    WITH_A_STATE,
    decoder,
    deep,
    settled,
)
from tests.rows import each_row

TOKENS = 7
PAST = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
Call = Callable[[nn.Module, Tensor, Tensor], Tensor]  # of a model, features and a mask [N] or [N, N], True = seen


def _tree() -> Tensor:
    seen = torch.eye(TOKENS, dtype=torch.bool)
    for token, parent in enumerate((0, 0, 0, 1, 1, 2, 4)):
        seen[token] |= seen[parent]
    return seen


PADDING = {
    "before": torch.tensor([0, 0, 1, 1, 1, 1, 1]).bool(),
    "after": torch.tensor([1, 1, 1, 1, 1, 0, 0]).bool(),
    "between": torch.tensor([1, 1, 0, 0, 1, 0, 1]).bool(),
}
SECOND = torch.arange(TOKENS) > 2
OF_ROWS = {"tree": _tree(), "window": PAST.triu(-1), "packed": PAST & (SECOND[:, None] == SECOND)}


def _encoder(model: nn.Module, x: Tensor, seen: Tensor) -> Tensor:
    return model(x, **({"src_key_padding_mask": ~seen.expand(len(x), -1)} if seen.dim() == 1 else {"mask": ~seen}))


def _mha(model: nn.Module, x: Tensor, seen: Tensor) -> Tensor:
    return model(x, **({"key_padding_mask": ~seen.expand(len(x), -1)} if seen.dim() == 1 else {"attn_mask": ~seen}))


def _hugging_face(model: nn.Module, x: Tensor, seen: Tensor) -> Tensor:
    mask = seen.long().expand(len(x), -1) if seen.dim() == 1 else seen.expand(len(x), 1, -1, -1)
    return model(inputs_embeds=x, attention_mask=mask)[0]


class TwoLayers(nn.Module):
    """Two nn.MultiheadAttention with residual connections."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(DIM, HEADS, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor, **masks: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False, **masks)[0]
        return x


MODELS: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    "encoder": (lambda: settled(ENCODER), _encoder),
    "mha": (lambda: settled(TwoLayers), _mha),
    "bert": (lambda: deep("bert")[0], _hugging_face),
    "llama": (lambda: deep("llama")[0], _hugging_face),
    "mistral": (lambda: settled(decoder("Mistral", sliding_window=3, num_hidden_layers=2)), _hugging_face),
}
DECODERS = ("llama", "mistral")


def _reached(seen: Tensor, host: str) -> Tensor:
    """Which token reaches which row, ``[N, N]``, through any number of layers."""
    seen = seen.expand(TOKENS, -1)
    if host in DECODERS:
        seen = seen & PAST
    through = (seen | torch.eye(TOKENS, dtype=torch.bool)).float()
    return torch.linalg.matrix_power(through, TOKENS) > 0


def _pairs() -> list[tuple[str, str]]:
    """Each mechanism in one or two models of all that do not refuse it, in turn."""
    cases = {host: HOSTS.get(host, HOSTS["encoder"]) for host in MODELS}
    refuses = {host: {*case.refuses, *({*WITH_A_STATE} & {*case.refuses_call})} for host, case in cases.items()}
    turns = [(host, mechanism) for i, mechanism in enumerate(MECHANISMS) for host in (*MODELS, *MODELS)[i % 5 :][:5:2]]
    return [(host, mechanism) for host, mechanism in turns if mechanism not in refuses[host]]


# Masks that hide a token from rows that see later ones, so that columns may be no positions.
NO_COLUMNS = {
    "encoder": ("before", "tree", "packed"),
    "mha": ("before", "tree", "packed"),
    "bert": ("before", "between", "tree", "packed"),
    "llama": ("before", "tree", "packed"),
    "mistral": ("before", "between", "tree", "packed"),
}


@each_row(("host", "mechanism"), _pairs())
def test_a_token_changes_no_row_that_may_not_see_it(host, mechanism):
    build, call = MODELS[host]
    model, (name, options) = build(), MECHANISMS[mechanism]
    swap_attention(model, name, **options)
    for kind, seen in {**PADDING, **OF_ROWS}.items():
        x = torch.randn(BATCH, TOKENS, DIM, generator=torch.Generator().manual_seed(3))
        if kind in OF_ROWS and mechanism in (*PADDING_ALONE, *WITH_A_STATE):
            with pytest.raises(
                (ValueError, RuntimeError),
                match=f"({name}|{mechanism_class(name).__name__}) .*takes masks (of|that hide the future and) padding",
            ):
                call(model, x, seen)
            continue
        if mechanism == "position_bias" and kind in NO_COLUMNS.get(host, ()):
            with pytest.raises(ValueError, match="PositionBiasAttention counts columns"):
                call(model, x, seen)
            continue
        check_apart(lambda x, seen=seen: call(model, x, seen), x, ~_reached(seen, host), kind)


def check_apart(call: Callable[[Tensor], Tensor], x: Tensor, apart: Tensor, kind: str) -> None:
    """One sample of the batch for each token and sample, in which it alone is another; then their gradients."""
    copies = x.detach().repeat(TOKENS, 1, 1)
    others, token = copies.unflatten(0, (TOKENS, BATCH)).clone(), torch.arange(TOKENS)
    others[token, :, token] = 3 * others[token, :, token].roll(1, -1)
    rows = apart.T[:, None, :, None].expand(-1, BATCH, -1, DIM)  # [token, sample, row, feature]
    out = call(copies.requires_grad_())
    change = ((call(others.flatten(0, 1)) - out).unflatten(0, (TOKENS, BATCH)) * rows).abs().amax((1, 2, 3))
    assert change.max() <= 1e-5, f"tokens of {kind} change rows that may not see them, each by {change}"
    (gradient,) = torch.autograd.grad((out.unflatten(0, (TOKENS, BATCH)) * rows).square().sum(), copies)
    gradient = gradient.unflatten(0, (TOKENS, BATCH))[token, :, token].abs().amax((1, 2))
    assert gradient.max() <= 1e-5, f"tokens of {kind} get gradients of such rows, each of {gradient}"
