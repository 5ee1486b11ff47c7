"""The examples in the docstrings of the public interface run as they are."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.public import integration_names, members, public_names, returned_classes

import anyrank

BLOCK = re.compile(r"^Example::\n\n((?: {4}.*\n?|\n)+)", re.MULTILINE)
NAMES = public_names() | integration_names()
CLASSES = returned_classes(public_names().values())
THINGS = NAMES | CLASSES
# Shown with what makes them: reports, their parts, and handles.
BY_THEIR_MAKERS = {"ALONE", "CUT", "RankError", "integrations.transformers.ElasticRun"} | {
    name for name in CLASSES if not name.endswith((".Step", ".Share", ".SavedStep", ".SaveRecord"))
}
# Others call these.
PROTOCOL = {"state_dict", "load_state_dict", "to_json", "in_step", "feed", "end", "held"}


def examples() -> dict[str, str]:
    """Name -> the code of its example, of functions, classes and their methods."""
    docs = {name: inspect.getdoc(thing) for name, thing in THINGS.items()}
    for name, thing in THINGS.items():
        docs |= {f"{name}.{key}": inspect.getdoc(value) for key, value in members(thing)}
    found = {name: BLOCK.search(doc or "") for name, doc in docs.items()}
    return {name: textwrap.dedent(match[1]) for name, match in found.items() if match}


def without_example(name: str, thing: Any, code: dict[str, str]) -> list[str]:
    """The public methods of a class that no example of the class or of its methods shows."""
    shown = "\n".join(text for key, text in code.items() if f"{key}.".startswith(f"{name}."))
    keys = [key for key, _ in members(thing) if key not in PROTOCOL]
    return [f"{name}.{key}" for key in keys if not re.search(rf"\.{key}\b", shown)]


@pytest.mark.parametrize("name", examples())
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = compile(examples()[name], f"the example of {name}", "exec")
    exec(code, {"__name__": "__main__", "anyrank": anyrank, "torch": torch})  # noqa: S102


def test_every_public_name_has_an_example() -> None:
    assert sorted(THINGS.keys() - examples().keys() - BY_THEIR_MAKERS) == []


def test_every_public_method_is_in_an_example() -> None:
    code = examples()
    asked = (public_names() | CLASSES).keys() - BY_THEIR_MAKERS  # a framework calls the others
    assert [each for name in asked for each in without_example(name, THINGS[name], code)] == []


def test_a_method_without_an_example_is_found() -> None:
    class Some:
        """A class."""

        def shown(self) -> None: ...

        def left_out(self) -> None: ...

    assert without_example("Some", Some, {"Some": "some.shown()"}) == ["Some.left_out"]
