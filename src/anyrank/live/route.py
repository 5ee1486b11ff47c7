"""The messages of a plan, kept while the layout of memory is the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from anyrank.loading.sharing.messages import Message

Geometry = Sequence[tuple[Any, ...]]


class Route:
    """The messages of a plan, kept with it while the layout of memory is the same.

    Attributes:
        checked: layout of the two ends' memory in the last call: address, strides, device.
    """

    def __init__(self) -> None:
        self.checked: Geometry = ()
        self._targets: Geometry = ()
        self._kept: dict[int, list[Message]] = {}
        self.channel: Any = (
            None  # see `device_channel.py`; False once it is known that the plan uses none
        )

    def begin(self, checked: Geometry, targets: Geometry) -> None:
        """Forget the messages if strides or devices of either end have changed.

        Args:
            checked: layout of the two ends; addresses may change.
            targets: strides and device of the targets, which may be memory for only this call.
        """
        lies = [entry[1:] for entry in self.checked]
        if [entry[1:] for entry in checked] != lies or targets != self._targets:
            self._kept.clear()
        self.checked, self._targets = checked, targets

    def messages(self, number: int, make: Callable[[], list[Message]]) -> list[Message]:
        """Return the messages of a round, which the first call makes."""
        if number not in self._kept:
            self._kept[number] = make()
        return self._kept[number]
