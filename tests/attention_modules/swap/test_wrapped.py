"""Models that are wrapped, sharded, compiled, hooked or pruned."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune

from attention_modules.layers import SelfAttention
from attention_modules.mechanisms.softmax import SoftmaxAttention
from attention_modules.swap import (
    AttentionSwapError,
    make_observable,
    make_plain,
    restore_attention,
    swap_attention,
)
from tests.attention_modules.hosts.sdpa.own import DeclaredJoint
from tests.attention_modules.swap.models import (
    DIM,
    HEADS,
    Block,
    NoisyWithoutQuery,
    state_of,
)


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_wrapped_models_are_refused(one_process: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    for wrap, text in [
        (nn.DataParallel, "is of DataParallel.*swap before wrapping the model in DataParallel"),
        (nn.parallel.DistributedDataParallel, "DistributedDataParallel"),
        (lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")), "FullyShardedDataParallel"),
        (lambda model: torch.compile(model, backend="eager"), "OptimizedModule.*swap before torch.compile"),
    ]:
        model = wrap(Block())
        with pytest.raises(AttentionSwapError, match=text):
            swap_attention(model, "softmax")
        with pytest.raises(AttentionSwapError, match=text):
            restore_attention(model)
    model = Block()
    model.compile(backend="eager")
    with pytest.raises(AttentionSwapError, match="compiled"):
        swap_attention(model, "softmax")


def test_a_sharded_model_takes_what_changes_no_parameter(one_process: None) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh, x = dist.init_device_mesh("cpu", (1,)), torch.randn(2, 3, DIM)
    model = fully_shard(Block().eval(), mesh=mesh)
    before, held = model(x).detach(), set(map(id, model.parameters()))
    swap_attention(model, "softmax")
    torch.testing.assert_close(model(x), before)
    for mechanism in (NoisyWithoutQuery, "scaled"):
        options = {"variant": "scalar"} if mechanism == "scaled" else {}
        with pytest.raises(AttentionSwapError, match=r"cannot swap 'attn'.*would make others.*swap_now"):
            swap_attention(model, mechanism, **options)
    assert restore_attention(model) == ["attn"]
    assert set(map(id, model.parameters())) == held
    swapped = Block()
    swap_attention(swapped, NoisyWithoutQuery)
    with pytest.raises(AttentionSwapError, match="fully_shard"):
        restore_attention(fully_shard(swapped, mesh=mesh))


def shard(module: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=dist.init_device_mesh("cpu", (1,)))


@pytest.mark.parametrize(
    ("wrap", "alone"),
    [
        pytest.param(nn.parallel.DistributedDataParallel, False, id="ddp"),
        pytest.param(lambda model: torch.compile(model, backend="eager"), False, id="compile"),
        pytest.param(shard, False, id="fsdp2"),
        pytest.param(lambda model: shard(model.attn), True, id="fsdp2 of the layer"),
        pytest.param(
            lambda model: nn.utils.parametrize.register_parametrization(model.attn, "in_proj_bias", nn.Tanh()),
            False,
            id="parametrization",
        ),
    ],
)
def test_what_monitors_put_in_comes_out_of_whatever_the_model_became(
    one_process: None, wrap: Callable[[nn.Module], object], alone: bool
) -> None:
    from torch.distributed.fsdp import FSDPModule

    model, x = Block(), torch.randn(1, 3, DIM)
    make_observable(model, ["attn"])
    wrap(model)
    expected = model(x)
    make_plain(model, ["attn"])
    assert isinstance(getattr(model.attn, "mechanism", None), SoftmaxAttention) == alone
    assert isinstance(model.attn, FSDPModule) == alone
    torch.testing.assert_close(model(x), expected)


def test_no_parameter_goes_unused_under_ddp(one_process: None) -> None:
    model = Block()
    swap_attention(model, NoisyWithoutQuery)
    model.attn.mechanism.noise.requires_grad_(False)
    wrapped = nn.parallel.DistributedDataParallel(model)
    for _ in range(2):  # the second step fails where the first left a Parameter without a gradient
        wrapped(torch.randn(1, 3, DIM)).sum().backward()


def test_modules_that_accelerate_hooks_are_refused_for_what_they_are() -> None:
    accelerate = pytest.importorskip("accelerate")
    cure = r"remove_hook_from_module\(model, recurse=True\), swap, and dispatch again"
    model = accelerate.cpu_offload(Block(), execution_device=torch.device("cpu"))
    with pytest.raises(AttentionSwapError, match=rf"attn' \(MultiheadAttention\): accelerate keeps .*{cure}"):
        swap_attention(model, "softmax")
    model, x = nn.Sequential(SelfAttention(DIM, HEADS)).eval(), torch.randn(1, 3, DIM)
    plain = model(x)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    before = state_of(model)
    with pytest.raises(AttentionSwapError, match=rf"cannot swap '0': accelerate keeps the Linear's .*{cure}"):
        swap_attention(model, "symmetric")
    assert state_of(model) == before
    swap_attention(model, "softmax")  # which leaves the projections as they are
    torch.testing.assert_close(model(x), plain)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    swap_attention(model, "symmetric")


def gpt() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2Model(transformers.GPT2Config(n_embd=DIM, n_layer=1, n_head=HEADS, vocab_size=9)).eval()


HOOKED: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "torch": (lambda: Block().eval(), torch.randn(1, 3, DIM)),
    "transformers": (gpt, torch.tensor([[5, 1, 3]])),
    "attnswap": (lambda: nn.Sequential(SelfAttention(DIM, HEADS)).eval(), torch.randn(1, 3, DIM)),
    "any": (lambda: nn.Sequential(DeclaredJoint()).eval(), torch.randn(1, 3, 16)),
}


@pytest.mark.parametrize("mechanism", ["softmax", "sink", "symmetric"])
@pytest.mark.parametrize("host", HOOKED)
def test_hooks_that_accelerate_took_out_leave_no_trace(host: str, mechanism: str) -> None:
    hooks = pytest.importorskip("accelerate").hooks
    build, x = HOOKED[host]
    torch.manual_seed(0)
    model, expected = build(), build()
    expected.load_state_dict(model.state_dict())
    plain = tensor_of(model(x))
    for each in (expected, model):
        if each is model:
            hooks.attach_execution_device_hook(model, "cpu")  # as dispatch_model does, around each part
            hooks.remove_hook_from_module(model, recurse=True)
        swap_attention(each, mechanism)
        for name, parameter in each.named_parameters():
            nn.init.constant_(parameter, 2.0) if "mechanism" in name else None
    swapped = tensor_of(model(x))
    assert torch.equal(swapped, tensor_of(expected(x)))
    assert torch.equal(swapped, plain) == (mechanism == "softmax")
    hooks.attach_execution_device_hook(model, "cpu")
    with pytest.raises(AttentionSwapError, match=r"forward was replaced on the object|accelerate keeps"):
        restore_attention(model)
    assert torch.equal(tensor_of(model(x)), swapped)
    hooks.remove_hook_from_module(model, recurse=True)
    assert len(restore_attention(model)) == 1
    assert torch.equal(tensor_of(model(x)), plain)


def tensor_of(out: object) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out[0]


def test_hooks_stay() -> None:
    model, seen = Block(), []
    model.attn.register_forward_hook(lambda *_: seen.append(1))
    swap_attention(model, "softmax")
    model(torch.randn(1, 3, DIM))
    assert seen == [1]


def test_a_compiled_swapped_layer_pickles() -> None:
    model, x = Block().eval(), torch.randn(1, 3, DIM)
    swap_attention(model, "softmax")
    model.attn.compile(backend="eager")
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_pruned_projection_keeps_its_query(name: str) -> None:
    model = nn.Sequential(SelfAttention(8, 2, qkv_bias=True))
    prune.l1_unstructured(model[0].qkv, name, 0.5)
    x = torch.randn(2, 5, 8)
    plain = model(x)
    with pytest.raises(AttentionSwapError, match=f"the {name} of its projection 'qkv' is computed at each call"):
        swap_attention(model, "rpc")
    torch.testing.assert_close(model(x), plain)
    swap_attention(model, "softmax")
    torch.testing.assert_close(model(x), plain)
    prune.remove(model[0].qkv, name)
    swap_attention(model, "rpc")
    assert model(x).shape == x.shape


@pytest.mark.parametrize("mechanism", ["rpc", "symmetric"])
def test_a_restored_projection_has_its_parameters_in_the_order_that_it_had(mechanism: str) -> None:
    """By which states of optimizers find them."""
    transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=9, **sizes))
    prune.remove(prune.l1_unstructured(model.encoder.layer[0].attention.self.query, "weight", 0.5), "weight")
    before = [(name, each.shape) for name, each in model.named_parameters()]
    swap_attention(model, mechanism)
    restore_attention(model)
    assert [(name, each.shape) for name, each in model.named_parameters()] == before
