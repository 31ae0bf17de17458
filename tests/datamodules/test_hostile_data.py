"""Data that somebody else made, or that was torn: named in one line, without code, endless reading or memory."""

import io
import itertools
import json
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attnswap.datamodules import CIFAR10DataModule, GutenbergDataModule
from attnswap.datamodules.cifar10 import read_archive
from attnswap.datamodules.shared.decoding import open_image
from attnswap.datamodules.shared.folder import find_images
from attnswap.datamodules.shared.hub import read_column
from attnswap.datamodules.shared.images import ParquetImages
from attnswap.datamodules.shared.scenes import FileScenes
from attnswap.datamodules.shared.token_cache import CacheEntry, _write_manifest, write_tokens
from PIL import Image, UnidentifiedImageError

from attnswap import datamodules
from tests.datamodules.image_files import encoded, random_pixels, write_class_folders
from tests.rows import each_row

CELL = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


class Vast:
    def __reduce__(self):
        return np.ndarray, ((10**13,),)


def archive(path, *members):
    with tarfile.open(path, "w:gz", compresslevel=1) as file:
        for member, content in members:
            file.addfile(member, content)
    return path


def member(name, size, **changed):
    info = tarfile.TarInfo(name)
    info.size = size
    for key, value in changed.items():
        setattr(info, key, value)
    return info


class Zeros(io.RawIOBase):
    def read(self, size=-1):
        return bytes(size)


def test_links_of_an_archive_are_not_followed_and_its_names_are_no_paths(tmp_path):
    link = member("../../test_batch.bin", 0, type=tarfile.SYMTYPE, linkname="/etc/passwd")
    path = archive(tmp_path / "cifar-10-binary.tar.gz", (link, None))
    with pytest.raises(FileNotFoundError, match=r"has no test_batch\.bin"):
        read_archive(path, "test")
    assert os.listdir(tmp_path) == [path.name]


def test_an_archive_is_not_unpacked_into_memory_without_end(tmp_path):
    path = archive(tmp_path / "cifar-10-binary.tar.gz", (member("test_batch.bin", 1 << 27), Zeros()))
    with pytest.raises(ValueError, match=r"test_batch\.bin has 134,217,728 bytes, and a file of CIFAR-10 at most"):
        read_archive(path, "test")
    with tarfile.open(path, "w:gz", compresslevel=1) as file:
        file.addfile(member("vast", 0))
        file.fileobj.write(member("vast", 1 << 34).tobuf())  # of which nothing follows
    with pytest.raises(ValueError, match="unpacks to more than 1,073,741,824 bytes"):
        read_archive(path, "test")


@each_row("content", [pickle.dumps({b"data": Vast()}, 2), b"\x80\x02" + b"(l" * 9, pickle.dumps(3, 2)])
def test_a_pickle_that_is_no_cifar10_is_named(tmp_path, content):
    path = tmp_path / "cifar-10-python.tar.gz"
    archive(path, (member("test_batch", len(content)), io.BytesIO(content)))
    with pytest.raises(ValueError, match=f"{path}: test_batch is no whole file of CIFAR-10"):
        read_archive(path, "test")


def test_a_pipe_in_an_unpacked_archive_is_not_waited_for(tmp_path):
    (tmp_path / "cifar-10-batches-bin").mkdir()
    os.mkfifo(tmp_path / "cifar-10-batches-bin/test_batch.bin")
    with pytest.raises(ValueError, match="is no file"):
        read_archive(tmp_path / "cifar-10-batches-bin", "test")


def test_an_image_is_given_to_no_other_program(tmp_path):
    """Pillow hands EPS to Ghostscript, whatever the file's name is."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.eps")
    (tmp_path / "a.eps").rename(tmp_path / "a.png")
    with pytest.raises(UnidentifiedImageError):
        open_image(str(tmp_path / "a.png"))


def test_a_pipe_among_images_and_masks_is_not_waited_for(tmp_path):
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
        os.mkfifo(tmp_path / folder / "a.png")
    with pytest.raises(OSError, match="is no file"):
        FileScenes(tmp_path / "images", tmp_path / "masks").read(0)


@each_row("cells", [["a"], [1]])
def test_a_column_of_cifar10_without_images_is_named(tmp_path, cells):
    folder = tmp_path / "cifar10/plain_text"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"img": cells, "label": [0]}), folder / "train-00000-of-00001.parquet")
    with pytest.raises(ValueError, match=f"{folder}/train-.* has (str|int) in 'img': bytes and path are needed"):
        CIFAR10DataModule(root=tmp_path).load("train")


def test_an_image_of_another_size_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    folder = tmp_path / "cifar10/plain_text"
    folder.mkdir(parents=True)
    cells = pa.array([{"bytes": encoded(random_pixels(1, 64)[0]), "path": "large.png"}], CELL)
    pq.write_table(pa.table({"img": cells, "label": [0]}), folder / "train-00000-of-00001.parquet")
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    with pytest.raises(ValueError, match=r"large\.png: \(64, 64\) pixels"):
        CIFAR10DataModule(root=tmp_path).load("train")


@each_row(
    ("column", "features"), [(pa.array([1]), None), (pa.array([None], CELL), "{"), (pa.array([None], CELL), "type")]
)
def test_parquet_without_images_is_named(tmp_path, column, features):
    unknown = {"info": {"features": {"image": {"_type": "os.system"}, "label": {"dtype": "int64", "_type": "Value"}}}}
    metadata = {None: None, "{": {"huggingface": "{"}, "type": {"huggingface": json.dumps(unknown)}}[features]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"image": column, "label": [0]}).replace_schema_metadata(metadata), path)
    with pytest.raises(ValueError, match=f"{path} cannot be read as images: "):
        ParquetImages([path], "image", "label", tmp_path / "cache")


def test_a_path_in_parquet_is_never_opened(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "mine.png")
    cells = pa.array([{"bytes": None, "path": str(tmp_path / "mine.png")}], CELL)
    pq.write_table(pa.table({"image": cells, "label": [0]}), tmp_path / "a.parquet")
    with pytest.raises(UnidentifiedImageError):
        ParquetImages([tmp_path / "a.parquet"], "image", "label", tmp_path / "cache").read(0)


@each_row("damage", ["bytes", "text"])
def test_parquet_whose_text_is_damaged_is_named(tmp_path, damage):
    path = tmp_path / "a.parquet"
    column = [f"line {number} " * 20 for number in range(999)]
    if damage == "text":
        offsets = np.array([0, 2], np.int32).tobytes()
        column = pa.StringArray.from_buffers(1, pa.py_buffer(offsets), pa.py_buffer(b"\xff\xfe"))
    pq.write_table(pa.table({"text": column}), path)
    if damage == "bytes":
        content = bytearray(path.read_bytes())
        content[40:1000] = np.random.default_rng(0).bytes(960)
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path} is no whole parquet file"):
        list(read_column(path, "text", 100))


def entry_with(folder, change=lambda folder: None):
    def write(place):
        write_tokens(place, "train", [np.array([1, 2])], 10)
        change(place)

    entry = CacheEntry.of(folder, "text", {})
    entry.prepare(write)
    return entry


@each_row("index", ["3", "{}", "[" * 100_000, '{"train": "zz"}', '{"train": [["a", "O"]]}'])
def test_prepared_tokens_of_no_type_are_named(tmp_path, index):
    entry = entry_with(tmp_path)
    (entry.folder / "tokens.json").write_text(index)
    with pytest.raises(ValueError, match=r"tokens\.json says no type of ids of train .*; delete this folder"):
        entry.tokens("train")
    assert not entry.exists()


@each_row("content", [b"", b"abc"])
def test_prepared_tokens_that_are_none_are_named(tmp_path, content):
    entry = entry_with(tmp_path, lambda folder: (folder / "train.bin").write_bytes(content) and None)
    with pytest.raises(ValueError, match=r"train\.bin holds no ids of type <u2 .*; delete this folder"):
        entry.tokens("train")


@pytest.mark.parametrize("name", ["/dev/zero", "../outside", "a\0b"])
@pytest.mark.filterwarnings("ignore:.*is corrupt and is made again")
def test_a_manifest_that_names_other_files_is_not_followed(tmp_path, name):
    entry = entry_with(tmp_path)
    (entry.folder.parent / "outside").touch()
    manifest = json.dumps({"files": {name: [0, "0"]}})
    (entry.folder / "manifest.json").write_text(manifest)
    entry_with(tmp_path)
    assert entry.tokens("train").tolist() == [1, 2]
    assert (entry.folder.parent / "outside").exists()


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "[" * 100_000, '{"words": 3, "splitter": "words"}', '{"words": ["a"], "splitter": "words"}'),
        '{"words": ["<unk>", "<eos>"], "splitter": "os"}',
    ],
    ids=range(6),
)
def test_a_vocabulary_that_is_none_is_named(tmp_path, content):
    (tmp_path / "gutenberg").mkdir()
    (tmp_path / "gutenberg/carroll-alice.txt").write_text("a b\n" * 20)
    data = GutenbergDataModule(root=tmp_path, cache_dir=tmp_path / "cache")
    data.setup()
    folder = data._cache_entry().folder
    (folder / "vocabulary.json").write_text(content)
    (folder / "manifest.json").unlink()
    _write_manifest(folder)
    with pytest.raises(ValueError, match=r"vocabulary\.json cannot be read: .*; delete this folder"):
        data.setup()


def test_a_folder_of_images_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    write_class_folders(tmp_path, {"open": 1, "closed": 1})
    scan = os.scandir

    def scandir(place):  # the superuser may list every folder
        if Path(place).name == "closed":
            raise PermissionError(13, "Permission denied", str(place))
        return scan(place)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(PermissionError, match=r"Permission denied: .*closed"):
        find_images(tmp_path)


def test_links_to_folders_are_followed_and_those_that_lead_back_are_named(tmp_path):
    write_class_folders(tmp_path / "elsewhere", {"open": 2})
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "linked").symlink_to(tmp_path / "elsewhere")
    found, _ = find_images(tmp_path / "images")
    assert len(found) == 2
    (tmp_path / "elsewhere" / "open" / "back").symlink_to(tmp_path / "images")
    with pytest.raises(ValueError, match=r"open/back is a link to .*images, a folder that it lies in: remove the link"):
        find_images(tmp_path / "images")


@each_row(
    ("name", "word"),
    itertools.product(["CIFAR10DataModule", "AGNewsDataModule", "WikiTextDataModule"], ["no", "false", 0, None]),
)
def test_words_do_not_ask_for_a_download(name, word):
    with pytest.raises(ValueError, match=r"^download must be True or False, got"):
        getattr(datamodules, name)(download=word)
