"""What a load does for modules with code of their own: names them, and hands over extra state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from anyrank.errors import LoadError
from anyrank.files.content_hash import BLOCK_BYTES
from anyrank.files.listing import Listing
from anyrank.files.reader import Reader
from anyrank.models.own_code import (
    NOT_RUN,
    OwnCode,
    OwnCodeRun,
    loads_by_own_code,
    takes_extra_state,
)
from anyrank.models.own_state_dict import extra_name, is_extra
from anyrank.models.tensors import ModelTensor, NamedModule
from anyrank.tensors.names import candidates
from anyrank.world.ranks import Ranks


class OwnCodeOfModules(OwnCode):
    """The modules of a model that have such code, and what a source holds for them.

    Attributes:
        takers: name of extra state -> the module that it is handed to.
        extras: extra state by name, as `Listing.extras` has it.
        tensors: extra state that is a tensor, by name.
    """

    def __init__(
        self, modules: Sequence[NamedModule], listing: Listing, rename: Callable[[str], str]
    ) -> None:
        super().__init__()
        self.modules = {p.name or "the model": p.module for p in modules if loads_by_own_code(p)}
        self.takers = {
            extra_name(owner): owner.module for owner in modules if takes_extra_state(owner)
        }

        def named(keys: Iterable[str]) -> dict[str, str]:
            """Name -> key, of those that are handed to a module."""
            names = {name: key for key in keys for name in candidates(rename(key))}
            return {name: names[name] for name in self.takers if name in names}

        self.extras = {name: listing.extras[key] for name, key in named(listing.extras).items()}
        tensors = named(key for key in listing.tensors if is_extra(key))
        self.tensors = {name: listing.tensors[key] for name, key in tensors.items()}
        self.tensor_keys = set(tensors.values())

    def read_extras(self, listing: Listing, ranks: Ranks, reader: int) -> None:
        if not self.tensors:
            return

        def read() -> dict[str, tuple[Any]]:
            with Reader(listing, buffer_bytes=BLOCK_BYTES) as files:
                return {name: (files.read(stored),) for name, stored in self.tensors.items()}

        self.extras |= ranks.run_on_one("reading extra state", read, reader)

    def hand_over(self, filled: Sequence[ModelTensor]) -> OwnCodeRun:
        above = {id(m) for target in filled for entry in target.registrations for m in entry.path}
        done = OwnCodeRun()
        done.not_run.update(
            {name: NOT_RUN for name, module in self.modules.items() if id(module) in above}
        )
        for name, module in self.takers.items():
            if name not in self.extras:
                done.not_run[name] = "is not in the source, and the module keeps its own"
                continue
            extra = self.extras[name]
            if extra is None:
                done.not_run[name] = "is not plain data, and was not restored"
                continue
            try:
                module.set_extra_state(extra[0])
            except Exception as error:
                raise LoadError(f"{name}: set_extra_state fails: {error}") from error
            done.ran.append(name)
        return done
