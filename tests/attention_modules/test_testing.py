"""``check_mechanism``: ours pass it, and each of its checks fails for a mechanism that deserves it."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from attention_modules import AttentionMechanism, AttentionSpec, SoftmaxAttention
from attention_modules.mechanisms.linear.linear import LinearAttention
from attention_modules.testing import CHECKS, MechanismCheckError, check_mechanism

OURS = {
    "softmax": ("softmax", {}),
    "symmetric": ("symmetric", {}),
    "rpc": ("rpc", {}),
    "rpc whose threshold fires": ("rpc", {"iterations": 2, "lam": 0.3}),
    "rpc ratio": ("rpc", {"iterations": 2, "threshold": "ratio"}),
    "scaled matrix": ("scaled", {"variant": "matrix"}),
    "scaled scalar": ("scaled", {"variant": "scalar"}),
}


@pytest.mark.parametrize("name", OURS)
def test_ours_pass(name):
    mechanism, options = OURS[name]
    # Compiling takes seconds: once a mechanism.
    checks = set(CHECKS) if name in ("softmax", "symmetric", "rpc", "scaled matrix") else set(CHECKS) - {"compile"}
    check_mechanism(mechanism, only=checks, **options)


class Broken(SoftmaxAttention):
    """Plain attention with a fault in what ``before`` or ``after`` change."""

    def before(self, q, k, v, **kwargs):
        return q, k, v

    def after(self, out, q, k, v):
        return out

    def forward(self, q, k, v, attn_mask=None, is_causal=False, dropout_p=0.0, scale=None):
        kwargs = {"attn_mask": attn_mask, "is_causal": is_causal, "dropout_p": dropout_p, "scale": scale}
        return self.after(super().forward(*self.before(q, k, v), **self.change(kwargs)), q, k, v)

    def change(self, kwargs):
        return kwargs


class Narrow(Broken):
    def after(self, out, q, k, v):
        return out[..., :4]


class MixesSamples(Broken):
    def after(self, out, q, k, v):
        return out - out.mean(0)


class SeesTheFuture(Broken):
    def after(self, out, q, k, v):
        return out + v.mean(-2, keepdim=True)


class ForgetsIsCausal(Broken):
    def change(self, kwargs):
        return {**kwargs, "is_causal": False}


class ForgetsMasks(Broken):
    def change(self, kwargs):
        return {**kwargs, "attn_mask": None}


class CutsMasks(Broken):
    def change(self, kwargs):
        mask = kwargs["attn_mask"]
        return {**kwargs, "attn_mask": mask if mask is None else mask[..., :7]}


class ReadsBooleansAsHidden(Broken):
    def change(self, kwargs):
        mask = kwargs["attn_mask"]
        return {**kwargs, "attn_mask": ~mask if mask is not None and mask.dtype == torch.bool else mask}


class NormalizesOverPadding(Broken):
    def before(self, q, k, v):
        return q, k / k.abs().mean((-2, -1), keepdim=True), v


class SumsWhatIsHidden(Broken):
    """Padding at the end reaches no row before it."""

    def after(self, out, q, k, v):
        return out + v.cumsum(-2)


class PlainSoftmax(AttentionMechanism):
    """Not a number in rows that see nothing."""

    def forward(self, q, k, v, attn_mask=None, is_causal=False, dropout_p=0.0, scale=None):
        logits = q @ k.transpose(-2, -1)
        if attn_mask is not None:
            logits = logits.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else logits + attn_mask
        return logits.softmax(-1) @ v


class DividesByNorm(Broken):
    def before(self, q, k, v):
        return q, k / k.norm(dim=-1, keepdim=True), v


class DetachesValues(Broken):
    def after(self, out, q, k, v):
        return out + 0.1 * v.detach()


class DividesBySpread(Broken):
    def before(self, q, k, v):
        return q, k / k.std(-2, keepdim=True), v


class OverflowsInHalf(Broken):
    def after(self, out, q, k, v):
        return out * 1e5 / 1e5


class DiffersInTraining(Broken):
    def after(self, out, q, k, v):
        return 2 * out if self.training else out


class DiffersWithoutGradients(Broken):
    def after(self, out, q, k, v):
        return out if torch.is_grad_enabled() else 2 * out


class ForgetsDropout(Broken):
    def change(self, kwargs):
        return {**kwargs, "dropout_p": 0.0}


class ForgetsScale(Broken):
    def change(self, kwargs):
        return {**kwargs, "scale": None}


class HasAnotherDefaultScale(Broken):
    def change(self, kwargs):
        return {**kwargs, "scale": 1.0 if kwargs["scale"] is None else kwargs["scale"]}


class ReadsADroppedQuery(Broken):
    uses_query = False


class ForgetsTheQuery(Broken):
    def before(self, q, k, v):
        return k, k, v


class MixesHeads(Broken):
    per_head = ()

    def after(self, out, q, k, v):
        return out - out.mean(1, keepdim=True)


class SplitsWhatIsShared(Broken):
    per_head = ("gain",)

    def __init__(self, spec):
        super().__init__(spec)
        self.gain = nn.Parameter(torch.zeros(spec.head_dim))

    def after(self, out, q, k, v):
        return out * self.gain.sum()


class HasAnIdleParameter(Broken):
    def __init__(self, spec):
        super().__init__(spec)
        self.idle = nn.Parameter(torch.zeros(3))


class KeepsStateOutside(Broken):
    def __init__(self, spec):
        super().__init__(spec)
        self.factor = torch.rand(())

    def after(self, out, q, k, v):
        return self.factor * out


class ForgetsItsState(LinearAttention):
    def forward(self, *args, state=None, **kwargs):
        if state:
            state.clear()
        return super().forward(*args, state=state, **kwargs)


class KeepsEveryToken(LinearAttention):
    def forward(self, q, k, v, *args, state=None, **kwargs):
        kept = None if state is None else [*([state["keys"]] if state else []), k]
        out = super().forward(q, k, v, *args, state=state, **kwargs)
        if state is not None:
            state["keys"] = torch.cat(kept, -2)
        return out


class DiffersCompiled(Broken):
    def after(self, out, q, k, v):
        return 2 * out if torch.compiler.is_compiling() else out


class DiffersCompiledBackward(Broken):
    def after(self, out, q, k, v):
        return out + (v - v.detach()) if torch.compiler.is_compiling() else out


class IsNotANumber(Broken):
    def after(self, out, q, k, v):
        return out * torch.nan


FAULTS = {
    "output": [Narrow, IsNotANumber],
    "samples": [MixesSamples],
    "causality": [SeesTheFuture, ForgetsIsCausal, ForgetsMasks],
    "masks": [ForgetsMasks, CutsMasks, ReadsBooleansAsHidden],
    "padding": [NormalizesOverPadding, SeesTheFuture],
    "hidden tokens": [SumsWhatIsHidden, SeesTheFuture],
    "hidden rows": [PlainSoftmax],
    "zero keys": [DividesByNorm],
    "gradients": [DetachesValues],
    "single token": [DividesBySpread],
    "dtypes": [OverflowsInHalf],
    "modes": [DiffersInTraining, DiffersWithoutGradients],
    "dropout": [ForgetsDropout],
    "scale": [ForgetsScale, HasAnotherDefaultScale],
    "query": [ReadsADroppedQuery, ForgetsTheQuery],
    "heads": [MixesHeads, SplitsWhatIsShared],
    "parameters": [HasAnIdleParameter],
    "copies": [KeepsStateOutside],
    "compile": [DiffersCompiled, DiffersCompiledBackward],
    "state": [ForgetsItsState, KeepsEveryToken],
}


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom")
@pytest.mark.parametrize(("check", "fault"), [(check, fault) for check, faults in FAULTS.items() for fault in faults])
def test_every_check_can_fail(check, fault):
    with pytest.raises(MechanismCheckError, match=f"^{check}: ") as error:
        check_mechanism(fault, only=[check])
    assert error.value.check == check


def test_there_is_a_fault_for_every_check():
    assert FAULTS.keys() == CHECKS.keys()


def test_without_a_fault_the_broken_base_passes():
    check_mechanism(Broken, only=set(CHECKS) - {"compile"})


def test_an_unknown_check_is_an_error():
    with pytest.raises(ValueError, match=r"\['color'\]; known: output"):
        check_mechanism("softmax", only=["color"])


def test_options_that_do_not_fit_are_errors_of_the_options():
    with pytest.raises(TypeError, match="SoftmaxAttention"):
        check_mechanism("softmax", iterations=2)


def test_the_global_random_state_stays():
    before = torch.random.get_rng_state()
    check_mechanism("scaled", only=["output", "dropout", "copies"])
    assert torch.equal(torch.random.get_rng_state(), before)


def test_callables_and_other_specs_are_checked():
    check_mechanism(lambda spec: SoftmaxAttention(spec), spec=AttentionSpec(12, 3, 4), only=["causality", "padding"])


def test_the_naive_softmax_is_right_where_rows_see_something():
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind(0)
    spec = AttentionSpec(16, 2, 8)
    assert torch.allclose(PlainSoftmax(spec)(q, k, v), scaled_dot_product_attention(q, k, v, scale=1.0), atol=1e-6)
