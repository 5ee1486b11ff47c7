"""The interface between a resume and its source: a step of a run or another tool's files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from anyrank.files.listing import Listing, TensorFill
from anyrank.runs.resume.options import ResumeArguments
from anyrank.runs.state.part_types import PartMatch
from anyrank.runs.state.resume_report import SavedOn
from anyrank.runs.state.train_state import TrainState
from anyrank.training.random_state.saved import SavedGenerators
from anyrank.world.ranks import Ranks


@dataclass(kw_only=True)
class ResumeSource(ABC):
    """A step of a run, or another tool's checkpoint.

    Attributes:
        path: its path, for errors and the report.
        listing: listing of its tensors.
        names: names of its parts.
        step, epoch, samples: position of the run.
        loader_counts: steps and samples of each of its ElasticLoaders, by part.
        saved_on: number of ranks that wrote it, and their layout.
        run: id of the run that continues from it; None for a checkpoint that starts one.
        lineage: the run's resumes before this one.
        settings: part -> its settings in the saved run's script; empty if they are unknown.
        generators: the random generators; None to derive new ones, for the reason `no_generators`.
        differed: names of tensors that differed between the ranks that saved it.
        verify: whether the bytes that are read are compared with their checksums.
        verified: text for the report on what was compared.
        lost_steps, lost_samples: numbers of steps and samples lost because newer steps are corrupt.
        set_aside: the new names of those steps.
    """

    path: str
    listing: Listing
    names: set[str]
    step: int
    epoch: int
    samples: int
    saved_on: SavedOn
    loader_counts: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    run: str | None = None
    lineage: Sequence[dict[str, Any]] = ()
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    generators: SavedGenerators | None = None
    no_generators: str = ""
    differed: Sequence[str] = ()
    verify: bool = False
    verified: str = "headers and sizes"
    lost_steps: int = 0
    lost_samples: int = 0
    set_aside: list[str] = field(default_factory=list[str])

    @abstractmethod
    def match(
        self, state: TrainState, arguments: ResumeArguments, ranks: Ranks
    ) -> dict[str, PartMatch]:
        """Match each part of a state that is not skipped with its source. Any rank may call it.

        Changes nothing. Mismatches are among the problems of the parts.

        Raises:
            CheckpointError: the source itself is corrupt, or has nothing for this state.
        """

    def locate(self, fills: Sequence[TensorFill], ranks: Ranks) -> tuple[Listing, list[TensorFill]]:
        """Find the bytes that are filled from `listing`, and the files that have them. Collective,
        after the match.

        Args:
            fills: fills of this rank.
            ranks: ranks that resume.

        Raises:
            CorruptCheckpoint: the source is corrupt; nothing has changed.
        """
        del ranks
        return self.listing, [*fills]

    @abstractmethod
    def notes(self) -> list[str]:
        """Return further notes for the report."""

    def warnings(self) -> list[str]:
        """Return notes on the source as a whole that users must know."""
        return []


def loader_counts(parts: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the steps and samples of each ElasticLoader in the records of a manifest."""
    trees: dict[str, Any] = {
        name: cast("Any", record).get("tree")
        for name, record in parts.items()
        if isinstance(record, dict)
    }
    return {
        name: (int(tree["step"]), int(tree["samples"]))
        for name, tree in trees.items()
        if isinstance(tree, dict) and {"step", "samples", "receipt"} <= tree.keys()
    }


def misfit_text(path: str, unusable: str | None, problems: Sequence[str]) -> str:
    """Compose an error text: all problems, and whether the state has changed."""
    now = "unchanged" if unusable is None else "only partly restored from a corrupt step"
    return "\n".join([f"{path} does not match the state, which is {now}:", *problems])
