"""`ElasticLoader` in one process: steps, random numbers, commits, state, and what it refuses."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import anyrank
from anyrank.training.data.order import Order
from anyrank.training.data.schedule import slots_of_rank
from anyrank.training.data.worker_exit import WorkerExit
from anyrank.training.random_state.generators import ambient

pytestmark = [
    # Workers on a machine with one core, and from Python 3.12 on.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

NET = nn.Linear(1, 1)


class Noisy(Dataset[Any]):
    """Sample i with what three generators say: an augmentation."""

    def __init__(self, n: int = 22) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return i, torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])


def masking(samples: list[Any]) -> Any:
    """A collate function that draws."""
    ids, noise = zip(*samples, strict=True)
    return list(ids), torch.stack(noise), torch.rand(2)


def make(dataset: Any = None, **options: Any) -> anyrank.ElasticLoader:
    given: dict[str, Any] = {"global_batch": 8, "microbatch": 2, "seed": 3, **options}
    return anyrank.ElasticLoader(Noisy() if dataset is None else dataset, **given)


def draws() -> tuple[float, float, float]:
    return random.random(), np.random.rand(), torch.rand(()).item()


def run(loader: anyrank.ElasticLoader, stop: int = 10**9) -> list[Any]:
    """(step, batch, numbers drawn) of each microbatch of a pass, the first `stop` steps of it."""
    seen: list[Any] = []
    for step in loader:
        seen += [(step.number, batch, draws()) for batch in step.microbatches(NET)]
        loader.commit()
        if step.number + 1 >= stop:
            break
    return seen


def same(a: Any, b: Any) -> bool:
    """Equality of nested lists and tensors, bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def first_step(loader: anyrank.ElasticLoader) -> tuple[Iterator[Any], Any]:
    """The iterator, which has to be kept, and its first step."""
    steps = iter(loader)
    return steps, next(steps)


def leave_steps_unfinished(loader: anyrank.ElasticLoader, commits: bool) -> None:
    for step in loader:
        next(step.microbatches(NET))
        if commits:
            loader.commit()


def states() -> list[Any]:
    return [str(stream.to_json(stream.get())) for stream in ambient()]


# -- what a step holds ----------------------------------------------------------------------------


def test_a_pass_is_an_epoch_in_the_permutations_order() -> None:
    loader = make(collate_fn=masking)
    for epoch in range(2):
        ids = [batch[0] for _, batch, _ in run(loader)]
        expected = Order(22, 3, True).ids(epoch, 0, 22).split(2)
        assert ids == [one.tolist() for one in expected]
    assert loader.receipts == [(0, 22, "exactly once"), (1, 22, "exactly once")]
    assert (loader.epoch, loader.step, loader.consumed, loader.samples) == (2, 6, 0, 44)


TAILS = {
    "short": ([8, 8, 6], 44, "exactly once", 0),
    "drop": ([8, 8], 32, "exactly once, 6 dropped", 12),
}


@pytest.mark.parametrize("tail", TAILS)
def test_the_last_step_is_as_declared(tail: Any) -> None:
    sizes, samples, verdict, dropped = TAILS[tail]
    loader = make(tail=tail, collate_fn=masking)
    for epoch in range(2):
        ids: list[int] = []
        for step, size in zip(loader, sizes, strict=True):
            batches = [batch[0] for batch in step.microbatches(NET)]
            assert step.samples == size == sum(map(len, batches))
            ids += flat(batches)
        assert ids == Order(22, 3, True).ids(epoch, 0, sum(sizes)).tolist()
    assert [one.verdict for one in loader.receipts] == [verdict] * 2
    assert (loader.samples, loader.dropped) == (samples, dropped)


def test_without_shuffling_the_order_is_the_datasets() -> None:
    seen = run(make(shuffle=False, collate_fn=masking))
    assert flat(batch[0] for _, batch, _ in seen) == list(range(22))


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2},
        {"num_workers": 1, "prefetch_factor": 5, "persistent_workers": True},
    ],
)
def test_workers_and_prefetch_change_no_number(options: dict[str, Any]) -> None:
    plain, other = make(collate_fn=masking), make(collate_fn=masking, **options)
    for _ in range(2):
        assert same(run(plain), run(other))


def test_random_numbers_belong_to_samples_and_microbatches() -> None:
    seen = run(make(collate_fn=masking)) + run(make(collate_fn=masking, seed=4))
    assert len({numbers for _, _, numbers in seen}) == len(seen)
    noise = torch.cat([batch[1] for _, batch, _ in seen])
    assert len(noise.unique()) == noise.numel()
    first, second = make(collate_fn=masking), make(collate_fn=masking)
    run(second)
    assert not same(
        {i: row for _, b, _ in run(first) for i, row in zip(b[0], b[1].tolist(), strict=True)},
        {i: row for _, b, _ in run(second) for i, row in zip(b[0], b[1].tolist(), strict=True)},
    )


# -- ambient streams ------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("way", ["whole", "break", "error", "inner break"])
def test_ambient_streams_go_on_as_if_there_were_no_loader(way: str, num_workers: int) -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    before = states()
    loader = make(num_workers=num_workers)
    try:
        for step in loader:
            assert states() == before
            for _ in step.microbatches(NET):
                draws()
                assert states() != before
                if way == "error":
                    raise KeyError
                if way != "whole":
                    break
            assert states() == before
            if way != "whole":
                break
    except KeyError:
        pass
    assert states() == before


@pytest.mark.parametrize("num_workers", [0, 1])
def test_ambient_streams_go_on_over_shards_that_end(num_workers: int) -> None:
    """A microbatch without a row is a copy, which this process reads, for a step ahead too."""
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    before = states()
    loader = anyrank.ElasticLoader.from_shards(
        [5, 9, 0, 20], range, global_batch=12, microbatch=2, num_workers=num_workers
    )
    for step in loader:
        assert states() == before
        for _ in step.microbatches(NET):
            draws()
        assert states() == before


# -- commits --------------------------------------------------------------------------------------


def test_a_step_counts_when_it_is_committed_or_the_next_one_is_asked_for() -> None:
    loader = make()
    steps = iter(loader)
    step = next(steps)
    assert not loader.in_step
    batches = step.microbatches(NET)
    next(batches)
    assert loader.in_step
    list(batches)
    assert (loader.in_step, loader.step, loader.consumed) == (True, 0, 0)
    loader.commit()
    loader.commit()
    assert (loader.in_step, loader.step, loader.consumed) == (False, 1, 8)
    list(next(steps).microbatches(NET))
    next(steps)
    assert (loader.step, loader.consumed, loader.position.accounts[-1].seen.count) == (2, 16, 16)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}], ids=str)
@pytest.mark.parametrize("way", ["break in the step", "break behind it"])
def test_an_uncommitted_step_comes_again(way: str, options: dict[str, Any]) -> None:
    loader = make(collate_fn=masking, **options)
    first = run(loader, stop=1)
    for step in loader:
        for number, _ in enumerate(step.microbatches(NET)):
            if way == "break in the step" and number == 1:
                break
        break
    # Behind a complete step nobody can know whether the optimizer has used it.
    assert loader.in_step == (way == "break behind it")
    assert same(first + run(loader), run(make(collate_fn=masking)))
    assert loader.receipts == [(0, 22, "exactly once")]


def test_a_complete_step_can_be_committed_behind_the_loop() -> None:
    loader = make()
    for step in loader:
        list(step.microbatches(NET))
        break
    loader.commit()
    assert (loader.in_step, loader.step) == (False, 1)


def test_a_step_that_is_not_taken_to_its_end_is_an_error() -> None:
    loader = make()
    for commits in (False, True):
        with pytest.raises(anyrank.CheckpointError, match="step 0 is not complete"):
            leave_steps_unfinished(loader, commits)
    _steps, step = first_step(loader)
    batches = step.microbatches(NET)
    next(batches)
    with pytest.raises(ValueError, match="previous microbatches"):
        list(step.microbatches(NET))


def test_a_second_pass_has_the_same_batches_and_other_random_numbers() -> None:
    loader = make(collate_fn=masking)
    for step in loader:
        passes: list[list[Any]] = []
        for _ in range(3):
            passes.append([(batch, draws()) for batch in step.microbatches(NET)])
        first, *others = passes
        for other in others:
            assert same([batch for batch, _ in first], [batch for batch, _ in other])
        numbers = [row for one in passes for _, row in one]
        assert len(set(numbers)) == len(numbers)
        loader.commit()
    assert loader.receipts == [(0, 22, "exactly once")]


def test_each_pass_has_its_own_loss() -> None:
    net = nn.Linear(1, 1, bias=False)
    _steps, step = first_step(make(TensorDataset(torch.ones(22, 1))))
    for factor in (1.0, 3.0):
        for (x,) in step.microbatches(net):
            step.backward(factor * x.mean() + 0 * net(x).mean())
        assert step.loss() == factor


@pytest.mark.parametrize("what", ["iterate", "load"])
def test_a_loop_notices_that_another_one_has_taken_over(what: str) -> None:
    loader = make()
    steps = iter(loader)
    list(next(steps).microbatches(NET))
    others = iter(loader)
    batches = iter(())
    if what == "load":
        loader.load_state_dict(make().state_dict())
    else:
        batches = next(others).microbatches(NET)
        next(batches)
    with pytest.raises(anyrank.CheckpointError, match="iterated again, or loaded"):
        next(steps)
    if what == "iterate":
        assert loader.in_step
        assert len(list(batches)) == 3
        loader.commit()
        assert loader.step == 1


# -- backward -------------------------------------------------------------------------------------


def test_what_backward_refuses() -> None:
    loader = make()
    _steps, step = first_step(loader)
    loss = NET(torch.ones(1)).sum()
    with pytest.raises(ValueError, match="inside"):
        step.backward(loss)
    with pytest.raises(ValueError, match=r"needs at least one step\.backward"):
        step.loss()
    for number, _ in enumerate(step.microbatches(NET)):
        with pytest.raises(ValueError, match=r"shape \[3\]"):
            step.backward(NET(torch.ones(3, 1)).squeeze(1))
        with pytest.raises(ValueError, match="weight=-1"):
            step.backward(NET(torch.ones(1)).sum(), -1)
        step.backward(NET(torch.ones(1)).sum(), 2.0)
        with pytest.raises(ValueError, match="every backward of a step, or in none"):
            step.backward(NET(torch.ones(1)).sum())
        with pytest.raises(ValueError, match="weight=3"):
            step.backward(NET(torch.ones(1)).sum(), 3.0)
        assert number < 4
    NET.zero_grad()


def test_two_losses_of_a_microbatch_add_up() -> None:
    net = nn.Linear(1, 1, bias=False).double()
    loader = make(TensorDataset(torch.arange(22.0).double()), shuffle=False)
    for how in (None, 1.0):
        net.zero_grad()
        _steps, step = first_step(loader)
        for (x,) in step.microbatches(net):
            step.backward(net(x[:, None]).mean(), how)
            step.backward(2 * net(x[:, None]).mean(), how)
        assert net.weight.grad is not None
        torch.testing.assert_close(net.weight.grad.item(), 3 * 3.5)
        assert step.loss() == pytest.approx(3 * 3.5 * net.weight.item())


def test_a_step_without_any_weight_has_no_gradient() -> None:
    net = nn.Linear(1, 1)
    _steps, step = first_step(make())
    for _ in step.microbatches(net):
        step.backward(net(torch.ones(1)).sum(), 0)
    assert net.weight.grad is not None
    assert net.weight.grad.item() == 0
    assert step.loss() == 0


# -- state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [0, 1, 2, 3, 4])
def test_a_loaded_state_goes_on_where_it_was_saved(stop: int) -> None:
    whole = make(collate_fn=masking)
    expected = run(whole) + run(whole)
    saved = make(collate_fn=masking)
    first = run(saved, stop) if stop else []
    if stop == 4:
        first += run(saved, stop)
    before = states()
    state = json.loads(json.dumps(saved.state_dict()))
    loader = make(collate_fn=masking)
    loader.load_state_dict(state)
    assert states() == before
    assert loader.state_dict() == state
    while loader.epoch < 2:
        first += run(loader)
    assert same(first, expected)
    assert {one.verdict for one in loader.receipts} == {"exactly once"}


def test_a_loader_is_not_copied_and_says_what_to_do() -> None:
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(
            TypeError, match=r"an ElasticLoader cannot be copied .* load_state_dict"
        ):
            copied(anyrank.ElasticLoader(range(8), global_batch=4, microbatch=2))


def test_the_state_is_small_and_knows_no_ranks() -> None:
    loader = make(key="data v1")
    run(loader, stop=2)
    state = loader.state_dict()
    assert len(json.dumps(state)) < 450
    assert state == {
        "version": 1,
        "seed": 3,
        "epoch": 0,
        "step": 2,
        "consumed": 16,
        "samples": 16,
        "dropped": 0,
        "global_batch": 8,
        "microbatch": 2,
        "n": 22,
        "key": "data v1",
        "order": "feistel-v1",
        "tail": "short",
        "receipt": loader.position.accounts[-1].seen.to_json(),
        "receipts": [],
    }


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "dataset": (
        {"dataset": Noisy(23)},
        r"length 22, but this loader has 23. Pass the dataset of the saved run",
    ),
    "key": ({"key": "b"}, r"key 'a', but this loader has 'b'. .*key='a'"),
    "no key": ({"key": None}, r"key 'a', but this loader has None"),
    "seed": ({"seed": 4}, r"seed 3, but this loader has 4. Set seed=3"),
    "order": (
        {"shuffle": False},
        "the saved run has shuffle=True, but this loader has shuffle=False. Set shuffle=True",
    ),
    "microbatch": ({"microbatch": 4}, r"microbatch 2, but this loader has 4. Set microbatch=2"),
    "tail": ({"tail": "drop"}, r"tail 'short', but this loader has 'drop'. Set tail='short'"),
    "batch": (
        {"global_batch": 16},
        r"global_batch 8, but this loader has 16. Set global_batch=8.*on_batch_change",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_state_of_another_run_is_refused_and_changes_nothing(name: str) -> None:
    saved = make(key="a")
    run(saved, stop=2)
    options, message = OTHERS[name]
    loader = make(**{"key": "a", **options})
    before = loader.state_dict()
    with pytest.raises(anyrank.CheckpointError, match=message):
        loader.load_state_dict(saved.state_dict())
    assert loader.state_dict() == before


DAMAGED: dict[str, Any] = {
    "consumed": 23,
    "samples": None,
    "receipt": [16, None],
    "receipts": None,
    "version": ...,
    "global_batch": ...,
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_state_that_nobody_saves_is_corrupt(name: str) -> None:
    saved = make()
    run(saved, stop=2)
    for state in ({**saved.state_dict(), name: DAMAGED[name]}, dict(saved.state_dict())):
        if state[name] is ... or state[name] != DAMAGED[name]:
            del state[name]
        with pytest.raises(anyrank.CorruptCheckpoint, match="data position"):
            make().load_state_dict(state)


@pytest.mark.parametrize("tail", ["short", "drop"])
@pytest.mark.parametrize("size", [2, 4, 12, 16, 22])
def test_another_global_batch_goes_on_and_is_reported(tail: Any, size: int) -> None:
    saved = make(collate_fn=masking, tail=tail)
    seen = run(saved, stop=1)
    loader = make(global_batch=size, tail=tail, collate_fn=masking, on_batch_change="rescale")
    loader.load_state_dict(saved.state_dict())
    assert loader.notes == [
        f"global_batch 8 became {size} at step 1. The step count continues, so a per-step "
        "learning-rate schedule now covers a different number of samples"
    ]
    while loader.epoch == 0:
        seen += run(loader)
    ids = flat(batch[0] for _, batch, _ in seen)
    order = Order(22, 3, True).ids(0, 0, 22).tolist()
    assert ids == (order + order)[: len(ids)]
    dropped = (22 - 8) % size if tail == "drop" else 0
    assert (loader.samples, loader.dropped) == (22 - dropped, dropped)
    assert {one.verdict.split(",")[0] for one in loader.receipts} <= {"exactly once"}


def test_workers_that_return_other_samples_are_noticed() -> None:
    loader = make()
    _steps, step = first_step(loader)
    batch = next(loader.position.batches)._replace(batch=None)
    loader.position.batches = iter([batch] * 2)
    with pytest.raises(anyrank.CheckpointError, match=r"microbatch 1: the plan has samples \["):
        next(step.microbatches(NET))


# -- what the loader refuses ----------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "not a multiple": ({"microbatch": 3}, ValueError, "not a multiple of microbatch 3"),
    "iterable": ({"dataset": Stream()}, TypeError, "Stream has no len"),
    "nothing left": ({"dataset": [1], "tail": "drop"}, ValueError, "would drop all 1 samples"),
    "prefetch": ({"prefetch_factor": 2}, ValueError, "prefetch_factor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused(name: str) -> None:
    options, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        make(**options)


def test_fsdp1_is_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    net = nn.Module()
    net.inner = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(net.inner)
    _steps, step = first_step(make())
    with pytest.raises(TypeError, match="FSDP1"):
        list(step.microbatches(net))


def test_a_step_outside_of_its_loop_is_an_error() -> None:
    step = next(iter(make()))
    for call in (step.loss, lambda: list(step.microbatches(NET))):
        with pytest.raises(ValueError, match="this step is over"):
            call()


class Raising(list[int]):
    """A dataset of which no sample can be read."""

    def __getitem__(self, index: Any) -> Any:
        raise IndexError(index)


def test_a_dataset_that_raises_says_so_and_nothing_counts() -> None:
    loader = make([1, 2], global_batch=2)
    loader._fetcher.dataset.dataset = Raising([1, 2])
    with pytest.raises(IndexError):
        run(loader)
    assert loader.state_dict() == make([1, 2], global_batch=2).state_dict()


# -- rank arithmetic ------------------------------------------------------------------------------


@given(count=st.integers(1, 200), size=st.integers(1, 64))
def test_shares_are_contiguous_balanced_and_equally_long(count: int, size: int) -> None:
    every = [slots_of_rank(count, rank, size) for rank in range(size)]
    assert [turn.k for turns in every for turn in turns if not turn.is_copy] == list(range(count))
    assert {len(turns) for turns in every} == {-(-count // size)}
    own = [sum(not turn.is_copy for turn in turns) for turns in every]
    assert max(own) - min(own) <= 1
    for turns in every:
        assert all(0 <= turn.k < count for turn in turns)
        assert [turn.is_copy for turn in turns] == sorted(turn.is_copy for turn in turns)


def signalled(numbers: Iterable[signal.Signals], loader: anyrank.ElasticLoader) -> None:
    """Run an epoch, and send signals to the workers in its first step."""
    for step_number, step in enumerate(loader):
        batches = list(step.microbatches(NET))
        assert len(batches) == 2
        if step_number == 0:
            workers = multiprocessing.active_children()
            assert workers
            for worker in workers:
                for number in numbers:
                    os.kill(worker.pid or 0, number)
            time.sleep(0.1)
            assert all(worker.is_alive() for worker in workers)
        loader.commit()


def test_workers_leave_signals_to_the_rank() -> None:
    loader = anyrank.ElasticLoader(list(range(8)), global_batch=2, microbatch=1, num_workers=1)
    signalled([signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM], loader)
    assert loader.receipts == [(0, 8, "exactly once")]


ENDS = """
import multiprocessing, os, signal, sys, time
import torch
import anyrank

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, i):
        if i == 17 and case == "dataset":
            raise ValueError("bad 17")
        return torch.ones(2)

def train():
    for step in loader:
        for x in step.microbatches(net):
            step.backward(net(x).mean())
            if case == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        loader.commit()
        if case in ("break", "child"):
            break
        if case == "exit":
            sys.exit(3)
        if case == "ctrl-c":
            os.killpg(os.getpgrp(), signal.SIGINT)
            time.sleep(30)

for case in sys.argv[1:]:  # each in a process of its own, which ends as any other
    if not (child := os.fork()):
        os.setpgrp()
        os.dup2(os.open(case, os.O_CREAT | os.O_WRONLY), 2)
        signal.alarm(200)
        break
    print(case, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
net = torch.nn.Linear(2, 1)
loader = anyrank.ElasticLoader(
    Data(), global_batch=8, microbatch=2, num_workers=2, persistent_workers=case != "dataset"
)
if case == "child":
    child = multiprocessing.get_context("fork").Process(target=train)
    child.start()
    child.join()
    sys.exit(child.exitcode)
train()
"""


CODES = {"dataset": 1, "break": 0, "exit": 3, "ctrl-c": -2, "killed": -9, "child": 0}


def test_workers_end_with_their_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS, *CODES]
    # A worker that is left holds the pipe open.
    run = subprocess.run(
        command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=240, check=True
    )
    codes = {case: int(code) for case, code in map(str.split, run.stdout.splitlines())}
    errors = {case: (tmp_path / case).read_text() for case in CODES}
    assert codes == CODES, errors
    assert "raised by dataset[17], epoch 0, microbatch [" in errors["dataset"]


def test_an_error_in_this_process_names_its_sample() -> None:
    def bad(samples: list[Any]) -> Any:
        raise ValueError("ragged")

    with pytest.raises(KeyError) as caught:
        run(make({i: i for i in range(23) if i != 5}, collate_fn=list))
    assert caught.value.__notes__[0].startswith("raised by dataset[5], epoch 0, microbatch [")
    with pytest.raises(ValueError, match="ragged") as other:
        run(make(collate_fn=bad))
    assert other.value.__notes__[0].startswith("raised by collate_fn, epoch 0, microbatch [")
    with pytest.raises(RuntimeError, match=r"^StopIteration, raised by dataset\[\d+\], epoch 0, "):
        run(make(Exhausted()))


# -- backward of the user's own -------------------------------------------------------------------


def own_backward(step: Any, net: nn.Module, **options: Any) -> None:
    for (x,) in step.microbatches(net, **options):
        net(x[:, None]).mean().backward()


def test_a_backward_of_ones_own_is_refused_unless_asked_for() -> None:
    net = nn.Linear(1, 1)
    data = TensorDataset(torch.arange(22.0))
    _steps, step = first_step(make(data))
    with pytest.raises(
        ValueError, match=r"step 0: loss.backward\(\) was called directly.* step.scale\(loss\)"
    ):
        own_backward(step, net)
    net.zero_grad()
    _steps, step = first_step(make(data))
    own_backward(step, net, own_backward=True)
    assert net.bias.grad == 4  # the sum over 4 microbatches


@pytest.mark.parametrize("first", [False, True])
def test_a_backward_of_ones_own_beside_the_steps_is_refused(first: bool) -> None:
    net = nn.Linear(1, 1)
    _steps, step = first_step(make(TensorDataset(torch.arange(22.0))))

    def penalty() -> None:
        net.weight.square().sum().backward()

    def run() -> None:
        for (x,) in step.microbatches(net):
            if first:
                penalty()
            step.backward(net(x[:, None]).mean())
            if not first:
                penalty()

    with pytest.raises(ValueError, match=r"step 0: loss.backward\(\) was called directly"):
        run()


def test_a_loss_may_wait_for_its_backward_while_another_has_one() -> None:
    net = nn.Linear(1, 1)
    _steps, step = first_step(make(TensorDataset(torch.arange(22.0))))
    for (x,) in step.microbatches(net):
        late = step.scale(net(x[:, None]).mean())
        step.backward(net.weight.square().sum())
        late.backward()


def test_backward_of_a_scaled_loss_is_as_right_as_step_backward() -> None:
    data, grads = TensorDataset(torch.arange(22.0)), list[Any]()
    for own in (False, True):
        net = nn.Linear(1, 1)
        nn.init.ones_(net.weight)
        nn.init.zeros_(net.bias)
        _steps, step = first_step(make(data))
        for number, (x,) in enumerate(step.microbatches(net)):
            assert step.k == number
            loss = net(x[:, None]).square().mean()
            step.scale(loss).backward() if own else step.backward(loss)
        grads.append(net.weight.grad)
        with pytest.raises(ValueError, match="inside"):
            _ = step.k
    assert torch.equal(*grads)


# -- samples at once, and by weight ---------------------------------------------------------------


class SyncCopy(Noisy):
    """A dataset with `__getitems__`, which draws in every sample."""

    calls = 0

    def __getitems__(self, ids: list[int]) -> list[Any]:
        self.calls += 1
        return [self[i] for i in ids]


def test_samples_at_once_are_those_one_by_one() -> None:
    data = SyncCopy()
    seen = run(make(data, collate_fn=masking))
    assert data.calls == 11
    assert same(seen, run(make(collate_fn=masking)))
    assert flat(batch[0] for _, batch, _ in seen) == Order(22, 3, True).ids(0, 0, 22).tolist()


class Exhausted(Noisy):
    def __getitem__(self, index: int) -> Any:
        return next(iter(()))


class TooFew(SyncCopy):
    def __getitems__(self, ids: list[int]) -> list[Any]:
        return super().__getitems__(ids)[1:]


def test_too_few_samples_at_once_are_an_error() -> None:
    with pytest.raises(ValueError, match="returned 1 samples for 2 ids"):
        run(make(TooFew(), collate_fn=masking))


def test_weights_draw_samples_as_often_as_they_say() -> None:
    n = 4000
    weights = torch.arange(n) % 4
    loader = make(Noisy(n), weights=weights, global_batch=400, microbatch=100, collate_fn=masking)
    seen = run(loader)
    ids = torch.tensor(flat(batch[0] for _, batch, _ in seen))
    counts = torch.bincount(ids % 4, minlength=4) / n
    torch.testing.assert_close(counts, torch.arange(4) / 6, atol=0.03, rtol=0)
    assert loader.receipts == [(0, n, "exactly as drawn")]
    # A sample that comes again is augmented in another way.
    noise = torch.cat([batch[1] for _, batch, _ in seen])
    assert len(ids.unique()) < n
    assert len(noise.unique(dim=0)) == n
    other = run(loader)
    assert flat(batch[0] for _, batch, _ in other) != ids.tolist()


def test_a_weighted_run_goes_on_where_it_was_saved() -> None:
    weights = [float(i) for i in range(22)]
    whole = run(make(weights=weights, collate_fn=masking))
    loader = make(weights=weights, collate_fn=masking)
    first = run(loader, stop=2)
    again = make(weights=torch.tensor(weights) * 3, collate_fn=masking)  # the same shares
    again.load_state_dict(loader.state_dict())
    assert same(first + run(again), whole)
    assert again.receipts == [(0, 22, "exactly as drawn")]
    for others, text in (
        (
            None,
            "the saved run has a dataset with weights=, but this loader has a dataset",
        ),
        (weights[::-1], r"the order 'weighted-v1 .*Pass the saved run's weights=, or"),
    ):
        with pytest.raises(anyrank.CheckpointError, match=text):
            make(weights=others).load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0] * 21, r"shape \[21\]: must be \[22\]"),
        ([-1.0] + [1.0] * 21, "at least 0"),
        ([float("nan")] * 22, "finite"),
        ([0.0] * 22, "not all 0"),
    ],
)
def test_what_weights_cannot_be(weights: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(weights=weights)
    with pytest.raises(ValueError, match="shuffle=False"):
        make(weights=[1.0] * 22, shuffle=False)


def test_the_length_is_the_steps_of_an_epoch() -> None:
    for tail, steps in (("short", 3), ("drop", 2)):
        loader = make(tail=tail)
        run(loader, stop=1)
        assert len(loader) == steps
    assert len(make(Noisy(16))) == 2


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("weight", [2.0**-24, 1.0, 2.0**24])
def test_weights_of_any_size_keep_the_range_of_half_gradients(weight: float, exact: bool) -> None:
    """The weighted losses of a step are divided before backward by about their ordinary weight."""
    model = nn.Linear(1, 1, bias=False).half()
    data = torch.full((4, 1), 2.0**-8, dtype=torch.float16)
    loader = anyrank.ElasticLoader(data, global_batch=4, microbatch=1, exact=exact)
    for step in loader:
        for batch in step.microbatches(model):
            step.backward(model(batch).mean(), weight=weight)
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 2.0**-8


def test_processes_of_a_dataset_that_are_no_workers_are_left_alone() -> None:
    processes = [
        multiprocessing.get_context("spawn").Process(target=time.sleep, args=(30,), daemon=daemon)
        for daemon in (False, True)
    ]
    workers = WorkerExit()
    try:
        # In the place of a loader's iterator; the list starts them.
        workers.watch(lambda: (none for none in [process.start() for process in processes]))
        assert workers.workers == processes[1:]
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize("exact", [False, True])
def test_a_step_walks_through_the_model_once(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    walks: list[int] = []
    named_modules = torch.nn.Module.named_modules

    def noted(self: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
        walks.append(int(self is net))
        return named_modules(self, *arguments, **options)

    monkeypatch.setattr(torch.nn.Module, "named_modules", noted)
    loader = anyrank.ElasticLoader(torch.randn(24, 4), global_batch=8, microbatch=2, exact=exact)
    found: list[int] = []
    for step in loader:
        walks.clear()
        for batch in step.microbatches(net):
            step.backward(net(batch).square().mean())
        step.clip_grad_norm_(1.0)
        found.append(sum(walks))
        net.zero_grad(set_to_none=True)
    assert found[1:] == [1, 1]


def test_with_exact_the_power_of_weights_goes_on_in_the_state() -> None:
    net = torch.nn.Linear(4, 1)

    def run(loader: anyrank.ElasticLoader, weight: float) -> None:
        for step in loader:
            for batch in step.microbatches(net):
                step.backward(net(batch).square().mean(), weight * (1 + step.k))
            loader.commit()
            break

    options: Any = {"global_batch": 4, "microbatch": 2, "exact": True}
    loader = anyrank.ElasticLoader(torch.randn(16, 4), **options)
    assert "exponent" not in loader.state_dict()["exact"]
    run(loader, 0)
    assert "exponent" not in loader.state_dict()["exact"]
    run(loader, 100)  # that of the step's first microbatch, on any number of ranks
    run(loader, 3)
    other = anyrank.ElasticLoader(torch.randn(16, 4), **options)
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    run(other, 3)
    assert other.state_dict()["exact"] == loader.state_dict()["exact"]
    assert loader.state_dict()["exact"]["exponent"] == 7
