"""A lane's transform: the user's, or one of anyrank's, with what a lane must know of it.

A lane continues elsewhere from the rows that its transform still needs (`held`) and the transform's
own state (`state_dict`). A transform that has neither must keep nothing between rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, cast

from anyrank.training.streams.digests import digest_of_row

STATE_BYTES = 1024  # of a transform's state, as JSON


class Cut:
    """The type of `anyrank.CUT`: the end of a microbatch, among the outputs of a transform."""

    def __repr__(self) -> str:
        return "CUT"

    def __reduce__(self) -> str:
        return "CUT"


CUT: Final = Cut()
"""In the output of a stream's transform: the microbatch ends here."""


class OwnTransform:
    """The base of anyrank's transforms: what a lane asks of them, with the answers for others.

    It identifies rows by their numbers, and by those in the lane. Both count up by themselves. A
    lane sets them, because a subclass may skip rows, and rows that are no longer needed are not fed
    again after a resume.
    """

    _num_fed = _row_number = 0  # of the next row
    _units_fed = 0  # units (tokens) in the rows that were fed
    _num_dropped = 0  # rows that were dropped

    def _units_of(self, sample: Any) -> int:
        """Count the units in a sample."""
        return 0

    def _draws(self) -> bool:
        """Return True if it may draw random numbers."""
        return True

    def _come_to(self, number: int, row_number: int) -> None:
        """Take over the numbers of the row that is fed next: among those fed, and in the lane."""
        if self._num_fed > number:
            raise ValueError(
                f"{type(self).__name__} called feed() of its base class more than once for a row, "
                "which can only be fed again as a whole after a resume. Return more, smaller rows "
                "from read()."
            )
        self._num_fed, self._row_number = number, row_number

    def _count(self) -> tuple[int, int]:
        """Return the number of a row that is fed, and its number in the lane."""
        number, row_number = self._num_fed, self._row_number
        self._num_fed, self._row_number = number + 1, row_number + 1
        return number, row_number


class LaneTransform:
    """A transform, with defaults for the methods that it does not have.

    Args:
        transform: has `feed` and `end`; its lane feeds no other.

    Attributes:
        draws: whether it may draw random numbers.
        has_held: whether it has `held`, so that rows may be fed again one by one; otherwise the
            rows of a piece are fed again together.
    """

    def __init__(self, transform: Any) -> None:
        self._transform = transform
        self.name = type(transform).__name__
        self._own_transform: Any = (
            transform if isinstance(transform, OwnTransform) else OwnTransform()
        )
        self.draws: bool = self._own_transform._draws()
        self.has_held = hasattr(transform, "held")
        self._has_state = hasattr(transform, "state_dict")
        # None: it says itself what it keeps.
        self._fresh = None if self.has_held or self._has_state else self._digests()

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of units that were fed, and of rows that were dropped."""
        return self._own_transform._units_fed, self._own_transform._num_dropped

    def units_in(self, samples: Sequence[Any]) -> int:
        """Count the units in some samples."""
        return sum(map(self._own_transform._units_of, samples))

    def feed(self, row: Any, number: int, row_number: int) -> list[Any]:
        """Return the samples that a row completes.

        Args:
            row: the row.
            number, row_number: its numbers among the rows that are fed, and in the lane.
        """
        self._own_transform._come_to(number, row_number)
        return self._as_list(self._transform.feed(row), "feed")

    def end(self) -> list[Any]:
        """Return the remaining samples."""
        return self._as_list(self._transform.end(), "end")

    def held_rows(self) -> Sequence[int]:
        """Return the numbers of the fed rows that it still needs."""
        return self._transform.held() if self.has_held else ()

    def state(self) -> str:
        """Return its own state as JSON; empty without one.

        Raises:
            TypeError: it is not JSON, or is too large, or JSON would change its keys; or the
                transform keeps something, but has neither `held` nor `state_dict`.
        """
        if self._fresh is not None:
            self._check_unchanged(self._fresh)
        state = self._transform.state_dict() if self._has_state else None
        if state is None:
            return ""
        way_out = (
            "Leave rows out of state_dict(), and return their numbers from held(): they are read "
            "and fed again after a resume."
        )
        try:
            text = json.dumps(state)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{self.name}.state_dict() does not return JSON ({error}). {way_out}"
            ) from error
        for key in _keys_of(state):
            if not isinstance(key, str):
                raise TypeError(
                    f"{self.name}.state_dict() has the key {key!r}, which a resume would return as "
                    "text, because JSON has no other keys. Return such a dict as "
                    "list(table.items()), and make it again with dict() in load_state_dict()."
                )
        if len(text) > STATE_BYTES:
            raise TypeError(
                f"{self.name}.state_dict() has {len(text)} bytes, but a lane's limit is "
                f"{STATE_BYTES}, because ranks exchange it in every step. {way_out}"
            )
        return text

    def load_state(self, text: str) -> None:
        """Continue from a state."""
        if text:
            self._transform.load_state_dict(json.loads(text))

    def _digests(self) -> dict[str, str]:
        """Return digests of the transform's attributes, including those in slots."""
        value = self._transform
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        parts = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        parts |= getattr(value, "__dict__", {})
        return {name: digest_of_row(part) for name, part in parts.items()}

    def _check_unchanged(self, fresh: dict[str, str]) -> None:
        digests = self._digests()
        changed = [name for name, digest in digests.items() if fresh.get(name) != digest]
        if changed:
            raise TypeError(
                f"transform {self.name} changed {', '.join(changed)}, which a resume, or a rank "
                "that continues the lane, cannot restore. Implement held() to return the numbers "
                "of the rows still needed (they are fed again), or state_dict(). If samples do not "
                "depend on it (a cache, a counter for a log), return [] from held()."
            )

    def _as_list(self, samples: Any, method: str) -> list[Any]:
        """Return the samples of a method; a sample outside a list would be taken apart."""
        if not isinstance(samples, list | Iterator):
            raise TypeError(
                f"{self.name}.{method} returned a {type(samples).__name__}; it must return a list "
                "of samples, [sample] for one and [] for none"
            )
        return [*cast("Iterable[Any]", samples)]


def _keys_of(value: Any) -> Iterator[Any]:
    """Yield the keys of all dicts in a value that JSON can hold."""
    if isinstance(value, dict):
        table = cast("dict[Any, Any]", value)
        yield from table
        value = [*table.values()]
    if isinstance(value, list | tuple):
        for part in cast("list[Any]", value):
            yield from _keys_of(part)
