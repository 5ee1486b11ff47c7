"""`anyrank.Pack` and `anyrank.Buckets`: transforms of the rows of a lane.

Neither keeps rows in its state: `held()` returns the waiting ones, and they are read again.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from itertools import islice
from typing import Any, NamedTuple, cast

import torch

from anyrank.checks import check_bool, check_function, check_int, check_type
from anyrank.training.streams.lane_transform import CUT, OwnTransform
from anyrank.wording import count

IGNORED = -100  # a label that torch's cross entropy ignores
WAITING = 64  # documents from which the one that fits best is chosen


class _Piece(NamedTuple):
    """A part of a waiting document: its number, tokens and labels, and those returned before."""

    number: int
    tokens: torch.Tensor
    labels: torch.Tensor
    start: int


class Pack(OwnTransform):
    """Packs documents into rows of `length` tokens, for `ElasticLoader.from_shards(transform=)`.

    A row is a dict of int64 tensors of shape [length]: `key` (the tokens), "labels" (the same, or
    those under `labels`; -100 in padding), "position_ids" (0 at the first token of each part of a
    document) and "document_ids" (0, 1, 2 and so on, -1 in padding): mask attention across different
    ids. Each token appears in exactly one row per epoch.

    Args:
        length: tokens of a row, at least 1.
        key: key of the tokens in a document, which is a dict: a list, an array or a tensor of ints.
        eos: a token to append to each document that is not empty; None for none.
        labels: key of labels in a document, as many as tokens, which are split in the same way;
            default: the tokens. The label of an eos is the eos.
        split: whether to split a document at the end of a row. With False, documents stay whole
            unless longer than `length`, rows are filled best-fit from a buffer of 64 documents, and
            `pad` is required.
        pad: padding token. None: the last row of a lane is shorter, and is its own microbatch.

    Raises:
        TypeError, ValueError: an argument is wrong.

    Example::

        pack = anyrank.Pack(4, eos=0)
        rows = [*pack.feed({"input_ids": [1, 2]}), *pack.feed({"input_ids": [3, 4, 5]})]
        assert rows[0]["input_ids"].tolist() == [1, 2, 0, 3]
        assert rows[0]["position_ids"].tolist() == [0, 1, 2, 0]
    """

    def __init__(
        self,
        length: int,
        *,
        key: str = "input_ids",
        eos: int | None = None,
        labels: str | None = None,
        split: bool = True,
        pad: int | None = None,
    ) -> None:
        self.length = check_int("length", length, 1)
        check_type("key", key, str, "the key of a document's tokens, a str")
        check_bool(split=split)
        self.eos = None if eos is None else check_int("eos", eos)
        self.pad = None if pad is None else check_int("pad", pad)
        if labels is not None:
            check_type("labels", labels, str, "the key of a document's labels, a str")
        if not split and pad is None:
            raise ValueError("split=False leaves rows partly empty. Set pad= to the padding token.")
        self.key, self.labels, self.split = key, labels, split
        self._pieces: deque[_Piece] = deque()
        self._waiting = 0  # tokens
        self._num_again = self._start = 0

    def feed(self, row: Any) -> list[Any]:
        """Return the rows that a document completes."""
        number, _ = self._count()
        tokens = _ints_of(row, self.key, "key")
        labels = tokens if self.labels is None else _ints_of(row, self.labels, "labels")
        if labels.shape != tokens.shape:
            raise ValueError(
                f"a document has {count(len(tokens), 'token')} in {self.key!r}, but "
                f"{count(len(labels), 'label')} in {self.labels!r}. Pass as many labels as tokens."
            )
        if not len(tokens):
            return []  # no eos either
        if self.eos is not None:
            end = torch.tensor([self.eos], device="cpu")
            tokens, labels = torch.cat([tokens, end]), torch.cat([labels, end])
        piece = _Piece(number, tokens, labels, 0)
        self._units_fed += len(tokens) if type(self) is Pack else 0
        return self._feed_whole(piece) if not self.split else self._feed_part(piece)

    def _feed_part(self, piece: _Piece) -> list[Any]:
        """Return the full rows of documents one after the other."""
        self._put(piece, self._start)
        self._start = 0
        rows: list[Any] = []
        while self._waiting >= self.length:
            parts: list[_Piece] = []
            left = self.length
            while left:
                part = self._pieces.popleft()
                self._waiting -= len(part.tokens)
                if len(part.tokens) > left:
                    self._put(part, left, is_first=True)
                    part = part._replace(tokens=part.tokens[:left], labels=part.labels[:left])
                parts.append(part)
                left -= len(part.tokens)
            rows.append(self._make_row(parts))
        return rows

    def _feed_whole(self, piece: _Piece) -> list[Any]:
        """Return full rows of a longer document, and one of waiting documents if too many wait."""
        rows: list[Any] = []
        full = (len(piece.tokens) - 1) // self.length * self.length
        if piece.number >= self._num_again:  # otherwise they were returned when it was first fed
            for start in range(0, full, self.length):
                stop = start + self.length
                part = piece._replace(
                    tokens=piece.tokens[start:stop], labels=piece.labels[start:stop]
                )
                rows.append(self._make_row([part]))
        self._put(piece, full)
        if len(self._pieces) > WAITING:
            rows.append(self._make_row(self._take_fitting()))
        return rows

    def _put(self, piece: _Piece, start: int, is_first: bool = False) -> None:
        """Add a document to the waiting ones, from a token on."""
        tokens, labels = piece.tokens[start:], piece.labels[start:]
        rest = _Piece(piece.number, tokens, labels, piece.start + start)
        if is_first:
            self._pieces.appendleft(rest)
        else:
            self._pieces.append(rest)
        self._waiting += len(tokens)

    def _take_fitting(self) -> list[_Piece]:
        """Return the document that waits longest, and those that best fill the rest of its row."""
        parts = [self._pieces.popleft()]
        left = self.length - len(parts[0].tokens)
        while fitting := [piece for piece in self._pieces if len(piece.tokens) <= left]:
            best = max(fitting, key=lambda piece: (len(piece.tokens), -piece.number))
            self._pieces = deque(piece for piece in self._pieces if piece is not best)
            parts.append(best)
            left -= len(best.tokens)
        self._waiting -= self.length - left
        return parts

    def _make_row(self, parts: list[_Piece]) -> dict[str, torch.Tensor]:
        sizes = [len(part.tokens) for part in parts]
        fill = self.length - sum(sizes) if self.pad is not None else 0
        padding = torch.zeros(fill, dtype=torch.int64, device="cpu")
        ids = [torch.full_like(part.tokens, number) for number, part in enumerate(parts)]
        positions = [torch.arange(size, device="cpu") for size in sizes]
        return {
            self.key: torch.cat([*(part.tokens for part in parts), padding + (self.pad or 0)]),
            "labels": torch.cat([*(part.labels for part in parts), padding + IGNORED]),
            "position_ids": torch.cat([*positions, padding]),
            "document_ids": torch.cat([*ids, padding - 1]),
        }

    def end(self) -> list[Any]:
        """Return the remaining rows: with split=True one, which is short unless `pad` is set."""
        rows: list[Any] = []
        while self._pieces:
            if self.split:
                parts = [*self._pieces]
                self._pieces.clear()
                rows += (
                    [self._make_row(parts)]
                    if self.pad is not None
                    else [CUT, self._make_row(parts)]
                )
            else:
                rows.append(self._make_row(self._take_fitting()))
        return rows

    def held(self) -> list[int]:
        """Return the numbers of the waiting documents, in the order in which they were fed."""
        return [piece.number for piece in self._pieces]

    def state_dict(self) -> int | None:
        """Return how many tokens of the first waiting document were used, or how many wait."""
        if not self.split:
            return len(self._pieces)
        return self._pieces[0].start if self._pieces else None

    def load_state_dict(self, state: int) -> None:
        """Restore the state; the waiting documents are fed again next."""
        if self.split:
            self._start = state
        else:
            self._num_again = state

    def _units_of(self, sample: Any) -> int:
        """Count the tokens in a row; none in those of a subclass, which may change them."""
        if type(self) is not Pack:
            return 0
        ids: torch.Tensor = sample["document_ids"]
        return len(ids) if self.pad is None else int((ids >= 0).sum())

    def _draws(self) -> bool:
        return type(self) is not Pack


class Buckets(OwnTransform):
    """Gives microbatches of one bucket each, for `transform=` of any `ElasticLoader`.

    Rows are buffered until a bucket can fill a microbatch. Rows that wait at the end of a lane, or
    for `patience` rows, become a smaller microbatch: every row is in one microbatch of an epoch.
    With `drop_last=True` they are dropped, and counted in the epoch's receipt.

    Args:
        key: a function from a row to its bucket (any hashable value: an aspect ratio, a length
            class), or the name of a field that holds it. It must depend only on the row and the
            seeded generators.
        patience: maximum number of later rows of the lane for which a buffered row waits; at
            least 1.
        drop_last: whether incomplete microbatches are dropped.

    Raises:
        TypeError, ValueError: an argument is wrong.

    Example::

        loader = anyrank.ElasticLoader.from_shards(
            [[1, 20, 2, 30], [3, 4]],
            read=iter,
            transform=anyrank.Buckets(lambda row: row > 9),
            global_batch=2,
            microbatch=2,
        )
        model = torch.nn.Linear(1, 1)
        for step in loader:
            for batch in step.microbatches(model):
                assert len({int(row) > 9 for row in batch}) == 1
                step.backward(model(batch.float()[:, None]).mean())
    """

    def __init__(
        self,
        key: str | Callable[[Any], Hashable],
        *,
        patience: int = 1000,
        drop_last: bool = False,
    ) -> None:
        if not isinstance(key, str):
            check_function("key", key)
        self.key = key
        self.patience = check_int("patience", patience, 1)
        check_bool(drop_last=drop_last)
        self.drop_last = drop_last
        self._microbatch = 0  # the loader sets its own
        # With both numbers of each row. A bucket is added with its first row and removed as a
        # whole, so the one that waits longest is the first.
        self._waiting: dict[Hashable, list[tuple[int, int, Any]]] = {}

    def feed(self, row: Any) -> list[Any]:
        """Return the rows of a bucket that this row fills, and of those that waited too long."""
        bucket = self._bucket_of(row)
        number, row_number = self._count()
        rows = self._waiting.setdefault(bucket, [])
        rows.append((row_number, number, row))
        outputs = [CUT, *self._take(bucket), CUT] if len(rows) == self._microbatch else []
        while self._waiting:
            oldest = next(iter(self._waiting))
            if self._waiting[oldest][0][0] > row_number - self.patience:
                break
            outputs += self._flush(oldest)
        return outputs

    def _bucket_of(self, row: Any) -> Hashable:
        """Return the bucket of a row.

        Raises:
            TypeError, ValueError: the value of `key` cannot identify a bucket, or is missing.
        """
        name = f"Buckets({self.key!r})" if isinstance(self.key, str) else "Buckets(key)"
        bucket: Any = (
            _value_of(row, self.key, "key") if isinstance(self.key, str) else self.key(row)
        )
        if isinstance(bucket, torch.Tensor) and bucket.numel() == 1:
            bucket = bucket.item()  # tensors with the same value are different keys
        try:
            hash(bucket)
        except TypeError:
            raise TypeError(
                f"{name} returned {_as_text(bucket)}, which cannot identify a bucket. Return a "
                "number, a str or a tuple of these."
            ) from None
        if isinstance(bucket, torch.Tensor) or bucket != bucket:
            raise ValueError(
                f"{name} returned {_as_text(bucket)}, which is not equal to itself (such as NaN) "
                "or "
                "is a tensor. Return a number, a str or a tuple of these."
            )
        return bucket

    def _take(self, bucket: Hashable) -> list[Any]:
        """Remove and return the rows of a bucket."""
        return [row for *_, row in self._waiting.pop(bucket)]

    def _flush(self, bucket: Hashable) -> list[Any]:
        """Return the incomplete microbatch of a bucket."""
        rows = self._take(bucket)
        if self.drop_last:
            self._num_dropped += len(rows)
            return []
        return [CUT, *rows, CUT]

    def end(self) -> list[Any]:
        """Return the waiting rows, each bucket as a microbatch, unless they are dropped."""
        return [output for bucket in [*self._waiting] for output in self._flush(bucket)]

    def held(self) -> list[int]:
        """Return the numbers of the waiting rows, in the order in which they were fed."""
        return [number for rows in self._waiting.values() for _, number, _ in rows]

    def _draws(self) -> bool:
        return type(self) is not Buckets or callable(self.key)


def _value_of(row: Any, key: str, argument: str) -> Any:
    """Return a value of a row that is a dict.

    Args:
        row: the user's row.
        key: key of the value.
        argument: argument of the transform that is the key.

    Raises:
        TypeError: the row has no keys.
        ValueError: it lacks this one.
    """
    if not isinstance(row, Mapping):
        raise TypeError(
            f"each row must be a dict with {key!r}, got {_as_text(row)}. Return dicts from read(): "
            f'{{"{key}": ...}}'
        )
    if key not in row:
        keys = ", ".join(map(repr, islice(cast("Mapping[Any, Any]", row), 8)))
        raise ValueError(
            f"a row has no {key!r}, but {keys or 'nothing'}. Set {argument}= to its key."
        )
    return cast("Any", row[key])


def _ints_of(row: Any, key: str, argument: str) -> torch.Tensor:
    """Return the ints in a row under a key, int64 of shape [count]."""
    value = _value_of(row, key, argument)
    try:
        ints = torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{key!r} of a row must be a list of ints, got {_as_text(value)} ({error}). Tokenize "
            f"rows in read(), or set {argument}= to the field with tokens."
        ) from error
    is_int = not (ints.is_floating_point() or ints.is_complex() or ints.dtype == torch.bool)
    if ints.dim() != 1 or not (is_int or not len(ints)):  # torch takes no values for floats
        raise ValueError(
            f"{key!r} of a row has shape {list(ints.shape)} and dtype {ints.dtype}: must be a list "
            "of ints, or a one-dimensional array of ints"
        )
    if ints.dtype == torch.uint64 and len(ints) and int(ints.cpu().numpy().max()) >= 2**63:
        raise ValueError(f"{key!r} of a row has a token of 2**63 or more, but tokens are int64")
    return ints.to(torch.int64)


def _as_text(value: Any) -> str:
    """Describe a value for an error: its type, and its beginning."""
    text = repr(value)
    return f"a {type(value).__name__}, {text[:80]}{'...' * (len(text) > 80)}"


def fresh(transform: Any) -> Any:
    """Return a copy of a transform, for a lane.

    Its `key` is not copied: as a method it would be copied with its object, such as a dataset.
    """
    key = getattr(transform, "key", None)
    return copy.deepcopy(transform, {id(key): key})


def resize(buckets: Buckets, microbatch: int) -> Buckets:
    """Return buckets of the same class and settings for the loader's microbatch size."""
    resized = fresh(buckets)
    resized._microbatch = microbatch  # pyright: ignore[reportPrivateUsage] - of this module
    return resized
