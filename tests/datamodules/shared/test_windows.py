import pickle

import numpy as np
import pytest
import torch
from attnswap.datamodules.shared.windows import IGNORED, CutFileError, EpochShuffle, TokenWindows
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader, DistributedSampler

START = 1


def windows(size, num_tokens, multiple_of=1):
    return TokenWindows(np.arange(100, 100 + size, dtype=np.uint16), num_tokens, START, multiple_of)


def test_inputs_are_targets_one_place_later_across_windows():
    first, second = windows(8, 4)
    assert first[0].tolist() == [START, 100, 101, 102]
    assert first[1].tolist() == [100, 101, 102, 103]
    assert second[0].tolist() == [103, 104, 105, 106]


def test_the_short_last_window_is_filled_with_ignored_targets():
    inputs, targets = windows(6, 4)[-1]
    assert inputs.tolist() == [103, 104, 105, START]
    assert targets.tolist() == [104, 105, IGNORED, IGNORED]
    assert inputs.dtype == targets.dtype == torch.int64


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 5))
def test_every_token_is_a_target_exactly_once(size, num_tokens, multiple_of):
    data = windows(size, num_tokens, multiple_of)
    assert len(data) % multiple_of == 0
    _, targets = data.__getitems__(range(len(data)))
    assert targets[targets != IGNORED].tolist() == list(range(100, 100 + size))
    assert (targets != IGNORED).any(1).sum() == data.num_real


@given(st.integers(1, 60), st.integers(1, 20))
def test_a_batch_is_its_windows(size, num_tokens):
    data = windows(size, num_tokens)
    inputs, targets = data.__getitems__(range(len(data)))
    for index in range(len(data)):
        assert torch.equal(data[index][0], inputs[index])
        assert torch.equal(data[index][1], targets[index])


def test_an_index_outside_is_an_error():
    with pytest.raises(IndexError):
        windows(6, 4)[2]


def test_a_memory_map_travels_as_its_name(tmp_path):
    np.arange(10_000, dtype=np.uint16).tofile(tmp_path / "ids")
    data = TokenWindows(np.memmap(tmp_path / "ids", np.uint16, mode="r"), 4, START)
    packed = pickle.dumps(data)
    assert len(packed) < 1_000
    assert torch.equal(pickle.loads(packed)[3][1], data[3][1])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path, workers):
    """Reading the map behind the file's end would end the process by SIGBUS."""
    ids = np.arange(40_000, dtype=np.uint16)
    ids.tofile(tmp_path / "ids")
    data = TokenWindows(np.memmap(tmp_path / "ids", np.uint16, mode="r"), 4, START)
    copy = pickle.loads(pickle.dumps(data))
    assert torch.equal(data[-1][1], torch.arange(39_996, 40_000))
    with (tmp_path / "ids").open("r+b") as file:
        file.truncate(10_000)
    loader = DataLoader(data, batch_size=1, sampler=[9_999], num_workers=workers)
    text = "ids has 10000 bytes and had 80000 when it was opened: it was cut"
    with pytest.raises(CutFileError, match=text):
        next(iter(loader))
    with pytest.raises(CutFileError, match=text):
        copy[0]
    with pytest.raises(ValueError, match="greater than file size"):
        pickle.loads(pickle.dumps(data))


def test_a_deleted_file_is_read_on(tmp_path):
    np.arange(8, dtype=np.uint16).tofile(tmp_path / "ids")
    data = TokenWindows(np.memmap(tmp_path / "ids", np.uint16, mode="r"), 4, START)
    (tmp_path / "ids").unlink()
    assert data[1][1].tolist() == [4, 5, 6, 7]


def test_a_part_of_a_map_is_read_at_its_own_place(tmp_path):
    np.arange(16, dtype=np.uint16).tofile(tmp_path / "ids")
    part = TokenWindows(np.memmap(tmp_path / "ids", np.uint16, mode="r")[8:], 4, START)
    for data in (part, pickle.loads(pickle.dumps(part))):
        assert data[1][1].tolist() == [12, 13, 14, 15]
    assert torch.equal(pickle.loads(pickle.dumps(windows(9, 4)))[1][1], windows(9, 4)[1][1])


class TestOrder:
    def test_it_depends_on_seed_and_epoch_alone(self, monkeypatch):
        data = windows(400, 4)
        monkeypatch.setenv("PL_GLOBAL_SEED", "3")
        order = list(EpochShuffle(data))
        torch.rand(5)
        assert list(EpochShuffle(data)) == order
        assert sorted(order) == list(range(100))
        monkeypatch.setenv("PL_GLOBAL_SEED", "4")
        assert list(EpochShuffle(data)) != order

    def test_it_leaves_the_global_random_state(self):
        before = torch.get_rng_state()
        list(EpochShuffle(windows(400, 4)))
        assert torch.equal(torch.get_rng_state(), before)

    def test_epochs_differ(self):
        sampler = EpochShuffle(windows(400, 4))
        first = list(sampler)
        sampler.set_epoch(1)
        assert list(sampler) != first

    @pytest.mark.parametrize("epoch", [0, 1])
    def test_two_processes_together_see_the_batches_of_one(self, monkeypatch, epoch):
        monkeypatch.setenv("PL_GLOBAL_SEED", "5")
        data = windows(400, 4)
        alone = EpochShuffle(data)
        alone.set_epoch(epoch)
        ranks = []
        for rank in range(2):  # what Lightning puts in the place of a RandomSampler
            sampler = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=True, seed=5)
            sampler.set_epoch(epoch)
            ranks.append(list(sampler))
        assert [index for pair in zip(*ranks, strict=True) for index in pair] == list(alone)
