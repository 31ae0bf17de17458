import os

import pytest
from attnswap.datamodules import PythonSourceDataModule


@pytest.fixture
def data(python_folder, cache):
    return PythonSourceDataModule(num_tokens=4, batch_size=2, folder=python_folder, cache_dir=cache)


def test_the_standard_library_is_text_enough(cache):
    data = PythonSourceDataModule(cache_dir=cache, max_bytes=2_000_000)  # one file of Python 3.13 has 800,000
    data.setup()
    assert 100_000 < len(data.tokens("train")) < 1_000_000
    assert data.vocab_size == 4000
    assert (data.tokens("validation")[:] == 0).mean() < 0.15


def test_batches_have_their_shape_and_decode(data):
    data.setup()
    inputs, targets = next(iter(data.train_dataloader()))
    assert inputs.shape == targets.shape == (2, 4)
    assert "return x +" in data.decode(data.tokens("train"))


def test_files_are_in_one_split_each(data):
    lines = {split: {line for file in data.lines(split) for line in file} for split in ("train", "validation", "test")}
    assert [sum(line.startswith("def") for line in found) for found in lines.values()] == [16, 2, 2]
    assert len(set.union(*({line for line in found if line.startswith("def")} for found in lines.values()))) == 20


def test_the_split_is_the_same_again(python_folder, cache):
    def make():
        return list(PythonSourceDataModule(folder=python_folder, cache_dir=cache).lines("train"))

    assert make() == make()


def test_a_changed_file_is_prepared_again(data, python_folder, cache):
    data.setup()
    (python_folder / "module_3.py").write_text("changed = 1\n")
    again = PythonSourceDataModule(folder=python_folder, cache_dir=cache)
    again.setup()
    assert len(os.listdir(cache / "python-source")) > 2
    assert "changed" in "".join(again.decode(again.tokens(split)) for split in ("train", "validation", "test"))


def test_max_bytes_bounds_the_text(python_folder, cache):
    few = PythonSourceDataModule(folder=python_folder, cache_dir=cache, max_bytes=500)
    assert 6 <= sum(1 for split in ("train", "validation", "test") for _ in few.lines(split)) < 15


@pytest.mark.parametrize("left_out", ["test", "site-packages", "__pycache__"])
def test_tests_and_installed_packages_are_left_out(python_folder, cache, left_out):
    before = PythonSourceDataModule(folder=python_folder, cache_dir=cache).source_identity()
    (python_folder / left_out).mkdir()
    (python_folder / left_out / "other.py").write_text("x = 1\n")
    assert PythonSourceDataModule(folder=python_folder, cache_dir=cache).source_identity() == before


def test_too_few_files_are_an_error_and_leave_nothing(tmp_path, cache, contents):
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "one.py").write_text("x = 1\n")
    data = PythonSourceDataModule(folder=tmp_path / "few", cache_dir=cache)
    with pytest.raises(ValueError, match=r"train split of python-source has 0 tokens.*gave 1 files.*at least 6"):
        data.prepare_data()
    assert contents(cache) == {"python-source"}


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(NotADirectoryError, match=r"nowhere is no folder of Python source: give one as folder="):
        PythonSourceDataModule(folder=tmp_path / "nowhere")
