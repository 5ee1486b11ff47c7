"""The report of what a resume restored, part by part: the same on every rank, one screen long."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from anyrank.wording import count, printable


class Outcome(str):
    """The outcome of one part: "exact", "resharded", "derived", "skipped" or "fresh".

    Attributes:
        reason: why it is not exact; "" for an exact one.
    """

    reason: str

    def __new__(cls, kind: str, reason: str = "") -> Outcome:
        outcome = super().__new__(cls, kind)
        outcome.reason = reason
        return outcome

    def __reduce__(self) -> tuple[type[Outcome], tuple[str, str]]:
        return Outcome, (str(self), self.reason)


@dataclass(frozen=True)
class SavedOn:
    """The origin of a checkpoint.

    Attributes:
        ranks: number of ranks that wrote it; 0 if another tool's checkpoint does not say.
        layout: layout of the tensors on them, in words; or the name of the other tool.
    """

    ranks: int
    layout: str


@dataclass(frozen=True)
class ResumeReport:
    """The report of a resume. The same on every rank.

    Attributes:
        step: completed optimizer steps of the checkpoint.
        epoch: the current epoch.
        samples: samples of completed steps, over the whole run.
        path: path of the checkpoint.
        saved_on: ranks and layout of the save.
        ranks: number of ranks that resumed it.
        lost_steps: steps lost because newer checkpoints were corrupt; 0 if the newest was good.
        lost_samples: the samples of these steps; 0 if a corrupt manifest hides the count.
        set_aside: new names of the corrupt checkpoints; nothing is deleted.
        redone_steps: upper bound on the steps after this one that had been done and will be
            repeated, by the run's log, which has every tenth step; 0 if there is no log.
        components: part of the state -> its outcome, with `.reason`.
        notes: further sentences about the resume.
        verified: what was compared before anything was changed, in words.
        bytes_read: bytes read, one entry per rank.
        seconds: duration on the slowest rank.

    Example::

        ckpts = anyrank.Checkpoints("runs/a", anyrank.TrainState(torch.nn.Linear(4, 1)))
        ckpts.save()
        report = ckpts.resume()
        assert (report.step, report.saved_on.ranks, report.lost_steps) == (0, 1, 0)
        assert report.components["model"] == "exact"
        print(report)  # or report.in_a_line()
    """

    step: int
    epoch: int
    samples: int
    path: str
    saved_on: SavedOn
    ranks: int
    lost_steps: int = 0
    lost_samples: int = 0
    set_aside: list[str] = field(default_factory=list[str])
    redone_steps: int = 0
    components: dict[str, Outcome] = field(default_factory=dict[str, Outcome])
    notes: list[str] = field(default_factory=list[str])
    verified: str = ""
    bytes_read: list[int] = field(default_factory=list[int])
    seconds: float = 0.0

    def to_json(self) -> str:
        """Return all fields as a JSON object; a part's outcome as "kind" or "kind: reason"."""
        fields = asdict(self)
        fields["components"] = {
            name: _outcome_text(outcome) for name, outcome in self.components.items()
        }
        return json.dumps(fields, indent=2)

    def in_a_line(self) -> str:
        """Return one line: where the run continues, the ranks before and now, and what was lost."""
        saved_on = count(self.saved_on.ranks, "rank") if self.saved_on.ranks else "unknown ranks"
        facts = (
            f"step {self.step}, epoch {self.epoch}, {count(self.samples, 'sample')}; "
            f"saved on {saved_on}, now {self.ranks}"
        )
        losses = [f"{count(self.lost_steps, 'step')} lost (corrupt)"] if self.set_aside else []
        if self.redone_steps:
            losses.append(f"up to {count(self.redone_steps, 'later step')} will be repeated")
        changed = [
            f"{name} {outcome}"
            for name, outcome in self.components.items()
            if outcome not in ("exact", "resharded")
        ]
        lost = "; ".join([*losses, *changed]) or "nothing lost"
        return f"resumed {printable(self.path)} ({facts}): {lost}"

    def __str__(self) -> str:
        saved_on = count(self.saved_on.ranks, "rank") if self.saved_on.ranks else "unknown ranks"
        lines = [
            f"resumed {self.path} in {self.seconds:.2f} s",
            f"  at           step {self.step}, epoch {self.epoch}, {count(self.samples, 'sample')}",
            f"  saved on     {saved_on} ({self.saved_on.layout})",
            f"  resumed on   {count(self.ranks, 'rank')}",
        ]
        if self.set_aside:
            lines.append(
                f"  LOST         {count(self.lost_steps, 'step')}, "
                f"{count(self.lost_samples, 'sample')}: corrupt, renamed to "
                f"{', '.join(self.set_aside)}"
            )
        if self.redone_steps:
            lines.append(f"  repeated     up to {count(self.redone_steps, 'step')} after that save")
        lines += [
            f"  {name:<12} {_outcome_text(outcome)}" for name, outcome in self.components.items()
        ]
        if self.verified:
            lines.append(f"  verified     {self.verified}")
        lines += [f"  note         {note}" for note in self.notes]
        return "\n".join(lines)


def _outcome_text(outcome: Outcome) -> str:
    return f"{outcome}: {outcome.reason}" if outcome.reason else str(outcome)
