"""What a state is restored from, whatever wrote it: the interface between a resume and a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from anyrank.files.listing import Listing
from anyrank.random_state.saved_streams import SavedStreams
from anyrank.resume.options import ResumeArguments
from anyrank.state.part_types import Matched
from anyrank.state.report import SavedOn
from anyrank.state.train_state import TrainState
from anyrank.world.ranks import Ranks


@dataclass(kw_only=True)
class ResumeSource(ABC):
    """A step of a run, or what another tool saved.

    Attributes:
        path: as errors and the report name it.
        listing: its tensors.
        names: of its parts.
        step, epoch, samples: how far it is.
        saved_on: how many ranks wrote it, and how the tensors lay on them.
        run: id of the run that goes on from it; None for one that begins with it.
        lineage: the run's resumes before this one.
        streams: the random streams; None to derive new ones, for the reason in `no_streams`.
        differed: names of tensors that were not alike on the ranks that saved it.
        verify: whether what is read is compared with its checksums.
        verified: what is compared, in words, for the report.
        lost_steps, lost_samples: of damaged steps that are newer.
        set_aside: the new names of those.
    """

    path: str
    listing: Listing
    names: set[str]
    step: int
    epoch: int
    samples: int
    saved_on: SavedOn
    run: str | None = None
    lineage: Sequence[dict[str, Any]] = ()
    streams: SavedStreams | None = None
    no_streams: str = ""
    differed: Sequence[str] = ()
    verify: bool = False
    verified: str = "headers and sizes"
    lost_steps: int = 0
    lost_samples: int = 0
    set_aside: list[str] = field(default_factory=list[str])

    @abstractmethod
    def match(
        self, state: TrainState, arguments: ResumeArguments, ranks: Ranks
    ) -> dict[str, Matched]:
        """What fills each part of a state that `arguments` does not skip. Any rank, by itself.

        Nothing is changed. What does not fit is in the parts' problems.

        Raises:
            CheckpointError: the source itself is damaged, or has nothing for this state.
        """

    @abstractmethod
    def notes(self) -> list[str]:
        """What else the report says of it, once it is restored."""

    def bring(self, listing: Listing, files: Iterable[int]) -> Listing:
        """Let this rank have these files of its listing; the listing with their places. All ranks,
        once the state is matched.
        """
        return listing


def misfit(path: str, unusable: str | None, problems: Sequence[str]) -> str:
    """All that does not fit a state, which is usable or not, in one text."""
    now = "as it was" if unusable is None else "half restored from a damaged step"
    return "\n".join([f"{path} does not fit the state, which is {now}:", *problems])
