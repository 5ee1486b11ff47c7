"""Streams over 4 ranks, a kill, 3 ranks, a kill, 2 ranks: which rows are lost, or come twice?

    python benchmarks/streams.py  # beside what is installed; results/streams.json

Twelve files of 1 to 400 rows are read in steps of 12 rows. A save comes after each third step. The
4 ranks are killed two steps after a save, the 3 ranks one step after one; each time the next ranks
go on from the save, and the last 2 end the epoch. Counted are the rows of the steps that the run
has kept. The ranks of the other tools are iterated in turn in one process, which is kind to them:
a rank whose rows are over does not hold up the others. A tool that is not installed has a row that
says so.

Then the time of an epoch beside a DataLoader that reads the same rows, each of which takes 50 us to
read, in turns.
"""

from __future__ import annotations

import itertools
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import bench

BATCH, SAVE = 12, 3
PHASES = ((4, 8), (3, 13), (2, 10**6))  # ranks, and the steps after which they are killed
COST, SHARDS, LENGTH = 50e-6, 48, 500  # of the epoch whose time is taken
SIZES = [random.Random(seed).choice([1, 20, 60, 150, 400]) for seed in range(12)]

Step = list[int]  # ids of rows
Ranks = Callable[[list[str], int, Any], tuple[Iterator[Step], Callable[[], Any]]]


def rows_of(path: str) -> Iterator[int]:
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["id"]


def in_turn(parts: list[Iterator[Step]]) -> Iterator[Step]:
    """The steps of ranks whose batches are given, until all are over."""
    for batches in itertools.zip_longest(*parts, fillvalue=()):
        yield [row for batch in batches for row in batch]


# -- the tools ------------------------------------------------------------------------------------


def anyrank_ranks(files: list[str], size: int, state: Any) -> Any:
    """The steps of this process, which is a rank of the group that it is in."""
    import torch

    import anyrank

    def read(path: str) -> Iterator[Any]:
        return iter(rows_of(path))

    loader = anyrank.ElasticLoader.from_shards(files, read, global_batch=BATCH, microbatch=1)
    if state is not None:
        loader.load_state_dict(state)
    model = torch.nn.Linear(1, 1)

    def steps() -> Iterator[Step]:
        for step in loader:
            rows: Step = []
            for batch in step.microbatches(model):
                if not step.is_copy:  # which is in no loss
                    rows += batch.tolist()
            loader.commit()
            yield rows

    return steps(), loader.state_dict


def anyrank_phase(files: list[str], until: int, state: Any) -> Any:
    """A rank's part of each step until a kill, and the state at each save."""
    steps, saved = list[tuple[int, Step]](), dict[int, Any]()
    made, get_state = anyrank_ranks(files, 0, state)
    first = 0 if state is None else state["step"]
    for number, rows in enumerate(made, first):
        steps.append((number, rows))
        if (number + 1) % SAVE == 0:
            saved[number + 1] = get_state()
        if number + 1 == until:
            break
    return steps, saved


def stateful_ranks(files: list[str], size: int, state: Any) -> Any:
    """torchdata: a dataset with a state of its own, a loader for each rank."""
    from torch.utils.data import IterableDataset
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Files(IterableDataset[Any]):
        def __init__(self, rank: int) -> None:
            self.paths, self.place = files[rank::size], [0, 0]

        def __iter__(self) -> Iterator[int]:
            while self.place[0] < len(self.paths):
                for row in itertools.islice(
                    rows_of(self.paths[self.place[0]]), self.place[1], None
                ):
                    self.place[1] += 1
                    yield row
                self.place = [self.place[0] + 1, 0]
            self.place = [0, 0]

        def state_dict(self) -> Any:
            return {"place": [*self.place]}

        def load_state_dict(self, state: Any) -> None:
            self.place = [*state["place"]]

    loaders = [StatefulDataLoader(Files(rank), batch_size=BATCH // size) for rank in range(size)]
    for rank, loader in enumerate(loaders):
        if state is not None:
            loader.load_state_dict(state[rank])
    parts = [(batch.tolist() for batch in loader) for loader in loaders]
    return in_turn(parts), lambda: [loader.state_dict() for loader in loaders]


def datasets_ranks(files: list[str], size: int, state: Any) -> Any:
    """datasets: split by node, as its documentation has it, and a state for each rank."""
    import datasets
    from datasets.distributed import split_dataset_by_node

    whole: Any = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
    parts: list[Any] = [
        split_dataset_by_node(whole, rank=rank, world_size=size).batch(BATCH // size)
        for rank in range(size)
    ]
    for rank, part in enumerate(parts):
        if state is not None:
            part.load_state_dict(state[rank])
    steps = in_turn([(batch["id"] for batch in part) for part in parts])
    return steps, lambda: [part.state_dict() for part in parts]


def grain_ranks(files: list[str], size: int, state: Any) -> Any:
    """Grain: its ElasticIterator, which needs each row by its number: the rows are in memory."""
    import grain
    from grain.experimental import ElasticIterator

    rows = [row for path in files for row in rows_of(path)]
    parts: list[Any] = []
    for rank in range(size):
        shard = grain.sharding.ShardOptions(shard_index=rank, shard_count=size)
        source = grain.MapDataset.source(rows).shuffle(seed=0)
        parts.append(iter(ElasticIterator(source, BATCH, shard)))
        if state is not None:
            parts[-1].set_state(state[0])
    steps = in_turn([(batch.tolist() for batch in part) for part in parts])
    return steps, lambda: [part.get_state() for part in parts]


TOOLS: dict[str, tuple[str, str, Ranks]] = {
    "anyrank": ("`ElasticLoader.from_shards`", "", anyrank_ranks),
    "torchdata": ("`StatefulDataLoader`, one state per rank", "torchdata", stateful_ranks),
    "datasets": ("`split_dataset_by_node`, one state per rank", "datasets", datasets_ranks),
    "grain": ("`ElasticIterator`, rows by their numbers", "grain", grain_ranks),
}


# -- the run --------------------------------------------------------------------------------------


def run(files: list[str], make: Ranks) -> dict[int, Step]:
    """The steps that the run has kept."""
    kept: dict[int, Step] = {}
    state: Any = None
    first = 0
    for size, until in PHASES:
        steps, get_state = make(files, size, state)
        saved = first, state
        for number, rows in enumerate(steps, first):
            kept[number] = rows
            if (number + 1) % SAVE == 0:
                saved = number + 1, json.loads(json.dumps(get_state(), default=str))
            if number + 1 == until:
                break
        if until < 10**6:
            first, state = saved
            kept = {number: rows for number, rows in kept.items() if number < first}
    return kept


def run_anyrank(files: list[str]) -> dict[int, Step]:
    """As `run`, on real ranks."""
    from anyrank.testing import run_ranks

    kept: dict[int, Step] = {}
    state: Any = None
    for size, until in PHASES:
        by_rank = run_ranks(size, anyrank_phase, files, until, state)
        for steps, _ in by_rank:
            for number, rows in steps:
                kept.setdefault(number, []).extend(rows)
        if until < 10**6:
            first, state = max(by_rank[0][1].items())
            kept = {number: rows for number, rows in kept.items() if number < first}
    return kept


def judge(kept: dict[int, Step], undisturbed: list[Step]) -> bench.Run:
    """What is otherwise than in a run that nothing stops, and than in an epoch."""
    rows = Counter(row for step in kept.values() for row in step)
    numbers = range(max(len(undisturbed), len(kept)))
    other = sum(
        sorted(kept.get(n, ())) != sorted(undisturbed[n] if n < len(undisturbed) else ())
        for n in numbers
    )
    return {
        "rows": sum(SIZES),
        "twice": sum(times - 1 for times in rows.values()),
        "lost": sum(SIZES) - len(rows),
        "steps": len(kept),
        "other_steps": other,
    }


# -- its time -------------------------------------------------------------------------------------


def slow_rows(shard: int) -> Iterator[int]:
    for number in range(LENGTH):
        end = time.perf_counter() + COST
        while time.perf_counter() < end:
            pass
        yield shard * LENGTH + number


def read_plain(num_workers: int, microbatch: int) -> int:
    """The rows of an epoch of a DataLoader, whose workers share the shards."""
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    class Rows(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            worker = get_worker_info()
            own = range(SHARDS) if worker is None else range(worker.id, SHARDS, worker.num_workers)
            return itertools.chain.from_iterable(map(slow_rows, own))

    return sum(len(batch) for batch in DataLoader(Rows(), microbatch, num_workers=num_workers))


def read_by_anyrank(num_workers: int, microbatch: int) -> int:
    """The same of an `ElasticLoader`."""
    import torch

    import anyrank

    model, found = torch.nn.Linear(1, 1), 0
    loader = anyrank.ElasticLoader.from_shards(
        range(SHARDS),
        slow_rows,
        global_batch=12 * microbatch,
        microbatch=microbatch,
        num_workers=num_workers,
    )
    with torch.no_grad():
        for step in loader:
            found += sum(len(batch) for batch in step.microbatches(model) if not step.is_copy)
            loader.commit()
    return found


def time_of_epoch(num_workers: int, microbatch: int) -> bench.Run:
    """How many of a DataLoader's rows a second are read, and what a row takes more."""
    ways = {"DataLoader": read_plain, "anyrank": read_by_anyrank}

    def job(way: str, _: int) -> bench.Run:
        begin = time.perf_counter()
        if ways[way](num_workers, microbatch) != SHARDS * LENGTH:
            raise RuntimeError(f"{way} has not read all rows")
        return {"us": (time.perf_counter() - begin) / SHARDS / LENGTH * 1e6}

    title = f"{num_workers} workers, {microbatch} rows"
    runs = bench.Case(title, ways, job).run(9, warm=1)
    found: bench.Run = {way: round(bench.median(runs[way], "us"), 1) for way in ways}
    speed = bench.ratios(runs["DataLoader"], runs["anyrank"], "us")
    return {
        "workers": num_workers,
        "microbatch": microbatch,
        "us_a_row": found,
        "speed": speed,
    }


def main() -> None:
    rows: list[bench.Run] = []
    with tempfile.TemporaryDirectory() as folder:
        files, numbers = list[str](), itertools.count()
        for index, size in enumerate(SIZES):
            path = Path(folder) / f"{index:02d}.jsonl"
            lines = (json.dumps({"id": next(numbers)}) + "\n" for _ in range(size))
            path.write_text("".join(lines), encoding="utf-8")
            files.append(str(path))
        for name, (title, package, make) in TOOLS.items():
            row: bench.Run = {"tool": name, "title": title}
            try:
                row["version"] = version(package) if package else ""
                undisturbed = list(make(files, PHASES[0][0], None)[0])
                kept = run_anyrank(files) if not package else run(files, make)
                row |= judge(kept, undisturbed)
            except (PackageNotFoundError, ImportError) as error:
                row["not_run"] = f"not installed: {error}"
            except Exception as error:
                row["not_run"] = f"{type(error).__name__}: {str(error)[:200]}"
            bench.tell(name, row)
            rows.append(row)
    times = [time_of_epoch(workers, rows) for workers in (0, 2) for rows in (8, 32)]
    bench.keep("streams", bench.describe_machine() | {"rows": rows, "times": times})


if __name__ == "__main__":
    import streams  # the ranks import its jobs by this name

    streams.main()
