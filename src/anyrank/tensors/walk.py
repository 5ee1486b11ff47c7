"""The modules of a model, frozen parts included."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def walk(
    module: nn.Module, name: str = "", seen: set[nn.Module] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module once, with its name, in the order of `named_modules`, with frozen parts.

    `named_modules` itself does not list frozen parts.

    Args:
        module: where to start; it comes first.
        name: its name.
        seen: modules to leave out; the modules found are added.
    """
    seen = set[nn.Module]() if seen is None else seen
    if module not in seen:
        seen.add(module)
        yield name, module
        for child_name, child in module.named_children():
            yield from walk(child, f"{name}.{child_name}" if name else child_name, seen)
