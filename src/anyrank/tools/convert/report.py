"""What a conversion did."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from anyrank.wording import count, group_by_part, rows

SHOWN = 5


@dataclass(frozen=True)
class ConvertReport:
    """What `convert` wrote. Printable as one screen.

    Attributes:
        source: as it was given; of a run, the step that was read; the class of a live model.
        path: of what was written.
        replaced: the path that what was there has now; empty where nothing was.
        format: of it: "safetensors", "dcp" or "torch".
        files: names of the files, those of the source that were copied included.
        tensors: how many were written, ties counted once.
        nbytes: of the files.
        tied: name -> the name whose bytes it shares; it is not written a second time.
        cast: name -> "float32 -> bfloat16".
        renamed: key of the source -> name, where they differ.
        copied: files that were copied from the source's folder.
        skipped: what of the source was not written, and what of `rename=` matches no key, with the
            reason.
        verified: what was compared of the source, in words.
        seconds: in all.
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
        """All fields, as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        size = f"{self.nbytes / (1 << 20):,.1f} MiB in {self.seconds:.1f} s"
        tensors = count(self.tensors, "tensor")
        lines = [f"{self.path}: {self.format}, {tensors}, {size}, from {self.source}"]
        groups: list[tuple[str, list[str]]] = [
            ("replaced", [f"the old result is {self.replaced} now"] if self.replaced else []),
            ("tied", [f"{name} = {kept}" for name, kept in self.tied.items()]),
            ("cast", [f"{name}: {change}" for name, change in self.cast.items()]),
            ("renamed", [f"{key} -> {name}" for key, name in self.renamed.items()]),
            ("copied", self.copied),
            ("skipped", group_by_part(self.skipped)),
            ("verified", [self.verified] if self.verified else []),
        ]
        return "\n".join([*lines, *rows(groups, 9, SHOWN)])
