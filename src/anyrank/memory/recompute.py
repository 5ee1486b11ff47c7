"""`anyrank.recompute`: run a function without keeping its intermediate tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from anyrank.errors import RecomputeError
from anyrank.memory.ambient_state import AmbientState
from anyrank.memory.arguments import Call, Emptied, name_of
from anyrank.memory.module_state import ModuleState, modules_in
from anyrank.memory.offload import Offload
from anyrank.memory.region import Contexts, Region
from anyrank.memory.saved_inputs import Inputs
from anyrank.memory.uncompiled import uncompiled

T = TypeVar("T")


def recompute(
    fn: Callable[..., T],
    /,
    *args: Any,
    offload: Offload | None = None,
    context_fn: Callable[[], Contexts] | None = None,
    generators: Iterable[torch.Generator] = (),
    **kwargs: Any,
) -> T:
    """Call `fn(*args, **kwargs)`; of what it would save for backward, keep its arguments alone.

    Backward runs it again, once for each backward pass, up to the last tensor that it needs. Each
    rank by itself: nothing is communicated. It records into the caller's graph, so DDP and FSDP2
    see each parameter once. Without gradients it is a plain call.

    The second run sees the same random state (of the CPU, the accelerator, the devices of all
    tensors among the arguments, and generators), autocast and default device. Tensors in lists,
    tuples, dicts and types registered with pytree are packed, and so are those of a
    `functools.partial`; a surrounding region recomputes them and an offload moves them. What is in
    other containers, or captured by the function, stays as it is.

    Args:
        fn: a function or module that does the same when called again: no state that changes with
            the call, and no argument changed in place.
        offload: moves the arguments to host memory until backward.
        context_fn: returns a context for the first run and one for the others, as
            `torch.utils.checkpoint.create_selective_checkpoint_contexts` makes them.
        generators: random generators that `fn` draws from beside those among its arguments.

    Returns:
        What `fn` returns.

    Raises:
        RecomputeError: `fn` changed an argument in place, or the offload has no room and is to
            raise. From backward: `fn` did something else when called again, or a parameter or an
            argument was changed in between.
    """
    settings = Settings(offload, context_fn, tuple(generators), resident_in(fn))
    return record(fn, args, kwargs, name_of(fn), settings)


@dataclass(frozen=True)
class Settings:
    """The options of `recompute`, and the storages that an offload leaves where they are."""

    offload: Offload | None
    context_fn: Callable[[], Contexts] | None
    generators: tuple[torch.Generator, ...]
    resident: Callable[[], Collection[int]]


def resident_in(fn: Callable[..., Any]) -> Callable[[], Collection[int]]:
    """Asks for the ids of the storages of a module's buffers, which live on in any case."""
    owners = fn.modules() if isinstance(fn, torch.nn.Module) else ()
    holders = [module for module in owners if any(True for _ in module.buffers(recurse=False))]
    return lambda: {
        id(buffer.untyped_storage())
        for module in holders
        for buffer in module.buffers(recurse=False)
    }


def record(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    label: str,
    settings: Settings,
) -> Any:
    """`recompute`, with a name for messages."""
    if not torch.compiler.is_compiling():
        return record_eagerly(fn, args, kwargs, label, settings)
    if settings.offload is not None:  # copies between the compiled parts
        eagerly: Any = torch.compiler.disable(record_eagerly)
        return eagerly(fn, args, kwargs, label, settings)
    # The compiler knows torch's own region, and partitions the graph by it.
    if settings.context_fn is not None:
        kwargs = {**kwargs, "context_fn": settings.context_fn}
    return checkpoint(fn, *args, use_reentrant=False, **kwargs)


def record_eagerly(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    label: str,
    settings: Settings,
) -> Any:
    """Record one region of ours."""
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    offload, context_fn = settings.offload, settings.context_fn
    call = Call(fn, args, kwargs)
    modules = modules_in(call.fn, call.leaves)
    refuse_cache(call, modules, label)
    emptied = Emptied(call)
    tensors = emptied.tensors
    emptied.forget()
    pack = None
    if offload is not None:
        resident = settings.resident()
        pack = partial(offload.pack, names=emptied.tensor_name, label=label, resident=resident)
    inputs = Inputs(tensors, emptied.tensor_name, label, pack=pack)
    drawn = [leaf for leaf in call.leaves if isinstance(leaf, torch.Generator)]
    region = Region(
        lambda values: emptied.run(emptied.filled(values)),
        inputs,
        AmbientState.now({tensor.device for tensor in tensors}, (*drawn, *settings.generators)),
        ModuleState(modules),
        contexts=context_fn() if context_fn else None,
    )
    result = region.run(call)
    inputs.check(tensors)
    if offload is not None:
        offload.settle()
    return result


@uncompiled
def refuse_cache(call: Call, modules: Iterable[torch.nn.Module], label: str) -> None:
    """Refuse a key-value cache of transformers in training: each run of the block would fill it.

    Raises:
        RecomputeError: names the argument.
    """
    trained = [module for module in modules if module.training]
    if not trained or any(getattr(each, "_can_checkpoint_with_cache", False) for each in trained):
        return  # a block that says it only reads the cache
    for n, leaf in enumerate(call.leaves):
        if callable(getattr(leaf, "get_seq_length", None)) and hasattr(leaf, "update"):
            raise RecomputeError(
                f"{label} is given a cache, {call.name(n)}, which would be filled again when "
                "backward recomputes it: call the model with use_cache=False (or set use_cache of "
                "its config to False)"
            )
