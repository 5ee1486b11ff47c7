"""`anyrank.freeze`: a part of a model that is not trained, nor saved or sharded with its parent.

A frozen part keeps its class. Functions of this file replace five of its methods, as ordinary
attributes of the module: a parent that asks for its modules, parameters, buffers and state gets
nothing, and a direct caller gets the usual answer. DDP, optimizers and checkpoints ask parents. Two
public hooks handle `load_state_dict`.

FSDP2 calls no method: it walks `children()`, which copies and moves need as well, and leaves out
modules that another composable parallelism has in torch's record of them. That record is the only
thing used here that is private to torch rather than to its modules (`_OwnUnit`). `ignored_params`
is no alternative: it is an argument of a later call that somebody else makes. A holder that is not
a module would hide the part from moves and copies of its parent too, and `freeze`, which gets only
the part, does not know the parents that would need such a holder.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from anyrank.checks import check_model, check_path, check_type
from anyrank.errors import CheckpointError, LoadError
from anyrank.files.content_hash import content_hash
from anyrank.models.frozen_parts import FROZEN, FrozenInfo, FrozenSource
from anyrank.tensors.sharded_tensor import version_of
from anyrank.tensors.spec import dtype_name
from anyrank.tensors.torch_classes import is_fsdp2
from anyrank.tensors.walk import walk
from anyrank.tensors.wrapped import values_of
from anyrank.world.group import check_group

M = TypeVar("M", bound=nn.Module)
Path = str | os.PathLike[str]


def freeze(module: M, *, source: Path | Sequence[Path] | None = None) -> M:
    """Pin a part of a model: eval mode, no gradients, out of DDP and of checkpoints.

    Call it on every rank, before the parent is wrapped or sharded and its optimizer is built; call
    it again to add a source.

    - `train()` and `requires_grad_()`, its own or a parent's, change nothing. Gradients pass.
    - A parent's `parameters()`, `buffers()` and `modules()` leave it out, so DDP neither broadcasts
      nor reduces it, and optimizers do not hold it. Asked directly, it lists them as usual.
    - `fully_shard` of a parent leaves it whole and where it is. `fully_shard` of the part itself
      shards it, before or after; parents then list it.
    - With a source, a parent's `state_dict()` leaves it out, `load_state_dict()` does without it,
      and `load` fills it from there. Without one, it is saved and loaded with its parent.
    - It moves, casts, copies, pickles and compiles with its parent.

    Example::

        model = torch.nn.ModuleDict({"vae": torch.nn.Linear(2, 2), "net": torch.nn.Linear(2, 2)})
        anyrank.freeze(model["vae"], source="vae.safetensors")
        assert [name for name, _ in model.named_parameters()] == ["net.weight", "net.bias"]
        assert not model.train()["vae"].training
        assert list(model.state_dict()) == ["net.weight", "net.bias"]

    Args:
        module: any module; it keeps its type.
        source: the origin of its weights: a path, a URL or a list of files, as for `load`.

    Returns:
        The same module object.

    Raises:
        TypeError: not a module; a TorchScript module, whose methods are not Python's; a source that
            is not a path.
        ValueError: a source that is empty.
    """
    check_model(module, "module")
    check_group(None)
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            "a TorchScript module cannot be frozen: its methods are not Python's; put it into a "
            "plain module and freeze that"
        )
    # The module's own dict, because torch.compile's wrapper passes attributes on to its module.
    attributes = module.__dict__
    known: FrozenInfo = attributes.get(FROZEN, FrozenInfo())
    kept = known.source if source is None else _paths(source)
    if FROZEN not in attributes:
        attributes.update({name: _Method(answer, module) for name, answer in METHODS.items()})
        _stay_whole(module)
        module.register_load_state_dict_pre_hook(_keep_own)
        module.register_load_state_dict_post_hook(_remember_loaded)
    for _, part in walk(module):
        for parameter in part.parameters(recurse=False):
            parameter.requires_grad_(False)
    module.eval()
    attributes[FROZEN] = FrozenInfo(kept)
    remember(module)
    return module


def _paths(source: Any) -> FrozenSource:
    """Return a source as plain text, which can be copied and pickled."""
    if isinstance(source, str | os.PathLike):
        return check_path("source", source)
    check_type("source", source, Sequence, "a path, a URL or a list of files")
    if not source:
        raise ValueError(f"source={source!r}: give a path, a URL or a list of files")
    return tuple(check_path("source", path) for path in source)


# -- answers of a frozen part ---------------------------------------------------------------------


class _Method:
    """A function in place of a module's method.

    It is copied and pickled with the module, and does not keep the module alive.
    """

    def __init__(self, answer: Callable[..., Any], module: nn.Module) -> None:
        self.answer = answer
        self.module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.answer(self.module(), *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Method, (self.answer, self.module())


def _train(module: nn.Module, mode: bool = True) -> nn.Module:
    """Stay in eval mode, whatever the caller asks for."""
    return type(module).train(module, False)


def _requires_grad(module: nn.Module, requires_grad: bool = True) -> nn.Module:
    """Stay without gradients, whatever the caller asks for."""
    return type(module).requires_grad_(module, False)


def _named_modules(
    module: nn.Module,
    memo: set[nn.Module] | None = None,
    prefix: str = "",
    remove_duplicate: bool = True,
) -> Generator[tuple[str, nn.Module]]:
    """List modules for a direct caller; nothing for a parent, whose recursion passes a memo.

    A part sharded by FSDP2 is listed, because the root unit of the parent has to coordinate it.
    """
    if memo is None or any(is_fsdp2(part) for _, part in walk(module)):
        yield from type(module).named_modules(module, memo, prefix, remove_duplicate)


def _state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return the usual state to a direct caller; with a source, nothing to a parent."""
    destination = args[0] if args else kwargs.get("destination")
    if destination is not None and module.__dict__[FROZEN].source is not None:
        return destination
    return type(module).state_dict(module, *args, **kwargs)


def _apply(
    module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """Move or cast as usual; a cast on purpose is not damage."""
    before = _whereabouts(module)
    type(module)._apply(module, fn, recurse)  # pyright: ignore[reportPrivateUsage]
    after = _whereabouts(module)
    if after != before:
        if after[1] != before[1]:
            remember(module)
        # A LightningModule keeps its device and dtype as attributes. It learns of a move from the
        # root's to(), which asks modules(), which leaves the part out: so it is called here.
        devices, dtypes = after
        module.to(
            device=devices[0] if len(devices) == 1 else None,
            dtype=dtypes[0] if len(dtypes) == 1 else None,
        )
    return module


METHODS: Mapping[str, Callable[..., Any]] = {
    "train": _train,
    "requires_grad_": _requires_grad,
    "named_modules": _named_modules,
    "state_dict": _state_dict,
    "_apply": _apply,
}


def unfrozen_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """A module's attributes, for a copy that is not frozen."""
    return {name: value for name, value in attributes.items() if not isinstance(value, _Method)}


def _whereabouts(module: nn.Module) -> tuple[list[torch.device], list[torch.dtype]]:
    """The devices of the part's tensors, and their floating dtypes, each once."""
    tensors = [
        tensor
        for _, part in walk(module)
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))
    ]
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    devices = dict.fromkeys(tensor.device for tensor in tensors)
    return list(devices), list(dict.fromkeys(tensor.dtype for tensor in floats))


# -- load_state_dict ------------------------------------------------------------------------------


def _keep_own(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """With a source, put the part's own tensors into the state that its parent loads.

    So nothing is missing, and nothing changes. Called directly (only a parent has a prefix), the
    part gets new values.

    Raises:
        LoadError: the parent's checkpoint contains the part, from before it was frozen, and
            differs.
    """
    info = module.__dict__[FROZEN]
    if not prefix:
        module.__dict__[FROZEN] = FrozenInfo(info.source)
    if not prefix or info.source is None:
        return
    for key, tensor in module.state_dict(prefix=prefix, keep_vars=True).items():
        value = state_dict.get(key, tensor)
        are_tensors = isinstance(tensor, torch.Tensor) and isinstance(value, torch.Tensor)
        if are_tensors and value is not tensor:
            if tensor.is_meta or _is_sharded(tensor) != _is_sharded(value):
                continue  # no value to protect yet, or an error that torch raises itself
            if not _equal(tensor, value):
                raise LoadError(
                    f"{key}: the checkpoint holds other values than the frozen part, whose source "
                    f"is {info.source}: drop the keys {prefix}* from the checkpoint, or freeze "
                    "the part without a source to load them"
                )
        state_dict[key] = tensor


def _remember_loaded(module: nn.Module, incompatible: object) -> None:
    """Record the loaded values, when loaded directly, or by a parent without a source for it."""
    info: FrozenInfo = module.__dict__[FROZEN]
    if info.source is None or info.tensors is None:
        remember(module)


def _equal(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits, once both have the dtype of the first."""
    left, right = _local(tensor), _local(value).to(tensor.dtype)
    return tensor.shape == value.shape and content_hash(left) == content_hash(right)


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    return hasattr(tensor, "placements")


def _local(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor."""
    return values_of(tensor.to_local() if _is_sharded(tensor) else tensor)


# -- proof ----------------------------------------------------------------------------------------


def remember(module: nn.Module) -> None:
    """Record the present values of the part."""
    info: FrozenInfo = module.__dict__[FROZEN]
    module.__dict__[FROZEN] = FrozenInfo(info.source, _describe(module), _versions(module))


def check_frozen(module: nn.Module, name: str = "") -> None:
    """Compare a frozen part with its record, before a save. Each rank alone.

    Its bytes are hashed only if a tensor is another object than before, or was written to in a way
    that torch counts (`.data` is not). Nothing is compared if it was or is on meta or sharded.

    Args:
        module: the part.
        name: the part's name, put before its tensors' names in a message.

    Raises:
        CheckpointError: a tensor changed, or was added or removed; names the first.
    """
    info: FrozenInfo = module.__dict__[FROZEN]
    if info.tensors is None or info.versions == _versions(module):
        return
    now = _describe(module)
    if now is None:
        return
    prefix = f"{name}." if name else ""
    for key in sorted({*info.tensors, *now}):
        then = info.tensors.get(key, "absent")
        if now.get(key, "absent") != then:
            raise CheckpointError(
                f"{prefix}{key}: is frozen, and was {then} when it was frozen or loaded, but is "
                f"{now.get(key, 'absent')} now: something writes to it; look for an in-place "
                "update, apply() of an initializer, or an optimizer made before freeze()"
            )
    module.__dict__[FROZEN] = replace(info, versions=_versions(module))


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _describe(module: nn.Module) -> dict[str, str] | None:
    """`FrozenInfo.tensors` for the present values of the part."""
    tensors = _tensors(module)
    if any(tensor.is_meta or _is_sharded(tensor) for tensor in tensors.values()):
        return None
    return {
        name: f"{dtype_name(tensor.dtype)}{list(tensor.shape)} {content_hash(tensor)}"
        for name, tensor in tensors.items()
    }


def _versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """`FrozenInfo.versions` for the present tensors of the part."""
    return {name: (id(t), version_of(t)) for name, t in _tensors(module).items()}


# -- FSDP2 ----------------------------------------------------------------------------------------


def _stay_whole(module: nn.Module) -> None:
    """Keep `fully_shard` of a parent off the part, as it keeps off modules under `replicate`."""
    key = _registry_key()
    if key is not None:
        module.__dict__.setdefault(key, _OwnUnit())


class _OwnUnit(dict[str, Any]):
    """A module's record of composable parallelisms, as torch keeps it.

    It claims `replicate` until `fully_shard` is asked to shard this very module, and adds itself.
    """

    def __contains__(self, name: object) -> bool:
        return name == "replicate" and "fully_shard" not in self.keys()


def _registry_key() -> str | None:
    """The attribute that holds the record: private to torch, present from 2.0 on.

    If it is missing, FSDP2 shards a frozen part with its parent: correct too, if less convenient.
    """
    try:
        from torch.distributed._composable.contract import REGISTRY_KEY
    except ImportError:
        return None
    return REGISTRY_KEY
