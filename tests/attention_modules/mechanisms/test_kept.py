"""What a mechanism keeps outside of Parameters is the same after a look, and acts within it as it does in a call."""

import functools
import itertools
import queue
import threading
from collections import deque
from types import SimpleNamespace
from weakref import proxy

import numpy as np
import pytest
import torch
from torch import nn

from attention_modules import AttentionMechanism, AttentionSpec, build_mechanism
from attention_modules.mechanisms.shared import kept
from attention_modules.mechanisms.shared.kept import own_copies
from attention_modules.mechanisms.shared.probe import acting_map

SPEC = AttentionSpec(dim=8, num_heads=2, head_dim=4)
MISSING = object()
TOTAL, COUNTED, QUEUES = 0, {"calls": 0}, []


def softmax(q, k, v, attn_mask=None, is_causal=False, dropout_p=0.0, scale=None):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)


class Slots:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


class Store:
    def __init__(self, held):
        self.held, self.lock = held, threading.Lock()


class Frozen(dict):
    def __setitem__(self, name, value):
        raise TypeError("frozen")


class Single:
    """One of its kind, which hands out nothing of itself for pickling."""

    def __new__(cls):
        cls.one = vars(cls).get("one") or super().__new__(cls)
        return cls.one

    def __init__(self):
        self.calls, self.handle = torch.zeros(()), threading.Lock()

    def __getstate__(self):
        return {}

    def __reduce__(self):
        raise AssertionError("pickled")


class Feed(queue.Queue):
    """What another thread fills."""


class Closed:
    """Whose attributes are read by code of its own."""

    def __init__(self):
        vars(self)["calls"] = 0

    @property
    def calls(self):
        return vars(self)["calls"]


class Held(AttentionMechanism):
    """Counts a call in everything, and mixes with the count."""

    def __init__(self, spec):
        super().__init__(spec)
        self.state = torch.zeros(2)
        self.now = self.state[:1]
        self.register_buffer("ran", torch.zeros(()))
        self.cache, self.slots, self.array = {}, Slots(), np.zeros(1)
        self.store, self.names = Store(self.cache), SimpleNamespace()
        self.last, self.count, self.missing = deque([torch.zeros(1)], 3), itertools.count(), MISSING
        self.me, self.config, self.closed = proxy(self), Frozen(a=1), Closed()
        self.single, self.waited_for, self.rows = Single(), Feed(), list(range(kept.MOST_OBJECTS))

    def forward(self, q, k, v, attn_mask=None, is_causal=False, dropout_p=0.0, scale=None):
        assert self.missing is MISSING
        self.store.held["k"] = k
        self.state.add_(1)
        self.ran.add_(1)
        self.slots.calls += 1
        self.array += 1
        self.names.calls = self.me.slots.calls
        self.last[0].add_(1)
        self.last.append(self.cache["k"])
        self.single.calls += 1
        vars(self.closed)["calls"] += 1
        assert self.single.handle
        assert self.waited_for is QUEUES[0]
        number = torch.stack([self.now[0], self.ran, self.last[0][0]]).sum() + self.slots.calls + float(self.array[0])
        return softmax(q * number, k, v, attn_mask, is_causal, dropout_p, scale)


@pytest.mark.parametrize("inference", [False, True])
def test_a_look_is_the_next_call_and_keeps_nothing(inference):
    torch.manual_seed(0)
    module, (q, k, v) = build_mechanism(Held, SPEC), torch.randn(3, 1, 2, 5, 4)
    QUEUES[:] = [module.waited_for]
    for calls in range(2):
        with torch.inference_mode(inference):
            found = acting_map(module, q, k, v).dense()
        states = (module.single.calls, module.state[0], module.last[0], module.array[0], module.ran)
        assert [module.slots.calls, module.closed.calls, *map(int, states)] == [calls] * 7
        torch.testing.assert_close(found @ v, module(q, k, v))


def counting():
    calls, total, drawn = [0], 0, torch.Generator().manual_seed(0)

    def attention(q, k, v, cache={"calls": 0}):  # noqa: B006 - what people write
        nonlocal total
        global TOTAL
        TOTAL, total = TOTAL + 1, total + 1
        COUNTED["calls"] += 1
        calls[0] += 1
        cache["calls"] += 1
        number = total + TOTAL + calls[0] + COUNTED["calls"] + cache["calls"]
        return softmax(q * number * torch.rand((), generator=drawn), k, v)

    return attention


def given(q, k, v, calls):
    calls.add_(1)
    return softmax(q * calls, k, v)


def attribute(q, k, v):
    attribute.calls = getattr(attribute, "calls", 0) + 1
    return softmax(q * attribute.calls, k, v)


@pytest.mark.parametrize(
    "make",
    [
        counting,
        lambda: functools.wraps(softmax)(lambda *args, of=counting(), **options: of(*args)),  # noqa: B008
        lambda: functools.update_wrapper(functools.partial(given, calls=torch.zeros(())), softmax),
        lambda: attribute,
    ],
    ids=["closure", "default", "partial", "attribute"],
)
def test_what_a_function_keeps_is_as_before(make):
    torch.manual_seed(0)
    module, (q, k, v) = build_mechanism(make(), SPEC), torch.randn(3, 1, 2, 5, 4)
    for _ in range(2):
        found = [acting_map(module, q, k, v).dense() for _ in range(2)]
        assert torch.equal(*found)
        torch.testing.assert_close(found[0] @ v, module(q, k, v))


def test_what_a_copy_shares_is_shared_in_the_copy_and_what_is_not_ours_stays():
    layer, gain, whole = nn.Linear(2, 2), torch.ones(2, requires_grad=True), torch.zeros(4)
    wide, nested = torch.zeros(1).expand(1 << 40), []
    for _ in range(10_000):
        nested = [nested]
    values = {"layer": [layer], "bias": layer.bias, "gain": gain, "whole": whole, "part": whole[1:], "wide": wide}
    values |= {"made": (gain * 2,), "f": softmax, "kind": Held, "device": whole.device, "lock": threading.Lock()}
    (own,) = own_copies([values])
    for name in ("bias", "wide", "f", "kind", "device", "lock"):
        assert own[name] is values[name]
    assert own["layer"][0] is layer
    own["part"].add_(1)
    assert own["whole"].tolist() == [0, 1, 1, 1]
    assert whole.sum() == 0
    (own["gain"].sum() + own["made"][0].sum()).backward()
    assert gain.grad.tolist() == [3, 3]
    values = {"nested": nested, "rows": list(range(kept.MOST_OBJECTS)), "large": [torch.empty(kept.MOST_NUMBERS + 1)]}
    values["config"] = Frozen(a=1)
    bank = torch.zeros(kept.MOST_NUMBERS + 1, dtype=torch.uint8)
    (own,) = own_copies([{**values, "whole": whole, "holds": [whole], "bank": bank, "slots": [bank[:2], bank]}])
    assert not [name for name, value in values.items() if own[name] is not value]
    assert own["whole"] is own["holds"][0] is not whole
    assert own["bank"] is own["slots"][1] is not bank
    assert own["bank"].data_ptr() == own["slots"][0].data_ptr()
