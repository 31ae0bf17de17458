"""Somebody's own mechanism: a function with the signature of F.scaled_dot_product_attention, or a path to one."""

import copy
import functools
import gc
import io
import pickle
import weakref

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from attention_modules import (
    AttentionMechanism,
    AttentionSpec,
    SelfAttention,
    SoftmaxAttention,
    build_mechanism,
    mechanism_class,
    register_mechanism,
    restore_attention,
    rpc_attention,
    swap_attention,
    symmetric_attention,
)
from attention_modules.base import described
from attention_modules.mechanism import _REGISTRY
from attention_modules.testing import CHECKS, MechanismCheckError, check_mechanism
from tests.rows import each_row

SPEC = AttentionSpec(dim=16, num_heads=2, head_dim=8)


def tempered(q, k, v, attn_mask=None, is_causal=False, dropout_p=0.0, scale=None, *, temperature=2.0):
    """Softmax attention at another temperature."""
    scale = (q.shape[-1] ** -0.5 if scale is None else scale) / temperature
    return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)


def passes_on(q, k, v, sharpness=1.0, **options):
    return F.scaled_dot_product_attention(q * sharpness, k, v, **options)


def bare(query, key, value):
    return F.scaled_dot_product_attention(query, key, value)


def masked(q, k, v, attn_mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask)


def encoder(**options):
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **options)


def vit(**options):
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=16, embed_dim=16, depth=2, num_heads=2, num_classes=3, **options
    )
    for block in model.blocks:
        nn.init.normal_(block.attn.qkv.weight)  # maps far from uniform ones
    return model.eval(), torch.randn(2, 3, 32, 32)


@pytest.mark.parametrize("function", [passes_on, bare, F.scaled_dot_product_attention])
def test_softmax_by_a_function_is_softmax(function):
    model, images = vit()
    with torch.no_grad():
        plain = model(images)
        report = swap_attention(model, function)
        assert [row.name for row in report] == ["blocks.0.attn", "blocks.1.attn"]
        torch.testing.assert_close(model(images), plain)
        assert restore_attention(model) == ["blocks.0.attn", "blocks.1.attn"]
        assert torch.equal(model(images), plain)


def test_options_of_a_function_are_given_by_name():
    model, images = vit()
    with torch.no_grad():
        swap_attention(model, tempered)
        two = model(images)
        report = swap_attention(model, tempered, temperature=1.0, layers=[0])
        one = model(images)
        assert [row.mechanism for row in report] == ["tempered"]
        assert (two - one).abs().max() > 1e-4
        assert [described(block.attn.mechanism) for block in model.blocks] == ["tempered, temperature=1.0", "tempered"]
        swap_attention(model, functools.partial(tempered, temperature=1.0), layers=[1])
    assert {described(block.attn.mechanism) for block in model.blocks} == {"tempered, temperature=1.0"}
    with pytest.raises(TypeError, match=r"passes_on has no option 'sharpnes'; it takes sharpness\. Did you mean"):
        swap_attention(encoder(), passes_on, sharpnes=2.0)
    with pytest.raises(TypeError, match=r"has no option 'layer'; it takes none\. Did you mean 'layers'"):
        swap_attention(encoder(), "softmax", layer=[0])
    with pytest.raises(TypeError, match="tempered has no option 'temprature'; it takes temperature"):
        swap_attention(model, tempered, temprature=1.0)
    for function in (tempered, passes_on):
        with pytest.raises(TypeError, match=r"dropout_p"):
            swap_attention(model, function, dropout_p=0.5)


def test_an_option_without_a_default_must_be_given():
    def needs(q, k, v, width, attn_mask=None):
        return v

    with pytest.raises(TypeError, match=r"needs could not be built with the options \{\}: missing a required.*'width'"):
        build_mechanism(needs, SPEC)
    assert build_mechanism(needs, SPEC, width=3)(*torch.ones(3, 1, 2, 4, 8)).shape == (1, 2, 4, 8)


def test_what_a_function_does_not_take_is_refused_where_the_layer_gives_it():
    x = torch.randn(2, 5, 16)
    model = encoder(dropout=0.0)
    swap_attention(model, bare)
    model(x)
    with pytest.raises(TypeError, match=r"bare does not take attn_mask, and the layer 'self_attn' gives it a mask"):
        model(x, src_key_padding_mask=torch.tensor([[False] * 4 + [True]] * 2))
    with pytest.raises(TypeError, match=r"bare does not take (attn_mask|is_causal), and the layer 'self_attn'"):
        model(x, nn.Transformer.generate_square_subsequent_mask(5), is_causal=True)
    model = encoder(dropout=0.25)
    swap_attention(model, bare)
    model.eval()(x)
    with pytest.raises(TypeError, match=r"bare does not take dropout_p, and the layer 'self_attn' gives it 0.25"):
        model.train()(x)


def test_a_scale_is_refused_where_it_is_another_than_the_usual_one():
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    mechanism = build_mechanism(bare, SPEC)
    torch.testing.assert_close(mechanism(q, k, v, scale=8**-0.5), mechanism(q, k, v))
    with pytest.raises(TypeError, match=r"bare does not take scale, and the layer gives it 0\.5"):
        mechanism(q, k, v, scale=0.5)


def test_a_function_without_causality_is_refused_for_a_layer_that_is_causal_before_anything_changes():
    model = nn.Sequential(SelfAttention(16, 2, is_causal=True))
    before = type(model[0].mechanism)
    with pytest.raises(ValueError, match="cannot swap '0': bare takes neither is_causal nor attn_mask"):
        swap_attention(model, bare)
    assert type(model[0].mechanism) is before
    swap_attention(model, passes_on)


def test_mask_and_causality_never_come_together():
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    mask = torch.tensor([True, True, True, False])
    mine = build_mechanism(passes_on, SPEC)(q, k, v, attn_mask=mask, is_causal=True)
    torch.testing.assert_close(mine, SoftmaxAttention(SPEC)(q, k, v, attn_mask=mask, is_causal=True))
    build_mechanism(masked, SPEC)(q, k, v)  # a required attn_mask is None where there is none


def test_every_check_passes_for_a_function():
    check_mechanism(tempered, only=[name for name in CHECKS if name != "compile"])
    check_mechanism(tempered, temperature=0.5, only=["output", "compile"])
    with pytest.raises(MechanismCheckError, match="causality: bare does not take is_causal"):
        check_mechanism(bare)


def test_a_mechanism_by_import_path():
    path = f"{__name__}.tempered"
    assert mechanism_class(path) is mechanism_class(tempered)
    assert mechanism_class("attention_modules.RPCAttention") is mechanism_class("rpc")
    assert mechanism_class("torch.nn.functional.scaled_dot_product_attention") is SoftmaxAttention
    report = swap_attention(encoder(), path, temperature=3.0)
    assert report[0].mechanism == "tempered"
    with pytest.raises(ValueError, match=r"unknown attention mechanism 'no_such.thing'.*No module named 'no_such'"):
        mechanism_class("no_such.thing")
    with pytest.raises(ValueError, match=r"unknown attention mechanism 'tests.conftest.nothing'.*nothing"):
        mechanism_class("tests.conftest.nothing")
    with pytest.raises(TypeError, match=r"function of \(q, k, v, \.\.\.\), got basename\(p\)"):
        mechanism_class("os.path.basename")


def test_a_function_registered_by_name():
    try:
        assert register_mechanism("tempered")(tempered) is tempered
        assert register_mechanism("tempered")(tempered) is tempered
        assert type(build_mechanism("tempered", SPEC)) is mechanism_class(tempered)
        with pytest.raises(ValueError, match="taken by"):
            register_mechanism("tempered")(passes_on)
        with pytest.raises(TypeError, match=r"subclass of AttentionMechanism, or a function"):
            register_mechanism("k_and_v")(rpc_attention)
    finally:
        _REGISTRY.pop("tempered", None)


def test_a_model_with_a_function_is_copied_and_pickled():
    model, images = vit()
    swap_attention(model, tempered, temperature=3.0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies.append(torch.load(file, weights_only=False))
    with torch.no_grad():
        for other in copies:
            assert type(other.blocks[0].attn.mechanism) is mechanism_class(tempered)
            assert torch.equal(other(images), model(images))
    swap_attention(model, lambda q, k, v: v)
    copy.deepcopy(model)(images)


class WithParameter(AttentionMechanism):
    def __init__(self, spec):
        super().__init__(spec)
        self.gain = nn.Parameter(torch.ones(()))


class Held:
    window = 3

    def __init__(self, gain):
        self.gain, self.scale = gain, 2.0

    def attention(self, q, k, v):
        return bare(q * self.gain, k, v)

    def scaled(self, q, k, v):
        return bare(q * self.scale, k, v) + 0 * self.window


PROJECTION, HELD = nn.Linear(8, 8), Held(nn.Parameter(torch.ones(())))


def of_closure(gain):
    return lambda q, k, v: bare(q * (gain[0] if isinstance(gain, list) else gain.exp()), k, v)


def PROJECTS(q, k, v):
    return bare(PROJECTION(q), k, v)


def makes_its_own(q, k, v):
    """Makes its Parameter in its first call."""
    if not hasattr(makes_its_own, "gain"):
        makes_its_own.gain = nn.Parameter(torch.ones(()))
    return bare(q * makes_its_own.gain, k, v)


def once(q, k, v):
    """Fails in its second call."""
    once.calls = getattr(once, "calls", 0) + 1
    assert once.calls == 1
    return bare(q * HELD.gain, k, v)


def by_its_gradient(q, k, v):
    """Makes what it differentiates by itself."""
    x = q.detach().requires_grad_()
    return bare(torch.autograd.grad(x.square().sum(), x, create_graph=True)[0], k, v)


def by_its_input(q, k, v):
    """Has what it is given train, to differentiate by it."""
    return bare(torch.autograd.grad(q.requires_grad_().square().sum(), q, create_graph=True)[0], k, v)


def by_a_norm(q, k, v):
    """Makes a layer with Parameters in each call."""
    return bare(nn.LayerNorm(q.shape[-1]).to(q)(q), k, v)


def helping(q, k, v):
    return HELD.attention(q, k, v)


def test_what_trains_is_no_option_and_what_does_not_may_be_held():
    with pytest.raises(TypeError, match="the option 'temperature' of tempered is a Parameter that trains"):
        swap_attention(encoder(), tempered, temperature=nn.Parameter(torch.ones(())))
    with pytest.raises(TypeError, match="that trains and is no part"):
        swap_attention(
            nn.TransformerEncoder(encoder(), 2),
            lambda spec: build_mechanism(PROJECTS if spec.layer_index else "softmax", spec),
        )
    holder = WithParameter(SPEC)
    holder.number = 2.0
    for function in (makes_its_own, once):
        with pytest.raises(TypeError, match="that trains and is no part"):
            swap_attention(encoder(), function)
    for function in (
        by_its_gradient,
        by_its_input,
        by_a_norm,
        HELD.scaled,
        of_closure(torch.ones(())),
        lambda q, k, v: bare(q * holder.number, k, v),
    ):
        swap_attention(encoder(), function)


@each_row(
    ("given", "text"),
    [
        (WithParameter(SPEC), "a built WithParameter, which would be one for all layers; give the class WithParameter"),
        (nn.Softmax(), "a built Softmax, .* give the class Softmax itself, derived from AttentionMechanism, and"),
        (nn.Softmax, "subclass of AttentionMechanism or a function"),
        (rpc_attention, r"got rpc_attention\(k: .*"),
        (torch.bmm, "built-in method bmm"),
        (WithParameter(SPEC).forward, r"forward is a method of a module \(WithParameter\), whose parameters"),
        (of_closure(nn.Parameter(torch.ones(()))), r"Parameter of shape \[\] that trains and is no part"),
        (of_closure(torch.ones((), requires_grad=True) * 2), r"a Tensor of shape \[\] that trains"),
        (of_closure([nn.Parameter(torch.ones(()))]), r"a Parameter of shape \[\] that trains"),
        (torch.compile(of_closure(nn.Parameter(torch.ones(())))), r"a Parameter of shape \[\] that trains"),
        (lambda q, k, v: bare(PROJECTION(q), k, v), r"a Parameter of shape \[8, 8\] that trains and is no part"),
        (lambda q, k, v: bare(PROJECTION.forward(q), k, v), r"a Parameter of shape \[8, 8\] that trains"),
        (lambda q, k, v: helping(q, k, v), r"a Parameter of shape \[\] that trains"),
        (
            functools.update_wrapper(functools.partial(passes_on, sharpness=HELD.gain), passes_on),
            "the option 'sharpness' of passes_on is a Parameter that trains",
        ),
        (HELD.attention, r"output of attention depends on a Parameter of shape \[\] that trains"),
        (lambda q, k, v, *, where=None: v, "a parameter 'where', which is an argument of the swap .spec, model, "),
        (3, "got 3"),
    ],
)
def test_what_is_no_mechanism_is_refused(given, text):
    with pytest.raises(TypeError, match=text):
        swap_attention(encoder(), given)
    swap_attention(encoder(), type(WithParameter(SPEC)))


def test_the_class_of_a_function_lives_no_longer_than_its_uses():
    def closure(q, k, v):
        return v

    report = swap_attention(model := encoder(), closure)
    kept = weakref.ref(closure)
    cls = mechanism_class(closure)
    assert cls is mechanism_class(closure)
    del closure, cls
    gc.collect()
    assert kept() is not None
    del model, report
    gc.collect()
    assert kept() is None


@each_row("function", [rpc_attention, symmetric_attention])
def test_functions_of_keys_and_values_take_no_query(function):
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    function(k, v)
    function(k=k, v=v)
    for given, named in [((q, k, v), {}), ((k, v), {"q": q}), ((), {"query": q, "k": k, "v": v})]:
        with pytest.raises(TypeError, match=rf"{function.__name__} takes \(k, v\), there is no query"):
            function(*given, **named)
    pickle.loads(pickle.dumps(function))


@each_row(
    ("returned", "said"),
    [
        (lambda v: None, "got NoneType"),
        (lambda v: (v, None), "got tuple"),
        (lambda v: v[:, :1], r"got \(1, 1, 5, 8\)"),
        (lambda v: v.transpose(1, 2), r"got \(1, 5, 2, 8\)"),
    ],
)
def test_what_a_function_returns_is_checked(returned, said):
    def mine(q, k, v, **options):
        return returned(v)

    model = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
    swap_attention(model, mine)
    with pytest.raises(TypeError, match=rf"mine must return one tensor .* = \(1, 2, 5, 8\), {said}"):
        model(torch.randn(1, 5, 16))
