"""Digits, CIFAR-10 in each of its layouts, ImageNet in both of its."""

import io
import itertools
import pickle
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from attnswap.datamodules import (
    CIFAR10DataModule,
    DigitsDataModule,
    ImageNetDataModule,
    RepeatedAugmentation,
    ResumableLoader,
)
from attnswap.datamodules.cifar10 import parse_python
from attnswap.datamodules.imagenet import check_wnids
from attnswap.datamodules.shared.images import ArrayImages
from timm.data import ImageNetInfo
from timm.data.distributed_sampler import RepeatAugSampler
from torch.utils.data import DistributedSampler

from tests.datamodules.image_files import random_pixels, write_class_folders, write_parquet
from tests.rows import each_row

PLAIN = {"train_transform": {"no_aug": True}, "batch_size": 100}


def pixels_of(loader):
    return torch.cat([images for images, _ in loader]), torch.cat([labels for _, labels in loader])


# -- digits ------------------------------------------------------------------------------------------------------------


def test_digits_have_fixed_disjoint_balanced_splits():
    data = DigitsDataModule()
    data.setup()
    sizes = {split: len(data.images(split)) for split in ("train", "validation", "test")}
    assert sizes == {"train": 1257, "validation": 180, "test": 360}
    seen = np.concatenate([data.images(split).pixels.reshape(-1, 64) for split in sizes])
    assert len(np.unique(seen, axis=0)) == len(seen)  # no digit is in two splits
    assert np.bincount(data.images("test").labels).min() >= 34
    again, other = DigitsDataModule(), DigitsDataModule(split_seed=1)
    assert np.array_equal(again.images("test").pixels, data.images("test").pixels)
    assert not np.array_equal(other.images("test").pixels, data.images("test").pixels)


def test_digits_in_other_shapes():
    data = DigitsDataModule(img_size=16, in_chans=3)
    data.setup("test")
    assert next(iter(data.test_dataloader()))[0].shape == (64, 3, 16, 16)


# -- CIFAR-10 ----------------------------------------------------------------------------------------------------------


def python_batch(pixels, labels):
    """What Python 2 wrote, as nearly as Python 3 can."""
    rows = pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)
    return pickle.dumps({b"data": rows, b"labels": labels.tolist(), b"batch_label": b"a"}, protocol=2)


def write_archive(folder, kind):
    """An archive of five batches of ten and ten to test; returns all pixels."""
    pixels, labels = random_pixels(60, 32), np.arange(60) % 10
    names = [*(f"data_batch_{index}" for index in range(1, 6)), "test_batch"]
    files = {}
    for place, name in enumerate(names):
        part, marks = pixels[10 * place : 10 * place + 10], labels[10 * place : 10 * place + 10]
        if "py" in kind:
            files[name] = python_batch(part, marks)
        else:
            rows = part.transpose(0, 3, 1, 2).reshape(10, -1)
            files[f"{name}.bin"] = np.concatenate([marks[:, None].astype(np.uint8), rows], 1).tobytes()
    folder.mkdir(parents=True)
    if kind.endswith(".tar.gz"):
        with tarfile.open(folder / kind, "w:gz") as archive:
            for name, content in files.items():
                info = tarfile.TarInfo(f"cifar-10-batches/{name}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    else:
        (folder / kind).mkdir()
        for name, content in files.items():
            (folder / kind / name).write_bytes(content)
    return pixels


@pytest.mark.parametrize(
    "kind", ["cifar-10-batches-py", "cifar-10-python.tar.gz", "cifar-10-batches-bin", "cifar-10-binary.tar.gz"]
)
def test_cifar10_from_the_original_archive(tmp_path, kind):
    pixels = write_archive(tmp_path / "cifar10", kind)
    data = CIFAR10DataModule(root=tmp_path, val_fraction=0.2, **PLAIN)
    data.setup()
    assert [len(data.images(split)) for split in ("train", "validation", "test")] == [40, 10, 10]
    images, labels = pixels_of(data.test_dataloader())
    assert torch.equal((images * 255).round().byte().permute(0, 2, 3, 1), torch.from_numpy(pixels[50:]))
    assert labels.tolist() == list(range(10))


def test_cifar10_from_the_hubs_files(tmp_path):
    train = write_parquet(tmp_path / "cifar10" / "plain_text", "train", 50, image="img")
    write_parquet(tmp_path / "cifar10" / "plain_text", "test", 10, image="img")
    data = CIFAR10DataModule(root=tmp_path, val_fraction=0, **PLAIN)
    data.setup()
    assert np.array_equal(data.images("train").pixels, train)
    assert len(data.images("validation")) == len(data.images("test")) == 10
    assert data.class_names[3] == "cat"


def test_a_pickle_of_cifar10_runs_no_code(tmp_path):
    class Payload:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    with pytest.raises(pickle.UnpicklingError, match="open is not allowed: only NumPy arrays are"):
        parse_python(pickle.dumps({b"data": Payload(), b"labels": []}, protocol=2))
    assert not (tmp_path / "ran").exists()


def test_a_damaged_archive_is_named(tmp_path):
    write_archive(tmp_path / "cifar10", "cifar-10-batches-bin")
    path = tmp_path / "cifar10" / "cifar-10-batches-bin" / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"data_batch_2\.bin is no whole file of CIFAR-10"):
        CIFAR10DataModule(root=tmp_path).setup()


def test_a_damaged_image_of_the_hubs_files_is_left_out(tmp_path):
    folder = tmp_path / "cifar10" / "plain_text"
    write_parquet(folder, "train", 50, image="img", content={7: b"\x89PNG broken"})
    write_parquet(folder, "test", 10, image="img")
    data = CIFAR10DataModule(root=tmp_path, val_fraction=0)
    with pytest.warns(UserWarning, match=r"1 of 50 images cannot be read and are left out: .*7\.png"):
        data.setup()
    assert len(data.images("train")) == 49


@each_row(
    ("options", "text"),
    [
        ({"label": {3: 10}}, r"train-00000-of-00001\.parquet, 3\.png: the label is 10, where .* 0 to 9"),
        ({"size": 28}, r"\(28, 28\) pixels, where CIFAR-10"),
    ],
)
def test_files_that_are_not_cifar10(tmp_path, options, text):
    for split in ("train", "test"):
        write_parquet(tmp_path / "cifar10" / "plain_text", split, 50, image="img", **options)
    with pytest.raises(ValueError, match=text):
        CIFAR10DataModule(root=tmp_path, val_fraction=0.1).setup()


@each_row(("kind", "name"), [("cifar-10-batches-py", "data_batch_2"), ("cifar-10-batches-bin", "data_batch_2.bin")])
def test_a_label_of_the_archive_that_is_no_class(tmp_path, kind, name):
    write_archive(tmp_path / "cifar10", kind)
    path, pixels, labels = tmp_path / "cifar10" / kind / name, random_pixels(10, 32), np.arange(10)
    labels[4] = 10
    if "py" in kind:
        path.write_bytes(python_batch(pixels, labels))
    else:
        content = bytearray(path.read_bytes())
        content[4 * 3073] = 10
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{kind}: {name} is no whole file .*image 4 has label 10: .* 0 to 9"):
        CIFAR10DataModule(root=tmp_path, val_fraction=0.1).setup()


@each_row(
    ("label", "said"),
    [
        (0.5, r"image 4 has label 0\.5, which is no whole number \(1 of 10 labels are none\)"),
        (float("nan"), "image 4 has label nan, which is no whole number"),
        (float("inf"), "image 4 has label inf, which is no whole number"),
        (-1.0, "image 4 has label -1: .* 0 to 9"),
        ("4", "labels are <U21 of shape .*10.*: give one integer for each image"),
        (None, "labels are object of shape"),
    ],
)
def test_a_label_of_the_archive_that_is_no_whole_number(tmp_path, label, said):
    write_archive(tmp_path / "cifar10", "cifar-10-batches-py")
    path = tmp_path / "cifar10" / "cifar-10-batches-py" / "data_batch_2"
    labels = [*range(4), label, *range(5, 10)]
    rows = random_pixels(10, 32).transpose(0, 3, 1, 2).reshape(10, -1)
    path.write_bytes(pickle.dumps({b"data": rows, b"labels": labels}, protocol=2))
    with pytest.raises(ValueError, match=rf"data_batch_2 is no whole file .*{said}"):
        CIFAR10DataModule(root=tmp_path, val_fraction=0.1).setup()


@each_row(
    ("kind", "label", "said"),
    [(pa.float64(), 0.5, "0.5"), (pa.float64(), float("nan"), "nan"), (pa.bool_(), True, "True")],
)
def test_a_label_of_the_hubs_files_that_is_no_whole_number(tmp_path, kind, label, said):
    for split in ("train", "test"):
        folder = tmp_path / "cifar10" / "plain_text"
        write_parquet(folder, split, 5, image="img")
        path = folder / f"{split}-00000-of-00001.parquet"
        pq.write_table(pq.read_table(path).set_column(1, "label", pa.array([label] * 5, kind)), path)
    with pytest.raises(ValueError, match=rf"0\.png: the label is {said}, where CIFAR-10 has integers from 0 to 9"):
        CIFAR10DataModule(root=tmp_path, val_fraction=0.1).setup()


def test_images_in_memory_take_whole_labels_only():
    pixels = random_pixels(2, 8)
    assert ArrayImages(pixels, np.array([1.0, 2.0])).labels.tolist() == [1, 2]
    assert ArrayImages(pixels, np.array([1, 2], np.uint8)).labels.dtype == np.int64
    assert len(ArrayImages(pixels[:0], [])) == 0
    for labels in ([0.5, 1.0], [float("nan"), 1.0], [[0, 1]], [True, False]):
        with pytest.raises(ValueError, match=r"whole number|one integer for each image"):
            ArrayImages(pixels, labels)


def test_missing_cifar10_says_where_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train-00000-of-00001\.parquet is missing.*download=True"):
        CIFAR10DataModule(root=tmp_path).setup()
    with pytest.raises(ValueError, match=r"val_fraction is 1\.0"):
        CIFAR10DataModule(root=tmp_path, val_fraction=1.0)


def test_a_missing_shard_is_named(tmp_path):
    folder = tmp_path / "cifar10" / "plain_text"
    write_parquet(folder, "train", 10, image="img")
    (folder / "train-00000-of-00001.parquet").rename(folder / "train-00001-of-00002.parquet")
    with pytest.raises(FileNotFoundError, match=r"train-00000-of-00002\.parquet is missing \(1 of 2"):
        CIFAR10DataModule(root=tmp_path).setup()


def test_real_cifar10(data_folder):
    if not (data_folder / "cifar10").is_dir():
        pytest.skip("CIFAR-10 is not under $ATTNSWAP_DATA")
    data = CIFAR10DataModule(root=data_folder)
    data.setup()
    assert [len(data.images(split)) for split in ("train", "validation", "test")] == [9000, 1000, 2000]
    assert np.bincount(data.images("validation").labels).tolist() == [100] * 10


# -- ImageNet ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path):
    for split in ("train", "val"):
        write_class_folders(tmp_path / "imagenet" / split, {"n00000002": 2, "n00000001": 3})
    return tmp_path


def imagenet(root, **options):
    data = ImageNetDataModule(
        root=root, num_workers=0, img_size=16, batch_size=4, **{"cache_dir": root / "cache", **options}
    )
    data.setup()
    return data


def test_class_folders_in_sorted_order(folders):
    data = imagenet(folders)
    assert list(data.class_names) == ["n00000001", "n00000002"]
    assert data.images("train").labels.tolist() == [0, 0, 0, 1, 1]
    assert next(iter(data.train_dataloader()))[0].shape == (4, 3, 16, 16)
    assert data.images("test") is data.images("validation")


def test_class_folders_that_do_not_match(folders):
    write_class_folders(folders / "imagenet" / "val", {"n00000003": 1})
    with pytest.raises(ValueError, match=r"train lacks 1 class folders that .*val has \(n00000003\)"):
        imagenet(folders)


def test_an_empty_class_folder(folders):
    for path in (folders / "imagenet" / "train" / "n00000002").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match=r"n00000002 has no image"):
        imagenet(folders)


def test_images_in_sub_folders_of_a_class_count_and_what_is_dropped_is_said(folders):
    place = folders / "imagenet" / "train"
    write_class_folders(place / "n00000002", {"more": 2, ".hidden": 1})
    (place / "n00000002" / "boxes.txt").write_text("1 2 3 4")
    (place / "n00000002" / ".DS_Store").write_text("")
    (place / "n00000001" / "n00000001_0.JPEG").rename(place / "loose.JPEG")
    says = r"train: 2 files are left out, as they lie outside .*train/loose\.JPEG, .*n00000002/boxes\.txt$"
    with pytest.warns(UserWarning, match=says):
        data = imagenet(folders)
    assert data.images("train").labels.tolist() == [0, 0, 1, 1, 1, 1]


def test_wordnet_ids_of_class_folders(folders, tmp_path):
    assert imagenet(folders).wnids == ["n00000001", "n00000002"]
    for split in ("train", "val"):
        (folders / "imagenet" / split / "n00000001").rename(folders / "imagenet" / split / "cat")
    assert imagenet(folders).wnids is None


def test_missing_imagenet_says_what_was_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"imagenet/train is missing, and so is .*data/train-00000-of-YYYYY"):
        imagenet(tmp_path)


def test_a_thousand_wordnet_ids_must_be_those_of_imagenet():
    known = ImageNetInfo("imagenet-1k").label_names()
    check_wnids(known)
    check_wnids([f"n{index:08d}" for index in range(7)])  # other numbers of classes are fine
    check_wnids([f"class_{index}" for index in range(1000)])
    with pytest.raises(ValueError, match=r"1 are no classes of ImageNet-1k \(n01440765; is n01440765 meant to be n014"):
        check_wnids(sorted(["n01440765", *known[1:]]))
    with pytest.raises(
        ValueError, match="label 0 is called n01443537, and in ImageNet-1k it is n01440764: labels must"
    ):
        check_wnids([*known[1:], known[0]])


@each_row("layout", ["folders", "parquet"])
def test_both_layouts_of_imagenet_check_its_wordnet_ids(tmp_path, layout):
    names = ["n01440765", *ImageNetInfo("imagenet-1k").label_names()[1:]]
    for split, folder in (("train", "train"), ("validation", "val")):
        if layout == "parquet":
            write_parquet(tmp_path / "imagenet" / "data", split, 2, names=names)
        for name in names if layout == "folders" else ():
            (tmp_path / "imagenet" / folder / name).mkdir(parents=True)
            (tmp_path / "imagenet" / folder / name / "0.JPEG").touch()
    with pytest.raises(ValueError, match="1,000 classes, but 1 are no classes of ImageNet-1k"):
        imagenet(tmp_path)


@each_row(
    ("names", "says"),
    [
        (["dog", "cat", "eel"], "validation-00000-of-00001.parquet calls label 0 'dog', the training files 'cat'"),
        (["cat", "dog"], "calls label 2 'nothing', the training files 'eel'"),
    ],
)
def test_the_hubs_splits_must_have_the_same_names(tmp_path, names, says):
    write_parquet(tmp_path / "imagenet" / "data", "train", 6, classes=3, names=["cat", "dog", "eel"])
    write_parquet(tmp_path / "imagenet" / "data", "validation", 6, classes=2, names=names)
    with pytest.raises(ValueError, match=says):
        imagenet(tmp_path)


def test_a_damaged_file_of_the_hub_is_named(tmp_path):
    write_parquet(tmp_path / "imagenet" / "data", "train", 6)
    (tmp_path / "imagenet" / "data" / "validation-00000-of-00001.parquet").write_bytes(b"PAR1 and so on")
    with pytest.raises(ValueError, match=r"validation-00000-of-00001\.parquet is no whole parquet file"):
        imagenet(tmp_path)


@each_row("place", ["data", "."])
def test_the_hubs_files(tmp_path, place):
    for split in ("train", "validation"):
        write_parquet(tmp_path / "imagenet" / place, split, 6, classes=3, names=["cat", "dog", "eel"], content={4: b""})
    data = imagenet(tmp_path)
    assert list(data.class_names) == ["cat", "dog", "eel"]
    with pytest.warns(UserWarning, match=r"1 of 6 images cannot be read and are left out: 4\.png"):
        images, labels = pixels_of(data.train_dataloader())
    assert (len(images), sorted(labels.tolist())) == (5, [0, 0, 1, 2, 2])


def test_the_hubs_labels_out_of_range(tmp_path):
    for split in ("train", "validation"):
        write_parquet(tmp_path / "imagenet" / "data", split, 6, classes=3, names=["cat", "dog", "eel"], label={5: 3})
    with pytest.raises(ValueError, match=r"labels from 0 to 3, but 3 classes.* is 3 of 5\.png"):
        imagenet(tmp_path)


def test_the_hubs_labels_that_are_no_integers(tmp_path):
    for split in ("train", "validation"):
        write_parquet(tmp_path / "imagenet" / "data", split, 3)
        path = tmp_path / "imagenet" / "data" / f"{split}-00000-of-00001.parquet"
        table = pq.read_table(path)
        pq.write_table(table.set_column(1, "label", pa.array(["cat", "dog", "eel"])), path)
    with pytest.raises(ValueError, match=r"has string in the column 'label': integers are needed"):
        imagenet(tmp_path)


@each_row("names", [None, [f"class {index}" for index in range(1000)]])
def test_the_hubs_labels_in_another_order(tmp_path, names):
    for split in ("train", "validation"):
        changed = {"path": {0: "n01440764_1.JPEG", 1: "n01440764_2.JPEG"}, "label": {3: 999}}  # tench, which is label 0
        write_parquet(tmp_path / "imagenet" / "data", split, 4, names=names, **changed)
    with pytest.raises(ValueError, match=r"n01440764_2\.JPEG has label 1, which is n01443537"):
        imagenet(tmp_path)


def test_real_imagenet_sample(data_folder):
    if not (data_folder / "imagenet_sample").is_dir():
        pytest.skip("the ImageNet sample is not under $ATTNSWAP_DATA")
    data = ImageNetDataModule(
        root=data_folder, folder="imagenet_sample", train=".", val=".", num_workers=0, batch_size=8
    )
    data.setup("validate")
    assert data.num_classes == 1000
    images, labels = next(iter(data.val_dataloader()))
    assert images.shape == (8, 3, 224, 224)
    assert labels.tolist() == list(range(8))


def test_repeated_augmentation_is_timms_order_of_the_seed(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    for processes in (1, 4):
        parts = []
        for process in range(processes):
            order = RepeatedAugmentation(range(1000), 3, processes, process)
            order.set_epoch(2)
            timms = RepeatAugSampler(range(1000), processes, process)
            timms.set_epoch(7)
            assert list(order) == list(timms)
            assert isinstance(order, DistributedSampler)  # which Lightning leaves as it is
            parts.append(list(order))
        whole = [index for step in zip(*parts, strict=True) for index in step]
        assert len(whole) == len(order) * processes == 768
        assert set(map(whole.count, whole[:600])) == {3}


@pytest.mark.parametrize(("processes", "workers"), [(1, 0), (1, 2), (2, 0)])
def test_repeated_images_are_augmented_in_other_ways(folders, processes, workers):
    data = imagenet(folders).train_dataloader().dataset
    seen = {}
    for process in range(processes):
        order = RepeatedAugmentation(data, 3, processes, process)
        loader = ResumableLoader(data, batch_size=2, sampler=order, num_workers=workers, collate_fn=list)
        items = [item for batch in loader for item in batch]
        for index, (image, _) in zip(order, items, strict=True):
            seen.setdefault(int(index), []).append(image)
    pairs = [pair for images in seen.values() for pair in itertools.combinations(images, 2)]
    assert pairs
    assert not any(torch.equal(*pair) for pair in pairs)


def test_repeats_of_imagenet(folders):
    loader = imagenet(folders, repeats=3).train_dataloader()
    assert isinstance(loader.sampler, RepeatedAugmentation)
    assert sorted(map([*loader.sampler].count, set(loader.sampler))) == [2, 3]  # of 5 images
    with pytest.raises(ValueError, match="repeats"):
        ImageNetDataModule(repeats=0)
