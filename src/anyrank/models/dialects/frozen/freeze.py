"""`anyrank.freeze`: parts of a model that are not trained, saved or sharded with their parent.

A frozen part keeps its class. Functions of this file replace five of its methods, as ordinary
attributes of the module: a parent that asks for its modules, parameters, buffers or state gets
nothing, and a direct caller gets the usual answer. DDP, optimizers and checkpoints ask parents. Two
public hooks handle `load_state_dict`.

FSDP2 calls none of these methods: it walks `children()`, which copies and moves also need, and
skips modules that a different composable parallelism has in torch's registry. That registry
(`_OwnUnit`) is the only private part of torch, other than of its modules, that is used here.
`ignored_params` is not an alternative, because it is an argument of a later call by other code. A
holder that is not a module would hide the part from moves and copies of its parent too; and
`freeze`, which gets only the part, does not know the parents that would need such a holder.
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
from anyrank.tensors.wrapped import values_of, without_bytes
from anyrank.world.group import check_group

M = TypeVar("M", bound=nn.Module)
Path = str | os.PathLike[str]


def freeze(module: M, *, source: Path | Sequence[Path] | None = None) -> M:
    """Freeze a part of a model: eval mode, no gradients, and left out of DDP and checkpoints.

    Call it on every rank, before you wrap or shard the parent and build its optimizer. Call it
    again to add a source.

    - `train()` and `requires_grad_()`, its own or a parent's, change nothing. Gradients still flow
      through it.
    - A parent's `parameters()`, `buffers()` and `modules()` leave it out, so DDP neither broadcasts
      nor reduces it, and optimizers do not hold it. Called on the part itself, these methods list
      everything as usual.
    - `fully_shard` on a parent does not shard or move it. `fully_shard` on the part itself shards
      it, before or after `freeze`; parents then list it.
    - With a source, a parent's `state_dict()` leaves it out, `load_state_dict()` does not need it,
      and `load` fills it from the source. Without a source, it is saved and loaded with its parent.
    - It moves, casts, copies, pickles and compiles with its parent.

    Example::

        model = torch.nn.ModuleDict({"vae": torch.nn.Linear(2, 2), "net": torch.nn.Linear(2, 2)})
        anyrank.freeze(model["vae"], source="vae.safetensors")
        assert [name for name, _ in model.named_parameters()] == ["net.weight", "net.bias"]
        assert not model.train()["vae"].training
        assert list(model.state_dict()) == ["net.weight", "net.bias"]

    Args:
        module: any module; it keeps its type.
        source: where its weights come from: a path, a URL or a list of files, as for `load`.

    Returns:
        The same module object.

    Raises:
        TypeError: `module` is not a module, or is a TorchScript module, whose methods are not
            Python methods; or `source` is not a path.
        ValueError: `source` is empty.
    """
    check_model(module, "module")
    check_group(None)
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            "a TorchScript module cannot be frozen, because its methods are not Python methods. "
            "Put it into a plain module, and freeze that."
        )
    # The module's own dict, because torch.compile's wrapper forwards attributes to its module.
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
        raise ValueError(f"source={source!r}: expected a path, a URL or a list of files")
    return tuple(check_path("source", path) for path in source)


# -- answers of a frozen part ---------------------------------------------------------------------


class _Method:
    """A function that replaces a method of a module.

    It is copied and pickled with the module, but does not keep the module alive.
    """

    def __init__(self, answer: Callable[..., Any], module: nn.Module) -> None:
        self.answer = answer
        self.module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.answer(self.module(), *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Method, (self.answer, self.module())


def _train(module: nn.Module, mode: bool = True) -> nn.Module:
    """Stay in eval mode, whatever the caller requests."""
    return type(module).train(module, False)


def _requires_grad(module: nn.Module, requires_grad: bool = True) -> nn.Module:
    """Stay without gradients, whatever the caller requests."""
    return type(module).requires_grad_(module, False)


def _named_modules(
    module: nn.Module,
    memo: set[nn.Module] | None = None,
    prefix: str = "",
    remove_duplicate: bool = True,
) -> Generator[tuple[str, nn.Module]]:
    """Yield modules to a direct caller; nothing to a parent, whose recursion passes a memo.

    A part that is sharded by FSDP2 is listed, because the parent's root unit must coordinate it.
    """
    if memo is None or any(is_fsdp2(part) for _, part in walk(module)):
        yield from type(module).named_modules(module, memo, prefix, remove_duplicate)


def _state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return the usual state to a direct caller, but nothing to a parent if it has a source."""
    destination = args[0] if args else kwargs.get("destination")
    if destination is not None and module.__dict__[FROZEN].source is not None:
        return destination
    return type(module).state_dict(module, *args, **kwargs)


def _apply(
    module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """Move or cast as usual; a deliberate cast is not an error."""
    before = _whereabouts(module)
    type(module)._apply(module, fn, recurse)  # pyright: ignore[reportPrivateUsage]
    after = _whereabouts(module)
    if after != before:
        if after[1] != before[1]:
            remember(module)
        # A LightningModule stores its device and dtype as attributes, which the root's to() updates
        # in all modules(). That leaves the part out, so the attributes are updated here.
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
    """Return a module's attributes, for a copy that is not frozen."""
    return {name: value for name, value in attributes.items() if not isinstance(value, _Method)}


def _whereabouts(module: nn.Module) -> tuple[list[torch.device], list[torch.dtype]]:
    """Return the devices of the part's tensors, and their floating-point dtypes, each once."""
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
    """If it has a source, put the part's own tensors into the state that its parent loads.

    So nothing is missing, and nothing changes. In a direct call (without a prefix), the part gets
    new values.

    Raises:
        LoadError: the parent's checkpoint contains the part, from before it was frozen, with
            different values.
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
                continue  # the part has no value yet, or torch itself raises an error
            if not _equal(tensor, value):
                raise LoadError(
                    f"{key}: the checkpoint has different values than the frozen part, whose "
                    f"source is {info.source}. Drop the keys {prefix}* from the checkpoint, or "
                    "freeze the part without a source to load them."
                )
        state_dict[key] = tensor


def _remember_loaded(module: nn.Module, incompatible: object) -> None:
    """Record the loaded values: after a direct load, or a parent's if the part has no source."""
    info: FrozenInfo = module.__dict__[FROZEN]
    if info.source is None or info.tensors is None:
        remember(module)


def _equal(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits after a cast to the dtype of the first."""
    left, right = _local(tensor), _local(value).to(tensor.dtype)
    return tensor.shape == value.shape and content_hash(left) == content_hash(right)


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    return hasattr(tensor, "placements")


def _local(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return values_of(tensor.to_local() if _is_sharded(tensor) else tensor)


# -- proof ----------------------------------------------------------------------------------------


def remember(module: nn.Module) -> None:
    """Record the current values of the part."""
    info: FrozenInfo = module.__dict__[FROZEN]
    module.__dict__[FROZEN] = FrozenInfo(info.source, _describe(module), _versions(module))


def check_frozen(module: nn.Module, name: str = "") -> None:
    """Compare a frozen part with its record, before a save. Does not communicate.

    Its bytes are hashed only if a tensor is a different object than before, or was written to in a
    way that torch counts (`.data` is not counted). Nothing is compared if it was or is on meta or
    sharded.

    Args:
        module: the part.
        name: the part's name, which precedes its tensors' names in a message.

    Raises:
        CheckpointError: a tensor was changed, added or removed; the error names the first one.
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
                f"now {now.get(key, 'absent')}, so something writes to it. Look for an in-place "
                "update, apply() of an initializer, or an optimizer that was built before "
                "freeze()."
            )
    module.__dict__[FROZEN] = replace(info, versions=_versions(module))


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _describe(module: nn.Module) -> dict[str, str] | None:
    """Return `FrozenInfo.tensors` for the current values of the part."""
    tensors = _tensors(module)
    if any(t.is_meta or _is_sharded(t) or without_bytes(t) for t in tensors.values()):
        return None
    return {
        name: f"{dtype_name(tensor.dtype)}{list(tensor.shape)} {content_hash(tensor)}"
        for name, tensor in tensors.items()
    }


def _versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return `FrozenInfo.versions` for the current tensors of the part."""
    return {name: (id(t), version_of(t)) for name, t in _tensors(module).items()}


# -- FSDP2 ----------------------------------------------------------------------------------------


def _stay_whole(module: nn.Module) -> None:
    """Make `fully_shard` on a parent skip the part, as it skips modules under `replicate`."""
    key = _registry_key()
    if key is not None:
        module.__dict__.setdefault(key, _OwnUnit())


class _OwnUnit(dict[str, Any]):
    """torch's registry of the composable parallelisms of a module.

    It claims `replicate` until `fully_shard` is called on exactly this module and adds itself.
    """

    def __contains__(self, name: object) -> bool:
        return name == "replicate" and "fully_shard" not in self.keys()


def _registry_key() -> str | None:
    """Return the attribute with the registry, which is private to torch, and exists since 2.0.

    If it is missing, FSDP2 shards a frozen part with its parent, which is also correct, but less
    convenient.
    """
    try:
        from torch.distributed._composable.contract import REGISTRY_KEY
    except ImportError:
        return None
    return REGISTRY_KEY
