"""Who holds up a job, and where, from one look at every rank. Pure.

The large group of ranks at one place waits; the odd one out is it. A rank that is at work is waited
for, and no hang.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from anyrank.watching.looks import Look, Operation
from anyrank.watching.stacks import (
    Branch,
    Frame,
    branches_around,
    collective_of,
    ends,
    fetches,
    is_in_model,
    own_frames,
    tries_around,
    waits_for_store,
)
from anyrank.wording import join_first, printable
from anyrank.world.group import name_ranks

SHOWN_RANKS = 8
SHOWN_FRAMES = 6
# What a rank does, after its name: where it does not answer, by its state, else by the kind.
STATES = {
    "killed": "has ended",
    "lost": "does not answer, on another machine: see `anyrank stacks` there",
    "stopped": "is stopped (SIGSTOP, a debugger, or a batch system)",
    "gil": "holds the GIL in C, so that no other thread of it runs",
    "absent": "has never called anyrank.watch",
    "left": "has ended its group",
}
KINDS = {
    "worker": "has lost a worker of its DataLoader, and does not go on",
    "ending": "is at the end of its script, and does not end",
    "store": "waits for a key of the store",
    "loader": "is in its loader",
}
PLURALS = {"is": "are", "has": "have", "waits": "wait", "does": "do", "holds": "hold"}
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
        collective: that the culprit is in, else that they wait in: "all_gather #412".
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
        silent = [look for look in looks if look.state == state]
        if silent and state == "gil" and any(look.at_work for look in looks):
            return None
        if silent:
            return _verdict(looks, silent, "killed" if state == "lost" else state, idle_sec)
    answering = [look for look in looks if look.state == "answers"]
    if any(look.at_work for look in answering):
        return None
    free = [look for look in answering if not _waits(look)]
    bereft = [look for look in free if look.dead_workers]
    if bereft:
        return _verdict(looks, bereft, "worker", idle_sec)
    if free and len(free) == len(answering):  # those at their end hold up nobody
        free = [look for look in free if not _is_ending(look)]
        if not free:
            return None
    if free:
        culprits = [look for look in free if not waits_for_store(look.stack)] or free
        return _verdict(looks, culprits, _kind_of_free(culprits[0]), idle_sec)
    missing = [look for look in looks if look.state in ("absent", "left")]
    if missing:
        kind = "ending" if missing[0].state == "left" else "skipped"
        return _verdict(looks, missing, kind, idle_sec) if answering else None
    odd = _odd_ones(answering)
    waiter = next((look for look in answering if look not in odd), None)
    kind = _kind_of_waiting(odd[0], waiter) if odd and waiter else "mismatch"
    return _verdict(looks, odd, kind, idle_sec)


def _waits(look: Look) -> bool:
    """Whether a rank stands in a collective."""
    return look.state == "answers" and not look.has_finished and bool(collective_of(look.stack))


def _is_ending(look: Look) -> bool:
    """Whether a rank is at the end of its script."""
    return look.has_finished or ends(look.stack)


def _kind_of_free(look: Look) -> str:
    """Why a rank that is in no collective does not come to one."""
    if _is_ending(look):
        return "ending"
    if waits_for_store(look.stack):
        return "store"
    return "loader" if fetches(look.stack) else "slow"


def _kind_of_waiting(odd: Look, waiter: Look) -> str:
    """Why a rank stands in another collective than the others, from the source of both ways."""
    lines = _parting_lines(odd, waiter)
    if lines is None:
        return "branch"
    if _calls_otherwise(odd, waiter):
        return "mismatch"
    odd_line, waiter_line = lines
    if tries_around(waiter_line) - tries_around(odd_line):
        return "swallowed"
    other_arms = {
        branch._replace(is_else=not branch.is_else) for branch in branches_around(waiter_line)
    }
    if other_arms.intersection(branches_around(odd_line)):
        return "order"
    if _branches_apart(odd, waiter):
        return "branch"
    if odd_line.line == waiter_line.line:
        return "branch" if is_in_model(odd.stack) else "order"
    return "skipped"


def _parting_lines(look: Look, other: Look) -> tuple[Frame, Frame] | None:
    """The lines of two ranks in the innermost function that both have come to by the same way."""
    lines: tuple[Frame, Frame] | None = None
    frames, other_frames = own_frames(look.stack)[::-1], own_frames(other.stack)[::-1]
    for frame, other_frame in zip(frames, other_frames, strict=False):
        if (frame.file, frame.function) != (other_frame.file, other_frame.function):
            break
        lines = frame, other_frame
        if frame.line != other_frame.line:
            break
    return lines


def _branches_apart(look: Look, other: Look) -> list[Branch]:
    """Each `if` that a rank is within, and another is not, where their ways part; further in, those
    that ask for the rank.
    """
    lines = _parting_lines(look, other)
    if lines is None:
        return []
    shared = branches_around(lines[1])
    frames = own_frames(look.stack)
    further = frames[: frames.index(lines[0])][::-1]
    return [
        *(branch for branch in branches_around(lines[0]) if branch not in shared),
        *(b for frame in further for b in branches_around(frame) if b.asks_for_rank),
    ]


def _calls_otherwise(odd: Look, waiter: Look) -> bool:
    """Whether a rank has called what another waits in, and is done or has another shape there, as
    the recorder shows.
    """
    blocked = _blocked(waiter)
    return blocked is not None and any(
        _call(operation) == _call(blocked)
        and (operation.is_done or operation.sizes != blocked.sizes)
        for operation in odd.operations
    )


def _call(operation: Operation) -> tuple[str, int, str]:
    return operation.group, operation.number, operation.name


def _odd_ones(waiting: Sequence[Look]) -> list[Look]:
    """Those of the ranks in collectives that are not where the most are.

    Where no group is larger: those whose way there hangs on their rank, else those that have come
    further, else those without the lowest rank.
    """
    groups: dict[object, list[Look]] = collections.defaultdict(list)
    for look in waiting:
        groups[_position(look)].append(look)
    most = min(
        groups.values(),
        key=lambda group: (-len(group), _is_led_by_rank(group[0]), group[0].steps, group[0].rank),
    )
    return _behind(waiting) or [look for look in waiting if look not in most]


def _behind(waiting: Sequence[Look]) -> list[Look]:
    """Ranks that have not entered a collective which others wait in, and wait for none of these.

    As the recorder shows it: with groups of several kinds, the large groups need not be right.
    """
    blocked = {look.rank: operation for look in waiting if (operation := _blocked(look))}
    groups = {operation.group for operation in blocked.values()}
    if len(blocked) < len(waiting) or len(groups) < 2:
        return []
    blames: dict[int, set[int]] = {}
    for look in waiting:
        operation = blocked[look.rank]
        members = look.members.get(operation.group) or blocked
        blames[look.rank] = {
            other.rank
            for other in waiting
            if other.rank in members and _newest(other, operation.group) < operation.number
        }
    blamed = set[int]().union(*blames.values())
    return [look for look in waiting if look.rank in blamed and not blames[look.rank]]


def _blocked(look: Look) -> Operation | None:
    """The oldest collective that a rank waits in, as the recorder shows it."""
    return next((operation for operation in look.operations if not operation.is_done), None)


def _newest(look: Look, group: str) -> int:
    numbers = (operation.number for operation in look.operations if operation.group == group)
    return max(numbers, default=0)


def _position(look: Look) -> object:
    """Where a rank is: equal on ranks that wait for each other."""
    blocked = _blocked(look)
    if blocked is not None:
        return *_call(blocked), blocked.sizes
    return own_frames(look.stack), collective_of(look.stack)


def _is_led_by_rank(look: Look) -> bool:
    """Whether a rank is where an `if` that asks for the rank has led it."""
    branches = (branch for frame in own_frames(look.stack) for branch in branches_around(frame))
    return any(branch.asks_for_rank for branch in branches)


# -- words ----------------------------------------------------------------------------------------


def _verdict(
    looks: Sequence[Look], culprits: Sequence[Look], kind: str, idle_sec: float | None
) -> Verdict:
    ranks = [look.rank for look in culprits]
    rest = [look for look in looks if look.rank not in ranks and look.state == "answers"]
    waiting = [look for look in rest if _waits(look)] or rest
    file, line, function = (_own_line(culprits[0]) if culprits else None) or (None, None, None)
    collectives = [_collective(look) for look in (*culprits[:1], *waiting[:1])]
    stacks = "\n".join(f"rank {look.rank}, {look.state}\n{look.text}" for look in looks)
    since = "now" if idle_sec is None else f"since {idle_sec:.0f} s"
    sentences = _sentences(culprits, waiting, kind, since) if culprits else _network(waiting, since)
    return Verdict(
        ranks,
        kind,
        file,
        line,
        function,
        [look.rank for look in waiting],
        next(filter(None, collectives), None),
        stacks,
        "\n".join([*sentences, *_screen_of_stacks(looks)]),
    )


def _own_line(look: Look) -> Frame | None:
    """The innermost line of the user's own code."""
    return next(iter(own_frames(look.stack)), None)


def _network(waiting: Sequence[Look], since: str) -> list[str]:
    """What is said where all ranks wait in one place."""
    first = waiting[0]
    return [
        f"anyrank: all ranks wait in {_collective(first)} {since}, at {_own_line(first)}, and none "
        "is missing: look at the network, and at ranks that are not in this group"
    ]


def _sentences(
    culprits: Sequence[Look], waiting: Sequence[Look], kind: str, since: str
) -> list[str]:
    """What is said of the culprits, before the stacks."""
    first = culprits[0]
    what = _what(first, waiting, kind)
    if len(culprits) > 1:
        verb, _, rest = what.partition(" ")
        what = f"{PLURALS[verb]} {rest}"
    head = f"anyrank: {name_ranks([look.rank for look in culprits])} {what}"
    if waiting and _waits(waiting[0]):
        verb = "waits" if len(waiting) == 1 else "wait"
        others = name_ranks([look.rank for look in waiting])
        head += f"; {others} {verb} in {_collective(waiting[0])} {since}"
    else:
        head += f"; no step {since}" if waiting and since != "now" else f", {since}"
    line = _own_line(first)
    if line is None:
        position = "no stack can be had of it"
    else:
        branches = _branches_apart(first, waiting[0]) if waiting else []
        under = f", under {', '.join(map(str, branches))}" if branches else ""
        position = f"{'it' if len(culprits) == 1 else name_ranks([first.rank])} is at {line}{under}"
    details = map(printable, [*first.dead_workers, *filter(None, [first.detail])])
    return [head, f"  {position}: {ADVICE[kind]}", *(f"  {detail}" for detail in details)]


def _what(look: Look, waiting: Sequence[Look], kind: str) -> str:
    """What a culprit does, after its name."""
    if look.state != "answers":
        return STATES[look.state]
    if kind in KINDS:
        return KINDS[kind]
    if not _waits(look):
        return "is at work in one place" if look.is_busy else "is in no collective"
    if kind == "mismatch":
        return f"is in {_collective(look)}, beyond the others"
    others = join_first([look.rank for look in waiting], SHOWN_RANKS)
    return f"is in {_collective(look)}, which {others} never entered"


def _collective(look: Look) -> str:
    """A rank's collective, with its number where the recorder has it: "all_gather #412"."""
    if not _waits(look):
        return ""
    blocked, name = _blocked(look), collective_of(look.stack)
    if blocked is None:
        return name
    is_vague = name in ("backward", "wait", "torch.distributed")
    return f"{blocked.name if is_vague else name} #{blocked.number}"


def _screen_of_stacks(looks: Sequence[Look]) -> list[str]:
    """The user's own lines of each group of ranks, the largest group first."""
    groups: dict[object, list[Look]] = collections.defaultdict(list)
    for look in looks:
        groups[look.state, own_frames(look.stack), _collective(look)].append(look)
    lines: list[str] = []
    for group in sorted(groups.values(), key=len, reverse=True)[:SHOWN_RANKS]:
        first = group[0]
        state = _collective(first) or first.state.replace("answers", "in no collective")
        lines.append(f"  {name_ranks([look.rank for look in group])}: {state}")
        lines += [f"    {frame}" for frame in own_frames(first.stack)[:SHOWN_FRAMES]]
    return lines
