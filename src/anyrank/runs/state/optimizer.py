"""An optimizer as a part of the state, read and written directly: by parameter name, with no step.

torch's own helpers run `step()` on an optimizer without state, which moves whatever is not scaled
by the learning rate, and drop what they do not know. Here absent state stays absent, state of any
shape and type is kept, and hyperparameters belong to the parameters and not to a group's index.

A tensor of the state has the layout of its parameter, is whole on each rank, or is different on
each rank; next to a plain parameter, a DTensor has its own layout (`TENSOR_TAGS` in `part_types`).
State that an optimizer keeps in attributes is not in torch's `state_dict()`: it is reported, and
not saved. An optimizer with its own `state_dict()` is saved through that
(`anyrank.runs.state.optimizer_own`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from anyrank.errors import CheckpointError
from anyrank.files.json_codec import from_json, to_json
from anyrank.files.listing import TensorFill
from anyrank.files.manifest import IMPLEMENTATION
from anyrank.models.allocation import device_for
from anyrank.models.dtensors import as_sharded, dtensor_like, placement_of
from anyrank.models.tensors import ModelTensor
from anyrank.runs.state.optimizer_groups import match_groups, without_parameter
from anyrank.runs.state.optimizer_own import (
    attribute_tensors,
    has_own_methods,
    match_own_methods,
    other_methods,
    other_order,
    overrides,
    save_own_methods,
)
from anyrank.runs.state.part_types import (
    PartMatch,
    PartSource,
    PartState,
    hold_to_save,
    layout_digest,
    other_class,
    other_names,
    own_name,
)
from anyrank.tensors.layout import Layout, local_shape
from anyrank.tensors.sharded_tensor import ShardedTensor
from anyrank.tensors.spec import StoredTensor
from anyrank.tensors.torch_classes import is_dtensor
from anyrank.world.device import rank_device

UNKNOWN = ""  # the class in the record of an optimizer that another tool saved
NOT_OPTIONS = ("params", "param_names")  # the checkpoint has these under other names
Names = Mapping[int, ModelTensor]  # id of a parameter -> the tensor of a module of the same state


def save_optimizer(part: str, optimizer: Optimizer, names: Names, rank: int) -> PartState:
    """Return an optimizer's contribution to a save. This rank's view; the ranks compare it.

    Args:
        part: its name in the state.
        optimizer: the optimizer as this rank holds it.
        names: names of its parameters.
        rank: number of this process.

    Raises:
        CheckpointError: a parameter belongs to no module of the state, or state cannot be saved.
    """
    parameters = _parameters(part, optimizer, names)  # raises for any optimizer
    if has_own_methods(optimizer):
        return save_own_methods(part, optimizer, _names_by_group(optimizer, names), rank)
    saved = PartState({})
    state = {
        name: to_json(
            optimizer.state[parameter],
            f"{part}.state.{name}",
            _putter(saved, names[id(parameter)], rank),
        )
        for parameter, name in parameters.items()
        if parameter in optimizer.state
    }
    put = _putter(saved, None, rank)
    groups = [
        {
            "params": members,
            "options": to_json(
                {key: value for key, value in group.items() if key not in NOT_OPTIONS},
                f"{part}.param_groups.{number}",
                put,
            ),
        }
        for number, (group, members) in enumerate(
            zip(optimizer.param_groups, _names_by_group(optimizer, names), strict=True)
        )
    ]
    others = {key: value for key, value in optimizer.state.items() if not torch.is_tensor(key)}
    extra = to_json(others, f"{part}.extra", put)
    saved.record = {
        "kind": "optimizer",
        "class": type(optimizer).__name__,
        "groups": groups,
        "state": state,
        "extra": extra,
        "layout": layout_digest(saved.tensors),
    }
    saved.unsaved = attribute_tensors(optimizer, [sharded.tensor for sharded in saved.tensors])
    return saved


def _parameters(part: str, optimizer: Optimizer, names: Names) -> dict[torch.Tensor, str]:
    named: dict[torch.Tensor, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise CheckpointError(
                    f"{part}: parameter {position} of group {number}, shape "
                    f"{list(parameter.shape)}, belongs to no module of the state. Pass its module "
                    "to TrainState, and make the optimizer after the model is wrapped or sharded."
                )
            named[parameter] = names[id(parameter)].name
    return named


def _names_by_group(optimizer: Optimizer, names: Names) -> list[list[str]]:
    """Return the names of the parameters in each group of an optimizer."""
    return [[names[id(p)].name for p in group["params"]] for group in optimizer.param_groups]


def _putter(
    saved: PartState, parameter: ShardedTensor | None, rank: int
) -> Callable[[str, torch.Tensor], Any]:
    """Return a function that keeps tensors of the state, with the layout of their parameter."""

    def put(where: str, tensor: torch.Tensor) -> Any:
        sharded = hold_to_save(where, tensor)
        layout = None if parameter is None else parameter.layout
        if parameter is not None and _is_part(where, sharded, parameter):
            sharded = ShardedTensor(
                where, sharded.tensor, parameter.shape, layout, parameter.coordinate
            )
        # Beside a sharded parameter a plain tensor belongs to this rank's shard, unless the ranks
        # find that theirs are equal; a number belongs to every rank.
        if parameter is not None and sharded.layout is None and layout and sharded.tensor.ndim:
            sharded.name = own_name(where, rank)
            saved.own_tensors.append(sharded)
            if _may_be_whole(sharded.tensor, parameter):
                saved.beside_shards[where] = sharded
            return {"~rank": [where, str(layout)]}
        saved.tensors.append(sharded)
        if sharded.layout is None:
            return {"~whole": [where, ""]}
        if parameter is not None and layout is None:
            return {"~laid": [where, str(sharded.layout)]}
        return {"~like" if sharded.layout == layout else "~whole": [where, str(sharded.layout)]}

    return put


def _may_be_whole(tensor: torch.Tensor, parameter: ShardedTensor) -> bool:
    """Return True if ranks with equal tensors may all hold the whole of it. Shards of an unused
    state, such as zeros, are equal too.
    """
    has_shape_of_share = tuple(tensor.shape) == parameter.local_shape
    return not has_shape_of_share or not bool((tensor == tensor.reshape(-1)[:1]).all())


def _is_part(where: str, sharded: ShardedTensor, parameter: ShardedTensor) -> bool:
    """Return True if plain state belongs, element by element, to a plain parameter that is a
    shard."""
    is_plain = parameter.layout is not None and not parameter.is_dtensor
    same = sharded.layout is None and sharded.tensor.shape == parameter.tensor.shape
    return is_plain and same and not _is_count(where)


def _is_count(where: str) -> bool:
    return where.rsplit(".", 1)[-1] == "step"


def match_optimizer(
    part: str, optimizer: Optimizer, record: Any, source: PartSource, names: Names, rank: int
) -> PartMatch:
    """Plan how to fill an optimizer. Changes nothing."""
    name = type(optimizer).__name__
    if has_own_methods(optimizer) and "opaque" in record:
        groups = _names_by_group(optimizer, names)
        matched = match_own_methods(part, optimizer, groups, record, source, rank)
        return _with_notes(matched, part, record)
    matched = PartMatch(source.outcome_for("", ""))
    if has_own_methods(optimizer) or "opaque" in record:
        # Only its own methods can read such a state.
        matched.problems.append(other_methods(part, name, record))
        return matched
    by_name = {name: p for p, name in _parameters(part, optimizer, names).items()}
    fresh: list[str] = []
    if not _has_same_groups(optimizer, record, names):
        fresh = match_groups(part, optimizer, record, names, source, matched)
    if not matched.problems:  # a problem of the groups already lists these
        matched.problems += without_parameter(part, record, source, by_name)
    if record["class"] not in (name, UNKNOWN):
        matched.problems.append(other_class(part, name, record["class"]))
    elif not matched.problems:
        matched.problems += _other_order(part, optimizer, record, by_name)
    if matched.problems:
        return matched
    allocator = _StateAllocator(source, matched, optimizer, rank, record.get("alike", ()))
    states = {
        key: from_json(tree, allocator.taker(names[id(by_name[key])], f"{part}.state.{key}"))
        for key, tree in record["state"].items()
        if key in by_name
    }
    take = allocator.taker(None, part)
    options = [dict(from_json(group["options"], take)) for group in record["groups"]]
    groups = range(len(options)) if matched.groups is None else matched.groups
    pairs = [
        (group, options[number])
        for group, number in zip(optimizer.param_groups, groups, strict=True)
        if number is not None
    ]
    extra = dict(from_json(record["extra"], take))
    matched.outcome = source.outcome_for(record["layout"], layout_digest(allocator.tensors))
    saved = dict.fromkeys(name for group in record["groups"] for name in group["params"])
    dropped = [name for name in saved if name not in by_name]
    title = "starts empty, because the checkpoint has no state for it"
    matched.outcome = other_names(title, fresh, dropped) or matched.outcome
    matched.commit = lambda: _put_state(optimizer, by_name, states, extra, pairs)
    return _with_notes(matched, part, record)


def _other_order(
    part: str, optimizer: Optimizer, record: Any, parameters: Mapping[str, torch.Tensor]
) -> list[str]:
    """Describe a different order of the parameters, if the state depends on it."""
    if not (keeps_one_vector(optimizer) and record["state"]):
        return []
    saved_order = [name for group in record["groups"] for name in group["params"]]
    reason = f"{type(optimizer).__name__} keeps one history over all parameters, in their order"
    return other_order(part, reason, saved_order, [*parameters])


def keeps_one_vector(optimizer: Optimizer) -> bool:
    """Return whether the first parameter's state is over all parameters, one after the other."""
    return any("LBFGS" in kind.__name__ for kind in type(optimizer).__mro__)


def _has_same_groups(optimizer: Optimizer, record: Any, names: Names) -> bool:
    """Return True if each group has the parameters that it had in the checkpoint."""
    own_groups = [{*members} for members in _names_by_group(optimizer, names)]
    return own_groups == [{*group["params"]} for group in record["groups"]]


def _with_notes(matched: PartMatch, part: str, record: Any) -> PartMatch:
    """Add a note on the tensors that the saved optimizer kept in attributes."""
    if unsaved := record.get("unsaved"):
        matched.notes.append(
            f"{part}: {', '.join(unsaved)} held tensors that state_dict() does not include, so "
            "they are not restored"
        )
    return matched


def _put_state(
    optimizer: Optimizer,
    parameters: Mapping[str, torch.Tensor],
    states: Mapping[str, Any],
    extra: Mapping[Any, Any],
    options: Sequence[tuple[dict[str, Any], dict[Any, Any]]],
) -> None:
    """Set the state of an optimizer.

    Args:
        optimizer: optimizer to fill.
        parameters: all of its parameters, by name.
        states: name of a parameter -> its state.
        extra: entries of its state that belong to no parameter.
        options: its groups, each with its new options.
    """

    def fill() -> None:
        # A parameter without state in the checkpoint had no step yet, and starts so again.
        for parameter in parameters.values():
            optimizer.state.pop(parameter, None)
        for name, state in states.items():
            optimizer.state[parameters[name]] = state
        optimizer.state.update(extra)

    fill()
    for group, saved in options:
        for key, value in saved.items():
            if key in IMPLEMENTATION and key in group:
                continue  # the script decides how it steps: a device may lack the other's kernel
            # In place, because a captured graph holds the tensor.
            if torch.is_tensor(value) and torch.is_tensor(group.get(key)):
                group[key].copy_(value)
            else:
                group[key] = value
    if overrides(optimizer, "load_state_dict"):
        # It may rebuild objects that depend on the state, and cast the state itself.
        optimizer.load_state_dict(optimizer.state_dict())
        fill()


# The placement of memory: plain, that of a parameter, or that on a DTensor's mesh.
_Placement = ModelTensor | tuple[Any, Sequence[Any]] | None


class _StateAllocator:
    """Allocates an optimizer's tensors in the optimizer's layout, or in the saved one.

    Args:
        source, matched, optimizer, rank: as for `match_optimizer`.
        identical: names of tensors that were identical and whole on every rank, beside shards of
            parameters.

    Attributes:
        tensors: tensors for which all ranks have memory.
    """

    def __init__(
        self,
        source: PartSource,
        matched: PartMatch,
        optimizer: Optimizer,
        rank: int,
        identical: Collection[str],
    ) -> None:
        self.source, self.matched, self.rank = source, matched, rank
        self.identical = frozenset(identical)
        self.state = optimizer.state
        self.tensors: list[ShardedTensor] = []
        self.counts_on_device = {
            id(parameter)
            for group in optimizer.param_groups
            if group.get("capturable") or group.get("fused")
            for parameter in group["params"]
        }
        self.meshes: dict[torch.device, Any] = {}  # with an empty DTensor on each

    def taker(self, parameter: ModelTensor | None, where: str) -> Callable[[Any], torch.Tensor]:
        """Return the function that allocates each tensor of a parameter's state, or of none's."""
        now: dict[str, torch.Tensor] = {}
        if parameter is not None and parameter.tensor in self.state:
            to_json(self.state[parameter.tensor], where, now.setdefault)
        return lambda entry: self._take(entry, parameter, now)

    def _take(
        self,
        entry: Mapping[str, list[str]],
        parameter: ModelTensor | None,
        now: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Allocate one tensor; if it cannot be placed, add that to the part's problems."""
        ((kind, (where, layout)),) = entry.items()
        is_identical, by_rank = where in self.identical, kind == "~rank"
        is_own = by_rank and not is_identical
        # The first rank has written what was identical on every rank.
        key = own_name(where, self.rank if is_own else 0) if by_rank else where
        stored = self.source.listing.tensors.get(key)
        same_layout = parameter is not None and str(parameter.layout) == layout
        try:
            if stored is None or (is_own and not (self.source.same_ranks and same_layout)):
                raise _Unplaced(
                    f"{where}: is not sharded like its parameter, and differed between the "
                    f"{self.source.ranks} ranks that saved it, so it can be resumed only on the "
                    "same number of ranks with the same layout. An optimizer that stores it as a "
                    "DTensor (DTensor.from_local) can be resumed on any number."
                )
            device, current = self._device(where, parameter), now.get(where)
            placement: _Placement = None
            if is_dtensor(current) and current.shape == stored.shape and not is_own:
                placement = current, current.placements  # the optimizer's own layout
            elif parameter is not None and parameter.layout is None:
                placement = self._as_saved(where, layout, device) if kind == "~laid" else None
            elif (
                parameter is not None
                and not is_own
                and not (is_identical or (current is not None and current.shape == stored.shape))
            ):
                placement = _by_parameter(parameter, kind, stored.shape, where, layout)
        except _Unplaced as error:
            self.matched.problems.append(str(error))
            return torch.empty(0, device="cpu")
        sharded = _hold(key, placement, stored.shape, self._dtype(stored, where, parameter), device)
        self.tensors += [] if by_rank else [sharded]
        self.matched.fills.append(TensorFill(sharded, stored, sharded.local(), self.source.listing))
        return sharded.tensor

    def _as_saved(self, where: str, layout: str, device: torch.device) -> _Placement:
        """Lay out a DTensor of a plain parameter as it was saved, over all ranks.

        Raises:
            _Unplaced: its mesh was not one axis of all ranks.
        """
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if not dist.is_initialized():
            return None
        parsed = re.fullmatch(r"(R|S(\d+)) on (\d+)", layout)
        if parsed is None or int(parsed[3]) != self.source.ranks:
            raise _Unplaced(
                f"{where}: was saved as a DTensor ({layout}), but its parameter is not sharded, so "
                "its mesh is unknown. Create the optimizer's state first (one optimizer step), "
                "then resume."
            )
        if device not in self.meshes:
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            empty = torch.empty(0, device=device)
            self.meshes[device] = DTensor.from_local(empty, mesh, [Replicate()], run_check=False)
        return self.meshes[device], [Shard(int(parsed[2])) if parsed[2] else Replicate()]

    def _dtype(
        self, stored: StoredTensor, where: str, parameter: ModelTensor | None
    ) -> torch.dtype:
        own_dtype = stored.dtype if parameter is None else parameter.dtype
        casts = self.source.casts and not _is_count(where) and stored.dtype.is_floating_point
        return own_dtype if casts and own_dtype.is_floating_point else stored.dtype

    def _device(self, where: str, parameter: ModelTensor | None) -> torch.device:
        """Return the parameter's device; for a step count only if a kernel reads it there."""
        if parameter is None:
            return torch.device("cpu")
        if _is_count(where) and id(parameter.tensor) not in self.counts_on_device:
            return torch.device("cpu")
        return device_for(parameter, rank_device())


class _Unplaced(Exception):
    """A tensor that cannot be placed; becomes a problem of the part."""


def _by_parameter(
    parameter: ModelTensor, kind: str, shape: tuple[int, ...], where: str, layout: str
) -> _Placement:
    """Return the placement of a tensor whose parameter is sharded.

    Raises:
        _Unplaced: the tensor does not show which part belongs to which rank.
    """
    tensor = parameter.tensor
    as_parameter: _Placement = (tensor, tensor.placements) if is_dtensor(tensor) else parameter
    if kind == "~like" and (shape == parameter.shape or layout == str(parameter.layout)):
        return as_parameter
    if kind == "~laid" and shape == parameter.shape:
        return as_parameter
    if layout:
        if is_dtensor(tensor):
            from torch.distributed.tensor import Replicate

            return tensor, [Replicate()] * tensor.device_mesh.ndim
        return None
    if _is_count(where) or (shape != parameter.shape and torch.Size(shape).numel() == 1):
        return None
    # Adafactor's row sums have size 1 where the parameter has columns: they are split like it.
    pairs = zip(shape, parameter.shape, strict=False)
    factored = len(shape) == len(parameter.shape) and all(a in (1, b) for a, b in pairs)
    if factored if is_dtensor(tensor) else shape == parameter.shape:
        return as_parameter
    raise _Unplaced(
        f"{where}: has shape {list(shape)}, but its parameter {list(parameter.shape)} is sharded "
        "now, so the part of each rank is unknown. Create the optimizer's state first (one "
        "optimizer step), then resume."
    )


def _hold(
    key: str,
    placement: _Placement,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> ShardedTensor:
    """Allocate a tensor in the layout of `placement`."""
    if placement is None:
        return as_sharded(key, torch.empty(shape, dtype=dtype, device=device))
    if isinstance(placement, ModelTensor):
        part = local_shape(shape, placement.layout, placement.coordinate)
        local = torch.empty(part, dtype=dtype, device=device)
        return ShardedTensor(key, local, shape, placement.layout, placement.coordinate)
    like, placements = placement
    mesh: Any = like.device_mesh
    layout = Layout(
        tuple(mesh.shape), tuple(placement_of(placement, "") for placement in placements)
    )
    local = torch.empty(
        local_shape(shape, layout, mesh.get_coordinate()), dtype=dtype, device=device
    )
    whole = torch.empty(shape, device="meta")
    tensor = dtensor_like(
        like, local, placements=placements, shape=whole.shape, stride=whole.stride()
    )
    return as_sharded(key, tensor)
