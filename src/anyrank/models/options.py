"""The options of `load` and `plan`: checked by each rank, and compared between the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn

from anyrank.checks import check_bool, check_choice, check_function, check_int, check_model
from anyrank.errors import LoadError
from anyrank.models.dialects.layouts.given import check_layout
from anyrank.settings import BUFFER_BYTES
from anyrank.sources.source import Source, check_source
from anyrank.sources.tables.renaming import renamer
from anyrank.tensors.names import Rename
from anyrank.world.arguments import compare_and_reduce
from anyrank.world.ranks import Ranks

T = TypeVar("T")

STRATEGIES = ("auto", "own", "stripe", "scatter")  # who reads which bytes
CHOICES: Mapping[str, tuple[str, ...]] = {
    "missing": ("error", "init", "keep"),
    "unexpected": ("error", "ignore"),
    "cast": ("float", "any"),
    "strategy": STRATEGIES,
}
WAYS_OUT = {  # follows "to go on" in an error
    "missing": "rename=..., or missing='keep' for the model's values, or 'init' for new ones",
    "unexpected": "rename=..., or unexpected='ignore'",
}


@dataclass(frozen=True)
class LoadOptions:
    """The options that the caller of `load`, `plan` or `sync` gave; documented there.

    Attributes:
        is_fresh: names of tensors that the source need not have, in addition to `missing`.
        ways_out: text after "to go on" in an error, for missing and unexpected tensors.
    """

    missing: str = "error"
    unexpected: str = "error"
    cast: str = "float"
    rename: Rename = None
    strategy: str = "auto"
    buffer_bytes: int | None = None
    progress: bool | Callable[[int, int], None] | None = None
    verify: bool = False
    layout: Any = None
    merge: bool = False
    is_fresh: Callable[[str], bool] = lambda name: False
    ways_out: Mapping[str, str] = field(default_factory=lambda: WAYS_OUT)

    def check(self) -> None:
        """Refuse options that are wrong in themselves.

        Raises:
            ValueError: an unknown choice, a regex that does not compile, a number that is not
                positive.
            TypeError: an option of another type.
        """
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        renamer(self.rename)
        if self.buffer_bytes is not None:
            check_int("buffer_bytes", self.buffer_bytes, 1, BUFFER_BYTES.most)
        check_bool(verify=self.verify, merge=self.merge)
        if self.layout is not None:
            check_layout(self.layout)
        if self.progress is not None and not isinstance(self.progress, bool):
            check_function("progress", self.progress, "True, False, None or a function")

    def check_call(self, model: object, source: object) -> None:
        """Refuse a model, a source or options that are wrong in themselves.

        Raises:
            ValueError, TypeError: as for `check`; not a module; neither a source nor None.
        """
        check_model(model)
        # A rank that has no source gives None or {}, and gets its bytes from others.
        is_receiver = source is None or (isinstance(source, Mapping) and not source)
        if not is_receiver:
            check_source(source)
        self.check()

    def agree(
        self,
        ranks: Ranks,
        call: str,
        model: nn.Module,
        source: Source | None,
        tell: Callable[[], T],
        merge: Callable[[T, T], T],
    ) -> T:
        """Check a call's arguments, and compare them over the ranks. All ranks.

        `buffer_bytes` and `progress` may differ between ranks: the smallest buffer counts, and the
        first rank's progress.

        Returns:
            What `tell` gave on each rank, merged.

        Raises:
            ValueError, TypeError: an argument that is wrong in itself; on all ranks.
            LoadError: arguments that differ between ranks; on all ranks.
        """
        names = (*CHOICES, "rename", "verify")
        # Layouts may differ, because each rank names its own parts: all give one, or none does.
        return compare_and_reduce(
            ranks,
            call,
            {n: getattr(self, n) for n in names} | {"layout": self.layout is not None},
            LoadError,
            lambda: self.check_call(model, source),
            tell,
            merge,
        )
