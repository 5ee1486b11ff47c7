"""`anyrank.tile`: run a function chunk by chunk along a dim, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from anyrank.checks import check_bool, check_function
from anyrank.errors import RecomputeError
from anyrank.memory.ambient_state import AmbientState, in_transform
from anyrank.memory.arguments import Call, TensorlessCall, flatten, name_of
from anyrank.memory.captured import Captured
from anyrank.memory.module_state import ModuleState
from anyrank.memory.region import Region, SavedInputs
from anyrank.memory.tile_checks import (
    SideResults,
    TileCountCheck,
    check_independence,
    check_tile_counts,
)
from anyrank.memory.tile_weights import WideWeights, check_grad_dtype, clone_view_grads
from anyrank.memory.tiling_dims import (
    JoinedResults,
    TakeTile,
    TiledArguments,
    Tiling,
    check_chunk_size,
    check_dims,
)
from anyrank.memory.uncompiled import uncompiled
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

    `fn` must be independent along the tiled dim, as an MLP is along the sequence: its result for
    one row may not depend on other rows. Only the arguments of a call are kept for backward, which
    runs `fn` again, tile by tile from the last to the first, so that one tile's intermediate
    tensors are alive at a time. Each tile is a region as of `recompute`, recorded in the caller's
    graph: each parameter gets one gradient, and each of its hooks fires once, under DDP and FSDP2
    alike. Inside a recomputed block, `fn` still runs twice per tile, not three times.

    Calls of at most `chunk_size` rows, and those under torch.func's transforms, are plain calls.
    Without gradients the tiles are plain calls.
    Ranks may have different numbers of tiles, unless `fn` runs collectives: then every rank must
    call with the same number. That is checked for modules whose parameters are sharded when they
    are called: `fn` itself before the call, modules that a function calls after its first tile.
    With FSDP2, put the tiles inside the unit, as `tile_` does.

    Args:
        chunk_size: rows of a tile; the last may have fewer. Best equal on all ranks and steps.
        in_dims: what is tiled: an int is the dim of the first argument (of all tensors in it), a
            tuple has one entry for each positional argument, a dict those of arguments by name. An
            entry is an int, None for an argument that is passed whole to each tile, or a nested
            structure of them.
        out_dims: the dim along which results are joined: an int for all results, or a structure
            like that of the results.
        grad_dtype: sum the weight gradients of the tiles in this dtype, and round once, at the
            end: for the parameters of a module `fn`, or of modules that a function captures. None
            sums in the dtype of the weights.
        check: at the first call with several tiles, compare one tile with the same rows of an
            untiled call, which needs the memory of that call without gradients once.

    Returns:
        A function of the arguments of `fn`.

    Raises:
        ValueError, TypeError: `chunk_size`, `in_dims`, `out_dims` or `grad_dtype` do not match the
            function or the call; with `check`, `fn` is not independent along the dim.
        RankError: from a call, on all ranks of a sharded module: the ranks have different numbers
            of tiles.
        RecomputeError: as of `recompute`.

    Example::

        mlp = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        x = torch.randn(2, 1000, 8, requires_grad=True)  # [batch, tokens, width]
        y = anyrank.tile(mlp, chunk_size=256)(x)  # 4 tiles along dim 1
        y.sum().backward()
    """
    return Tiled(fn, name_of(fn), chunk_size, in_dims, out_dims, grad_dtype, check)


class Tiled:
    """The function that `tile` returns."""

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
        check_function("fn", fn, "a function or a module")
        check_bool(check=check)
        check_chunk_size(chunk_size, "row")
        check_dims("out_dims", out_dims)
        check_grad_dtype(grad_dtype)
        self._label = f"tile({label})"
        self._arguments = TiledArguments(fn, in_dims, self._label)
        self._module = _module_of(self._arguments.fn)
        if grad_dtype is not None and not Captured(fn).modules:
            raise TypeError(
                f"grad_dtype needs the parameters of a module, and none was found in {label}: "
                "pass the module, or a function that captures it, or leave grad_dtype out"
            )
        self._chunk_size = chunk_size
        self._out_dims = out_dims
        self._grad_dtype = grad_dtype
        self._check = check

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call, dims = self._arguments.call(args, kwargs)
        tiling = Tiling(call, dims, self._chunk_size, self._label)
        if self._module is not None:
            check_tile_counts(self._module, len(tiling.starts), self._label)
        else:
            call.fn = TileCountCheck(call.fn, len(tiling.starts), self._label)
        if len(tiling.starts) == 1 or (not torch.compiler.is_compiling() and in_transform()):
            return call()
        joined = JoinedResults(self._out_dims, tiling, self._label)
        if self._check:
            check_independence(call, tiling, self._out_dims, self._label)
            self._check = False
        if not torch.is_grad_enabled():
            side = SideResults(Captured(self._arguments.fn, call.leaves).modules)
            for k in range(len(tiling.starts)):
                leaves = tiling.tile(k, call.leaves)
                versions = versions_of(leaves)
                joined.add(k, call.run(leaves))
                self._check_unchanged(call, leaves, versions)
                side.check(self._label)
        elif not torch.compiler.is_compiling():
            self._record_region(call, tiling, joined)
        elif self._grad_dtype is not None:  # compiled, gradients are summed in the weights' dtype
            eagerly: Any = torch.compiler.disable(self._record_region)
            eagerly(call, tiling, joined)
        else:
            # The compiler knows torch's own region, and partitions the graph by it.
            region = functools.partial(checkpoint, call.run, use_reentrant=False)
            tiles = range(len(tiling.starts))
            return joined.cat([region(tiling.tile(k, call.leaves)) for k in tiles])
        return joined.result()

    def _record_region(self, call: Call, tiling: Tiling, joined: JoinedResults) -> None:
        """Record each tile as a region. All share one set of inputs, saved before the first: an
        outer region that runs again for the inputs stops there.
        """
        tensorless = TensorlessCall(call)
        inputs = SavedInputs(tensorless.tensors, tensorless.tensor_name, self._label)
        tensors = tensorless.tensors
        tensorless.drop_tensors()
        devices = {tensor.device for tensor in tensors}
        captured = Captured(self._arguments.fn, call.leaves)
        weights = None
        if self._grad_dtype is not None:
            weights = WideWeights(captured.modules, call.fn, self._grad_dtype)
        side = SideResults(captured.modules)
        state = None
        chains = list(call.leaves)
        for k in range(len(tiling.starts)):
            again = functools.partial(_run_again, tensorless, tiling, k)
            state = ModuleState(captured, state)
            region = Region(
                again, inputs, AmbientState.now(devices, captured.generators), state, reader=k
            )
            leaves = take(chains, tiling, k)
            versions = versions_of(leaves)
            args, kwargs = call.arguments(leaves)
            if weights is None:
                first = functools.partial(call.fn, *args, **kwargs)
            else:
                first = functools.partial(weights.call, k == 0, args, kwargs)
            result = self._run_first(region, first)
            side.check(self._label)
            self._check_unchanged(call, leaves, versions)
            if weights is None and k == len(tiling.starts) - 1:
                clone_view_grads(flatten(result)[0], leaves)
            joined.add(k, result)
            inputs.check(tensors)
            del args, kwargs, first, leaves, result

    def _run_first(self, region: Region, first: Callable[[], Any]) -> Any:
        """Run a tile.

        Raises:
            RecomputeError: it changes a tile that autograd knows, which torch refuses in its words.
        """
        try:
            return region.run(first)
        except RuntimeError as error:
            if TakeTile.__name__ not in str(error):
                raise
            raise _changes(self._label, "an argument") from error

    @uncompiled
    def _check_unchanged(self, call: Call, leaves: list[Any], versions: list[int]) -> None:
        """Raises RecomputeError: the function changed a tile in place, which is lost in a copy."""
        for n, (now, before) in enumerate(zip(versions_of(leaves), versions, strict=True)):
            if now != before:
                raise _changes(self._label, call.name(n))


def _changes(label: str, what: str) -> RecomputeError:
    return RecomputeError(
        f"{label} changes {what} in place: clone the argument inside, or use the operation that "
        "returns a new tensor"
    )


@uncompiled
def versions_of(leaves: list[Any]) -> list[int]:
    return [version_of(leaf) if isinstance(leaf, torch.Tensor) else 0 for leaf in leaves]


@uncompiled
def take(chains: list[Any], tiling: Tiling, k: int) -> list[Any]:
    """The leaves of tile `k`; each chain advances by one link."""
    leaves = list(chains)
    for n, dim in enumerate(tiling.dims):
        if dim is not None:
            leaves[n], chains[n] = TakeTile.apply(
                chains[n], dim, tiling.starts[k], tiling.length(k)
            )
    return leaves


def _run_again(
    tensorless: TensorlessCall, tiling: Tiling, k: int, tensors: Sequence[torch.Tensor]
) -> Any:
    leaves = tiling.tile(k, tensorless.with_tensors(tensors))
    for n, dim in enumerate(tiling.dims):
        if dim is not None:  # a leaf, as in the first run it is not a view of a leaf
            leaves[n] = leaves[n].detach().requires_grad_(leaves[n].requires_grad)
    return tensorless.run(leaves)


def _module_of(fn: Callable[..., Any]) -> nn.Module | None:
    """The module that `fn` is, or of which it is a method."""
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None
