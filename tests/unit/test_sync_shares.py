"""What each rank sends and receives in a sync of many ranks: its part, and hardly more."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest

from anyrank.tensors.box import Box
from anyrank.tensors.layout import Layout, Placement, local_pieces
from anyrank.tensors.transfers import Strip, places_of, transfers_of

SENDERS, RECEIVERS, ON_NODE, LAYERS = 64, 32, 8, 2
ROWS, COLUMNS, WHOLE = Placement("shard", 0), Placement("shard", 1), Placement("replicate")
# Of a Llama of 70 billion parameters with fewer layers: shape, and how tensor parallelism cuts it.
LAYER = [
    *[((8192, 8192), ROWS), ((1024, 8192), ROWS), ((1024, 8192), ROWS), ((8192, 8192), COLUMNS)],
    *[((28672, 8192), ROWS), ((28672, 8192), ROWS), ((8192, 28672), COLUMNS)],
    *[((8192,), WHOLE), ((8192,), WHOLE)],
]
ENDS = [((128256, 8192), ROWS), ((8192,), WHOLE), ((128256, 8192), ROWS)]
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "FSDP 64 -> TP 8, 4 times": ((64,), (4, 8)),
    "HSDP 4 x 16 -> FSDP 4 x TP 8": ((4, 16), (4, 8)),
}
Passed = tuple[int, int, int]  # sender, receiver, elements


def layouts(case: str, cut: Placement) -> tuple[Layout, Layout]:
    """How both ends hold a tensor."""
    from_mesh, to_mesh = CASES[case]
    trainer = (ROWS,) if len(from_mesh) == 1 else (WHOLE, ROWS)
    # FSDP over tensor parallelism cuts what is left of the rows.
    outer = Placement("shard", 0, 8 if cut == ROWS else 1) if "-> FSDP" in case else WHOLE
    return Layout(from_mesh, trainer), Layout(to_mesh, (outer, cut))


def transfers_between(case: str) -> Iterator[Passed]:
    """Everything that passes, by shape."""
    from_mesh, to_mesh = (itertools.product(*map(range, shape)) for shape in CASES[case])
    senders, receivers = dict(enumerate(from_mesh)), dict(enumerate(to_mesh, SENDERS))
    nodes = {rank: rank // ON_NODE for rank in range(SENDERS + RECEIVERS)}
    for (shape, cut), count in Counter([*LAYER * LAYERS, *ENDS]).items():
        source, target = layouts(case, cut)
        strip = Strip(Box.whole(shape), 0, (0,) * len(shape), tuple(range(len(shape))))
        places = places_of(shape, source, senders, nodes)
        wanted = {rank: local_pieces(shape, target, at) for rank, at in receivers.items()}
        for receiver, pieces in wanted.items():  # none of which sends: the others' take no part
            alone = {**dict.fromkeys(wanted, ()), receiver: pieces}
            for each in transfers_of(receiver, [strip], [places], alone):
                yield each.sender, each.receiver, each.box.numel * count


def most_of_fair(passed: list[Passed]) -> float:
    """What the rank that sends or receives most does, as a multiple of an equal share."""
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for sender, receiver, numel in passed:
        sent[sender] += numel
        received[receiver] += numel
    total = sum(sent.values())
    return max(max(sent.values()) * SENDERS, max(received.values()) * RECEIVERS) / total


@pytest.mark.parametrize("case", CASES)
def test_no_rank_of_a_large_sync_sends_or_receives_more_than_its_part(case: str) -> None:
    assert most_of_fair([*transfers_between(case)]) <= 1.1


def test_a_rank_that_sends_twice_is_found() -> None:
    passed = [*transfers_between("FSDP 64 -> TP 8, 4 times")]
    assert most_of_fair([*passed, *(each for each in passed if each[0] == 0)]) > 1.1
