"""Initial values from the model's own rules; the same on any number of ranks.

Rules run on a stand-in of the model in which only one tensor is real and whole. Random numbers are
seeded with the run's seed and the tensor's name, so values depend neither on the number of ranks
nor on which other tensors are initialized. A rank needs memory for one whole tensor at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from anyrank.errors import LoadError
from anyrank.models.dialects.peft.adapters import lora_rule
from anyrank.models.dialects.peft.names import is_adapter_layer
from anyrank.models.plain_copies import plain_copy
from anyrank.models.tensors import ModelTensor
from anyrank.models.wrappers import Registration, plain_class
from anyrank.tensors.box import Box
from anyrank.tensors.hashing import derive
from anyrank.wording import first_few

Init = Callable[[nn.Module], object]
Rule = tuple[str, Callable[[], object]]
OWN_RULES = ("reset_parameters", "_reset_parameters")


class Initializer:
    """Fills tensors of one model.

    Args:
        model: the model whose modules' rules are used. Its tensors are not touched.
        seed: the same on every rank.
        init: the user's own rule, called with the stand-in of each module that owns a tensor to
            initialize. Default: the steps of construction: `reset_parameters` from the inside out,
            then `_init_weights`.
    """

    def __init__(self, model: nn.Module, seed: int, init: Init | None = None) -> None:
        self.model = model
        self.seed = seed
        self.init = init
        self.stand_ins: dict[int, nn.Module] = {}

    def fill(self, target: ModelTensor, local: torch.Tensor) -> str | None:
        """Fill this rank's share of a target.

        Returns:
            The name of the rule that ran last; None if the rules leave a part unwritten.

        Raises:
            LoadError: a rule fails on the stand-in, or needs values that do not exist yet.
        """
        name, value = self.values(target, local.device)
        if value is not None:
            _give(target, local, value)
        return name

    def values(
        self, target: ModelTensor, device: torch.device
    ) -> tuple[str | None, torch.Tensor | None]:
        """Return the rule that ran last, and the whole target's values from the rules.

        Both are None if the rules leave a part unwritten. The values of an empty target are None.

        Raises:
            LoadError: as for `fill`.
        """
        if 0 in target.shape:
            return "nothing to fill", None
        written = [self._written(target, device, number) for number in _fills(target.dtype)]
        name, value = written[0]
        if value is None or any(_differ(value, other) for _, other in written):
            return None, None
        return name, value

    def fill_all(
        self, wanted: Iterable[tuple[ModelTensor, torch.Tensor]], sample: Callable[[], None]
    ) -> dict[str, str]:
        """Fill this rank's shares of targets, and return the rule of each.

        Args:
            wanted: each target, and this rank's memory for it.
            sample: called after each target, to measure memory.

        Raises:
            LoadError: no rule fills some of them; the error names each.
        """
        rules: dict[str, str] = {}
        without: list[str] = []
        for target, local in wanted:
            rule = self.fill(target, local)
            if rule is None:
                without.append(target.name)
            else:
                rules[target.name] = rule
            sample()
        if without:
            raise LoadError(no_rule_for(without))
        return rules

    def _written(
        self, target: ModelTensor, device: torch.device, fill: float
    ) -> tuple[str | None, torch.Tensor | None]:
        """Return the rule that ran last, and the result for a tensor that was full of `fill`."""
        blank = torch.full(target.shape, fill, dtype=target.dtype, device=device)
        is_parameter = target.kind == "parameter"
        wanted = nn.Parameter(blank, requires_grad=False) if is_parameter else blank
        on_meta = [self._swap(entry, wanted) for entry in target.registrations]
        try:
            name = self._run(target, device)
            entry = target.registrations[0]
            value = getattr(self._stand_in(entry.module), entry.attribute)
        finally:
            # Backwards, because a module that is registered twice has two entries for the same
            # attribute.
            for entry, old in zip(reversed(target.registrations), reversed(on_meta), strict=True):
                self._swap(entry, old)
        return name, None if value.shape != blank.shape or value.is_meta else value

    def _run(self, target: ModelTensor, device: torch.device) -> str | None:
        """Run the rules with the tensor's seed; the global generators keep their states."""
        last: str | None = None
        accelerators = [] if device.type == "cpu" else [device]
        kind = "cuda" if device.type == "cpu" else device.type
        with torch.no_grad(), torch.random.fork_rng(accelerators, device_type=kind):
            torch.manual_seed(derive(self.seed, target.name))
            for last, call in self._rules(target):
                try:
                    call()
                except Exception as error:
                    if self.init is not None:
                        raise
                    raise LoadError(
                        f"{target.name}: {last} failed to initialize it ({type(error).__name__}: "
                        f"{error}). Pass init= to anyrank.materialize."
                    ) from error
        return last

    def _rules(self, target: ModelTensor) -> Iterator[Rule]:
        """Yield the rules that construction would run for a tensor, in the same order."""
        entry = target.registrations[0]
        if self.init is not None:
            init, owner = self.init, self._stand_in(entry.module)
            yield getattr(init, "__qualname__", str(init)), lambda: init(owner)
            return
        for module in reversed(entry.path):
            if not is_adapter_layer(module):
                yield from self._own_rules(module)
            elif target.adapter:
                rule = lora_rule(module, self._stand_in(module), entry)
                if rule is not None:
                    yield rule
                return  # adapters are added after the rules of the base model have run
        if not target.adapter:
            yield from self._model_rules(entry)

    def _own_rules(self, module: nn.Module) -> Iterator[Rule]:
        stand_in: Any = self._stand_in(module)
        for name in OWN_RULES:
            if hasattr(module, name):
                yield f"{plain_class(module).__name__}.{name}", getattr(stand_in, name)

    def _model_rules(self, entry: Registration) -> Iterator[Rule]:
        """Yield `_init_weights(module)` of the nearest model, for each module from the owner
        outwards.
        """
        has_model = False
        for depth in reversed(range(len(entry.path))):
            models = (m for m in reversed(entry.path[: depth + 1]) if hasattr(m, "_init_weights"))
            model: Any = next(models, None)
            if model is not None:
                has_model = True
                init = partial(model._init_weights, self._stand_in(entry.path[depth]))
                yield f"{plain_class(model).__name__}._init_weights", init
        for module in reversed(entry.path):
            if not has_model and hasattr(module, "init_weights"):
                rule: Any = self._stand_in(module)
                yield f"{plain_class(module).__name__}.init_weights", rule.init_weights

    def _stand_in(self, module: nn.Module) -> nn.Module:
        """Return the stand-in of one of the model's modules; the first call builds the tree."""
        if not self.stand_ins:
            self.stand_ins = _stand_ins_of(self.model)
        return self.stand_ins[id(module)]

    def _swap(self, entry: Registration, tensor: Any) -> Any:
        """Put a tensor into the stand-in, and return the tensor that it replaces."""
        owner = self._stand_in(entry.module).__dict__
        registry = owner["_parameters" if entry.attribute in owner["_parameters"] else "_buffers"]
        old, registry[entry.attribute] = registry[entry.attribute], tensor
        return old


def no_rule_for(names: Sequence[str]) -> str:
    """Return the error text for tensors of which the rules leave a part unwritten."""
    return (
        f"no rule gives initial values to {', '.join(first_few(names, 10))} (looked for "
        "_init_weights, reset_parameters, init_weights). Load them, add a reset_parameters() to "
        "their modules, or pass your own rule: materialize(init=...)."
    )


def _give(target: ModelTensor, local: torch.Tensor, value: torch.Tensor) -> None:
    """Copy this rank's share of a value into its memory."""
    for piece in target.pieces:
        part = local[Box(piece.local, piece.box.sizes).slices()]
        part.copy_(value.detach()[piece.box.slices()])


def _fills(dtype: torch.dtype) -> tuple[float, ...]:
    """Return the values with which a tensor is filled first; its rules run once for each.

    Elements that the rules write are not NaN, or are the same for each of these values.
    """
    return (float("nan"),) if dtype.is_floating_point or dtype.is_complex else (0, 1)


def _differ(value: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Return whether an element was left unwritten in one of two runs."""
    return other is None or not bool((value == other).all())


def _stand_ins_of(model: nn.Module) -> dict[int, nn.Module]:
    """Copy a model's modules, by their ids, with parameters on meta and their own buffers."""
    copies: dict[int, nn.Module] = {}
    plain_copy(model, copies)
    for copy in copies.values():
        attributes = copy.__dict__
        attributes["_parameters"] = {
            name: None if tensor is None else _on_meta(tensor)
            for name, tensor in attributes["_parameters"].items()
        }
        attributes["_buffers"] = {
            name: None if tensor is None else tensor.detach().clone()
            for name, tensor in attributes["_buffers"].items()
        }
        attributes.pop("_is_hf_initialized", None)
    return copies


def _on_meta(tensor: torch.Tensor) -> nn.Parameter:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=False)
