"""Compiled code runs again once the last of those who asked for eager code has left."""

import random
from contextlib import ExitStack

import pytest
import torch
import torch._dynamo  # as any compiled model loads it

from lightning_tasks.training.eager import draws_otherwise, drops_out, eager


@pytest.fixture
def compiled():
    """A compiled function that says whether it ran compiled."""
    runs = []

    def backend(graph, inputs):
        def run(*args):
            runs.append("compiled")
            return graph(*args)

        return run

    twice = torch.compile(lambda x: 2 * x, backend=backend)

    def ran_compiled():
        before = len(runs)
        twice(torch.ones(3))
        return len(runs) > before

    assert ran_compiled()
    return ran_compiled


def test_those_who_leave_in_any_order_leave_nothing_behind(compiled):
    order = random.Random(0)
    for _ in range(20):
        holders = [ExitStack() for _ in range(4)]
        for holder in holders:
            holder.enter_context(eager())
        order.shuffle(holders)
        for holder in holders:
            assert not compiled()
            holder.close()
        assert compiled()


def test_an_exception_lets_go(compiled):
    with pytest.raises(RuntimeError, match="broken"), eager(), eager():
        raise RuntimeError("broken")
    assert compiled()


def test_the_stance_of_the_process_comes_back(compiled):
    with torch.compiler.set_stance("force_eager"):
        with eager():
            assert not compiled()
        assert not compiled()
    assert compiled()


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_dropout_is_known_by_its_rate(rate):
    assert drops_out(torch.nn.TransformerEncoderLayer(8, 2, 8, dropout=rate)) == bool(rate)


@pytest.mark.slow
@pytest.mark.parametrize("as_eager", [True, False])
def test_code_that_inductor_compiled_draws_otherwise(as_eager):
    torch._dynamo.reset()
    with torch._inductor.config.patch(fallback_random=as_eager):
        compiled, x = torch.compile(lambda x: torch.nn.functional.dropout(x, 0.5)), torch.ones(64)
        torch.manual_seed(0)
        found = compiled(x)
        torch.manual_seed(0)
        with eager():
            assert torch.equal(compiled(x), found) == as_eager
        assert draws_otherwise() != as_eager
