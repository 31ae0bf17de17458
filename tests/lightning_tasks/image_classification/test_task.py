"""The model, what training does to a batch, and metrics."""

import csv
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from attnswap.datamodules import DigitsDataModule
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from timm.data.mixup import Mixup
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional.classification import multiclass_calibration_error

from attention_modules import AttentionMechanism, RPCAttention, SymmetricAttention
from lightning_tasks import ImageClassificationTask
from lightning_tasks.callbacks import AttentionMonitor
from lightning_tasks.training.mechanisms import swap_layers
from lightning_tasks.training.mixup import Mixing
from tests.lightning_tasks.image_classification.tasks import MIXED, RPC, TINY, built, images, task
from tests.lightning_tasks.language_data import trainer


def counted(**options):
    with torch.device("meta"):
        result = ImageClassificationTask("deit_tiny_patch16_224", 1000, **options)
        result.configure_model()
    return sum(parameter.numel() for parameter in result.parameters())


def test_parameters_of_the_papers_models():
    rpc = {"mechanism": "rpc", "options": {"iterations": 4, "lam": 4.0}}
    assert counted() == 5_717_416
    assert counted(mechanism="symmetric") == 5_272_744
    assert counted(**rpc, layers=[0], other_attention="symmetric") == 5_272_744  # RPC-SymViT-tiny
    assert counted(**rpc) == 5_272_744


def test_mechanisms_go_where_they_were_sent():
    module = built(**RPC, other_attention="symmetric")
    kinds = [type(part) for part in module.modules() if isinstance(part, AttentionMechanism)]
    assert kinds == [RPCAttention, SymmetricAttention]
    only = [part for part in built(**RPC).modules() if isinstance(part, AttentionMechanism)]
    assert [type(part) for part in only] == [RPCAttention]
    assert not [part for part in built().modules() if isinstance(part, AttentionMechanism)]


def test_each_layer_is_swapped_once():
    """The projection of a chosen layer is never taken apart for the mechanism of the others, and put together again."""
    model = timm.create_model("vit_tiny_patch16_224", **TINY)
    first, second = (block.attn for block in model.blocks)
    kept = first.qkv.weight
    swap_layers(model, "softmax", {}, [0], "symmetric")
    assert first.qkv.weight is kept
    assert type(first) is timm.layers.Attention
    assert isinstance(second.mechanism, SymmetricAttention)
    swap_layers(model, "rpc", {"iterations": 2}, [0, 1], "symmetric")  # none is left for the other
    assert all(isinstance(layer.mechanism, RPCAttention) for layer in (first, second))


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
def test_images_are_normalized_inside(options, mean, std):
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


def test_random_erasing_comes_after_the_normalization():
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


@pytest.mark.figures
def test_a_test_leaves_a_table_and_a_figure(tmp_path):
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


def test_the_monitor_sees_the_layers(tmp_path):
    module = task(**RPC)
    run = trainer(tmp_path, callbacks=[AttentionMonitor(every_n_steps=1, statistics=["effective_support"])])
    run.fit(module, DigitsDataModule(batch_size=600))
    assert 1 <= run.callback_metrics["attention/effective_support/layer_00"] <= 5
