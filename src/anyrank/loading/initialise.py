"""First values by the model's own rules, the same on any number of ranks.

A rule runs on a stand-in of the module in which only the wanted tensor is real and whole; its
random numbers are seeded by the run's seed and the tensor's name. So values do not depend on the
number of ranks, on the order of tensors, or on which others are wanted, and a rank needs one whole
tensor at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn

from anyrank.errors import LoadError
from anyrank.loading.targets import Place, Target, plain_class

Rule = tuple[str, nn.Module, Callable[[Any], object]]  # name, what to stand in for, what to call
Init = Callable[[nn.Module], object]
SENTINEL = -77  # for integers, which have no NaN


def initialise(
    target: Target, local: torch.Tensor, seed: int, init: Init | None = None
) -> str | None:
    """Fill this rank's share of a target by the first rule that writes all of it.

    Args:
        target: the tensor.
        local: memory of this rank's share.
        seed: the same on all ranks.
        init: a rule of the user's, called with the (stand-in) module that owns the tensor.

    Returns:
        The rule's name, or None when no rule writes the tensor.
    """
    if 0 in target.shape:
        return "nothing to fill"
    for place in target.places:
        for name, root, call in _rules(place, init):
            value = _run(target, place, root, call, seed, local.device)
            if value is not None:
                for piece in target.pieces:
                    slices = tuple(
                        slice(o, o + n) for o, n in zip(piece.local, piece.box.sizes, strict=True)
                    )
                    local[slices].copy_(value[piece.box.slices()])
                return name
    return None


def _rules(place: Place, init: Init | None) -> Iterator[Rule]:
    """The rules that may fill a place, the most specific first."""
    owner = place.module
    if init is not None:
        yield getattr(init, "__qualname__", str(init)), owner, init
        return
    for module in reversed(place.path):
        if hasattr(module, "reset_lora_parameters"):
            yield from _lora_rule(place, module)
    for module in reversed(place.path):
        if hasattr(module, "_init_weights"):
            rule: Any = module._init_weights
            yield f"{_class_name(module)}._init_weights", owner, rule
    if hasattr(owner, "reset_parameters"):
        yield (
            f"{_class_name(owner)}.reset_parameters",
            owner,
            lambda stand_in: stand_in.reset_parameters(),
        )
    if hasattr(owner, "_reset_parameters"):
        yield (
            f"{_class_name(owner)}._reset_parameters",
            owner,
            lambda stand_in: stand_in._reset_parameters(),
        )
    for module in reversed(place.path):
        if hasattr(module, "init_weights"):
            yield (
                f"{_class_name(module)}.init_weights",
                module,
                lambda stand_in: stand_in.init_weights(),
            )


def _lora_rule(place: Place, layer: nn.Module) -> Iterator[Rule]:
    """PEFT's own rule for the adapter that a place belongs to, unless it was told to do nothing.

    Raises:
        LoadError: a kind that computes the adapter from the base weights.
    """
    below = place.names[0].split(".")
    table: dict[str, Any] = next(
        (cast("Any", m).peft_config for m in place.path if hasattr(m, "peft_config")), {}
    )
    adapter = next((name for name in table if name in below), next(iter(table), "default"))
    kind = getattr(table.get(adapter), "init_lora_weights", True)
    if kind not in (True, False, "gaussian"):
        raise LoadError(
            f"{place.names[0]}: init_lora_weights={kind!r} computes the adapter from the base "
            "weights: "
            "load the base model first, then add the adapter"
        )
    if kind is not False:
        name = f"{_class_name(layer)}.reset_lora_parameters"
        yield name, layer, lambda stand_in: stand_in.reset_lora_parameters(adapter, kind)


def _run(
    target: Target,
    place: Place,
    root: nn.Module,
    call: Callable[[Any], object],
    seed: int,
    device: torch.device,
) -> torch.Tensor | None:
    """The whole tensor as the rule leaves it, or None when the rule does not write all of it."""
    blank = torch.empty(target.shape, dtype=target.dtype, device=device)
    _blank(blank)
    wanted = nn.Parameter(blank, requires_grad=False) if target.kind == "parameter" else blank
    stand_ins: dict[int, nn.Module] = {}
    stand_in = _stand_in(root, id(target.tensor), wanted, stand_ins)
    accelerators = [] if device.type == "cpu" else [device]
    kind = "cuda" if device.type == "cpu" else device.type
    with torch.no_grad(), torch.random.fork_rng(accelerators, device_type=kind):
        torch.manual_seed(derived_seed(seed, target.name))
        try:
            call(stand_in)
        except (RuntimeError, NotImplementedError, TypeError, AttributeError, ValueError):
            return None  # the rule needs what a stand-in lacks; the next rule may not
    value = getattr(stand_ins.get(id(place.module), stand_in), place.attribute, None)
    if not isinstance(value, torch.Tensor) or value.shape != blank.shape or value.is_meta:
        return None
    return None if _is_blank(value) else value.detach()


def derived_seed(seed: int, name: str) -> int:
    """A seed of its own for each name."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _blank(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(SENTINEL if tensor.dtype.is_signed else -SENTINEL)


def _is_blank(tensor: torch.Tensor) -> bool:
    """Whether a part was left unwritten."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    if tensor.dtype == torch.bool:
        return False
    return bool((tensor == (SENTINEL if tensor.dtype.is_signed else -SENTINEL)).any())


def _stand_in(
    module: nn.Module, wanted_id: int, wanted: torch.Tensor, made: dict[int, nn.Module]
) -> nn.Module:
    """A copy of a module tree without values: the wanted tensor real, other parameters on meta."""
    if id(module) in made:
        return made[id(module)]
    kind = plain_class(module)
    copy: Any = kind.__new__(kind)
    made[id(module)] = copy
    copy.__dict__ = dict(module.__dict__)
    copy.__dict__["_parameters"] = {
        name: _replaced(tensor, wanted_id, wanted)
        for name, tensor in module.__dict__["_parameters"].items()
    }
    copy.__dict__["_buffers"] = {
        name: _replaced(tensor, wanted_id, wanted)
        for name, tensor in module.__dict__["_buffers"].items()
    }
    copy.__dict__["_modules"] = {
        name: None if child is None else _stand_in(child, wanted_id, wanted, made)
        for name, child in module.__dict__["_modules"].items()
    }
    copy.__dict__.pop("_is_hf_initialized", None)
    return copy


def _replaced(tensor: Any, wanted_id: int, wanted: torch.Tensor) -> Any:
    if tensor is None or id(tensor) == wanted_id:
        return None if tensor is None else wanted
    if not isinstance(tensor, nn.Parameter):
        return tensor.detach().clone()
    hollow = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(hollow, requires_grad=False)


def _class_name(module: nn.Module) -> str:
    return plain_class(module).__name__
