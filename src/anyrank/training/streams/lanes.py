"""A lane: the reader of one of a step's K microbatches, which belongs to no rank.

A lane reads its shards in turn, block by block, and feeds the rows to its transform. What it gives
is cut into microbatches. It looks one output further, so that it can say whether the next step has
a microbatch of it. What a lane gives depends on data, seed and its shards alone:

1. Shards are only ever appended. A microbatch takes outputs until it is full, or the shards are
   used up and no others are to come before its step; then it is short.
2. A block is some neighbouring rows of a shard, read at once, under random streams of its own, and
   with `window=` in an order of its own. So a block can be read again, anywhere.
3. The state of a lane is the place of the block that gave its last outputs, and how many of them
   were given; with a transform, also which rows before that block it still needs. Whoever goes on
   with the lane, in whichever process, reads these again. No row is part of a state.

Pure Python: no torch, no ranks.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol, cast

from anyrank.errors import CheckpointError
from anyrank.training.streams.digests import digest_of, sizes_in

Shard = tuple[int, int]  # the epoch for which it is read, and its number
Rows = tuple[int, int, int, int]  # epoch, shard, start, stop
READY, OUT, DONE = range(3)  # has an output for the next step; needs shards; has given all
STATE_BYTES = 1024  # of a transform's state, as JSON


class Cut:
    """The type of `anyrank.CUT`: the end of a microbatch, among the outputs of a transform."""

    def __repr__(self) -> str:
        return "CUT"

    def __reduce__(self) -> str:
        return "CUT"


CUT: Final = Cut()
"""Among the samples that a stream's transform gives: the microbatch ends here."""


class Transform(Protocol):
    """What makes outputs of rows: the samples of microbatches, and CUT where one ends.

    `state_dict()` and `load_state_dict()` are for what it knows beside rows. `held()` gives the
    rows that it still needs, as numbers in the order in which they were fed to this object.
    """

    def feed(self, row: Any, /) -> Iterable[Any]:
        """The outputs that are complete with a row."""
        ...

    def end(self) -> Iterable[Any]:
        """The outputs of what is left when the lane's rows are over."""
        ...


class LaneState(NamedTuple):
    """Where a lane goes on, as values of JSON.

    Attributes:
        passed, row: shards before the block that gave the last outputs, and the block's first row.
        length: rows of that block; -1 before it is read.
        digest: of its first row, as hex digits; empty before.
        num_given: its outputs that were given.
        first_passed, first_row: the oldest row that the transform needs; without one, the block.
        needed: bits of the rows from there to the block, as hex digits.
        inner: the transform's own state before the block, as JSON; empty without one.
    """

    passed: int = 0
    row: int = 0
    length: int = -1
    num_given: int = 0
    first_passed: int = 0
    first_row: int = 0
    needed: str = ""
    inner: str = ""
    digest: str = ""


class Report(NamedTuple):
    """What the ranks tell each other of a lane, with each of its microbatches.

    Attributes:
        lane: its number.
        num_outputs: outputs in the microbatch.
        status: READY, OUT or DONE.
        begun: shards that the lane has begun in the epoch.
        rows: (epoch, shard, start, stop) of the rows that it has read for the first time.
        ends: (epoch, shard, rows) of the shards that it has read to the end.
        units: of the transform's units (tokens), those in the rows and those in the outputs.
        changed: of the rows that were read again, those of a block whose first row was another one.
        state: where it goes on.
    """

    lane: int
    num_outputs: int
    status: int
    begun: int
    rows: list[Rows]
    ends: list[tuple[int, int, int]]
    units: tuple[int, int]
    changed: list[Rows]
    state: LaneState


class Source(Protocol):
    """How shards are read.

    Attributes:
        block: rows that are read at once.
    """

    block: int

    def open(self, epoch: int, shard: int, row: int) -> Iterator[Any]:
        """The rows of a shard from one on, which begins a block."""
        ...

    def read(self, rows: Iterator[Any], epoch: int, shard: int, row: int) -> list[Any]:
        """The next block, under its random streams and in its order; fewer rows at the end."""
        ...

    def seed_transform(self, transform: Any, *numbers: int) -> None:
        """Set the random streams for what a transform may draw, by numbers that tell a row."""
        ...

    def numbers(self, epoch: int, shard: int, row: int, count: int) -> Sequence[int]:
        """The rows of a block, by their numbers in the shard, in the block's order."""
        ...

    def name(self, shard: int) -> str:
        """What the user calls it."""
        ...


class Lane:
    """The reader of a lane, in the process that runs it.

    Args:
        source: of the rows.
        number: of the lane.
        transform: a fresh one, or None.
        first: shards of the lane before those that are given.
        shards: its next ones.
        state: where it goes on.
        epoch: in which the lane ends, where epochs do not flow into each other.

    Attributes:
        shards: more are appended as they are dealt.
    """

    def __init__(
        self,
        source: Source,
        number: int,
        transform: Any,
        first: int,
        shards: Sequence[Shard],
        state: LaneState,
        epoch: int,
    ) -> None:
        self.source, self.number, self.epoch = source, number, epoch
        self.transform, self.first, self.shards = transform, first, list(shards)
        self._state = state
        self._passed, self._row = state.passed, state.row  # of the next block
        self._begun = state.passed
        self._rows: Iterator[Any] | None = None  # the rest of the shard
        self._outputs: list[Any] = []
        self._num_earlier = 0  # outputs of blocks before the last
        self._num_cuts = 0
        self._is_at_state = True  # nothing was read since
        self._was_fed_again = self._is_over = False
        # The rows that may be fed again: their numbers, from the oldest on, and places.
        self._fed: deque[tuple[int, int, int]] = deque()
        self._num_fed, self._num_forgotten = 0, 0
        self._new_rows: list[Rows] = []
        self._ends: list[tuple[int, int, int]] = []
        self._changed_rows: list[Rows] = []
        self._has_units = hasattr(transform, "_units_fed")
        self._is_fed_alone = hasattr(transform, "held")  # else a block is fed as a whole
        self._is_numbered = hasattr(transform, "_come_to")
        self._sizes = sizes_in(transform)
        self._units = 0

    def take(self, size: int, is_due: bool, is_last_deal: bool) -> tuple[list[Any], Report] | None:
        """The next microbatch; None while shards may come that belong into it.

        Args:
            size: outputs in it, at most; 0 only looks for one.
            is_due: all shards are there that were dealt before its step.
            is_last_deal: no shard is left to be dealt.

        Raises:
            CheckpointError: a shard has other rows than before.
            Exception: what reading and the transform raise, with a note.
        """
        while True:
            self._drop_cuts()
            stop = self._find_stop(size)
            if stop is not None and self._has_output(stop):
                break
            if self._advance(is_last_deal):
                continue
            if not (is_due or self._is_over):
                return None
            break
        count = len(self._outputs) if stop is None else stop
        outputs = self._outputs[:count]
        self._give(count)
        self._drop_cuts()
        if not self._outputs and not self._is_over and self._was_fed_again:
            self._note_state(self._passed, self._row)
            self._is_at_state = False
        status = READY if self._outputs else DONE if self._is_over else OUT
        units = sum(map(self.transform._units_of_output, outputs)) if self._has_units else 0
        report = Report(
            self.number,
            count,
            status,
            max(self._begun, self._state.passed),
            self._new_rows,
            self._ends,
            (self._units, units),
            self._changed_rows,
            self._state,
        )
        self._new_rows, self._ends, self._changed_rows, self._units = [], [], [], 0
        return outputs, report

    @property
    def progress(self) -> str:
        """Where in its shards it has read up to, for an error."""
        state = self._state
        if not self.shards:
            return "the end of the shards"
        index = min(state.passed - self.first, len(self.shards) - 1)
        return f"shard {self.source.name(self.shards[index][1])}, rows from {state.row} on"

    # -- outputs ----------------------------------------------------------------------------------

    def _find_stop(self, size: int) -> int | None:
        """Where the microbatch ends; None if its last output is not there yet."""
        if self._num_cuts:
            for index, output in enumerate(islice(self._outputs, size)):
                if output is CUT:
                    return index
        return size if len(self._outputs) >= size else None

    def _has_output(self, index: int) -> bool:
        """Whether there is an output from an index on, for a microbatch that follows."""
        if not self._num_cuts:
            return len(self._outputs) > index
        return any(output is not CUT for output in islice(self._outputs, index, None))

    def _drop_cuts(self) -> None:
        """A microbatch begins: it cannot end before its first output."""
        while self._num_cuts and self._outputs and self._outputs[0] is CUT:
            self._give(1)

    def _give(self, count: int) -> None:
        """Remove the first outputs, and count those of the last block."""
        if self._num_cuts:
            self._num_cuts -= sum(output is CUT for output in islice(self._outputs, count))
        del self._outputs[:count]
        if count > self._num_earlier:
            num_given = self._state.num_given + count - self._num_earlier
            self._state = self._state._replace(num_given=num_given)
        self._num_earlier = max(0, self._num_earlier - count)

    # -- rows -------------------------------------------------------------------------------------

    def _advance(self, is_last_deal: bool) -> bool:
        """Read and feed the next block, or end the transform; whether there was something to do."""
        if self._is_over:
            return False
        self._feed_again()
        before, is_at_state = self._state, self._is_at_state
        block = self._next_block()
        is_read_again = is_at_state and before.length >= 0
        if is_read_again and (block is None or (*block[:2], len(block[2])) != before[:3]):
            raise self._changed(before.passed)
        if block is None and not is_last_deal:
            return False
        if block is not None and is_at_state and before.num_given and not is_read_again:
            raise self._changed(block[0])  # it was over, and outputs of its end were given
        if not is_read_again:
            self._note_state(*((self._passed, self._row) if block is None else block[:2]))
        num_given = before.num_given if is_at_state else 0
        self._state = self._state._replace(num_given=0)
        self._is_at_state, self._num_earlier = False, len(self._outputs)
        if block is None:
            self._is_over = True
            outputs = [] if self.transform is None else self._end()
        else:
            passed, row, rows = block
            digest = digest_of(rows[0])
            if is_read_again and digest != before.digest:
                shard = self.shards[passed - self.first]
                self._changed_rows.append((*shard, row, row + len(rows)))
            self._state = self._state._replace(length=len(rows), digest=digest)
            outputs = self._feed(*block, is_read_again)
        if self.transform is not None:
            self._num_cuts += sum(output is CUT for output in outputs)
        self._outputs += outputs
        self._give(num_given)
        return True

    def _feed(self, passed: int, row: int, rows: list[Any], is_read_again: bool) -> list[Any]:
        """The outputs of a block."""
        if not is_read_again:
            self._new_rows.append((*self.shards[passed - self.first], row, row + len(rows)))
        if self.transform is None:
            return rows
        outputs: list[Any] = []
        units = self.transform._units_fed if self._has_units else 0
        for index, value in enumerate(rows):
            self._fed.append((self._num_fed, passed, row + index))
            self._num_fed += 1
            outputs += self._feed_row(value, passed, row, index, len(rows))
        if self._has_units and not is_read_again:
            self._units += self.transform._units_fed - units
        return outputs

    def _feed_again(self) -> None:
        """Feed the rows before the state's block that the transform needs, once."""
        if self._was_fed_again:
            return
        self._was_fed_again, state = True, self._state
        if state.inner:
            self.transform.load_state_dict(json.loads(state.inner))
        if not state.needed:
            return
        needed, size = int(state.needed, 16), self.source.block
        self._passed, self._row = state.first_passed, state.first_row // size * size
        number = self._row - state.first_row
        stop = state.passed, state.row
        while block := self._next_block(stop):
            passed, row, rows = block
            for index, value in enumerate(rows):
                if number >= 0 and needed >> number & 1:
                    self._fed.append((number, passed, row + index))
                    if self._feed_row(value, passed, row, index, len(rows)):
                        raise self._changed(passed)
                number += 1
        if (self._passed, self._row) != stop:
            raise self._changed(state.first_passed)
        self._num_fed = number

    def _next_block(self, stop: tuple[int, int] | None = None) -> tuple[int, int, list[Any]] | None:
        """The place and rows of the next block that has any; None at the end of the shards.

        Args:
            stop: a place that ends the search, for rows that were read before.
        """
        is_known = stop is not None or (self._is_at_state and self._state.length >= 0)
        while self._passed - self.first < len(self.shards):
            if stop is not None and (self._passed, self._row) >= stop:
                break
            passed, row = self._passed, self._row
            epoch, shard = self.shards[passed - self.first]
            try:
                if self._rows is None:
                    self._begun = max(self._begun, passed + 1)
                    self._rows = self.source.open(epoch, shard, row)
                rows = self.source.read(self._rows, epoch, shard, row)
            except Exception as error:
                error.add_note(
                    f"raised by read, shard {self.source.name(shard)}, rows from {row} on, epoch "
                    f"{epoch}, lane {self.number}"
                )
                raise
            if len(rows) == self.source.block:
                self._row += len(rows)
            else:
                if not is_known:
                    self._ends.append((epoch, shard, row + len(rows)))
                self._passed, self._row, self._rows = passed + 1, 0, None
            if rows:
                return passed, row, rows
        return None

    def _changed(self, passed: int) -> CheckpointError:
        name = self.source.name(self.shards[passed - self.first][1])
        return CheckpointError(
            f"shard {name}, lane {self.number}: its rows have changed since it was read before, or "
            "the transform makes something else of them: put back the old rows and transform, or "
            "start a new run from the weights"
        )

    def _feed_row(self, value: Any, passed: int, row: int, index: int, count: int) -> list[Any]:
        """The transform's outputs of one of the `count` rows of a block."""
        epoch, shard = self.shards[passed - self.first]
        if self._is_fed_alone:
            self.source.seed_transform(self.transform, epoch, shard, row + index)
        try:
            if self._is_numbered:
                number = self._num_forgotten + len(self._fed) - 1
                self.transform._come_to(number, self._fed[-1][0])
            return _as_list(self.transform.feed(value))
        except Exception as error:
            number = self.source.numbers(epoch, shard, row, count)[index]
            error.add_note(
                f"raised by {type(self.transform).__name__}.feed, shard {self.source.name(shard)}, "
                f"row {number}, epoch {epoch}, lane {self.number}"
            )
            raise

    def _end(self) -> list[Any]:
        """The transform's outputs of what is left."""
        self.source.seed_transform(self.transform, self.epoch, -1, self.number)
        try:
            return _as_list(self.transform.end())
        except Exception as error:
            error.add_note(f"raised by {type(self.transform).__name__}.end, lane {self.number}")
            raise

    # -- state ------------------------------------------------------------------------------------

    def _note_state(self, passed: int, row: int) -> None:
        """Take the state before a block is fed, or before what follows if there is none."""
        if self.transform is None:
            self._state = LaneState(passed, row, -1, 0, passed, row)
            return
        self._check_kept()
        get_held = getattr(self.transform, "held", None)
        numbers = sorted(n - self._num_forgotten for n in get_held()) if get_held else []
        if numbers and not 0 <= numbers[0] <= numbers[-1] < len(self._fed):
            raise ValueError(
                f"{type(self.transform).__name__}.held() gives {get_held and sorted(get_held())}: "
                f"give numbers of rows that were fed, from 0 to "
                f"{self._num_forgotten + len(self._fed) - 1}, that it has held since"
            )
        needless = numbers[0] if numbers else len(self._fed)
        for _ in range(needless):
            self._fed.popleft()
        self._num_forgotten += needless
        first, first_passed, first_row = self._fed[0] if self._fed else (0, passed, row)
        bits = sum(1 << self._fed[number - needless][0] - first for number in numbers)
        needed, inner = f"{bits:x}" if bits else "", self._inner_state()
        self._state = LaneState(passed, row, -1, 0, first_passed, first_row, needed, inner)

    def _check_kept(self) -> None:
        """Refuse a transform that keeps something without a way to find it again.

        Raises:
            TypeError: it has neither `held` nor `state_dict`, and more in it than a fresh one.
        """
        if hasattr(self.transform, "held") or hasattr(self.transform, "state_dict"):
            return
        sizes = sizes_in(self.transform)
        if grown := [name for name, size in sizes.items() if size > self._sizes.get(name, 0)]:
            raise TypeError(
                f"{type(self.transform).__name__} keeps something in {', '.join(grown)}, which a "
                "resume, and a rank that goes on with the lane, would not have: let held() return "
                "the numbers of the rows that it still needs, which are fed again, or state_dict() "
                "what it knows; if it is a cache, let held() return []"
            )

    def _inner_state(self) -> str:
        """The transform's own state as JSON; empty without one.

        Raises:
            TypeError: it is no JSON, or too large.
        """
        get_state = getattr(self.transform, "state_dict", None)
        state = None if get_state is None else get_state()
        if state is None:
            return ""
        name = type(self.transform).__name__
        way_out = (
            "leave rows out of state_dict(), and give their numbers by held(): they are read and "
            "fed again after a resume"
        )
        try:
            text = json.dumps(state)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{name}.state_dict(): not values of JSON ({error}): {way_out}"
            ) from error
        if len(text) > STATE_BYTES:
            raise TypeError(
                f"{name}.state_dict(): {len(text)} bytes, and a lane's may have {STATE_BYTES}, as "
                f"the ranks tell it each other in each step: {way_out}"
            )
        return text


def _as_list(outputs: Any) -> list[Any]:
    if not isinstance(outputs, Iterable):
        raise TypeError(f"gave a {type(outputs).__name__}: let it return a list of samples")
    return list(cast("Iterable[Any]", outputs))
