"""Values of one layer that others read: the right ones, or an error."""

from __future__ import annotations

import copy
import pickle
import random
import threading
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from attention_modules import (
    AttentionMechanism,
    AttentionSwapError,
    SelfAttention,
    connect_layers,
    restore_attention,
    swap_attention,
)
from attention_modules.hosts.layer_call import LayerCall
from attention_modules.sharing import Link, SharedValueError, SharedValues, stacks

needs_frames = pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"), reason="PyTorch before 2.8"
)


class Mixed(AttentionMechanism):
    """Softmax attention over values of this layer, the first and the one before."""

    needs = ("first_value", "previous_value")

    def forward(
        self,
        q,
        k,
        v,
        attn_mask=None,
        is_causal=False,
        dropout_p=0.0,
        scale=None,
        *,
        first_value: Tensor | None = None,
        previous_value: Tensor | None = None,
    ):
        assert (first_value is None) == (previous_value is None)
        if first_value is not None and previous_value is not None:
            v = v + 0.5 * first_value + 0.25 * previous_value
        return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attn = SelfAttention(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


class Stack(nn.Module):
    """Four blocks; each may be computed again during backward."""

    def __init__(self, again: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.again = again

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        for block in self.blocks[start:]:
            x = block(x) if self.again is None else checkpoint(block, x, use_reentrant=self.again)
        return x


def stack(again: bool | None = None) -> Stack:
    torch.manual_seed(0)
    model = Stack(again)
    swap_attention(model, Mixed)
    return model


def expected(model: Stack, x: Tensor) -> Tensor:
    """What the stack gives, written out."""
    values: list[Tensor] = []
    for block in model.blocks:
        q, k, v = block.attn.qkv(block.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = v + 0.5 * values[0] + 0.25 * values[-1] if values else v
        values.append(v)
        x = x + block.attn.proj(F.scaled_dot_product_attention(q, k, mixed).transpose(1, 2).flatten(2))
    return x


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def assert_same(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, gradient in wanted.items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-6, rtol=1e-5)


@pytest.fixture
def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 5, 16, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("again", [None, pytest.param(False, marks=needs_frames)], ids=["plain", "checkpointed"])
def test_two_passes_in_one_step_and_their_gradients(batches, again):
    model = stack(again)
    wanted = gradients(model, sum((i + 1) * expected(model, x).square().sum() for i, x in enumerate(batches)))
    one, two = (model(x) for x in batches)
    torch.testing.assert_close(two, expected(model, batches[1]))
    assert_same(gradients(model, one.square().sum() + 2 * two.square().sum()), wanted)


@needs_frames
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_each_backward_computes_its_own_pass_again(batches, order):
    model = stack(again=False)
    outputs = [model(x) for x in batches]
    for index in order:
        wanted = gradients(model, expected(model, batches[index]).square().sum())
        assert_same(gradients(model, outputs[index].square().sum()), wanted)


def test_a_checkpoint_around_the_whole_stack(batches):
    model = stack()
    out = checkpoint(model, batches[0], use_reentrant=False)
    model(batches[1])
    assert_same(gradients(model, out.sum()), gradients(model, expected(model, batches[0]).sum()))


def test_what_reentrant_checkpointing_computes_again_is_an_error(batches):
    model = stack(again=True)
    out = model(batches[0].requires_grad_())
    with pytest.raises(SharedValueError, match=r"blocks\.3\.attn.*again during backward.*use_reentrant=False"):
        out.sum().backward()


def test_values_that_reentrant_checkpointing_gave_without_a_gradient_are_an_error(batches):
    class First(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.blocks[0], x, use_reentrant=True)
            for block in self.blocks[1:]:
                x = block(x)
            return x

    model = First()
    swap_attention(model, Mixed)
    out = model(batches[0].requires_grad_())
    with pytest.raises(SharedValueError, match=r"blocks\.0\.attn.*again during backward.*use_reentrant=False"):
        out.sum().backward()


@needs_frames
def test_a_checkpoint_inside_another_is_an_error_that_says_so(batches):
    class Nested(Stack):
        def forward(self, x: Tensor) -> Tensor:
            def rest(x: Tensor) -> Tensor:
                for block in self.blocks[1:]:
                    x = checkpoint(block, x, use_reentrant=False)
                return x

            return checkpoint(rest, self.blocks[0](x), use_reentrant=False)

    model = Nested()
    swap_attention(model, Mixed)
    out = model(batches[0])
    with pytest.raises(SharedValueError, match=r"one checkpoint lies inside another.*either the blocks or what holds"):
        out.sum().backward()


def test_a_part_of_the_model_is_an_error_and_never_reads_what_was_before(batches):
    model = stack()
    model(batches[0])
    with pytest.raises(SharedValueError, match=r"'blocks\.2\.attn'.*call the model itself"):
        model.blocks[2](batches[1])
    with pytest.raises(SharedValueError, match=r"'blocks\.0\.attn', which has not run in this forward pass"):
        model(batches[1], start=2)
    torch.testing.assert_close(model(batches[1]), expected(model, batches[1]))  # errors leave no pass open


@pytest.mark.parametrize("mechanism", ["value_residual", "neutreno", "elliptical", Mixed])
def test_a_copy_of_a_layer_is_an_error_that_says_so(batches, mechanism):
    model = Stack()
    swap_attention(model, mechanism)
    model.blocks.insert(2, copy.deepcopy(model.blocks[1]))
    with pytest.raises(SharedValueError, match="layers were copied, replaced or moved since, restore the model"):
        model(batches[0])


def test_an_outer_call_lends_its_values_to_no_part(batches):
    """As under DDP, whose forward is a LightningModule's training_step."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Stack()

        def forward(self, x: Tensor) -> Tensor:
            self.net(x)
            return self.net.blocks[1](x)

    model = Outer()
    swap_attention(model, Mixed)
    with pytest.raises(SharedValueError, match="has not run in this forward pass"):
        model(batches[0])


@pytest.mark.parametrize("again", [None, pytest.param(False, marks=needs_frames)], ids=["plain", "checkpointed"])
@pytest.mark.parametrize(
    ("order", "refusal"),
    [
        ("x0 x1 x2 x3 y0 y1 y2 y3", None),
        ("x0 y0 x1 y1 x2 y2 x3 y3", r"'blocks\.0\.attn' runs a second time .* before 'blocks\.1\.attn' has read"),
        ("x0 x1 y0 y1 x2 x3 y2 y3", r"'blocks\.0\.attn' runs a second time .* before 'blocks\.2\.attn' has read"),
        ("x0 x1 x2 x3 y1 y2 y3", r"'blocks\.1\.attn' runs a second time .* what 'blocks\.0\.attn' gave"),
        ("x0 x1 x1 x2 x3", r"'blocks\.1\.attn' runs a second time .* what 'blocks\.0\.attn' gave"),
    ],
)
def test_two_inputs_in_one_pass_are_kept_apart_or_are_an_error(batches, order, refusal, again):
    class Both(Stack):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            streams = {"x": x, "y": y}
            for stream, index in order.split():
                block, value = self.blocks[int(index)], streams[stream]
                streams[stream] = block(value) if again is None else checkpoint(block, value, use_reentrant=False)
            return streams["x"], streams["y"]

    model = Both()
    swap_attention(model, Mixed)
    if refusal is not None:
        with pytest.raises(SharedValueError, match=refusal + ".*be called for each input in turn"):
            model(*batches)
        return
    loss = sum((i + 1) * out.square().sum() for i, out in enumerate(model(*batches)))
    wanted = sum((i + 1) * expected(model, x).square().sum() for i, x in enumerate(batches))
    assert_same(gradients(model, loss), gradients(model, wanted))


def test_what_an_interrupted_pass_gave_is_read_by_none(batches):
    """KeyboardInterrupt ends a forward without its hooks."""
    model = stack()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.blocks[3].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(batches[0])
    handle.remove()
    with pytest.raises(SharedValueError, match=r"'blocks\.2\.attn'.*call the model itself"):
        model.blocks[2](batches[1])
    torch.testing.assert_close(model(batches[1]), expected(model, batches[1]))


@pytest.mark.parametrize("part", ["whole", "blocks"])
def test_compiled(batches, part):
    model = stack()
    wanted = [expected(model, x) for x in batches]
    torch.compiler.reset()
    if part == "whole":
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    else:
        compiled = model
        for block in model.blocks:
            block.compile(backend="aot_eager")
    for x, out in zip(batches, wanted, strict=True):
        found = compiled(x)
        torch.testing.assert_close(compiled(x), found)
        torch.testing.assert_close(found, out)
        assert_same(gradients(model, found.sum()), gradients(model, out.sum()))
    torch.compiler.reset()


@needs_frames
def test_blocks_compiled_one_by_one_that_are_computed_again_are_an_error_that_says_so(batches):
    model = stack(again=False)
    torch.compiler.reset()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    out = model(batches[0])
    with pytest.raises(SharedValueError, match=r"'blocks\.3\.attn'.*compile the model as a whole, or checkpoint"):
        out.sum().backward()
    torch.compiler.reset()


def test_a_layer_of_another_precision_is_read_in_that_of_the_reader(batches):
    model = Stack()
    swap_attention(model, "value_residual")
    exact = model(batches[0])
    plain = model.blocks[0].forward
    model.blocks[0].forward = torch.autocast("cpu", enabled=False)(plain)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(batches[0]), exact, atol=0.05, rtol=0.05, check_dtype=False)


def test_a_value_comes_in_the_readers_precision_and_on_its_device():
    shared = SharedValues(["0", "1"], {0: [1]})
    shared.begin(nn.Module(), ())
    Link(shared, 0).exchange((), torch.ones(1, 2, 3, 4))
    v = torch.ones(1, 2, 3, 4, device="meta", dtype=torch.bfloat16)
    found = Link(shared, 1).exchange(("first_value",), v)["first_value"]
    assert (found.device, found.dtype) == (v.device, v.dtype)


def test_copies_and_pickles_share_among_themselves(batches):
    model = stack()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(batches[0]), model(batches[0]), atol=0, rtol=0)
        shared = {id(block.attn.link.shared) for block in other.blocks}
        assert len(shared) == 1
        assert shared != {id(model.blocks[0].attn.link.shared)}


def test_two_threads_are_an_error(batches):
    model, failures = stack(), []
    started, go_on = threading.Event(), threading.Event()

    def wait(module: nn.Module, args: object, output: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            started.set()
            go_on.wait(10)

    model.blocks[1].register_forward_hook(wait)

    def run() -> None:
        try:
            model(batches[0])
        except SharedValueError as error:
            failures.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    started.wait(10)
    model.forward = lambda x: (go_on.set(), thread.join())  # the other thread goes on inside this pass
    model(batches[1])
    assert "two threads" in failures[0]


def test_restoring_leaves_nothing_behind(batches):
    model = Stack()
    plain = model(batches[0])
    swap_attention(model, Mixed)
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    assert [type(hook.__self__) for hook in hooks] == [SharedValues]
    restore_attention(model)
    assert torch.equal(model(batches[0]), plain)
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert not module._forward_hooks_always_called
        assert "link" not in vars(module)


def test_another_mechanism_in_one_layer_keeps_the_others_reading(batches):
    model = stack()
    swap_attention(model, "softmax", layers=[3])
    swap_attention(model, Mixed, layers=[3])
    torch.testing.assert_close(model(batches[0]), expected(model, batches[0]))


def test_layers_that_cannot_read_are_refused():
    with pytest.raises(AttentionSwapError, match=r"'blocks\.0\.attn'.*first of its stack, 'blocks\.\*\.attn'"):
        swap_attention(Stack(), Mixed, layers=[0])
    numbered = nn.Sequential(OrderedDict((f"block{index}", Block()) for index in range(2)))
    with pytest.raises(AttentionSwapError, match=r"'block0\.attn'.*only one of its stack.* in an nn\.ModuleList"):
        swap_attention(numbered, Mixed)
    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16), 3, enable_nested_tensor=False)
    with pytest.raises(AttentionSwapError, match=r"'layers\.2\.self_attn'.*'layers\.0\.self_attn', which nothing"):
        swap_attention(plain, Mixed, layers=[2])
    assert type(plain.layers[2].self_attn) is nn.MultiheadAttention
    skipping = Stack()
    skipping.layerdrop = 0.1
    with pytest.warns(UserWarning, match=r"training leaves layers out at random \(layerdrop=0\.1\)"):
        swap_attention(skipping, Mixed)
    uneven = nn.ModuleList([SelfAttention(16, 2), SelfAttention(16, 4)])
    with pytest.raises(AttentionSwapError, match="4 heads of width 4, the other 2 heads of width 8"):
        swap_attention(uneven, Mixed)


def test_a_layer_without_a_stack_is_left_out_as_the_refusal_says():
    """Lists in series around one block, as in U-ViT: each list is a stack."""

    def build() -> nn.Sequential:
        parts = ("in_blocks", nn.Sequential(Block(), Block())), ("mid_block", Block()), ("out_blocks", Stack())
        return nn.Sequential(OrderedDict(parts))

    with pytest.raises(AttentionSwapError, match=r"only one of its stack.*leave it out by exclude='mid_block\.attn'"):
        swap_attention(build(), Mixed)
    model = build()
    swap_attention(model, Mixed, exclude="mid_block.attn")
    assert [model.in_blocks[1].attn.link.shared.names[0], model.out_blocks.blocks[1].attn.link.shared.names[0]] == [
        "in_blocks.0.attn",
        "out_blocks.blocks.0.attn",
    ]
    assert not hasattr(model.mid_block.attn, "link") or model.mid_block.attn.link is None


def test_encoder_and_decoder_are_two_stacks():
    model = nn.Transformer(16, 2, 2, 2, 16, batch_first=True).eval()
    swap_attention(model, Mixed)
    names = [model.encoder.layers[1].self_attn.link, model.decoder.layers[1].self_attn.link]
    assert [link.shared.names for link in names] == [
        [f"{part}.layers.{index}.self_attn" for index in range(2)] for part in ("encoder", "decoder")
    ]
    assert model(torch.randn(1, 3, 16), torch.randn(1, 3, 16)).isfinite().all()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("blocks.0.attn blocks.2.attn head.attn", {"blocks.*.attn": [0, 1], "head.attn": [2]}),
        ("block.0.layer.0.attn block.1.layer.0.attn", {"block.*.layer.0.attn": [0, 1]}),  # as T5's
        ("s.0.b.0.attn s.0.b.1.attn s.1.b.0.attn", {"s.0.b.*.attn": [0, 1], "s.1.b.*.attn": [2]}),
        ("0.layers.0 0.layers.1 2.layers.0 2.layers.1", {"0.layers.*": [0, 1], "2.layers.*": [2, 3]}),
        ("block0.attn block1.attn", {"block0.attn": [0], "block1.attn": [1]}),
        ("b.0.attn b.1._checkpoint_wrapped_module.attn b.2.attn", {"b.*.attn": [0, 1, 2]}),
        (
            "b.0.attns.0 b.0.attns.1 b.1.attns.0 b.1.attns.1",  # as timm's parallel attentions
            {"b.*.attns.0": [0, 2], "b.*.attns.1": [1, 3]},
        ),
    ],
)
def test_names_of_a_stack_differ_in_one_number(names, expected):
    names = names.split()
    assert stacks(names) == {stack: [names[at] for at in members] for stack, members in expected.items()}


@pytest.mark.parametrize("way", ["whole", "parts", "parts, then connected"])
def test_networks_of_one_model_share_nothing(batches, way):
    """An ensemble's members, or networks one after the other, each as if it were swapped alone."""

    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.members = nn.ModuleList(Stack() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.members[1](self.members[0](x))

    model = Ensemble()
    for part in [model] if way == "whole" else model.members:
        swap_attention(part, Mixed)
    if way == "parts, then connected":
        connect_layers(model)
    wanted = expected(model.members[1], expected(model.members[0], batches[0]))
    torch.testing.assert_close(model(batches[0]), wanted)


def test_a_model_of_our_own_layers_is_connected_by_hand(batches):
    class Own(Stack):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.attn = SelfAttention(16, 2, Mixed)

    model = Own()
    with pytest.raises(SharedValueError, match=r"connect_layers\(model\)"):
        model(batches[0])
    connect_layers(model)
    torch.testing.assert_close(model(batches[0]), expected(model, batches[0]))


def test_a_wrong_name_of_a_need_is_an_error():
    with pytest.raises(TypeError, match=r"needs must be a tuple of x, first_value, previous_value, got \('y',\)"):
        type("Wrong", (AttentionMechanism,), {"needs": ("y",)})


def test_a_function_reads_what_its_parameters_name(batches):
    def mixed(q, k, v, *, first_value, previous_value, amount=0.5, **options):
        if first_value is not None:
            v = v + amount * first_value + 0.25 * previous_value
        return F.scaled_dot_product_attention(q, k, v, **options)

    model = stack()
    swap_attention(model, mixed, amount=0.5)
    torch.testing.assert_close(model(batches[0]), expected(model, batches[0]))
    with pytest.raises(TypeError, match=r"first_value is no option, as the layer gives it"):
        swap_attention(Stack(), mixed, first_value=None)


def test_a_layers_call_alone_holds_the_values_that_it_read(batches):
    """As LipschitzMonitor and `attnswap analyze` call layers."""
    model, calls, outputs, hooks = stack(), {}, {}, []
    for index, block in enumerate(model.blocks):

        def keep(module, args, kwargs, out, index=index):
            calls[index], outputs[index] = LayerCall.of(module, args, kwargs, num_samples=1), out

        hooks.append(block.attn.register_forward_hook(keep, with_kwargs=True))
    model(batches[0])
    for hook in hooks:
        hook.remove()
    for index, call in calls.items():
        torch.testing.assert_close(call(call.x), outputs[index][:1])
    assert not model.blocks[1].attn.link.shared.passes
    assert torch.autograd.functional.jacobian(calls[3], calls[3].x).isfinite().all()


@pytest.mark.parametrize("name", ["value_residual", "neutreno"])
def test_timms_features_are_those_of_a_whole_pass(name):
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, features_only=True, out_indices=[0, 2])
    swap_attention(model, name)
    assert [tuple(each.shape) for each in model(torch.randn(1, 3, 32, 32))] == [(1, 192, 2, 2)] * 2


class Picks(nn.Module):
    """A block that attends in training for a part of its samples, or of its tokens, that it draws; or backwards."""

    def __init__(self, way):
        super().__init__()
        self.attn, self.way = SelfAttention(16, 2), way

    def forward(self, x):
        if not self.training or self.way == "not at all":
            return x + self.attn(x)
        if self.way == "backwards":
            return x + self.attn(x.flip(1)).flip(1)
        if self.way == "in an order":
            drawn = torch.randperm(len(x))
            return x.index_add(0, drawn, self.attn(x[drawn]))
        if self.way == "backwards at times":
            return x + (self.attn(x.flip(1)).flip(1) if random.random() < 0.5 else self.attn(x))
        if self.way == "with dropout":
            return x + self.attn(nn.functional.dropout(x, 0.5))
        dim = 0 if self.way == "samples" else 1
        drawn = torch.randperm(x.shape[dim])[: max(1, x.shape[dim] // 2)]
        return x.index_add(dim, drawn, self.attn(x.index_select(dim, drawn)))


@pytest.mark.parametrize("mechanism", ["value_residual", "neutreno", "elliptical"])
@pytest.mark.parametrize(
    "way", ["samples", "tokens", "backwards", "in an order", "backwards at times", "with dropout", "not at all"]
)
def test_a_block_that_picks_or_moves_in_training_alone_is_refused(way, mechanism):
    """As of DINOv2's stochastic depth, and random layerwise token dropping."""
    model = nn.Sequential(*(Picks(way) for _ in range(3))).train()
    state = torch.get_rng_state()
    if way in ("with dropout", "not at all"):
        swap_attention(model, mechanism)
        assert torch.equal(torch.get_rng_state(), state)
        return
    with pytest.raises(AttentionSwapError, match="gives its layer other samples or tokens in training"):
        swap_attention(model, mechanism)
    assert torch.equal(torch.get_rng_state(), state)
    swap_attention(model, "softmax")


def test_a_trial_in_training_seeds_no_device_and_ends_where_nothing_is_drawn(monkeypatch):
    seeded, tried = [], []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    forward = Picks.forward
    monkeypatch.setattr(Picks, "forward", lambda self, x: tried.append(self.training) or forward(self, x))
    swap_attention(nn.Sequential(*(Picks("not at all") for _ in range(3))), "value_residual")
    assert not seeded
    assert tried.count(True) == 3
