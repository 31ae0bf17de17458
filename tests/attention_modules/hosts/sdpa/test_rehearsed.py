"""A trial runs the model itself, however its parts refer to each other, and changes nothing of it."""

import random
import weakref
from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import timm
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import SegformerConfig, SegformerForSemanticSegmentation

from attention_modules import AttentionSwapError, swap_attention
from attention_modules.hosts.sdpa.record import own_record, recorded
from attention_modules.hosts.sdpa.rehearsed import rehearsed
from attention_modules.mechanisms.shared.kept import MOST_NUMBERS


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).movedim(-3, 0).transpose(-2, -3)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(-2, -3).flatten(-2)


class Network(nn.Module):
    """Counts its batches in a normalization and in a metric; calls its parts by ``self.call``."""

    def __init__(self, held: Callable[["Network"], Any]) -> None:
        super().__init__()
        self.attn, self.norm, self.metric = Layer(), nn.BatchNorm1d(16), torchmetrics.MeanMetric()
        self.seen: tuple[list[int], ...] = ([],)
        self.__dict__["held"] = held(self)
        self.example_input_array = torch.randn(4, 6, 16)

    def forward(self, x: Tensor) -> Tensor:
        attn, norm = self.held
        self.metric.update(x.mean())
        return norm(attn(x).transpose(1, 2)).transpose(1, 2)


HELD: dict[str, Callable[[Network], Any]] = {
    "list": lambda model: [model.attn, model.norm],
    "tuple": lambda model: (model.attn, model.norm),
    "unregistered list of modules": lambda model: nn.ModuleList([model.attn, model.norm]),
    "a method": lambda model: (model.attn, model.norm.forward),
    "closures": lambda model: (lambda x: model.attn(x), lambda x: model.norm(x)),
}


@pytest.mark.parametrize("held", HELD.values(), ids=[*HELD])
def test_nothing_changes_however_parts_are_held(held: Callable[[Network], Any]) -> None:
    model, seen = Network(held), []
    model.attn.register_forward_hook(lambda *_: seen.append(1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    (row,) = swap_attention(model, "differential", example=model.example_input_array)
    assert row.heads == 2
    assert seen == []
    assert model.training
    assert model.norm.training
    assert model.metric._update_count == 0
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name.startswith("norm"))


def test_a_module_that_only_an_attribute_holds_is_rehearsed_too() -> None:
    hidden = nn.Sequential(Layer(), nn.BatchNorm1d(6))
    model = nn.Module()
    model.__dict__["hidden"] = [hidden]
    with rehearsed(model) as parts:
        assert {*hidden.modules()} < {*parts}
        assert not any(part.training for part in parts)
        hidden[1](torch.randn(4, 6, 16))
        hidden[1].num_batches_tracked.add_(1)
        hidden[1].other = 1
    assert all(part.training for part in hidden.modules())
    assert hidden[1].num_batches_tracked == 0
    assert not hasattr(hidden[1], "other")


class Frozen(dict[str, int]):
    """As the configurations of libraries are."""

    def __setitem__(self, *_: Any) -> None:
        raise TypeError("it is frozen")

    def __reduce__(self) -> Any:
        return Frozen, (), None, None, iter(self.items())  # filled by what it refuses


def test_what_is_held_in_tuples_stays_and_what_is_frozen_is_no_obstacle() -> None:
    class Counts(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.state, self.config = (torch.zeros(1), [0]), Frozen(a=1)

        def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
            self.state[0].add_(1)
            self.state[1][0] += self.config["a"]
            return super().forward(x)

    model = nn.Sequential(Counts())
    swap_attention(model, "softmax", example=torch.randn(4, 6, 16))
    assert model[0].state == (torch.zeros(1), [0])


def test_draws_of_python_and_numpy_stay_where_they_were() -> None:
    class Draws(Layer):
        def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return super().forward(x * random.random() * np.random.rand())  # noqa: NPY002 - what users draw from

    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    swap_attention(nn.Sequential(Draws()), "softmax", example=torch.randn(4, 6, 16))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002


KEPT: dict[str, Callable[[Any], Any]] = {
    "itself": lambda forward: forward,
    "checkpointed": lambda forward: partial(checkpoint, forward, use_reentrant=False),
    "compiled": lambda forward: torch.compile(forward, backend="eager"),
}


@pytest.mark.parametrize("kept", KEPT.values(), ids=[*KEPT])
def test_a_bound_forward_that_a_block_keeps_is_refused(kept: Callable[[Any], Any]) -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Layer()
            self.steps = {"first": [kept(self.attn.forward)]}

        def forward(self, x: Tensor) -> Tensor:
            return self.steps["first"][0](x)

    with pytest.raises(AttentionSwapError, match=r"'0.attn', whose bound forward '0' keeps in 'steps': .* call it"):
        swap_attention(nn.Sequential(Steps()), "sink")


def test_attributes_that_answer_to_any_name_are_no_forward() -> None:
    model = nn.Sequential(Layer())
    model.__dict__["spy"] = [MagicMock(), MethodType(partial(print), model[0])]
    swap_attention(model, "sink", example=torch.randn(4, 6, 16))
    assert model(torch.randn(4, 6, 16)).shape == (4, 6, 16)


def test_a_layer_that_the_example_does_not_call_is_named() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.attn.in_proj_weight[:16])

    with pytest.warns(UserWarning, match="the example calls 0 of the 1 layers that are swapped, and not 'attn'"):
        swap_attention(Reads(), "sink", example=torch.randn(4, 6, 16))


@pytest.mark.parametrize("kind", [timm.layers.attention.Attention, nn.MultiheadAttention])
@pytest.mark.parametrize("given", [lambda self, *inputs: inputs[0], partial(print), wraps])
def test_a_class_whose_forward_somebody_replaced_is_refused(
    kind: type[nn.Module], given: Any, monkeypatch: Any
) -> None:
    layer = kind(16, 2)
    monkeypatch.setattr(kind, "forward", wraps(kind.forward)(lambda *inputs: inputs[1]) if given is wraps else given)
    with pytest.raises(AttentionSwapError, match="a forward of its own"):
        swap_attention(nn.Sequential(layer), "softmax")


def test_attributes_of_any_name_and_kind_stay_what_they_are_in_a_trial() -> None:
    class Odd(nn.Module):
        """Flips its tokens by a flag, and becomes another class in its first forward."""

        def __init__(self, flips: bool, other: nn.Module | None = None) -> None:
            super().__init__()
            self.attn, self.use_hooks, self.num_hooks = Layer(), flips, 2
            self.__dict__["whole"] = None if other is None else weakref.proxy(other)

        def forward(self, x: Tensor) -> Tensor:
            self.__class__ = Ready
            self.ready = True
            x = x.flip(1) if self.use_hooks and range(self.num_hooks) else x
            return self.attn(x if self.whole is None else self.whole(x))

    class Ready(Odd):
        def forward(self, x: Tensor) -> Tensor:
            assert self.ready
            return self.attn(x.flip(1) if self.use_hooks else x)

    class Flip(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flip(1)

    class Blocks(nn.Module):
        def __init__(self, second: nn.Module, flip: nn.Module) -> None:
            super().__init__()
            self.blocks, self.flip = nn.ModuleList([Odd(False), second]), flip

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](x))

    flip = Flip()
    for second in (Odd(True), Odd(False, flip)):
        model = Blocks(second, flip)
        with pytest.raises(AttentionSwapError, match="tokens"):
            swap_attention(model, "value_residual", example=torch.randn(4, 6, 16))
        assert type(second) is Odd
    model = Blocks(Odd(False), flip)
    swap_attention(model, "value_residual", example=torch.randn(4, 6, 16))
    assert model(torch.randn(4, 6, 16)).shape == (4, 6, 16)


def test_buffers_beside_a_large_one_are_as_before() -> None:
    class Counts(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bank", torch.empty(MOST_NUMBERS + 1, dtype=torch.uint8))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
            self.calls += 1
            return super().forward(x)

    model = nn.Sequential(Counts())
    swap_attention(model, "softmax", example=torch.randn(4, 6, 16))
    assert model[0].calls == 0


def test_after_an_error_everything_is_as_before() -> None:
    model = Network(HELD["tuple"])
    with pytest.raises(RuntimeError):
        recorded(model, (torch.randn(4, 6, 17),), {})
    assert model.training
    assert model.metric._update_count == 0
    assert not model.attn._forward_pre_hooks


def test_a_compiled_model_is_tried_eagerly() -> None:
    model = Network(HELD["tuple"])
    compiled = torch.compile(model, backend=_refuses)
    assert len(recorded(compiled, (torch.randn(4, 6, 16),), {}).calls[model.attn]) == 1


def _refuses(graph: Any, inputs: Any) -> Any:
    raise AssertionError("it is compiled")


@pytest.mark.parametrize("mechanism", ["softmax", "value_residual"])
def test_an_example_stays_as_it_is(mechanism: str) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Layer(), Layer()])

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.blocks[1](self.blocks[0](batch["x"].sub_(1)))

    batch = {"x": torch.randn(4, 6, 16)}
    given = batch["x"].clone()
    swap_attention(InPlace(), mechanism, example=(batch,))
    assert torch.equal(batch["x"], given)


def test_a_model_that_reads_its_hidden_states_by_hooks_of_transformers_runs_its_example() -> None:
    sizes = {"depths": [1] * 4, "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 1, 2, 2]}
    model = SegformerForSemanticSegmentation(SegformerConfig(**sizes, decoder_hidden_size=8)).eval()
    image = torch.randn(1, 3, 64, 64)
    before = model(image).logits  # which leaves the hooks
    assert len(swap_attention(model, "softmax", example=image)) == 4
    torch.testing.assert_close(model(image).logits, before)


def test_the_example_of_a_lightning_module_is_moved_to_it() -> None:
    model = nn.Sequential(Layer()).to("meta")
    model.example_input_array = {"input": torch.randn(4, 6, 16)}  # type: ignore[assignment]
    record = own_record(model)
    assert record is not None
    assert len(record.calls[model[0]]) == 1


@pytest.mark.parametrize("hidden", [-torch.inf, -1e9, -1e4, -9984.0])
def test_a_bias_that_hides_the_future_is_causal(hidden: float) -> None:
    class Masked(Layer):
        def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return super().forward(x, torch.full((6, 6), hidden, dtype=x.dtype).triu(1))

    with pytest.raises(ValueError, match="cannot swap"):
        swap_attention(nn.Sequential(Masked()), "sinkhorn", example=torch.randn(4, 6, 16))


def test_a_call_of_two_dimensions_has_one_head() -> None:
    class OneHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1))

    model, x = nn.Sequential(OneHead()), torch.randn(6, 16)
    plain = model(x)
    swap_attention(model, "softmax", example=x[None])
    torch.testing.assert_close(model(x), plain)
