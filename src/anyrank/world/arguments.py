"""A call's arguments, compared over the ranks that make it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from anyrank.errors import AnyrankError, WrongType, WrongValue
from anyrank.world.alike import unlike
from anyrank.world.failures import argument_text, describe_values
from anyrank.world.ranks import Ranks


def compare_arguments(
    ranks: Ranks,
    call: str,
    arguments: Mapping[str, object],
    error: type[AnyrankError],
    check: Callable[[], object] | None = None,
    tell: Callable[[], object] | None = None,
) -> list[Any]:
    """Check a call's arguments, and compare them over the ranks. All ranks.

    Args:
        ranks: the ranks that make the call.
        call: the name of the call, "load".
        arguments: by name; compared by their repr, functions by their name.
        error: the class for arguments that differ.
        check: raises an error if this rank's arguments are wrong.
        tell: called after `check`; what it returns goes to all ranks in the same exchange.

    Returns:
        What `tell` returned on each rank.

    Raises:
        AnyrankError: arguments differ: of class `error`, with each value and its ranks. Or
            `check` or `tell` raised it on a rank.
        ValueError, TypeError: `check` raised it on a rank.
        RankError: other ranks called something else; or `check` or `tell` raised an error of
            another class on a rank.
    """

    def check_own() -> tuple[dict[str, str], object]:
        try:
            if check is not None:
                check()
            value = tell() if tell is not None else None
        except (TypeError, ValueError) as wrong:
            if ranks.size == 1 or isinstance(wrong, AnyrankError):
                raise
            kind = WrongType if isinstance(wrong, TypeError) else WrongValue
            raise kind(str(wrong)) from wrong
        return {name: argument_text(value) for name, value in arguments.items()}, value

    answers = ranks.together(f"{call}()", check_own)
    texts = {rank: own_texts for rank, (own_texts, _) in zip(ranks.ranks, answers, strict=True)}
    for name, values in unlike(texts).items():
        title = f"{call}(): {name}= differs between ranks"
        text = describe_values(title, values, ranks.name_ranks)
        raise error(f"{text}: give all ranks the same")
    return [value for _, value in answers]
