"""A module as a part of the state: its tensors by name, and its frozen parts by hash."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anyrank.errors import CheckpointError
from anyrank.files.formats import list_source
from anyrank.loading.allocate import allocate, default_device, device_for, put_in_place
from anyrank.loading.freeze import check_frozen, frozen_parts, remember
from anyrank.loading.targets import Target, find_targets
from anyrank.resume.parts import Fill, Fitted, Saved, Stored, layout_digest, listed, misfits
from anyrank.resume.trees import from_json, to_json
from anyrank.tensors.held import hold
from anyrank.tensors.names import WRAPPERS, match, near


def targets_of(module: nn.Module) -> list[Target]:
    """Every tensor of a module that a checkpoint of it holds or checks.

    Raises:
        CheckpointError: two of them have one name.
    """
    targets = [target for target in find_targets(module) if target.kind != "derived"]
    names = [target.name for target in targets]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise CheckpointError(listed("several tensors of the model have one name", doubled))
    return targets


def save_module(part: str, module: nn.Module, stepped: Container[int]) -> Saved:
    """What a module brings to a save. This rank's view; the ranks compare it.

    Args:
        part: its name in the state.
        module: as the ranks hold it.
        stepped: ids of parameters that an optimizer of the state changes, and nobody else.

    Raises:
        CheckpointError: a tensor on meta, or two of one name.
        LoadError: a frozen part was written to; a tensor whose bytes cannot be placed.
    """
    frozen: dict[str, Any] = {}
    elsewhere: list[nn.Module] = []
    for name, inner in frozen_parts(module):
        check_frozen(inner)
        info: Any = inner.anyrank_frozen
        if info.source is not None and info.digest is not None:
            elsewhere.append(inner)
            frozen[name] = {"source": info.source, "digest": info.digest}
    targets = [t for t in targets_of(module) if t.frozen not in elsewhere]
    hollow = [target.name for target in targets if target.is_meta]
    if hollow:
        raise CheckpointError(
            listed(f"{part}: on meta, so there is nothing to save", hollow)
            + ": load, materialize or resume first"
        )
    aliases = {
        f"{part}.{place.names[min(1, len(place.names) - 1)]}": f"{part}.{target.name}"
        for target in targets
        for place in target.places[1:]
    }
    for target in targets:
        target.name = f"{part}.{target.name}"
    saved = Saved(None, [*targets], aliases=aliases)
    saved.steady = {target.name for target in targets if id(target.tensor) in stepped}
    saved.loose = {t.name for t in targets if t.kind == "buffer" and t.layout is None}
    layout = layout_digest(targets)
    extra = {name: _save_extra(part, name, one, saved) for name, one in _with_extra(module)}
    saved.record = {"kind": "module", "layout": layout, "frozen": frozen, "extra": extra}
    return saved


def _with_extra(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules with a state of their own beside their tensors, by name without wrappers."""
    found: list[tuple[str, nn.Module]] = []
    for raw, one in module.named_modules():
        if type(one).get_extra_state is not nn.Module.get_extra_state:
            parts = [segment for segment in raw.split(".") if segment not in WRAPPERS]
            if isinstance(module, DistributedDataParallel):
                parts = parts[1:]
            found.append((".".join(parts), one))
    return found


def _save_extra(part: str, name: str, module: nn.Module, saved: Saved) -> Any:
    def put(where: str, tensor: torch.Tensor) -> Any:
        saved.tensors.append(hold(where, tensor.detach()))
        return {"~tensor": where}

    return to_json(module.get_extra_state(), f"{part}@extra.{name}", put)


def fit_module(part: str, module: nn.Module, record: Any, stored: Stored) -> Fitted:
    """What fills a module. Nothing is changed."""
    every = find_targets(module)
    targets = targets_of(module)
    device = default_device(every)
    problems, fills = _frozen(part, module, record, device)
    checked = {id(fill.held.tensor) for fill in fills}
    elsewhere = set(record["frozen"])
    parts = dict(frozen_parts(module))
    apart = [parts[name] for name in elsewhere if name in parts]
    wanted = [t for t in targets if t.frozen not in apart and id(t.tensor) not in checked]
    saved = {k: t for k, t in stored.listing.tensors.items() if k.startswith(f"{part}.")}
    missing: list[str] = []
    used: set[str] = set()
    for target in wanted:
        names = [f"{part}.{name}" for place in target.places for name in place.names]
        key = next((name for name in (f"{part}.{target.name}", *names) if name in saved), None)
        if key is None:
            missing.append(target.name)
            continue
        used.update({key, *names})
        others = [saved[name] for name in names if name in saved]
        if any(other.chunks != saved[key].chunks for other in others):
            problems.append(
                f"{part}.{target.name}: is one tensor here, and was several in the checkpoint, "
                f"which may differ ({', '.join(one.name for one in others)}): untie them"
            )
        problem = misfits(saved[key], target)
        if problem:
            problems.append(f"{part}.{problem}")
            continue
        fills.append(Fill(target, saved[key], _memory(target, device), stored.listing))
    extra = [key.removeprefix(f"{part}.") for key in saved if key not in used]
    if missing:
        shown = [f"{name}{near(name, extra)}" for name in missing]
        problems.append(listed(f"{part}: not in the checkpoint", shown))
    if extra:
        shown = [f"{name}{near(name, missing)}" for name in extra]
        problems.append(listed(f"{part}: in the checkpoint, and not in the model", shown))

    restored, wrong = _fit_extra(part, module, record, stored, fills)
    problems += wrong

    def commit() -> None:
        for fill in fills:
            if isinstance(fill.held, Target) and fill.held.is_meta:
                put_in_place(fill.held, fill.local)
        for name, inner in parts.items():
            remember(inner)
            _compare_digest(part, name, inner, record)
        for one, value in restored:
            one.set_extra_state(value)

    for target in wanted:  # the layout's hash goes by the names in the checkpoint
        target.name = f"{part}.{target.name}"
    outcome = stored.moved(record["layout"], layout_digest(wanted))
    hollow = any(target.is_meta and target.kind == "derived" for target in every)
    return Fitted(outcome, fills, commit, problems, hollow)


def _fit_extra(
    part: str, module: nn.Module, record: Any, stored: Stored, fills: list[Fill]
) -> tuple[list[tuple[nn.Module, Any]], list[str]]:
    """Modules with the extra state that they are to have, and what is wrong with that."""
    here, problems = dict(_with_extra(module)), list[str]()

    def take(table: Any) -> torch.Tensor:
        saved = stored.listing.tensors[table["~tensor"]]
        held = hold(saved.name, torch.empty(saved.shape, dtype=saved.dtype))
        fills.append(Fill(held, saved, held.tensor, stored.listing))
        return held.tensor

    saved: dict[str, Any] = record["extra"]
    for title, names in (
        (f"{part}: extra state that the checkpoint does not hold", here.keys() - saved.keys()),
        (f"{part}: extra state of modules that are not in the model", saved.keys() - here.keys()),
    ):
        if names:
            problems.append(listed(title, sorted(names)))
    both = [name for name in saved if name in here]
    return [(here[name], from_json(saved[name], take)) for name in both], problems


def _memory(target: Target, device: torch.device) -> torch.Tensor:
    if target.is_meta:
        return allocate(target, device_for(target, device))
    return target.local()


def _frozen(
    part: str, module: nn.Module, record: Any, device: torch.device
) -> tuple[list[str], list[Fill]]:
    """Frozen parts whose weights are elsewhere: compared by hash, or filled from their source."""
    problems: list[str] = []
    fills: list[Fill] = []
    parts = dict(frozen_parts(module))
    for name, known in record["frozen"].items():
        inner: Any = parts.get(name)
        if inner is None:
            problems.append(
                f"{part}.{name}: was frozen with source {known['source']} when it was saved, and "
                "is not frozen now: anyrank.freeze() it with that source before resuming"
            )
            continue
        info = inner.anyrank_frozen
        if info.digest is not None:
            if info.digest != known["digest"]:
                problems.append(_digest_differs(part, name, known, info.digest))
            continue
        listing = list_source(info.source or known["source"])
        targets = [target for target in find_targets(inner) if target.kind != "derived"]
        found = match([target.wanted() for target in targets], listing.tensors, lambda key: key)
        if found.missing:
            names = [targets[index].name for index in found.missing]
            problems.append(listed(f"{part}.{name}: not in its source", names))
            continue
        for index, key in found.keys.items():
            target, saved = targets[index], listing.tensors[key]
            problem = misfits(saved, target)
            if problem:
                problems.append(f"{part}.{name}.{problem} (its source)")
                continue
            fills.append(Fill(target, saved, _memory(target, device), listing))
    return problems, fills


def _compare_digest(part: str, name: str, inner: Any, record: Any) -> None:
    known, digest = record["frozen"].get(name), inner.anyrank_frozen.digest
    if known is not None and digest is not None and digest != known["digest"]:
        raise CheckpointError(_digest_differs(part, name, known, digest))


def _digest_differs(part: str, name: str, known: Any, digest: str) -> str:
    return (
        f"{part}.{name}: is frozen, and was {known['digest']} when it was saved (source "
        f"{known['source']}), but is {digest} now: freeze the weights that the run was trained with"
    )
