"""`anyrank.freeze`: a part of a model that stays as it is, wherever its parent goes.

The module's class is swapped for a subclass made on the spot, as `fully_shard` does it: names,
attributes and isinstance stay, and copies keep it. Asked by a parent for its modules, parameters,
buffers and state, the subclass answers with nothing; asked directly, it answers as usual. So DDP,
optimizers and checkpoints do not see the part, whichever of them asks.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from anyrank.checks import check_model, check_path, check_type
from anyrank.errors import CheckpointError, LoadError
from anyrank.files.content_hash import content_hash
from anyrank.tensors.spec import dtype_name
from anyrank.tensors.walk import walk

M = TypeVar("M", bound=nn.Module)
Path = str | os.PathLike[str]


@dataclass(frozen=True)
class FrozenInfo:
    """What is known of a frozen part.

    Attributes:
        source: path or paths that hold its weights, as `load` takes them; None when the parent's
            checkpoints hold them.
        tensors: name -> dtype, shape and xxh3-128 of its bytes, for parameters and persistent
            buffers; None while some are on meta or sharded.
    """

    source: str | tuple[str, ...] | None = None
    tensors: Mapping[str, str] | None = None

    @property
    def digest(self) -> str | None:
        """One hash of all names, dtypes, shapes and bytes; None where `tensors` is."""
        import xxhash  # only verification needs it

        if self.tensors is None:
            return None
        return xxhash.xxh3_128(repr(sorted(self.tensors.items())).encode()).hexdigest()


def freeze(module: M, *, source: Path | Sequence[Path] | None = None) -> M:
    """Pin a part of a model: eval mode, no gradients, out of DDP and of checkpoints.

    Call it on every rank, before the parent is wrapped or sharded and its optimizer made; again to
    add a source.

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
        module: any module; its type becomes a subclass of the same name.
        source: where its weights come from: a path, a URL or a list of files, as `load` takes it.

    Returns:
        The same module object.

    Raises:
        TypeError: no module; a TorchScript module, whose class cannot change; a source that is no
            path.
        ValueError: a source that is empty.
    """
    check_model(module, "module")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            "a TorchScript module cannot be frozen: its class is fixed; put it into a plain module "
            "and freeze that"
        )
    known: FrozenInfo = getattr(module, "anyrank_frozen", FrozenInfo())
    if not isinstance(module, _FrozenModule):
        module.__class__ = _frozen_class(type(module))
        _stay_whole(module)
        module.register_load_state_dict_post_hook(_remember_loaded)
    for _, part in walk(module):
        for parameter in part.parameters(recurse=False):
            parameter.requires_grad_(False)
    module.eval()
    kept = known.source if source is None else _paths(source)
    # Not by setattr: torch.compile's wrapper would give it to the module inside.
    module.__dict__["anyrank_frozen"] = FrozenInfo(kept, describe(module))
    return module


class _FrozenModule(nn.Module):
    """What freezing puts in front of a module's own class."""

    anyrank_plain_class: ClassVar[type[nn.Module]]
    anyrank_frozen: FrozenInfo

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # A container that is sliced calls its class: the slice is an ordinary module.
        return cls.anyrank_plain_class(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (self.anyrank_plain_class,), self.__getstate__()

    def _get_name(self) -> str:
        return f"Frozen{super()._get_name()}"

    def train(self, mode: bool = True) -> Any:
        """Eval mode, whatever is asked for."""
        return super().train(False)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """No gradients, whatever is asked for."""
        return super().requires_grad_(False)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Generator[tuple[str, nn.Module]]:
        """As usual for a direct caller; nothing for a parent, whose recursion passes a memo.

        Sharded by FSDP2 it is listed: the root unit of the parent has to coordinate it.
        """
        if memo is None or any(isinstance(part, FSDPModule) for _, part in walk(self)):
            yield from super().named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As usual for a direct caller; nothing for a parent (it passes a dict), with a source."""
        destination = args[0] if args else kwargs.get("destination")
        if destination is not None and self.anyrank_frozen.source is not None:
            return destination
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As usual, called directly: the way to give it new values."""
        result = super().load_state_dict(*args, **kwargs)
        remember(self)
        return result

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # Only a parent's load has a prefix.
        if prefix and self.anyrank_frozen.source is not None:
            _keep_own(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        before = _whereabouts(self)
        super()._apply(fn, recurse)
        after = _whereabouts(self)
        if after != before:
            if after[1] != before[1]:  # a cast on purpose is no damage
                remember(self)
            # A LightningModule keeps its device and dtype as attributes. It learns of a move from
            # the root's to(), which asks modules(), which leaves the part out: so call it here.
            devices, dtypes = after
            self.to(
                device=devices[0] if len(devices) == 1 else None,
                dtype=dtypes[0] if len(dtypes) == 1 else None,
            )
        return self


@functools.cache
def _frozen_class(plain: type[nn.Module]) -> type[nn.Module]:
    """The subclass for a class. Of the same name, by which others look classes up."""
    names = ("__module__", "__qualname__", "__doc__")
    body = {"anyrank_plain_class": plain, **{name: getattr(plain, name) for name in names}}
    if hasattr(plain, "__deepcopy__"):  # its own copies are of the plain class
        body["__deepcopy__"] = _copy_and_freeze
    bases = (_FrozenModule, plain)
    return types.new_class(plain.__name__, bases, exec_body=lambda empty: empty.update(body))


def _copy_and_freeze(module: _FrozenModule, memo: dict[int, Any]) -> nn.Module:
    """Deep copy of a module whose class makes its own copies."""
    plain: Any = module.anyrank_plain_class
    copied: nn.Module = plain.__deepcopy__(module, memo)
    return freeze(copied, source=module.anyrank_frozen.source)


def _rebuild(plain: type[nn.Module]) -> nn.Module:
    """An empty frozen module, for copy and pickle to fill."""
    module = plain.__new__(plain)
    module.__class__ = _frozen_class(plain)
    _stay_whole(module)
    return module


def _paths(source: Any) -> str | tuple[str, ...]:
    """A source as plain text, which copies and pickles."""
    if isinstance(source, str | os.PathLike):
        return check_path("source", source)
    check_type("source", source, Sequence, "a path, a URL or a list of files")
    if not source:
        raise ValueError(f"source={source!r}: give a path, a URL or a list of files")
    return tuple(check_path("source", path) for path in source)


# -- checkpoints ----------------------------------------------------------------------------------


def _keep_own(module: _FrozenModule, state_dict: dict[str, Any], prefix: str) -> None:
    """Put the part's own tensors into what its parent loads, so that nothing is missing or changes.

    Raises:
        LoadError: the parent's checkpoint holds the part, from before it was frozen, and differs.
    """
    for key, own in module.state_dict(prefix=prefix, keep_vars=True).items():
        given = state_dict.get(key, own)
        if isinstance(own, torch.Tensor) and isinstance(given, torch.Tensor) and given is not own:
            if own.is_meta or _is_sharded(own) != _is_sharded(given):
                continue  # no value to protect yet, or torch's own error
            if not _equal(own, given):
                raise LoadError(
                    f"{key}: the checkpoint holds other values than the frozen part, whose source "
                    f"is {module.anyrank_frozen.source}: drop the keys {prefix}* from the "
                    "checkpoint, or freeze the part without a source to load them"
                )
        state_dict[key] = own


def _equal(own: torch.Tensor, given: torch.Tensor) -> bool:
    """Whether two tensors have the same bits, once both have the dtype of the first."""
    mine, theirs = _local(own), _local(given).to(own.dtype)
    return own.shape == given.shape and content_hash(mine) == content_hash(theirs)


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "placements")


def _local(tensor: Any) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if _is_sharded(tensor) else tensor


# -- hashes ---------------------------------------------------------------------------------------


def remember(module: nn.Module) -> None:
    """Record what the part holds now."""
    info: FrozenInfo = module.__dict__["anyrank_frozen"]
    module.__dict__["anyrank_frozen"] = replace(info, tensors=describe(module))


def _remember_loaded(module: nn.Module, incompatible: object) -> None:
    """The same after a parent has loaded the part, which it does only when that has no source."""
    info: FrozenInfo = module.__dict__["anyrank_frozen"]
    if info.source is None:
        remember(module)


def describe(module: nn.Module) -> dict[str, str] | None:
    """`FrozenInfo.tensors` of what the part holds now."""
    found: dict[str, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.is_meta or _is_sharded(tensor):
            return None
        dtype = dtype_name(tensor.dtype)
        found[name] = f"{dtype}{list(tensor.shape)} {content_hash(tensor)}"
    return found


def check_frozen(module: nn.Module, name: str = "") -> None:
    """Compare a frozen part with what was recorded of it, before a save. Each rank by itself.

    Nothing is compared while it was or is on meta or sharded.

    Args:
        module: the part.
        name: its own, in front of those of its tensors in a message.

    Raises:
        CheckpointError: a tensor changed, is new or is gone; names the first.
    """
    info: FrozenInfo = module.__dict__["anyrank_frozen"]
    now = describe(module)
    if info.tensors is None or now is None:
        return
    prefix = f"{name}." if name else ""
    for key in sorted({*info.tensors, *now}):
        then = info.tensors.get(key, "absent")
        if now.get(key, "absent") != then:
            raise CheckpointError(
                f"{prefix}{key}: is frozen, and was {then} when it was frozen or loaded, but is "
                f"{now.get(key, 'absent')} now: something writes to it; look for an in-place "
                "update, apply() of an initialiser, or an optimizer made before freeze()"
            )


def frozen_parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module of every frozen part, also those within others, and the model itself."""
    return [(name, part) for name, part in walk(model) if isinstance(part, _FrozenModule)]


# -- devices, dtypes, FSDP2 -----------------------------------------------------------------------


def _whereabouts(module: nn.Module) -> tuple[list[torch.device], list[torch.dtype]]:
    """The devices that the part's tensors are on, and their floating dtypes, each once."""
    tensors = [
        tensor
        for _, part in walk(module)
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))
    ]
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    devices = dict.fromkeys(tensor.device for tensor in tensors)
    return list(devices), list(dict.fromkeys(tensor.dtype for tensor in floats))


def _stay_whole(module: nn.Module) -> None:
    """Keep `fully_shard` of a parent off the part, as it keeps off what `replicate` has."""
    key = _registry_key()
    if key is not None:
        module.__dict__.setdefault(key, _OwnUnit())


class _OwnUnit(dict[str, Any]):
    """The record of composable parallelisms that a module has, as torch keeps it.

    It claims `replicate` until `fully_shard` is asked to shard this very module, and enters itself.
    """

    def __contains__(self, name: object) -> bool:
        return name == "replicate" and "fully_shard" not in self.keys()


def _registry_key() -> str | None:
    """The attribute that holds the record: private to torch, there from 2.0 on.

    Where it is missing, FSDP2 shards a frozen part with its parent: right too, if less convenient.
    """
    try:
        from torch.distributed._composable.contract import REGISTRY_KEY
    except ImportError:
        return None
    return REGISTRY_KEY
