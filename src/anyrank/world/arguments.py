"""A call's arguments, compared over the ranks that make it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from anyrank.errors import AnyrankError, RankError
from anyrank.world.failures import different, same_error, shown
from anyrank.world.ranks import Ranks


def same_arguments(
    ranks: Ranks,
    call: str,
    arguments: Mapping[str, object],
    error: type[AnyrankError],
    check: Callable[[], object] | None = None,
    tell: Callable[[], object] | None = None,
) -> list[Any]:
    """Check a call's arguments, and compare them over the ranks. All ranks.

    Args:
        ranks: that make the call.
        call: its name, "load".
        arguments: by name; compared by their repr, functions by their name.
        error: the class for arguments that differ.
        check: raises for arguments that are wrong in themselves.
        tell: called after it; gives what the other ranks get, so that they need not meet twice.

    Returns:
        What `tell` gave on each rank.

    Raises:
        AnyrankError: arguments differ: of class `error`, with each value and its ranks. Or
            `check` or `tell` raised it on some rank.
        ValueError, TypeError: `check` raised it on some rank.
        RankError: other ranks called something else; or `check` or `tell` failed in an unforeseen
            way on some rank.
    """
    problem: Exception | None = None
    value: object = None
    try:
        if check is not None:
            check()
        if tell is not None:
            value = tell()
    except Exception as raised:
        if ranks.size == 1:
            raise
        problem = raised
    mine = {name: shown(value) for name, value in arguments.items()}
    bad: tuple[type[Exception], str] | None = None
    if isinstance(problem, (AnyrankError, TypeError, ValueError)):
        bad = type(problem), str(problem)
    elif problem is not None:
        bad = RankError, f"{type(problem).__name__}: {problem}"
    every = ranks.gather((mine, bad, value), f"{call}()")
    failed = {r: found for r, (_, found, _) in zip(ranks.ranks, every, strict=True) if found}
    if failed:
        raise same_error(call, failed, ranks.size, ranks.named) from problem
    for name in mine:
        values = {r: given[name] for r, (given, *_) in zip(ranks.ranks, every, strict=True)}
        if len(set(values.values())) > 1:
            text = different(f"{call}(): {name}= differs between ranks", values, ranks.named)
            raise error(f"{text}: give all ranks the same")
    return [theirs for *_, theirs in every]
