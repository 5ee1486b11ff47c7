"""`anyrank.tile`: run a function chunk by chunk along a dim, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from anyrank.checks import check_function
from anyrank.errors import RankError, RecomputeError
from anyrank.memory.ambient import Ambient, in_transform
from anyrank.memory.call import Call, find_module, function_name
from anyrank.memory.generators import source_of
from anyrank.memory.region import SavedInputs, record_region, uncompiled
from anyrank.memory.tile_weights import WideWeights, check_grad_dtype, with_own_gradients
from anyrank.memory.tiling_dims import (
    JoinedResults,
    TakeTile,
    TiledArguments,
    Tiling,
    check_chunk_size,
    check_dims,
)
from anyrank.memory.used_modules import UsedModules, used_modules
from anyrank.tensors.sharded_tensor import version_of
from anyrank.tensors.torch_classes import is_dtensor, is_fsdp2
from anyrank.tensors.walk import walk
from anyrank.wording import count


def tile(
    fn: Callable[..., Any],
    *,
    chunk_size: int = 8192,
    in_dims: Any = 1,
    out_dims: Any = 1,
    grad_dtype: torch.dtype | None = None,
) -> Callable[..., Any]:
    """Make a function that runs `fn` on tiles of its arguments and joins the results.

    `fn` must be independent along the tiled dim, like an MLP along the sequence: its result for one
    row must not depend on other rows. Only the arguments of a call are kept for backward, which
    runs `fn` again, tile by tile from the last to the first, so that only one tile's intermediate
    tensors are alive at a time. Each tile is a region as in `recompute`, recorded in the caller's
    graph: each parameter gets one gradient, and each of its hooks fires once, under DDP and FSDP2
    too. Inside a recomputed block, `fn` still runs twice per tile, not three times.

    Calls with at most `chunk_size` rows, and calls under torch.func's transforms, are plain calls.
    Without gradients the tiles are plain calls. Ranks may have different numbers of tiles, unless
    `fn` runs collectives: then every rank must run the same number. That is checked if `fn` is an
    FSDP2 unit or a module that contains one; it is not detected for a function that calls such a
    unit. Put the tiles inside the unit, like `tile_`.

    Args:
        chunk_size: rows per tile; the last may have fewer. Preferably the same on every rank and
            step.
        in_dims: what is tiled: an int is the dim of the first argument (of all tensors in it), a
            tuple has one entry for each positional argument, a dict maps names of arguments to
            entries. An entry is an int, None for an argument that is passed whole to each tile, or
            a nested structure of them.
        out_dims: the dim along which results are joined: an int for all results, or a structure
            like that of the results.
        grad_dtype: sum the weight gradients of the tiles in this dtype, and round once, at the
            end: for the parameters of a module `fn`, or of modules that a function captures. None
            sums in the dtype of the weights.

    Returns:
        A function of the arguments of `fn`.

    Raises:
        ValueError, TypeError: `chunk_size`, `in_dims`, `out_dims` or `grad_dtype` do not match the
            function or the call.
        RankError: from a call, on every rank of a sharded module: the ranks have different numbers
            of tiles.
        RecomputeError: as for `recompute`.

    Example::

        mlp = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        x = torch.randn(2, 1000, 8, requires_grad=True)  # [batch, tokens, width]
        y = anyrank.tile(mlp, chunk_size=256)(x)  # 4 tiles along dim 1
        y.sum().backward()
    """
    label = f"tile({function_name(fn)})"
    return Tiled(fn, label, chunk_size, in_dims, out_dims, grad_dtype)


class Tiled:
    """The function that `tile` returns.

    Args:
        fn: the function that runs on the tiles.
        label: the call, for messages.
        uses: the user's function if `fn` wraps it; the modules are taken from it.
        The others are as for `tile`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        label: str,
        chunk_size: int,
        in_dims: Any,
        out_dims: Any,
        grad_dtype: torch.dtype | None,
        *,
        uses: Callable[..., Any] | None = None,
    ) -> None:
        check_function("fn", fn, "a function or a module")
        check_chunk_size(chunk_size, "row")
        check_dims("out_dims", out_dims)
        check_grad_dtype(grad_dtype)
        self._label = label
        self._arguments = TiledArguments(fn, in_dims, label)
        self._uses = uses or self._arguments.fn
        if grad_dtype is not None and not used_modules(self._uses, self._arguments.values()):
            raise TypeError(
                "grad_dtype= needs the parameters of a module, but none was found in "
                f"{function_name(self._uses)}. Pass the module, or a function that captures it, or "
                "remove grad_dtype="
            )
        self._chunk_size = chunk_size
        self._out_dims = out_dims
        self._grad_dtype = grad_dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call, dims = self._arguments.call(args, kwargs)
        tiling = Tiling(call, dims, self._chunk_size, self._label)
        _check_tile_counts(self._uses, len(tiling.starts), self._label)
        if len(tiling.starts) == 1 or (not torch.compiler.is_compiling() and in_transform()):
            return call()
        joined = JoinedResults(self._out_dims, tiling, self._label)
        if not torch.is_grad_enabled():
            for k in range(len(tiling.starts)):
                leaves = tiling.tile(k, call.leaves)
                versions = _versions_of(leaves)
                joined.add(k, call.run(leaves))
                self._check_unchanged(call, leaves, versions)
        elif not torch.compiler.is_compiling():
            self._record(call, tiling, joined)
        elif self._grad_dtype is not None:  # compiled, gradients are summed in the weights' dtype
            eagerly: Any = torch.compiler.disable(self._record)
            eagerly(call, tiling, joined)
        else:
            # The compiler knows torch's own region, and partitions the graph by it.
            region = functools.partial(checkpoint, call.run, use_reentrant=False)
            tiles = range(len(tiling.starts))
            return joined.cat([region(tiling.tile(k, call.leaves)) for k in tiles])
        return joined.result()

    @uncompiled
    def _record(self, call: Call, tiling: Tiling, joined: JoinedResults) -> None:
        """Record each tile as a region. All regions share one set of inputs."""
        sources = (source_of(leaf) for leaf in call.leaves)
        generators = [source for source in sources if source is not None]
        ambient = Ambient({tensor.device for tensor in call.tensors}, generators)
        used = UsedModules(self._uses, call.leaves, self._label)
        wide = None
        if self._grad_dtype is not None:
            wide = WideWeights(used.modules, call.fn, self._grad_dtype)
        owner = None if _called_units(self._uses) else find_module(self._uses)
        chains = list(call.leaves)
        inputs = SavedInputs(call, self._label)
        for k in range(len(tiling.starts)):
            leaves = _cut_tile(chains, tiling, k)
            versions = _versions_of(leaves)
            first_run = functools.partial(call.run, leaves)
            if wide is not None:
                first_run = functools.partial(wide.call, k == 0, *call.arguments(leaves))
            elif owner is not None and k == len(tiling.starts) - 1:
                first_run = functools.partial(
                    with_own_gradients, owner, call.fn, *call.arguments(leaves)
                )
            again = functools.partial(_run_again, call, tiling, k)
            try:
                result = record_region(first_run, again, inputs, ambient, used, tile_index=k)
            except RuntimeError as error:
                if TakeTile.__name__ not in str(error):
                    raise
                # Torch raises this if a tile that is a view is changed in place.
                raise self._changes("an argument") from error
            self._check_unchanged(call, leaves, versions)
            if k == 0:
                _check_side_results(used.modules, self._label)
            joined.add(k, result)
            del first_run, leaves, result
        inputs.check_first_run()

    def _check_unchanged(self, call: Call, leaves: list[Any], versions: list[int]) -> None:
        """Raise RecomputeError if the function changed a tile in place, even if it is a copy."""
        for n, (now, before) in enumerate(zip(_versions_of(leaves), versions, strict=True)):
            if now != before:
                raise self._changes(call.name(n))

    def _changes(self, what: str) -> RecomputeError:
        return RecomputeError(
            f"{self._label} modifies {what} in place. Clone the argument inside the function, or "
            "use the out-of-place operation"
        )


def _versions_of(leaves: list[Any]) -> list[int]:
    return [version_of(leaf) if isinstance(leaf, torch.Tensor) else 0 for leaf in leaves]


def _cut_tile(chains: list[Any], tiling: Tiling, k: int) -> list[Any]:
    """Return the leaves of tile `k`; set each of `chains` to the source of the next tile."""
    leaves = list(chains)
    for n, dim in enumerate(tiling.dims):
        if dim is not None:
            leaves[n], chains[n] = TakeTile.apply(
                chains[n], dim, tiling.starts[k], tiling.length(k)
            )
    return leaves


def _run_again(call: Call, tiling: Tiling, k: int, tensors: Sequence[torch.Tensor]) -> Any:
    leaves = tiling.tile(k, call.filled(tensors))
    for n, dim in enumerate(tiling.dims):
        if dim is not None:  # a leaf here; in the first run it is not a view of a leaf
            leaves[n] = leaves[n].detach().requires_grad_(leaves[n].requires_grad)
    return call.run(leaves)


# -- checks: equal numbers of tiles on sharded ranks, side results --------------------------------


def _called_units(fn: Callable[..., Any]) -> list[nn.Module]:
    """Return the FSDP2 units that a module calls, except the unit whose own forward is tiled.

    That one is already gathered. A function that is not a module is not inspected.
    """
    module = find_module(fn)
    if module is None:
        return []
    units = [part for part in module.modules() if is_fsdp2(part)]
    return [unit for unit in units if unit is not module or fn is module]


def _check_tile_counts(fn: Callable[..., Any], number: int, label: str) -> None:
    """Compare the number of tiles on the ranks over which FSDP2 shards units that `fn` calls.

    Each tile gathers these units, so with different numbers the ranks would hang.

    Collective: every rank of the units' mesh must call it every time. If a rank skipped the
    comparison because its own number did not change, the other ranks would wait. The comparison
    runs on the CPU if the mesh's groups have a CPU backend, such as those of `init_process_group()`
    without arguments; otherwise it synchronizes with the device.

    Raises:
        RankError: the numbers differ.
    """
    if not dist.is_initialized() or torch.compiler.is_compiling():
        return
    meshes = {
        parameter.device_mesh: None
        for unit in _called_units(fn)
        for parameter in unit.parameters()
        if is_dtensor(parameter)
    }
    for mesh in meshes:
        groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
        on_hosts = all("cpu:" in dist.get_backend_config(group) for group in groups)
        bounds = torch.tensor([number, -number], device="cpu" if on_hosts else mesh.device_type)
        for group in groups:
            dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
        largest, minus_smallest = bounds.tolist()
        smallest = -minus_smallest
        if largest != smallest:
            raise RankError(
                f"{label}: this rank has {count(number, 'tile')}, but the ranks that share its "
                f"sharded parameters have between {smallest} and {largest}. Each tile gathers the "
                "parameters, so every rank must run the same number of tiles. Put the tiles inside "
                "the sharded unit (tile_ of the same module, or fully_shard of the module that "
                "calls it), or pad the input"
            )


def _check_side_results(modules: Iterable[nn.Module], label: str) -> None:
    """Check, after the first tile, that the function stores no tensors outside its results.

    Raises:
        ValueError: an attribute of a module holds a tensor with a graph; only the last tile's
            would survive.
    """
    seen = set[nn.Module]()
    for top in modules:
        for name, module in walk(top, "", seen):
            for key, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    _check_attribute(module, name, key, label)


def _check_attribute(module: nn.Module, name: str, key: str, label: str) -> None:
    # Torch's hooks for weight norm, spectral norm and pruning compute `weight` from the parameters
    # `weight_g`, `weight_orig`: these do not depend on the tile.
    if any(p.startswith(f"{key}_") for p, _ in module.named_parameters(recurse=False)):
        return
    attribute = f"{name}.{key}".removeprefix(".")
    raise ValueError(
        f"{label}: each tile stores a tensor with a gradient in the attribute {attribute}, and "
        "only the last one survives. Return the tensor as a result, tile an inner module that "
        "stores none (the experts, not their router), or use recompute"
    )
