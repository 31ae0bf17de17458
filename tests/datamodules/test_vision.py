"""What the image data modules share: batches, order, resuming, damaged images, errors, a figure of a batch."""

import gc
import warnings
from multiprocessing import active_children

import numpy as np
import pytest
import torch
from attnswap.datamodules import CIFAR10DataModule, DigitsDataModule, ImageNetDataModule
from attnswap.datamodules.shared.images import ArrayImages, FileImages, ImageDataset
from attnswap.datamodules.shared.show_batch import draw_batch
from attnswap.datamodules.vision import VisionDataModule
from lightning.pytorch import seed_everything
from PIL import Image

from tests.datamodules.image_files import random_pixels, write_class_folders
from tests.rows import each_row


class Noise(VisionDataModule):
    """Random images of two classes, with timm's augmentation; those whose index is in `broken` cannot be read."""

    class_names = ("a", "b")

    def __init__(self, count=20, labels=None, broken=(), **options):
        super().__init__(
            **{
                **{"batch_size": 4, "num_workers": 0, "img_size": 16, "in_chans": 3},
                **{"train_transform": {"auto_augment": "rand-m9-mstd0.5"}, "eval_transform": None, **options},
            }
        )
        self.count, self.broken = count, broken
        self.given = np.arange(count) % 2 if labels is None else np.array(labels)

    def load(self, split):
        images = ArrayImages(random_pixels(self.count, 20), self.given)
        read = images.read

        def damaged(index):
            if index in self.broken:
                raise OSError("image file is truncated")
            return read(index)

        images.read = damaged
        return images


def ready(**options):
    seed_everything(3, verbose=False)
    data = Noise(**options)
    data.setup()
    return data


def batches(loader):
    return [(images.clone(), labels.clone()) for images, labels in loader]


def equal(one, other):
    return len(one) == len(other) and all(
        torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


def test_batches_are_float_images_in_0_to_1_and_integer_labels():
    images, labels = next(iter(ready().train_dataloader()))
    assert (images.dtype, images.shape, labels.dtype, labels.shape) == (
        torch.float32,
        (4, 3, 16, 16),
        torch.int64,
        (4,),
    )
    assert 0 <= images.min() < 0.2 < 0.8 < images.max() <= 1


def test_evaluation_keeps_the_pixels():
    data = DigitsDataModule(batch_size=500)
    data.setup()
    (images, labels) = next(iter(data.test_dataloader()))
    from sklearn.datasets import load_digits

    known = load_digits()
    for image, label in zip(images[:20], labels[:20], strict=True):
        distance = np.abs(known.images / 16 - image[0].numpy()).reshape(len(known.images), -1).max(1)
        assert distance.min() < 1 / 255
        assert known.target[distance.argmin()] == label


def test_training_has_a_new_order_and_new_crops_each_epoch_and_validation_does_not():
    data = ready()
    train, val = data.train_dataloader(), data.val_dataloader()
    first = batches(train)
    train.sampler.set_epoch(1)
    second = batches(train)
    assert not equal(first, second)
    assert equal(batches(val), batches(val))
    train.sampler.set_epoch(0)
    assert equal(batches(train), first)


@pytest.mark.parametrize("workers", [0, 2])
def test_order_and_augmentation_follow_from_the_seed_alone(workers):
    reference = batches(ready().train_dataloader())
    loader = ready(num_workers=workers).train_dataloader()
    torch.rand(7)  # what a model draws meanwhile
    np.random.rand(7)  # noqa: NPY002
    assert equal(batches(loader), reference)
    loader.sampler.set_epoch(1)
    second = ready().train_dataloader()
    second.sampler.set_epoch(1)
    assert equal(batches(loader), batches(second))  # workers that live on have heard of the new epoch


def test_loading_leaves_the_global_random_states_alone():
    loader = ready().train_dataloader()
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    expected = torch.rand(3), np.random.rand(3)  # noqa: NPY002
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    batches(loader)
    assert torch.equal(torch.rand(3), expected[0])
    assert np.array_equal(np.random.rand(3), expected[1])  # noqa: NPY002


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_goes_on_where_the_other_was_without_loading_what_was_given(workers):
    whole = batches(ready().train_dataloader())
    loader = ready(num_workers=workers).train_dataloader()
    given = iter(loader)
    for _ in range(2):
        next(given)
    state = loader.state_dict()
    resumed = ready(num_workers=workers).train_dataloader()
    read = []
    if not workers:
        read_one = resumed.dataset.images.read
        resumed.dataset.images.read = lambda index: read.append(index) or read_one(index)
    resumed.load_state_dict(state)
    assert equal(batches(resumed), whole[2:])
    assert len(read) in (0, 12)
    assert equal(batches(resumed), whole)  # and the next pass is a whole one


@each_row("workers", [0, 1])
def test_damaged_images_are_left_out_counted_and_named(workers):
    data = ready(broken={3, 11}, num_workers=workers, batch_size=20)
    loader = data.train_dataloader()
    with pytest.warns(
        UserWarning,
        match=r"2 of 20 images cannot be read and are left out: image 3, image 11 \(the first: OSError",
    ):
        ((images, labels),) = batches(loader)
    assert (len(images), len(labels), data.skipped) == (18, 18, {"train": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.sampler.set_epoch(1)
        assert len(batches(loader)[0][1]) == 18  # said once


def test_a_batch_with_damaged_images_alone_is_empty():
    with pytest.warns(UserWarning, match="4 of 20"):
        sizes = [images.shape for images, _ in ready(broken={0, 1, 2, 3}).val_dataloader()]
    assert sizes == [(0, 3, 16, 16)] + [(4, 3, 16, 16)] * 4


def test_a_data_set_of_damaged_images_alone_is_an_error():
    with (
        pytest.warns(UserWarning, match="images cannot be read"),
        pytest.raises(ValueError, match=r"none of the 20 images can be read, e\.g\. image 0"),
    ):
        batches(ready(broken=range(20)).val_dataloader())


def test_a_truncated_jpeg_is_skipped(tmp_path):
    for split in ("train", "val"):
        write_class_folders(tmp_path / "imagenet" / split, {"a": 3, "b": 3}, size=64)
    broken = tmp_path / "imagenet" / "train" / "b" / "b_1.JPEG"
    broken.write_bytes(broken.read_bytes()[:400])
    (tmp_path / "imagenet" / "train" / "a" / "a_0.JPEG").write_bytes(b"")
    data = ImageNetDataModule(root=tmp_path, num_workers=0, batch_size=4, img_size=16)
    data.setup()
    with pytest.warns(UserWarning, match=r"2 of 6 images cannot be read and are left out: .*a_0\.JPEG, .*b_1\.JPEG"):
        assert sum(len(labels) for _, labels in data.train_dataloader()) == 4


def ramp(bits):
    return np.linspace(0, 2**bits - 1, 64).round().astype(f"uint{bits}").reshape(8, 8)


@pytest.mark.parametrize(("kind", "in_chans"), [("png", 3), ("png", 1), ("tiff", 3), ("pgm", 3)])
def test_images_of_16_bits_are_scaled_to_8(tmp_path, kind, in_chans):
    Image.fromarray(ramp(16)).save(tmp_path / f"deep.{kind}")
    images = ImageDataset(
        FileImages([str(tmp_path / f"deep.{kind}")], [0]), lambda image: np.asarray(image), in_chans, False
    )
    pixels = images[0][0].reshape(8, 8, -1)
    assert pixels.shape[2] == in_chans
    assert (np.abs(pixels.astype(int) - ramp(8)[..., None]) <= 1).all()  # Pillow alone gives 255 but for the first


def test_images_of_numbers_without_a_range_are_left_out(tmp_path):
    Image.fromarray(np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)).save(tmp_path / "a.tiff")
    Image.fromarray(np.full((8, 8), 70_000, np.int32)).save(tmp_path / "b.tiff")
    Image.fromarray(ramp(8)).save(tmp_path / "c.tiff")
    paths = [str(tmp_path / name) for name in ("a.tiff", "b.tiff", "c.tiff")]
    images = ImageDataset(FileImages(paths, [0, 0, 0]), lambda image: np.asarray(image), 3, False)
    assert [images[index] is None for index in range(3)] == [True, True, False]
    with pytest.warns(
        UserWarning, match=r"2 of 3 images.*a\.tiff.*ValueError: values of mode F from 0\.0 to 1\.0: give"
    ):
        images.warn_of_skipped()


def test_filling_up_for_several_processes_repeats_nothing():
    dataset = ImageDataset(ArrayImages(random_pixels(5, 8), [0] * 5), lambda image: torch.zeros(3, 8, 8), 3, False, 4)
    assert len(dataset) == 8
    assert [item is None for item in dataset.__getitems__(range(8))] == [False] * 5 + [True] * 3


@pytest.mark.parametrize(("mode", "in_chans"), [("L", 3), ("RGBA", 3), ("RGB", 1), ("P", 3)])
def test_images_of_any_mode_get_the_channels_that_were_asked_for(mode, in_chans):
    images = ArrayImages(random_pixels(2, 16), [0, 1])
    images.read = lambda index: Image.new(mode, (16, 16))
    data = ready(in_chans=in_chans)
    data._images["train"] = images
    assert next(iter(data.train_dataloader()))[0].shape == (2, in_chans, 16, 16)


@each_row(
    ("options", "text"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"img_size": 0}, "img_size is 0"),
        ({"in_chans": 2}, r"in_chans is 2: give 1 \(grayscale\) or 3"),
        ({"train_transform": {"re_prob": 0.25}}, "train_transform has 're_prob'.*belong to the task"),
        ({"eval_transform": {"crop": 1}}, "eval_transform is {'crop': 1}: timm.*crop"),
    ],
)
def test_bad_arguments(options, text):
    with pytest.raises(ValueError, match=text):
        Noise(**options)


@each_row("labels", [[0, 2], [-1, 1]])
def test_labels_out_of_range(labels):
    says = r"labels from -?\d to \d, but 2 classes are known: .* 0 to 1.* is (2 of image 1|-1 of image 0)"
    with pytest.raises(ValueError, match=says):
        ready(count=2, labels=labels)


def test_memory_is_pinned_for_an_accelerator_only():
    assert ready().train_dataloader().pin_memory is torch.accelerator.is_available()


def test_workers_persist_where_there_are_any():
    assert ready(num_workers=1).train_dataloader().persistent_workers
    assert not ready().train_dataloader().persistent_workers


def test_workers_end_with_their_loader():
    before = set(active_children())
    gc.disable()  # in a collection their end would be waited for
    try:
        loader = ready(num_workers=1).train_dataloader()
        batches(loader)
        assert set(active_children()) - before
        del loader
        assert not set(active_children()) - before
    finally:
        gc.enable()


def test_the_name_of_a_class_is_no_formula(tmp_path):
    assert draw_batch([torch.rand(3, 4, 4)], ["$\\frac{$"], tmp_path / "batch.png").is_file()


def test_show_batch_draws_a_png(tmp_path):
    with pytest.warns(UserWarning, match="4 of 20"):
        path = ready(broken={0, 1, 2, 3}).show_batch(tmp_path / "new" / "batch.png", split="test", num_images=6)
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert np.asarray(image.convert("L")).std() > 10
    with pytest.raises(ValueError, match="split is 'tset'"):
        ready().show_batch(path, split="tset")


@pytest.mark.parametrize("kind", [CIFAR10DataModule, DigitsDataModule])
def test_another_interpolation_crops_no_small_images(kind):
    assert kind(eval_transform={"interpolation": "bicubic"}).eval_transform["crop_pct"] == 1.0
    assert kind(eval_transform={"crop_pct": 0.9}).eval_transform["crop_pct"] == 0.9
