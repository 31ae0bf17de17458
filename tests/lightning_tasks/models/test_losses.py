import itertools
import weakref

import pytest
import torch
from torch.nn import functional

from lightning_tasks.models import losses
from lightning_tasks.models.losses import chunked_cross_entropy, token_log_probabilities
from tests.rows import each_row

BATCH, TOKENS, DIM, VOCAB = 3, 41, 8, 31


@pytest.fixture
def inputs():
    hidden = torch.randn(BATCH, TOKENS, DIM, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCAB, DIM, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(VOCAB, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, VOCAB, (BATCH, TOKENS))
    targets[0, :7] = -100
    return {"hidden": hidden, "weight": weight, "bias": bias}, targets


def plain(leaves, targets, reduction="mean"):
    logits = functional.linear(leaves["hidden"], leaves["weight"], leaves["bias"])
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


def chunked(leaves, targets, **options):
    return chunked_cross_entropy(leaves["hidden"], leaves["weight"], targets, leaves["bias"], **options)


def gradients(loss, leaves):
    kept = {name: leaf for name, leaf in leaves.items() if leaf is not None and leaf.requires_grad}
    return dict(zip(kept, torch.autograd.grad(loss, list(kept.values())), strict=True))


@each_row(
    ("reduction", "chunk_size", "with_bias"), itertools.product(["mean", "sum"], [1, 16, 123, 1000], [True, False])
)
def test_loss_and_gradients_are_those_of_cross_entropy(inputs, reduction, chunk_size, with_bias):
    leaves, targets = inputs
    leaves = leaves if with_bias else {**leaves, "bias": None}
    expected = plain(leaves, targets, reduction)
    loss = chunked(leaves, targets, reduction=reduction, chunk_size=chunk_size)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    want = gradients(3 * expected, leaves)
    for name, gradient in gradients(3 * loss, leaves).items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-10, atol=1e-13, msg=name)


@pytest.mark.parametrize("trained", ["hidden", "weight", "bias"])
def test_only_what_requires_gradients_gets_them(inputs, trained):
    leaves, targets = inputs
    want = gradients(plain(leaves, targets), leaves)[trained]
    for name, leaf in leaves.items():
        leaf.requires_grad_(name == trained)
    torch.testing.assert_close(gradients(chunked(leaves, targets), leaves)[trained], want)


def test_tied_weight_gets_the_gradient_of_both_uses(inputs):
    leaves, targets = inputs
    weight = leaves["weight"]
    tokens = targets.clamp(min=0)
    grads = []
    for loss in (
        functional.cross_entropy((weight[tokens] @ weight.T).flatten(0, 1), targets.flatten()),
        chunked_cross_entropy(weight[tokens], weight, targets, chunk_size=10),
    ):
        grads.append(torch.autograd.grad(loss, weight)[0])
    torch.testing.assert_close(*grads)


def test_backward_twice_gives_the_same_gradients(inputs):
    leaves, targets = inputs
    loss = chunked(leaves, targets)
    first = torch.autograd.grad(loss, leaves["weight"], retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(loss, leaves["weight"])[0], first, rtol=0, atol=0)


def test_second_derivatives_are_refused(inputs):
    leaves, targets = inputs
    first = torch.autograd.grad(chunked(leaves, targets), leaves["hidden"], create_graph=True)[0]
    with pytest.raises(RuntimeError):
        torch.autograd.grad(first.sum(), leaves["weight"])


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(inputs, context):
    leaves, targets = inputs
    with context():
        loss = chunked(leaves, targets, chunk_size=10)
    assert not loss.requires_grad
    torch.testing.assert_close(loss.clone(), plain(leaves, targets).detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(inputs, dtype):
    leaves, targets = inputs
    want = gradients(plain(leaves, targets), leaves)
    leaves = {name: leaf.detach().float().requires_grad_() for name, leaf in leaves.items()}
    with torch.autocast("cpu", dtype):
        loss = chunked(leaves, targets, chunk_size=16)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), plain(inputs[0], targets), rtol=1e-2, atol=1e-2)
    for name, gradient in gradients(loss, leaves).items():
        assert gradient.dtype == torch.float32
        error = (gradient.double() - want[name]).norm() / want[name].norm()
        assert error < 2e-2, (name, error)


@pytest.mark.skipif(not hasattr(functional, "linear_cross_entropy"), reason="torch has it from 2.14 on")
def test_torch_s_own_leaves_autocast_aside_and_rounds_the_loss():
    """Why `chunked_cross_entropy` is ours: once torch's own does neither, it can take its place."""
    hidden, weight, targets = torch.randn(512, 16), torch.randn(300, 16), torch.randint(300, (512,))
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=64)

    def torch_s_own(*arguments):
        return functional.linear_cross_entropy(*arguments, targets, options=options, reduction="sum")

    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = torch_s_own(hidden, weight)
        ours = chunked_cross_entropy(hidden, weight, targets, reduction="sum")
    assert torch.equal(under_autocast, torch_s_own(hidden, weight))
    assert not torch.equal(ours, chunked_cross_entropy(hidden, weight, targets, reduction="sum"))
    assert torch_s_own(hidden.bfloat16(), weight.bfloat16()).dtype == torch.bfloat16
    assert chunked_cross_entropy(hidden.bfloat16(), weight.bfloat16(), targets).dtype == torch.float32


def test_gradients_of_a_bfloat16_head_are_summed_in_float32():
    hidden = torch.randn(4096, 4).bfloat16()
    weight = torch.randn(5, 4).bfloat16().requires_grad_()
    targets = torch.randint(0, 5, (4096,))
    gradient = torch.autograd.grad(chunked_cross_entropy(hidden, weight, targets, chunk_size=8), weight)[0]
    reference = weight.detach().double().requires_grad_()
    exact = torch.autograd.grad(functional.cross_entropy(hidden.double() @ reference.T, targets), reference)[0]
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient.double(), exact, rtol=1e-2, atol=1e-3)


def test_compiled(inputs):
    leaves, targets = inputs
    compiled = torch.compile(
        lambda *args: chunked_cross_entropy(*args, chunk_size=50), backend="aot_eager", fullgraph=True
    )
    loss = compiled(leaves["hidden"], leaves["weight"], targets, leaves["bias"])
    torch.testing.assert_close(loss, plain(leaves, targets))
    want = gradients(plain(leaves, targets), leaves)
    for name, gradient in gradients(loss, leaves).items():
        torch.testing.assert_close(gradient, want[name], msg=name)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nothing_to_count_is_zero_with_zero_gradients(inputs, reduction):
    leaves, targets = inputs
    loss = chunked(leaves, torch.full_like(targets, -100), reduction=reduction)
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients(loss, leaves).values())


def test_large_logits_stay_finite(inputs):
    leaves, targets = inputs
    leaves = {**leaves, "weight": (leaves["weight"].detach() * 1e4).requires_grad_()}
    loss = chunked(leaves, targets)
    assert torch.isfinite(loss)
    assert all(torch.isfinite(gradient).all() for gradient in gradients(loss, leaves).values())


def test_log_probabilities(inputs):
    leaves, targets = inputs
    logits = functional.linear(leaves["hidden"], leaves["weight"], leaves["bias"]).log_softmax(-1)
    expected = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(targets == -100, 0)
    result = token_log_probabilities(leaves["hidden"], leaves["weight"], targets, leaves["bias"], chunk_size=17)
    torch.testing.assert_close(result, expected.detach())


def test_the_logits_of_one_chunk_are_held_at_a_time(inputs, monkeypatch):
    made = []

    def logits(*arguments):
        assert not [each for each in made if each() is not None], "those of the chunk before still exist"
        result = compute(*arguments)
        made.append(weakref.ref(result))
        return result

    compute = losses._logits
    monkeypatch.setattr(losses, "_logits", logits)
    leaves, targets = inputs
    chunked(leaves, targets, chunk_size=16)
    assert len(made) == -(-BATCH * TOKENS // 16)


def test_no_tensor_of_all_logits_is_made(inputs):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                Largest.size = max(Largest.size, result.numel())
            return result

    leaves, targets = inputs
    with Largest():
        chunked(leaves, targets, chunk_size=16).backward()
    assert Largest.size <= max(16 * VOCAB, BATCH * TOKENS * DIM) < BATCH * TOKENS * VOCAB


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"reduction": "none"}, "'none'"),
        ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        ({"targets": torch.zeros(2, 2, dtype=torch.long)}, r"needs targets \[3, 41\], got \[2, 2\]"),
        ({"weight": torch.zeros(VOCAB, 3)}, r"weight must be \[V, 8\]"),
        ({"bias": torch.zeros(4)}, r"bias must be \[31\]"),
    ],
    ids=["reduction", "chunk", "targets", "weight", "bias"],
)
def test_bad_input(inputs, change, text):
    leaves, targets = inputs
    with pytest.raises(ValueError, match=text):
        chunked_cross_entropy(**{**leaves, "targets": targets, **change})
