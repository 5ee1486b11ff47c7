"""`anyrank.recompute`: run a function without keeping its intermediate tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from anyrank.checks import check_function
from anyrank.memory.ambient import Ambient, in_transform
from anyrank.memory.caches import without_caches
from anyrank.memory.call import Call, function_name, unwrap
from anyrank.memory.generators import as_sources, source_of
from anyrank.memory.offload import Offload, get_engine
from anyrank.memory.region import Contexts, SavedInputs, record_region, uncompiled
from anyrank.memory.used_modules import UsedModules
from anyrank.memory.written import WrittenArguments
from anyrank.training.random_state.generators import Source

T = TypeVar("T")

# As keyword arguments they would be passed to the function, which may silently accept them.
TORCH_OPTIONS = frozenset({"use_reentrant", "preserve_rng_state", "determinism_check"})


def recompute(
    fn: Callable[..., T],
    /,
    *args: Any,
    offload: Offload | None = None,
    context_fn: Callable[[], Contexts] | None = None,
    generators: Iterable[Any] = (),
    **kwargs: Any,
) -> T:
    """Call `fn(*args, **kwargs)`, and keep only its arguments for backward, which runs it again.

    This is activation checkpointing. Each backward pass runs `fn` again, up to the last tensor that
    backward needs, with torch's non-reentrant `checkpoint` around arguments that are saved once. No
    coordination between ranks is needed. The call is recorded in the caller's graph, so DDP and
    FSDP2 see each parameter once. Without gradients, and under torch.func's transforms, it is a
    plain call.

    The second run sees the same random state (of torch on the CPU, of the accelerator and the
    devices of all tensors among the arguments, and of `generators`), autocast settings and default
    device. Tensors in lists, tuples, dicts, types registered with pytree and `functools.partial`
    are recomputed by an outer region and moved by an offload. Tensors in other containers, and
    tensors that the function captures, are not. Objects of other classes are the same in both runs:
    changes that the first run made to them are undone during the second. KV caches of transformers
    models are replaced by None in both runs, and `use_cache` by False, with one warning.

    Nothing that `fn` captures may change before its backward: if a captured tensor, index, list or
    flag has a different value by then, gradients are silently wrong. Pass values that change as
    arguments.

    Args:
        fn: a function or module that does the same when called again: it changes no state that it
            reads, and no argument in place.
        offload: moves the arguments to host memory until backward.
        context_fn: a function that returns two contexts, one for the first run and one for later
            runs, such as `torch.utils.checkpoint.create_selective_checkpoint_contexts`.
        generators: random generators (of torch, of numpy, `random.Random`) that `fn` uses, besides
            those that are arguments; the modules `random` and `numpy.random` stand for their global
            generators.

    Returns:
        The results of `fn`.

    Raises:
        TypeError: `fn` is not a function; an option has the wrong type, or is an option of torch's
            `checkpoint` (`use_reentrant`).
        RecomputeError: `fn` changed an argument or a parameter in place; a cache among the
            arguments already contains tokens. From backward: an argument or a parameter was changed
            after the call, or a variable now holds a different module.
        torch.utils.checkpoint.CheckpointError: from backward: `fn` saved different tensors when
            called again.
        MemoryError: the system has too little host memory for the offload.

    Example::

        block = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        x = torch.randn(4, 8, requires_grad=True)
        y = anyrank.recompute(block, x)
        y.sum().backward()
    """
    check_function("fn", fn, "a function or a module")
    if foreign := TORCH_OPTIONS.intersection(kwargs):
        raise TypeError(
            f"{min(foreign)} is an option of torch's checkpoint, not of recompute. Remove it: "
            "recompute is never reentrant, restores random states, and checks what the second run "
            "saves"
        )
    options = RegionOptions(offload, context_fn, as_sources(generators))
    if offload is not None and isinstance(fn, torch.nn.Module):
        options.leave_buffers_of(fn)
    return run_region(fn, args, kwargs, function_name(fn), options)


@dataclass
class RegionOptions:
    """The options of `recompute`, and two facts about modules.

    `holders` are the modules whose buffers an offload must not move; `cache_readers` are the
    names of modules that only read their cache.
    """

    offload: Offload | None
    context_fn: Callable[[], Contexts] | None
    generators: tuple[Source, ...]
    holders: Sequence[torch.nn.Module] = ()
    cache_readers: Collection[str] = ()

    def __post_init__(self) -> None:
        offload: Any = self.offload
        if offload is not None and not isinstance(offload, Offload):
            raise TypeError(
                f"offload={offload!r}: expected an anyrank.Offload, got {type(offload).__name__}"
            )
        if self.context_fn is not None and not callable(self.context_fn):
            raise TypeError(
                f"context_fn={self.context_fn!r}: expected a function that returns two contexts, "
                "such as torch.utils.checkpoint.create_selective_checkpoint_contexts, got "
                f"{type(self.context_fn).__name__}"
            )

    def leave_buffers_of(self, module: torch.nn.Module) -> None:
        """Let an offload keep the buffers of a module and its submodules on the device."""
        parts = module.modules()
        self.holders = [part for part in parts if any(True for _ in part.buffers(recurse=False))]

    def resident(self) -> set[int]:
        """Return the ids of the current storages of these buffers."""
        buffers = (buffer for part in self.holders for buffer in part.buffers(recurse=False))
        return {id(buffer.untyped_storage()) for buffer in buffers}


def run_region(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    label: str,
    options: RegionOptions,
) -> Any:
    """Run `recompute` with a label for messages."""
    if not torch.compiler.is_compiling():
        return _run_eagerly(fn, args, kwargs, label, options)
    if options.offload is not None:  # its copies run between the compiled parts
        eagerly: Any = torch.compiler.disable(_run_eagerly)
        return eagerly(fn, args, kwargs, label, options)
    if torch.is_grad_enabled():
        fn, args, kwargs = unwrap(fn, args, kwargs)
        args, kwargs = without_caches(fn, args, kwargs, label, label in options.cache_readers)
    # The compiler knows torch's own region, and partitions the graph by it.
    if options.context_fn is not None:
        kwargs = {**kwargs, "context_fn": options.context_fn}
    return checkpoint(fn, *args, use_reentrant=False, **kwargs)


@uncompiled
def _run_eagerly(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    label: str,
    options: RegionOptions,
) -> Any:
    if not torch.is_grad_enabled() or in_transform():
        return fn(*args, **kwargs)
    fn, args, kwargs = unwrap(fn, args, kwargs)
    args, kwargs = without_caches(fn, args, kwargs, label, label in options.cache_readers)
    call = Call(fn, args, kwargs)
    used = UsedModules(call.fn, call.leaves, label)
    sources = (source for leaf in call.leaves if (source := source_of(leaf)) is not None)
    ambient = Ambient({tensor.device for tensor in call.tensors}, (*sources, *options.generators))
    pack = None
    engine = get_engine(options.offload) if options.offload else None
    if engine is not None:
        resident = options.resident()
        pack = partial(engine.pack, names=call.tensor_name, label=label, resident=resident)
    first_run = partial(call.fn, *call.args, **call.kwargs)
    written = WrittenArguments(call, label)
    inputs = SavedInputs(call, label, pack)

    def again(tensors: list[torch.Tensor]) -> Any:
        with written.restored():
            return call.run(call.filled(tensors))

    result = record_region(
        first_run,
        again,
        inputs,
        ambient,
        used,
        context_fn=options.context_fn,
    )
    inputs.check_first_run()
    written.end_first_run()
    if engine is not None:
        engine.release_sent()
    return result
