"""`ElasticSampler`: the loader's order and accounts in a DataLoader of the user's own."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import anyrank
from anyrank.steps.sampler import Share
from anyrank.world.ranks import one_process

pytestmark = [
    # Workers on a machine with one core, and from Python 3.12 on.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def make(dataset: Any = 22, **options: Any) -> anyrank.ElasticSampler:
    given: dict[str, Any] = {"global_batch": 8, "microbatch": 2, "seed": 3, **options}
    return anyrank.ElasticSampler(dataset, **given)


class On(anyrank.ElasticSampler):
    """The sampler of one of several ranks that are not there."""

    def __init__(self, rank: int, size: int, **options: Any) -> None:
        super().__init__(22, global_batch=8, microbatch=2, **options)
        self.position.data_rank = lambda: (rank, size)  # type: ignore[method-assign]


def loader_ids(tail: Any) -> list[list[int]]:
    ids = torch.arange(22)
    loader = anyrank.ElasticLoader(
        TensorDataset(ids), global_batch=8, microbatch=2, seed=3, tail=tail
    )
    net = nn.Linear(1, 1)
    return [batch[0].tolist() for step in loader for batch in step.microbatches(net)]


@pytest.mark.parametrize("tail", ["short", "drop"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_its_batches_are_those_of_the_loader(tail: Any, num_workers: int) -> None:
    data = TensorDataset(torch.arange(22))
    sampler = make(data, tail=tail)
    batches = DataLoader(data, batch_sampler=sampler, num_workers=num_workers)
    expected = loader_ids(tail)
    assert len(batches) == len(expected)
    found: list[list[int]] = []
    for number, (ids,) in enumerate(batches):
        found.append(ids.tolist())
        if sampler.share(number).is_last:
            sampler.commit()
    assert found == expected
    sampler.position.check_receipt(one_process())
    assert sampler.receipts[0].verdict.startswith("exactly once")
    assert (sampler.epoch, sampler.step) == (1, 2 if tail == "drop" else 3)


def test_fetching_ahead_does_not_count() -> None:
    sampler = make()
    batches = list(sampler)
    assert (sampler.step, sampler.consumed, sampler.position.accounts[-1].seen.count) == (0, 0, 0)
    assert list(sampler) == batches
    sampler.commit()
    assert (sampler.step, sampler.consumed, sampler.position.accounts[-1].seen.count) == (1, 8, 8)
    assert list(sampler) == batches[4:]


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_loaded_state_goes_on_where_it_was_saved(stop: int) -> None:
    sampler, other = make(), make()
    whole = list(sampler)
    for _ in range(stop):
        sampler.commit()
    other.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    expected = whole[4 * stop :] if stop < 3 else list(sampler)
    assert list(other) == expected
    assert len(other) == len(expected)
    loader = anyrank.ElasticLoader(TensorDataset(torch.arange(22)), global_batch=8, microbatch=2)
    with pytest.raises(anyrank.CheckpointError, match="seed 3"):
        loader.load_state_dict(sampler.state_dict())


@given(size=st.integers(1, 4), tail=st.sampled_from(["short", "drop"]))
def test_weights_make_the_mean_over_the_global_batch(size: int, tail: Any) -> None:
    every = [On(rank, size, tail=tail) for rank in range(size)]
    batches = [list(one) for one in every]
    assert len({len(one) for one in batches}) == 1
    ends = [[one.share(n).is_last for n in range(len(batches[0]))] for one in every]
    assert all(one == ends[0] for one in ends)
    plan = every[0].position.next_step()
    terms: dict[int, float] = {}
    for number, is_last in enumerate(ends[0]):
        for one, lists in zip(every, batches, strict=True):
            share, ids = one.share(number), lists[number]
            if share.weight:
                for i in ids:
                    terms[i] = terms.get(i, 0.0) + share.weight / len(ids) / size
        if is_last:
            # Averaged over ranks, every sample of the step counts the same.
            assert sum(terms.values()) == pytest.approx(1)
            counts = sorted({round(value * plan.samples, 6) for value in terms.values()})
            assert counts == [1.0]
            terms = {}
            for one in every:
                one.commit()
            plan = every[0].position.next_step()
    assert {one.epoch for one in every} == {1}


def test_what_it_refuses() -> None:
    sampler = make()
    with pytest.raises(anyrank.CheckpointError, match="iterate the DataLoader before commit"):
        sampler.commit()
    with pytest.raises(ValueError, match="no batch 0"):
        sampler.share(0)
    count = len(list(sampler))
    assert sampler.share(count - 1) == Share(2 / 6, True, step=2, k=2, seed=3)
    for number in (-1, count):
        with pytest.raises(ValueError, match=f"no batch {number}"):
            sampler.share(number)
    for _ in range(3):
        sampler.commit()
    with pytest.raises(anyrank.CheckpointError, match="no batch of epoch 1 was yielded"):
        sampler.commit()
    with pytest.raises(TypeError, match="has no length"):
        make(iter([1]))
    with pytest.raises(ValueError, match="is empty"):
        make(0)


# -- what was handed out --------------------------------------------------------------------------


def test_accelerates_second_sharding_is_refused_by_prepare() -> None:
    accelerate = pytest.importorskip("accelerate.data_loader")
    data = TensorDataset(torch.arange(22))
    batches = DataLoader(data, batch_sampler=make())
    with pytest.raises(anyrank.CheckpointError, match=r"do not pass the DataLoader to prepare\(\)"):
        accelerate.prepare_data_loader(batches, num_processes=2, process_index=0)
    assert len(list(batches)) == 11  # which is as it was
    with pytest.raises(AttributeError, match="ElasticSampler has no attribute 'sampler'"):
        _ = batches.batch_sampler.sampler  # type: ignore[union-attr]


class FromIds(IterableDataset[Any]):
    """A dataset that asks the sampler itself, inside of a DataLoader."""

    def __init__(self, sampler: anyrank.ElasticSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        return iter(torch.tensor(ids) for ids in self.sampler)


def test_a_dataset_may_ask_the_sampler() -> None:
    found = list(DataLoader(FromIds(make()), batch_size=None))
    assert [ids.tolist() for ids in found] == list(make())


def test_a_commit_needs_all_batches_of_its_step() -> None:
    sampler = make()
    batches = iter(sampler)
    next(batches)
    with pytest.raises(ValueError, match="batch 1 was not yielded"):
        sampler.share(1)
    with pytest.raises(anyrank.CheckpointError, match="has 4 batches on this rank, and 1 were"):
        sampler.commit()
    list(batches)
    batches = iter(sampler)
    list(itertools.islice(batches, 4))
    sampler.commit()
    sampler.position.check_receipt(one_process())
    with pytest.raises(anyrank.CheckpointError, match="has 4 batches on this rank, and 0 were"):
        sampler.commit()
    assert (sampler.step, sampler.samples) == (1, 8)


def test_a_share_seeds_and_scales_as_the_loader_does() -> None:
    net = nn.Linear(1, 1)
    loader = anyrank.ElasticLoader(list(range(22)), global_batch=8, microbatch=2, seed=3)
    expected = [torch.rand(()) for step in loader for _ in step.microbatches(net)]
    sampler = make()
    for number, _ in enumerate(DataLoader(list(range(22)), batch_sampler=sampler)):  # type: ignore[arg-type]
        share = sampler.share(number)
        before = torch.get_rng_state()
        with share.seeded(net):
            assert torch.rand(()) == expected[number]
        assert torch.equal(before, torch.get_rng_state())
        assert (share.step, share.k) == divmod(number, 4)
        assert share.scale(torch.tensor(3.0)) == pytest.approx(3 * share.weight)
        if share.is_last:
            sampler.commit()
