"""Figures of repetitions, and the files that keep them. Imports nothing heavy."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

FOLDER = Path(__file__).parent / "results"
WIDTH = 100
Name = TypeVar("Name")


def in_turn(names: Iterable[Name], repetition: int) -> list[Name]:
    """The names, beginning with another one in each repetition."""
    every = [*names]
    first = repetition % max(1, len(every))
    return every[first:] + every[:first]


def spread(values: Iterable[float]) -> dict[str, Any]:
    """Median, least, most, and how many values they are of."""
    known = [*values]
    rounded = {
        "median": statistics.median(known),
        "least": min(known),
        "most": max(known),
    }
    return {name: round(value, 4) for name, value in rounded.items()} | {"n": len(known)}


def ratios(ours: Iterable[float], theirs: Iterable[float]) -> dict[str, Any]:
    """`spread` of the ratios, each of one repetition."""
    return spread(a / b for a, b in zip(ours, theirs, strict=True))


def read(name: str) -> dict[str, Any]:
    """A result file, or nothing if there is none yet."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def keep(name: str, result: dict[str, Any], path: str | Path | None = None) -> None:
    """Write a result file, `results/NAME.json` unless a path is given, and say so."""
    path = Path(path or FOLDER / f"{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_text(result) + "\n", encoding="utf-8")
    print(f"written to {path}")


def as_text(value: Any, indent: int = 0) -> str:
    """JSON with a line for each value that fits in one."""
    flat = json.dumps(value)
    if len(flat) + indent <= WIDTH or not isinstance(value, (dict, list)):
        return flat
    space = " " * (indent + 1)
    if isinstance(value, dict):
        body = [f"{json.dumps(key)}: {as_text(item, indent + 1)}" for key, item in value.items()]
        start, stop, between = "{", "}", f",\n{space}"
    elif all(isinstance(item, str) for item in value):
        body, start, stop, between = _filled(value, indent + 1), "[", "]", f",\n{space}"
    else:
        body = [as_text(item, indent + 1) for item in value]
        start, stop, between = "[", "]", f",\n{space}"
    return f"{start}\n{space}{between.join(body)}\n{' ' * indent}{stop}"


def _filled(texts: Sequence[str], indent: int) -> list[str]:
    """Texts as lines of several, as JSON has them between commas."""
    lines: list[str] = []
    for text in map(json.dumps, texts):
        if lines and len(lines[-1]) + len(text) + indent + 2 < WIDTH:
            lines[-1] += f", {text}"
        else:
            lines.append(text)
    return lines
