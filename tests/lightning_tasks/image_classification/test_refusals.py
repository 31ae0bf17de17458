"""What the task refuses: arguments, weights, data and images that do not fit, each by name."""

from functools import partial

import pytest
import timm
import torch
from attnswap.datamodules import DigitsDataModule
from torch.utils.data import DataLoader, TensorDataset

from lightning_tasks import ImageClassificationTask, SegmentationTask, load_swapped
from lightning_tasks.files.load import load_module
from tests.lightning_tasks.image_classification.tasks import TINY, built, images, task
from tests.lightning_tasks.language_data import trainer
from tests.rows import each_row


@each_row(
    ("options", "text"),
    [
        ({"model": "vit_tiny_patch16_225"}, "no model 'vit_tiny_patch16_225'; the nearest names are vit_tiny_patch16_"),
        ({"model": "diet_tiny_patch16_224"}, "the nearest names are deit_tiny_patch16_224"),
        ({"model": "vit_tinny"}, "the nearest names are vit_tiny_patch16_224"),
        ({"model": "deit_tiny_patch16_224.fb"}, r"no weights 'fb' for deit_tiny_patch16_224; it has fb_in1k"),
        ({"num_classes": 1}, "num_classes must be at least 2, got 1"),
        ({"mechanism": "rcp"}, "Did you mean 'rpc'"),
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


@each_row(
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


def test_what_an_optimizer_of_groups_does_not_read_is_named():
    optimizer = {"class_path": "timm.optim.create_optimizer_v2", "init_args": {"opt": "adamw", "layer_decay": 0.5}}
    with pytest.raises(ValueError, match="reads no layer_decay: give the task layer_decay"):
        built(optimizer=optimizer).configure_optimizers()


def test_a_plateau_of_timm_is_refused(tmp_path):
    schedule = {"class_path": "timm.scheduler.create_scheduler_v2", "init_args": {"sched": "plateau"}}
    with pytest.raises(ValueError, match="take ReduceLROnPlateau with scheduler_interval='epoch'"):
        trainer(tmp_path).fit(task(scheduler=schedule, scheduler_interval="epoch"), DigitsDataModule(batch_size=250))


def test_layer_decay_out_of_range():
    with pytest.raises(ValueError, match="layer_decay must be above 0 and at most 1, got"):
        built(layer_decay=1.5).configure_optimizers()


@each_row(
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


@each_row("name", ["levit_128s", "coatnet_nano_rw_224", "crossvit_tiny_240", "hiera_tiny_224"])
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


@each_row(
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


@pytest.mark.parametrize("word", ["no", "false", 0])
def test_words_are_no_flags(word, tmp_path):
    """They would count as true: of ``trust_checkpoint`` the file could then name any code."""
    said = "must be True or False, got"
    with pytest.raises(ValueError, match=f"^pretrained {said}"):
        ImageClassificationTask("deit_tiny_patch16_224", pretrained=word)
    with pytest.raises(ValueError, match=f"^flip {said}"):
        SegmentationTask("deit_tiny_patch16_224", flip=word)
    path = tmp_path / "a.ckpt"
    swapped = partial(load_swapped, ImageClassificationTask)
    for load in (ImageClassificationTask.load_from_checkpoint, swapped, load_module):
        with pytest.raises(ValueError, match=f"^trust_checkpoint {said}"):
            load(path, trust_checkpoint=word)
