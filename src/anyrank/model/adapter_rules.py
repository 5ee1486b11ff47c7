"""First values of a new adapter, by the rule of its PEFT method: the layer's own `reset_*`.

PEFT calls it in `update_layer` with arguments from the adapter's config. What it would compute from
the base weights, or decides otherwise, is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from anyrank.errors import LoadError
from anyrank.model.tensors import Registration
from anyrank.model.wrappers import plain_class

BASE_FIRST = "load the base model first, then add the adapter"
DISTRIBUTIONS = (
    "gaussian",
    "xavier_uniform",
    "kaiming_uniform",
)  # that a rule is told to draw from
_SHARED = ("lora", "adapter")  # middles of the names of rules that several methods inherit


def is_adapter_layer(module: nn.Module) -> bool:
    """Whether a module is a layer that PEFT has put around one of the model's."""
    return plain_class(module).__module__.startswith("peft.") and hasattr(module, "active_adapters")


def adapter_rule(
    layer: nn.Module, stand_in: nn.Module, place: Registration
) -> tuple[str, Callable[[], object]] | None:
    """The rule that PEFT runs for a new adapter; None where it leaves what construction gave.

    Args:
        layer: of the model, around the module that is adapted.
        stand_in: the same layer with memory for the tensor that is wanted.
        place: where the tensor is.

    Raises:
        LoadError: the values do not come from a `reset_*` of the layer alone.
    """
    adapter, config = config_of(place)
    kind, method = plain_class(layer), method_of(layer)
    flag = next((n for n in ("init_lora_weights", "init_weights") if hasattr(config, n)), None)
    flag = flag or f"init_{method}_weights"
    choice = getattr(config, flag, True)
    if hasattr(layer, "reset_lora_parameters") and choice in (False, "gaussian"):
        if choice is False:
            return None
    elif choice not in (True, False, *DISTRIBUTIONS):
        raise LoadError(
            f"{place.names[0]}: {flag}={choice!r} may compute the adapter from the base weights: "
            f"{BASE_FIRST}"
        )
    name = _name_of_rule(kind, method, bool(choice))
    rule: Any = getattr(stand_in, name) if name else None
    parameters = list(inspect.signature(rule).parameters.values()) if rule is not None else []
    # The choice is an argument of some rules, under the config's name for it.
    takes_choice = any(parameter.name == flag for parameter in parameters)
    if rule is None or not (choice is True or takes_choice or name.endswith("_random")):
        raise LoadError(
            f"{place.names[0]}: {flag}={choice!r} of {kind.__name__} (PEFT) has no rule that gives "
            f"it a first value: {BASE_FIRST}"
        )
    given = [
        getattr(config, parameter.name, parameter.default)
        for parameter in parameters[1:]
        if hasattr(config, parameter.name) or parameter.default is not parameter.empty
    ]
    return f"{kind.__name__}.{name}", lambda: rule(adapter, *given)


def method_of(layer: nn.Module) -> str:
    """The PEFT method that a layer's class is of; "" for the layers that several have."""
    module = plain_class(layer).__module__
    return module.split(".")[2] if module.startswith("peft.tuners.") else ""


def config_of(place: Registration) -> tuple[str, Any]:
    """The adapter that a place belongs to, and its config."""
    below = place.names[0].split(".")
    owners: list[Any] = [module for module in place.path if hasattr(module, "peft_config")]
    table: dict[str, Any] = owners[0].peft_config if owners else {}
    adapter = next((name for name in table if name in below), next(iter(table), "default"))
    return adapter, table.get(adapter)


def _name_of_rule(kind: type[nn.Module], method: str, choice: bool) -> str:
    """`reset_ia3_parameters`, `reset_adapter_parameters`, ...; "" if there is none."""
    for name in dir(kind):
        middle = name.removeprefix("reset_").removesuffix("_parameters")
        if name == f"reset_{middle}_parameters" and (
            method.startswith(middle) or middle in _SHARED
        ):
            random = f"{name}_random"
            return random if not choice and hasattr(kind, random) else name
    own = getattr(getattr(kind, "reset_parameters", None), "__module__", "")
    return "reset_parameters" if own.startswith("peft.") else ""
