"""The guard against NaN: what it stops at, what it names and saves, what it leaves out, and that it changes nothing."""

import csv
import math
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import timm.optim
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_tasks import LanguageModelingTask
from lightning_tasks.callbacks import LocAteR, NonFiniteGuard, non_finite_guard as guard_module
from lightning_tasks.runs.divergence import SKIPPED, STOPPED
from lightning_tasks.training.non_finite import Flags, NonFiniteError, dataset_indices, plain
from tests.lightning_tasks.callbacks.modules import (
    TinyLM,
    TwoOptimizers,
    batches,
    fit,
    keeping,
    stepping,
    weights_of,
)
from tests.lightning_tasks.language_data import SMALL, RandomText, trainer
from tests.rows import each_row


def read_metrics(folder):
    """The rows of a CSV log."""
    with (Path(folder) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


class Poisoned(TinyLM):
    """Its loss, or the gradient alone, is NaN (or infinite) at some batches."""

    def __init__(self, at=(2,), value=math.nan, gradient_only=False, optimizer="AdamW"):
        super().__init__()
        self.at, self.value, self.gradient_only, self.kind = at, value, gradient_only, optimizer
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(weights_of(self))
        loss = super().training_step(batch, batch_idx)
        if batch_idx in self.at:
            bias = self.net["head"].bias
            return loss + (0 * bias).square().sqrt().sum() if self.gradient_only else loss * self.value
        return loss

    def configure_optimizers(self):
        return (getattr(torch.optim, self.kind, None) or getattr(timm.optim, self.kind))(self.parameters(), lr=0.01)


@pytest.fixture(params=["at once", "late"])
def reading(request, monkeypatch):
    """Both ways of reading what was found: before the step, and at the next one as on CUDA."""
    monkeypatch.setattr(guard_module, "reads_late", lambda module: request.param == "late")
    return request.param


def stopped(module, *callbacks, guard=None, **options):
    with pytest.raises(NonFiniteError) as raised:
        fit(module, [*callbacks, guard or NonFiniteGuard()], **options)
    return str(raised.value)


@pytest.mark.parametrize(("value", "said"), [(math.nan, "nan"), (-math.inf, "-inf")])
def test_it_stops_at_the_first_and_says_and_saves_which(value, said, reading, tmp_path):
    module = Poisoned(value=value)
    text = stopped(module, logger=CSVLogger(tmp_path))
    folder = tmp_path / "lightning_logs" / "version_0"
    assert text.startswith(f"step 2 (epoch 0, batch 2): the loss is {said}, and the gradient of ")
    assert "of the samples 4, 5 of the training data" in text
    assert f"the batch is in {folder / 'non_finite_step_2.pt'} (" in text
    saved = torch.load(folder / "non_finite_step_2.pt", weights_only=True)
    expected = list(batches())[2]
    assert all(torch.equal(*pair) for pair in zip(saved["batch"], expected, strict=True))
    place = {name: saved[name] for name in ("step", "epoch", "batch_idx", "indices")}
    assert place == {"step": 2, "epoch": 0, "batch_idx": 2, "indices": [4, 5]}
    assert str(saved["losses"]) == f"[{said}]"
    assert "net.head.bias" in saved["parameters"]
    assert len(module.seen) == (3 if reading == "at once" else 4)
    assert weights_of(module).isfinite().all() == (reading == "at once")
    assert [row[STOPPED] for row in read_metrics(folder) if row.get(STOPPED)] == ["1.0"]


def test_a_gradient_alone_stops_it_and_its_parameter_is_named(reading):
    text = stopped(Poisoned(gradient_only=True))
    assert "the loss is 2." in text
    assert "the gradient of 1 of 27 parameters is not finite: net.head.bias; the batch" in text
    assert "as the run has no folder" in text


def test_the_saved_batch_shows_the_same_again(tmp_path):
    class Drops(Poisoned):
        def forward(self, tokens):
            return torch.nn.functional.dropout(super().forward(tokens))

    module = Drops(gradient_only=True)
    stopped(module, guard=NonFiniteGuard(folder=str(tmp_path)))
    saved = torch.load(tmp_path / "non_finite_step_2.pt", weights_only=True)
    torch.set_rng_state(saved["random_states"][0])
    torch.testing.assert_close(module.training_step(saved["batch"], 2).item(), saved["losses"][0])


def test_no_checkpoint_has_weights_that_are_not_finite(reading, tmp_path):
    every = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    stopped(Poisoned(), every, enable_checkpointing=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=1.ckpt", "step=2.ckpt"]


def test_what_was_found_at_the_last_step_is_read_before_the_end(reading):
    assert stopped(Poisoned(at=(4,))).startswith("step 4 ")
    assert stopped(Poisoned(at=(1,)), val_loader=batches(), val_check_interval=2).startswith("step 1 ")


@pytest.mark.parametrize("gradient_only", [True, False])
def test_with_accumulation_it_names_the_batch_of_the_window(gradient_only, reading):
    text = stopped(Poisoned(at=(3,), gradient_only=gradient_only), accumulate_grad_batches=3, loader=batches(6))
    assert text.startswith("step 1 (epoch 0, batch 3): the loss is " + ("2." if gradient_only else "nan"))
    assert "samples 6, 7 of" in text


def test_manual_optimization(reading):
    class Manual(TwoOptimizers):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                torch.nn.init.constant_(self.net["head"].bias, math.nan)
            super().training_step(batch, batch_idx)

    text = stopped(Manual())
    assert text.startswith("step 2 (epoch 0, batch 2): the loss is nan")
    assert ("parameters were not finite before: net.head.bias;" in text) == (reading == "at once")


def test_a_step_is_judged_by_its_own_backward_passes():
    class First(TwoOptimizers):
        def manual_backward(self, loss):
            self.passes = getattr(self, "passes", 0) + 1
            super().manual_backward(loss * math.nan if self.passes == 3 else loss)

    module, guard = First(), NonFiniteGuard("skip", max_consecutive_skips=1)
    with pytest.warns(UserWarning, match="skipped step"):
        fit(module, [guard], loader=batches(4))
    assert (module.passes, guard.skipped) == (8, 1)


def test_a_loss_behind_a_step_is_one_of_its_own_batch():
    """Of an optimizer that gathers over batches, while another steps in each."""

    class Gathers(TwoOptimizers):
        def training_step(self, batch, batch_idx):
            first, second = self.optimizers()
            self.manual_backward(TinyLM.training_step(self, batch, batch_idx))
            first.step()
            self.manual_backward(TinyLM.training_step(self, batch, batch_idx) + (math.inf if batch_idx == 2 else 0))
            if batch_idx % 2:
                second.step()
            self.zero_grad()

    assert stopped(Gathers(), loader=batches(4)).startswith("step 2 (epoch 0, batch 2): the loss is inf")


def test_where_all_backward_passes_come_first_each_step_is_judged_by_all():
    class Together(TwoOptimizers):
        def training_step(self, batch, batch_idx):
            losses = [TinyLM.training_step(self, batch, batch_idx) for _ in self.optimizers()]
            self.manual_backward(losses[0])
            self.manual_backward(losses[1] + (math.inf if batch_idx == 1 else 0))  # whose gradients are finite
            before = weights_of(self)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
            self.moved = [*getattr(self, "moved", []), not torch.equal(weights_of(self), before)]

    module, guard = Together(), NonFiniteGuard("skip")
    with pytest.warns(UserWarning, match="skipped step"):
        fit(module, [guard], loader=batches(3))
    assert (module.moved, guard.skipped) == ([True, False, True], 2)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_skipped_step_is_one_that_was_not_taken(optimizer, tmp_path, capsys):
    class LeavesOut(Poisoned):
        def training_step(self, batch, batch_idx):
            return None if batch_idx in self.at else super().training_step(batch, batch_idx)

    guard, skips, leaves_out = NonFiniteGuard("skip"), Poisoned(optimizer=optimizer), LeavesOut(optimizer=optimizer)
    logger = CSVLogger(tmp_path)
    with pytest.warns(UserWarning, match="skipped step 2 .*the loss is nan"):
        run = fit(skips, [guard], logger=logger, gradient_clip_val=1.0)
    fit(leaves_out, gradient_clip_val=1.0)
    assert torch.equal(weights_of(skips), weights_of(leaves_out))
    assert run.global_step == 5
    assert guard.skipped == 1
    assert "skipped: 1 optimizer steps" in capsys.readouterr().out
    logger.save()
    assert [(row["step"], row[SKIPPED]) for row in read_metrics(logger.log_dir) if row.get(SKIPPED)] == [("2", "1.0")]
    assert torch.load(f"{logger.log_dir}/non_finite_step_2.pt", weights_only=True)["indices"] == [4, 5]


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_a_batch_whose_step_the_module_leaves_out_is_no_fault(action, reading):
    guarded, plain = (stepping(Poisoned, lambda batch: batch != 2)() for _ in range(2))
    guard = NonFiniteGuard(action)
    fit(guarded, [guard])
    fit(plain)
    assert torch.equal(weights_of(guarded), weights_of(plain))
    assert guard.skipped == 0


def test_a_fault_among_batches_that_the_module_gathers_itself_is_named(reading):
    assert "batch 2): the loss is nan" in stopped(keeping(Poisoned, 5)())


def test_skips_in_a_row_end_the_run_and_others_do_not():
    guard = NonFiniteGuard("skip", max_consecutive_skips=2)
    text = stopped(Poisoned(at=range(3, 9)), guard=guard, loader=batches(9))
    assert text.startswith("3 steps in a row were not finite; the last: step 5 ")
    guard = NonFiniteGuard("skip", max_consecutive_skips=2)
    fit(Poisoned(at=(0, 1, 3, 4, 6)), [guard], loader=batches(9))
    assert guard.skipped == 5


def test_skips_are_counted_on_in_a_resumed_run(tmp_path):
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    fit(Poisoned(at=(1,)), [NonFiniteGuard("skip"), keep], enable_checkpointing=True)
    states = {path.name: torch.load(path, weights_only=True)["callbacks"] for path in tmp_path.iterdir()}
    assert not any(name.startswith("NonFiniteGuard") for name in states["step=1.ckpt"])  # as of a run without it
    again = NonFiniteGuard("skip")
    run = import_module("lightning.pytorch").Trainer(
        accelerator="cpu", max_epochs=1, logger=False, callbacks=[again], enable_progress_bar=False
    )
    run.fit(Poisoned(at=()), batches(), ckpt_path=tmp_path / "step=5.ckpt")
    assert again.skipped == 1


# -- half precision ----------------------------------------------------------------------------------------------------


class Overflows(Poisoned):
    """Its gradient overflows with a loss scale above ``limit``."""

    def __init__(self, limit, **options):
        super().__init__(**options)
        self.limit, self.scales = limit, []

    def on_before_backward(self, loss):
        scale = self.trainer.precision_plugin.scaler.get_scale()
        self.scales.append(scale)
        if scale > self.limit:
            self.net["head"].bias.register_hook(lambda gradient: gradient * math.inf)


def fp16():
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**16))


def test_overflows_of_a_loss_scale_are_the_scalers():
    module = Overflows(limit=2.0**13, at=())
    module.on_before_backward = _once_a_step(module)
    fit(module, [NonFiniteGuard()], plugins=[fp16()])
    assert module.scales == [2.0**16, 2.0**15, 2.0**14, 2.0**13, 2.0**13]


def test_a_loss_that_is_nan_or_a_scale_that_collapses_stops_in_fp16():
    module = Poisoned()
    text = stopped(module, plugins=[fp16()])
    assert text.startswith("step 2 (epoch 0, batch 2): the loss is nan")
    module = Overflows(limit=0.0, at=())
    text = stopped(module, plugins=[fp16()], loader=batches(30))
    assert text.startswith("20 steps in a row were not finite; the last: step 19 (epoch 0, batch 19): the loss is ")
    assert "the gradient of 1 of 27 parameters is not finite: net.head.bias" in text


def test_skipping_in_fp16_leaves_the_step_to_the_scaler():
    guard, module = NonFiniteGuard("skip"), Poisoned()
    fit(module, [guard], plugins=[fp16()])
    assert guard.skipped == 1
    assert torch.equal(module.seen[2], module.seen[3])
    assert weights_of(module).isfinite().all()


def _once_a_step(module):
    """A hook on the gradient for one backward pass only."""
    handles = []

    def overflow(loss):
        for handle in handles:
            handle.remove()
        scale = module.trainer.precision_plugin.scaler.get_scale()
        module.scales.append(scale)
        if scale > module.limit:
            handles.append(module.net["head"].bias.register_hook(lambda gradient: gradient * math.inf))

    return overflow


# -- it changes nothing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "options"),
    [
        ("stop", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
        ("skip", {"gradient_clip_val": 0.5}),
        ("skip", {"precision": "bf16-mixed"}),
    ],
)
def test_a_healthy_run_is_bitwise_the_same(action, options, reading):
    runs = []
    for callbacks in ([], [NonFiniteGuard(action)]):
        torch.manual_seed(4)
        module = Drawing(at=())
        fit(module, callbacks, **options)
        runs.append((weights_of(module), torch.get_rng_state()))
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


class Drawing(Poisoned):
    """Draws random numbers in each step."""

    def forward(self, tokens):
        return torch.nn.functional.dropout(super().forward(tokens))


# -- parts -------------------------------------------------------------------------------------------------------------


def test_flags_know_sparse_empty_and_half_precision_gradients():
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in KINDS]
    without = torch.nn.Parameter(torch.zeros(1))
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 6e4 if parameter.dtype == torch.float16 else 1.0)
    parameters[0].grad = parameters[0].grad.to_sparse()
    flags = Flags([torch.tensor(1e300, dtype=torch.float64)], [*parameters, without], shared=False)
    assert flags.read() == (False, [])  # 6e4 squared is beyond fp16, 1e300 beyond fp32
    parameters[0].grad = (parameters[0].grad.to_dense() * math.nan).to_sparse()
    parameters[2].grad[1] = math.inf
    loss, bad = Flags([torch.tensor(math.nan)], parameters, shared=False).read()
    assert loss
    assert [id(parameter) for parameter in bad] == [id(parameters[0]), id(parameters[2])]
    assert Flags([], [without], shared=False).read() == (False, [])


KINDS = [((3, 2), torch.float32), ((0,), torch.float32), ((300,), torch.float16), ((3,), torch.float64)]


def test_large_finite_gradients_are_finite():
    """Their norm in float32 is not."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 1e25)
    assert Flags([torch.tensor(1.0)], [parameter], shared=False).read() == (False, [])
    parameter.grad[2] = torch.inf
    assert Flags([torch.tensor(1.0)], [parameter], shared=False).read() == (False, [parameter])


def test_indices_are_known_where_the_order_can_be_drawn_again():
    data = TensorDataset(torch.arange(10))
    assert dataset_indices(DataLoader(data, batch_size=4), 2) == [8, 9]
    assert dataset_indices(DataLoader(data, batch_size=4), 3) is None
    shared = DistributedSampler(data, 2, 1, shuffle=True)
    shared.set_epoch(3)
    assert dataset_indices(DataLoader(data, batch_size=2, sampler=shared), 1) == list(shared)[2:4]
    for unknown in (
        DataLoader(data, batch_size=4, shuffle=True),
        DataLoader(data, batch_size=4, sampler=DistributedSampler(_wrapped(RandomSampler(data)), 2, 0)),
        DataLoader(data, batch_sampler=[[1, 2], [3]]),
        DataLoader(data, batch_size=None),
        [1, 2],
    ):
        state = torch.get_rng_state()
        assert dataset_indices(unknown, 0) is None
        assert torch.equal(state, torch.get_rng_state())
    sampler = DistributedSampler(_wrapped(SequentialSampler(data)), 2, 1, shuffle=False)
    assert dataset_indices(DataLoader(data, batch_size=2, sampler=sampler), 0) == [1, 3]


def _wrapped(sampler):
    return import_module("lightning.fabric.utilities.distributed")._DatasetSamplerWrapper(sampler)


def test_batches_of_any_kind_become_plain(tmp_path):
    whole = torch.arange(1000)
    batch = {"a": (whole[:2], [None, "text", 3, 1.5, True]), "b": torch.nn.Identity(), 3: whole[:1].numpy()}
    torch.save(plain(batch), tmp_path / "batch.pt")
    assert (tmp_path / "batch.pt").stat().st_size < 5000  # not the whole storage of a view
    read = torch.load(tmp_path / "batch.pt", weights_only=True)
    assert read["a"][1] == [None, "text", 3, 1.5, True]
    assert read["a"][0].tolist() == [0, 1]
    assert read["b"] == "Identity()"
    assert read[3].tolist() == [0]


def test_a_batch_that_cannot_be_saved_does_not_hide_why(tmp_path):
    (tmp_path / "file").touch()
    text = stopped(Poisoned(), guard=NonFiniteGuard(folder=str(tmp_path / "file")))
    assert "the loss is nan" in text
    assert "the batch cannot be saved (" in text
    assert "the batch is not saved (" in stopped(Poisoned(), guard=NonFiniteGuard(save_batch=False))


class Infinite(LocAteR):
    def _penalty(self):
        return super()._penalty() * math.inf


@pytest.mark.parametrize("first", ["LocAteR", "guard"])
def test_it_sees_what_locater_adds_in_either_order(first):
    trained, callbacks = TinyLM(), [NonFiniteGuard(), Infinite(0.1)]
    with pytest.raises(NonFiniteError, match=r"step 0 \(epoch 0, batch 0\): the loss is 2\."):
        fit(trained, [*(callbacks if first == "guard" else callbacks[::-1]), EarlyStopping("val/loss")])
    kinds = [type(each) for each in trained.trainer.callbacks]
    assert kinds.index(Infinite) + 1 == kinds.index(NonFiniteGuard) == kinds.index(EarlyStopping) - 1


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_it_belongs_to_both_trees(package):
    pytest.importorskip(package)
    library = import_module(package)
    assert isinstance(NonFiniteGuard(), library.Callback)
    demo = import_module(f"{package}.demos.boring_classes").BoringModel()
    demo.training_step = lambda batch, batch_idx: demo(batch).sum() * math.nan
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_steps": 2}
    run = library.Trainer(accelerator="cpu", enable_model_summary=False, callbacks=[NonFiniteGuard()], **options)
    with pytest.raises(NonFiniteError, match=r"step 0 .*the loss is nan, .*samples 0 of the training data"):
        run.fit(demo)


@each_row(
    ("options", "says"),
    [
        ({"action": "halt"}, "action must be one of 'stop', 'skip', got 'halt'"),
        ({"max_consecutive_skips": 0}, "max_consecutive_skips must be an integer of at least 1, got 0"),
    ],
)
def test_bad_arguments(options, says):
    with pytest.raises(ValueError, match=says):
        NonFiniteGuard(**options)


def test_one_guard_a_trainer():
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `NonFiniteGuard`"):
        fit(TinyLM(), [NonFiniteGuard(), NonFiniteGuard("skip")])


@pytest.mark.slow
def test_two_processes_decide_alike_and_each_saves_its_batch(tmp_path):
    """The second alone meets NaN; gradients are joined, so both skip, and both stop, at the same step."""
    root = Path(__file__).parents[4]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "tests.lightning_tasks.callbacks.guarding.guard_run", str(tmp_path)]
    done = subprocess.run(program, cwd=root, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode != 0
    assert "NonFiniteError: step 1 (epoch 0, batch 3): the loss is 2." in done.stderr  # of the first process
    first, second = (torch.load(tmp_path / f"rank_{rank}.pt", weights_only=True) for rank in range(2))
    assert (first["skipped"], second["skipped"]) == (1, 1)
    assert torch.equal(first["weights"], second["weights"])
    assert first["weights"].isfinite().all()
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.pt"))
    saved = [f"{kind}/lightning_logs/version_0/non_finite_step_{step}_rank_{rank}.pt" for kind, step, rank in SAVED]
    assert files == sorted([*saved, "rank_0.pt", "rank_1.pt"])
    second = torch.load(tmp_path / saved[-1], weights_only=True)
    assert math.isnan(second["losses"][0])
    assert (second["batch_idx"], len(second["indices"])) == (2, 2)


SAVED = [("skip", 2, 0), ("skip", 2, 1), ("stop", 1, 0), ("stop", 1, 1)]


def test_a_resumed_run_is_bitwise_the_one_without_a_guard(tmp_path):
    model = {**SMALL, "init_args": {**SMALL["init_args"], "dropout": 0.3}}
    ends = []
    for resumes, callbacks in ((False, []), (True, [NonFiniteGuard()])):
        seed_everything(0, verbose=False)
        start = None
        if resumes:
            first = LanguageModelingTask(model)
            keep = ModelCheckpoint(tmp_path, filename="{epoch}")
            trainer(tmp_path, max_epochs=1, callbacks=[NonFiniteGuard(), keep]).fit(first, RandomText(2))
            start = tmp_path / "epoch=0.ckpt"
        task = LanguageModelingTask(model)
        trainer(tmp_path, max_epochs=2, callbacks=callbacks, enable_checkpointing=False).fit(
            task, RandomText(2), ckpt_path=start
        )
        ends.append(weights_of(task))
    assert torch.equal(*ends)


def test_flags_of_sharded_gradients_are_joined(tmp_path):
    """One process, whose shard is the whole; the reduction and the local part of a DTensor are the same calls."""
    from torch import distributed
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        parameters = [torch.nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Shard(0)])) for _ in range(2)]
        for parameter, value in zip(parameters, (1.0, math.nan), strict=True):
            parameter.grad = DTensor.from_local(torch.full((3,), value), mesh, [Shard(0)])
        loss, bad = Flags([torch.tensor(1.0)], parameters, shared=True).read()
        assert not loss
        assert [id(parameter) for parameter in bad] == [id(parameters[1])]
    finally:
        distributed.destroy_process_group()
