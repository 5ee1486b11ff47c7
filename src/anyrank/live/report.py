"""The report of a sync: the same on every rank, and printable as one screen."""

from __future__ import annotations

from dataclasses import dataclass, field

from anyrank.loading.report import FillReport, mib_by_rank
from anyrank.wording import count


@dataclass(frozen=True)
class SyncReport(FillReport):
    """The report of a sync, the same on every rank. Lists have one entry per rank.

    Entries of lists are in the order of the group.

    Example::

        new, old = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        report = anyrank.sync(old, new)
        assert report.tensors == 2
        print(report)  # one screen

    Attributes:
        tensors: number of tensors of `dst` that now have the values of `src`.
        missing: tensors of `dst` that `src` does not contain.
        unexpected: names in `src` that fill no tensor of `dst`.
        kept: missing tensors that kept their values.
        initialised: missing tensors that were on meta, with the rule that filled them.
        rebuilt: non-persistent buffers that were on meta -> the rule that filled them.
        renamed: tensor of `dst` -> its name in `src`, if the two differ.
        tied: tensor of `dst` -> its other names.
        duplicates: names in `src` of tensors that `dst` ties -> the name that was sent; all were
            equal.
        cast: tensor -> "dtype in src -> dtype in dst".
        merged: with `merge=True`, tensor of `dst` -> the adapters whose product was added to the
            values of `src`, each with its scaling.
        frozen: tensors of frozen parts of `dst`: compared with those of `src`, and not written.
        renewed: meta tensors that were replaced by new objects because something else references
            the old ones.
        bytes_sent, bytes_received: bytes between ranks, in the smaller of the two dtypes.
        bytes_copied: bytes that each rank copied for itself, in the dtype of `dst`.
        peak_host_bytes, peak_device_bytes: peaks relative to the state before the call; they
            include memory that was allocated for tensors on meta.
        channel: the library that moved bytes from device to device: "nccl"; "" for gloo.
        channel_bytes: device memory of each rank that the channel's buffers took during the call.
        group_bytes: device memory of each rank that the channel's group keeps, if the device
            reports its free memory.
        is_planned: whether this call made a new plan.
        verified: a text that says what `verify=True` compared; "" without it.
        seconds: duration on the slowest rank.
    """

    renamed: dict[str, str] = field(default_factory=dict[str, str])
    merged: dict[str, str] = field(default_factory=dict[str, str])
    frozen: list[str] = field(default_factory=list[str])
    bytes_received: list[int] = field(default_factory=list[int])
    bytes_copied: list[int] = field(default_factory=list[int])
    channel: str = ""
    channel_bytes: list[int] = field(default_factory=list[int])
    group_bytes: list[int] = field(default_factory=list[int])
    is_planned: bool = True

    def __str__(self) -> str:
        plan = "a new plan" if self.is_planned else "the plan of an earlier call"
        lines = [f"synced {count(self.tensors, 'tensor')} in {self.seconds:.2f} s, with {plan}"]
        for title, values in (
            ("sent", self.bytes_sent),
            ("received", self.bytes_received),
            ("copied", self.bytes_copied),
            ("host peak", self.peak_host_bytes),
            ("device peak", self.peak_device_bytes),
            (f"{self.channel} buffers", self.channel_bytes),
            (f"{self.channel} group", self.group_bytes),
        ):
            if any(values):
                lines.append(f"  {title:<12} {mib_by_rank(values)}")
        others = {
            "renamed": [f"{name} from {key}" for name, key in self.renamed.items()],
            "merged": [f"{name} + {words}" for name, words in self.merged.items()],
            "frozen": self.frozen,
        }
        lines += self.lines(others)
        return "\n".join(lines)
