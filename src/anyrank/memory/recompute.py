"""`anyrank.recompute`: run a function without keeping its intermediate tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from anyrank.checks import check_function, check_type
from anyrank.errors import RecomputeError
from anyrank.memory.ambient_state import AmbientState, in_transform
from anyrank.memory.arguments import Call, TensorlessCall, name_of
from anyrank.memory.captured import Captured
from anyrank.memory.module_state import ModuleState
from anyrank.memory.offload import Offload, engine_of
from anyrank.memory.region import Contexts, Region, SavedInputs
from anyrank.memory.uncompiled import uncompiled
from anyrank.random_state.streams import Source, source_of

T = TypeVar("T")

# They would be passed on to the function, which may swallow them.
OF_CHECKPOINT = frozenset({"use_reentrant", "preserve_rng_state", "determinism_check"})


def recompute(
    fn: Callable[..., T],
    /,
    *args: Any,
    offload: Offload | None = None,
    context_fn: Callable[[], Contexts] | None = None,
    generators: Iterable[Any] = (),
    **kwargs: Any,
) -> T:
    """Activation checkpointing: call `fn(*args, **kwargs)`, keep only its arguments for backward.

    Each backward pass runs `fn` again, up to the last tensor that backward needs. Each rank by
    itself: nothing is communicated. The call is recorded in the caller's graph, so DDP and FSDP2
    see each parameter once. Without gradients, and under torch.func's transforms, it is a plain
    call.

    The second run sees the same random state (of the CPU, the accelerator, the devices of all
    tensors among the arguments, and of generators), autocast and default device. Tensors in lists,
    tuples, dicts, types registered with pytree and `functools.partial` are recomputed by an outer
    region and moved by an offload. Tensors in other containers, or captured by the function, stay
    where they are.

    Args:
        fn: a function or module that does the same when called again: it changes no state that it
            reads, and no argument in place.
        offload: moves the arguments to host memory until backward.
        context_fn: returns a context for the first run and one for the others, as
            `torch.utils.checkpoint.create_selective_checkpoint_contexts` makes them.
        generators: random generators (of torch, of numpy, `random.Random`) that `fn` uses, besides
            those among its arguments, captured variables and modules' attributes.

    Returns:
        What `fn` returns.

    Raises:
        TypeError: `fn` is no function, or an option of another type, or one of torch's `checkpoint`
            (`use_reentrant`).
        RecomputeError: `fn` changed an argument in place. From backward: `fn` did not do the same
            when called again, or a parameter, an argument or a captured tensor that it reads was
            changed in between.
        MemoryError: the offload's pool is full and `on_full="raise"`, or the system has no host
            memory for it.

    Example::

        block = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        x = torch.randn(4, 8, requires_grad=True)
        y = anyrank.recompute(block, x)
        y.sum().backward()
    """
    check_function("fn", fn, "a function or a module")
    if foreign := kwargs.keys() & OF_CHECKPOINT:
        raise TypeError(
            f"{min(foreign)} is an option of torch's checkpoint: leave it out, as recompute is "
            "never reentrant, sets random numbers back, and compares what the second run saves"
        )
    settings = RegionOptions(offload, context_fn, sources(generators), resident_in(fn))
    return record_region(fn, args, kwargs, name_of(fn), settings)


@dataclass(frozen=True)
class RegionOptions:
    """The options of `recompute`, and the ids of storages that an offload must not move."""

    offload: Offload | None
    context_fn: Callable[[], Contexts] | None
    generators: tuple[Source, ...]
    resident: Callable[[], Collection[int]]

    def __post_init__(self) -> None:
        offload: Any = self.offload
        if offload is not None and not isinstance(offload, Offload):
            raise TypeError(f"offload={offload!r}: give an anyrank.Offload")
        if self.context_fn is not None and not callable(self.context_fn):
            raise TypeError(
                f"context_fn={self.context_fn!r}: give a function that returns two contexts, as "
                "create_selective_checkpoint_contexts of torch.utils.checkpoint does"
            )


def sources(generators: Iterable[Any]) -> tuple[Source, ...]:
    """Generators as sources of random numbers.

    Raises:
        TypeError: one is not a generator that can be set back.
    """
    check_type("generators", generators, Iterable, "a list of generators")
    found = [(each, source_of(each)) for each in generators]
    for each, source in found:
        if source is None:
            raise TypeError(
                f"generators has a {type(each).__name__}: give a torch.Generator, a generator of "
                "numpy or a random.Random"
            )
    return tuple(source for _, source in found if source is not None)


def resident_in(fn: Callable[..., Any]) -> Callable[[], Collection[int]]:
    """A function that returns the ids of the storages of a module's buffers."""
    owners = fn.modules() if isinstance(fn, torch.nn.Module) else ()
    holders = [module for module in owners if any(True for _ in module.buffers(recurse=False))]
    return lambda: {
        id(buffer.untyped_storage())
        for module in holders
        for buffer in module.buffers(recurse=False)
    }


def record_region(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    label: str,
    settings: RegionOptions,
) -> Any:
    """`recompute`, with a label for messages."""
    if not torch.compiler.is_compiling():
        return _record_region_eagerly(fn, args, kwargs, label, settings)
    if settings.offload is not None:  # copies run between the compiled parts
        eagerly: Any = torch.compiler.disable(_record_region_eagerly)
        return eagerly(fn, args, kwargs, label, settings)
    # The compiler knows torch's own region, and partitions the graph by it.
    if settings.context_fn is not None:
        kwargs = {**kwargs, "context_fn": settings.context_fn}
    return checkpoint(fn, *args, use_reentrant=False, **kwargs)


def _record_region_eagerly(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    label: str,
    settings: RegionOptions,
) -> Any:
    """Record one region, outside of torch.compile."""
    if not torch.is_grad_enabled() or in_transform():
        return fn(*args, **kwargs)
    engine = engine_of(settings.offload) if settings.offload else None
    context_fn = settings.context_fn
    call = Call(fn, args, kwargs)
    captured = Captured(call.fn, call.leaves)
    _refuse_cache(call, captured.modules, label)
    tensorless = TensorlessCall(call)
    tensors = tensorless.tensors
    tensorless.drop_tensors()
    pack = None
    if engine is not None:
        resident = settings.resident()
        pack = partial(engine.pack, names=tensorless.tensor_name, label=label, resident=resident)
    inputs = SavedInputs(tensors, tensorless.tensor_name, label, pack=pack)
    generators = (*captured.generators, *settings.generators)
    region = Region(
        lambda values: tensorless.run(tensorless.with_tensors(values)),
        inputs,
        AmbientState.now({tensor.device for tensor in tensors}, generators),
        ModuleState(captured),
        contexts=context_fn() if context_fn else None,
    )
    result = region.run(call)
    inputs.check(tensors)
    if engine is not None:
        engine.release_sent()
    return result


@uncompiled
def _refuse_cache(call: Call, modules: Iterable[torch.nn.Module], label: str) -> None:
    """Refuse a key-value cache of transformers in training: each run of the block would update it.

    Raises:
        RecomputeError: names the argument.
    """
    trained = [module for module in modules if module.training]
    if not trained or any(getattr(each, "_can_checkpoint_with_cache", False) for each in trained):
        return  # the block declares that it only reads the cache
    for n, leaf in enumerate(call.leaves):
        if callable(getattr(leaf, "get_seq_length", None)) and hasattr(leaf, "update"):
            raise RecomputeError(
                f"{label} is given a cache, {call.name(n)}, which would be filled again when "
                "backward recomputes it: call the model with use_cache=False (or set use_cache of "
                "its config to False)"
            )
