"""The plan of a sync between more ranks than there are here: pure, without processes.

    python benchmarks/sync_simulated.py

The 723 tensors of a Llama of 70 billion parameters pass from 1,024 trainers to 512 generators. A
sender and a receiver are timed, as each rank plans for itself; then all receivers' transfers are
added up, to see that no rank sends or receives more than its part.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from figures import keep
from machine import describe_machine, load_average

from anyrank.filling.ends import TensorInfo
from anyrank.filling.live_flows import EndsSummary, Planner
from anyrank.filling.match import Filling, MatchedEnd, SourceTensor
from anyrank.filling.report import SyncReport
from anyrank.model.options import LoadOptions
from anyrank.tensors.box import Box
from anyrank.tensors.layout import Layout, Placement, local_pieces
from anyrank.tensors.sharded_tensor import Coordinates
from anyrank.tensors.transfers import Strip, places_of, transfers_of
from anyrank.world.ranks import Ranks

SENDERS, RECEIVERS, ON_NODE, LAYERS = 1024, 512, 8, 80
ROWS, COLUMNS, WHOLE = Placement("shard", 0), Placement("shard", 1), Placement("replicate")
# Of one layer: shape, and how tensor parallelism cuts it.
LAYER = [
    *[((8192, 8192), ROWS), ((1024, 8192), ROWS), ((1024, 8192), ROWS), ((8192, 8192), COLUMNS)],
    *[((28672, 8192), ROWS), ((28672, 8192), ROWS), ((8192, 28672), COLUMNS)],
    *[((8192,), WHOLE), ((8192,), WHOLE)],
]
ENDS = [((128256, 8192), ROWS), ((8192,), WHOLE), ((128256, 8192), ROWS)]
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "FSDP 1,024 -> TP 8, 64 times": ((1024,), (64, 8)),
    "HSDP 4 x 256 -> FSDP 64 x TP 8": ((4, 256), (64, 8)),
}
At = dict[int, tuple[int, ...]]


def tensors() -> list[tuple[tuple[int, ...], Placement]]:
    """Shape and tensor parallel cut of each tensor of the model."""
    return [*LAYER * LAYERS, *ENDS]


def layouts(case: str, cut: Placement) -> tuple[Layout, Layout]:
    """How both ends hold a tensor."""
    from_mesh, to_mesh = CASES[case]
    trainer = (ROWS,) if len(from_mesh) == 1 else (WHOLE, ROWS)
    # FSDP over tensor parallelism cuts what is left of the rows.
    outer = Placement("shard", 0, 8 if cut == ROWS else 1) if "FSDP 64" in case else WHOLE
    return Layout(from_mesh, trainer), Layout(to_mesh, (outer, cut))


def coordinates(case: str) -> tuple[At, At]:
    """Where each rank is in its mesh: trainers first, then generators."""
    from_mesh, to_mesh = (itertools.product(*map(range, shape)) for shape in CASES[case])
    return dict(enumerate(from_mesh)), dict(enumerate(to_mesh, SENDERS))


def one_place(coordinate: tuple[int, ...] | None) -> Coordinates:
    """A rank's coordinates, which are the same in the mesh of every tensor."""
    return Coordinates((coordinate,), (0,) * len(tensors()))


def plan_of(rank: int, case: str) -> dict[str, float]:
    """Seconds that one rank plans for, of the clock and of its core, and its transfers."""
    at = coordinates(case)
    everyone = Ranks(range(SENDERS + RECEIVERS), rank)
    everyone.nodes = tuple(each // ON_NODE for each in everyone.ranks)
    summaries = [
        EndsSummary("src", one_place(at[0].get(r)), "dst", one_place(at[1].get(r)))
        for r in everyone.ranks
    ]
    rows: list[TensorInfo] = []
    sources: list[SourceTensor] = []
    fillings: list[Filling] = []
    kept = {cut: layouts(case, cut) for cut in (ROWS, COLUMNS, WHOLE)}
    for number, (shape, cut) in enumerate(tensors()):
        source, row = (
            TensorInfo((str(number),), shape, torch.bfloat16, layout, "parameter", *[False] * 4)
            for layout in kept[cut]
        )
        rows.append(row)
        sources.append(SourceTensor(source, dict(at[0])))
        dims = tuple(range(len(shape)))
        strip = Strip(Box.whole(shape), number, (0,) * len(shape), dims)
        fillings.append(Filling(number, (strip,), torch.bfloat16, False))
    end = MatchedEnd(tuple(rows), tuple(fillings), SyncReport(), [])
    start, cpu_start = time.perf_counter(), time.process_time()
    flows = Planner(summaries, everyone, LoadOptions()).flows([end], [list(at[1])], sources)
    return {
        "seconds": round(time.perf_counter() - start, 2),
        "cpu_seconds": round(time.process_time() - cpu_start, 2),
        "transfers": sum(len(flow.transfers) for flow in flows),
    }


def transfers_between(case: str) -> Iterator[tuple[int, int, int]]:
    """Sender, receiver and elements of everything that passes, by shape."""
    at = coordinates(case)
    nodes = {rank: rank // ON_NODE for rank in range(SENDERS + RECEIVERS)}
    for (shape, cut), count in Counter(tensors()).items():
        source, target = layouts(case, cut)
        dims = tuple(range(len(shape)))
        strip = Strip(Box.whole(shape), 0, (0,) * len(shape), dims)
        places = places_of(shape, source, at[0], nodes)
        wanted = {rank: local_pieces(shape, target, each) for rank, each in at[1].items()}
        for receiver, pieces in wanted.items():  # none of which sends: the others' take no part
            alone = {**dict.fromkeys(wanted, ()), receiver: pieces}
            for each in transfers_of(receiver, [strip], [places], alone):
                yield each.sender, each.receiver, each.box.numel * count


def of_fair(case: str) -> tuple[float, float]:
    """What the rank that sends most sends, as a multiple of an equal share; and that receives."""
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for sender, receiver, numel in transfers_between(case):
        sent[sender] += numel
        received[receiver] += numel
    total = sum(sent.values())
    most = max(sent.values()) / (total / SENDERS), max(received.values()) / (total / RECEIVERS)
    return round(most[0], 3), round(most[1], 3)


def main() -> None:
    """Measure, print, and keep the results."""
    rows: list[dict[str, Any]] = []
    for case in CASES:
        sent, received = of_fair(case)
        rows.append(
            {
                "case": case,
                "tensors": len(tensors()),
                "a sender": plan_of(0, case),
                "a receiver": plan_of(SENDERS, case),
                "most_sent_of_fair": sent,
                "most_received_of_fair": received,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    result = describe_machine() | {"load_average": load_average(), "rows": rows}
    keep("sync_simulated", result)


if __name__ == "__main__":
    main()
