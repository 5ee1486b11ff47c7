"""Objects with `state_dict()` and `load_state_dict()` as parts of the state: schedulers, loaders,
scalers, trackers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from anyrank.errors import CheckpointError, CorruptCheckpoint
from anyrank.files.json_codec import from_json, to_json
from anyrank.files.listing import TensorFill
from anyrank.models.dtensors import as_sharded
from anyrank.runs.state.like_parameters import LikeParameters
from anyrank.runs.state.optimizer_groups import in_groups
from anyrank.runs.state.part_types import (
    PartMatch,
    PartSource,
    PartState,
    hold_to_save,
    in_line,
    layout_digest,
    other_class,
    own_name,
)
from anyrank.runs.state.resume_report import Outcome
from anyrank.tensors.sharded_tensor import ShardedTensor
from anyrank.training.steps.loader import ElasticLoader


@runtime_checkable
class Stateful(Protocol):
    """torch's protocol: schedulers, scalers, loaders and most trackers have it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def save_stateful(part: str, thing: Stateful, rank: int) -> PartState:
    """Return the contribution of a stateful object to a save. This rank's view.

    Its plain tensors are saved with its record: once if every rank has the same record, otherwise
    for each rank.

    Raises:
        CheckpointError: a value is neither a tensor nor plain; the error names its key.
    """
    saved = PartState({}, agreement="per rank")

    def put(where: str, tensor: torch.Tensor) -> Any:
        sharded = hold_to_save(where, tensor.detach())
        if sharded.layout is None:
            sharded.name = own_name(where, rank)
            saved.own_tensors.append(sharded)
            return {"~rank": where}
        saved.tensors.append(sharded)
        return {"~whole": own_name(where, 0)}

    tree = to_json(thing.state_dict(), part, put)
    saved.record = {
        "kind": "stateful",
        "class": class_name(thing),
        "layout": layout_digest(saved.tensors),  # by the names that a resume gives them
        "tree": tree,
    }
    for sharded in saved.tensors:  # like plain ones: `diff` compares them by name
        sharded.name = own_name(sharded.name, 0)
        # Nothing keeps it the same: a tracker may average over the batches of its own rank.
        sharded.may_differ = True
    return saved


def match_stateful(
    part: str,
    thing: Any,
    record: Any,
    source: PartSource,
    rank: int,
    *,
    groups: Sequence[int | None] | None = None,
    parameters: LikeParameters | None = None,
) -> PartMatch:
    """Plan how to fill a stateful object, by its kind. Changes nothing.

    Args:
        part: its name in the state.
        thing: the object.
        record: its record in the checkpoint.
        source: the checkpoint.
        rank: number of this process.
        groups: for a scheduler whose optimizer has other groups than the checkpoint's: the saved
            group of each, or None for a new one.
        parameters: parameters of the state, as layouts for tensors that were DTensors and that the
            object does not have yet.

    Raises:
        CorruptCheckpoint: the record is not one that a save writes for such an object.
    """
    name = class_name(thing)
    if record["class"] != name:
        return PartMatch(Outcome("exact"), problems=[other_class(part, name, record["class"])])
    if isinstance(thing, ElasticLoader):
        return _match_loader(part, thing, record, source, rank)
    current: Any = thing.state_dict()
    # An empty state must not be loaded: some objects reject it.
    if record["tree"] == {} or not (record["tree"] or current):
        return PartMatch(Outcome("fresh", "it had no state when it was saved"))
    if groups is not None:
        record = record | {"tree": in_groups(record["tree"], current, groups)}
    if isinstance(thing, LRScheduler):
        return _match_schedule(part, thing, record, source, rank)
    if problem := _problem_with_ranks(part, record, source):
        return PartMatch(Outcome("exact"), problems=[problem])
    matched, _ = _plan_fill(part, thing, record, source, rank, parameters)
    return matched


def _match_schedule(
    part: str, schedule: LRScheduler, record: Any, source: PartSource, rank: int
) -> PartMatch:
    """Plan how to fill a scheduler: on another number of ranks with the first rank's state, because
    a save compares the rates, and only a plateau's metrics may have differed.
    """
    uses_first = "by_rank" in record and not source.same_ranks
    matched, tree = _plan_fill(part, schedule, record, source, 0 if uses_first else rank)
    if uses_first:
        reason = (
            f"its state differed between the {source.ranks} ranks that saved it, and the first "
            "rank's is used. Step it with a value that is the same on every rank (sync_dist, "
            "all_reduce)"
        )
        matched.outcome = Outcome("derived", reason)
    give = matched.commit

    def commit() -> None:
        give()
        # Only now is the scheduler at the step for which its function is called.
        if text := _changed_schedule(schedule, tree):
            reasons = [reason for reason in (matched.outcome.reason, text) if reason]
            matched.outcome = Outcome("derived", "; ".join(reasons))

    matched.commit = commit
    return matched


def _match_loader(
    part: str, loader: ElasticLoader, record: Any, source: PartSource, rank: int
) -> PartMatch:
    """Plan how to fill a loader, which checks itself whether a position matches its data."""
    if problem := _problem_with_ranks(part, record, source):
        return PartMatch(Outcome("exact"), problems=[problem])
    matched, tree = _plan_fill(part, loader, record, source, rank)
    try:
        loader.position.check_state_dict(tree)
    except CorruptCheckpoint:  # corruption is not a mismatch: an older step may be good
        raise
    except CheckpointError as error:
        matched.problems.append(f"{part}: {error}")
    return matched


def _problem_with_ranks(part: str, record: Any, source: PartSource) -> str:
    """Describe why a state that differed between ranks cannot continue on a different number."""
    if "by_rank" not in record or source.same_ranks:
        return ""
    return (
        f"{part}: a {record['class']} whose state differed between the {source.ranks} ranks that "
        "saved it cannot continue on a different number. Make its state independent of the rank "
        "(anyrank.ElasticLoader does that), or omit it with skip=[...]."
    )


def _plan_fill(
    part: str,
    thing: Stateful,
    record: Any,
    source: PartSource,
    rank: int,
    parameters: LikeParameters | None = None,
) -> tuple[PartMatch, Any]:
    """Plan the reads of an object's tensors. Return the plan, whose commit loads the state, and
    this state, with tensors that are filled before the commit.
    """
    matched = PartMatch(Outcome("exact"))
    own_rank = rank if "by_rank" in record else 0
    now = cache(lambda: tensors_now(part, thing))
    tensors: list[ShardedTensor] = []
    sharded: set[str] = set()  # tensors that were DTensors
    gathered: list[str] = []  # those that are whole on each rank, without a layout

    def take(entry: Mapping[str, str]) -> torch.Tensor:
        ((kind, written),) = entry.items()
        key = own_name(written, own_rank) if kind == "~rank" else written
        where = written.removesuffix(own_name("", 0))
        stored = source.listing.tensors[key]
        like = now().get(where)
        parameter = None
        if kind == "~whole" and record["layout"]:  # another tool has no layout: tensors are whole
            sharded.add(where)
        if like is None and where in sharded and parameters:
            parameter = parameters.find(where, stored.shape)
            if parameter is None:
                gathered.append(where)
        is_sharded = hasattr(like, "placements") and "by_rank" not in record
        # The object's current tensor determines the device: the object's code may never move it.
        if like is not None and (kind == "~whole" or is_sharded):
            tensor = torch.empty_like(like)
        elif parameter is not None:
            tensor = torch.empty_like(parameter, dtype=stored.dtype)
        else:
            device = None if like is None else like.device
            tensor = torch.empty(stored.shape, dtype=stored.dtype, device=device)
        target = as_sharded(where, tensor)
        tensors.append(target)
        matched.fills.append(TensorFill(target, stored, target.local(), source.listing))
        return tensor

    tree: Any = from_json(record["tree"], take)
    if gathered:
        title = "it has no tensors yet that show a layout, so these are whole on each rank"
        matched.outcome = Outcome("derived", in_line(title, gathered))
    elif sharded or any(tensor.layout for tensor in tensors):
        matched.outcome = source.outcome_for(record["layout"], layout_digest(tensors))
    matched.commit = lambda: _load_state(part, thing, tree)
    return matched, tree


def _changed_schedule(thing: LRScheduler, tree: Any) -> str:
    """Return a warning if the function of a LambdaLR, or of one in a schedule of schedules, gives
    another learning rate: it is not saved.

    Args:
        thing: object with its state.
        tree: that state.
    """
    inner: Any = getattr(thing, "_schedulers", ())
    for schedule, state in zip(inner, tree.get("_schedulers") or (), strict=False):
        if getattr(schedule, "last_epoch", 0) >= 0 and (text := _changed_schedule(schedule, state)):
            return text  # before it starts, a schedule has no rate
    if type(thing) is not LambdaLR or not isinstance(tree.get("_last_lr"), list):
        return ""
    step = thing.last_epoch
    try:
        factors = [function(step) for function in thing.lr_lambdas]
    except Exception:  # of the user's code, which its next step will raise
        return ""
    for saved, base, factor in zip(tree["_last_lr"], thing.base_lrs, factors, strict=False):
        rate = float(base * factor)
        if not math.isclose(saved, rate, rel_tol=1e-6, abs_tol=1e-12):
            return (
                f"its lambda returns a learning rate of {rate:g} at step {step}, but {saved:g} "
                "when the run was saved; a LambdaLR does not save its lambda"
            )
    return ""


def _load_state(part: str, thing: Stateful, tree: Any) -> None:
    """Load the state of an object.

    Raises:
        CheckpointError: its own code failed.
    """
    try:
        thing.load_state_dict(tree)
    except CheckpointError:
        raise
    except Exception as error:  # of the user's code
        raise CheckpointError(
            f"{part}: load_state_dict() of {type(thing).__name__} raised {type(error).__name__}: "
            f"{error}"
        ) from error


def class_name(thing: Any) -> str:
    """Return the name of an object's class; for a scheduler of schedulers with the classes of the
    inner ones, because each would silently take another's settings.
    """
    name = type(thing).__name__
    inner: Any = getattr(thing, "_schedulers", ()) if isinstance(thing, LRScheduler) else ()
    return f"{name}({', '.join(class_name(part) for part in inner)})" if inner else name


def tensors_now(part: str, thing: Stateful) -> dict[str, torch.Tensor]:
    """Return an object's current tensors by key, as layouts for the ones that a resume reads."""
    tensors: dict[str, torch.Tensor] = {}

    def put(where: str, tensor: torch.Tensor) -> None:
        tensors[where] = tensor.detach()

    to_json(thing.state_dict(), part, put)
    return tensors
