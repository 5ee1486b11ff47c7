"""What a load did or would do, equal on all ranks and printable as one screen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from anyrank.model.report import MIB, FillReport, mib_by_rank
from anyrank.wording import count


@dataclass(frozen=True)
class LoadReport(FillReport):
    """What a load did. Equal on all ranks. Unpacks as torch's `(missing_keys, unexpected_keys)`.

    Example::

        model = torch.nn.Linear(2, 2)
        report = anyrank.load(model, {"weight": torch.eye(2)}, missing="keep")
        assert report.kept == ["bias"]
        print(report)  # one screen
        report.to_json()

    Attributes:
        missing: tensors of the model that the source does not hold.
        unexpected: keys of the source that fill no tensor of the model.
        initialised: tensors that a rule of the model gave their values, with the rule.
        rebuilt: non-persistent buffers that were on meta -> the rule or rank that filled them.
        kept: missing tensors that kept the values they had.
        tied: tensor -> its other names.
        duplicates: keys of tied tensors that the source holds more than once -> the key that was
            loaded; compared with `verify=True` only.
        cast: tensor -> "dtype in the source -> dtype in the model".
        renewed: tensors on meta whose objects torch could not keep, as something else referred to
            them: the model has new objects, and an optimizer built before has the old ones.
        own_code: extra state that was handed to its module.
        own_code_not_run: modules whose code (hooks, overrides) load_state_dict would have run, and
            extra state that was not handed over -> why; values are those of the source.
        frozen: parts passed to `freeze()` -> where their values came from.
        format: of the source.
        strategy: "own", "stripe" or "scatter".
        reason: why this strategy.
        nonfinite: tensor -> number of NaN and infinite values; filled with `verify=True`.
        verified: what `verify=True` compared, in words; "" without it.
        skipped: files and keys that were skipped, with the reason.
        bytes_read, bytes_sent, peak_host_bytes, peak_device_bytes: one entry a rank, in the
            group's order. Peaks are above the state before the call.
        seconds: of the slowest rank.
    """

    own_code: list[str] = field(default_factory=list[str])
    own_code_not_run: dict[str, str] = field(default_factory=dict[str, str])
    frozen: dict[str, str] = field(default_factory=dict[str, str])
    format: str = ""
    strategy: str = ""
    reason: str = ""
    nonfinite: dict[str, int] = field(default_factory=dict[str, int])
    skipped: list[str] = field(default_factory=list[str])
    bytes_read: list[int] = field(default_factory=list[int])

    def __iter__(self) -> Iterator[list[str]]:
        """`missing, unexpected = report`, as with `load_state_dict`."""
        yield self.missing
        yield self.unexpected

    def __str__(self) -> str:
        lines = [
            f"loaded {count(self.tensors, 'tensor')} ({self.format}) in {self.seconds:.2f} s",
            f"  strategy     {self.strategy}: {self.reason}",
            f"  read         {mib_by_rank(self.bytes_read)}",
        ]
        if any(self.bytes_sent):
            lines.append(f"  sent         {mib_by_rank(self.bytes_sent)}")
        lines.append(f"  host peak    {mib_by_rank(self.peak_host_bytes)}")
        if any(self.peak_device_bytes):
            lines.append(f"  device peak  {mib_by_rank(self.peak_device_bytes)}")
        others = {
            "own code": self.own_code,
            "not run": [f"{name} {reason}" for name, reason in self.own_code_not_run.items()],
            "frozen": [f"{name} from {source}" for name, source in self.frozen.items()],
            "not finite": [
                f"{name}: {count(number, 'value')}" for name, number in self.nonfinite.items()
            ],
            "skipped": self.skipped,
        }
        lines += self._lines(others)
        return "\n".join(lines)


@dataclass(frozen=True)
class LoadPlan:
    """What a load would do. Lists have one entry per rank, in the group's order.

    Example::

        weights = {"weight": torch.eye(2), "bias": torch.ones(2)}
        plan = anyrank.plan(torch.nn.Linear(2, 2), weights, mesh=(2, 1))  # two whole copies
        assert plan.read_bytes == [24, 24]
        print(plan)

    Attributes:
        strategy, reason: who reads, and why.
        world_size, nodes: ranks, and machines.
        model_bytes: of the whole model, in its own dtypes.
        source_bytes: of the tensors wanted from the source.
        share_bytes: what each rank holds afterwards.
        read_bytes: what each rank reads from storage.
        sent_bytes: what each rank sends to others.
        peak_bytes: most memory of each rank, share and staging together.
        node_read_bytes: what each machine takes from storage, each byte at most once.
        node_peak_bytes: sums over each machine's ranks.
        seconds: predicted, from stated rates (2 GiB/s of storage a node, 1 GiB/s of network a
            rank).
        format: of the source.
        missing, unexpected: names, where a model was given.
    """

    strategy: str
    reason: str
    world_size: int
    nodes: int
    model_bytes: int
    source_bytes: int
    share_bytes: list[int]
    read_bytes: list[int]
    sent_bytes: list[int]
    peak_bytes: list[int]
    node_read_bytes: list[int]
    node_peak_bytes: list[int]
    seconds: float
    format: str = ""
    missing: list[str] = field(default_factory=list[str])
    unexpected: list[str] = field(default_factory=list[str])

    def to_json(self) -> str:
        """All fields, as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        rows = [
            ("share", self.share_bytes),
            ("read", self.read_bytes),
            ("sent", self.sent_bytes),
            ("peak", self.peak_bytes),
        ]
        lines = [
            f"{self.world_size} ranks on {self.nodes} nodes, {self.model_bytes / MIB:.1f} MiB "
            "model, "
            f"{self.source_bytes / MIB:.1f} MiB source ({self.format}), about {self.seconds:.1f} s",
            f"  strategy {self.strategy}: {self.reason}",
        ]
        lines += [
            f"  {title:<6} {min(values) / MIB:.1f} to {max(values) / MIB:.1f} MiB a rank, "
            f"{sum(values) / MIB:.1f} MiB in all"
            for title, values in rows
        ]
        return "\n".join(lines)
