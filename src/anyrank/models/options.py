"""The options of `load` and `plan`; each rank checks them, and the ranks compare them."""

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

STRATEGIES = ("auto", "own", "stripe", "scatter")  # which rank reads which bytes
CHOICES: Mapping[str, tuple[str, ...]] = {
    "missing": ("error", "init", "keep"),
    "unexpected": ("error", "ignore"),
    "cast": ("float", "any"),
    "strategy": STRATEGIES,
}
WAYS_OUT = {  # text after "Fix: " in an error
    "missing": "map the names with rename=..., or pass missing='keep' to keep the model's values, "
    "or missing='init' to initialize them",
    "unexpected": "map the names with rename=..., or pass unexpected='ignore'",
}


@dataclass(frozen=True)
class LoadOptions:
    """The options of a call of `load`, `plan` or `sync`; see their documentation.

    Attributes:
        is_fresh: returns whether the source need not have a tensor, by name, in addition to
            `missing`.
        ways_out: text after "Fix: " in an error, for missing and unexpected tensors.
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
        """Check the options.

        Raises:
            ValueError: an unknown choice, a regex that does not compile, or a number that is not
                positive.
            TypeError: an option has a wrong type.
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
        """Check a model, a source and the options.

        Raises:
            ValueError, TypeError: as for `check`; the model is not a module; or the source is
                neither a source nor None.
        """
        check_model(model)
        # A rank without a source passes None or {}, and gets its bytes from other ranks.
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
        """Check a call's arguments, and compare them between the ranks. Collective.

        `buffer_bytes` and `progress` may differ between ranks; the smallest buffer and the first
        rank's progress are used.

        Returns:
            The results of `tell` on all ranks, merged.

        Raises:
            ValueError, TypeError: an argument is wrong; raised on every rank.
            LoadError: arguments differ between ranks; raised on every rank.
        """
        names = (*CHOICES, "rename", "verify")
        # Layouts may differ, because each rank names its own parts; but all ranks pass one, or none
        # does.
        return compare_and_reduce(
            ranks,
            call,
            {n: getattr(self, n) for n in names} | {"layout": self.layout is not None},
            LoadError,
            lambda: self.check_call(model, source),
            tell,
            merge,
        )
