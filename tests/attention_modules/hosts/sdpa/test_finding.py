"""Which modules are layers, what is known of them, and what is refused by name."""

from __future__ import annotations

import copy
import pickle
import threading
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.data import DataLoader
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from attention_modules import AttentionSwapError, restore_attention, swap_attention
from attention_modules.analysis import attention_maps
from attention_modules.hosts import attention_layers
from attention_modules.hosts.discovery import survey
from attention_modules.hosts.sdpa import trial
from attention_modules.hosts.sdpa.record import known
from lightning_tasks.callbacks import SwapAttention
from tests.attention_modules.hosts.cases import features
from tests.attention_modules.hosts.sdpa.own import (
    Attend,
    Causal,
    DeclaredJoint,
    Grouped,
    Joint,
    MemoryFirst,
    NanoAttention,
    Outer,
    SequenceFirst,
    WithMemory,
)


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(2, (4, -1)).transpose(1, 2)


def helper(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return inner_helper(q, k, v)


def inner_helper(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v)


class Processor:
    """As diffusers has them: no module, called with the layer."""

    def __call__(self, layer: nn.Module, x: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*[_heads(x)] * 3)


class ByAlias(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return sdpa(*[_heads(x)] * 3)


class ByHelper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return helper(*[_heads(x)] * 3)


class ByMethod(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self._attend(x)

    def _attend(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*[_heads(x)] * 3)


class ByProcessor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.processor = Processor()

    def forward(self, x: Tensor) -> Tensor:
        return self.processor(self, x)


class ByPartial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = partial(F.scaled_dot_product_attention, scale=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(*[_heads(x)] * 3)


class ByClosure(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (lambda heads: F.scaled_dot_product_attention(heads, heads, heads))(_heads(x))


KERNELS = {"sdpa": F.scaled_dot_product_attention}


class ByTable(nn.Module):
    """Its code does not name the function."""

    def forward(self, x: Tensor) -> Tensor:
        return KERNELS["sdpa"](*[_heads(x)] * 3)


class InOneLine(nn.Module):
    """As nanoGPT writes it: the dropout's condition stands in the line of the call."""

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*[_heads(x)] * 3, dropout_p=0.1 * 0 if self.training else 0)


class WhereItTrains(nn.Module):
    """The mode that the layer happens to be in is no setting."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return F.scaled_dot_product_attention(*[_heads(x)] * 3, dropout_p=0.0)
        else:
            return F.scaled_dot_product_attention(*[_heads(x)] * 3)


class ByImport(nn.Module):
    """Under another name, where it runs."""

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.functional import scaled_dot_product_attention as attend

        return attend(*[_heads(x)] * 3)


class BySuper(ByMethod):
    """A forward of its own around that of its base."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize(
    "kind",
    [ByAlias, ByHelper, ByMethod, ByProcessor, ByPartial, ByClosure, ByImport, InOneLine, WhereItTrains, BySuper],
)
def test_the_code_names_the_function(kind: type[nn.Module]) -> None:
    model, x = nn.Sequential(kind()), features()
    expected = model(x)
    assert [row.name for row in swap_attention(model, "softmax")] == ["0"]
    assert torch.equal(model(x), expected)
    swap_attention(model, "uniform")
    mean = _heads(x).mean(2, keepdim=True).expand_as(_heads(x))
    torch.testing.assert_close(model(x), mean)
    assert restore_attention(model) == ["0"]
    assert type(model[0]) is kind
    assert torch.equal(model(x), expected)


def test_what_the_code_does_not_name_is_found_by_an_example() -> None:
    model, x = nn.Sequential(ByTable()), features()
    with pytest.raises(AttentionSwapError, match=r"no attention layer of a known host.*example="):
        swap_attention(model, "softmax")
    assert [row.heads for row in swap_attention(model, "uniform", example=x)] == [4]
    torch.testing.assert_close(model(x), _heads(x).mean(2, keepdim=True).expand_as(_heads(x)))
    assert restore_attention(model) == ["0"]


class Example(LightningModule):
    """A module whose layer only its example shows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(ByTable(), nn.Linear(4, 4))
        self.example_input_array = features()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def validation_step(self, batch: Tensor, _: int) -> None:
        self(batch)


def test_the_example_of_a_lightning_module_serves_where_nothing_else_does() -> None:
    assert [row.name for row in swap_attention(Example(), "sink")] == ["net.0"]
    module, swap = Example(), SwapAttention("sink")
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[swap])
    trainer.validate(module, DataLoader(features(), 2), verbose=False)
    assert swap.report is not None
    assert [row.name for row in swap.report] == ["net.0"]


@pytest.mark.parametrize("hooked", ["never", "before", "now"])
def test_a_recorded_pass_changes_nothing(hooked: str) -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), ByTable(), nn.Dropout(0.5)).train()
    if hooked != "never":  # accelerate puts a forward on the objects, and leaves one there
        hooks = pytest.importorskip("accelerate").hooks
        for part in (model, model[0]):
            hooks.add_hook_to_module(part, hooks.ModelHook())
            if hooked == "before":
                hooks.remove_hook_from_module(part)
    calls: list[str] = []
    model[1].register_forward_hook(lambda *_: calls.append("hook"))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    swap_attention(model, "softmax", example=features())
    assert calls == []
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.training
    assert model[1].training


class Remembers(nn.Module):
    """It keeps what it saw, in a tensor that is no buffer and in lists within dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.to_v, self.seen, self.kept, self.count = nn.Linear(16, 16), {"x": [torch.zeros(1)]}, torch.zeros(4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen["x"].append(x)
        self.seen["x"][0].add_(1)
        self.kept.add_(1)
        self.count += 1
        return F.scaled_dot_product_attention(*[_heads(self.to_v(x))] * 3)


@pytest.mark.parametrize("example", [None, features()])
def test_a_trial_leaves_no_trace(example: Tensor | None) -> None:
    layer = Remembers()
    swap_attention(layer, "sink", example=example)
    assert (layer.count, len(layer.seen["x"]), float(layer.seen["x"][0]), float(layer.kept.sum())) == (0, 1, 0, 0)
    layer(features())
    assert (layer.count, len(layer.seen["x"]), float(layer.seen["x"][0]), float(layer.kept.sum())) == (1, 2, 1, 4)


def test_an_example_that_runs_a_layer_twice() -> None:
    for kind in (Joint, DeclaredJoint):
        layer, x = kind(), features()
        model = nn.Sequential(layer, layer)
        expected = model(x)
        (row,) = swap_attention(model, "softmax", example=x)
        assert row.name == "0"
        assert torch.equal(model(x), expected)


class ByLoopedHelper(nn.Module):
    """The loop is not in the function that calls."""

    def __init__(self) -> None:
        super().__init__()
        self.to_v = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = helper(*[_heads(self.to_v(x))] * 3).transpose(1, 2).flatten(2)
        return x


def test_a_trial_counts_the_calls() -> None:
    model = nn.Sequential(ByLoopedHelper())
    with pytest.raises(AttentionSwapError, match="calls scaled_dot_product_attention 2 times"):
        swap_attention(model, "softmax")
    assert type(model[0]) is ByLoopedHelper


@torch.compile(backend="eager")
def compiled_helper(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


class ByCompiledHelper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return compiled_helper(*[_heads(x)] * 3)


def test_the_mechanism_acts_once_in_a_part_that_is_compiled() -> None:
    layers, outs = (ByCompiledHelper(), ByHelper()), []
    for layer in layers:
        swap_attention(layer, "sink", example=features())
        outs.append(layer(features()))
    assert torch.equal(*outs)


class ByAnotherMethod(ByMethod):
    """As DINOv3 is called while it trains."""

    def each(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(*[_heads(x)] * 3)

    def forward_list(self, several: list[Tensor]) -> list[Tensor]:
        return [self._attend(x) for x in several]

    def each_of_list(self, several: list[Tensor]) -> list[Tensor]:
        return [self.each(x) for x in several]


def test_the_mechanism_acts_in_a_method_beside_the_forward() -> None:
    layer, x = ByAnotherMethod(), features()
    expected = layer.forward_list([x])[0]
    swap_attention(layer, "uniform", example=x)
    mean = _heads(x).mean(2, keepdim=True).expand_as(_heads(x))
    for twin in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        for out in (twin(x), *twin.forward_list([x, x])):
            torch.testing.assert_close(out, mean)
    again = torch.utils.checkpoint.checkpoint(layer.forward_list, [x.requires_grad_()], use_reentrant=False)
    torch.testing.assert_close(again[0], mean)
    restore_attention(layer)
    assert torch.equal(layer.forward_list([x])[0], expected)


def test_the_mechanism_acts_once_where_one_method_calls_another() -> None:
    layer, x = ByAnotherMethod(), features()
    swap_attention(layer, "l2", example=x)  # whose own code calls the function with other queries
    torch.testing.assert_close(layer.each_of_list([x])[0], layer(x))


class Checkpointed(Joint):
    """A checkpoint of its own, around the call."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        again = {"use_reentrant": self.reentrant}
        return torch.utils.checkpoint.checkpoint(super().forward, x, **again)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_inside_a_layer_is_an_error_where_it_would_run_again(reentrant: bool) -> None:
    layer, plain, x = Checkpointed(), Joint(), features().requires_grad_()
    plain.load_state_dict(layer.state_dict())
    layer.reentrant = reentrant
    for each in (layer, plain):
        swap_attention(each, "uniform", example=features())
    with torch.no_grad():
        assert torch.equal(layer(x), plain(x))
    with pytest.raises(RuntimeError, match="put the checkpoint around the layer"):
        layer(x)


class Recomputed(torch.autograd.Function):
    """As one writes it whose context is made beside its forward."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)


class InFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        out: Tensor = Recomputed.apply(q, k, v)
        return out.transpose(1, 2).flatten(2)


def test_so_is_a_function_with_a_backward_of_its_own() -> None:
    layer, x = InFunction(), torch.randn(2, 5, 16)
    swap_attention(layer, "uniform", example=x)
    with torch.no_grad():
        layer(x)
    with pytest.raises(RuntimeError, match=r"inside a checkpoint \(or an autograd.Function\)"):
        layer(x)


def test_a_cache_in_an_example_stays_as_it_is() -> None:
    config = LlamaConfig(vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    model, tokens = LlamaForCausalLM(config), torch.arange(3)[None]
    with torch.no_grad():
        cache = model(tokens, past_key_values=DynamicCache()).past_key_values
    swap_attention(model, "sink", example={"input_ids": tokens, "past_key_values": cache})
    assert cache.get_seq_length() == 3


def test_what_a_call_tells() -> None:
    def row(model: nn.Module, **how: Any) -> Any:
        return attention_layers(model) if not how else swap_attention(model, "softmax", **how)

    (layer,) = row(Causal(16, 2))
    assert (layer.spec.dim, layer.spec.num_heads, layer.spec.head_dim, layer.spec.is_causal) == (16, 2, 8, True)
    (layer,) = row(Grouped())
    assert (layer.spec.num_heads, layer.host.groups(layer.module)) == (4, 2)
    (found,) = survey(nn.Sequential(NanoAttention())).layers
    assert found.name == "0"


def test_keys_of_another_sequence_are_cross_attention() -> None:
    model, memory = WithMemory(), features(1)
    with pytest.raises(AttentionSwapError, match="cross-attention only"):
        swap_attention(model, "softmax", example=(features(), memory))
    assert len(swap_attention(model, "sink", where="", example={"x": features(), "memory": memory})) == 1
    assert torch.isfinite(model(features(), memory[:, :3])).all()


class Scaled(Attend):
    """The kernel as a module, with a Parameter of its own, as PatchTST has it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().forward(q * self.scale, k, v)


def test_a_scale_is_no_projection() -> None:
    model = Outer()
    model.attend = Scaled()
    assert [row.heads for row in swap_attention(model, "sink", example=features())] == [4]


def test_heads_that_cannot_be_told_are_asked_for() -> None:
    model, x = nn.Sequential(Outer()), features()
    assert str(swap_attention(model, "sigmoid")).splitlines()[1].split()[-4:-2] == ["?", "?"]
    with pytest.raises(
        ValueError, match=r"number of heads of Attend '0\.attend' cannot be told.*example=.*declare_host"
    ):
        swap_attention(model, "sink")
    restore_attention(model)
    swap_attention(model, "sink", example=x)
    assert len(model[0].attend.mechanism.sink) == 4


@pytest.mark.parametrize("kind", [Joint, Grouped, NanoAttention, Outer])
def test_copies_compile_export_and_checkpoint(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(kind()).eval(), features()
    swap_attention(model, "qk_norm", gain="scalar", example=x)
    expected = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), expected)
        twin.load_state_dict(model.state_dict())
    if torch.__version__ >= (2, 14):  # type: ignore[operator]  # that of 2.9 cannot look into Tensor.unflatten here
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)
    gradients = []
    for again in (False, True):
        model.zero_grad()
        out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False) if again else model(x)
        out.square().sum().backward()
        gradients.append([value.grad.clone() for value in model.parameters() if value.grad is not None])
    assert gradients[0]
    assert all(map(torch.equal, *gradients))
    if kind is not Outer:  # whose own code torch.fx cannot trace
        assert torch.equal(torch.fx.symbolic_trace(model)(x), expected)


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(*[_heads(x)] * 3)
        return F.scaled_dot_product_attention(y, y, y)


class Looped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = _heads(x)
        for _ in range(2):
            y = F.scaled_dot_product_attention(y, y, y)
        return y


class Listed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.scaled_dot_product_attention(y, y, y) for y in _heads(x).chunk(2, 1)], 1)


class Conditional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 3:
            return F.scaled_dot_product_attention(*[_heads(x)] * 3)
        return _heads(x)


class Handwritten(nn.Module):
    """An attention that writes its softmax itself."""

    def forward(self, x: Tensor) -> Tensor:
        q = _heads(x)
        return torch.softmax(q @ q.mT, -1) @ q


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q


class FlashAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return flash_attn_func(x, x, x)


class HandwrittenAttention(Handwritten):
    """By its name too."""


class BySoftmaxModule(nn.Module):
    """As vit_pytorch has it."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q = _heads(x)
        return self.attend(q @ q.mT) @ q


class AroundAttention(nn.Module):
    """A part of it says why."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = Handwritten()

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(x)


class LocalFlash(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        from flash_attn import flash_attn_func as attend

        return attend(x, x, x)


compiled_flex = torch.compile(flex_attention)


class CompiledFlex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return compiled_flex(x, x, x)


class Program(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scripted(*[_heads(x)] * 3)


@torch.jit.script
def scripted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Twice, r"several times \(.*test_finding.py:\d+, .*test_finding.py:\d+\).*example="),
        (Looped, r"several times \(.*test_finding.py:\d+\)"),
        (Listed, r"several times \(.*test_finding.py:\d+\)"),
        (partial(NanoAttention, flash=False), r"a setting of its own keeps its forward from .*own.py:\d+"),
        (FlashAttention, "calls .*flash_attn_func, a kernel with no place"),
        (LocalFlash, "calls flash_attn_func, a kernel with no place"),
        (CompiledFlex, "calls .*flex_attention, a kernel with no place"),
        (Program, r"calls scripted, a program of torch.jit.script"),
        (Handwritten, r"writes its softmax itself \(.*test_finding.py:\d+\)"),
        (BySoftmaxModule, r"\(BySoftmaxModule\): it writes its softmax itself \(.*test_finding.py:\d+\)"),
        (AroundAttention, r"'0\.kernel' \(Handwritten\): it writes its softmax itself"),
        (HandwrittenAttention, r"writes its softmax itself \(.*test_finding.py:\d+\).*\n +out = F.scaled_dot_product"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(kind: Any, text: str) -> None:
    model = nn.Sequential(kind())
    classes = [type(module) for module in model.modules()]
    with pytest.raises(AttentionSwapError, match=text):
        swap_attention(model, "softmax")
    assert [type(module) for module in model.modules()] == classes


def test_a_reason_is_given_once() -> None:
    with pytest.raises(AttentionSwapError, match=r"'0', '1' \(Handwritten\): it writes") as refusal:
        swap_attention(nn.Sequential(Handwritten(), Handwritten()), "softmax")
    assert str(refusal.value).count("it writes its softmax itself") == 1


@pytest.mark.parametrize("kind", [Twice, Looped])
def test_an_example_counts_the_calls(kind: type[nn.Module]) -> None:
    with pytest.raises(AttentionSwapError, match="calls scaled_dot_product_attention 2 times"):
        swap_attention(nn.Sequential(kind()), "softmax", example=features())


def test_a_forward_that_does_not_get_there_is_an_error() -> None:
    model = nn.Sequential(Conditional())
    swap_attention(model, "softmax")
    model(features())
    with pytest.raises(RuntimeError, match="called scaled_dot_product_attention 0 times"):
        model(features()[:, :2])


@pytest.mark.parametrize("example", [torch.ones(2, 3), (features(), features()), {"y": features()}, "text"])
def test_an_example_that_does_not_run(example: Any) -> None:
    model = nn.Sequential(Joint())
    with pytest.raises(AttentionSwapError, match="the example does not run: Sequential raised"):
        swap_attention(model, "softmax", example=example)
    assert type(model[0]) is Joint


def test_maps_of_layers_that_only_a_pass_shows() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(NanoAttention(), Outer(), ByTable()), features()
    maps = attention_maps(model, x)
    assert list(maps) == ["0", "1.attend", "2"]
    q, k, _ = (_heads(part) for part in model[0].c_attn(x).chunk(3, 2))
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    torch.testing.assert_close(maps["0"], (q @ k.mT / 2).masked_fill(hidden, -torch.inf).softmax(-1))
    assert [type(part) for part in model] == [NanoAttention, Outer, ByTable]
    swap_attention(model, "sink", example=x)
    assert all((rows.sum(-1) < 1).all() for rows in attention_maps(model, x).values())
    with pytest.raises(AttentionSwapError, match="not given the tokens"):
        swap_attention(model, "gated", where="1.attend", example=x)


def test_a_cache_is_no_query_for_each_key() -> None:
    model = nn.Sequential(Attend())
    swap_attention(model, "twicing", where="0")
    q, k = torch.randn(1, 4, 1, 4), torch.randn(1, 4, 5, 4)
    with pytest.raises(NotImplementedError, match="1 queries and 5 keys"):
        model[0](q, k, k)


@pytest.mark.parametrize(
    ("shape", "masks"),
    [
        ((2, 6, 8), [(6, 6), (2, 6, 6), (1, 6, 6)]),
        ((4, 4, 6, 8), [(6, 6), (1, 6), (4, 6, 6), (4, 4, 6, 6), (4, 1, 1, 6)]),  # as many samples as heads
        ((3, 2, 4, 6, 8), [(6, 6), (4, 6, 6), (2, 4, 6, 6), (3, 1, 4, 6, 6)]),
    ],
)
def test_any_number_of_dimensions(shape: tuple[int, ...], masks: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, *shape)
    plain, layer = ByTensors(), ByTensors()
    swap_attention(layer, "ssmax", start=1.0, example=(q, k, v))
    for mask in [None, *(torch.rand(each) > 0.4 for each in masks), *(torch.randn(each) for each in masks)]:
        if mask is not None and mask.dtype == torch.bool:
            mask[..., 0] = True
        boolean = torch.ones(6) if mask is None or mask.dtype != torch.bool else mask
        seen = boolean.expand(*shape[:-2], 6, 6).sum(-1)  # keys of each row
        torch.testing.assert_close(layer(q, k, v, mask), plain(q * seen.log().unsqueeze(-1), k, v, mask))


@pytest.mark.parametrize("batch", [2, 6])  # of 6 tokens
def test_a_sequence_first_layer_gives_its_own_tokens(batch: int) -> None:
    torch.manual_seed(0)
    layer, joint, x = SequenceFirst(), Joint(), torch.randn(6, batch, 16)
    joint.load_state_dict(layer.state_dict())
    swap_attention(layer, "gated", example=x)
    swap_attention(joint, "gated")
    joint.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), joint(x.transpose(0, 1)).transpose(0, 1))


@pytest.mark.parametrize("by_name", [False, True])
def test_what_the_queries_are_made_of_is_told_by_its_place(by_name: bool) -> None:
    torch.manual_seed(0)
    layer, other, x, memory = MemoryFirst(), WithMemory(), torch.randn(2, 6, 16), torch.randn(2, 6, 16)
    swap_attention(layer, "gated", where="", example=(memory, x))
    swap_attention(other, "gated", where="", example=(x, memory))
    other.load_state_dict(layer.state_dict())
    out = layer(x=x, memory=memory) if by_name else layer(memory, x)
    torch.testing.assert_close(out, other(x, memory))
    torch.testing.assert_close(layer(memory, x=x), out)


def test_threads_know_of_their_own_models_alone() -> None:
    inside, done = threading.Event(), threading.Event()

    class Slow(ByTable):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            assert done.wait(20)
            return super().forward(x)

    slow, found = nn.Sequential(Slow()), []
    thread = threading.Thread(target=lambda: found.append(swap_attention(slow, "softmax", example=features())))
    thread.start()
    assert inside.wait(20)
    with pytest.raises(AttentionSwapError, match="no attention layer"):
        swap_attention(nn.Sequential(ByTable()), "softmax")
    done.set()
    thread.join()
    assert len(found[0]) == 1
    assert known().calls == {}


def test_a_layer_is_tried_once_in_a_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[nn.Module] = []
    once = trial._all
    monkeypatch.setattr(trial, "_all", lambda layer, widths: (tried.append(layer), once(layer, widths))[1])
    model = nn.Sequential(Joint(), Joint())
    swap_attention(model, "sink")
    assert tried == list(model)


class ByTensors(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_survey_under_any_mode_tells_the_same(context: Any) -> None:
    model = nn.Sequential(Causal(), WithMemory(), NanoAttention())
    with context():
        found = attention_layers(model, exclude="1")
    assert [(layer.name, layer.spec.is_causal) for layer in found] == [("0", True), ("2", True)]
