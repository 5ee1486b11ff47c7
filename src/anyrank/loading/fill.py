"""The one way to fill a model: allocate, move, rebuild, put in place.

Loads, syncs, adopted checkpoints and initial values differ in where the values come from: each has
its own `Side`. Until the last step, tensors on meta are unchanged on every rank, because until then
an error on one rank is an error on every rank. The last step does not communicate: it swaps
tensors, all or none, hashes frozen parts, moves buffers and calls the modules' `set_extra_state`.
If it fails on a rank, the model has its new values on the other ranks, and the error says so.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch.autograd.graph import increment_version

from anyrank.errors import AnyrankError
from anyrank.models.first_values.buffers import rebuilt_values
from anyrank.models.own_code import OwnCodeRun
from anyrank.models.replace import Replacement
from anyrank.models.share import ModelShare
from anyrank.world.ranks import Ranks

PLACED = (
    "The model has its new values, except on the rank that failed: there, buffers, extra state, or "
    "tensors that were on the meta device may be missing"
)


class Moved(NamedTuple):
    """Bytes that one rank moved, the device memory of buffers and of a group, and the channel."""

    read: int = 0
    sent: int = 0
    received: int = 0
    copied: int = 0
    buffers: int = 0
    group: int = 0
    channel: str = ""


class Measured(NamedTuple):
    """Measurements of a fill on one rank."""

    moved: Moved
    host_peak_bytes: int
    device_peak_bytes: int


class Side:
    """The origin of the values on one rank. This base class has none: all values come from rules.

    Attributes:
        preparing, moving: names of these two steps in messages.
        is_one_model: whether all ranks fill the same model, so that each knows all of the report.
    """

    preparing = "allocating memory"
    moving = "initializing"
    is_one_model = True

    def prepare(self, share: ModelShare) -> None:
        """Acquire all that the fill needs, before a tensor is written. Does not communicate."""
        share.allocate()

    def compare(self) -> None:
        """Raise an error if values that must already be equal differ. Collective."""

    def move(self) -> None:
        """Fill this rank's share; return only when the other ranks have what they need from it."""

    def check(self) -> None:
        """Compare the moved values. Collective."""

    def finish(self) -> None:
        """Do everything else that can fail, before the model is changed. Collective."""

    def moved(self) -> Moved:
        """Return the bytes moved so far."""
        return Moved()

    def damage_note(self) -> str:
        """Return the sentence that an error of `move` or `check` adds about the model."""
        return ""

    def close(self) -> None:
        """Close open files and connections."""


@dataclass(frozen=True)
class FillResult:
    """The result of a fill, beyond its plan. The same on every rank.

    Attributes:
        rules: initialized tensor -> its rule.
        rebuilt: non-persistent buffers -> the rule that filled them.
        renewed: tensors whose objects could not be kept.
        own_code: what happened to the modules' own code and extra state.
        measured: measurements of every rank.
        seconds: seconds of the slowest rank.
    """

    rules: dict[str, str]
    rebuilt: dict[str, str]
    renewed: list[str]
    own_code: OwnCodeRun
    measured: list[Measured]
    seconds: float

    @property
    def moved(self) -> list[Moved]:
        """Bytes of every rank."""
        return [measured.moved for measured in self.measured]

    def fields(self) -> dict[str, Any]:
        """Return the fields of a report that every fill has."""
        return {
            "initialised": self.rules,
            "rebuilt": self.rebuilt,
            "renewed": self.renewed,
            "bytes_sent": [moved.sent for moved in self.moved],
            "peak_host_bytes": [measured.host_peak_bytes for measured in self.measured],
            "peak_device_bytes": [measured.device_peak_bytes for measured in self.measured],
            "seconds": self.seconds,
        }


Column: TypeAlias = "dict[Any, int]"
"""Value -> one bit per position of a rank that has it. Most ranks have the same value, so it is
small."""


class _Placed(NamedTuple):
    """The message of ranks when their weights are in place.

    Attributes:
        columns: columns of the moved bytes and of the memory peaks: a report shows these few
            numbers for each rank, and is the same on every rank.
        seconds: the longest duration.
        rules: tensor -> how it got its values.
        renewed: tensors whose objects could not be kept.
    """

    columns: list[Column]
    seconds: float
    rules: dict[str, str]
    renewed: list[str]

    def join(self, others: _Placed) -> _Placed:
        """Merge the messages of ranks."""
        columns = zip(self.columns, others.columns, strict=True)
        return _Placed(
            [_join_columns(column, other) for column, other in columns],
            max(self.seconds, others.seconds),
            self.rules | others.rules,
            [*dict.fromkeys(self.renewed + others.renewed)],
        )

    def rows(self, size: int) -> list[list[Any]]:
        """Return the values of each rank, in the order of the positions."""
        return [
            [next(v for v, bits in column.items() if bits >> n & 1) for column in self.columns]
            for n in range(size)
        ]


def _join_columns(column: Column, others: Column) -> Column:
    values = {**column, **others}
    return {value: column.get(value, 0) | others.get(value, 0) for value in values}


def fill(share: ModelShare, side: Side, ranks: Ranks, *, rebuild: bool) -> FillResult:
    """Fill a model. Collective.

    Args:
        share: this rank's share; nothing is allocated yet.
        side: the origin of its values.
        ranks: the ranks of the call.
        rebuild: whether any rank has non-persistent buffers on meta.

    Raises:
        AnyrankError: an error of any rank, on every rank.
    """
    with closing(side):
        ranks.run(side.preparing, lambda: side.prepare(share))
        side.compare()

        def move() -> None:
            side.move()
            # Raw copies bypass autograd: backward of a graph that saved these tensors must fail.
            filled = (target.tensor for target in share.filled() if not target.is_meta)
            increment_version([tensor for tensor in filled if not tensor.is_inference()])
            share.initialize()

        with _with_consequence(side.damage_note()):
            ranks.run(side.moving, move)
            side.check()
        rebuilt: dict[str, str] = {}
        replacements: list[Replacement] = []
        if rebuild:
            rebuilt, replacements = rebuilt_values(
                share.match.tensors, ranks, share.initializer, share.device
            )
        side.finish()

        def commit() -> tuple[OwnCodeRun, _Placed]:
            renewed = share.commit(replacements)
            ran = share.match.own_code.hand_over(share.filled())
            bit = 1 << ranks.index
            columns = [{value: bit} for value in (*side.moved(), *share.meter.peaks())]
            rules = {} if side.is_one_model else share.rules
            return ran, _Placed(columns, share.meter.seconds(), rules, renewed)

        with _with_consequence(PLACED):
            what = "putting the weights in place"
            ran, placed = ranks.run_and_reduce(what, commit, _Placed.join)
    return FillResult(
        rules=share.rules if side.is_one_model else placed.rules,
        rebuilt=rebuilt,
        renewed=sorted({*placed.renewed}),
        own_code=ran,
        measured=[Measured(Moved(*row[:-2]), *row[-2:]) for row in placed.rows(ranks.size)],
        seconds=placed.seconds,
    )


@contextmanager
def _with_consequence(left: str) -> Generator[None]:
    """Add to the message of an error in which state it leaves the model."""
    try:
        yield
    except AnyrankError as error:
        if not left:
            raise
        raise type(error)(f"{error}\n  {left}", causes=error.causes) from error
