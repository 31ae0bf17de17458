"""A loader that goes on within an epoch, and what it refuses."""

import pytest
from attnswap.datamodules import EpochShuffle, ResumableLoader
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, RandomSampler, WeightedRandomSampler

DATA = list(range(10))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


def batches(loader):
    return [batch.tolist() for batch in loader]


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
    assert state == {"epoch": epoch, "batches": 2}
    resumed, order = at(epoch)
    resumed.load_state_dict(state)
    assert given + batches(resumed) == batches(at(epoch)[0])
    order.set_epoch(epoch + 1)
    assert batches(resumed) == batches(at(epoch + 1)[0])
    ended, order = at(epoch)
    ended.load_state_dict({"epoch": epoch, "batches": len(ended)})
    order.set_epoch(epoch + 1)
    assert batches(ended) == batches(at(epoch + 1)[0])


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (Stream(), {}, "Stream is an IterableDataset.*give a data set with a length"),
        (DATA, {"sampler": RandomSampler(DATA)}, "sampler has a RandomSampler without set_epoch.*give shuffle=True"),
        (DATA, {"sampler": WeightedRandomSampler([1.0] * 10, 10)}, "WeightedRandomSampler without set_epoch"),
        (DATA, {"batch_sampler": BatchSampler(RandomSampler(DATA), 2, False)}, "batch_sampler has a RandomSampler"),
        (DATA, {"batch_sampler": [[0, 1], [2, 3]]}, "batch_sampler has a list without set_epoch"),
    ],
    ids=range(5),
)
def test_what_has_no_place_to_go_on_from_is_refused(data, options, message):
    with pytest.raises(ValueError, match=message):
        ResumableLoader(data, **options)
