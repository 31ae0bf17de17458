"""The segmentation task: metrics over a split, what does not count, windows, checkpoints, overlays, robustness."""

import csv
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attnswap.datamodules import DigitScenesDataModule
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from attention_modules import AttentionMechanism, RPCAttention, SymmetricAttention
from lightning_tasks import ImageClassificationTask, SegmentationTask
from lightning_tasks.callbacks import PredictionTable, RobustnessEvaluation, SegmentationOverlay
from lightning_tasks.callbacks.init_from import InitFromCheckpoint
from lightning_tasks.figures.masks import draw_masks
from lightning_tasks.files.weights import load_backbone
from lightning_tasks.robustness import fgsm, input_gradient_norms
from lightning_tasks.robustness.corruptions import corrupt
from lightning_tasks.training.segmentation_metrics import SegmentationScores, scores
from tests.lightning_tasks.language_data import trainer
from tests.rows import each_row

OPTIONS = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
MODEL = {"backbone": "deit_tiny_patch16_224", "img_size": 32, "backbone_options": OPTIONS}
RPC = {"mechanism": "rpc", "options": {"iterations": 2}, "layers": [0, -2]}


def task(model=None, **options):
    return SegmentationTask(**{"model": {**MODEL, **(model or {})}, "optimizer": "AdamW", **options})


def built(num_classes=5, **options):
    torch.manual_seed(0)
    module = task(num_classes=num_classes, **options)
    module.configure_model()
    return module.eval()


def pair(count=4, height=32, width=32, classes=5, ignored=0.3):
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(count, 3, height, width, generator=generator)
    masks = torch.randint(0, classes, (count, height, width), generator=generator)
    masks[torch.rand(masks.shape, generator=generator) < ignored] = 255
    return images, masks


def loader(images, masks, batch_size=2):
    return DataLoader(TensorDataset(images, masks), batch_size=batch_size)


def scenes(**options):
    sizes = {"num_train": 8, "num_val": 4, "num_test": 4, "batch_size": 4, "img_size": 40, "crop_size": 32}
    return DigitScenesDataModule(**{**sizes, **options})


# -- loss and metrics --------------------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_over_the_pixels_that_count():
    module, (images, masks) = built(), pair()
    module.log = lambda *args, **kwargs: None
    loss = module.training_step((images, masks), 0)
    counted = masks != 255
    logits = module.model(images).permute(0, 2, 3, 1)[counted]
    torch.testing.assert_close(loss, functional.cross_entropy(logits, masks[counted]))
    masks[:] = 255
    loss = module.training_step((images, masks), 0)
    loss.backward()
    assert loss == 0
    assert all(parameter.grad.abs().max() == 0 for parameter in module.parameters())


def test_scores_are_of_the_whole_split_and_leave_out_what_does_not_count(tmp_path):
    module, (images, masks) = built(), pair(count=5, height=40, width=52)
    logged = trainer(tmp_path).test(module, loader(images, masks), verbose=False)[0]
    with torch.no_grad():
        predicted, logits = module.predict_masks(images), module(images)
    metric = SegmentationScores(5, 255)
    metric.update(predicted, masks)
    expected = {f"test/{name}": value for name, value in scores(metric.compute()).items()}
    expected["test/loss"] = functional.cross_entropy(logits, masks, ignore_index=255).item()
    assert logged == pytest.approx(expected, rel=1e-4)
    masks[masks == 255] = predicted[masks == 255]  # what did not count would have been right
    better = trainer(tmp_path).test(module, loader(images, masks), verbose=False)[0]
    assert better["test/miou"] > logged["test/miou"] + 0.05


@pytest.mark.parametrize("precision", ["bf16-true", pytest.param("16-true", marks=pytest.mark.slow)])
def test_scores_of_a_half_precision_are_summed_in_32_bits(tmp_path, precision):
    """In bfloat16 a sum of equal numbers stands still at 256 of them; float16 ends at 65,504, 64 images' pixels."""
    images, masks = pair(2, ignored=0.0)
    whole = trainer(tmp_path).test(built(), loader(images, masks), verbose=False)[0]
    many = loader(images.repeat(300, 1, 1, 1), masks.repeat(300, 1, 1))
    half = trainer(tmp_path, precision=precision).test(built(), many, verbose=False)[0]
    assert half == pytest.approx(whole, rel=0.05)


def test_masks_are_those_of_the_logits_of_overlapping_windows():
    module, (images, _) = built(stride=8), pair(height=44, width=36)
    with torch.no_grad():
        logits = module(images)
        assert logits.shape == (4, 5, 44, 36)
        assert torch.equal(module.predict_masks(images), logits.argmax(1))
        first = module.model(images[:, :, :32, :32])
    torch.testing.assert_close(logits[..., :8, :4], first[..., :8, :4])  # seen by the first window alone


def test_scales_and_mirror_images_change_the_prediction(tmp_path):
    images, masks = pair(height=40, width=36)
    plain, several = built(), built(scales=[0.75, 1.0, 1.5], flip=True)
    with torch.no_grad():
        averaged = several(images)
        torch.testing.assert_close(averaged.exp().sum(1), torch.ones(4, 40, 36))
        torch.testing.assert_close(several(images.flip(-1)), averaged.flip(-1), rtol=1e-3, atol=1e-3)
        assert not torch.equal(averaged.argmax(1), plain.predict_masks(images))
    assert math.isfinite(trainer(tmp_path).test(several, loader(images, masks), verbose=False)[0]["test/loss"])


@pytest.mark.parametrize("count", [0, 1])
def test_any_number_of_images(count):
    module, (images, masks) = built(), pair(count)
    module.log = lambda *args, **kwargs: None
    module.training_step((images, masks), 0).backward()
    assert module.predict_step((images, masks), 0).shape == (count, 32, 32)


# -- the model ---------------------------------------------------------------------------------------------------------


DAMAGED = {"alone": (1, (0.0, 0.0), []), "one of two": (2, (2.0, 1.0), [2.0]), "all": (2, (0.0, 0.0), [])}


@pytest.mark.parametrize(("processes", "other", "losses"), DAMAGED.values(), ids=DAMAGED)
def test_a_batch_of_damaged_images_has_no_loss_of_its_own(processes, other, losses, monkeypatch):
    """Of two processes it logs the other one's loss, and nothing where that has damaged images too."""
    module, joined, logged = built(), [], []
    strategy = SimpleNamespace(reduce=lambda own, reduce_op: joined.append(own) or own + torch.tensor(other))
    module._trainer = SimpleNamespace(world_size=processes, strategy=strategy)
    monkeypatch.setattr(module, "log", lambda name, value, **given: logged.append((name, value)))
    images, masks = pair()
    module.training_step((images[:0], masks[:0]), 0)
    assert len(joined) == processes - 1
    assert logged == [("train/loss", loss) for loss in losses]


def test_mechanisms_go_where_they_were_sent():
    module = built(**RPC, other_attention="symmetric")
    kinds = [type(part) for part in module.modules() if isinstance(part, AttentionMechanism)]
    assert kinds == [RPCAttention, SymmetricAttention] * 2
    assert not [part for part in built().modules() if isinstance(part, AttentionMechanism)]


@pytest.mark.parametrize(("options", "sizes"), [({"variant": "scalar"}, [(1,)] * 4), ({"num_tokens": 22}, [22] * 4)])
def test_scaled_attention_in_backbone_and_decoder(options, sizes):
    """17 tokens of the backbone, 16 and a token a class in the decoder; at S = 0 it is plain attention."""
    module, (images, _) = built(mechanism="scaled", options=options), pair()
    found = [part.s.shape for part in module.modules() if isinstance(part, AttentionMechanism)]
    assert [tuple(shape) if len(shape) == 1 else shape[-1] for shape in found] == sizes
    with torch.no_grad():
        torch.testing.assert_close(module(images), built()(images), rtol=1e-5, atol=1e-5)
    module.model.decoder.blocks[0].attn.mechanism.s.data.fill_(0.5)
    assert not torch.allclose(module(images), built()(images), atol=1e-3)


def test_scaled_attention_by_a_matrix_knows_the_backbone_s_tokens_and_asks_for_the_decoder_s():
    module = built(mechanism="scaled", layers=[0, 1])
    found = [tuple(part.s.shape) for part in module.modules() if isinstance(part, AttentionMechanism)]
    assert found == [(2, 17, 17)] * 2
    with pytest.raises(ValueError, match=r"'decoder\.blocks\.0\.attn': .*give it the option num_tokens=N, or use var"):
        built(mechanism="scaled")


def test_a_checkpoint_brings_everything(tmp_path):
    module, run = task(**RPC), trainer(tmp_path)
    run.fit(module, scenes())
    run.save_checkpoint(tmp_path / "a.ckpt")
    loaded = SegmentationTask.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert loaded.hparams.num_classes == 11
    images, _ = pair()
    assert torch.equal(loaded.eval()(images), module.eval()(images))
    masks = torch.cat(trainer(tmp_path).predict(loaded, scenes()))
    assert (masks.shape, masks.dtype) == ((4, 40, 40), torch.int64)


@pytest.mark.parametrize("attention", ["softmax", "symmetric"])
def test_the_backbone_starts_from_a_classifier_of_another_size(tmp_path, attention):
    smaller = {**OPTIONS, "img_size": 16}
    classifier = ImageClassificationTask("deit_tiny_patch16_224", 7, mechanism=attention, model_options=smaller)
    classifier.configure_model()
    path = tmp_path / "classifier.ckpt"
    torch.save({"state_dict": classifier.state_dict()}, path)
    module = task(backbone_checkpoint=str(path), mechanism=attention)
    trainer(tmp_path, limit_val_batches=0).validate(module, scenes(), verbose=False)  # as one may before a fit
    ours, theirs = module.model.backbone.state_dict(), classifier.model.state_dict()
    assert torch.equal(ours["blocks.1.attn.qkv.weight"], theirs["blocks.1.attn.qkv.weight"])
    assert ours["pos_embed"].shape == (1, 17, 16)
    assert torch.equal(ours["pos_embed"][:, 0], theirs["pos_embed"][:, 0])  # of the class token
    quarters = ours["pos_embed"][0, 1:].view(2, 2, 2, 2, 16).mean((1, 3)).view(4, 16)
    assert torch.cdist(quarters, theirs["pos_embed"][0, 1:]).argmin(1).tolist() == [0, 1, 2, 3]  # each where it was
    other = task(backbone_checkpoint=str(path), model={"backbone_options": {**OPTIONS, "depth": 1}})
    with pytest.raises(ValueError, match=r"classifier\.ckpt: its weights do not fit the backbone"):
        trainer(tmp_path).fit(other, scenes())
    with pytest.raises(FileNotFoundError, match="backbone_checkpoint=nothing"):
        trainer(tmp_path).fit(task(backbone_checkpoint="nothing"), scenes())


@pytest.mark.parametrize("name", ["cait_xxs24_224", "deit3_small_patch16_224"])
def test_class_tokens_without_a_position_are_left_alone(tmp_path, name):
    options = {**OPTIONS, "depth": 1, "img_size": 16}
    classifier = ImageClassificationTask(name, 7, model_options=options)
    classifier.configure_model()
    path = tmp_path / "classifier.ckpt"
    torch.save({"state_dict": classifier.state_dict()}, path)
    network = built(model={"backbone": name, "backbone_options": {**OPTIONS, "depth": 1}}).model
    load_backbone(network, str(path))
    ours, theirs = network.backbone.pos_embed, classifier.model.pos_embed
    assert (theirs.shape, ours.shape) == ((1, 4, 16), (1, 16, 16))
    quarters = ours.view(2, 2, 2, 2, 16).mean((1, 3)).view(4, 16)
    assert torch.cdist(quarters, theirs[0]).argmin(1).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("decoder", ["linear", "mask_transformer"])
def test_a_checkpoint_of_other_classes_gives_all_but_what_has_a_part_for_each(tmp_path, decoder):
    before = built(7, model={"decoder": decoder}).state_dict()
    torch.save(
        {"meta": {"epoch": 3}, "state_dict": {name: value + 1 for name, value in before.items()}}, tmp_path / "a"
    )
    module, run = (
        task(model={"decoder": decoder}),
        trainer(tmp_path, callbacks=[InitFromCheckpoint(str(tmp_path / "a"))]),
    )
    with pytest.warns(UserWarning, match="is not that of this model"):
        run.validate(module, scenes(), verbose=False)
    linear = {"model.decoder.weight", "model.decoder.bias"}
    masks = {f"model.decoder.{name}" for name in ("class_tokens", "mask_norm.weight", "mask_norm.bias")}
    other = {name for name, value in module.state_dict().items() if not torch.equal(value, before[name] + 1)}
    assert other == (linear if decoder == "linear" else masks)


@pytest.mark.parametrize("as_list", [False, True])
def test_a_sample_that_a_distributed_sampler_repeats_counts_once(tmp_path, as_list):
    images, masks = pair(7, ignored=0.0)
    data = TensorDataset(images, masks)
    part = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=2, rank=1, shuffle=False))
    overlay = SegmentationOverlay(num_images=8)
    run = trainer(tmp_path, logger=CSVLogger(tmp_path, name="run"), callbacks=[overlay], use_distributed_sampler=False)
    run.test(built(), [part] if as_list else part, verbose=False)
    with (tmp_path / "run" / "version_0" / "test_classes.csv").open() as file:
        assert sum(int(row["pixels"]) for row in csv.DictReader(file)) == 3 * 32 * 32


def test_norms_biases_and_embeddings_have_no_weight_decay():
    module = built(optimizer={"class_path": "AdamW", "init_args": {"lr": 0.1, "weight_decay": 0.3}})
    names = {id(parameter): name for name, parameter in module.model.named_parameters()}
    groups = module.configure_optimizers()["optimizer"].param_groups
    decay = {names.pop(id(p)): group["weight_decay"] for group in groups for p in group["params"]}
    assert not names
    for name, value in decay.items():
        plain = name.endswith(("bias", "pos_embed", "cls_token", "class_tokens")) or "norm" in name
        assert value == (0.0 if plain else 0.3), name


def test_truth_and_prediction_are_painted_in_their_own_panels():
    image, truth, predicted = torch.rand(3, 4, 4), torch.zeros(4, 4).long(), torch.full((4, 4), 2)
    truth[0, 0] = -1
    masks = {"truth": [truth.numpy()], "prediction": [predicted.numpy()]}
    figure = draw_masks([image.permute(1, 2, 0).numpy()], masks, ["_sky$", "tree", "road$"])
    panels = {axes.get_title(): axes.images for axes in figure.axes}
    assert [(title, len(drawn)) for title, drawn in panels.items()] == [("image", 1), ("truth", 2), ("prediction", 2)]
    for drawn in panels.values():
        torch.testing.assert_close(torch.tensor(drawn[0].get_array()).permute(2, 0, 1).float(), image)
    colors = {name: panels[name][1].to_rgba(panels[name][1].get_array()) for name in ("truth", "prediction")}
    assert colors["truth"][0, 0, 3] == 0  # no class, no paint
    assert (colors["truth"][0, 1] == colors["truth"][3, 3]).all()
    assert [panels[name][1].get_alpha() for name in colors] == [0.6, 0.6]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["_sky$", "road$"]
    for patch, name in zip(legend.get_patches(), colors, strict=True):
        assert patch.get_facecolor()[:3] == pytest.approx(tuple(colors[name][3, 3, :3]))


# -- what a run leaves -------------------------------------------------------------------------------------------------


@pytest.mark.figures
def test_a_run_leaves_overlays_and_a_table_a_class(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = [CSVLogger(tmp_path, name="run"), TensorBoardLogger(tmp_path, name="tensorboard")]
    overlay = SegmentationOverlay(every_n_epochs=2, num_images=3)
    run = trainer(tmp_path, logger=loggers, callbacks=[overlay], max_epochs=3)
    module, drawn = task(), []
    folder = tmp_path / "run" / "version_0"
    keep = overlay._draw
    overlay._draw = lambda *given: drawn.append((given[2], run.current_epoch, len(overlay._seen))) or keep(*given)
    run.fit(module, scenes())
    assert [entry for entry in drawn if entry[2]] == [("val/overlay", 1, 3)]
    assert (folder / "val_overlay.png").stat().st_size > 2000
    run.test(module, scenes(), verbose=False)
    run.predict(module, scenes())
    stages = ("val", "test", "predict")
    assert {path.name for path in folder.glob("*.png")} == {f"{stage}_overlay.png" for stage in stages}
    with (folder / "test_classes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["background", *"0123456789"]
    assert sum(int(row["pixels"]) for row in rows) == 4 * 40 * 40
    loggers[1].finalize("success")
    events = EventAccumulator(loggers[1].log_dir)
    events.Reload()
    assert set(events.Tags()["images"]) == {f"{stage}/overlay" for stage in stages}


def test_predict_leaves_masks_and_a_table_of_them(tmp_path):
    callbacks = [PredictionTable(), SegmentationOverlay()]
    run, module = trainer(tmp_path, logger=CSVLogger(tmp_path, name="run"), callbacks=callbacks), task()
    predicted = torch.cat(run.predict(module, scenes()))
    folder = tmp_path / "run" / "version_0"
    with (folder / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["mask"] for row in rows] == [f"predictions/00000{index}_scene_{index}.png" for index in range(4)]
    for row, mask in zip(rows, predicted, strict=True):
        with Image.open(folder / row["mask"]) as file:
            assert file.mode == "L"
            assert np.array_equal(np.asarray(file), mask.numpy())


@pytest.mark.parametrize("as_tensor", [True, False])
def test_images_alone_are_predicted_as_they_are_with_masks(tmp_path, monkeypatch, as_tensor):
    titles = []
    monkeypatch.setattr(
        "lightning_tasks.callbacks.writing.segmentation_overlay.save_figure",
        lambda _, figure, name: titles.extend(axes.get_title() for axes in figure.axes),
    )
    images, masks = pair(height=40, width=48)
    module = built()
    alone = DataLoader(images if as_tensor else TensorDataset(images), batch_size=2)
    callbacks = [PredictionTable(), SegmentationOverlay(num_images=3)]
    found = torch.cat(trainer(tmp_path, callbacks=callbacks).predict(module, alone))
    assert titles == ["image", "prediction"] * 3
    assert torch.equal(found, torch.cat(trainer(tmp_path).predict(module, loader(images, masks))))
    with pytest.raises(ValueError, match=r"must be \(images .*, masks .*\), got 1 part"):
        trainer(tmp_path).validate(module, alone, verbose=False)


def test_masks_of_many_classes_have_16_bits(tmp_path):
    class Many(SegmentationTask):
        def prediction_rows(self, prediction, batch):
            return [{"mask": mask + 300} for mask in prediction]

    module = Many(MODEL, 5)
    (found,) = trainer(tmp_path, callbacks=[PredictionTable()]).predict(module, DataLoader(pair()[0], batch_size=4))
    with Image.open(tmp_path / "predictions" / "000002.png") as file:
        assert np.array_equal(np.asarray(file), found[2].numpy() + 300)


def test_overlays_need_masks(tmp_path):
    class Silent(SegmentationTask):
        def validation_step(self, batch, batch_idx):
            return None

    with pytest.raises(ValueError, match="needs steps that return predicted masks"):
        trainer(tmp_path, callbacks=[SegmentationOverlay()]).validate(Silent(MODEL, 11), scenes(), verbose=False)
    with pytest.raises(ValueError, match="every_n_epochs is 0"):
        SegmentationOverlay(every_n_epochs=0)


def test_corrupted_evaluation_gives_rows_of_miou(tmp_path):
    imagecorruptions = pytest.importorskip("imagecorruptions")
    assert imagecorruptions
    options = {"attacks": [], "corruptions": ["gaussian_noise", "brightness"], "severities": [1, 5]}
    callback = RobustnessEvaluation(**options, num_images=3)
    run = trainer(tmp_path, callbacks=[callback], logger=CSVLogger(tmp_path, name="run"))
    module = built(11)
    logged = run.test(module, scenes(), verbose=False)[0]
    rows = {(row.test, row.name, row.setting, row.metric): row for row in callback.table}
    assert len([key for key in rows if key[0] == "corruption"]) == 4
    data = scenes()
    data.setup("test")
    images, masks = next(iter(data.test_dataloader()))
    metric = SegmentationScores(11, 255)
    metric.update(module.predict_masks(images[:3]), masks[:3])
    assert rows["clean", "", "", "mIoU"].value == pytest.approx(scores(metric.compute())["miou"])
    noisy = SegmentationScores(11, 255)
    noisy.update(module.predict_masks(corrupt(images[:3], "gaussian_noise", 5, seed=callback.settings.seed)), masks[:3])
    found = scores(noisy.compute())["miou"]
    assert found != pytest.approx(scores(metric.compute())["miou"])  # even of random weights
    assert rows["corruption", "gaussian_noise", "5", "mIoU"].value == pytest.approx(found)
    values = [row.value for key, row in rows.items() if key[0] == "corruption"]
    assert rows["mean corruption", "", "", "mIoU"].value == pytest.approx(sum(values) / 4)
    for row in callback.table:
        assert logged[row.label] == pytest.approx(row.value), row
    assert {row.samples for row in callback.table} == {3}
    assert "corruption, mIoU at severity" in (tmp_path / "run" / "version_0" / "robustness.md").read_text()


def test_robustness_of_images_of_different_sizes(tmp_path):
    attacks = ["fgsm", {"name": "pgd", "steps": 2}, "square"]
    callback = RobustnessEvaluation(attacks=attacks, eps=["8/255"], corruptions=[])
    batches = [pair(1, height=40), pair(1, width=48)]
    run, module = trainer(tmp_path, callbacks=[callback]), built()
    with pytest.warns(UserWarning, match="square: for classifiers, not measured of a SegmentationTask.* fgsm and pgd"):
        logged = run.test(module, DataLoader(batches, batch_size=None), verbose=False)[0]
    values = {(row.test, row.name, row.metric): row.value for row in callback.table}
    assert [key[-1] for key in values] == ["mIoU", "mean accuracy", "overall accuracy", "mIoU", "mIoU"]
    assert values["clean", "", "mIoU"] == pytest.approx(logged["test/miou"])
    metric = SegmentationScores(5, 255)
    for images, masks in batches:
        attacked = fgsm(module, images, masks.masked_fill(masks == 255, -100), eps=8 / 255)
        metric.update(module.predict_masks(attacked), masks)
    assert values["attack", "fgsm", "mIoU"] == pytest.approx(scores(metric.compute())["miou"])
    assert logged["robustness/pgd/8_255/mIoU"] == pytest.approx(values["attack", "pgd", "mIoU"])
    assert values["attack", "pgd", "mIoU"] < values["clean", "", "mIoU"]
    assert values["attack", "fgsm", "mIoU"] < values["clean", "", "mIoU"]
    norms = [input_gradient_norms(module, images, masks.masked_fill(masks == 255, -100)) for images, masks in batches]
    expected = [sum(norm.item() for norm in each) / 2 for each in zip(*norms, strict=True)]
    assert [callback.table[-1].gradient_l1, callback.table[-1].gradient_l2] == pytest.approx(expected)


def test_robustness_of_a_segmenter_whose_weights_are_nan_is_nan(tmp_path):
    callback = RobustnessEvaluation(attacks=["fgsm"], eps=["8/255"], corruptions=[])
    run, module = trainer(tmp_path, callbacks=[callback]), built()
    with torch.no_grad():
        next(module.parameters()).fill_(float("nan"))
    with pytest.warns(UserWarning, match=r"all figures are nan: SegmentationTask has weights that are not finite"):
        run.test(module, DataLoader([pair(1)], batch_size=None), verbose=False)
    assert [row.metric for row in callback.table] == ["mIoU", "mean accuracy", "overall accuracy", "mIoU"]
    assert {row.note for row in callback.table} == {"the model gives nan"}


# -- what does not fit -------------------------------------------------------------------------------------------------


@each_row(
    ("options", "text"),
    [
        ({"model": {"backbne": "vit_tiny_patch16_224"}}, "needs one of the keys 'backbone'.*did you mean 'backbone'"),
        ({"model": {**MODEL, "decodr": "linear"}}, "unknown key 'decodr'; Segmenter takes backbone, img_size"),
        ({"model": {**MODEL, "decoder": "mask"}}, "decoder is 'mask'"),
        ({"model": "diet_tiny_patch16_224"}, "the nearest names are deit_tiny"),
        ({"num_classes": 1}, "num_classes must be at least 2"),
        ({"num_classes": 300}, "ignore_index=255 is one of the 300 classes"),
        ({"mechanism": "rcp"}, "Did you mean 'rpc'"),
        ({"stride": 33, "model": MODEL}, "the stride 33 is above the window 32"),
        ({"windows_at_once": 0}, "batch_size of the windows is 0"),
        ({"scales": [1.0, -1.0]}, "scales are"),
        ({"scales": [math.nan]}, "scales are"),
        ({"stride": 1.5}, "stride of the windows is 1.5: give an integer"),
        ({"windows_at_once": "2"}, "batch_size of the windows is '2': give an integer"),
    ],
)
def test_bad_arguments(options, text):
    with pytest.raises(ValueError, match=text):
        SegmentationTask(**options)


@each_row(
    ("options", "text"),
    [
        ({"num_classes": 9}, "num_classes=9 is below the 11 classes of the data module"),
        ({"ignore_index": 99}, "ignore_index=99, but the data module marks .* by 255"),
        ({"ignore_index": 3}, "ignore_index=3 is one of the 11 classes"),
        ({"model": {"img_size": 48}}, "crops of 32 pixels, the network is built for 48: .*crop_size=48"),
    ],
)
def test_data_that_does_not_fit_is_refused_before_training(tmp_path, options, text):
    with pytest.raises(ValueError, match=text):
        trainer(tmp_path).fit(task(**options), scenes())


@each_row(
    ("images", "masks", "text"),
    [
        (pair()[0], pair()[1] + 1, "a mask has the label 256: there are 5 classes"),
        (pair()[0], pair(width=30)[1], r"masks \[B, H, W\]\), got \[2, 3, 32, 32\] and \[2, 32, 30\]"),
        (pair()[0], pair()[1].float(), "masks int64, got torch.float32 and torch.float32"),
    ],
)
def test_batches_that_do_not_fit(tmp_path, images, masks, text):
    with pytest.raises(ValueError, match=text):
        trainer(tmp_path).fit(task(num_classes=5), loader(images, masks))


def test_unknown_number_of_classes_says_what_to_give():
    with pytest.raises(ValueError, match=r"give SegmentationTask\(num_classes=...\)"):
        task().configure_model()
