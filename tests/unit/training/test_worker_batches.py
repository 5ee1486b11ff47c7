"""What comes from a loader's workers is what they made, small or large."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import operator
import os
import resource
import threading
from typing import Any

import numpy as np
import pytest
import torch

import anyrank


class Rows(torch.utils.data.Dataset[Any]):
    """Rows that a function of the number makes."""

    def __init__(self, make: Any, number: int) -> None:
        self.make, self.number = make, number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, number: int) -> Any:
        return self.make(number)


def from_worker(make: Any, number: int = 1, collate_fn: Any = operator.itemgetter(0)) -> list[Any]:
    """The batches of a loader with a worker, each of one row, as the worker has collated them."""
    loader = anyrank.ElasticLoader(
        Rows(make, number),
        global_batch=1,
        microbatch=1,
        num_workers=1,
        collate_fn=collate_fn,
    )
    batches: list[Any] = []
    for step in loader:
        batches += step.microbatches(torch.nn.Identity())
        loader.commit()
    return batches


def several_kinds(_: int = 0) -> dict[str, torch.Tensor]:
    return {
        "float": torch.arange(12.0).reshape(3, 4),
        "bfloat16": torch.tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16),
        "float8": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j, 3 - 1j]),
        "one value": torch.tensor(7),
        "no value": torch.zeros(3, 0),
        "transposed": torch.arange(6).reshape(2, 3).T,
        "a part": torch.arange(10)[2:5],
        "expanded": torch.ones(1).expand(5),
        "conjugated": torch.tensor([1 + 2j]).conj(),
        "every second one, conjugated": torch.tensor([1 + 2j, 3j, 5 + 1j]).conj()[::2],
        "negated": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        "as long as goes by value": torch.arange(128 * 128, dtype=torch.int64),
        "longer": torch.arange(128 * 128 + 1, dtype=torch.int64),
    }


def bytes_of(tensor: torch.Tensor) -> list[int]:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("name", several_kinds())
def test_a_tensor_is_as_the_worker_made_it(name: str) -> None:
    made = several_kinds()[name]
    (got,) = from_worker(lambda _: several_kinds()[name])
    assert (got.dtype, got.shape) == (made.dtype, made.shape)
    if not (made.is_conj() or made.is_neg()):  # which are computed, as a new tensor
        assert got.stride() == made.stride()
        # On how memory is aligned the bits of a matrix product may depend.
        assert got.data_ptr() % 64 == made.data_ptr() % 64
    assert bytes_of(got) == bytes_of(made)


def test_other_values_come_as_they_are() -> None:
    made = {
        "list": [torch.ones(2), (torch.zeros(1), "text", None)],
        "array": np.arange(3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    (got,) = from_worker(lambda _: made)
    assert torch.equal(got["list"][0], torch.ones(2))
    assert got["list"][1][1:] == ("text", None)
    assert isinstance(got["array"], np.ndarray)
    assert got["array"].tolist() == [0, 1, 2]
    assert isinstance(got["parameter"], torch.nn.Parameter)
    assert got["parameter"].requires_grad


def test_one_tensor_under_two_names_stays_one() -> None:
    def make(_: int) -> dict[str, torch.Tensor]:
        row = torch.arange(4)
        return {"input_ids": row, "labels": row}

    (got,) = from_worker(make)
    assert got["labels"] is got["input_ids"]


@pytest.mark.parametrize("size", [6, 128 * 128])
def test_tensors_of_one_memory_share_it(size: int) -> None:
    def make(_: int) -> list[torch.Tensor]:
        row = torch.arange(float(size))
        return [row, row[2:4], row.view(2, -1), row[::2]]

    (got,) = from_worker(make)
    got[0][2] = -100
    assert [got[1][0], got[2].flatten()[2], got[3][1]] == [-100] * 3


def test_tensors_without_values_are_apart() -> None:
    (got,) = from_worker(lambda _: [torch.empty(0), torch.empty(0)])
    for number, tensor in enumerate(got):
        tensor.resize_(3).fill_(number)
    assert got[0].tolist() == [0, 0, 0]


def test_arrays_of_one_memory_come_whole() -> None:
    def make(_: int) -> dict[str, torch.Tensor]:
        array = np.arange(12).reshape(3, 4)
        return {"inputs": torch.from_numpy(array[:, :-1]), "ids": torch.from_numpy(array)}

    (got,) = from_worker(make)
    assert got["ids"].tolist() == np.arange(12).reshape(3, 4).tolist()
    assert got["inputs"].tolist() == np.arange(12).reshape(3, 4)[:, :-1].tolist()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_come_as_they_are() -> None:
    parts = [torch.ones(2), torch.zeros(3)]
    (got,) = from_worker(lambda _: torch.nested.nested_tensor(parts))
    assert [part.tolist() for part in got.unbind()] == [[1, 1], [0, 0, 0]]


def test_memory_that_processes_share_stays_shared() -> None:
    def add(_: int) -> torch.Tensor:
        counter.add_(1)
        return counter

    counter = torch.zeros(1).share_memory_()
    got = from_worker(add, 3)
    assert counter == 3
    assert [*map(int, got)] == [3] * 3


def test_a_batch_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(
        TypeError,
        match=r"batch of samples \[0\] cannot be pickled.*cannot pickle.*lock.*num_workers=0",
    ):
        from_worker(lambda _: threading.Lock())


def test_a_row_of_a_shard_that_cannot_be_pickled_is_an_error() -> None:
    loader = anyrank.ElasticLoader.from_shards(
        ["a"],
        lambda _: iter([threading.Lock()]),
        global_batch=1,
        microbatch=1,
        num_workers=1,
        collate_fn=lambda rows: rows[0],
    )
    steps = iter(loader)
    step = next(steps)
    with pytest.raises(TypeError, match=r"cannot pickle.*lock"):
        list(step.microbatches(torch.nn.Identity()))


def test_workers_of_a_loop_that_failed_end_when_it_is_collected() -> None:
    def make(row: int) -> torch.Tensor:
        if row == 5:
            raise ValueError("a row that cannot be read")
        return torch.ones(2)

    gc.collect()
    before = multiprocessing.active_children()
    with contextlib.suppress(ValueError):  # pytest.raises would keep the frames
        from_worker(make, 8)
    gc.collect()
    assert [child for child in multiprocessing.active_children() if child not in before] == []


@pytest.mark.parametrize("collate_fn", [None, operator.itemgetter(0)], ids=["default", "own"])
def test_batches_that_are_kept_take_no_descriptors(collate_fn: Any) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 60, limits[1]))
    try:
        kept = from_worker(lambda number: {"row": torch.full((5,), number)}, 200, collate_fn)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert sorted(int(batch["row"].flatten()[0]) for batch in kept) == [*range(200)]
