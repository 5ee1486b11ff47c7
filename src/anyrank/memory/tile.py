"""`anyrank.tile`: run a function piece by piece along a dimension, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from anyrank.errors import RecomputeError
from anyrank.memory.ambient_state import AmbientState
from anyrank.memory.arguments import Call, Emptied, flatten, name_of
from anyrank.memory.check_tile_counts import Agreed, check_tile_counts
from anyrank.memory.grad_accumulate import own_first_sums
from anyrank.memory.independence_check import compare_probe
from anyrank.memory.module_state import ModuleState, modules_in
from anyrank.memory.region import Region
from anyrank.memory.saved_inputs import Inputs
from anyrank.memory.side_results import SideResults
from anyrank.memory.tile_autograd import Take
from anyrank.memory.tiling_dims import Arguments, Cut, Joined
from anyrank.memory.uncompiled import uncompiled
from anyrank.memory.wide_weight_grads import Weights
from anyrank.tensors.sharded_tensor import version_of


def tile(
    fn: Callable[..., Any],
    *,
    chunk_size: int = 8192,
    in_dims: Any = 1,
    out_dims: Any = 1,
    grad_dtype: torch.dtype | None = None,
    check: bool = False,
) -> Callable[..., Any]:
    """Make a function that runs `fn` on tiles of its arguments and joins the results.

    `fn` has to be independent along the tiled dim, as an MLP is along the sequence: what it does to
    one row may not depend on the others. Of a call, the arguments are kept for backward and nothing
    else; backward runs `fn` again, tile by tile from the last to the first, so that one tile's
    intermediate tensors are alive at a time. Each tile is a region as of `recompute`, recorded in
    the caller's graph: parameters get one gradient, and each of their hooks fires once, under DDP
    and FSDP2 alike. Inside a recomputed block, `fn` still runs twice per tile, not three times.

    Calls of `chunk_size` rows or fewer, and empty ones, are plain calls. Without gradients the
    tiles are plain calls. Ranks may have different numbers of tiles, unless `fn` holds collectives:
    then every rank must call with the same number (modules whose parameters are sharded when they
    are called are checked for that: `fn` before the call, those that a function calls after its
    first tile). With FSDP2, put the tiles inside the unit: `tile_` does.

    Args:
        chunk_size: rows of a tile; the last may have fewer. Best a constant over ranks and steps.
        in_dims: what is tiled: an int is the dim of the first argument (of all tensors in it), a
            tuple has one entry for each positional argument, a dict those of arguments by name. An
            entry is an int, None for an argument that each tile gets whole, or a nested
            structure of them.
        out_dims: the dim along which results are joined; for several results one for all, or the
            same structure.
        grad_dtype: sum the weight gradients of the tiles in this dtype, and round once, at the
            end: those of a module's parameters, and of modules that a function captures. None sums
            in the dtype of the weights.
        check: at the first call with several tiles, compare one tile with the same rows of an
            untiled call, which needs the memory of that call without gradients once.

    Returns:
        A function of the arguments of `fn`.

    Raises:
        ValueError, TypeError: `chunk_size`, `in_dims`, `out_dims` or `grad_dtype` do not fit, from
            here or from a call; with `check`, `fn` is not independent along the dim.
        RankError: from a call, on all ranks of a sharded module: they have different numbers of
            tiles.
        RecomputeError: as of `recompute`.
    """
    return Tiled(fn, name_of(fn), chunk_size, in_dims, out_dims, grad_dtype, check)


class Tiled:
    """What `tile` returns."""

    def __init__(
        self,
        fn: Callable[..., Any],
        label: str,
        chunk_size: int,
        in_dims: Any,
        out_dims: Any,
        grad_dtype: torch.dtype | None,
        check: bool,
    ) -> None:
        if chunk_size < 1:
            raise ValueError(f"chunk_size={chunk_size}: a tile has at least one row")
        self.label = f"tile({label})"
        self.arguments = Arguments(fn, in_dims, self.label)
        self.module = module_of(self.arguments.fn)
        if grad_dtype is not None and not modules_in(fn):
            raise TypeError(
                f"grad_dtype needs a module, whose parameters it finds, and {label} shows none: "
                "pass the module, or a function that captures it, or leave grad_dtype out"
            )
        self.chunk_size = chunk_size
        self.out_dims = out_dims
        self.grad_dtype = grad_dtype
        self.check = check

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call, dims = self.arguments.call(args, kwargs)
        cut = Cut(call, dims, self.chunk_size, self.label)
        if self.module is not None:
            check_tile_counts(self.module, len(cut.starts), self.label)
        else:
            call.fn = Agreed(call.fn, len(cut.starts), self.label)
        if len(cut.starts) == 1:
            return call()
        joined = Joined(self.out_dims, cut, self.label)
        if self.check:
            compare_probe(call, cut, self.out_dims, self.label)
            self.check = False
        if not torch.is_grad_enabled():
            side = SideResults(modules_in(self.arguments.fn, call.leaves))
            for k in range(len(cut.starts)):
                leaves = cut.tile(k, call.leaves)
                versions = versions_of(leaves)
                joined.add(k, call.run(leaves))
                self.check_unchanged(call, leaves, versions)
                side.check(self.label)
        elif not torch.compiler.is_compiling():
            self.record(call, cut, joined)
        elif self.grad_dtype is not None:  # the compiler sums by its own rules
            eagerly: Any = torch.compiler.disable(self.record)
            eagerly(call, cut, joined)
        else:
            # The compiler knows torch's own region, and partitions the graph by it.
            region = functools.partial(checkpoint, call.run, use_reentrant=False)
            tiles = range(len(cut.starts))
            return joined.cat([region(cut.tile(k, call.leaves)) for k in tiles])
        return joined.result()

    def record(self, call: Call, cut: Cut, joined: Joined) -> None:
        """Record each tile as a region. All start from one set of inputs, packed before the first:
        a surrounding region that runs again for them stops there.
        """
        emptied = Emptied(call)
        inputs = Inputs(emptied.tensors, emptied.tensor_name, self.label)
        tensors = emptied.tensors
        emptied.forget()
        devices = {tensor.device for tensor in tensors}
        modules = modules_in(self.arguments.fn, call.leaves)
        weights = None
        if self.grad_dtype is not None:
            weights = Weights(modules, call.fn, self.grad_dtype)
        side = SideResults(modules)
        state = None
        chains = list(call.leaves)
        for k in range(len(cut.starts)):
            again = functools.partial(run_again, emptied, cut, k)
            state = ModuleState(modules, state)
            region = Region(again, inputs, AmbientState.now(devices, ()), state, reader=k)
            leaves = take(chains, cut, k)
            versions = versions_of(leaves)
            args, kwargs = call.arguments(leaves)
            if weights is None:
                first = functools.partial(call.fn, *args, **kwargs)
            else:
                first = functools.partial(weights.call, k == 0, args, kwargs)
            result = region.run(first)
            side.check(self.label)
            self.check_unchanged(call, leaves, versions)
            if weights is None and k == len(cut.starts) - 1:
                own_first_sums(flatten(result)[0], leaves)
            joined.add(k, result)
            inputs.check(tensors)
            del args, kwargs, first, leaves, result

    @uncompiled
    def check_unchanged(self, call: Call, leaves: list[Any], versions: list[int]) -> None:
        """Raises RecomputeError: the function has changed a tile, of which the caller sees nothing
        where it is a copy.
        """
        for n, (now, before) in enumerate(zip(versions_of(leaves), versions, strict=True)):
            if now != before:
                raise RecomputeError(
                    f"{self.label} changes {call.name(n)} in place: clone the argument inside, or "
                    "use the operation that returns a new tensor"
                )


@uncompiled
def versions_of(leaves: list[Any]) -> list[int]:
    return [version_of(leaf) if isinstance(leaf, torch.Tensor) else 0 for leaf in leaves]


@uncompiled
def take(chains: list[Any], cut: Cut, k: int) -> list[Any]:
    """The leaves of tile `k`, taken from the chains, which move on by one link."""
    leaves = list(chains)
    for n, dim in enumerate(cut.dims):
        if dim is not None:
            leaves[n], chains[n] = Take.apply(chains[n], dim, cut.starts[k], cut.length(k))
    return leaves


def run_again(emptied: Emptied, cut: Cut, k: int, tensors: Sequence[torch.Tensor]) -> Any:
    leaves = cut.tile(k, emptied.filled(tensors))
    for n, dim in enumerate(cut.dims):
        if dim is not None:  # a leaf of its own, as the first time it was no view of a leaf
            leaves[n] = leaves[n].detach().requires_grad_(leaves[n].requires_grad)
    return emptied.run(leaves)


def module_of(fn: Callable[..., Any]) -> nn.Module | None:
    """The module that a function is, or is a method of."""
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None
