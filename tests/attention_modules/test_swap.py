"""Planning, refusing and reporting of swaps, and what carries over."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import prune

from attention_modules.hosts import attention_layers
from attention_modules.hosts.discovery import Skipped
from attention_modules.layers import SelfAttention
from attention_modules.mechanism import AttentionMechanism, AttentionSpec
from attention_modules.mechanisms.softmax import SoftmaxAttention
from attention_modules.swap import (
    AttentionSwapError,
    SwapReport,
    make_observable,
    make_plain,
    restore_attention,
    swap_attention,
)

DIM, HEADS = 8, 2


class Noisy(SoftmaxAttention):
    """Plain attention with a random Parameter, a buffer and dropout of its own."""

    def __init__(self, spec: AttentionSpec, fail_at: int = -1) -> None:
        super().__init__(spec)
        if spec.layer_index == fail_at:
            raise ValueError(f"layer {fail_at} refuses")
        self.noise = nn.Parameter(torch.randn(3))
        self.register_buffer("count", torch.zeros(1))


class NoisyWithoutQuery(Noisy):
    """The same, of keys alone."""

    uses_query = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *args: object, **kwargs: object) -> Tensor:
        return super().forward(k, k, v, *args, **kwargs)


def mha() -> nn.MultiheadAttention:
    return nn.MultiheadAttention(DIM, HEADS, batch_first=True)


class Block(nn.Module):
    """An attention layer and a linear one."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = mha(), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attn(x, x, x, need_weights=False)[0])


class Pyramid(nn.Module):
    """Three blocks, and modules that look like attention."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.head = AttentionPool()

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class AttentionPool(nn.Module):
    """Attention-like, by name alone."""


class WindowAttention(nn.Module):
    """Another library's layer."""


class OwnForward(nn.MultiheadAttention):
    """A host's class with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x)[0]


class SameForward(nn.MultiheadAttention):
    """A host's class by another name."""


def state_of(model: nn.Module) -> list[tuple[str, type, list[int], list[str]]]:
    """All that a swap could change: classes, Parameters, children."""
    return [
        (
            name,
            type(module),
            [id(p) for p in module._parameters.values()],
            list(module._modules) + list(module._buffers),
        )
        for name, module in model.named_modules()
    ]


def names(report: SwapReport) -> list[str]:
    return [row.name for row in report]


ALL = ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({}, ALL),
        ({"where": "blocks.1.*"}, ALL[1:2]),
        ({"where": ["blocks.0.attn", "blocks.2.attn"]}, [ALL[0], ALL[2]]),
        ({"where": lambda name, module: isinstance(module, nn.Module) and name.endswith("2.attn")}, ALL[2:]),
        ({"layers": 0}, ALL[:1]),
        ({"layers": [-1, 0, 2]}, [ALL[0], ALL[2]]),
        ({"where": "blocks.[12].*", "layers": [0]}, ALL[1:2]),
        ({"exclude": "*.1.attn"}, [ALL[0], ALL[2]]),
        ({"exclude": lambda name, module: "0" in name}, ALL[1:]),
        ({"layers": [0, 1], "exclude": ["blocks.0.attn"]}, ALL[1:2]),
    ],
    ids=["all", "glob", "list", "callable", "layer", "layers", "where-layers", "exclude", "exclude-callable", "both"],
)
def test_selection(choice: dict, expected: list[str]) -> None:
    model = Pyramid()
    assert names(swap_attention(model, "softmax", **choice)) == expected
    assert [layer.name for layer in attention_layers(model) if layer.mechanism is not None] == expected
    assert [layer.name for layer in attention_layers(Pyramid(), **choice)] == expected


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"where": "blocks.9.attn"}, r"matches no module name.*Did you mean 'blocks\..\.attn'"),
        ({"where": "blocks.0.mlp"}, r"names 'blocks.0.mlp' \(Linear\), which is no attention layer"),
        ({"where": "head"}, r"unsupported host: attention pooling.*Known hosts: .*timm.*Hugging Face"),
        ({"where": ["blocks.0.attn", "nothing"]}, r"where='nothing' matches no module name"),
        ({"where": lambda name, module: False}, r"selects no self-attention layer; the model has: 'blocks.0.attn'"),
        ({"exclude": "blocks.7.attn"}, r"exclude='blocks.7.attn' matches no module name"),
        ({"exclude": "*"}, r"leaves none of the 3"),
        ({"layers": [3]}, r"3 is out of range, 3 self-attention layers match \(0 to 2"),
        ({"layers": [-4]}, r"-4 is out of range"),
        ({"layers": []}, r"layers is empty"),
        ({"layers": ["0"]}, r"takes integers, got '0'"),
        ({"where": [1]}, r"takes name patterns or a callable, got 1"),
        ({"mechanism": "sofmax"}, r"unknown attention mechanism 'sofmax'.*softmax"),
        ({"mechanism": Noisy, "fail_at": 2}, r"layer 2 refuses"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:20],
)
def test_errors_name_the_value_and_change_nothing(arguments: dict, text: str) -> None:
    model = Pyramid()
    before, rng = state_of(model), torch.get_rng_state()
    with pytest.raises(ValueError, match=text):
        swap_attention(model, **{"mechanism": Noisy, **arguments})
    assert state_of(model) == before
    assert torch.equal(torch.get_rng_state(), rng)


def test_bad_options_change_nothing() -> None:
    model = Pyramid()
    before = state_of(model)
    with pytest.raises(TypeError, match=r"RPCAttention has no option 'iteration'.*Did you mean 'iterations'"):
        swap_attention(model, "rpc", iteration=3)
    assert state_of(model) == before


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (nn.Linear(2, 2), "the model has no attention layer; known hosts: attnswap"),
        (nn.Sequential(WindowAttention()), r"0 \(WindowAttention\): no host knows tests.*WindowAttention"),
        (nn.Sequential(OwnForward(DIM, HEADS)), "unsupported subclass: OwnForward .* forward of its own"),
    ],
    ids=["no-attention", "unknown", "subclass"],
)
def test_models_without_a_host(model: nn.Module, text: str) -> None:
    with pytest.raises(AttentionSwapError, match=text):
        swap_attention(model, "softmax")
    with pytest.raises(AttentionSwapError, match=text):
        attention_layers(model)


def test_a_failure_in_the_middle_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    from attention_modules.hosts.torch import MultiheadAttentionHost

    insert, model = MultiheadAttentionHost.insert, Pyramid()

    def failing(self: MultiheadAttentionHost, layer: nn.Module, mechanism: AttentionMechanism) -> None:
        insert(self, layer, mechanism)
        if mechanism.spec.layer_index == 1:
            raise MemoryError("no room")

    monkeypatch.setattr(MultiheadAttentionHost, "insert", failing)
    before, x = state_of(model), torch.randn(1, 3, DIM)
    plain = model(x)
    with pytest.raises(MemoryError):
        swap_attention(model, NoisyWithoutQuery)
    assert state_of(model) == before
    assert torch.equal(model(x), plain)


def test_subclass_that_changes_nothing_is_swapped_as_itself() -> None:
    model = nn.Sequential(SameForward(DIM, HEADS))
    swap_attention(model, "softmax")
    assert isinstance(model[0], SameForward)
    restore_attention(model)
    assert type(model[0]) is SameForward


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_wrapped_models_are_refused(one_process: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    for wrap, text in [
        (nn.DataParallel, "is a DataParallel.*swap before wrapping the model in DataParallel"),
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
        with pytest.raises(AttentionSwapError, match=r"cannot swap 'attn'.*would make others.*before_shard"):
            swap_attention(model, mechanism, **options)
    assert restore_attention(model) == ["attn"]
    assert set(map(id, model.parameters())) == held
    swapped = Block()
    swap_attention(swapped, NoisyWithoutQuery)
    with pytest.raises(AttentionSwapError, match="fully_shard"):
        restore_attention(fully_shard(swapped, mesh=mesh))


def test_what_monitors_put_in_comes_out_of_whatever_the_model_became(one_process: None) -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = dist.init_device_mesh("cpu", (1,))
    x = torch.randn(1, 3, DIM)
    for wrap, alone in [
        (nn.parallel.DistributedDataParallel, False),
        (lambda model: torch.compile(model, backend="eager"), False),
        (lambda model: fully_shard(model, mesh=mesh), False),
        (lambda model: fully_shard(model.attn, mesh=mesh), True),
        (lambda model: nn.utils.parametrize.register_parametrization(model.attn, "in_proj_bias", nn.Tanh()), True),
    ]:
        model = Block()
        make_observable(model, ["attn"])
        wrap(model)
        expected = model(x)
        make_plain(model, ["attn"])
        assert isinstance(getattr(model.attn, "mechanism", None), SoftmaxAttention) == alone
        assert isinstance(model.attn, FSDPModule) == (alone and not nn.utils.parametrize.is_parametrized(model.attn))
        torch.testing.assert_close(model(x), expected)


def test_no_parameter_goes_unused_under_ddp(one_process: None) -> None:
    model = Block()
    swap_attention(model, NoisyWithoutQuery)
    model.attn.mechanism.noise.requires_grad_(False)
    wrapped = nn.parallel.DistributedDataParallel(model)
    for _ in range(2):  # the second step fails where the first left a Parameter without a gradient
        wrapped(torch.randn(1, 3, DIM)).sum().backward()


def test_the_report_lists_what_was_and_what_was_not_swapped() -> None:
    model = Pyramid()
    report = swap_attention(model, NoisyWithoutQuery, where="blocks.*", exclude="blocks.1.*", layers=[0, 1])
    (row,) = report
    whole = sum(p.numel() for p in mha().parameters())
    assert (row.host, row.mechanism, row.dim, row.heads) == ("torch MultiheadAttention", "NoisyWithoutQuery", 8, 2)
    assert (row.before, row.after) == (whole, whole - DIM * DIM - DIM + 3)
    assert [(skipped.name, skipped.reason) for skipped in report.skipped] == [
        ("blocks.1.attn", "excluded"),
        ("blocks.2.attn", "not selected"),
        ("head", "attention pooling: its queries are no tokens of the sequence"),
    ]
    printed = str(report)
    for text in ("blocks.0.attn", "NoisyWithoutQuery", "288", "1 swapped", "not swapped (3):", "AttentionPool"):
        assert text in printed
    second = swap_attention(model, "softmax", where="blocks.*", layers=[2])
    assert second.skipped[0] == Skipped(
        "blocks.0.attn", "MultiheadAttention", "not selected: it keeps NoisyWithoutQuery"
    )


def test_cross_attention_is_skipped_unless_named() -> None:
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(DIM, HEADS, 16, batch_first=True), 2)
    report = swap_attention(model, "softmax", where="layers.*")
    assert names(report) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert [skipped.name for skipped in report.skipped] == ["layers.0.multihead_attn", "layers.1.multihead_attn"]
    assert all("cross-attention" in skipped.reason for skipped in report.skipped)
    restore_attention(model)
    x, memory = torch.randn(2, 3, DIM), torch.randn(2, 5, DIM)
    plain = model.eval()(x, memory)
    before = state_of(model)
    with pytest.raises(AttentionSwapError, match="cross-attention needs a query, which NoisyWithoutQuery"):
        swap_attention(model, NoisyWithoutQuery, where=["*.multihead_attn", "*.self_attn"])
    assert state_of(model) == before
    assert names(swap_attention(model, "softmax", where="*.multihead_attn", exclude="layers.1.*")) == [
        "layers.0.multihead_attn"
    ]
    torch.testing.assert_close(model(x, memory), plain, atol=1e-5, rtol=1e-5)


def test_cross_attention_alone_says_how_to_name_it() -> None:
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(DIM, HEADS, 16, batch_first=True), 2)
    with pytest.raises(AttentionSwapError, match=r"cross-attention only .*layers.0.mul.*'\*\.multihead_attn'"):
        swap_attention(model, "softmax", where="*multihead_attn")
    alone = nn.MultiheadAttention(DIM, HEADS, kdim=4, vdim=4)
    with pytest.raises(AttentionSwapError, match=r"cross-attention only .'the model'.*where=''"):
        swap_attention(alone, "softmax")
    assert len(swap_attention(alone, "softmax", where="")) == 1


def test_other_peoples_cross_attention_is_known_by_its_name() -> None:
    model = nn.ModuleDict({"self_attn": mha(), "cross_attn": mha()})
    assert names(swap_attention(model, NoisyWithoutQuery)) == ["self_attn"]


def test_hosts_do_not_import_their_libraries() -> None:
    code = (
        "import sys, attention_modules.swap; print(*{'timm', 'transformers', 'peft', 'lightning'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_state_carries_over() -> None:
    model = Pyramid().double().eval()
    model.blocks[0].attn.in_proj_weight.requires_grad_(False)
    model.blocks[0].attn.in_proj_bias._no_weight_decay = True
    rng = torch.get_rng_state()
    swap_attention(model, NoisyWithoutQuery)
    assert torch.equal(torch.get_rng_state(), rng)
    for block in model.blocks:
        assert block.attn.mechanism.noise.dtype == block.attn.mechanism.count.dtype == torch.float64
        assert not block.attn.mechanism.training
    assert not torch.equal(model.blocks[0].attn.mechanism.noise, model.blocks[1].attn.mechanism.noise)
    assert not model.blocks[0].attn.in_proj_weight.requires_grad
    assert model.blocks[1].attn.in_proj_weight.requires_grad
    assert model.blocks[0].attn.in_proj_bias._no_weight_decay
    assert [block.attn.mechanism.spec.layer_index for block in model.blocks] == [0, 1, 2]
    restore_attention(model)
    assert not model.blocks[0].attn.in_proj_weight.requires_grad
    swap_attention(model.train(), Noisy)
    assert model.blocks[0].attn.mechanism.training


def test_meta_device_swaps() -> None:
    with torch.device("meta"):
        model = Pyramid()
    swap_attention(model, NoisyWithoutQuery)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}


def test_parameters_stay_the_same_objects_where_the_query_is_used() -> None:
    model = Pyramid()
    before = dict(model.named_parameters())
    swap_attention(model, Noisy)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert sorted(set(after) - set(before)) == [f"{name}.mechanism.noise" for name in ALL]


def test_swapping_again_replaces_and_restore_returns_to_the_original() -> None:
    model, x = Pyramid().eval(), torch.randn(2, 3, DIM)
    plain, before = model(x), [type(module) for module in model.modules()]
    for mechanism in (Noisy, NoisyWithoutQuery, "softmax", NoisyWithoutQuery, NoisyWithoutQuery):
        swap_attention(model, mechanism)
    assert len([module for module in model.modules() if isinstance(module, AttentionMechanism)]) == 3
    kept = model.blocks[0].attn.in_proj_weight
    swap_attention(model, NoisyWithoutQuery)
    assert model.blocks[0].attn.in_proj_weight is kept
    assert restore_attention(model) == ALL
    assert torch.equal(model(x), plain)
    assert [type(module) for module in model.modules()] == before
    assert restore_attention(model) == []


def test_restore_after_training_has_the_current_keys_and_values_with_the_kept_query() -> None:
    model = Block()
    whole = model.attn.in_proj_weight.detach().clone()
    swap_attention(model, NoisyWithoutQuery)
    with torch.no_grad():
        model.attn.in_proj_weight.add_(1.0)
    restore_attention(model)
    assert torch.equal(model.attn.in_proj_weight[:DIM], whole[:DIM])
    assert torch.equal(model.attn.in_proj_weight[DIM:], whole[DIM:] + 1)


def test_a_shared_layer_is_swapped_once_and_found_by_either_name() -> None:
    model = nn.Module()
    model.first = mha()
    model.second, model.third = model.first, mha()
    report = swap_attention(model, NoisyWithoutQuery, where="second")
    assert names(report) == ["first"]
    assert model.second is model.first
    assert names(swap_attention(model, "softmax", exclude="second")) == ["third"]


def test_tied_projections_are_refused_where_the_query_is_dropped() -> None:
    model = nn.ModuleList([mha(), mha()])
    model[1].in_proj_weight = model[0].in_proj_weight
    with pytest.raises(AttentionSwapError, match="in_proj_weight is tied to another module"):
        swap_attention(model, NoisyWithoutQuery)
    assert len(swap_attention(model, Noisy)) == 2


def test_a_projection_that_two_layers_share_is_refused_where_the_query_is_dropped() -> None:
    model = nn.ModuleList([SelfAttention(DIM, HEADS), SelfAttention(DIM, HEADS)])
    model[1].qkv = model[0].qkv
    before = state_of(model)
    with pytest.raises(AttentionSwapError, match=r"cannot swap '0': its qkv.weight is tied .*\(1\.qkv\.weight\)"):
        swap_attention(model, "symmetric")
    assert state_of(model) == before
    assert len(swap_attention(model, "softmax")) == 2


def test_a_layer_that_stands_in_two_places_is_no_tie() -> None:
    shared = Block()
    model = nn.Sequential(shared, shared)
    assert names(swap_attention(model, NoisyWithoutQuery)) == ["0.attn"]
    x = torch.randn(1, 3, DIM)
    assert torch.isfinite(model(x)).all()
    assert restore_attention(model) == ["0.attn"]


def test_modules_that_accelerate_hooks_are_refused_for_what_they_are() -> None:
    accelerate = pytest.importorskip("accelerate")
    cure = r"remove_hook_from_module\(model, recurse=True\), swap, and dispatch again"
    model = accelerate.cpu_offload(Block(), execution_device=torch.device("cpu"))
    with pytest.raises(AttentionSwapError, match=rf"attn \(MultiheadAttention\): accelerate keeps .*{cure}"):
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


def test_a_callable_and_its_spec() -> None:
    specs: list[AttentionSpec] = []

    def factory(spec: AttentionSpec) -> AttentionMechanism:
        specs.append(spec)
        return SoftmaxAttention(spec)

    swap_attention(Pyramid(), factory, layers=[1])
    assert specs == [AttentionSpec(DIM, HEADS, DIM // HEADS, layer_index=1)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kept_rows_move_to_the_gpu() -> None:
    model, x = Block().cuda().eval(), torch.randn(1, 3, DIM).cuda()
    plain, rng = model(x), torch.cuda.get_rng_state()
    swap_attention(model, NoisyWithoutQuery)
    assert torch.equal(torch.cuda.get_rng_state(), rng)
    assert model.attn.mechanism.noise.is_cuda
    restore_attention(model.cpu().cuda())
    assert torch.equal(model(x), plain)


@pytest.mark.parametrize("argument", [{"layers": 0.5}, {"where": 1}, {"exclude": 5}], ids=str)
def test_selectors_of_the_wrong_type_are_named(argument: dict) -> None:
    ((name, value),) = argument.items()
    with pytest.raises(AttentionSwapError, match=f"{name} takes .*got {value}"):
        swap_attention(nn.Sequential(SelfAttention(8, 2)), "rpc", **argument)


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


@pytest.mark.parametrize("mechanism", ["rpc", "scaled"])
def test_a_model_swapped_in_inference_mode_trains(mechanism: str) -> None:
    model = nn.Sequential(*(SelfAttention(8, 2, num_tokens=5) for _ in range(2)))
    with torch.inference_mode():
        swap_attention(model, mechanism)
    model(torch.randn(2, 5, 8)).sum().backward()
    with torch.inference_mode():
        restore_attention(model)
    model(torch.randn(2, 5, 8)).sum().backward()


@pytest.mark.parametrize("call", [lambda model: swap_attention(model, "rpc"), restore_attention, attention_layers])
@pytest.mark.parametrize("model", ["resnet", Pyramid], ids=["name", "class"])
def test_something_else_than_a_module_is_refused(call, model) -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module that is built, got .*; build it first"):
        call(model)
