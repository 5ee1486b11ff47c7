"""Who holds up a job, and where, from one look at every rank. Pure.

The large group of ranks at one place waits; the odd one out is it. A rank that is at work is waited
for, and no hang.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from anyrank.watching.looks import Look, Operation, innermost
from anyrank.watching.stacks import (
    Condition,
    Frame,
    Place,
    collective_of,
    ends,
    fetches,
    is_in_model,
    own_frames,
    place_of,
    waits_for_store,
)
from anyrank.wording import join_first, printable
from anyrank.world.group import name_ranks

SHOWN_RANKS = 8
SHOWN_FRAMES = 6
GONE = {
    "killed": "has ended",
    "lost": "does not answer, on another machine: see `anyrank stacks` there",
    "stopped": "is stopped (SIGSTOP, a debugger, or a batch system)",
    "gil": "holds the GIL in C, so that no other thread of it runs",
    "absent": "has never called anyrank.watch",
    "left": "has ended its group",
}
ADVICE = {
    "skipped": "every rank has to call it as often as the others",
    "order": "every rank has to call the same collectives in the same order",
    "mismatch": "its tensor has another shape, so that the call returned to it alone",
    "branch": "every rank has to call it",
    "swallowed": "the exception ends the call on one rank alone: raise it, or tell all ranks",
    "loader": "the others wait for its data",
    "worker": "start it with fewer workers, or look for what killed it (memory, /dev/shm)",
    "stopped": "kill -CONT goes on",
    "killed": "its processes may still hold its sockets",
    "gil": "the call has to release the GIL, or to return",
    "store": "no rank sets the key, or the process with the store has ended",
    "slow": "the others wait for it",
    "ending": "it has finished, and the others have not",
}


@dataclass(frozen=True)
class Verdict:
    """Who holds up the job. The fields up to `stacks` are the report's keys.

    Attributes:
        culprits: ranks, in order.
        kind: a key of ADVICE.
        file, line, function: the innermost line of the user's own code in the first culprit's main
            thread; None where no stack can be had.
        waiting: the other ranks that wait.
        collective: that they wait in, or that the culprit is in: "all_gather #412".
        stacks: of every rank, as text.
        screen: what a person reads.
    """

    culprits: list[int]
    kind: str
    file: str | None
    line: int | None
    function: str | None
    waiting: list[int]
    collective: str | None
    stacks: str
    screen: str = field(default="", repr=False)

    def to_json(self) -> str:
        """The report."""
        plain = asdict(self)
        del plain["screen"]
        return json.dumps(plain, indent=2)


def conclude(looks: Sequence[Look], idle_sec: float | None) -> Verdict | None:
    """Who holds up the job; None where somebody is at work.

    Args:
        looks: at every rank.
        idle_sec: seconds since the last step, where it is known.
    """
    for state in ("killed", "lost", "stopped", "gil"):
        silent = [one for one in looks if one.state == state]
        if silent and state == "gil" and any(one.at_work for one in looks):
            return None
        if silent:
            return _verdict(looks, silent, "killed" if state == "lost" else state, idle_sec)
    others = [one for one in looks if one.state == "answers"]
    if any(one.at_work for one in others):
        return None
    free = [one for one in others if not _waits(one)]
    dead = [one for one in free if one.dead_workers]
    if dead:
        return _verdict(looks, dead, "worker", idle_sec)
    if free and len(free) == len(others) and len(looks) > 1 and not any(map(_stands, free)):
        return None  # all have left the loop
    if free:
        stand = [one for one in free if _stands(one)] if len(free) == len(others) else free
        first = [one for one in stand if not waits_for_store(one.stack)] or stand or free
        return _verdict(looks, first, _kind_of_free(first[0], others), idle_sec)
    missing = [one for one in looks if one.state in ("absent", "left")]
    if missing:
        kind = "ending" if missing[0].state == "left" else "skipped"
        return _verdict(looks, missing, kind, idle_sec) if others else None
    odd = _odd_ones(others)
    waiter = next((one for one in others if one not in odd), None)
    kind = _kind_of_waiting(odd[0], waiter) if odd and waiter else "mismatch"
    return _verdict(looks, odd, kind, idle_sec)


def _waits(look: Look) -> bool:
    """Whether a rank stands in a collective."""
    return look.state == "answers" and not look.has_finished and bool(collective_of(look.stack))


def _stands(look: Look) -> bool:
    """Whether a rank is in the middle of its script, and not at its end."""
    return not look.has_finished and not ends(look.stack)


def _kind_of_free(look: Look, others: Sequence[Look]) -> str:
    """Why a rank that is in no collective does not come to one."""
    if not _stands(look):
        return "ending"
    if waits_for_store(look.stack):
        return "store"
    if fetches(look.stack):
        return "loader"
    return "slow"


def _kind_of_waiting(odd: Look, waiter: Look) -> str:
    """Why a rank stands in another collective than the others, from the source of both places."""
    theirs, mine = _where_they_part(waiter, odd)
    if theirs is None or mine is None:
        return "branch"
    left, right = place_of(theirs), place_of(mine)
    if _position(odd) == _position(waiter) or _differ_in_shape(odd, waiter):
        return "mismatch"
    if set(left.swallows) - set(right.swallows):
        return "swallowed"
    by_rank = [one for one in right.conditions if one.is_by_rank and one not in left.conditions]
    if by_rank:
        others = {one.line for one in left.conditions}  # in the other arm of the same `if`
        return "order" if any(one.line in others for one in by_rank) else "branch"
    if _has_passed(odd, waiter):
        return "mismatch"
    if mine.line == theirs.line:
        return "branch" if is_in_model(odd.stack) else "order"
    return "skipped"


def _differ_in_shape(a: Look, b: Look) -> bool:
    """Whether two ranks are in the same collective with other shapes, as the recorder shows."""
    one, other = _blocked(a), _blocked(b)
    return one is not None and other is not None and _call(one) == _call(other)


def _call(one: Operation) -> tuple[str, int, str]:
    return one.group, one.number, one.name


def _has_passed(odd: Look, waiter: Look) -> bool:
    """Whether a rank has done the collective that another waits in, as the recorder shows."""
    blocked = _blocked(waiter)
    if blocked is None:
        return False
    return any(_call(one) == _call(blocked) and one.is_done for one in odd.operations)


def _where_they_part(a: Look, b: Look) -> tuple[Frame | None, Frame | None]:
    """The frames of the innermost function that both ranks are in by the same way."""
    last: tuple[Frame | None, Frame | None] = (None, None)
    ours, theirs = own_frames(a.stack)[::-1], own_frames(b.stack)[::-1]
    for one, other in zip(ours, theirs, strict=False):
        if (one.file, one.function) != (other.file, other.function):
            break
        last = one, other
        if one.line != other.line:
            break
    return last


def _odd_ones(waiting: Sequence[Look]) -> list[Look]:
    """Those of the ranks in collectives that are not where the most are.

    Where no group is larger: those whose way there hangs on their rank, else those that have come
    further, else those without the lowest rank.
    """
    groups: dict[object, list[Look]] = collections.defaultdict(list)
    for one in waiting:
        groups[_position(one)].append(one)
    sizes = sorted(map(len, groups.values()))
    if behind := _behind(waiting):
        return behind
    if len(groups) == 1:
        return []
    if sizes[-1] > sizes[-2]:
        most = max(groups.values(), key=len)
    else:
        largest = [group for group in groups.values() if len(group) == sizes[-1]]
        most = min(
            largest, key=lambda group: (_goes_own_way(group[0]), group[0].steps, group[0].rank)
        )
    return [one for one in waiting if one not in most]


def _behind(waiting: Sequence[Look]) -> list[Look]:
    """Ranks that have not entered a collective which others wait in, and wait for none of these.

    As the recorder shows it: with groups of several kinds, the large groups need not be right.
    """
    blames: dict[int, set[int]] = {}
    operations = [_blocked(one) for one in waiting]
    if len({one.group for one in operations if one}) < 2:
        return []
    for one, blocked in zip(waiting, operations, strict=True):
        if blocked is None:
            return []
        within = one.members.get(blocked.group) or [other.rank for other in waiting]
        blames[one.rank] = {
            other.rank
            for other in waiting
            if other.rank in within and _newest(other, blocked.group) < blocked.number
        }
    blamed = set[int]().union(*blames.values())
    return [one for one in waiting if one.rank in blamed and not blames[one.rank]]


def _blocked(look: Look) -> Operation | None:
    """The oldest collective that a rank waits in, as the recorder shows it."""
    return next((one for one in look.operations if not one.is_done), None)


def _newest(look: Look, group: str) -> int:
    return max((one.number for one in look.operations if one.group == group), default=0)


def _position(look: Look) -> object:
    """Where a rank is: equal on ranks that wait for each other."""
    blocked = _blocked(look)
    if blocked is not None:
        sizes = "" if "all_to_all" in blocked.name else blocked.sizes
        return *_call(blocked), sizes
    return own_frames(look.stack), collective_of(look.stack)


def _goes_own_way(look: Look) -> bool:
    """Whether a rank is where an `if` that asks for the rank has led it."""
    places = map(place_of, own_frames(look.stack))
    return any(one.is_by_rank for place in places for one in place.conditions)


# -- words ----------------------------------------------------------------------------------------


def _verdict(
    looks: Sequence[Look], culprits: Sequence[Look], kind: str, idle_sec: float | None
) -> Verdict:
    ranks = [one.rank for one in culprits]
    rest = [one for one in looks if one.rank not in ranks and one.state == "answers"]
    waiting = [one for one in rest if _waits(one)] or rest
    at = innermost(culprits[0].stack) if culprits else None
    theirs = _collective(waiting[0]) if waiting else ""
    mine = _collective(culprits[0]) if culprits else ""
    lines = _sentences(looks, culprits, waiting, kind, idle_sec)
    stacks = "\n".join(f"rank {one.rank}, {one.state}\n{one.text}" for one in looks)
    return Verdict(
        ranks,
        kind,
        at.file if at else None,
        at.line if at else None,
        at.function if at else None,
        [one.rank for one in waiting],
        mine or theirs or None,
        stacks,
        "\n".join([*lines, *_screen_of_stacks(looks)]),
    )


def _sentences(
    looks: Sequence[Look],
    culprits: Sequence[Look],
    waiting: Sequence[Look],
    kind: str,
    idle_sec: float | None,
) -> list[str]:
    """What is said before the stacks."""
    since = "now" if idle_sec is None else f"since {idle_sec:.0f} s"
    others = name_ranks([one.rank for one in waiting])
    if not culprits:
        place = innermost(waiting[0].stack)
        return [
            f"anyrank: all ranks wait in {_collective(waiting[0])} {since}, at {place}, and none "
            "is missing: look at the network, and at ranks that are not in this group"
        ]
    first = culprits[0]
    who = name_ranks([one.rank for one in culprits])
    wait = ""
    if waiting and _waits(waiting[0]):
        verb = "waits" if len(waiting) == 1 else "wait"
        wait = f"{others} {verb} in {_collective(waiting[0])} {since}"
    elif waiting and idle_sec is not None:
        wait = f"no step {since}"
    is_one = len(culprits) == 1
    what = _what(first, waiting, kind)
    head = f"anyrank: {who} {what if is_one else _of_several(what)}"
    lines = [f"{head}; {wait}" if wait else f"{head}, {since}"]
    place = innermost(first.stack)
    details = [*first.dead_workers, *([first.detail] if first.detail else [])]
    if place is not None:
        condition = _rank_condition(first)
        under = f', under "if {condition.text}"' if condition else ""
        subject = "it" if is_one else name_ranks([first.rank])
        lines.append(f"  {subject} is at {place}{under}: {ADVICE[kind]}")
    else:
        lines.append(f"  no stack can be had of it: {ADVICE[kind]}")
    return [*lines, *(f"  {printable(text)}" for text in details)]


def _what(look: Look, waiting: Sequence[Look], kind: str) -> str:
    """What a culprit does, after its name."""
    if look.state != "answers":
        return GONE[look.state]
    if kind == "worker":
        return "has lost a worker of its DataLoader, and does not go on"
    if kind == "ending":
        return "is at the end of its script, and does not end"
    if kind == "store":
        return "waits for a key of the store"
    if kind == "loader":
        return "is in its loader"
    if not _waits(look):
        return "is at work in one place" if look.is_busy else "is in no collective"
    if kind == "mismatch":
        return f"is in {_collective(look)}, beyond the others"
    others = join_first([one.rank for one in waiting], SHOWN_RANKS)
    return f"is in {_collective(look)}, which {others} never entered"


def _of_several(what: str) -> str:
    """What one rank does, said of several ranks."""
    verb, _, rest = what.partition(" ")
    verbs = {
        "is": "are",
        "has": "have",
        "was": "were",
        "waits": "wait",
        "does": "do",
        "holds": "hold",
    }
    return f"{verbs.get(verb, verb)} {rest}"


def _collective(look: Look) -> str:
    """A rank's collective, with its number where the recorder has it: "all_gather #412"."""
    if not _waits(look):
        return ""
    blocked, name = _blocked(look), collective_of(look.stack)
    if blocked is None:
        return name
    by_stack = name not in ("backward", "wait", "torch.distributed", blocked.name)
    shown = name if by_stack else blocked.name
    return f"{shown} #{blocked.number}"


def _rank_condition(look: Look) -> Condition | None:
    """The innermost `if` that asks for the rank, around a rank's lines."""
    places: list[Place] = [place_of(frame) for frame in own_frames(look.stack)]
    found = [one for place in places for one in place.conditions[::-1]]
    return next((one for one in found if one.is_by_rank and not one.arm), None)


def _screen_of_stacks(looks: Sequence[Look]) -> list[str]:
    """The user's own lines of each group of ranks, the largest group first."""
    groups: dict[object, list[Look]] = collections.defaultdict(list)
    for one in looks:
        groups[one.state, own_frames(one.stack), _collective(one)].append(one)
    lines: list[str] = []
    for group in sorted(groups.values(), key=len, reverse=True)[:SHOWN_RANKS]:
        first = group[0]
        state = _collective(first) or first.state.replace("answers", "in no collective")
        lines.append(f"  {name_ranks([one.rank for one in group])}: {state}")
        lines += [f"    {frame}" for frame in own_frames(first.stack)[:SHOWN_FRAMES]]
    return lines
