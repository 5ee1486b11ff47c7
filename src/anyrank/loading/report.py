"""The report of a load or a sync: the same on every rank, and printable as one screen."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field

from anyrank.wording import count, join_first

MIB = 1 << 20
SHOWN = 5


def mib_by_rank(values: list[int]) -> str:
    """Return the MiB of each rank as text."""
    shown = " ".join(f"{value / MIB:.1f}" for value in values[:16])
    more = f" ... (max {max(values) / MIB:.1f})" if len(values) > 16 else ""
    return f"{shown}{more} MiB per rank"


def _group_line(title: str, items: list[str]) -> str:
    """Return one line of a report: the number of items, and the first few."""
    return f"  {title:<12} {len(items)}: {join_first(items, SHOWN, '; ')}"


@dataclass(frozen=True)
class FillReport:
    """How a model was filled; `LoadReport` and `SyncReport` describe each field."""

    missing: list[str] = field(default_factory=list[str])
    unexpected: list[str] = field(default_factory=list[str])
    initialised: dict[str, str] = field(default_factory=dict[str, str])
    rebuilt: dict[str, str] = field(default_factory=dict[str, str])
    kept: list[str] = field(default_factory=list[str])
    tied: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    duplicates: dict[str, str] = field(default_factory=dict[str, str])
    cast: dict[str, str] = field(default_factory=dict[str, str])
    renewed: list[str] = field(default_factory=list[str])
    verified: str = ""
    tensors: int = 0
    bytes_sent: list[int] = field(default_factory=list[int])
    peak_host_bytes: list[int] = field(default_factory=list[int])
    peak_device_bytes: list[int] = field(default_factory=list[int])
    seconds: float = 0.0

    def to_json(self) -> str:
        """Return all fields as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def lines(self, others: Mapping[str, list[str]]) -> list[str]:
        """Return one line for each group that has tensors, and one for what was verified."""
        groups = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "initialised": [f"{name} by {rule}" for name, rule in self.initialised.items()],
            "rebuilt": [f"{name} by {rule}" for name, rule in self.rebuilt.items()],
            "kept": self.kept,
            "tied": [f"{name} = {', '.join(also)}" for name, also in self.tied.items()],
            "cast": [f"{name} {cast}" for name, cast in self.cast.items()],
            "replaced": self.renewed,
            **others,
        }
        lines = [_group_line(title, items) for title, items in groups.items() if items]
        return [*lines, f"  verified     {self.verified}"] if self.verified else lines


@dataclass(frozen=True)
class LoadReport(FillReport):
    """The report of a load, the same on every rank. Unpacks as `(missing_keys, unexpected_keys)`.

    Example::

        model = torch.nn.Linear(2, 2)
        report = anyrank.load(model, {"weight": torch.eye(2)}, missing="keep")
        assert report.kept == ["bias"]
        print(report)  # one screen
        report.to_json()

    Attributes:
        missing: tensors of the model that the source does not contain.
        unexpected: keys of the source that fill no tensor of the model.
        initialised: tensors that got their values from a rule of the model, with the rule.
        rebuilt: non-persistent buffers that were on meta -> the rule that filled them.
        kept: missing tensors that kept their values.
        tied: tensor -> its other names.
        duplicates: keys of tied tensors that the source contains more than once -> the key that was
            loaded; their values were equal.
        cast: tensor -> "dtype in the source -> dtype in the model".
        renewed: meta parameters that were replaced by new objects because something else references
            the old ones. An optimizer that was built earlier still holds the old objects.
        own_code: extra state that was handed to its module.
        own_code_not_run: modules whose code (hooks, overrides) load_state_dict would have run, and
            extra state that was not handed to its module -> the reason. Their values are those of
            the source.
        frozen: parts passed to `freeze()` -> where their values came from.
        format, tensors: format of the source, and how many tensors were filled from it.
        strategy: "own", "stripe" or "scatter".
        reason: the reason for this strategy.
        nonfinite: tensor -> number of NaN and infinite values; filled with `verify=True`.
        verified: a text that says what `verify=True` compared; "" without it.
        skipped: files and keys that were skipped, with the reason.
        bytes_read, bytes_sent, peak_host_bytes, peak_device_bytes: one entry per rank, in the
            group's order. Peaks are relative to the state before the call.
        seconds: duration on the slowest rank.
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
        """Support `missing, unexpected = report`, as with `load_state_dict`."""
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
            "extra state": self.own_code,
            "code not run": [f"{name} {reason}" for name, reason in self.own_code_not_run.items()],
            "frozen": [f"{name} from {source}" for name, source in self.frozen.items()],
            "not finite": [
                f"{name}: {count(number, 'value')}" for name, number in self.nonfinite.items()
            ],
            "skipped": self.skipped,
        }
        lines += self.lines(others)
        return "\n".join(lines)


def log_report(report: FillReport, log: logging.Logger, source: str, model: str) -> None:
    """Log a report; every difference from a plain, full copy is a warning (promise 8).

    Args:
        report: report of a load or a sync.
        log: the logger.
        source, model: names of the two in messages.
    """
    log.info("%s", report)

    def warn(number_and_fact: str, noun: str, items: list[str]) -> None:
        if items:
            fact = number_and_fact.format(count(len(items), noun))
            log.warning("%s: %s", fact, join_first(items, 10))

    warn(f"{{}} missing from {source} and initialized", "tensor", [*report.initialised])
    warn(f"{{}} missing from {source} and not changed", "tensor", report.kept)
    why = f"ignored because {model} has no tensor of that name"
    warn(f"{{}} of {source} {why}", "key", report.unexpected)
    why = "replaced by a new object because something else references the meta tensor"
    warn(f"{{}} {why}", "tensor", report.renewed)
    if isinstance(report, LoadReport):
        code = [f"{name} {reason}" for name, reason in report.own_code_not_run.items()]
        what = "load_state_dict code not run, or extra state not restored, for"
        warn(f"{what} {{}}", "module", code)
        warn("{} with NaN or infinite values", "tensor", [*report.nonfinite])
