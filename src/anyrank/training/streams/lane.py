"""A lane: the reader of some shards, which yields blocks, each the samples of one microbatch.

A lane reads its shards one after the other and feeds the rows to its transform; the samples of the
transform are divided into blocks. The blocks of a lane depend only on data, seed and K:

1. A block takes samples until it is full, a transform cuts it, or the shards end. The lane then
   reads a few blocks ahead, so that it knows near its end how many blocks are left.
2. Rows are read in pieces, each under its own random generators, and with `window=` in its own
   order. So a piece can be read again, anywhere.
3. The state of a lane is the position of the piece that made its last samples, and how many of them
   were returned; with a transform, also which rows before that piece it still needs. Any process
   that continues with the lane reads these again. No row is part of a state.

Pure Python: no torch, no ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from anyrank.errors import CheckpointError
from anyrank.training.streams.digests import digest_of_row
from anyrank.training.streams.lane_transform import CUT, LaneTransform

Shard = tuple[int, int]  # pass over the shards of its source, and number of the shard


class Counts(NamedTuple):
    """What a source has read and returned: see `LaneState`."""

    blocks: int = 0
    rows: int = 0
    units_fed: int = 0
    units_given: int = 0
    dropped: int = 0

    @staticmethod
    def total(counts: Iterable[Counts]) -> Counts:
        """Add counts."""
        return Counts(*map(sum, zip(*counts, strict=True)))


class LaneState(NamedTuple):
    """The position where a lane continues, and its counts since it was dealt, as JSON values.

    Attributes:
        passed, row: shards before the piece that made the last samples, and the piece's first row.
        length: rows of that piece; 0 for the end of the lane, -1 before anything is read.
        num_given: number of its samples that were returned.
        first_passed, first_row: the oldest row that the transform needs; without one, the piece.
        needed: bits of the rows from there to the piece, as hex digits.
        inner: the transform's own state before the piece, as JSON; empty without one.
        digest: digest of the piece's first row, as hex digits; empty before it was read.
        blocks, rows: numbers of blocks returned, and of rows read.
        units_fed, units_given: the transform's units (tokens), in rows and in samples.
        dropped: number of rows that the transform reports as dropped.
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
    blocks: int = 0
    rows: int = 0
    units_fed: int = 0
    units_given: int = 0
    dropped: int = 0

    @property
    def counts(self) -> Counts:
        """Its counts."""
        return Counts(self.blocks, self.rows, self.units_fed, self.units_given, self.dropped)

    @staticmethod
    def from_json(row: Sequence[Any]) -> LaneState:
        """Read a state from a list; raise ValueError or TypeError for anything else."""
        kinds = map(type, LaneState())
        state = LaneState._make(kind(value) for kind, value in zip(kinds, row, strict=True))
        int(state.needed or "0", 16)
        if not 0 <= state.first_passed <= state.passed:
            raise ValueError(f"a lane at {state.first_passed} of {state.passed} shards")
        return state


class Source(Protocol):
    """The interface by which shards are read.

    Attributes:
        piece: number of rows that are read at a time.
        has_start: whether a shard can be opened at a row without reading the rows before it.
    """

    piece: int
    has_start: bool

    def open(self, pass_id: int, shard: int, row: int) -> Iterator[Any]:
        """Open the rows of a shard from one on, which starts a piece."""
        ...

    def read_piece(self, rows: Iterator[Any], pass_id: int, shard: int, row: int) -> list[Any]:
        """Read the next piece, under its generators and in its order; fewer rows at the end."""
        ...

    def seed_transform(self, *numbers: int) -> None:
        """Set the generators from which a transform may draw, by numbers that identify a row."""
        ...

    def numbers(self, pass_id: int, shard: int, row: int, count: int) -> Sequence[int]:
        """Return the rows of a piece, by their numbers in the shard, in the piece's order."""
        ...

    def name(self, shard: int) -> str:
        """Return the user's name for a shard."""
        ...


class Lane:
    """The reader of a lane, in the process that runs it.

    Args:
        source: source of the rows.
        number: number of the lane.
        pass_id: pass over the source's shards, for its seeds.
        transform: a fresh transform, or None.
        shard_at: returns the lane's shards, by their places in it; None after the last.
        state: where it continues.
        size: most samples in a block.
        num_shards: number of its shards if it repeats them, until they make no sample.

    Attributes:
        state: state after the blocks that were taken.
        blocks_left: number of blocks that it still has, if fewer than it looked for; None: unknown.
        changes: pieces that were read again and had a different first row: shard, start, stop.
    """

    def __init__(
        self,
        source: Source,
        number: int,
        pass_id: int,
        transform: Any,
        shard_at: Callable[[int], Shard | None],
        state: LaneState,
        size: int,
        num_shards: int | None = None,
    ) -> None:
        self.source, self.number, self.pass_id = source, number, pass_id
        self.transform = None if transform is None else LaneTransform(transform)
        self.shard_at, self.state = shard_at, state
        self.num_shards, self._size = num_shards, size
        self.blocks_left: int | None = None
        self.changes: list[tuple[int, int, int]] = []
        self._passed, self._row = state.passed, state.row  # position of the next piece
        self._rows: Iterator[Any] | None = None  # the rest of the shard
        # Blocks to return: the samples, the state of the piece that made the last of them, and the
        # number of its samples up to there. The samples of the block after them, and its last one.
        self._blocks: deque[tuple[list[Any], LaneState, int]] = deque()
        self._samples: list[Any] = []
        self._last = state, 0
        self._newest, self._num_newest = state, 0  # state and samples of the last piece
        self._is_new, self._is_over = True, False
        # First shard read in full since the last sample, and number of rows held at that point.
        self._barren_from, self._num_held = state.passed + (state.length >= 0), 0
        # The rows that may be fed again: their numbers, from the oldest on, and positions.
        self._fed: deque[tuple[int, int, int]] = deque()
        self._num_fed, self._num_forgotten = 0, 0

    @property
    def has_ended(self) -> bool:
        """True if it has no further block."""
        return self.blocks_left == 0

    def take(self, look: int = 0) -> list[Any]:
        """Return the samples of the next block; none if the lane has ended.

        Args:
            look: number of blocks to look for after it.

        Raises:
            CheckpointError: a shard has different rows than before.
            Exception: reading or the transform failed; it gets a note.
        """
        while not self._blocks and self._advance():
            pass
        samples, piece, num_given = self._blocks.popleft() if self._blocks else ([], self.state, 0)
        units = 0 if self.transform is None else self.transform.units_in(samples)
        blocks, units_given = self.state.blocks + bool(samples), self.state.units_given + units
        while (left := len(self._blocks) + bool(self._samples)) < look and self._advance():
            pass
        self.blocks_left = left if self._is_over and left < max(1, look) else None
        if self.has_ended:  # including rows that were read since without a sample
            piece, num_given = self._newest, self._num_newest
        self.state = piece._replace(num_given=num_given, blocks=blocks, units_given=units_given)
        return samples

    def close(self) -> None:
        """Close the shard, for a source with `has_start`: it is opened again at its next row."""
        self._rows = None

    @property
    def progress(self) -> str:
        """Describe its position in its shards, for an error."""
        shard = self.shard_at(self.state.passed)
        if shard is None:
            return "the end of the shards"
        return f"shard {self.source.name(shard[1])}, rows from {self.state.row} on"

    # -- samples ----------------------------------------------------------------------------------

    def _divide(self, samples: Sequence[Any], piece: LaneState, start: int) -> None:
        """Divide the samples of a piece into blocks, from one on."""
        for number, sample in enumerate(samples[start:], start + 1):
            if sample is not CUT:
                self._samples.append(sample)
                self._last = piece, number
            if self._samples and (sample is CUT or len(self._samples) == self._size):
                self._close_block()

    def _close_block(self) -> None:
        piece, number = self._last
        self._blocks.append((self._samples, piece, number))
        self._samples = []

    # -- rows -------------------------------------------------------------------------------------

    def _advance(self) -> bool:
        """Read and feed the next piece, or end the transform; return whether that was possible."""
        if self._is_over:
            return False
        # A lane that continues first reads the piece of its state, whose rows are counted already.
        is_reread = self._is_new and self.state.length >= 0
        if self._is_new:
            self._feed_again()
            self._is_new = False
        passed, row, rows = self._next_piece()
        if is_reread and (passed, row, len(rows)) != self.state[:3]:
            raise self._changed(self.state.passed)
        before, transform = self._newest, self.transform
        digest = digest_of_row(rows[0]) if rows else ""
        if is_reread:
            if rows and digest != before.digest:
                self.changes.append((self._shard(passed)[1], row, row + len(rows)))
            samples = self._feed(passed, row, rows)
            if before.num_given > len(samples):
                raise self._changed(passed)
            piece = before._replace(digest=digest)
        else:
            needs = self._needs_before(passed, row)
            fed, dropped = (0, 0) if transform is None else transform.counts
            samples = self._feed(passed, row, rows)
            if transform is not None:
                fed, dropped = transform.counts[0] - fed, transform.counts[1] - dropped
            piece = LaneState(
                passed,
                row,
                len(rows),
                0,
                *needs,
                digest,
                rows=before.rows + len(rows),
                units_fed=before.units_fed + fed,
                dropped=before.dropped + dropped,
            )
        self._divide(samples, piece, piece.num_given)
        self._newest, self._num_newest = piece, len(samples)
        if any(sample is not CUT for sample in samples):
            self._barren_from, self._num_held = passed + 1, 0
        if self._is_over and self._samples:
            self._close_block()
        return True

    def _feed(self, passed: int, row: int, rows: list[Any]) -> list[Any]:
        """Return the samples of a piece, or of the lane's end."""
        self._is_over = not rows
        if self.transform is None:
            return rows
        if not rows:
            return self._end(self.transform)
        samples: list[Any] = []
        for index, value in enumerate(rows):
            self._fed.append((self._num_fed, passed, row + index))
            self._num_fed += 1
            samples += self._feed_row(value, passed, row, index, len(rows))
        return samples

    def _feed_again(self) -> None:
        """Feed the rows before the state's piece that the transform needs."""
        state = self.state
        if self.transform is not None:
            self.transform.load_state(state.inner)
        if not state.needed:
            return
        needed, size = int(state.needed, 16), self.source.piece
        self._passed, self._row = state.first_passed, state.first_row // size * size
        number = self._row - state.first_row
        stop = state.passed, state.row
        while (self._passed, self._row) < stop:
            passed, row, rows = self._next_piece(stop)
            for index, value in enumerate(rows):
                if number >= 0 and needed >> number & 1:
                    self._fed.append((number, passed, row + index))
                    if self._feed_row(value, passed, row, index, len(rows)):
                        raise self._changed(passed)
                number += 1
        if (self._passed, self._row) != stop:
            raise self._changed(state.first_passed)
        self._num_fed = number

    def _next_piece(self, stop: tuple[int, int] | None = None) -> tuple[int, int, list[Any]]:
        """Read the next piece with rows; return its position and rows, none after the last shard.

        Args:
            stop: position that ends the search, for rows that were read before.
        """
        while (shard := self._next_shard(stop)) is not None:
            passed, row = self._passed, self._row
            try:
                if self._rows is None:
                    self._rows = self.source.open(*shard, row)
                rows = self.source.read_piece(self._rows, *shard, row)
            except Exception as error:
                error.add_note(
                    f"raised by read, shard {self.source.name(shard[1])}, rows from {row} on, "
                    f"epoch {epoch_of(shard[0])}, lane {self.number}"
                )
                raise
            if len(rows) == self.source.piece:
                self._row += len(rows)
            else:
                self._passed, self._row, self._rows = passed + 1, 0, None
            if rows:
                return passed, row, rows
        return self._passed, self._row, []

    def _next_shard(self, stop: tuple[int, int] | None) -> Shard | None:
        """Return the shard to read next, or None; see `_next_piece`."""
        if stop is not None:
            return self.shard_at(self._passed) if (self._passed, self._row) < stop else None
        is_end = self.state.length == 0  # found earlier
        if self.num_shards is not None and (is_end or self._is_barren(self.num_shards)):
            return None
        return self.shard_at(self._passed)

    def _is_barren(self, num_shards: int) -> bool:
        """Return True if all shards were read without a sample, and without holding more rows."""
        if self._passed - self._barren_from < num_shards:
            return False
        held_rows = () if self.transform is None else self.transform.held_rows()
        before, self._num_held = self._num_held, len(held_rows)
        self._barren_from = self._passed
        return self._num_held <= before

    def _shard(self, passed: int) -> Shard:
        shard = self.shard_at(passed)
        assert shard is not None
        return shard

    def _changed(self, passed: int) -> CheckpointError:
        shard = self.shard_at(passed) or self._shard(passed - 1)
        return CheckpointError(
            f"shard {self.source.name(shard[1])}, lane {self.number}: the rows, or what the "
            "transform makes of them, differ from the first read. Restore both, or start a new "
            "run from the weights."
        )

    def _feed_row(self, value: Any, passed: int, row: int, index: int, count: int) -> list[Any]:
        """Feed one of the `count` rows of a piece; return the transform's samples."""
        transform, (pass_id, shard) = self.transform, self._shard(passed)
        assert transform is not None
        if transform.has_held and transform.draws:
            self.source.seed_transform(pass_id, shard, row + index)
        try:
            return transform.feed(value, self._num_forgotten + len(self._fed) - 1, self._fed[-1][0])
        except Exception as error:
            number = self.source.numbers(pass_id, shard, row, count)[index]
            error.add_note(
                f"raised by {transform.name}.feed, shard {self.source.name(shard)}, row {number}, "
                f"epoch {epoch_of(pass_id)}, lane {self.number}"
            )
            raise

    def _end(self, transform: LaneTransform) -> list[Any]:
        """End the transform; return its remaining samples."""
        if transform.draws:
            self.source.seed_transform(self.pass_id, -1, self.number)
        try:
            return transform.end()
        except Exception as error:
            error.add_note(f"raised by {transform.name}.end, lane {self.number}")
            raise

    # -- state ------------------------------------------------------------------------------------

    def _needs_before(self, passed: int, row: int) -> tuple[int, int, str, str]:
        """Return what a state needs to feed a piece, or to end: first_passed to inner."""
        transform = self.transform
        if transform is None:
            return passed, row, "", ""
        held_rows = sorted(transform.held_rows())
        numbers = [number - self._num_forgotten for number in held_rows]
        if numbers and not 0 <= numbers[0] <= numbers[-1] < len(self._fed):
            raise ValueError(
                f"{transform.name}.held() returned {held_rows}: must be numbers of rows that were "
                f"fed and held since, from 0 to {self._num_forgotten + len(self._fed) - 1}. Number "
                "rows from 0 in each new object, also after load_state_dict()."
            )
        needless = numbers[0] if numbers else len(self._fed)
        for _ in range(needless):
            self._fed.popleft()
        self._num_forgotten += needless
        if not self._fed:
            return passed, row, "", transform.state()
        first, first_passed, first_row = self._fed[0]
        bits = sum(1 << self._fed[number - needless][0] - first for number in numbers)
        return first_passed, first_row, f"{bits:x}", transform.state()


def epoch_of(pass_id: int) -> int:
    """Return the epoch of a pass over the shards, for an error."""
    return pass_id & 0xFFFFFFFF
