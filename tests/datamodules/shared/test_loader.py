"""A loader that goes on within an epoch, and what it refuses."""

import random
import warnings

import numpy as np
import pytest
import torch
from attnswap.datamodules import EpochShuffle, ResumableLoader
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from tests.rows import each_row

DATA = list(range(10))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


class Draws:
    """Items of which each is drawn."""

    def __len__(self):
        return len(DATA)

    def __getitem__(self, index):
        drawn = random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002 - what transforms draw from
        return torch.tensor(drawn, dtype=torch.float64)


def test_a_look_at_a_batch_counts_nothing_of_a_resumed_epoch():
    loader, resumed = (ResumableLoader(DATA, batch_size=2, shuffle=True) for _ in range(2))
    given, whole = iter(loader), batches(loader)
    next(given)
    next(given)
    next(iter(loader))
    assert loader.state_dict()["batches"] == 2
    resumed.load_state_dict(loader.state_dict())
    next(iter(resumed))
    given = iter(resumed)
    assert next(given).tolist() == whole[2]
    next(iter(resumed))
    assert resumed.state_dict()["batches"] == 3
    next(given)
    next(iter(resumed))
    assert resumed.state_dict()["batches"] == 4
    assert [each.tolist() for each in given] == whole[4:]
    assert batches(resumed) == whole


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_run_from_scratch_behind_a_resumed_one_that_failed_begins_at_the_start(shuffle):
    loader = ResumableLoader(DATA, batch_size=2, shuffle=shuffle)
    whole = batches(loader)
    loader.load_state_dict({"epoch": 0, "batches": 2})
    next(iter(loader))  # a look, before the trainer tells the epoch
    loader.sampler.set_epoch(0)
    next(iter(loader))  # another
    failed = iter(loader)
    assert next(failed).tolist() == whole[2]
    loader.sampler.set_epoch(0)
    assert batches(loader) == whole
    del failed
    loader.load_state_dict({"epoch": 0, "batches": 2, "batch_size": 3})
    with pytest.raises(ValueError, match="batch_size is 3 there and 2 here"):
        batches(loader)
    loader.sampler.set_epoch(0)
    assert batches(loader) == whole


def test_a_run_that_failed_before_its_first_pass_moves_no_resumed_one():
    loader = ResumableLoader(DATA, batch_size=2)
    whole = batches(loader)
    loader.sampler.set_epoch(0)  # and an error, before a batch is asked for
    loader.load_state_dict({"epoch": 0, "batches": 2})
    next(iter(loader))  # a look
    loader.sampler.set_epoch(0)
    assert batches(loader) == whole[2:]


class Told(list):
    """Is told the epoch, and does not say it."""

    def set_epoch(self, epoch):
        pass


def test_a_loop_that_tells_no_epoch_hears_that_one_is_given_again():
    """As with torch's `DistributedSampler`; Lightning tells it."""
    loader = ResumableLoader(DATA, batch_size=4, shuffle=True)
    first = batches(loader)
    with pytest.warns(UserWarning, match=r"epoch 0 was given whole, .* call loader\.sampler\.set_epoch\(epoch\)"):
        assert batches(loader) == first
    resumed = ResumableLoader(DATA, batch_size=4, shuffle=True)
    resumed.load_state_dict(loader.state_dict())
    with pytest.warns(UserWarning, match="was given whole"):
        assert batches(resumed) == []
    with warnings.catch_warnings(record=True):
        assert batches(resumed) == first
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert next(iter(loader)).tolist() == first[0]  # a look at a batch
        loader.sampler.set_epoch(0)
        assert batches(loader) == first
        loader.sampler.set_epoch(1)
        assert batches(loader) != first
        assert batches(ResumableLoader(DATA)) == batches(ResumableLoader(DATA))


def batches(loader):
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("size", [3, None])
def test_workers_draw_what_seed_epoch_and_place_say(size, shuffle, monkeypatch):
    def drawn(workers, epoch=0, state=None):
        loader = ResumableLoader(Draws(), size, shuffle=shuffle, num_workers=workers)
        loader.sampler.set_epoch(epoch)
        if state is not None:
            loader.load_state_dict(state)
        return batches(loader)

    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    whole = drawn(1)
    assert len({str(each) for each in [*whole, *drawn(1, epoch=1)]}) == 2 * len(whole)
    assert drawn(2) == whole
    assert drawn(1, state={"epoch": 0, "batches": 2}) == whole[2:]
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    assert drawn(1)[0] != whole[0]


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 3},
        {"batch_size": 3, "shuffle": True},
        {"batch_size": 2, "sampler": DistributedSampler(DATA, num_replicas=2, rank=1, seed=4)},
        {"batch_sampler": BatchSampler(EpochShuffle(DATA), 3, drop_last=True)},
        {"batch_size": 3, "shuffle": True, "num_workers": 1},
    ],
    ids=["in-order", "shuffled", "distributed", "batch-sampler", "worker"],
)
@pytest.mark.parametrize("epoch", [0, 2])
def test_the_rest_of_an_epoch_is_given_and_the_next_is_whole(options, epoch):
    def at(number):
        loader = ResumableLoader(DATA, **options)
        own = loader.sampler if hasattr(loader.sampler, "set_epoch") else loader.batch_sampler.sampler
        own.set_epoch(number)
        return loader, own

    begun, _ = at(epoch)
    given = []
    for batch in begun:
        given.append(batch.tolist())
        if len(given) == 2:
            break
    state = begun.state_dict()
    assert (state["epoch"], state["batches"]) == (epoch, 2)
    resumed, order = at(epoch)
    resumed.load_state_dict(state)
    assert given + batches(resumed) == batches(at(epoch)[0])
    order.set_epoch(epoch + 1)
    assert batches(resumed) == batches(at(epoch + 1)[0])
    ended, order = at(epoch)
    ended.load_state_dict({**state, "batches": len(ended)})
    order.set_epoch(epoch + 1)
    assert (ended.state_dict()["epoch"], ended.state_dict()["batches"]) == (epoch + 1, 0)  # before its first batch
    assert batches(ended) == batches(at(epoch + 1)[0])


@each_row(
    ("data", "options", "message"),
    [
        (Stream(), {}, "Stream is an IterableDataset.*give a data set with a length"),
        (DATA, {"sampler": RandomSampler(DATA)}, "sampler has a RandomSampler without set_epoch.*give shuffle=True"),
        (DATA, {"sampler": WeightedRandomSampler([1.0] * 10, 10)}, "WeightedRandomSampler without set_epoch"),
        (DATA, {"batch_sampler": BatchSampler(RandomSampler(DATA), 2, False)}, "batch_sampler has a RandomSampler"),
        (DATA, {"batch_sampler": [[0, 1], [2, 3]]}, "batch_sampler has a list without set_epoch"),
        (DATA, {"batch_sampler": Told([[0, 1], [2, 3]])}, "batch_sampler has a Told without.*has as sampler"),
        (DATA, {"sampler": Told(DATA)}, "sampler has a Told without set_epoch and epoch"),
        (DATA, {"num_workers": 2, "in_order": False}, "with in_order=False workers give batches in an order"),
        (DATA, {"sampler": SequentialSampler(DATA), "shuffle": True}, "mutually exclusive"),
        (DATA, {"batch_sampler": BatchSampler(EpochShuffle(DATA), 2, False), "batch_size": 4}, "mutually exclusive"),
    ],
)
def test_what_has_no_place_to_go_on_from_is_refused(data, options, message):
    with pytest.raises(ValueError, match=message):
        ResumableLoader(data, **options)


def half(rank, **options):
    return DistributedSampler(DATA, num_replicas=2, rank=rank, **options)


def begun(**options):
    """The state of a loader in order, batches of two, after its first."""
    loader = ResumableLoader(DATA, **{"batch_size": 2, **options})
    next(iter(loader))
    return loader.state_dict()


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (DATA, {"batch_size": 3}, "batch_size is 2 there and 3 here"),
        (DATA, {"batch_size": 2, "sampler": half(0, shuffle=False)}, "batch_size is 2 there and 4 here"),
        (DATA, {"batch_size": 2, "shuffle": True}, "shuffle is False there and True here"),
        (DATA[:9], {"batch_size": 2}, "samples is 10 there and 9 here"),
    ],
    ids=["batch-size", "processes", "shuffle", "samples"],
)
def test_the_rest_of_an_epoch_of_other_batches_is_refused(data, options, message):
    resumed = ResumableLoader(data, **options)
    resumed.load_state_dict(begun())
    with pytest.raises(ValueError, match=rf"behind batch 1 of epoch 0, and {message}.*give what the checkpoint has"):
        next(iter(resumed))
    later = ResumableLoader(data, **options)
    later.load_state_dict(begun())
    later.sampler.set_epoch(1)  # the next epoch is whole whatever its batches are
    whole = ResumableLoader(data, **options)
    whole.sampler.set_epoch(1)
    assert batches(later) == batches(whole)


def test_two_processes_go_on_where_one_with_batches_of_twice_the_size_was():
    rest = []
    for rank in range(2):
        resumed = ResumableLoader(DATA, batch_size=1, sampler=half(rank, shuffle=False))
        resumed.load_state_dict(begun())
        rest += batches(resumed)
    assert sorted(rest) == [[sample] for sample in DATA[2:]]


def test_an_order_goes_on_with_its_own_seed(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    first = ResumableLoader(DATA, batch_size=2, shuffle=True)
    given = [batch.tolist() for _, batch in zip(range(2), first, strict=False)]
    monkeypatch.setenv("PL_GLOBAL_SEED", "2")
    resumed = ResumableLoader(DATA, batch_size=2, shuffle=True)
    whole = batches(first)
    assert batches(resumed) != whole
    resumed.load_state_dict({**first.state_dict(), "batches": 2})
    assert given + batches(resumed) == whole
    first.sampler.set_epoch(1)
    resumed.sampler.set_epoch(1)
    assert batches(resumed) == batches(first)


def test_a_generator_gives_an_order_of_its_own(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    generators = [None, None, *(torch.Generator().manual_seed(seed) for seed in (2, 2, 3))]
    orders = [batches(ResumableLoader(DATA, batch_size=2, shuffle=True, generator=each)) for each in generators]
    assert orders[0] == orders[1]
    assert orders[2] == orders[3]
    assert len({str(each) for each in orders}) == 3


def test_a_cycled_loader_knows_its_place_beside_passes_of_earlier_epochs_that_nobody_ended():
    loader, kept = ResumableLoader(DATA, batch_size=2, shuffle=True), []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        batches(loader)
        kept.append(again := iter(loader))
        next(again)
        assert loader.state_dict()["batches"] == 1


def test_a_part_of_the_data_in_order_stays_that_part():
    assert batches(ResumableLoader(DATA, batch_size=2, sampler=SequentialSampler(range(3)))) == [[0, 1], [2]]
