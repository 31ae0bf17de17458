"""Parameter groups, schedules, resuming and weight averaging."""

import copy
import itertools

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from attnswap.datamodules import DigitsDataModule
from attnswap.datamodules.shared.images import ArrayImages
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from torch.utils.data import DataLoader, IterableDataset

from attention_modules import RPCAttention
from lightning_tasks.callbacks import SwapAttention
from tests.lightning_tasks.image_classification.tasks import COSINE, DECAY, MIXED, RPC, TINY, built, task
from tests.lightning_tasks.language_data import trainer


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_norms_biases_and_positions_have_no_weight_decay(layer_decay):
    module = built(**RPC, optimizer=DECAY, layer_decay=layer_decay)
    names = {id(parameter): name for name, parameter in module.model.named_parameters()}
    groups = module.configure_optimizers()["optimizer"].param_groups
    decay = {names.pop(id(p)): group["weight_decay"] for group in groups for p in group["params"]}
    assert not names  # every parameter once
    for name, value in decay.items():
        plain = name.endswith("bias") or "norm" in name or name in ("pos_embed", "cls_token")
        assert value == (0.0 if plain else 0.3), name


def test_a_parameter_of_the_task_itself_is_trained_too():
    module = built(optimizer=DECAY, layer_decay=0.5)
    module.temperature = torch.nn.Parameter(torch.ones(()))
    module.frozen = torch.nn.Parameter(torch.ones(()), requires_grad=False)
    *_, own = module.configure_optimizers()["optimizer"].param_groups
    assert (own["params"], own["lr"]) == ([module.temperature], 0.1)


def test_layer_decay_scales_the_rate_of_every_layer():
    module = built(optimizer=DECAY, layer_decay=0.5)
    names = {id(parameter): name for name, parameter in module.model.named_parameters()}
    groups = module.configure_optimizers()["optimizer"].param_groups
    rates = {names[id(p)]: group["lr"] for group in groups for p in group["params"]}
    assert rates["head.weight"] == 0.1
    assert rates["blocks.0.attn.proj.weight"] == pytest.approx(rates["blocks.1.attn.proj.weight"] / 2)
    assert rates["patch_embed.proj.weight"] < rates["blocks.0.attn.proj.weight"]
    assert not any("lr_scale" in group for group in groups)  # only timm's schedules would heed it


@pytest.mark.parametrize("schedule", [COSINE, {"class_path": "CosineAnnealingLR", "init_args": {"T_max": 9}}])
def test_schedules_keep_the_ratios_of_layers(tmp_path, schedule):
    class Ratios(Rates):
        def on_train_batch_start(self, run, module, batch, batch_idx):
            rates = [group["lr"] for group in run.optimizers[0].param_groups]
            self.seen.append(max(rates) / min(rates))

    module, ratios = task(optimizer=DECAY, scheduler=schedule, layer_decay=0.5), Ratios()
    trainer(tmp_path, callbacks=[ratios], limit_val_batches=0, max_steps=8, max_epochs=-1).fit(
        module, DigitsDataModule(batch_size=250)
    )
    assert ratios.seen == pytest.approx([8.0] * 8)


def test_schedules_of_one_rate_for_all_layers_are_refused_and_of_one_floor_a_warning():
    schedule = {"class_path": "OneCycleLR", "init_args": {"max_lr": 0.1, "total_steps": 9}}
    with pytest.raises(ValueError, match="layer_decay gives each layer a rate, and OneCycleLR"):
        built(optimizer=DECAY, layer_decay=0.5, scheduler=schedule).configure_optimizers()
    schedule = {"class_path": "CosineAnnealingLR", "init_args": {"T_max": 9, "eta_min": 1e-5}}
    with pytest.warns(UserWarning, match="CosineAnnealingLR has one floor of 1e-05"):
        built(optimizer=DECAY, layer_decay=0.5, scheduler=schedule).configure_optimizers()


class DecaysItself(torch.optim.AdamW):
    def __init__(self, params, **options):
        super().__init__(params, **options)


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_a_weight_decay_that_the_signature_hides_is_the_optimizers_own(layer_decay):
    optimizer = {"class_path": f"{__name__}.DecaysItself", "init_args": {"lr": 0.1}}
    groups = built(optimizer=optimizer, layer_decay=layer_decay).configure_optimizers()["optimizer"].param_groups
    assert {group["weight_decay"] for group in groups} == {0.0, 0.01}  # torch's own


def test_param_groups_take_the_place_of_timms():
    (group,) = built(optimizer=DECAY, param_groups=[]).configure_optimizers()["optimizer"].param_groups
    assert group["weight_decay"] == 0.3


class Rates(pl.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, run, module, batch, batch_idx):
        self.seen.append(run.optimizers[0].param_groups[0]["lr"])


def fitted(folder, data=None, scheduler=COSINE, scheduler_interval="step", **options):
    rates = Rates()
    module = task(optimizer=DECAY, scheduler=scheduler, scheduler_interval=scheduler_interval)
    trainer(folder, callbacks=[rates], limit_val_batches=0, **options).fit(
        module, data or DigitsDataModule(batch_size=250)
    )
    return rates.seen


def test_timms_schedule_gets_the_length_of_the_run_and_moves_every_step(tmp_path):
    seen = fitted(tmp_path, max_epochs=3)  # six batches an epoch
    warm_up = [1e-5 + (0.1 - 1e-5) * step / 6 for step in range(6)]
    cosine = [1e-4 + 0.5 * (0.1 - 1e-4) * (1 + np.cos(np.pi * step / 18)) for step in range(6, 18)]
    assert seen == pytest.approx(warm_up + cosine)
    assert fitted(tmp_path, max_epochs=-1, max_steps=18) == pytest.approx(seen)


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_timms_schedule_is_built_where_nothing_is_trained(tmp_path, interval):
    assert fitted(tmp_path, scheduler_interval=interval, max_epochs=3, limit_train_batches=0) == []


def test_timms_schedule_of_data_without_a_length(tmp_path):
    class Batches(IterableDataset):
        def __init__(self, batches):
            self.batches = batches

        def __iter__(self):
            return itertools.cycle(self.batches)

    class Endless(DigitsDataModule):
        def train_dataloader(self):
            return DataLoader(Batches(list(super().train_dataloader())), batch_size=None)

    cosine = {**COSINE, "init_args": {"warmup_epochs": 0, "min_lr": 1e-4}}
    seen = fitted(tmp_path, Endless(batch_size=250), cosine, max_epochs=-1, max_steps=4)
    assert seen == pytest.approx([1e-4 + 0.5 * (0.1 - 1e-4) * (1 + np.cos(np.pi * step / 4)) for step in range(4)])
    with pytest.raises(ValueError, match="needs the length of an epoch"):
        fitted(tmp_path, Endless(batch_size=250), max_epochs=2)
    with pytest.raises(ValueError, match="needs the length of an epoch"):
        fitted(tmp_path, Endless(batch_size=250), scheduler_interval="epoch", max_epochs=-1, max_steps=4)


def test_timms_schedule_counts_steps_not_batches(tmp_path):
    seen = fitted(tmp_path, max_epochs=3, accumulate_grad_batches=3)
    assert len(seen) == 18
    assert len(set(seen)) == 6


def test_timms_schedule_by_epochs(tmp_path):
    seen = fitted(tmp_path, scheduler_interval="epoch", max_epochs=3)
    assert [len(set(seen[start : start + 6])) for start in (0, 6, 12)] == [1, 1, 1]
    assert len(set(seen)) == 3


def test_a_schedule_in_the_other_unit_is_an_error(tmp_path):
    epochs = {"class_path": "timm.scheduler.CosineLRScheduler", "init_args": {"t_initial": 3}}
    with pytest.raises(ValueError, match="the schedule counts in epochs: give scheduler_interval='epoch'"):
        fitted(tmp_path, scheduler=epochs, max_epochs=1)


class Killed(RuntimeError):
    pass


class KillAt(pl.Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, run, module, batch, batch_idx):
        if run.global_step == self.step:
            raise Killed


CROPS = {"train_transform": {"scale": [0.7, 1.0], "color_jitter": 0.0}}


class FewDigits(DigitsDataModule):
    def load(self, split):
        images = super().load(split)
        return ArrayImages(images.pixels[:137], images.labels[:137])


def fit(folder, *callbacks, seed=3, ckpt_path=None, workers=0):
    pl.seed_everything(seed, verbose=False)
    dropping = {**TINY, "drop_path_rate": 0.2}
    module = task(**{**RPC, **MIXED}, model_options=dropping, optimizer=DECAY, scheduler=COSINE, layer_decay=0.9)
    keep = ModelCheckpoint(dirpath=folder, every_n_train_steps=5, save_last=True)
    run = trainer(folder, max_epochs=3, callbacks=[keep, *callbacks], limit_val_batches=1)
    data = FewDigits(batch_size=16, num_workers=workers, **CROPS)
    run.fit(module, data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(("workers", "averaged"), [(0, True), (1, False)])
def test_killed_within_an_epoch_and_resumed_ends_bit_identical(tmp_path, workers, averaged):
    """Nine batches an epoch, the last of nine images; augmentation, mixing, drop path, schedule, average all go on."""
    extra = [EMAWeightAveraging(decay=0.8)] if averaged else []
    whole = fit(tmp_path / "whole", *copy.deepcopy(extra), workers=workers)
    with pytest.raises(Killed):
        fit(tmp_path / "killed", KillAt(18), *copy.deepcopy(extra), workers=workers)
    last = tmp_path / "killed" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 15
    resumed = fit(tmp_path / "resumed", *copy.deepcopy(extra), ckpt_path=last, workers=workers)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.parametrize("swapping", ["task", "callback"])
@pytest.mark.parametrize("averaging", [WeightAveraging, EMAWeightAveraging])
def test_weights_are_averaged_in_swapped_models(tmp_path, swapping, averaging):
    """The average of the steps' weights is what is validated, and what is left at the end."""
    torch.manual_seed(0)
    module = task(**(RPC if swapping == "task" else {}), optimizer=DECAY)
    swap = [SwapAttention("rpc", {"iterations": 2}, layers=[0])] if swapping == "callback" else []
    steps = []

    class Record(pl.Callback):
        def on_train_batch_end(self, run, module, outputs, batch, batch_idx):
            steps.append(module.model.head.weight.detach().clone())

    average = averaging(decay=0.5) if averaging is EMAWeightAveraging else averaging()
    run = trainer(tmp_path, callbacks=[*swap, average, Record()], max_epochs=2)
    run.fit(module, DigitsDataModule(batch_size=400))
    expected = steps[0].clone()
    for count, step in enumerate(steps[1:], start=1):
        expected += (step - expected) * (0.5 if averaging is EMAWeightAveraging else 1 / (count + 1))
    torch.testing.assert_close(module.model.head.weight.detach(), expected)
    assert isinstance(module.model.blocks[0].attn.mechanism, RPCAttention)
