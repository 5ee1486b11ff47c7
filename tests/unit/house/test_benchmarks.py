"""The benchmarks parse, their committed results hold every goal, and pages what they measured.

Nothing is measured here: a measurement in a test suite tells how busy the machine was.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "benchmarks"
SCRIPTS = sorted(FOLDER.glob("*.py"))
Import = Callable[[str], ModuleType]
# Benchmark -> how many goals its results are held to.
GOALS = {
    "frozen": 3,
    "kills": 3,
    "load": 27,
    "memory": 10,
    "save": 2,
    "sweep": 3,
    "sync": 12,
    "traps": 3,
    "watch": 9,
}
# What a function that is run as a whole cannot do with so few tiles.
NOT_REACHED = {"tiled MLP, 16 tiles, MiB"}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Import]:
    """Imports a benchmark's module as the script itself does, and forgets all of them after."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for script in SCRIPTS:
        sys.modules.pop(script.stem, None)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_parses_and_says_what_it_is(script: Path) -> None:
    assert ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", GOALS)
def test_the_recorded_results_reach_their_goals(module: Import, name: str) -> None:
    goals = module(name).goals_of(module("bench").read(name))
    assert {goal["what"] for goal in goals if not goal["met"]} <= NOT_REACHED
    assert len(goals) == GOALS[name]


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
def test_a_page_holds_the_figures_of_the_results(module: Import, page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert module("tables").filled(page) == text, "run `python benchmarks/tables.py`"
