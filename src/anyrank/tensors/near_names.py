"""Hints: the name that a misspelled one may mean, and the prefix that would match many keys."""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

NEIGHBORS = 10  # names on each side, in both orders, that are compared letter by letter


STACK = 3  # the least number of modules with numbers in their names


class Near:
    """Hints at the most similar of many names; built once for many queries."""

    def __init__(self, names: Iterable[str]) -> None:
        self.forwards = sorted(names)
        self.backwards = sorted(name[::-1] for name in self.forwards)

    def hint(self, name: str) -> str:
        """Return a hint at the most similar name, or nothing."""
        likely = _neighbors(self.forwards, name)
        likely += [other[::-1] for other in _neighbors(self.backwards, name[::-1])]
        close = difflib.get_close_matches(name, likely, n=1, cutoff=0.75)
        return f" (near: {close[0]})" if close else ""


def near(name: str, others: Sequence[str]) -> str:
    """Return a hint at the most similar of a few names, or nothing."""
    return Near(others).hint(name)


def _neighbors(ordered: Sequence[str], name: str) -> list[str]:
    """Return the names with the most similar beginnings."""
    position = bisect_left(ordered, name)
    return list(ordered[max(0, position - NEIGHBORS) : position + NEIGHBORS])


Shapes = Mapping[str, tuple[int, ...]]


def wrong_prefix(keys: Shapes, names: Shapes) -> list[tuple[str, str, int]]:
    """Find the changes of prefix that would match most of the unused keys.

    Each is the prefix of the keys, the prefix of the names in its place, and the number of keys
    that it matches. Several changes are alternatives. A change counts if it matches at least two
    keys, and half of them (rounded down), and most of the names below its prefix, with the same
    shapes. In addition, the names must be the same except for a prefix that only one side has, or
    be a stack of layers under a different name; otherwise a head of the same shapes, such as BERT's
    for masked words, would be taken for a pooler.
    """
    prefixes: dict[str, str | None] = {}  # end of a name -> what precedes it, if only one
    for name in names:
        for before, end in _cuts(name):
            prefixes[end] = None if end in prefixes else before
    placed: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for key in keys:
        pairs = ((before, end) for before, end in _cuts(key) if end in prefixes)
        old, end = next(pairs, ("", ""))  # the longest end
        new = prefixes.get(end)
        if new is not None and old != new:
            placed.setdefault((old, new), []).append((key, new + end))
    counts: dict[tuple[str, str], int] = {}
    for (old, new), pairs in placed.items():
        if len(pairs) < max(2, len(keys) // 2):
            continue
        below = sum(name.startswith(new) for name in names)
        is_same_layer = _agree_but_for_a_prefix(old, new) or (
            len(pairs) == below and _is_stack([name.removeprefix(new) for _, name in pairs])
        )
        if (
            is_same_layer
            and 2 * len(pairs) > below
            and all(keys[key] == names[name] for key, name in pairs)
        ):
            counts[old, new] = len(pairs)
    most = max(counts.values(), default=0)
    best = [pair for pair, count in counts.items() if count == most]
    # A change that fills different names is not an alternative to the first.
    return [(old, new, most) for old, new in best if new == best[0][1]]


def rename_of(old: str, new: str) -> object:
    """Return the `rename=` for a change of prefix that `wrong_prefix` has found."""
    return {old.removesuffix("."): new.removesuffix(".")} if old else [("^", new)]


def _agree_but_for_a_prefix(old: str, new: str) -> bool:
    """Return whether one of two prefixes ends with the other one."""
    longer, shorter = sorted((old, new), key=len, reverse=True)
    return f".{longer}".endswith(f".{shorter}") if shorter else True


def _is_stack(ends: Sequence[str]) -> bool:
    """Return whether names are in several numbered layers, which does not happen by chance."""
    numbered = {end.partition(".")[0] for end in ends}
    modules = {end.rpartition(".")[0] for end in ends}
    return len(modules) >= STACK and all(number.isdigit() for number in numbered)


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """Yield (before, end) at every dot, the longest end first; before keeps its last dot."""
    start = 0
    while True:
        yield name[:start], name[start:]
        dot = name.find(".", start)
        if dot < 0:
            return
        start = dot + 1
