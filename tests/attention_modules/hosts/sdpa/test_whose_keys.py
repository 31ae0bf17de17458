"""Whether a layer of one's own attends to its own tokens: by calls of the model, by a trial, else by names."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from attention_modules import AttentionSwapError, restore_attention, swap_attention
from attention_modules.analysis import attention_maps
from attention_modules.hosts import attention_layers
from attention_modules.hosts.discovery import survey
from attention_modules.hosts.sdpa.declared import declare_host
from attention_modules.hosts.sdpa.record import Record, knowing
from attention_modules.swap import make_observable

Made = tuple[Tensor, Tensor, Tensor]


class Own(nn.Module):
    """Attention of what a function makes of the arguments."""

    made: Callable[..., Made]

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in "qkv")

    def forward(self, *given: Tensor) -> Tensor:
        given = type(self).made(*given)
        q, k, v = (
            each(x).unflatten(-1, (4, 8)).transpose(1, 2)
            for each, x in zip((self.q, self.k, self.v), given, strict=True)
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Net(nn.Module):
    """One such layer, beside one that attends to itself for sure."""

    def __init__(self, name: str, made: Callable[..., Made]) -> None:
        super().__init__()
        self.attn = type(name, (Own,), {"made": staticmethod(made)})()
        self.sure = type("Sure", (Own,), {"made": staticmethod(lambda x: (x, x, x))})()

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.attn(self.sure(x), *others)


def counted(name: str, made: Callable[..., Made], *others: Any, x: Any = (4, 8, 32), device: str = "cpu") -> list[str]:
    """The layers that count as self-attention, by a call of the model."""
    example = tuple(torch.randn(shape, device=device) for shape in (x, *others))
    with torch.device(device):
        model = Net(name, made)
    return [row.name for row in swap_attention(model, "softmax", example=example)]


def pooled(x: Tensor) -> Tensor:
    return x.unflatten(1, (-1, 2)).mean(2)


def normed(x: Tensor) -> Tensor:
    return F.group_norm(x.transpose(1, 2), 4).transpose(1, 2)


def behind(x: Tensor) -> Tensor:
    return torch.cat([x[:, :1], x[:, :-1]], 1)


# Queries and keys of the same tokens, however keys are made of them.
SELF: dict[str, Callable[..., Made]] = {
    "in order": lambda x: (x, x, x),
    "pooled keys": lambda x: (x, pooled(x), pooled(x)),
    "rolled": lambda x: (x.roll(2, 1),) * 3,
    "normed over tokens": lambda x: (normed(x),) * 3,
    "shifted": lambda x: (x, behind(x), behind(x)),
    "zeros": lambda x: (x, 0 * x, 0 * x),
    "both streams": lambda x, y: (torch.cat([x, y], 1),) * 3,
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("how", SELF)
def test_a_call_shows_self_attention_whatever_the_name_of_the_class(how: str, device: str) -> None:
    others = [(4, 8, 32)] if how == "both streams" else []
    assert counted("CrossShapedAttention", SELF[how], *others, device=device) == ["attn", "sure"]


@pytest.mark.parametrize("keys", [lambda x: x, pooled, lambda x: x.roll(2, 1), normed, lambda x: 0 * x])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_queries_and_keys_may_have_positions_of_their_own(keys: Callable[[Tensor], Tensor], device: str) -> None:
    def made(x: Tensor, of_query: Tensor, of_key: Tensor) -> Made:
        return x + of_query, keys(x + of_key), keys(x)

    assert counted("Attention", made, (4, 8, 32), (4, 8, 32), device=device) == ["attn", "sure"]


def test_values_may_have_arguments_of_their_own() -> None:
    def made(x: Tensor, of_query: Tensor, of_key: Tensor, of_value: Tensor) -> Made:
        return x + of_query, x + of_key, x + of_value

    assert counted("Attention", made, (4, 8, 32), (4, 8, 32), (4, 8, 32)) == ["attn", "sure"]


CROSS: dict[str, Callable[..., Made]] = {
    "turned": lambda x, y, more: (x * more, y * more, y),
    "conditioned": lambda x, y, more: (x + more, y + more, y + more),
}


@pytest.mark.parametrize("how", CROSS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_both_sequences_share_makes_no_self_attention(how: str, batch: int, tokens: int, device: str) -> None:
    shape = (batch, 8, 32)
    assert counted("Attention", CROSS[how], shape, (batch, tokens, 32), x=shape, device=device) == ["sure"]


# Of one argument, keys of other samples or tokens than queries.
OTHERS: dict[str, Callable[..., Made]] = {
    "other half of the batch": lambda x: (x, x.roll(2, 0), x.roll(2, 0)),
    "queries of the other half": lambda x: (x.roll(2, 0), x, x),
    "other half of the tokens": lambda x: (x[:, :4], x[:, 4:], x[:, 4:]),
}


@pytest.mark.parametrize("how", OTHERS)
def test_of_other_samples_or_tokens_of_one_argument_a_name_tells(how: str) -> None:
    made = OTHERS[how]
    model = nn.ModuleList([type(name, (Own,), {"made": staticmethod(made)})() for name in ("CrossView", "View")])
    example = torch.randn(4, 8, 32)
    with pytest.raises(AttentionSwapError, match="the model has cross-attention only"):
        swap_attention(model[0], "softmax", example=example)
    assert len(swap_attention(model[1], "softmax", example=example)) == 1


class Segments(nn.Module):
    """Each segment attends to the one before, too."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = type("Attention", (Own,), {"made": staticmethod(self._made)})()

    @staticmethod
    def _made(x: Tensor, kept: Tensor | None = None) -> Made:
        both = x if kept is None else torch.cat([kept, x], 1)
        return x, both, both

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, 1)
        return self.attn(self.attn(first) * second, first)


def test_a_memory_is_no_second_sequence() -> None:
    x = torch.randn(2, 8, 32)
    assert [row.name for row in swap_attention(Segments(), "sink", example=x)] == ["attn"]


class Block(nn.Module):
    """As the Set Transformer has it: a set attends to another one, which may be itself."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in "qkv")

    def forward(self, Q: Tensor, K: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (4, 8)).transpose(1, 2) for each, x in ((self.q, Q), (self.k, K), (self.v, K)))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Optional(Block):
    """A context, where there is one."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x, x if context is None else context)


class Variadic(Own):
    """Of arguments that have no names."""

    made = staticmethod(lambda x, y: (x + y, x + y, x))


class Sets(nn.Module):
    """Two such layers, and one that no trial can call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.unused = nn.ModuleList([Block(), Block()]), Variadic()

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = self.layers[0](x, x)
        return self.layers[1](x, x.clone() if y is None else y)  # the same, computed twice


@pytest.mark.parametrize("mechanism", ["linear", "sink", "value_residual"])
def test_one_sequence_that_is_given_twice_is_self_attention(mechanism: str) -> None:
    model, x = Sets(), torch.randn(2, 9, 32)
    assert [row.name for row in swap_attention(model, mechanism, where="layers*")] == ["layers.0", "layers.1"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
    other = pytest.raises(NotImplementedError, match="was given a second sequence")
    with other if mechanism != "sink" else pytest.warns(UserWarning, match="was given a second sequence"):
        model(x, torch.randn(2, 9, 32))


def test_what_an_example_showed_is_known_afterwards() -> None:
    """Of layers that were left out, too, in copies, and where it is that of a LightningModule."""

    class Task(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net("Attention", lambda x, y: (x, y, y))
            self.example_input_array = torch.randn(2, 8, 32), torch.randn(2, 8, 32)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.net(x, y)

    for named in (False, True):
        task = Task()
        if named:
            swap_attention(task.net, "softmax", example=task.example_input_array)
            assert [layer.name for layer in attention_layers(copy.deepcopy(task.net))] == ["sure"]
            assert [row.name for row in swap_attention(task.net, "twicing")] == ["sure"]
        else:
            assert [layer.name for layer in attention_layers(task)] == ["net.sure"]
            assert [row.name for row in swap_attention(task, "sink")] == ["net.sure"]


def test_an_example_that_leaves_a_layer_out_takes_nothing_back() -> None:
    model = Net("Attention", lambda x, y: (x, y, y))
    swap_attention(model, "softmax", example=(torch.randn(2, 8, 32), torch.randn(2, 8, 32)))
    model.forward = lambda x: model.sure(x)  # type: ignore[method-assign]
    swap_attention(model, "sink", where="sure", example=torch.randn(2, 8, 32))
    assert [layer.name for layer in attention_layers(model)] == ["sure"]


class Reversed(Block):
    """The sequence that asks comes second."""

    def forward(self, key: Tensor, query: Tensor) -> Tensor:
        return super().forward(query, key)


def test_a_mechanism_that_needs_the_input_is_given_that_of_the_queries() -> None:
    swap_attention(layer := nn.ModuleList([Reversed()]), "gated")
    seen: list[Tensor] = []
    layer[0].mechanism.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["x"]), with_kwargs=True)
    with pytest.warns(UserWarning, match="was given a second sequence"):
        layer[0](torch.randn(2, 9, 32), x := torch.randn(2, 9, 32))
    assert seen[0] is x


class SequenceFirst(nn.Module):
    """``[N, B, C]``, which no trial of ``[B, N, C]`` tells from it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in "qkv")

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        q, k, v = (
            each(x).unflatten(-1, (4, 8)).permute(1, 2, 0, 3)
            for each, x in ((self.q, x), (self.k, context), (self.v, context))
        )
        return F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2)


def test_of_a_trial_whose_tokens_lie_elsewhere_sizes_tell() -> None:
    swap_attention(layer := nn.ModuleList([SequenceFirst()]), "linear")
    with pytest.raises(NotImplementedError, match="was given a second sequence"):
        layer[0](torch.randn(9, 2, 32), torch.randn(9, 2, 32))


def test_a_swapped_layer_is_not_asked_whose_keys_its_mechanism_has() -> None:
    """That of sinks adds one."""
    model = nn.ModuleDict({name: Optional() for name in "ab"})
    model.forward = lambda x: model["b"](model["a"](x))  # type: ignore[method-assign]
    x = torch.randn(2, 8, 32)
    swap_attention(model, "sink", where="a", example=x)
    swap_attention(model, "softmax", where="b", example=x)
    attention_maps(model, x)
    for _ in range(2):
        assert [layer.name for layer in attention_layers(model)] == ["a", "b"]
        restore_attention(model)


def test_another_example_tells_anew() -> None:
    class Task(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.other = Optional(), Optional()
            self.example_input_array: Any = (torch.randn(2, 8, 32),)

        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            return self.other(self.own(x), y)

    task = Task()
    assert [row.name for row in swap_attention(task, "sink")] == ["own", "other"]
    restore_attention(task)
    task.example_input_array = torch.randn(2, 8, 32), torch.randn(2, 8, 32)
    assert [row.name for row in swap_attention(task, "sink")] == ["own"]


def test_an_example_that_does_not_run_ends_nothing_that_needs_none() -> None:
    class Task(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Optional()
            self.example_input_array = torch.randn(2, 8, 33)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    make_observable(task := Task(), ["net"])
    assert task(torch.randn(2, 8, 32)).shape == (2, 8, 32)


# What layers of several arguments attend to, without an example: to themselves, unless a second sequence comes.
class Masked(Block):
    """As the annotated transformer has it."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        x = self.v(value).unflatten(-1, (4, 8)).transpose(1, 2)
        q, k = (each(x).unflatten(-1, (4, 8)).transpose(1, 2) for each, x in ((self.q, query), (self.k, key)))
        return F.scaled_dot_product_attention(q, k, x, mask).transpose(1, 2).flatten(2)


class Turned(Masked):
    """The same in another order."""

    def forward(self, value: Tensor, key: Tensor, query: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(query, key, value, None)  # type: ignore[arg-type]


class Streams(Own):
    """Two sequences are one."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.more = nn.Linear(width, 32)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(torch.cat([x, self.more(c)], 1))

    made = staticmethod(lambda x: (x, x, x))


class Memory(Block):
    """Of earlier tokens, where there are any."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x, x if memory is None else torch.cat([memory, x], 1))


X = torch.randn(2, 9, 32)
ALONE: dict[type[nn.Module], tuple[Any, ...]] = {
    Masked: (X, X, X, None),
    Turned: (X.clone(), X, X),
    Streams: (X, torch.randn(2, 9, 24)),
    Memory: (X, torch.randn(2, 5, 32)),
    Optional: (X, X),
}


@pytest.mark.parametrize("kind", ALONE)
def test_layers_of_several_arguments_run_on_trial(kind: type[nn.Module]) -> None:
    """Their heads are known, and what is no second sequence is none."""
    rows = swap_attention(model := nn.ModuleList([kind()]), "sink")
    assert rows[0].heads == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model[0](*ALONE[kind])


def test_a_declared_layer_of_queries_keys_and_values_is_tried_too() -> None:
    class Declared(Turned):
        pass

    declare_host(Declared, q="q", k="k", v="v", heads=4)
    swap_attention(layer := nn.ModuleList([Declared()]), "linear")
    layer[0](X, X, X)
    with pytest.raises(NotImplementedError, match="was given a second sequence"):
        layer[0](X, torch.randn(2, 9, 32), X)


class Needed(Masked):
    """Of another sequence."""

    def forward(self, x: Tensor, context: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, context, context, attention_mask)


class NeededFirst(SequenceFirst):
    """Likewise, ``[N, B, C]``."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, y)


@pytest.mark.parametrize("kind", [Needed, NeededFirst])
@pytest.mark.parametrize("mechanism", ["linear", "sink"])
def test_a_layer_that_needs_a_second_sequence_attends_to_it(kind: type[nn.Module], mechanism: str) -> None:
    assert [row.name for row in swap_attention(nn.ModuleList([kind(), Optional()]), mechanism)] == ["1"]


class ByKeyword(Optional):
    """A context that has no name of its own."""

    def forward(self, x: Tensor, **more: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, more.get("context"))


class Beside(Optional):
    """A context that has a name, beside what has none."""

    def forward(self, x: Tensor, context: Tensor | None = None, **more: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x, context)


class ByPlace(Optional):
    """No argument has one."""

    def forward(self, x: Tensor, /, context: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x, context)


class Asked(Block):
    """The second sequence asks."""

    def forward(self, x: Tensor, query: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x if query is None else query, x)


class Unmasked(Optional):
    """Names that hold "mask" and are of none."""

    def forward(self, masked_x: Tensor, unmasked: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(masked_x, unmasked)


SECOND: dict[type[nn.Module], str] = {
    ByKeyword: "context",
    Beside: "context",
    ByPlace: "context",
    Asked: "query",
    Unmasked: "unmasked",
}


@pytest.mark.parametrize("kind", SECOND)
def test_a_second_sequence_is_noticed_however_it_is_given(kind: type[nn.Module]) -> None:
    swap_attention(layer := nn.ModuleList([kind()]), "sink")
    assert layer[0](X).shape == X.shape
    if kind is not ByKeyword:
        with pytest.warns(UserWarning, match="was given a second sequence"):
            layer[0](X, **{SECOND[kind]: torch.randn(2, 9, 32)})
    swap_attention(layer, "linear")
    assert layer[0](X).shape == X.shape
    with pytest.raises(NotImplementedError, match="was given a second sequence"):
        layer[0](X, **{SECOND[kind]: torch.randn(2, 9, 32)})


class Insisting(Block):
    """It takes one sequence alone, which it is given several times."""

    def forward(self, query: Tensor, key: Tensor) -> Tensor:  # type: ignore[override]
        if query is not key:
            raise NotImplementedError("self-attention only")
        return super().forward(query, key)


def named(names: str) -> type[nn.Module]:
    """The block, with these names for its arguments."""

    class Named(Block):
        def forward(self, *given: Tensor, **by_name: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(*(*given, *by_name.values())[:2])

    said = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ["self", *names.split()]]
    Named.forward.__signature__ = inspect.Signature(said)  # type: ignore[attr-defined]
    return Named


@pytest.mark.parametrize(
    "names",
    ["query key value", "qx kx vx", "queryStates keyStates valueStates", "x_q x_kv", "Q_in K_in", "q src_k_x"],
)
def test_a_layer_that_is_asked_for_its_keys_may_attend_to_itself(names: str) -> None:
    assert swap_attention(nn.ModuleList([named(names)()]), "sink")[0].heads == 4
    assert swap_attention(nn.ModuleList([Insisting()]), "sink")[0].heads == 4


@pytest.mark.parametrize("names", ["x context", "query memory", "x keypoints", "x vision", "x memory_key_states"])
def test_a_layer_that_is_asked_for_something_else_does_not(names: str) -> None:
    with pytest.raises(AttentionSwapError, match="cross-attention only"):
        swap_attention(nn.ModuleList([named(names)()]), "sink")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_declared_layer_is_asked_several_times_with_one_answer(device: str) -> None:
    class Declared(Turned):
        pass

    declare_host(Declared, q="q", k="k", v="v", heads=4)
    with torch.device(device):
        model = nn.ModuleList([Declared()])
    with knowing(Record()):
        assert [survey(model).layers[0].cross for _ in range(2)] == [False, False]


def test_the_example_is_asked_of_layers_that_a_trial_left_out() -> None:
    class Task(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.mha, self.own = nn.MultiheadAttention(32, 4, batch_first=True), Needed()
            self.example_input_array = torch.randn(2, 9, 32)

        def forward(self, x: Tensor) -> Tensor:
            x = self.mha(x, x, x)[0]
            return self.own(x, x, None)

    assert [layer.name for layer in attention_layers(Task())] == ["mha", "own"]


def test_samples_of_which_queries_and_keys_share_positions_are_other_samples() -> None:
    made = lambda x, at: (x + at, x.roll(2, 0) + at, x.roll(2, 0))  # noqa: E731
    assert counted("CrossView", made, (1, 8, 32)) == ["sure"]


def test_no_more_trials_are_made_than_are_asked_for() -> None:
    class Many(Optional):
        def forward(self, x: Tensor, context: Any = None, bias: Any = None, more: Any = None) -> Tensor:  # type: ignore[override]
            seen.append(x)
            return super().forward(x, context)

    class One(Many):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    seen: list[Tensor] = []
    attention_layers(nn.ModuleList([Many()]))
    few = len(seen)
    seen.clear()
    attention_layers(nn.ModuleList([One()]))
    assert len(seen) == few


class Biased(nn.Module):
    """The call alone, with a bias that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4, 8, 8))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, self.bias)


class Around(nn.Module):
    """The projections."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.qkv = Biased(), nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        return self.core(*self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)).transpose(1, 2).flatten(2)


def test_a_bias_makes_no_queries() -> None:
    assert [row.name for row in swap_attention(Around(), "sink", example=torch.randn(2, 8, 32))] == ["core"]


def test_within_a_transform_what_cannot_be_told_is_taken() -> None:
    swap_attention(layer := nn.ModuleList([Block()]), "linear")
    torch.func.vmap(lambda x: layer[0](x, x[:]))(torch.randn(3, 2, 9, 32))


def test_a_layer_may_say_so_itself() -> None:
    model = Net("Attention", lambda x: (x, x, x))
    model.attn.is_cross_attention = True
    assert [row.name for row in swap_attention(model, "softmax", example=torch.randn(2, 8, 32))] == ["sure"]


def test_a_trial_whose_sequences_do_not_come_out_as_such_tells_nothing() -> None:
    class Timed(Block):
        def forward(self, x: Tensor, time: Tensor) -> Tensor:  # time [B, C]
            return super().forward(x := x + time[:, None], x)

    with pytest.raises(ValueError, match=r"the number of heads of Timed .*pass example="):
        swap_attention(Timed(), "sink")
    swap_attention(layer := Timed(), "linear")
    assert layer(torch.randn(2, 9, 32), torch.randn(2, 32)).shape == (2, 9, 32)
