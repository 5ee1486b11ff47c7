"""An optimizer as a part of the state, read and written directly: by parameter name, with no step.

torch's own helpers run `step()` on an optimizer without state, which moves what is not scaled by
the learning rate, and drop what they do not know. Here absent state stays absent, state of any
shape and type is kept, and hyperparameters belong to the parameters rather than to a group's index.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from anyrank.errors import CheckpointError, CorruptCheckpoint
from anyrank.files.json_codec import from_json, to_json
from anyrank.files.listing import Fill
from anyrank.files.optimizer_numbers import IMPLEMENTATION
from anyrank.model.allocate import device_for
from anyrank.model.tensors import ModelTensor
from anyrank.state.opaque import (
    is_opaque,
    match_opaque,
    overrides,
    save_opaque,
)
from anyrank.state.optimizer_attributes import changed
from anyrank.state.optimizer_groups import (
    Names,
    are_regrouped,
    check_options,
    fit_groups,
)
from anyrank.state.part_types import (
    Matched,
    Saved,
    Stored,
    hold_to_save,
    layout_digest,
    listed,
    other_class,
    own_name,
)
from anyrank.state.report import Outcome
from anyrank.tensors.layout import Layout, local_shape
from anyrank.tensors.names import near
from anyrank.tensors.sharded_tensor import ShardedTensor, as_sharded, dtensor_like, placement_of
from anyrank.tensors.spec import StoredTensor
from anyrank.world.device import rank_device

log = logging.getLogger("anyrank.state")

UNKNOWN = ""  # the class in the record of an optimizer that another tool saved
NOT_OPTIONS = ("params", "param_names")  # named otherwise in the checkpoint
How = Literal["like", "replicated", "plain"]  # as its parameter, or whole on the same mesh, or so


def warn_of_copies(part: str, optimizer: Optimizer) -> None:
    """Warn, on the first rank, of sharded parameters that an optimizer leaves as they are.

    torch.view_as_real gives a replicated copy of a DTensor on several ranks.
    """
    if isinstance(optimizer, torch.optim.SGD):  # the only one of torch's that does without
        return
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if not (isinstance(parameter, DTensor) and parameter.is_complex()):
                continue
            is_sharded = any(isinstance(place, Shard) for place in parameter.placements)
            if is_sharded and parameter.device_mesh.size() > 1 and dist.get_rank() == 0:
                log.warning(
                    "%s: group %d has complex parameters that are sharded, of shape %s, and "
                    "torch's optimizers but SGD step a copy of these (torch.view_as_real), so the "
                    "step is lost: make them real, and call torch.view_as_complex in the forward, "
                    "or use DistributedDataParallel",
                    part,
                    number,
                    list(parameter.shape),
                )
                return


def save_optimizer(
    part: str, optimizer: Optimizer, names: Names, rank: int, before: Mapping[str, object]
) -> Saved:
    """What an optimizer contributes to a save. This rank's view; the ranks compare it.

    Args:
        part: its name in the state.
        optimizer: as this rank holds it.
        names: of its parameters.
        rank: this process's own.
        before: what its attributes held before it stepped.

    Raises:
        CheckpointError: a parameter that no module of the state has; state that cannot be saved.
    """
    if is_opaque(optimizer):
        _parameters(part, optimizer, names)
        return save_opaque(part, optimizer, rank)
    saved = Saved({})
    state: dict[str, Any] = {}
    for parameter, name in _parameters(part, optimizer, names).items():
        held = names[id(parameter)]
        if parameter in optimizer.state:
            put = _putter(saved, held, rank)
            state[name] = to_json(optimizer.state[parameter], f"{part}.state.{name}", put)
    groups: list[Any] = []
    for number, group in enumerate(optimizer.param_groups):
        where = f"{part}.param_groups.{number}"
        options = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
        put = _putter(saved, None, rank)
        members = [names[id(parameter)].name for parameter in group["params"]]
        groups.append({"params": members, "options": to_json(options, where, put)})
    others = {key: value for key, value in optimizer.state.items() if not torch.is_tensor(key)}
    extra = to_json(others, f"{part}.extra", _putter(saved, None, rank))
    saved.record = {
        "kind": "optimizer",
        "class": type(optimizer).__name__,
        "groups": groups,
        "state": state,
        "extra": extra,
        "layout": layout_digest(saved.tensors),
    }
    saved.steady = {held.name for held in saved.tensors}
    saved.unsaved = changed(optimizer, before, names)
    return saved


def _parameters(part: str, optimizer: Optimizer, names: Names) -> dict[torch.Tensor, str]:
    found: dict[torch.Tensor, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise CheckpointError(
                    f"{part}: parameter {position} of group {number}, shape "
                    f"{list(parameter.shape)}, belongs to no module of the state: pass its module "
                    "to TrainState, and make the optimizer after the model is wrapped or sharded"
                )
            found[parameter] = names[id(parameter)].name
    return found


def _putter(
    saved: Saved, parameter: ShardedTensor | None, rank: int
) -> Callable[[str, torch.Tensor], Any]:
    """Keeps tensors of the state, and says how each lies in terms of its parameter."""

    def put(where: str, tensor: torch.Tensor) -> Any:
        held = hold_to_save(where, tensor)
        layout = None if parameter is None else parameter.layout
        if parameter is not None and _is_part(where, held, parameter):
            held = ShardedTensor(where, held.tensor, parameter.shape, layout, parameter.coordinate)
        if held.layout is None and layout is not None and held.tensor.ndim:
            held.name = own_name(where, rank)
            saved.own.append(held)
            return {"~own": [where, str(layout)]}
        saved.tensors.append(held)
        if held.layout is None:
            return {"~plain": [where, ""]}
        return {"~like" if held.layout == layout else "~laid": [where, str(layout)]}

    return put


def _is_part(where: str, held: ShardedTensor, parameter: ShardedTensor) -> bool:
    """Whether plain state belongs, element by element, to a plain parameter that is a part."""
    is_plain = parameter.layout is not None and not parameter.is_dtensor
    same = held.layout is None and held.tensor.shape == parameter.tensor.shape
    return is_plain and same and not _is_count(where)


def _is_count(where: str) -> bool:
    return where.rsplit(".", 1)[-1] == "step"


def match_optimizer(
    part: str, optimizer: Optimizer, record: Any, stored: Stored, names: Names, rank: int
) -> Matched:
    """What fills an optimizer. Nothing is changed."""
    if is_opaque(optimizer) or "opaque" in record:
        if is_opaque(optimizer) and "opaque" in record:
            return match_opaque(part, optimizer, record, stored, rank)
        problem = other_class(part, type(optimizer).__name__, record["class"])
        return Matched(stored.moved("", ""), problems=[problem])
    matched = Matched(stored.moved("", ""))
    by_name = {name: p for p, name in _parameters(part, optimizer, names).items()}
    groups, fresh = fit_groups(part, optimizer, record, names, stored, matched.problems)
    matched.is_regrouped = are_regrouped(groups, len(record["groups"]))
    unknown = [name for name in record["state"] if name not in by_name]
    if unknown:
        shown = [f"{name}{near(name, list(by_name))}" for name in unknown]
        matched.problems.append(listed(f"{part}: has state for parameters it no longer has", shown))
    if record["class"] not in (type(optimizer).__name__, UNKNOWN):
        matched.problems.append(other_class(part, type(optimizer).__name__, record["class"]))
    if matched.problems:
        return matched
    states: dict[str, Any] = {}
    held_now: list[ShardedTensor] = []
    for name, tree in record["state"].items():
        taker = _Taker(stored, matched, names[id(by_name[name])], optimizer, rank)
        states[name] = from_json(tree, taker.take)
        held_now += taker.tensors
    other = _Taker(stored, matched, None, optimizer, rank)
    options = [_table(group["options"], other) for group in record["groups"]]
    pairs = [
        (group, options[number])
        for group, number in zip(optimizer.param_groups, groups, strict=True)
        if number is not None
    ]
    for number, (group, saved) in enumerate(pairs):
        matched.problems += check_options(f"{part}: group {number}", saved, group)
    extra = _table(record["extra"], other)
    matched.outcome = stored.moved(record["layout"], layout_digest([*held_now, *other.tensors]))
    unsaved = [f"{name}, of an attribute" for name in record.get("unsaved", ())]
    if fresh:
        matched.outcome = Outcome("derived", listed("fresh, as the checkpoint has none", fresh))
    elif unsaved:
        text = "not in torch's state_dict(), so it begins anew"
        matched.outcome = Outcome("derived", listed(text, unsaved))
    matched.commit = _NewState(optimizer, by_name, states, extra, pairs).commit
    return matched


@dataclass(frozen=True)
class _NewState:
    """What an optimizer gets.

    Attributes:
        optimizer: that gets it.
        parameters: all of its own, by name.
        states: name of a parameter -> its state.
        extra: entries of its state that belong to no parameter.
        options: its groups, each with the options that it gets.
    """

    optimizer: Optimizer
    parameters: dict[str, torch.Tensor]
    states: dict[str, Any]
    extra: dict[Any, Any]
    options: list[tuple[dict[str, Any], dict[Any, Any]]]

    def place(self) -> None:
        for parameter in self.parameters.values():
            self.optimizer.state.pop(parameter, None)
        for name, state in self.states.items():
            self.optimizer.state[self.parameters[name]] = state
        self.optimizer.state.update(self.extra)

    def commit(self) -> None:
        self.place()
        for group, saved in self.options:
            for key, value in saved.items():
                if key in IMPLEMENTATION and key in group:
                    continue
                if torch.is_tensor(value) and torch.is_tensor(group.get(key)):
                    group[key].copy_(value)
                else:
                    group[key] = value
        if overrides(self.optimizer, "load_state_dict"):
            # It may rebuild what hangs on the state, and cast the state itself.
            self.optimizer.load_state_dict(self.optimizer.state_dict())
            self.place()


def _table(tree: Any, taker: _Taker) -> dict[Any, Any]:
    value = from_json(tree, taker.take)
    if not isinstance(value, dict):
        raise CorruptCheckpoint(f"{str(tree)[:80]} is not the state_dict() of an optimizer")
    return cast("dict[Any, Any]", value)


class _Taker:
    """Memory for the tensors of one parameter's state, laid out like it where they were."""

    def __init__(
        self,
        stored: Stored,
        matched: Matched,
        parameter: ModelTensor | None,
        optimizer: Optimizer,
        rank: int,
    ) -> None:
        self.stored, self.matched = stored, matched
        self.parameter, self.optimizer, self.rank = parameter, optimizer, rank
        self.tensors: list[ShardedTensor] = []

    def take(self, table: Mapping[str, list[str]]) -> torch.Tensor:
        """Memory for one tensor; what cannot be placed becomes a problem of the part."""
        ((kind, (where, layout)),) = table.items()
        key = own_name(where, self.rank) if kind == "~own" else where
        saved = self.stored.listing.tensors.get(key)
        same_layout = self.parameter is not None and str(self.parameter.layout) == layout
        moved = not (self.stored.same_ranks and same_layout)
        if saved is None or (kind == "~own" and moved):
            self.matched.problems.append(
                f"{where}: each of {self.stored.ranks} ranks saved a tensor of its own, of another "
                "shape than its parameter: only as many ranks with the same layout can go on with "
                "it"
            )
            return torch.empty(0, device="cpu")
        how = self._how(kind, saved.shape, where, same_layout)
        if how is None:
            assert self.parameter is not None
            self.matched.problems.append(
                f"{where}: has shape {list(saved.shape)}, its parameter "
                f"{list(self.parameter.shape)} is sharded now: it does not say which part belongs "
                "to which rank"
            )
            return torch.empty(0, device="cpu")
        held = self._hold(key, how, saved.shape, self._dtype(saved, where), self._device(where))
        self.tensors += [] if kind == "~own" else [held]
        self.matched.fills.append(Fill(held, saved, held.local(), self.stored.listing))
        return held.tensor

    def _dtype(self, saved: StoredTensor, where: str) -> torch.dtype:
        mine = saved.dtype if self.parameter is None else self.parameter.dtype
        casts = self.stored.casts and not _is_count(where) and saved.dtype.is_floating_point
        return mine if casts and mine.is_floating_point else saved.dtype

    def _how(self, kind: str, shape: tuple[int, ...], where: str, same_layout: bool) -> How | None:
        """How a tensor lies in terms of its parameter; None where that is unknown."""
        parameter = self.parameter
        if parameter is None or parameter.layout is None or kind == "~own":
            return "plain"
        if kind in ("~like", "~laid"):
            is_like = kind == "~like" and (shape == parameter.shape or same_layout)
            whole: How = "replicated" if parameter.is_dtensor else "plain"
            return "like" if is_like else whole
        if _is_count(where) or (shape != parameter.shape and torch.Size(shape).numel() == 1):
            return "plain"
        pairs = zip(shape, parameter.shape, strict=False)
        factored = len(shape) == len(parameter.shape) and all(a in (1, b) for a, b in pairs)
        fits = factored if parameter.is_dtensor else shape == parameter.shape
        return "like" if fits else None

    def _hold(
        self, key: str, how: How, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> ShardedTensor:
        parameter = self.parameter
        if how == "plain" or parameter is None:
            return as_sharded(key, torch.empty(shape, dtype=dtype, device=device))
        if not parameter.is_dtensor:
            part = local_shape(shape, parameter.layout, parameter.coordinate)
            local = torch.empty(part, dtype=dtype, device=device)
            return ShardedTensor(key, local, shape, parameter.layout, parameter.coordinate)
        like: Any = parameter.tensor
        mesh, placements = like.device_mesh, like.placements
        if how == "replicated":
            placements = replicated(like)
        whole = torch.empty(shape, device="meta")
        rules = tuple(placement_of(placement, "") for placement in placements)
        layout = Layout(tuple(mesh.shape), rules)
        local = torch.empty(
            local_shape(shape, layout, mesh.get_coordinate()), dtype=dtype, device=device
        )
        tensor = dtensor_like(
            like, local, placements=placements, shape=whole.shape, stride=whole.stride()
        )
        return as_sharded(key, tensor)

    def _device(self, where: str) -> torch.device:
        """State lives with its parameter; a step count only where a kernel reads it."""
        if self.parameter is None:
            return torch.device("cpu")
        device = device_for(self.parameter, rank_device())
        if not _is_count(where):
            return device
        group = next(
            group
            for group in self.optimizer.param_groups
            if any(parameter is self.parameter.tensor for parameter in group["params"])
        )
        on_device = bool(group.get("capturable") or group.get("fused"))
        return device if on_device else torch.device("cpu")


def replicated(tensor: Any) -> Any:
    """Placements that keep a tensor whole on every rank of another one's mesh."""
    from torch.distributed.tensor import Replicate

    return tuple(Replicate() for _ in tensor.placements)
