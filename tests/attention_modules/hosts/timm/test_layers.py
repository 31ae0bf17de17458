"""Every attention class of timm's that can be swapped: nothing changes under softmax, and the others train."""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from attention_modules.hosts import AttentionLayer, attention_layers
from attention_modules.hosts.timm import HOSTS
from attention_modules.masks import visible
from attention_modules.mechanisms.softmax import SoftmaxAttention
from attention_modules.swap import restore_attention, swap_attention
from tests.attention_modules.hosts.cases import BETWEEN_LAYERS, FEW, MECHANISMS, WITHOUT_QUERY, Beside
from tests.attention_modules.hosts.timm.cases import LAYERS, OTHERS, layer
from tests.rows import each_row, pairwise


class Recorder(SoftmaxAttention):
    """Keeps what it was last called with."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **kwargs: object) -> Tensor:
        self.seen = {"q": q.detach(), "k": k.detach(), "v": v.detach(), **kwargs}
        return super().forward(q, k, v, **kwargs)


class KeyRecorder(Recorder):
    """The same without a query."""

    uses_query = False


def run(name: str, module: nn.Module) -> Tensor:
    return module(*LAYERS[name].inputs())


@cache
def plain_shape(name: str) -> torch.Size:
    with torch.no_grad():
        return run(name, layer(name)).shape


def swapped(name: str, mechanism: str, seed: int = 0) -> nn.Module:
    kind, options = FEW[mechanism]
    module = layer(name, seed)
    swap_attention(module, kind, **options)
    return module


def without_query(name: str) -> str:
    """The mechanism that changes the layer's parameters, softmax where it is refused."""
    return "softmax" if "symmetric" in LAYERS[name].refuses else "symmetric"


@pytest.mark.parametrize("name", LAYERS)
def test_softmax_for_softmax_changes_nothing(name: str) -> None:
    for fused in (True, False):
        module = layer(name)
        module.fused_attn = fused
        state = list(module.state_dict())
        for inference in (False, True):
            with torch.inference_mode(inference):
                plain = run(name, module)
                (row,) = swap_attention(module, "softmax")
                assert row.before == row.after
                torch.testing.assert_close(run(name, module), plain, atol=1e-5, rtol=0)
                assert list(module.state_dict()) == state
                restore_attention(module)
                assert torch.equal(run(name, module), plain)
        assert plain.std() > 0.01


@pytest.mark.parametrize("name", LAYERS)
def test_a_scale_of_ones_own_counts_where_the_plain_forward_reads_it(name: str) -> None:
    """timm's fused forwards do not, so that heads that were pruned keep the scale of wider ones unread."""
    for fused in (True, False):
        module = layer(name)
        if not isinstance(getattr(module, "scale", None), float):
            return
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
        module.scale *= 3
        with torch.no_grad():
            plain = run(name, module)
            swap_attention(module, "softmax")
            torch.testing.assert_close(run(name, module), plain, atol=1e-5, rtol=0)


class Adapted(nn.Module):
    """A projection and what is added to it, as LoRA is written by hand."""

    def __init__(self, projection: nn.Module):
        super().__init__()
        self.projection, self.added = projection, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.added(self.projection(x))


@pytest.mark.parametrize("name", [name for name in LAYERS if isinstance(getattr(layer(name), "proj", None), nn.Linear)])
def test_an_output_projection_may_be_wrapped_by_hand(name: str) -> None:
    module = layer(name)
    plain = run(name, module)
    module.proj = Adapted(module.proj)
    swap_attention(module, "softmax")
    torch.testing.assert_close(run(name, module), plain, atol=1e-5, rtol=0)


def _seen(model: nn.Module) -> dict[str, list[Tensor]]:
    """What hooks on the parts of its layer see in the calls from now on, by their names."""
    seen: dict[str, list[Tensor]] = {}
    for name, part in model["layer"].named_modules():

        def keep(_: nn.Module, args: tuple[object, ...], out: Tensor, name: str = name) -> None:
            seen.setdefault(name, []).extend(each.detach().clone() for each in (*args, out) if isinstance(each, Tensor))

        part.register_forward_hook(keep)
    return seen


@pytest.mark.parametrize("name", LAYERS | OTHERS)
@pytest.mark.parametrize("fused", [True, False])
def test_hooks_on_every_part_see_what_they_see_in_the_plain_layer(name: str, fused: bool) -> None:
    seen, said = [], []
    for mechanism in (None, "talking_heads" if name == "cait" else "softmax"):
        model = nn.ModuleDict({"layer": layer(name)})
        if hasattr(model["layer"], "fused_attn"):
            model["layer"].fused_attn = fused
        if hasattr(model["layer"], "attn_drop") and name != "cait":
            model["layer"].attn_drop.train(not fused).p = 0.3  # which draws in the plain layer's order
        seen.append(_seen(model))
        if mechanism is not None:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                swap_attention(model, mechanism, where="layer")
        torch.manual_seed(0)
        with torch.no_grad():
            model["layer"](*(LAYERS | OTHERS)[name].inputs())
    plain, swapped = seen
    silent = [part for part in plain if part not in swapped]
    assert set(silent) <= {"attn_drop", "softmax", "rel_pos", "proj_l", "proj_w"}  # which are called with maps
    named = {f"'layer.{part}'{f' and {len(silent) - 1} more' if silent[1:] else ''}, or hooks" for part in silent}
    assert sum(str(each.message).startswith(tuple(named)) for each in said) == len(said) == bool(silent)
    assert swapped.keys() <= plain.keys()
    for part in swapped:
        assert len(swapped[part]) == len(plain[part]), part
        for mine, expected in zip(swapped[part], plain[part], strict=True):
            torch.testing.assert_close(
                mine, expected, atol=1e-5, rtol=1e-5, msg=lambda text, part=part: f"{part}: {text}"
            )


def test_hooks_are_tried_on_every_class_of_timm() -> None:
    tried = {(case.library, case.kind) for case in (LAYERS | OTHERS).values()}
    assert {(host.library, host.kind) for host in HOSTS} == tried


@pytest.mark.parametrize("name", LAYERS)
def test_it_trains_or_is_refused(name: str, subtests: pytest.Subtests) -> None:
    """Every refusal, the few of every kind of change, and the others in every third layer, in turn."""
    place = list(LAYERS).index(name)
    for turn, mechanism in enumerate(MECHANISMS, place):
        if mechanism in (*FEW, *LAYERS[name].refuses) or turn % 3 == 0:
            with subtests.test(mechanism=mechanism):
                check_trains_or_is_refused(name, mechanism)


def check_trains_or_is_refused(name: str, mechanism: str) -> None:
    """A mechanism that reads another layer's values has one beside it."""
    case = LAYERS[name]
    layers = [layer(name, seed) for seed in range(2 if mechanism in BETWEEN_LAYERS else 1)]
    model = Beside(layers) if len(layers) == 2 else layers[0]
    kind, options = MECHANISMS[mechanism]
    if mechanism in case.refuses:
        before = [(key, id(value)) for key, value in model.named_parameters()]
        with pytest.raises(ValueError, match=case.refuses[mechanism]):
            swap_attention(model, kind, **options)
        assert [(key, id(value)) for key, value in model.named_parameters()] == before
        return
    rows = swap_attention(model, kind, **options)
    model.train()
    out = run(name, model) if len(layers) == 1 else model(lambda module, _: run(name, module), None)
    assert out.shape == plain_shape(name)
    assert torch.isfinite(out).all()
    out.square().sum().backward()
    unused = [key for key, value in model.named_parameters() if value.grad is None or not value.grad.isfinite().all()]
    assert not unused
    assert all((row.after < row.before) == (mechanism in WITHOUT_QUERY) for row in rows)


PRECISIONS = pairwise(
    LAYERS,
    ("autocast", "bfloat16"),
    ("softmax", "symmetric", "rpc"),
    allowed=lambda name, _, m: m not in LAYERS[name].refuses,
)


@pytest.mark.parametrize("name", LAYERS)
def test_low_precision(name: str, subtests: pytest.Subtests) -> None:
    for _, precision, mechanism in (row for row in PRECISIONS if row[0] == name):
        with subtests.test(precision=precision, mechanism=mechanism):
            check_precision(name, mechanism, precision == "autocast")


def check_precision(name: str, mechanism: str, autocast: bool) -> None:
    module, inputs = swapped(name, mechanism), LAYERS[name].inputs()
    exact = module(*inputs)
    if not autocast:
        module = module.bfloat16()
        inputs = [value.bfloat16() if isinstance(value, Tensor) else value for value in inputs]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        rough = module(*inputs)
    error = (rough - exact).abs().mean() / exact.abs().mean()
    assert error < (0.5 if mechanism == "rpc" else 0.1)  # four passes amplify what rounding leaves


@pytest.mark.parametrize("name", LAYERS)
def test_restore_and_copies_are_bit_identical(name: str) -> None:
    module, twin = swapped(name, without_query(name)), layer(name)
    with torch.no_grad():  # LeViT keeps its biases between calls, with their graph, which no layer can be copied with
        check_copies(name, module, twin)


def check_copies(name: str, module: nn.Module, twin: nn.Module) -> None:
    expected = run(name, module)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(run(name, copied), expected)
        restore_attention(copied)
        assert torch.equal(run(name, copied), run(name, twin))
    restore_attention(module)
    assert [type(part) for part in module.modules()] == [type(part) for part in twin.modules()]
    assert torch.equal(run(name, module), run(name, twin))
    pairs = zip(module.state_dict().items(), twin.state_dict().items(), strict=True)
    assert all(key == other and torch.equal(value, kept) for (key, value), (other, kept) in pairs)
    assert repr(module) == repr(twin)


@pytest.mark.parametrize("name", LAYERS)
def test_plain_and_swapped_checkpoints_load_strictly(name: str) -> None:
    mechanism = without_query(name)
    module, source = swapped(name, mechanism), layer(name, seed=1)
    module.load_state_dict(source.state_dict())
    assert torch.equal(run(name, module), run(name, swapped(name, mechanism, seed=1)))
    again = swapped(name, mechanism, seed=2)
    again.load_state_dict(module.state_dict())
    assert torch.equal(run(name, again), run(name, module))
    restore_attention(module)
    assert torch.equal(run(name, module), run(name, source))


@pytest.mark.parametrize("name", [name for name, case in LAYERS.items() if case.linear])
def test_weights_give_the_logits(name: str) -> None:
    check_logits(name, Recorder)
    if "symmetric" not in LAYERS[name].refuses:
        check_logits(name, KeyRecorder)


def check_logits(name: str, mechanism: type[Recorder]) -> None:
    case, module = LAYERS[name], layer(name)
    for key, parameter in module.named_parameters():
        if key.endswith("bias"):
            nn.init.zeros_(parameter)
    swap_attention(module, mechanism)
    run(name, module)
    (found,) = attention_layers(module)
    w_q, w_k = found.qk_weights()
    q, k = module.mechanism.seen["q"], module.mechanism.seen["k"]
    assert (w_q is w_k) == (mechanism is KeyRecorder)
    assert w_q.shape == (q.shape[1], q.shape[3], found.spec.dim)
    x = case.inputs()[0]
    x = (x if x.shape[-1] == found.spec.dim else x.movedim(1, -1)).flatten(0, -2)  # all tokens, in whichever order
    every = torch.einsum("nc,hdc,hde,me->hnm", x, w_q, w_k, x)
    some = torch.einsum("bhnd,bhmd->hbnm", q, k)
    for got in (some.amax(), some.amin(), *some.diagonal(dim1=2, dim2=3).flatten(1)[:, :3].flatten()):
        assert (every - got).abs().min() < 1e-4
    parameters = found.qk_parameters()
    assert {id(p) for p in parameters} <= {id(p) for p in module.parameters()}
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad((w_q * w_k).sum(), parameters))


@each_row("name", ["levit", "levit-conv"])
def test_weights_behind_a_batch_norm_are_refused_by_name(name: str) -> None:
    (found,) = attention_layers(layer(name))
    for read in (found.qk_weights, found.qk_parameters):
        with pytest.raises(ValueError, match=r"no query and key weights to read: a batch norm"):
            read()


@torch.no_grad()
def test_weights_into_which_a_batch_norm_is_folded_are_read() -> None:
    plain = layer("levit")
    plain.eval()
    plain.qkv.bn.running_var.uniform_(0.5, 2.0)
    folded, x = copy.deepcopy(plain), plain.qkv.linear.weight.new_empty(2, 16, plain.qkv.linear.in_features).normal_()
    folded.qkv = plain.qkv.fuse()
    expected = plain(x)
    for mechanism in ("softmax", "symmetric"):
        swap_attention(folded, mechanism)
        assert mechanism != "softmax" or torch.allclose(folded(x), expected, atol=1e-5)
        restore_attention(folded)
    torch.testing.assert_close(folded(x), expected)
    (found,) = attention_layers(folded)
    assert torch.equal(found.qk_weights()[1].flatten(0, 1)[:1], folded.qkv.weight[found.spec.head_dim][None])


@each_row(
    ("name", "text"),
    [
        ("eva", "rope"),
        ("eva-norm", "q/k norm"),
        ("gemma", "q/k norm"),
        ("beit", "position bias"),
        ("swin", "position bias"),
        ("swin-v2", "cosine"),
        ("swin-v2-cr", "cosine"),
        ("sam-no-bias", None),
        ("metaformer", None),
        ("botnet", "position bias"),
        ("lowformer", "strided convolution"),
    ],
)
def test_spectrum_caveat(name: str, text: str | None) -> None:
    caveat = _found(name).spectrum_caveat
    assert caveat is None if text is None else text in str(caveat)


def _found(name: str) -> AttentionLayer:
    (found,) = attention_layers(layer(name))
    return found


@pytest.mark.parametrize(
    ("name", "length"), [("swin", 16), ("swin-v2", 16), ("swin-v2-cr", 16), ("beit", 13), ("botnet", 16)]
)
def test_windows_fix_the_number_of_tokens(name: str, length: int) -> None:
    assert _found(name).spec.num_tokens == length
    module = layer(name)
    plain = run(name, module)
    swap_attention(module, "scaled")  # the matrix form needs the number of tokens
    torch.testing.assert_close(run(name, module), plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["swin", "swin-v2", "swin-v2-cr"])
def test_the_mask_of_shifted_windows_hides(name: str) -> None:
    module = layer(name)
    swap_attention(module, Recorder)
    run(name, module)
    seen = visible(module.mechanism.seen["attn_mask"])
    shifted = seen[1::2]  # the second window of each image
    assert seen[::2].all()
    assert not shifted[:, :, :8, 8:].any()
    assert shifted[:, :, :8, :8].all()


@pytest.mark.parametrize("name", ["swin-v2", "swin-v2-cr"])
def test_cosine_logits_without_a_query_are_those_of_the_keys(name: str) -> None:
    module = layer(name)
    swap_attention(module, KeyRecorder)
    run(name, module)
    k, scale = module.mechanism.seen["k"], module.mechanism.seen["scale"]
    diagonal = (k @ k.transpose(-1, -2)).diagonal(dim1=-2, dim2=-1) * scale  # each key with itself: the learned scale
    torch.testing.assert_close(diagonal, module.logit_scale.exp().view(1, -1, 1).expand_as(diagonal))


@pytest.mark.parametrize("name", ["beit", "swin", "relpos", "levit"])
def test_the_bias_is_learned(name: str) -> None:
    module = layer(name)
    swap_attention(module, "softmax")
    module.train()
    run(name, module).square().sum().backward()
    grads = [parameter.grad for key, parameter in module.named_parameters() if "position" in key or "biases" in key]
    assert all(grad.abs().sum() > 0 for grad in grads)
    assert len(grads) == 1


@pytest.mark.parametrize("name", ["eva", "swin-v2", "levit-conv", "nest", "twins-local"])
def test_compiles(name: str) -> None:
    torch._dynamo.reset()  # other tests compile the same forward for other layers, as often as dynamo allows
    module = layer(name)
    expected = run(name, module)
    swap_attention(module, "softmax")
    torch._dynamo.reset()  # it counts the compilations of one forward over the whole session
    module.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(name, module), expected, atol=1e-5, rtol=1e-4)


REDUCED = {
    "hiera": (("timm.models.hiera", "MaskUnitAttention", (16, 32, 4), {"q_stride": 4}), "pools its queries"),
    "pvt": (("timm.models.pvt_v2", "Attention", (16,), {"sr_ratio": 2}), "reduced image"),
    "gcvit": (("timm.models.gcvit", "WindowAttentionGlobal", (16, 4, (2, 2)), {}), "whole image's"),
    "levit": (("timm.models.levit", "AttentionDownsample", (16, 32, 4), {}), "fewer queries than keys"),
    "efficientformer_v2": (("timm.models.efficientformer_v2", "Attention2d", (16,), {}), "talking heads"),
    "xcit": (("timm.models.xcit", "XCA", (16,), {}), "among channels"),
}


@pytest.mark.parametrize("name", REDUCED)
def test_what_is_left_says_why(name: str) -> None:
    (library, kind, args, options), text = REDUCED[name]
    other = getattr(pytest.importorskip(library), kind)(*args, **options)
    report = swap_attention(nn.ModuleDict({"left": other, "taken": layer("metaformer")}), "softmax")
    assert [row.name for row in report] == ["taken"]
    assert [(skipped.name, skipped.kind) for skipped in report.skipped] == [("left", kind)]
    assert text in report.skipped[0].reason


def test_a_subclass_with_its_own_forward_is_a_layer_of_ones_own() -> None:
    plain = type(layer("beit"))

    class Loud(plain):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor, **kwargs: object) -> Tensor:
            return 2 * super().forward(x, **kwargs)

    model, x = nn.ModuleDict({"a": Loud(16), "b": plain(16)}), torch.randn(2, 5, 16)
    expected = model["a"](x)
    assert [row.host for row in swap_attention(model, "softmax")] == [
        "scaled_dot_product_attention",
        "timm beit Attention",
    ]
    torch.testing.assert_close(model["a"](x), expected)
