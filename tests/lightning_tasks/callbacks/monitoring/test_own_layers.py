"""Monitors and penalties of layers of one's own: which argument holds the tokens, and how it lies, the layer tells."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import attnswap
from attention_modules.analysis import layer_lipschitz_bound, swap_drift, token_similarity
from attention_modules.hosts import attention_layers
from attention_modules.hosts.layer_call import LayerCall
from attnswap.callbacks import AttentionMonitor, Heal, QKClip, SwapAttention

C, N = 16, 6


class Attention(nn.Module):
    """One projection each, the heads where ``split`` puts them, positions on queries and keys."""

    def __init__(self, heads=4):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (nn.Linear(C, C) for _ in range(4))
        self.heads = heads

    def split(self, x):
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def merge(self, x):
        return x.transpose(1, 2).flatten(2)

    def forward(self, x, pos=None, mask=None, keep=None, lengths=None):
        at = x if pos is None else x + pos
        if keep is not None:
            mask = keep[:, None, None]
        if lengths is not None:
            mask = (torch.arange(x.shape[1]) < lengths[:, None])[:, None, None]
        q, k, v = self.split(self.q(at)), self.split(self.k(at)), self.split(self.v(x))
        return self.out(self.merge(F.scaled_dot_product_attention(q, k, v, mask)))


class OneHead(Attention):
    """Queries ``[B, N, d]``, as tutorials have them."""

    def split(self, x):
        return x

    merge = split


class PositionsFirst(Attention):
    def forward(self, pos, x):
        return super().forward(x, pos)


class SequenceFirst(Attention):
    """``[N, B, C]``."""

    def split(self, x):
        return x.unflatten(2, (self.heads, -1)).permute(1, 2, 0, 3)

    def merge(self, x):
        return x.permute(2, 0, 1, 3).flatten(2)

    def forward(self, x, mask=None):
        return super().forward(x, mask=mask)


class Layers(nn.ModuleList):
    """Called as a function says."""

    def forward(self, x, call):
        for layer in self:
            x = call(layer, x)
        return x


class Task(pl.LightningModule):
    """Two layers."""

    def __init__(self, kind, call=lambda layer, x: layer(x), **options):
        super().__init__()
        self.body = Layers(kind(**options) for _ in range(2))
        self.call = call

    def forward(self, x):
        return self.body(x, self.call)

    def training_step(self, batch, _):
        return self(batch[0]).square().mean()

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fitted(task, x, *callbacks):
    """The figures of one step."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = pl.Trainer(max_steps=1, callbacks=[*callbacks], enable_checkpointing=False, **quiet)
    trainer.fit(task, DataLoader(TensorDataset(x), len(x)))
    return trainer.callback_metrics


def padded(batch):
    """Samples, of which the first ends early, and which tokens count."""
    keep = torch.ones(batch, N, dtype=torch.bool)
    keep[0, N - 2 :] = False
    return torch.randn(batch, N, C), keep


@pytest.mark.parametrize("swapped", [False, True])
def test_a_layer_of_one_head_is_clipped_as_with_a_dimension_of_heads(swapped):
    class One(OneHead):
        pass

    class Same(Attention):
        pass

    found = []
    for kind in (One, Same):
        attnswap.declare_host(kind, q="q", k="k", v="v", heads="heads")
        task = Task(kind, heads=1)
        if swapped:
            attnswap.swap_attention(task, "sink")
        fitted(task, 9 * torch.randn(2, N, C, generator=torch.Generator().manual_seed(1)), QKClip(tau=1.0))
        found.append([layer.q.weight.detach() for layer in task.body])
    assert not torch.equal(found[0][0], Attention().q.weight)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("batch", [3, N])
def test_drift_of_a_sequence_first_layer_leaves_padding_out(batch):
    x, keep = padded(batch)
    mask = keep[:, None, None]
    plain = Task(Attention, lambda layer, x: layer(x, mask=mask))
    turned = Task(SequenceFirst, lambda layer, x: layer(x.transpose(0, 1), mask).transpose(0, 1))
    first, second = (swap_drift(each, "sink", [x]) for each in (plain, turned))
    assert [row.relative_error for row in first.layers] == pytest.approx(
        [row.relative_error for row in second.layers], rel=1e-4
    )


def test_layers_of_a_teacher_that_are_sequence_first_are_told_their_tokens():
    x, keep = padded(3)
    mask = keep[:, None, None]
    plain = Task(Attention, lambda layer, x: layer(x, mask=mask))
    turned = Task(SequenceFirst, lambda layer, x: layer(x.transpose(0, 1), mask).transpose(0, 1))
    found = [
        fitted(task, x, SwapAttention("sink"), Heal([{"match": "layers"}]))["heal/loss"] for task in (plain, turned)
    ]
    torch.testing.assert_close(*found)


class NeedsLengths(SequenceFirst):
    """It does not run alone."""

    def forward(self, x, lengths):
        return super().forward(x, (torch.arange(len(x)) < lengths[:, None])[:, None, None])


def test_a_teacher_whose_layers_do_not_run_alone_takes_their_layout_from_the_student():
    x, keep = padded(N)
    plain = Task(Attention, lambda layer, x: layer(x, mask=keep[:, None, None]))
    turned = Task(NeedsLengths, lambda layer, x: layer(x.transpose(0, 1), keep.sum(1)).transpose(0, 1))
    found = []
    for task in (plain, turned):
        task.example_input_array = x
        found.append(fitted(task, x, SwapAttention("sink"), Heal([{"match": "layers"}]))["heal/loss"])
    assert found[1] < 2 * found[0]  # where padding may count, as the plain layer does not tell it


def test_slopes_of_heads_are_no_lengths():
    class Sloped(Attention):
        def forward(self, x, slopes):
            return super().forward(x, mask=slopes[:, None, None] * torch.arange(x.shape[1]))

    x, layer, slopes = torch.randn(4, N, C), Sloped(), torch.rand(4)
    call = LayerCall.of(layer, (x, slopes), {}, num_samples=1)
    torch.testing.assert_close(call(call.x), layer(x, slopes)[:1])


class Both(Attention):
    def forward(self, x, bias, given):
        if given.dim() == 1:
            given = torch.arange(x.shape[1]) < given[:, None]
        return super().forward(x, mask=bias.masked_fill(~given[:, None, None], float("-inf")))


@pytest.mark.parametrize("heads", [False, True], ids=["one map", "one for each head"])
@pytest.mark.parametrize("given", ["keep", "lengths"])
def test_each_argument_is_cut_as_it_lies_whatever_sizes_agree(given, heads):
    x, keep = padded(4 if heads else N)
    bias = torch.randn(4, N, N) if heads else torch.randn(N, N)
    args = (x, bias, keep if given == "keep" else keep.sum(1))
    call = LayerCall.of(layer := Both(), args, {}, num_samples=1)
    torch.testing.assert_close(call(call.x), layer(*args)[:1])
    one = call.part(0, torch.arange(3))
    args = (x[:1, :3], bias[..., :3, :3], keep[:1, :3] if given == "keep" else keep.sum(1)[:1])
    torch.testing.assert_close(one(one.x), layer(*args))


def test_temperatures_of_samples_are_cut_with_them():
    class Tempered(Attention):
        def forward(self, x, temperature):
            return super().forward(x * temperature[:, None, None])

    x, layer, temperature = torch.randn(3, N, C), Tempered(), torch.rand(3)
    call = LayerCall.of(layer, (x, temperature), {}, num_samples=2)
    torch.testing.assert_close(call(call.x), layer(x, temperature)[:2])


def test_a_layer_that_mixes_samples_is_no_function_of_one():
    class Mixing(Attention):
        def forward(self, x, keep):
            return super().forward(x + x.mean(0), keep=keep)

    x, keep = padded(3)
    with pytest.raises(ValueError, match="not give of 1 of 3 samples what it gives of all"):
        LayerCall.of(Mixing(), (x, keep), {}, num_samples=1)


def test_whatever_a_layer_raises_where_samples_are_as_many_as_tokens_tells_how_its_mask_lies():
    class Strict(Attention):
        def forward(self, x, keep):
            assert keep.shape == x.shape[:2]
            assert len(x) > 1
            return super().forward(x, keep=keep)

    x, keep = padded(N)
    call = LayerCall.of(layer := Strict(), (x, keep), {}, num_samples=2)
    torch.testing.assert_close(call(call.x), layer(x, keep)[:2])


CALLS = {
    "in order": (Attention, lambda layer, x, pos: layer(x, pos)),
    "by keywords": (Attention, lambda layer, x, pos: layer(pos=pos, x=x)),
    "positions first": (PositionsFirst, lambda layer, x, pos: layer(pos, x)),
    "mask first": (Attention, lambda layer, x, pos: layer(mask=torch.zeros(3, 1, N, N), x=x)),
}


@pytest.mark.parametrize("how", CALLS)
def test_the_tokens_are_those_of_the_queries_in_whatever_order_they_are_given(how):
    kind, call = CALLS[how]
    x, pos = torch.randn(3, N, C), torch.ones(3, N, C)
    task = Task(kind, lambda layer, x: call(layer, x, pos))
    monitor = AttentionMonitor(every_n_steps=1, statistics=["token_similarity"])
    seen = fitted(task, x, monitor)["attention/token_similarity/layer_00"]
    torch.testing.assert_close(seen, token_similarity(x).mean())
    calls = []

    def keep(_, args, kwargs):
        calls.append((args, kwargs))

    task.body[0].register_forward_pre_hook(keep, with_kwargs=True)
    task(x)
    assert torch.equal(LayerCall.of(task.body[0], *calls[0]).x, x)


def test_positions_are_no_input_of_a_gate():
    task = Task(PositionsFirst, lambda layer, x: layer(torch.ones_like(x), x))
    attnswap.swap_attention(task, "gated")
    seen = []
    task.body[0].mechanism.register_forward_pre_hook(lambda _, a, k: seen.append(k["x"]), with_kwargs=True)
    task(x := torch.randn(2, N, C))
    assert seen[0] is x


@pytest.mark.parametrize("batch", [3, N])
@pytest.mark.parametrize("given", ["keep", "lengths", "mask"])
def test_a_call_of_fewer_samples_takes_their_masks(batch, given):
    x, keep = padded(batch)
    layer = Attention()
    kwargs = {given: {"keep": keep, "lengths": keep.sum(1), "mask": torch.ones(N, N).tril().bool()}[given]}
    call = LayerCall.of(layer, (x,), kwargs, num_samples=2)
    assert call.has_masks
    torch.testing.assert_close(call(call.x), layer(x, **kwargs)[:2])
    seen = torch.tensor([0, 1, 2])
    if given != "mask":
        kwargs = {given: keep[1:2, :3] if given == "keep" else torch.tensor([3])}
        call = LayerCall.of(layer, (x,), {given: keep if given == "keep" else keep.sum(1).clamp(max=3)})
        torch.testing.assert_close(call.part(1, seen)(x[1:2, :3]), layer(x[1:2, :3], **kwargs))


class Residual(Attention):
    def forward(self, x):
        return x + super().forward(x)


class LayerScale(Attention):
    def forward(self, x):
        return 2.0 * super().forward(x)


class Wider(Attention):
    def forward(self, x):
        return torch.cat([100 * x, super().forward(x)], -1)


class Masked(Attention):
    """It does not run on a sequence alone, so that nothing more is looked at."""

    def forward(self, x, mask):
        return super().forward(x, mask=mask)


class Gate(Attention):
    def forward(self, x):
        return super().forward(x) * x.sigmoid()


def bound_of(kind):
    attnswap.declare_host(kind, q="q", k="k", v="v", out="out", heads="heads")
    (layer,) = attention_layers(kind())
    return layer_lipschitz_bound(layer, radius=1.0, num_tokens=4)


@pytest.mark.parametrize("kind", [Residual, LayerScale, Wider, Gate])
def test_a_bound_covers_no_layer_that_does_more_than_it_declares(kind):
    class Plain(Attention):
        pass

    assert bound_of(Plain) == bound_of(Masked) > 0
    with pytest.raises(ValueError, match=r"does not cover .* it does not give what its declared projections give"):
        bound_of(kind)
