"""The examples in the docstrings of the public interface run as they are."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import anyrank

BLOCK = re.compile(r"^Example::\n\n((?: {4}.*\n?|\n)+)", re.MULTILINE)
# Rooms whose public names all have an example.
ROOMS = (
    "anyrank.conversion",
    "anyrank.data",
    "anyrank.frozen",
    "anyrank.inspection",
    "anyrank.loading",
    "anyrank.memory",
    "anyrank.resume",
    "anyrank.saving",
    "anyrank.state",
)


def public() -> Iterator[tuple[str, Any]]:
    """Public functions and classes, their public methods, and the classes that these return."""
    things = {name: getattr(anyrank, name) for name in anyrank.__all__}
    things["Step"] = sys.modules["anyrank.data.step"].Step
    for name, thing in things.items():
        yield name, thing
        for key in vars(thing) if inspect.isclass(thing) else ():
            if not key.startswith("_"):
                yield f"{name}.{key}", getattr(thing, key)


def examples() -> dict[str, str]:
    """Name -> the code of its examples."""
    found = {name: BLOCK.search(inspect.getdoc(thing) or "") for name, thing in public()}
    return {name: textwrap.dedent(match[1]) for name, match in found.items() if match}


@pytest.mark.parametrize("name", examples())
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = compile(examples()[name], f"the example of {name}", "exec")
    exec(code, {"__name__": "__main__", "anyrank": anyrank, "torch": torch})  # noqa: S102


def test_every_public_name_has_an_example() -> None:
    rooms = {
        name: thing
        for name, thing in public()
        if name in anyrank.__all__ and str(getattr(thing, "__module__", "")).startswith(ROOMS)
    }
    assert len(rooms) >= 21
    assert sorted(rooms.keys() - examples().keys()) == []
