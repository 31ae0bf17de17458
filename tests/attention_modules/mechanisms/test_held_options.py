"""Options that a mechanism reads at each call have other values for a while."""

import pytest
import torch
from torch.nn import functional as F

from attention_modules import AttentionSpec, RPCAttention, SinkAttention
from attention_modules.function import function_class
from attention_modules.mechanisms.shared.held_options import held_option, other_options
from tests.rows import each_row

SPEC = AttentionSpec(dim=16, num_heads=2, head_dim=8)


def inputs():
    return torch.randn(3, 2, 2, 7, 8, generator=torch.Generator().manual_seed(0)).unbind()


def test_the_mechanism_computes_with_the_other_options_and_then_with_its_own():
    four, one = RPCAttention(SPEC, iterations=4, lam=1.0), RPCAttention(SPEC, iterations=1, lam=float("inf"))
    sink, before = SinkAttention(SPEC), four(*inputs())
    with other_options([four, sink], {"iterations": 1, "lam": float("inf")}):
        assert torch.equal(four(*inputs()), one(*inputs()))
    assert torch.equal(four(*inputs()), before)
    with pytest.raises(RuntimeError, match="stop"), other_options([four], {"iterations": 2}):
        raise RuntimeError("stop")
    assert (four.iterations, four.lam) == (4, 1.0)


def test_an_option_of_a_function_too():
    def tempered(q, k, v, attn_mask=None, is_causal=False, dropout_p=0.0, scale=None, temperature=1.0):
        return F.scaled_dot_product_attention(q / temperature, k, v, attn_mask, dropout_p, is_causal, scale=scale)

    mechanism = function_class(tempered)(SPEC)
    before = mechanism(*inputs())
    with other_options([mechanism], {"temperature": 2.0}):
        assert held_option(mechanism, "temperature") == 2.0
        q, k, v = inputs()
        assert torch.equal(mechanism(q, k, v), F.scaled_dot_product_attention(q / 2, k, v))
    assert torch.equal(mechanism(*inputs()), before)


@each_row(
    ("options", "said"),
    [
        (
            {"passes": 1},
            r"no mechanism of the model reads an option 'passes' at each call \(RPCAttention, SinkAttention\)",
        ),
        ({"start": 1.0}, "reads an option 'start' at each call"),  # of the sink, read when it is built
        ({"iterations": 0}, "RPCAttention does not take iterations=0: iterations, the number"),
        ({"iterations": "2"}, "RPCAttention does not take iterations='2'"),
        ({"lam": 1.0, "forward": 1}, "reads an option 'forward'"),
    ],
)
def test_what_no_mechanism_takes_is_refused_and_nothing_is_changed(options, said):
    mechanisms = [RPCAttention(SPEC), SinkAttention(SPEC)]
    with pytest.raises(ValueError, match=said), other_options(mechanisms, options):
        pass
    assert (mechanisms[0].iterations, mechanisms[0].lam) == (4, None)


def test_a_model_without_mechanisms_has_no_options():
    with pytest.raises(ValueError, match=r"option 'lam' at each call \(none\)"), other_options([], {"lam": 1.0}):
        pass
