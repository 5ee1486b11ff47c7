"""Code of modules that `load_state_dict` or `state_dict` would run: hooks, overrides, extra state.

`load` moves bytes and does not go through `load_state_dict`. Modules whose code might have changed
values on the way are named in the report and at WARNING; extra state is handed to its module. Code
of torch itself, which only renames and counts versions, is not needed; transformers' own loader
does not run its modules' either. Most models have no such code: what becomes of it is in
`anyrank.models.own_code_loading`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from anyrank.files.listing import Listing
from anyrank.models.tensors import ModelTensor, NamedModule
from anyrank.models.wrappers import plain_class
from anyrank.world.ranks import Ranks

LOAD_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
SAVE_METHODS = ("state_dict", "_save_to_state_dict")
SAVE_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
NOT_RUN = "has load_state_dict code of its own, which was not run"
OF_LIBRARIES = ("torch.", "transformers.", "anyrank.")


@dataclass(frozen=True)
class OwnCodeRun:
    """What became of the modules' own code.

    Attributes:
        ran: the extra state that was handed over.
        not_run: modules whose code `load_state_dict` would have run, and extra state that was not
            handed over -> why.
    """

    ran: list[str] = field(default_factory=list[str])
    not_run: dict[str, str] = field(default_factory=dict[str, str])


class OwnCode:
    """The modules of a model that have such code, and what a source holds for them: here, none.

    Attributes:
        modules: those with code for `load_state_dict`, by name.
        tensor_keys: keys of the source of extra state that is a tensor.
    """

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.tensor_keys: set[str] = set()

    def read_extras(self, listing: Listing, ranks: Ranks, reader: int) -> None:
        """Read the extra state that is a tensor, on the rank `reader` for all. All ranks."""

    def hand_over(self, filled: Sequence[ModelTensor]) -> OwnCodeRun:
        """Give modules their extra state, and name those above what was filled that have code.

        Raises:
            LoadError: `set_extra_state` of a module fails.
        """
        return OwnCodeRun()


def own_code_of(
    modules: Sequence[NamedModule], listing: Listing, rename: Callable[[str], str]
) -> OwnCode:
    """Those of some modules that have such code, with what a source holds for them.

    Args:
        modules: of a model.
        listing: the source.
        rename: from its keys to the model's names.
    """
    if not any(takes_extra_state(owner) or loads_by_own_code(owner) for owner in modules):
        return OwnCode()
    from anyrank.models.own_code_loading import OwnCodeOfModules  # a door: see test_house

    return OwnCodeOfModules(modules, listing, rename)


def takes_extra_state(owner: NamedModule) -> bool:
    """Whether a module's class is given extra state by `load_state_dict`."""
    return type(owner.module).set_extra_state is not nn.Module.set_extra_state


def loads_by_own_code(owner: NamedModule) -> bool:
    """Whether `load_state_dict` would run code of the user's for a module."""
    methods = ["_load_from_state_dict"]
    if not owner.name:  # of modules inside, torch does not call it
        methods.append("load_state_dict")
    return _has_own_code(owner.module, methods, LOAD_HOOKS)


def save_by_own_code(modules: Sequence[NamedModule]) -> bool:
    """Whether `state_dict()` of a model runs code of the user's."""
    return any(_has_own_code(owner.module, SAVE_METHODS, SAVE_HOOKS) for owner in modules)


def _has_own_code(module: nn.Module, methods: Iterable[str], hooks: Iterable[str]) -> bool:
    """Whether one of these methods, or a hook in one of these dicts, is of the user's."""
    classes = plain_class(module).__mro__
    entries = [next(kind for kind in classes if name in vars(kind)) for name in methods]
    entries += [hook for name in hooks for hook in vars(module)[name].values()]
    return any(not str(getattr(e, "__module__", "")).startswith(OF_LIBRARIES) for e in entries)
