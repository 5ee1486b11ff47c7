"""Compares a call's arguments between the ranks that make it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from anyrank.errors import AnyrankError, WrongType, WrongValue
from anyrank.world.alike import Compared, differing, digests_of_lines, join_digests
from anyrank.world.failures import argument_text, describe_texts
from anyrank.world.ranks import Ranks

T = TypeVar("T")


def compare_arguments(
    ranks: Ranks,
    call: str,
    arguments: Mapping[str, object],
    error: type[AnyrankError],
    check: Callable[[], object] | None = None,
) -> None:
    """Check a call's arguments, and compare them between the ranks. Collective.

    Args:
        ranks: ranks that make the call.
        call: name of the call, "load".
        arguments: arguments by name; compared by their repr, functions by their name.
        error: class of the error for arguments that differ.
        check: raises an error if this rank's arguments are wrong.

    Raises:
        AnyrankError: arguments differ (it has the class `error`, and lists each value with its
            ranks), or `check` raised it on a rank.
        ValueError, TypeError: `check` raised it on a rank.
        RankError: ranks made different calls; or `check` raised an error of a different class on a
            rank.
    """
    compare_and_reduce(ranks, call, arguments, error, check, lambda: None, lambda value, _: value)


def compare_and_reduce(
    ranks: Ranks,
    call: str,
    arguments: Mapping[str, object],
    error: type[AnyrankError],
    check: Callable[[], object] | None,
    tell: Callable[[], T],
    merge: Callable[[T, T], T],
) -> T:
    """Compare arguments as `compare_arguments` does, and merge a value of each rank. Collective.

    Both happen in one exchange.

    Args:
        ranks, call, arguments, error, check: as for `compare_arguments`.
        tell: returns this rank's value. Called after `check`; may raise the same errors.
        merge: as for `Ranks.reduce`; the first rank's value comes before all others.
    """

    def look() -> tuple[dict[str, dict[str, str]], tuple[dict[str, Compared], T]]:
        try:
            if check is not None:
                check()
            value = tell()
        except (TypeError, ValueError) as wrong:
            if ranks.size == 1 or isinstance(wrong, AnyrankError):
                raise
            kind = WrongType if isinstance(wrong, TypeError) else WrongValue
            raise kind(str(wrong)) from wrong
        texts = {"": {name: argument_text(value) for name, value in arguments.items()}}
        return texts, (digests_of_lines(texts, ranks.rank), value)

    texts, (compared, answer) = ranks.run_and_reduce(
        f"{call}()",
        look,
        lambda some, others: (join_digests(some[0], others[0]), merge(some[1], others[1])),
    )
    for name, by_text in differing(texts, compared, ranks).get("", {}).items():
        title = f"{call}(): {name}= differs between ranks"
        text = describe_texts(title, by_text, ranks.name_ranks)
        raise error(f"{text}. Pass the same value on every rank.")
    return answer
