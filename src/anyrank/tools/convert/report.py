"""The report of a conversion."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from anyrank.wording import count, group_by_part, rows

SHOWN = 5


@dataclass(frozen=True)
class ConvertReport:
    """The result of `convert`: the files that it wrote. `print` it for a summary.

    Attributes:
        source: the source, as passed; for a run, the step that was read; for a live model, its
            class.
        path: path of the result.
        replaced: new path of a destination that existed; "" if none did.
        format: format of the result, as for `to=`.
        files: names of the files, including those copied from the source.
        tensors: number of written tensors; tied ones count once.
        nbytes: size of the files.
        tied: name -> the name whose bytes it shares; it is not written a second time.
        cast: name -> "float32 -> bfloat16".
        renamed: key of the source -> name, where they differ.
        copied: files that were copied from the folder of the source.
        skipped: keys of the source that were not written, and entries of `rename=` that match no
            key, with the reasons.
        verified: a text about what was verified.
        seconds: total duration.
    """

    source: str
    path: str
    replaced: str
    format: str
    files: list[str]
    tensors: int
    nbytes: int
    tied: dict[str, str]
    cast: dict[str, str]
    renamed: dict[str, str]
    copied: list[str]
    skipped: list[str]
    verified: str
    seconds: float

    def to_json(self) -> str:
        """Return all fields as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        size = f"{self.nbytes / (1 << 20):,.1f} MiB in {self.seconds:.1f} s"
        tensors = count(self.tensors, "tensor")
        lines = [f"{self.path}: {self.format}, {tensors}, {size}, from {self.source}"]
        groups: list[tuple[str, list[str]]] = [
            (
                "replaced",
                [f"the old result was renamed to {self.replaced}"] if self.replaced else [],
            ),
            ("tied", [f"{name} = {kept}" for name, kept in self.tied.items()]),
            ("cast", [f"{name}: {change}" for name, change in self.cast.items()]),
            ("renamed", [f"{key} -> {name}" for key, name in self.renamed.items()]),
            ("copied", self.copied),
            ("skipped", group_by_part(self.skipped)),
            ("verified", [self.verified] if self.verified else []),
        ]
        return "\n".join([*lines, *rows(groups, 9, SHOWN)])
