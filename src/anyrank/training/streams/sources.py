"""The shards of a source, and the sources of a loader, which lanes read. Also used in workers."""

from __future__ import annotations

import inspect
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, cast

from torch.utils.data import get_worker_info

from anyrank.checks import check_function, check_int, check_type
from anyrank.errors import CheckpointError
from anyrank.tensors.hashing import derive
from anyrank.training.data.fetch import OwnOrder
from anyrank.training.data.order import Order
from anyrank.training.random_state.generators import reseed
from anyrank.training.streams.deal import Constants, Until
from anyrank.training.streams.transforms import Buckets, resize

LANES_NAME = "lanes-v4"
DIGESTS = 16  # parts of a list of shards, to find where two lists differ
LONGEST = 100  # characters of a transform's setting to show
PIECE = 2  # microbatches of rows that are read at a time: seeding costs 10 us each time


@dataclass(frozen=True)
class StreamOrder(Order):
    """The order of the shards; the order of the rows follows from what the lanes read.

    Attributes:
        described: text on window and transform, which also determine the steps.
        digest: digest of the shards.
    """

    described: str
    digest: str

    @property
    def name(self) -> str:
        return f"{LANES_NAME} {super().name}{self.described}"

    def arguments(self) -> dict[str, object]:
        return super().arguments() | {
            "dataset": f"{self.n} shards",
            "transform": self.described,
            "shards": f"{self.n}, digest {self.digest}",
        }


class Streams(OwnOrder):
    """The sources of a loader: one, or those of a mixture.

    Args:
        sources: sources by name.
        endless: whether none of them ends.
        mix: weight of each source; None for one source.
        until: whether an epoch ends with the first source that ends, or with the last one.
    """

    def __init__(
        self,
        sources: Mapping[str, Stream],
        *,
        endless: bool = False,
        mix: Mapping[str, float] | None = None,
        until: Until = "first",
    ) -> None:
        self.names, self.sources = [*sources], [*sources.values()]
        self.endless, self.mix = endless, mix
        self.until: Until = until
        self.microbatch = 1

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def order(self, seed: int, shuffle: bool, global_batch: int, microbatch: int) -> StreamOrder:
        """Return the order of the shards."""
        self.microbatch = microbatch
        for name, source in zip(self.names, self.sources, strict=True):
            source.begin(
                derive(seed, name) if self.mix else seed, shuffle, global_batch, microbatch
            )
        described = self.sources[0].described + ", endless" * self.endless
        if self.mix:
            described += f", mix of {', '.join(self.names)}, until {self.until}"
        digests = [digest for source in self.sources for digest in source.digests(len(source))]
        digests += [source.fingerprint for source in self.sources]
        return StreamOrder(len(self), seed, shuffle, described, f"{derive(*digests, size=4):08x}")

    def constants(self, seed: int, num_microbatches: int) -> Constants:
        """Return the values on which deals depend."""
        weights = [1.0] if self.mix is None else [float(self.mix[name]) for name in self.names]
        return Constants(num_microbatches, seed, tuple(weights), self.until, self.endless)

    @property
    def notes(self) -> list[str]:
        """Notes for the user on how the sources are read."""
        return [source.note for source in self.sources if source.note]

    def name_of(self, source: int, shard: int) -> str:
        """Return the user's name for a shard."""
        name = self.sources[source].name(shard)
        return f"{name} of {self.names[source]!r}" if self.mix else name


class Stream:
    """The shards of one source.

    Args:
        shards: arguments of `read`.
        read: returns the rows of a shard; with `start=`, those from one on.
        transform: transform of the loader.
        window: number of rows in the shuffle buffer, or None.
        num_rows: number of rows of an epoch, if it is known without reading.

    Attributes:
        piece, has_start: see `lane.Source`.
        note: note for the user on how it is read.
        fingerprint: text that must be the same on every rank, besides the names of the shards.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        read: Callable[..., Iterable[Any]],
        transform: Any,
        window: int | None,
        num_rows: int | None = None,
    ) -> None:
        check_type(
            "shards", shards, list if isinstance(shards, str) else Sequence, "a list of shards"
        )
        check_function("read", read)
        _check_transform(transform)
        if window is not None:
            check_int("window", window, 1)
        if not len(shards):  # of any sequence, such as an array
            raise ValueError("shards= is empty, so there is nothing to train on")
        self.shards, self.read, self.transform = shards, read, transform
        self.window, self.piece, self.seed, self.shuffle = window, window or 1, 0, True
        self.num_rows = num_rows
        self.note = self.fingerprint = ""
        self.has_start = _takes_start(read)
        self._digests: dict[int, list[str]] = {}

    def __len__(self) -> int:
        return len(self.shards)

    @property
    def described(self) -> str:
        """Text on window and transform, a part of the order's name."""
        described = "" if self.window is None else f", window {self.window}"
        if self.transform is not None:
            described += f", {_describe_transform(self.transform)}"
        return described

    def begin(self, seed: int, shuffle: bool, global_batch: int, microbatch: int) -> None:
        """Take over the loader's settings."""
        self.seed, self.shuffle, self.piece = seed, shuffle, self.window or PIECE * microbatch
        if isinstance(self.transform, Buckets):
            self.transform = resize(self.transform, microbatch)

    def digests(self, count: int) -> list[str]:
        """Return digests of the first shards for comparison, in DIGESTS parts of neighbors."""
        if count not in self._digests:  # each save needs them
            bounds = [number * count // DIGESTS for number in range(DIGESTS + 1)]
            self._digests[count] = [
                f"{derive(*map(repr, self.shards[start:stop]), size=4):08x}"
                for start, stop in pairwise(bounds)
            ]
        return self._digests[count]

    def shard_at(self, pass_id: int, number: int, num_shards: int) -> int:
        """Return the shard at a position in the order of a pass."""
        return int(Order(num_shards, self.seed, self.shuffle).ids(pass_id, number, number + 1))

    # -- the interface for lanes ------------------------------------------------------------------

    def name(self, shard: int) -> str:
        """Return the user's name for a shard, and its number."""
        text = repr(self.shards[shard])
        return f"{text[:200]} (number {shard})"

    def open(self, pass_id: int, shard: int, row: int) -> Iterator[Any]:
        """Open the rows of a shard from one on, which starts a piece."""
        reseed(derive(self.seed, pass_id, shard, "open"))
        if row and self.has_start:
            rows = iter(self.read(self.shards[shard], start=row - 1))
            # Skip to the row now, so that draws on the way do not use the piece's generators. A
            # generator function starts here, with the draws that it makes before any row.
            reseed(derive(self.seed, pass_id, shard, 0, "rows"))
            next(rows, None)
            return rows
        rows = iter(self.read(self.shards[shard]))
        # Read as before: random numbers drawn for these rows may decide which rows follow.
        for first in range(0, row, self.piece):
            reseed(derive(self.seed, pass_id, shard, first, "rows"))
            last = deque(enumerate(islice(rows, self.piece), 1), maxlen=1)
            count = last[0][0] if last else 0
            if count < self.piece:
                raise CheckpointError(
                    f"shard {self.name(shard)} has {first + count} rows now, but had at least "
                    f"{row} before. A shard must have the same rows each time."
                )
        return rows

    def read_piece(self, rows: Iterator[Any], pass_id: int, shard: int, row: int) -> list[Any]:
        """Read the next piece, under its generators and in its order; fewer rows at the end."""
        reseed(derive(self.seed, pass_id, shard, row, "rows"))
        piece = list(islice(rows, self.piece))
        if self.window is None:
            return piece
        return [piece[number - row] for number in self.numbers(pass_id, shard, row, len(piece))]

    def seed_transform(self, *numbers: int) -> None:
        """Set the random generators from which a transform may draw."""
        reseed(derive(self.seed, *numbers, "transform"))

    def numbers(self, pass_id: int, shard: int, row: int, count: int) -> Sequence[int]:
        """Return the rows of a piece, by their numbers in the shard, in the piece's order."""
        if self.window is None:
            return range(row, row + count)
        numbers = [*range(row, row + count)]
        random.Random(derive(self.seed, pass_id, shard, row, "window")).shuffle(numbers)  # noqa: S311
        return numbers


def _check_transform(transform: Any) -> None:
    """Raise TypeError if the value is not a transform, ValueError if it was fed rows before."""
    if isinstance(transform, type):
        raise TypeError(f"transform=: pass an instance, not the class {transform.__name__}")
    if transform is not None and not all(
        callable(getattr(transform, name, None)) for name in ("feed", "end")
    ):
        raise TypeError(
            f"transform=: expected anyrank.Pack, anyrank.Buckets, or an object with feed(row) and "
            "end(), which return lists of samples (a generator cannot continue after a resume), "
            f"got {type(transform).__name__}"
        )
    get_held = getattr(transform, "held", None)
    if getattr(transform, "_num_fed", 0) or (get_held is not None and [*get_held()]):
        raise ValueError(
            f"transform=: this {type(transform).__name__} was fed rows, or its held() returns "
            "some, before the loader begins. Pass a new one: each lane gets a copy of it."
        )


def hide_worker_info() -> None:
    """Make a worker look like the only one to its code, because it is asked for whole shards.

    A `read` or a dataset that gives each worker of a DataLoader its part would skip rows.
    """
    info = get_worker_info()
    if info is not None:
        for name, value in (("id", 0), ("num_workers", 1)):
            object.__setattr__(info, name, value)  # some versions of torch freeze it


def _describe_transform(transform: Any) -> str:
    """Describe a transform by its class and plain settings, which must be the same at a resume."""
    plain = {
        name: value
        for name, value in getattr(transform, "__dict__", {}).items()
        if not name.startswith("_") and _is_plain(value)
    }
    text = ", ".join(f"{name}={_shorten(value)}" for name, value in sorted(plain.items()))
    return f"{type(transform).__name__}({text})"


def _is_plain(value: Any) -> bool:
    """Return True if the text of a setting identifies it."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, cast("list[Any]", value)))
    if isinstance(value, dict):
        return all(map(_is_plain, [part for pair in cast("Any", value).items() for part in pair]))
    return isinstance(value, str | int | float | bool | None)


def _shorten(value: Any) -> str:
    """Return a setting's text; for a long one its start, and a digest of all."""
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:40]}... {derive(text, size=4):08x}"


def _takes_start(read: Callable[..., Any]) -> bool:
    """Return True if a function has an argument `start`.

    Raises:
        TypeError: the argument has no default, or cannot be passed by name.
    """
    try:
        start = inspect.signature(read).parameters.get("start")
    except (TypeError, ValueError):  # of a builtin
        return False
    if start is not None and (start.default is start.empty or start.kind is start.POSITIONAL_ONLY):
        raise TypeError(
            f"read() has an argument {start}, but is called as read(shard), and after a resume as "
            "read(shard, start=8). Accept start as a keyword with default 0, or rename it."
        )
    return start is not None
