"""The one way to fill a model: allocate, move, rebuild, put in place.

Loads, syncs, adopted checkpoints and first values differ in where the values come from, which is
their `Side`. Until the last step tensors on meta stay as they are, on every rank, as an error on
one rank before is every rank's. The last step is each rank's by itself: it swaps tensors, all or
none, hashes frozen parts, moves buffers and calls the modules' `set_extra_state`. If it fails on a
rank, the model has its new values elsewhere, and the error says so.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.autograd.graph import increment_version

from anyrank.errors import AnyrankError
from anyrank.models.first_values.buffers import rebuilt_values
from anyrank.models.own_code import OwnCodeRun
from anyrank.models.replace import Replacement
from anyrank.models.share import ModelShare
from anyrank.world.ranks import Ranks

PLACED = (
    "the model has its new values, but where this failed tensors that were on meta, buffers or "
    "extra state may be missing"
)


class Moved(NamedTuple):
    """Bytes that one rank has moved; those of buffers and a group on its device; by what lane."""

    read: int = 0
    sent: int = 0
    received: int = 0
    copied: int = 0
    buffers: int = 0
    group: int = 0
    lane: str = ""


class Measured(NamedTuple):
    """What a fill took on one rank."""

    moved: Moved
    host_peak_bytes: int
    device_peak_bytes: int
    seconds: float


class Side:
    """Where the values come from, as one rank has it. This one has none: all come from rules.

    Attributes:
        preparing, moving: what is done in these two steps, for messages.
        is_one_model: whether all ranks fill the same model, and know each other's report.
    """

    preparing = "allocating memory"
    moving = "initialising"
    is_one_model = True

    def prepare(self, share: ModelShare) -> None:
        """Have all that is needed before the first tensor is written to. Each rank by itself."""
        share.allocate()

    def compare(self) -> None:
        """Refuse what has to be equal already, and is not. All ranks."""

    def move(self) -> None:
        """Fill this rank's share; ends only when the other ranks have what they need of it."""

    def check(self) -> None:
        """Compare what was moved. All ranks."""

    def finish(self) -> None:
        """Do what else can fail before the model is changed. All ranks."""

    def moved(self) -> Moved:
        """Bytes so far."""
        return Moved()

    def damage_note(self) -> str:
        """What an error in `move` or `check` says of the model."""
        return ""

    def close(self) -> None:
        """Close what is open."""


@dataclass(frozen=True)
class FillResult:
    """What a fill did, beyond what its plan says. Equal on all ranks.

    Attributes:
        rules: tensors that were initialised -> the rule.
        rebuilt: non-persistent buffers -> the rule that filled them.
        renewed: tensors whose objects could not be kept.
        own_code: what became of the modules' own code.
        measured: of every rank.
    """

    rules: dict[str, str]
    rebuilt: dict[str, str]
    renewed: list[str]
    own_code: OwnCodeRun
    measured: list[Measured]

    @property
    def moved(self) -> list[Moved]:
        """Bytes of every rank."""
        return [measured.moved for measured in self.measured]

    def fields(self) -> dict[str, Any]:
        """Those of a report that every fill knows."""
        return {
            "initialised": self.rules,
            "rebuilt": self.rebuilt,
            "renewed": self.renewed,
            "bytes_sent": [moved.sent for moved in self.moved],
            "peak_host_bytes": [measured.host_peak_bytes for measured in self.measured],
            "peak_device_bytes": [measured.device_peak_bytes for measured in self.measured],
            "seconds": max(measured.seconds for measured in self.measured),
        }


def fill(share: ModelShare, side: Side, ranks: Ranks, *, rebuild: bool) -> FillResult:
    """Fill a model. All ranks.

    Args:
        share: of this rank; nothing is allocated yet.
        side: where its values come from.
        ranks: of the call.
        rebuild: whether any rank has non-persistent buffers on meta.

    Raises:
        AnyrankError: of any rank, on all ranks.
    """
    with closing(side):
        ranks.run(side.preparing, lambda: side.prepare(share))
        side.compare()

        def move() -> None:
            side.move()
            # Bytes go past torch: a graph that has saved these tensors must not be run backwards.
            filled = (target.tensor for target in share.filled() if not target.is_meta)
            increment_version([tensor for tensor in filled if not tensor.is_inference()])
            share.initialise()

        with _with_consequence(side.damage_note()):
            ranks.run(side.moving, move)
            side.check()
        rebuilt: dict[str, str] = {}
        replacements: list[Replacement] = []
        if rebuild:
            rebuilt, replacements = rebuilt_values(
                share.match.tensors, ranks, share.initialiser, share.device
            )
        side.finish()

        def commit() -> tuple[OwnCodeRun, tuple[Measured, dict[str, str], list[str]]]:
            renewed = share.commit(replacements)
            ran = share.match.own_code.hand_over(share.filled())
            peaks, seconds = share.meter.peaks(), share.meter.seconds()
            rules = {} if side.is_one_model else share.rules
            return ran, (Measured(side.moved(), *peaks, seconds), rules, renewed)

        with _with_consequence(PLACED):
            ran, answers = ranks.run_and_gather("putting the weights in place", commit)
    others = {name: rule for _, rules, _ in answers for name, rule in rules.items()}
    return FillResult(
        rules=share.rules if side.is_one_model else others,
        rebuilt=rebuilt,
        renewed=sorted({name for *_, names in answers for name in names}),
        own_code=ran,
        measured=[measured for measured, *_ in answers],
    )


@contextmanager
def _with_consequence(left: str) -> Generator[None]:
    """Add to an error what the model is after it."""
    try:
        yield
    except AnyrankError as error:
        if not left:
            raise
        raise type(error)(f"{error}\n  {left}", causes=error.causes) from error
