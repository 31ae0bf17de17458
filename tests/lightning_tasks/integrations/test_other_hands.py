"""What people do around a loop: accelerate, scalers, compiled models, several optimizers, steps that are left out."""

import json
from contextlib import nullcontext

import pytest
import torch
from torch.nn.functional import cross_entropy

import attnswap
from lightning_tasks.callbacks import AttentionMonitor, EntropyRegularizer, LocAteR, QKClip
from tests.lightning_tasks.callbacks.modules import TinyLM, batches, weights_of
from tests.lightning_tasks.integrations import ranks
from tests.lightning_tasks.programs import run_ranks

CALLBACKS = {
    "AttentionMonitor": lambda: [AttentionMonitor(every_n_steps=1)],
    "LocAteR": lambda: [LocAteR(0.1, gamma=0.1)],
    "QKClip": lambda: [QKClip(tau=0.05)],
    "EntropyRegularizer": lambda: [EntropyRegularizer(0.5, target=0.3)],
}


def of_parts(module):
    """An optimizer of the first layer, and one of the rest."""
    named = list(module.named_parameters())
    first = [each for name, each in named if "layers.0" in name]
    rest = [each for name, each in named if "layers.0" not in name]
    return [torch.optim.SGD(part, lr=0.1, momentum=0.9) for part in (first, rest)]


def trained(
    callbacks,
    optimizers=lambda module: [module.configure_optimizers()],
    call=lambda module: module,
    leave_out=(),  # batches without a step
    data=None,
    divide=1,
    scale=0.0,
    **options,
):
    """What was logged, and the weights; with no callbacks, of a loop that nobody watches."""
    module, rows = TinyLM(), {}
    model, of_module = call(module), optimizers(module)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=bool(scale))

    def log(values, step):
        rows.setdefault(step, {}).update(values)

    watching = attnswap.watch(module, log=log, callbacks=callbacks, optimizer=of_module, **options)
    with watching if callbacks else nullcontext():
        for place, (inputs, targets) in enumerate(data or batches()):
            scaler.scale(cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / divide).backward()
            for optimizer in of_module:
                if place not in leave_out:
                    scaler.step(optimizer)
            scaler.update()
            if place not in leave_out or divide == 1:
                for optimizer in of_module:
                    optimizer.zero_grad()
    return rows, weights_of(module)


@pytest.mark.parametrize("name", CALLBACKS)
def test_several_optimizers_are_as_one_of_all(name):
    together, apart = trained(CALLBACKS[name]()), trained(CALLBACKS[name](), of_parts)
    assert apart[0] == together[0]
    assert torch.equal(apart[1], together[1])


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_step_that_is_left_out_leaves_nothing(name):
    data = list(batches())
    _, left_out = trained(CALLBACKS[name](), leave_out=[1])
    _, without = trained(CALLBACKS[name](), data=data[:1] + data[2:])
    assert torch.equal(left_out, without)


@pytest.mark.costly
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "AttentionMonitor" else pytest.mark.slow) for name in CALLBACKS]
)
def test_a_compiled_model_gives_what_it_gives_watched_or_not(name):
    def call(module):
        torch._dynamo.reset()
        return torch.compile(module, backend="eager")

    rows, weights = trained(CALLBACKS[name](), call=call)
    assert list(rows) == list(range(5))
    if name == "AttentionMonitor":
        assert torch.equal(weights, trained([], call=call)[1])
    torch.testing.assert_close(weights, trained(CALLBACKS[name]())[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mechanisms", [("gated", "rpc"), ("forgetting", "symmetric")])
@pytest.mark.parametrize("of_module", [True, False], ids=["method", "function"])
def test_an_observed_call_runs_no_compiled_part_and_the_next_one_does(mechanisms, of_module):
    """Two kinds of mechanism have parts that would be compiled apart, of which torch fails to report."""
    torch._dynamo.reset()
    runs = []

    def backend(graph, _):
        def run(*inputs):
            runs.append(graph)
            return graph(*inputs)

        return run

    layer = torch.nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for index, mechanism in enumerate(mechanisms):
        attnswap.swap_attention(model, mechanism, layers=[index])
    compiled = torch.compile(model, backend=backend)
    if of_module:
        (compiled := model).compile(backend=backend)
    optimizer, rows, compiled_parts = torch.optim.SGD(model.parameters(), lr=0.1), [], []
    with attnswap.watch(model, every=2, log=lambda values, step: rows.append(step)):
        for _ in range(4):
            compiled(torch.randn(3, 5, 16)).square().mean().backward()
            optimizer.step()
            compiled_parts.append(len(runs))
            runs.clear()
    assert rows == [0, 2]
    assert [each > 0 for each in compiled_parts] == [False, True, False, True]


REFUSED = {
    "backward passes": (
        {"leave_out": [0, 2], "divide": 2},
        "a step has 2 backward passes, and accumulate is 1: give accumulate=2 where each loss is divided by 2",
    ),
    "scaler": ({"scale": 1024.0}, "a GradScaler makes this step, .*: give scaler="),
    "accumulate": ({"accumulate": 0}, "accumulate must be an integer of at least 1, got 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_penalties_enter_as_the_loss_or_not_at_all(name):
    options, message = REFUSED[name]
    for penalty in ("LocAteR", "EntropyRegularizer"):
        with pytest.raises(ValueError, match=message):
            trained(CALLBACKS[penalty](), **options)


@pytest.mark.parametrize("name", ["FullyShardedDataParallel", "DeepSpeedEngine"])
def test_flat_shards_are_refused(name):
    """By the name of the class, as neither can be made without a GPU."""

    class Sharded(TinyLM):
        pass

    Sharded.__name__ = name
    module = Sharded()
    callbacks = [*CALLBACKS["AttentionMonitor"](), LocAteR(0.1)]
    with (
        pytest.raises(ValueError, match=r"AttentionMonitor cannot observe layers here: .* or DDP|; use DDP"),
        attnswap.watch(module, callbacks=callbacks, optimizer=module.configure_optimizers()),
    ):
        pass


@pytest.mark.parametrize("room", ["deepspeed.runtime.zero.stage_1_and_2", "accelerate.utils.deepspeed"])
def test_the_model_inside_deepspeed_is_refused_by_its_optimizer(room):
    module = TinyLM()
    optimizer = type("Sharded", (torch.optim.SGD,), {"__module__": room})(module.parameters(), lr=0.1)
    with (
        pytest.raises(ValueError, match="DeepSpeed keeps gradients in its own buffers; use DDP"),
        attnswap.watch(module, callbacks=[LocAteR(0.1)], optimizer=optimizer),
    ):
        pass


def test_monitors_need_neither_scaler_nor_count():
    for options in ({"leave_out": [0, 2], "divide": 2}, {"scale": 1024.0}):
        watched = trained(CALLBACKS["AttentionMonitor"](), **options)[1]
        assert torch.equal(watched, trained([], **options)[1])


@pytest.mark.parametrize(("precision", "accumulate"), [("no", 1), ("no", 2), ("bf16", 2)])
@pytest.mark.parametrize("name", CALLBACKS)
def test_what_accelerate_prepared_is_what_is_inside(name, precision, accumulate):
    accelerate = pytest.importorskip("accelerate")

    def run(callbacks, prepared):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(
            mixed_precision=precision, gradient_accumulation_steps=accumulate, cpu=True
        )
        module, rows = TinyLM(), {}
        inner = module.configure_optimizers()
        model, optimizer = accelerator.prepare(module, inner)
        watching = attnswap.watch(
            model if prepared else module,
            log=lambda values, step: rows.setdefault(step, {}).update(values),
            callbacks=callbacks,
            optimizer=optimizer if prepared else inner,
            accumulate=accumulate,
        )
        with watching if callbacks else nullcontext():
            for inputs, targets in batches(6):
                with accelerator.accumulate(model):
                    accelerator.backward(cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten()))
                    optimizer.step()
                    optimizer.zero_grad()
        return rows, weights_of(module)

    (rows, weights), inside = run(CALLBACKS[name](), True), run(CALLBACKS[name](), False)
    assert rows == inside[0]
    assert list(rows) == list(range(6 // accumulate))
    assert torch.equal(weights, inside[1])
    assert torch.equal(weights, run([], True)[1]) == (name == "AttentionMonitor")


@pytest.fixture(scope="module")
def two_processes():
    return [json.loads(each.splitlines()[-1]) for each in run_ranks("tests.lightning_tasks.integrations.ranks")]


@pytest.mark.costly
@pytest.mark.parametrize("name", [*ranks.CALLBACKS, "LocAteR, sharded"])
def test_two_processes_are_as_one_of_all_samples(two_processes, name):
    (weights, logged), (other, never) = (each[name] for each in two_processes)
    assert weights == other
    assert (logged, never) == (0 if name == "none" else 3, 0)
    torch.testing.assert_close(
        torch.tensor(weights), ranks.trained(ranks.CALLBACKS[name.partition(",")[0]]())[0], atol=5e-6, rtol=1e-5
    )
    assert (weights == two_processes[0]["none"][0]) == (name in ("none", "AttentionMonitor"))
