"""anyrank inside the training loops of other libraries.

A module is imported by its name, such as `anyrank.integrations.lightning`, and imports its
framework, which the user has installed. It uses the public names of anyrank, agreements of the
ranks (`world`), the checks of adapters in `models`, and `wording`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

FRAMEWORKS = (
    "accelerate",
    "lightning",
    "peft",
    "torchtitan",
    "transformers",
)

# Hidden from type checkers: they read the imports above, so that a misspelled name is an error.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import the module of a framework, or that of their options, when it is first used."""
        if name not in (*FRAMEWORKS, "run"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    """Return only the names of the frameworks."""
    return list(FRAMEWORKS)
