"""A module as a part of the state: its tensors by name, and its frozen parts by hash."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anyrank.errors import CheckpointError, LoadError
from anyrank.files.listing import TensorFill
from anyrank.models.allocation import default_device, room_for
from anyrank.models.dialects.peft.merging import scales_differ, scaling_of
from anyrank.models.frozen_parts import frozen_parts
from anyrank.models.own_code import added_to_state_dict
from anyrank.models.replace import Replacement
from anyrank.models.tensors import ModelTensor, find_tensors, in_state_dict
from anyrank.runs.state.extra_state import match_extra_states, save_extra_states
from anyrank.runs.state.frozen import match_frozen, save_frozen
from anyrank.runs.state.part_types import (
    PartMatch,
    PartSource,
    PartState,
    check_has_bytes,
    in_line,
    layout_digest,
    misfits,
    other_names,
)
from anyrank.tensors.names import WRAPPERS
from anyrank.tensors.near_names import near
from anyrank.tensors.walk import walk
from anyrank.tensors.wrapped import packed_parts

ALL_ADAPTERS = "*"  # in place of names, if all adapters have the same scale


def targets_of(part: str, module: nn.Module, *, has_base: bool) -> list[ModelTensor]:
    """List every tensor of a module.

    Args:
        part: its name in the state.
        module: the module.
        has_base: whether the model's frozen parameters are not written, so that they may be
            quantized.

    Raises:
        CheckpointError: two tensors have the same name in a checkpoint; or the bytes of one cannot
            be located.
    """
    try:
        targets = find_tensors(module, with_packed=has_base and part == "model")
    except LoadError as error:  # its text on reading also holds for writing
        way_out = _way_out_by_base(module) if part == "model" and not has_base else ""
        raise CheckpointError(f"{error}{way_out}") from error
    count = Counter(target.name for target in in_state_dict(targets))
    doubled = sorted(name for name in count if count[name] > 1)
    if doubled:
        raise CheckpointError(in_line("several tensors of the model have the same name", doubled))
    return targets


def _way_out_by_base(module: nn.Module) -> str:
    """Return the end of an error's text if the frozen parameters of a module are quantized."""
    frozen = (p for p in module.parameters() if not p.requires_grad)
    if not any(packed_parts(parameter) for parameter in frozen):
        return ""
    return (
        ". To train adapters on a frozen quantized model, name its source as TrainState(base=...): "
        "then the run does not contain it."
    )


def save_module(
    part: str, module: nn.Module, targets: Sequence[ModelTensor], stepped: Container[int]
) -> PartState:
    """Return a module's contribution to a save. This rank's view; the ranks compare it.

    Args:
        part: its name in the state.
        module: the module as the ranks hold it.
        targets: all of its tensors.
        stepped: ids of parameters that only an optimizer of the state changes.

    Raises:
        CheckpointError: a tensor is on meta, sparse or quantized; some values are known only to
            the module's own code; or a frozen part was modified.
    """
    frozen, elsewhere = save_frozen(part, dict(frozen_parts(module)))
    written = [target for target in in_state_dict(targets) if target.frozen not in elsewhere]
    on_meta = [target.name for target in written if target.is_meta]
    if on_meta:
        raise CheckpointError(
            in_line(f"{part}: on the meta device, so these have no values to save", on_meta)
            + ". First load, materialize or resume."
        )
    _check_own_code(part, module)
    # Each rank updates a plain buffer, or an average that no optimizer steps, by itself: nothing
    # keeps these the same, so a difference does not prove that replicas have diverged.
    is_trained = part == "model" or any(id(target.tensor) in stepped for target in written)
    named = [_in_part(part, target) for target in written]
    for target in named:
        target.may_differ = not is_trained or (target.kind == "buffer" and target.layout is None)
        check_has_bytes(target.name, target.tensor)
    saved = PartState(None, [*named])
    saved.aliases = {f"{part}.{alias.name}": t.name for t in named for alias in t.registrations[1:]}
    layout, owners = layout_digest(named), _with_extra(module, elsewhere)
    extra: dict[str, Any] = {}
    if owners:
        extra = save_extra_states(part, owners, saved)
    saved.record = {"kind": "module", "layout": layout, "frozen": frozen, "extra": extra}
    if scales := _scales_of(targets):
        # Most adapters have the same scale for all of their layers.
        same = len({*scales.values()}) == 1
        saved.record["scales"] = {ALL_ADAPTERS: next(iter(scales.values()))} if same else scales
    return saved


def _scales_of(targets: Iterable[ModelTensor]) -> dict[str, float]:
    """Return the factor of each adapter by which PEFT multiplies it, and that no tensor holds."""
    scales = {target.name: scaling_of(target) for target in targets if target.adapter}
    return {name: scale for name, scale in scales.items() if scale is not None}


def _other_scales(part: str, targets: Iterable[ModelTensor], saved: dict[str, float]) -> list[str]:
    """Return the first adapter whose scale differs from the run's, though its tensors match."""
    for name, scale in _scales_of(targets).items():
        was = saved.get(name, saved.get(ALL_ADAPTERS, scale))
        if scales_differ(was, scale):
            return [
                f"{part}.{name}: its adapter is scaled by {scale:g}, but by {was:g} in the run. "
                "Make it with the LoraConfig of the run, or start a new run from its weights."
            ]
    return []


def _check_own_code(part: str, module: nn.Module) -> None:
    """Raise CheckpointError for values that only a module's own code adds to `state_dict()`."""
    added = added_to_state_dict(module)
    if added:
        raise CheckpointError(
            in_line(
                f"{part}: added to its state_dict() by its own code, not parameters or buffers",
                added,
            )
            + ". Register them as buffers, or use get_extra_state() and set_extra_state()."
        )


def _in_part(part: str, target: ModelTensor) -> ModelTensor:
    """Return a tensor of a part of the state, with its name in a checkpoint."""
    return replace(target, name=f"{part}.{target.name}")


def _with_extra(module: nn.Module, elsewhere: Collection[nn.Module]) -> list[tuple[str, nn.Module]]:
    """List the modules that have a state besides their tensors, by name without wrappers.

    Frozen parts that are saved `elsewhere` are omitted, with everything below them.
    """
    owners: list[tuple[str, nn.Module]] = []
    for raw, submodule in walk(module, "", {*elsewhere}):
        if type(submodule).get_extra_state is not nn.Module.get_extra_state:
            parts = [segment for segment in raw.split(".") if segment not in WRAPPERS]
            if isinstance(module, DistributedDataParallel):
                parts = parts[1:]
            owners.append((".".join(parts), submodule))
    return owners


def match_module(
    part: str, module: nn.Module, targets: list[ModelTensor], record: Any, source: PartSource
) -> PartMatch:
    """Plan how to fill a module with these `targets`, all of its tensors. Changes nothing."""
    device = default_device(targets)
    parts = dict(frozen_parts(module))
    problems, fills, commit_frozen = match_frozen(part, parts, record["frozen"], device)
    checked = {id(fill.target.tensor) for fill in fills}
    # The source of a frozen part has its tensors, and the checkpoint does not.
    elsewhere = [parts[name] for name in record["frozen"] if name in parts]
    wanted = [
        _in_part(part, target)
        for target in in_state_dict(targets)
        if target.frozen not in elsewhere and id(target.tensor) not in checked
    ]
    outcome = source.outcome_for(record["layout"], layout_digest(wanted))
    matched = PartMatch(outcome, fills, problems=problems)
    matched.problems += _other_scales(part, targets, record.get("scales", {}))
    fresh, dropped = _fit_tensors(part, wanted, device, source, matched)
    title = "kept, because the checkpoint does not have them"
    matched.outcome = other_names(title, fresh, dropped) or matched.outcome
    owners, restored = _with_extra(module, elsewhere), list[tuple[nn.Module, Any]]()
    if owners or record["extra"]:
        restored = match_extra_states(part, dict(owners), record["extra"], source, matched)

    def commit() -> None:
        # Real tensors were filled in place; those on meta are allocated now.
        for fill in fills:
            if isinstance(fill.target, ModelTensor) and fill.target.is_meta:
                Replacement(fill.target, fill.local).toggle()
        # After the tensors, because a module's code may read its own.
        for submodule, value in restored:
            submodule.set_extra_state(value)
        commit_frozen()  # last, because its digest counts tensors of the extra state

    matched.commit = commit
    matched.has_meta_buffers = any(
        target.is_meta and target.kind == "derived" for target in targets
    )
    return matched


def _fit_tensors(
    part: str,
    wanted: Sequence[ModelTensor],
    device: torch.device,
    source: PartSource,
    matched: PartMatch,
) -> tuple[list[str], list[str]]:
    """Pair tensors with the checkpoint's; add fills and problems to `matched`. Return the names
    that are missing and allowed, and the names of the checkpoint that are dropped.
    """
    stored = {k: t for k, t in source.listing.tensors.items() if k.startswith(f"{part}.")}
    missing: list[str] = []
    fresh: list[str] = []
    used: set[str] = set()
    # A copy that an adapter trains also has the name of its original.
    owners = {f"{part}.{registration.name}": t for t in wanted for registration in t.registrations}
    for target in wanted:
        names = [f"{part}.{name}" for name in target.flat_names()]
        names = [name for name in names if owners.get(name, target) is target]
        key = next((name for name in (target.name, *names) if name in stored), None)
        if key is None:
            name = target.name.removeprefix(f"{part}.")
            is_fresh = source.is_fresh(name) and not target.is_meta
            (fresh if is_fresh else missing).append(name)
            continue
        used.update({key, *names})  # all names of a tied tensor are one tensor of the checkpoint
        others = [stored[name] for name in names if name in stored]
        if any(other.chunks != stored[key].chunks for other in others):
            matched.problems.append(
                f"{target.name}: is one tensor in the model, but several in the checkpoint, which "
                f"may differ ({', '.join(other.name for other in others)}). Untie them."
            )
        problem = misfits(stored[key], target, part)
        if problem:
            matched.problems.append(problem)
            continue
        memory = room_for(target, device)
        matched.fills.append(TensorFill(target, stored[key], memory, source.listing))
    extra = [key.removeprefix(f"{part}.") for key in stored if key not in used]
    dropped = [name for name in extra if source.is_dropped(name)]
    extra = [name for name in extra if name not in dropped]
    if missing or extra:
        matched.problems += _other_tensors(part, missing, extra, source)
    return fresh, dropped


def _other_tensors(
    part: str, missing: list[str], extra: list[str], source: PartSource
) -> list[str]:
    """Describe the tensors that only the model or only the checkpoint has."""
    problems: list[str] = []
    if missing:
        shown = [f"{name}{near(name, extra)}" for name in missing]
        problems.append(in_line(f"{part}: missing from the checkpoint", shown))
        if any(source.is_fresh(name) for name in missing):
            problems.append(
                "fresh= keeps current values, but these tensors are on the meta device. Initialize "
                "them first."
            )
    if extra:
        shown = [f"{name}{near(name, missing)}" for name in extra]
        text = in_line(f"{part}: in the checkpoint, but not in the model", shown)
        problems.append(f"{text}. To ignore them, pass drop={extra[:1]!r}.")
    return problems
