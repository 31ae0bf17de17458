"""The image classification task: input, targets, metrics, groups, schedules, resuming, averaging, reports, errors."""

import copy
import csv
import json
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import timm
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from timm.data.mixup import Mixup
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional.classification import multiclass_calibration_error

from attention_modules import AttentionMechanism, RPCAttention, SymmetricAttention
from datamodules import DigitsDataModule
from lightning_tasks import ImageClassificationTask
from lightning_tasks.callbacks import AttentionMonitor, SwapAttention
from lightning_tasks.training.mixup import Mixing
from tests.lightning_tasks.language_data import trainer

TINY = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2}
RPC = {"attention": "rpc", "attention_options": {"iterations": 2}, "attention_layers": [0]}
COSINE = {"class_path": "timm.scheduler.create_scheduler_v2", "init_args": {"warmup_epochs": 1, "min_lr": 1e-4}}
MIXED = {"mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1, "random_erasing": 0.5}


def task(**options):
    given = {"model": "vit_tiny_patch16_224", "model_options": TINY, "optimizer": "AdamW", **options}
    return ImageClassificationTask(**given)


def built(num_classes=10, **options):
    result = task(num_classes=num_classes, **options)
    result.configure_model()
    return result.eval()


def images(count=6, size=8, chans=1):
    return torch.rand(count, chans, size, size, generator=torch.Generator().manual_seed(1))


# -- the model ---------------------------------------------------------------------------------------------------------


def counted(**options):
    with torch.device("meta"):
        result = ImageClassificationTask("deit_tiny_patch16_224", 1000, **options)
        result.configure_model()
    return sum(parameter.numel() for parameter in result.parameters())


def test_parameters_of_the_papers_models():
    rpc = {"attention": "rpc", "attention_options": {"iterations": 4, "lam": 4.0}}
    assert counted() == 5_717_416
    assert counted(attention="symmetric") == 5_272_744
    assert counted(**rpc, attention_layers=[0], other_attention="symmetric") == 5_272_744  # RPC-SymViT-tiny
    assert counted(**rpc) == 5_272_744


def test_mechanisms_go_where_they_were_sent():
    module = built(**RPC, other_attention="symmetric")
    kinds = [type(part) for part in module.modules() if isinstance(part, AttentionMechanism)]
    assert kinds == [RPCAttention, SymmetricAttention]
    only = [part for part in built(**RPC).modules() if isinstance(part, AttentionMechanism)]
    assert [type(part) for part in only] == [RPCAttention]
    assert not [part for part in built().modules() if isinstance(part, AttentionMechanism)]


@pytest.mark.parametrize(
    ("options", "mean", "std"),
    [
        ({}, [0.5], [0.5]),
        ({"mean": [0.2], "std": [0.1]}, [0.2], [0.1]),
        (
            {"model": "deit_tiny_patch16_224", "model_options": {**TINY, "in_chans": 3}},
            [0.485, 0.456, 0.406],
            [0.229, 0.224, 0.225],
        ),
        ({"model": "deit_tiny_patch16_224"}, [0.449], [0.226]),
    ],
)
def test_images_are_normalised_inside(options, mean, std):
    module = built(**options)
    given = images(chans=module.in_chans)
    mean, std = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)
    torch.testing.assert_close(module(given), module.model((given - mean) / std), rtol=1e-4, atol=1e-5)
    assert not [name for name in module.state_dict() if "image_" in name]


def test_a_checkpoint_brings_everything(tmp_path):
    module, run = task(**RPC), trainer(tmp_path)
    run.fit(module, DigitsDataModule(batch_size=600))
    run.save_checkpoint(tmp_path / "a.ckpt")
    loaded = ImageClassificationTask.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert loaded.hparams.num_classes == 10
    torch.testing.assert_close(loaded.eval()(images()), module.eval()(images()))


# -- what training does to a batch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_any_number_of_images_can_be_mixed(count):
    mixed, targets = Mixing(10, **MIXED)(images(count), torch.arange(count), [0])
    assert mixed.shape == (count, 1, 8, 8)
    torch.testing.assert_close(targets.sum(1), torch.ones(count))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_any_number_of_images_can_be_trained_on(count):
    module = built(**MIXED)
    module.log = lambda *args, **kwargs: None
    module.train()
    loss = module.training_step((images(count), torch.arange(count)), 0)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in module.parameters() if p.grad is not None)


def test_a_batch_of_damaged_images_joins_as_often_and_counts_for_nothing(monkeypatch):
    """Of two processes, of which the other one's loss is 2, or whose images are damaged too."""
    module, joined, logged = built(), [], []
    others = [torch.tensor(other) for other in ([2.0, 1.0], [2.0, 1.0], [0.0, 0.0])]
    strategy = SimpleNamespace(reduce=lambda own, reduce_op: joined.append(own) or own + others[len(joined) - 1])
    module._trainer = SimpleNamespace(world_size=2, global_rank=0, current_epoch=0, strategy=strategy)
    monkeypatch.setattr(module, "log", lambda name, value, **given: logged.append((name, value, given)))
    own = [module.training_step((images(count), torch.arange(count)), 0) for count in (4, 0, 0)]
    assert len(joined) == 3
    losses = [value for name, value, _ in logged if name == "train/loss"]
    assert losses == [(own[0] + 2) / 2, 2.0]
    assert not any(given.get("sync_dist") for *_, given in logged)  # joined already


def test_mixing_is_timms_and_follows_from_its_seed():
    labels = torch.arange(6)
    mixing = Mixing(10, mixup=0.8, cutmix=1.0, label_smoothing=0.1)
    np.random.seed(5)  # noqa: NPY002
    torch.manual_seed(5)
    before = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    one, two, other = (mixing(images(), labels, [0, 1, seed]) for seed in (2, 2, 3))
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])
    assert not torch.equal(one[0], other[0])
    assert np.array_equal(np.random.get_state()[1], before[0])  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[1])
    np.random.seed(np.random.SeedSequence([0, 1, 2]).generate_state(1).item())  # noqa: NPY002
    reference = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=10)(images(), labels)
    assert torch.equal(one[0], reference[0])
    assert torch.equal(one[1], reference[1])


def test_random_erasing_comes_after_the_normalisation():
    module = built(random_erasing=1.0, mean=[100.0], std=[1.0])
    seen = []
    module.model.register_forward_pre_hook(lambda model, args: seen.append(args[0].clone()))
    module.log = lambda *args, **kwargs: None
    module.training_step((images(), torch.arange(6)), 0)
    share = (seen[0] > -50).float().mean()
    assert 0.01 < share < 0.5  # the noise is N(0, 1) beside pixels around -100


def test_plain_training_loss_is_cross_entropy():
    module, labels = built(label_smoothing=0.1), torch.arange(6)
    module.log = lambda *args, **kwargs: None
    expected = functional.cross_entropy(module(images()), labels, label_smoothing=0.1)
    torch.testing.assert_close(module.training_step((images(), labels), 0), expected)


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_metrics_are_those_of_the_whole_split(tmp_path):
    module, data = task(), DigitsDataModule(batch_size=100)
    run = trainer(tmp_path)
    logged = run.test(module, data, verbose=False)[0]
    whole, labels = (torch.cat(parts) for parts in zip(*data.test_dataloader(), strict=True))
    with torch.no_grad():
        logits = module.eval()(whole)
    top5 = (logits.topk(5).indices == labels[:, None]).any(1).float().mean()
    hits = (logits.argmax(1) == labels).float()
    a_class = [hits[labels == index].mean() for index in range(10)]
    expected = {
        "test/loss": functional.cross_entropy(logits, labels),
        "test/top1": hits.mean(),
        "test/top5": top5,
        "test/class_accuracy": sum(a_class) / 10,
        "test/calibration_error": multiclass_calibration_error(logits.softmax(-1), labels, 10),
    }
    assert logged.keys() == expected.keys()
    for name, value in expected.items():
        assert logged[name] == pytest.approx(float(value), rel=1e-4), name


def test_top5_is_not_taken_for_top1_where_they_agree_at_first(tmp_path):
    """Right now torchmetrics joins metrics whose states are equal after the first batch."""
    module, labels = built(num_classes=6), torch.zeros(8, dtype=torch.int64)
    module.forward = lambda given: given
    first = functional.one_hot(labels, 6).float()
    later = torch.tensor([[1.0, 2, 0, 0, 0, 0]]).repeat(8, 1)
    loader = DataLoader(TensorDataset(torch.cat([first, later]), torch.cat([labels, labels])), batch_size=8)
    module.on_before_batch_transfer = lambda batch, index: batch
    logged = trainer(tmp_path).test(module, loader, verbose=False)[0]
    assert (logged["test/top1"], logged["test/top5"]) == (0.5, 1.0)


def test_there_is_no_top5_of_five_classes():
    assert "top5" in built(num_classes=6).val_metrics
    assert "top5" not in built(num_classes=5).val_metrics


def test_predictions_are_probabilities(tmp_path):
    predictions = torch.cat(trainer(tmp_path).predict(task(), DigitsDataModule(batch_size=100)))
    assert predictions.shape == (360, 10)
    torch.testing.assert_close(predictions.sum(1), torch.ones(360))


def test_a_test_leaves_a_table_and_a_picture(tmp_path):
    pytest.importorskip("tensorboard")
    loggers = [CSVLogger(tmp_path, name="run"), TensorBoardLogger(tmp_path, name="tensorboard")]
    run = trainer(tmp_path, logger=loggers)
    logged = run.test(task(), DigitsDataModule(batch_size=100), verbose=False)[0]
    folder = tmp_path / "run" / "version_0"
    with (folder / "test_classes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == list("0123456789")
    assert sum(int(row["samples"]) for row in rows) == 360
    mean = sum(float(row["accuracy"]) for row in rows) / 10
    assert mean == pytest.approx(logged["test/class_accuracy"], abs=1e-3)
    assert (folder / "test_confusion.png").stat().st_size > 1000
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers[1].finalize("success")
    events = EventAccumulator(loggers[1].log_dir)
    events.Reload()
    assert events.Tags()["images"] == ["test/confusion"]


# -- optimizer and schedule --------------------------------------------------------------------------------------------

DECAY = {"class_path": "AdamW", "init_args": {"lr": 0.1, "weight_decay": 0.3}}


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


def test_layer_decay_scales_the_rate_of_every_schedule(tmp_path):
    module = built(optimizer=DECAY, layer_decay=0.5)
    names = {id(parameter): name for name, parameter in module.model.named_parameters()}
    groups = module.configure_optimizers()["optimizer"].param_groups
    rates = {names[id(p)]: group["lr"] for group in groups for p in group["params"]}
    assert rates["head.weight"] == 0.1
    assert rates["blocks.0.attn.proj.weight"] == pytest.approx(rates["blocks.1.attn.proj.weight"] / 2)
    assert rates["patch_embed.proj.weight"] < rates["blocks.0.attn.proj.weight"]
    assert not any("lr_scale" in group for group in groups)  # only timm's schedules would heed it


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
    trainer(folder, callbacks=[rates], limit_val_batches=0, **options).fit(module, DigitsDataModule(batch_size=250))
    return rates.seen


def test_timms_schedule_gets_the_length_of_the_run_and_moves_every_step(tmp_path):
    seen = fitted(tmp_path, max_epochs=3)  # six batches an epoch
    warm_up = [1e-5 + (0.1 - 1e-5) * step / 6 for step in range(6)]
    cosine = [1e-4 + 0.5 * (0.1 - 1e-4) * (1 + np.cos(np.pi * step / 18)) for step in range(6, 18)]
    assert seen == pytest.approx(warm_up + cosine)
    assert fitted(tmp_path, max_epochs=-1, max_steps=18) == pytest.approx(seen)


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


# -- resuming and averaging --------------------------------------------------------------------------------------------


class Killed(RuntimeError):
    pass


class KillAt(pl.Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, run, module, batch, batch_idx):
        if run.global_step == self.step:
            raise Killed


CROPS = {"train_transform": {"scale": [0.7, 1.0], "color_jitter": 0.0}}


def fit(folder, *callbacks, seed=3, ckpt_path=None, workers=0):
    pl.seed_everything(seed, verbose=False)
    dropping = {**TINY, "drop_path_rate": 0.2}
    module = task(**{**RPC, **MIXED}, model_options=dropping, optimizer=DECAY, scheduler=COSINE, layer_decay=0.9)
    keep = ModelCheckpoint(dirpath=folder, every_n_train_steps=5, save_last=True)
    run = trainer(folder, max_epochs=3, callbacks=[keep, *callbacks], limit_val_batches=1)
    data = DigitsDataModule(batch_size=150, num_workers=workers, **CROPS)
    run.fit(module, data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("averaged", [False, True])
def test_killed_within_an_epoch_and_resumed_ends_bit_identical(tmp_path, workers, averaged):
    """Nine batches an epoch, the last of them odd; augmentation, mixing, drop path, schedule, average all go on."""
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


# -- what does not fit -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"model": "vit_tiny_patch16_225"}, "no model 'vit_tiny_patch16_225'; the nearest names are vit_tiny_patch16_"),
        ({"model": "diet_tiny_patch16_224"}, "the nearest names are deit_tiny_patch16_224"),
        ({"model": "deit_tiny_patch16_224.fb"}, r"no weights 'fb' for deit_tiny_patch16_224; it has fb_in1k"),
        ({"num_classes": 1}, "num_classes must be at least 2, got 1"),
        ({"attention": "rcp"}, "Did you mean 'rpc'"),
        ({"mixup": -1.0}, "mixup must be at least 0"),
        ({"random_erasing": 2.0}, r"random_erasing is a probability in \[0, 1\], got 2.0"),
        ({"label_smoothing": 1.0}, "label_smoothing must be at least 0 and below 1"),
        ({"layer_decay": 0.5, "param_groups": []}, "give one of the two"),
    ],
)
def test_bad_arguments(options, text):
    with pytest.raises(ValueError, match=text):
        task(**options)


@pytest.mark.parametrize("options", [{"pretrained": True}, {"model": "hf-hub:nobody/vit"}])
def test_weights_that_cannot_be_reached_name_the_cure(options, monkeypatch):
    def fail(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr(timm, "create_model", fail)
    with pytest.raises(ValueError, match=r"\(ConnectionError: no network\).*pretrained: false.*network"):
        built(**options)
    with pytest.raises(ConnectionError):
        built()  # nothing was to be fetched


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"model_options": {"depht": 2}}, "could not be built with model_options {'depht': 2}"),
        ({"mean": [0.1, 0.2]}, "mean has 2 values for 1 channels"),
        ({"std": [0.0]}, "std must be positive"),
    ],
)
def test_what_cannot_be_built(options, text):
    with pytest.raises(ValueError, match=text):
        built(**options)


def test_pretrained_weights_without_a_network(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    text = (
        r"weights of vit_tiny_patch16_224 cannot be had from the Hugging Face hub \(timm/vit_tiny_patch16_224\.\w+\) "
        r"\(.*\)\. Give a local file .*'pretrained_cfg_overlay': \{'file': PATH\}.* --init_from PATH .* network"
    )
    with pytest.raises(ValueError, match=text):
        built(model_options={}, pretrained=True)


def test_pretrained_weights_of_a_local_file(tmp_path):
    path = tmp_path / "weights.pth"
    overlay = {"pretrained_cfg_overlay": {"file": str(path)}}
    with pytest.raises(ValueError, match=rf"cannot be had from the file {path} \(FileNotFoundError"):
        built(model_options={**TINY, **overlay}, pretrained=True)
    weights = built(num_classes=7).model.state_dict()
    torch.save(weights, path)
    overlay["pretrained_cfg_overlay"]["input_size"] = [1, 8, 8]
    with pytest.raises(
        ValueError, match=r"do not fit the model with model_options .*'embed_dim': 32.*\s+size mismatch for cls"
    ):
        built(model_options={**TINY, **overlay, "embed_dim": 32}, pretrained=True)
    loaded = built(model_options={**TINY, **overlay}, pretrained=True).model.state_dict()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights if not name.startswith("head."))


def test_a_model_that_has_no_pretrained_weights():
    with pytest.raises(ValueError, match=r"weights of vit_small_patch16_36x1_224 do not exist\. Give a local file"):
        built(model="vit_small_patch16_36x1_224", pretrained=True)


def test_layer_decay_out_of_range():
    with pytest.raises(ValueError, match="layer_decay must be above 0 and at most 1, got"):
        built(layer_decay=1.5).configure_optimizers()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"model_options": {**TINY, "in_chans": 3}},
            r"have 1 channels, the model vit_tiny\w+ takes 3: .*in_chans=3",
        ),
        (
            {"model_options": {**TINY, "img_size": 16}},
            r"8 x 8 pixels, the model vit_\w+ takes 16 x 16: .*img_size=16",
        ),
        ({"num_classes": 9}, "num_classes=9 is below the 10 classes of the data module"),
        (
            {"model": "levit_128s", "model_options": {"in_chans": 1}},
            r"8 x 8 pixels, the model levit_128s takes 224 x 224: .*img_size=224, or .*\{'img_size': 8\}",
        ),
    ],
)
def test_data_that_does_not_fit_is_refused_before_training(tmp_path, options, text):
    with pytest.raises(ValueError, match=text):
        trainer(tmp_path).fit(task(**options), DigitsDataModule())


def test_images_that_do_not_fit():
    with pytest.raises(ValueError, match="images have 3 channels, the model vit_tiny_patch16_224 takes 1"):
        built()(images(chans=3))
    with pytest.raises(ValueError, match="images have 16 x 16 pixels, the model vit_tiny_patch16_224 takes 8 x 8"):
        built()(images(size=16))
    with pytest.raises(ValueError, match=r"images must be \[B, C, H, W\]"):
        built()(images()[0])


@pytest.mark.parametrize("name", ["levit_128s", "coatnet_nano_rw_224", "crossvit_tiny_240", "hiera_tiny_224"])
def test_images_that_do_not_fit_models_whose_size_is_elsewhere(name):
    """These say it to timm, not in their patch embedding, and fail deep inside."""
    with torch.device("meta"):
        module = ImageClassificationTask(name, 10)
        module.configure_model()
        size = 240 if "240" in name else 224
        with pytest.raises(ValueError, match=f"images have 96 x 96 pixels, the model {name} takes {size} x {size}"):
            module(torch.empty(1, 3, 96, 96))
        with pytest.raises(ValueError, match=f"images have 4 channels, the model {name} takes 3"):
            module(torch.empty(1, 4, size, size))


def test_a_model_for_images_of_any_size_takes_them():
    module = built(model_options={**TINY, "dynamic_img_size": True})
    assert module(images(size=16)).shape == (6, 10)


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        (torch.tensor([0, 10]), "labels from 0 to 10 for 10 classes: give num_classes=11"),
        (torch.tensor([-1, 3]), "labels from -1 to 3 for 10 classes: labels count from 0"),
        (torch.tensor([-1, 3]), "labels from -1 to 3"),
        (torch.tensor([0.0, 1.0]), "labels integers, got torch.float32 and torch.float32"),
        (torch.tensor([[0], [1]]), r"labels \[B\]\), got \[2, 1, 8, 8\] and \[2, 1\]"),
    ],
)
def test_labels_that_do_not_fit(tmp_path, labels, text):
    loader = DataLoader(TensorDataset(images(2), labels), batch_size=2)
    with pytest.raises(ValueError, match=text):
        trainer(tmp_path).fit(task(num_classes=10), loader)


def test_unknown_number_of_classes_says_what_to_give():
    with pytest.raises(ValueError, match=r"give ImageClassificationTask\(num_classes=...\)"):
        task().configure_model()


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_averages_weights_of_a_swapped_model_and_monitors_it(tmp_path, monkeypatch):
    from lightning_tasks.__main__ import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["attnswap"])
    callbacks = [
        {"class_path": "lightning.pytorch.callbacks.EMAWeightAveraging", "init_args": {"decay": 0.9}},
        {"class_path": "lightning_tasks.callbacks.AttentionMonitor", "init_args": {"statistics": ["entropy"]}},
    ]
    arguments = ["--model", "lightning_tasks.ImageClassificationTask", f"--model.model_options={json.dumps(TINY)}"]
    arguments += ["--model.attention=rpc", "--model.attention_layers=[0]", "--data", "datamodules.DigitsDataModule"]
    arguments += ["--data.batch_size=400", "--trainer.max_epochs=1", "--trainer.accelerator=cpu"]
    main(["fit", *arguments, "--trainer.enable_progress_bar=false", f"--trainer.callbacks={json.dumps(callbacks)}"])
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    assert {"current_model_state", "averaging_state"} <= torch.load(checkpoint, weights_only=True).keys()
    main(["test", *arguments, "--ckpt_path", str(checkpoint)])
    assert len(list(tmp_path.rglob("test_confusion.png"))) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--config", "quickstart/language_modeling"], "has no show_batch"),
        ([], "needs --config RECIPE or --data CLASS"),
        (["--config", "quickstart/clasification"], "quickstart/classification"),
    ],
)
def test_show_batch_without_pictures(arguments, text, capsys):
    from lightning_tasks.__main__ import main

    with pytest.raises(SystemExit) as stop:
        main(["show-batch", *arguments])
    assert stop.value.code == 2
    assert text in capsys.readouterr().err


def test_show_batch_of_a_recipe(tmp_path, capsys):
    from lightning_tasks.__main__ import main

    path = tmp_path / "batch.png"
    main(["show-batch", "--config", "quickstart/classification", "--data.batch_size", "9", "--output", str(path)])
    assert path.stat().st_size > 2000
    assert str(path) in capsys.readouterr().out


def test_the_monitor_sees_the_layers(tmp_path):
    module = task(**RPC)
    run = trainer(tmp_path, callbacks=[AttentionMonitor(every_n_steps=1, statistics=["effective_support"])])
    run.fit(module, DigitsDataModule(batch_size=600))
    assert 1 <= run.callback_metrics["attention/effective_support/layer_00"] <= 5
