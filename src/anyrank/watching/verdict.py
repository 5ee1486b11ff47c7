"""Find the rank that blocks a job, and where, from one look at every rank. Pure functions.

A rank waits in its oldest call that has not ended. If ranks made different calls in a group, the
majority is right, and the others block the job. Otherwise, the culprit is the rank that others wait
for and that waits for no rank itself. A job in which a rank is at work does not hang.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from anyrank.watching.looks import Look
from anyrank.watching.recorder import FIRST, OTHER, UNREAD, Call
from anyrank.watching.stacks import (
    STORE,
    Frame,
    Stack,
    collective_of,
    ends,
    fetches,
    own_frames,
)
from anyrank.wording import first_few, printable
from anyrank.world.first_ranks import name_ranks

SHOWN_RANKS = 8
SHOWN_FRAMES = 6
ROOTED = ("broadcast", "reduce", "gather", "scatter")
# What a rank that is in no call does: by its state, else by the kind of the verdict.
DOES = {
    "killed": "has ended",
    "lost": "does not respond (on another machine: run `anyrank stacks` there)",
    "stopped": "is stopped (SIGSTOP, a debugger, or a batch system)",
    "gil": "holds the GIL in C code",
    "no core": "has had no CPU time",
    "absent": "has never called anyrank.watch",
    "left": "has closed its watch or its process group",
    "worker": "is blocked because a DataLoader worker died",
    "ending": "is at the end of its script",
    "loader": "is in its data loader",
}
PLURALS = {"is": "are", "has": "have", "waits": "wait", "does": "do", "holds": "hold"}
ADVICE = {
    "skipped": "every rank must call it the same number of times",
    "order": "every rank must call the groups in the same order",
    "mismatch": "every rank must make the same calls, with the same dtypes and numbers of elements",
    "loader": "other ranks wait for its data",
    "worker": "use fewer workers, or find out what killed this one (memory, /dev/shm)",
    "stopped": "`kill -CONT` continues it",
    "killed": "its child processes may still hold its sockets",
    "gil": "no other Python thread of it runs until the call releases the GIL or returns",
    "store": "no rank sets the key, or the process that hosts the store has ended",
    "slow": "other ranks wait for it",
    "ending": "it has finished, and other ranks have not",
}
MESSAGE_ADVICE = "an operation is missing: a send or a recv of the same tag, or a set of the key"


@dataclass(frozen=True)
class Verdict:
    """The ranks that block the job. The fields up to `stacks` are the keys of the report.

    Attributes:
        culprits: these ranks, in order; empty if it is unclear which of several they are.
        kind: a key of ADVICE.
        file, line, function: the innermost line of the user's code, in the call of the first
            culprit, else in its main thread; None if no stack is available.
        waiting: the other ranks that wait.
        collective: the call of the culprit, else that in which others wait: "all_gather #412".
        stacks: the stacks of every rank, as text.
        screen: the text for a person.
        unread: ranks whose recorded stacks would decide more, for another look.
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
    unread: Sequence[int] = ()

    def to_json(self) -> str:
        """Return the report as a JSON object."""
        plain = asdict(self)
        del plain["screen"], plain["unread"]
        return json.dumps(plain, indent=2)


Calls = Mapping[int, Call]  # by rank


def conclude(looks: Sequence[Look], idle_sec: float | None) -> Verdict | None:
    """Find the ranks that block the job; return None if a rank is at work.

    Args:
        looks: one look per rank.
        idle_sec: seconds since the last step; None if unknown.
    """
    snapshot = JobSnapshot(looks, idle_sec)
    for state in ("killed", "lost", "stopped"):
        if silent := [look.rank for look in looks if look.state == state]:
            return snapshot.verdict(silent, "killed" if state == "lost" else state)
    if any(look.at_work for look in looks):
        return None
    silent = [look for look in looks if look.state == "gil"]
    if holding := [look.rank for look in silent if not collective_of(look.stack)]:
        return snapshot.verdict(holding, "gil")
    verdict = snapshot.verdict_of_answers()
    if verdict is not None and verdict.culprits:
        return verdict
    if silent:  # a collective may hold the GIL too, so this counts only if no other rank stands out
        return snapshot.verdict([look.rank for look in silent], "gil")
    return None if any(look.state == "no core" for look in looks) else verdict


def conclude_mismatch(looks: Sequence[Look]) -> Verdict | None:
    """Find the ranks whose calls differ from those of the majority, in a job that continues.

    Args:
        looks: one look per rank, with its calls in one group.
    """
    snapshot = JobSnapshot(looks, None)
    for key in sorted({call.key for look in looks for call in look.calls}):
        calls = {rank: call for rank, call in snapshot.calls_of(key).items() if call.name}
        if len({call.signature for call in calls.values()}) > 1:
            return snapshot.verdict(_odd_ranks(calls), "mismatch", calls, hangs=False)
    return None


class JobSnapshot:
    """The looks at all ranks, and the call in which each rank waits.

    Args:
        looks: one look per rank.
        idle_sec: see `conclude`.
    """

    def __init__(self, looks: Sequence[Look], idle_sec: float | None) -> None:
        self.looks, self.idle_sec = looks, idle_sec
        self.by_rank = {look.rank: look for look in looks}
        self.answering = [look for look in looks if look.state == "answers"]
        self.stacks = {
            (call.key, call.signature): call.stack
            for look in reversed(self.answering)
            for call in look.calls
            if call.stack
        }
        self.pending = {look.rank: call for look in self.answering if (call := _pending_call(look))}
        self.waits_for = {rank: self._behind(call) for rank, call in self.pending.items()}
        self.awaited = set[int]().union(*self.waits_for.values())

    def verdict_of_answers(self) -> Verdict | None:
        """Find the culprits among the ranks that have answered."""
        if dispute := self.disputed_calls():
            return self.verdict(_odd_ranks(dispute), "mismatch", dispute)
        return self.idle_ranks_verdict() or self.waiting_ranks_verdict()

    def _behind(self, call: Call) -> set[int]:
        """Return ranks that have not made a call; or, if only stacks show it, are not in it."""
        if not call.group:
            within = {rank for rank, other in self.pending.items() if not other.group}
            return {look.rank for look in self.answering} - within
        members = call.members or self.by_rank
        return {
            look.rank
            for look in self.answering
            if look.rank in members and _newest(look, call.group) < call.number
        }

    def disputed_calls(self) -> dict[int, Call]:
        """Return the calls of one number in one group, if waiting ranks made different ones."""
        positions = collections.Counter(
            call.key for call in self.pending.values() if call.is_counted
        )
        for key in dict(positions.most_common()):
            calls = self.calls_of(key)
            if len({call.signature for call in calls.values()}) > 1:
                return calls
            # A call that some ranks have not made may have ended on a rank that only sends.
            behind = [rank for call in calls.values() for rank in self._behind(call)]
            if len({call.is_done for call in calls.values()}) > 1 and not behind:
                return calls
        return {}

    def calls_of(self, key: tuple[str, int]) -> dict[int, Call]:
        """Return the call of one number in one group, for each rank that has made it."""
        calls: dict[int, Call] = {}
        for look in self.answering:
            call = next((call for call in look.calls if call.key == key), None)
            if call is None and _newest(look, key[0]) > key[1]:
                call = Call(*key, "", is_done=True)  # no longer recorded
            if call is not None:
                calls[look.rank] = call
        return calls

    def idle_ranks_verdict(self) -> Verdict | None:
        """Name the ranks that are in no collective; None if all are in one, or have ended."""
        free = [look for look in self.answering if look.rank not in self.pending]
        if ranks_with_dead_workers := [look.rank for look in free if look.dead_workers]:
            return self.verdict(ranks_with_dead_workers, "worker")
        if self.awaited:
            free = [look for look in free if look.rank in self.awaited]
        if not self.pending:  # ranks at the end of their scripts block no other rank
            free = [look for look in free if not _is_ending(look)]
        if not free:
            return None
        first, kind = free[0], "slow"
        if _is_ending(first):
            kind = "ending"
        elif fetches(first.stack):
            kind = "loader"
        return self.verdict([look.rank for look in free], kind)

    def waiting_ranks_verdict(self) -> Verdict | None:
        """Find the culprits if all ranks wait.

        They are ranks that others wait for and that wait for no rank; else ranks that do not watch;
        else the minority in a ring of ranks that wait for each other.
        """
        if not self.pending:
            return None
        last = [rank for rank in self.pending if rank in self.awaited and not self.waits_for[rank]]
        if last and len(last) < len(self.pending):
            return self.verdict(last, "skipped")
        if missing := [look for look in self.looks if look.state in ("absent", "left")]:
            kind = "ending" if missing[0].state == "left" else "skipped"
            return self.verdict([look.rank for look in missing], kind)
        ring = {rank: call for rank, call in self.pending.items() if rank in self.awaited}
        ring = ring or self.pending
        if any(call.is_message for call in ring.values()):
            culprits = self._without_message(ring)
            for_store = [rank for rank, call in ring.items() if call.name == STORE]
            if for_store and not culprits:
                return self.verdict(for_store, "store", ring)
            return self.verdict(culprits, "skipped" if culprits else "mismatch", ring)
        is_alike = len({call.key for call in ring.values()}) == 1
        if is_alike and any(call.on_device for call in ring.values()):
            return None  # every rank has called, and a device may still do earlier work
        is_order = not is_alike and all(call.is_counted for call in ring.values())
        return self.verdict(_odd_ranks(ring), "order" if is_order else "mismatch", ring)

    def _without_message(self, ring: Calls) -> list[int]:
        """Find the ranks that did not send or receive a message, in a ring.

        A rank that waits for a message is never wrong itself. The other end may be, if it called
        something else. With gloo the other end is unknown, but the recorder counts messages.
        """
        waiting = {rank: call for rank, call in ring.items() if call.is_message}
        called = ring.keys() - waiting.keys()
        odd = [rank for rank in called if ring[rank].arrival == OTHER]
        if odd and (
            len(odd) < len(called) or len(called) == 1
        ):  # all of them: an evaluation came before
            return sorted(odd)
        known = [self.waits_for[rank] for rank, call in waiting.items() if call.group]
        if ends := called & set[int]().union(*known):
            return sorted(ends)
        alike = collections.Counter(call.signature for call in waiting.values())
        ((_, most),) = alike.most_common(1)
        is_exchange = 2 * most > len(ring) and most == len(waiting)  # most ranks, at one line
        return sorted(called) if is_exchange else []

    def verdict(
        self,
        culprits: Sequence[int],
        kind: str,
        calls: Calls | None = None,
        hangs: bool = True,
    ) -> Verdict:
        """Build the verdict.

        Args:
            culprits: the ranks that block the job; empty if that is unclear.
            kind: a key of ADVICE.
            calls: calls of the ranks concerned. By default, those in which ranks wait.
            hangs: whether the job hangs.
        """
        calls = {**self.pending, **(calls or {})} if hangs else calls or {}
        rest = [look.rank for look in self.answering if look.rank not in culprits]
        waits = self.pending if culprits else calls  # some of these may have ended
        waiting = [rank for rank in rest if rank in waits] or rest
        line = self.line(culprits[0], calls) if culprits else None
        shown = [calls[rank] for rank in (*culprits[:1], *waiting) if rank in calls]
        stacks = [f"rank {look.rank}, {look.state}\n{look.text}" for look in self.looks]
        screen = _Screen(self, calls, culprits, waiting, kind)
        return Verdict(
            [*culprits],
            kind,
            *(line or (None, None, None)),
            waiting,
            shown[0].describe() if shown else None,
            "\n".join(stacks),
            screen.text(hangs),
            self._unread(calls, culprits, screen.first_ranks()),
        )

    def _unread(self, calls: Calls, culprits: Sequence[int], shown: Iterable[int]) -> list[int]:
        """Return the ranks whose recorded stacks show a missing line, or decide the verdict."""
        deciding: Iterable[int] = ()
        if any(call.is_message for call in calls.values()):
            deciding = calls
        elif not culprits:
            deciding = [group[0] for group in _groups_of(calls)]
        unread = {rank for rank in deciding if calls[rank].arrival == UNREAD}
        for rank in shown:
            call = calls.get(rank)
            unread |= {rank} if call and call.is_counted and call.name and not call.stack else set()
        return sorted(unread)

    def line(self, rank: int, calls: Calls) -> Frame | None:
        """Return the innermost line of the user's code in a rank's call or main thread."""
        call = calls.get(rank)
        stack = (self.stack_of(call) if call else ()) or own_frames(self.by_rank[rank].stack)
        return stack[0] if stack else None

    def stack_of(self, call: Call) -> Stack:
        """Return the lines of a call, or of the same call on a rank that reports them."""
        return call.stack or self.stacks.get((call.key, call.signature), ())


def _pending_call(look: Look) -> Call | None:
    """Return the call in which a rank waits: the oldest unfinished one, or that on its stack."""
    for call in look.calls:
        if not call.is_done:
            return call
    name = "" if look.has_finished else collective_of(look.stack)
    return Call("", 0, name, stack=own_frames(look.stack)) if name else None


def _newest(look: Look, group: str) -> int:
    """Return the number of the newest call of a rank in a group."""
    return max((call.number for call in look.calls if call.group == group), default=-1)


def _is_ending(look: Look) -> bool:
    """Return whether a rank is at the end of its script."""
    return look.has_finished or ends(look.stack)


def _odd_ranks(calls: Calls) -> list[int]:
    """Return the ranks outside of the largest group that has made the same call.

    If several groups are the largest, return the one that arrived at its call as never before; if
    that does not single out one group, return no ranks.
    """
    groups = _groups_of(calls)
    most = max(map(len, groups))
    largest = [group for group in groups if len(group) == most]
    odd = [group for group in largest if calls[group[0]].arrival in (OTHER, FIRST)]
    if len(odd) == 1 and len(largest) > 2:
        return odd[0]
    if len(odd) == len(largest) - 1:
        largest = [group for group in largest if group not in odd]
    is_one_call = len({(call.key, call.signature) for call in calls.values()}) == 1
    if is_one_call and any(call.name in ROOTED for call in calls.values()):
        return []  # a rank that only sends continues, whichever rank is wrong
    if len(largest) != 1 or len(groups) == 1:
        return []
    return [rank for rank in calls if rank not in largest[0]]


def _groups_of(calls: Calls) -> list[list[int]]:
    """Group the ranks by call; if all made the same call, by whether they are done with it."""
    groups: dict[object, list[int]] = collections.defaultdict(list)
    is_one_call = len({(call.key, call.signature) for call in calls.values()}) == 1
    for rank, call in calls.items():
        groups[call.key, call.is_done if is_one_call else call.signature].append(rank)
    return [*groups.values()]


# -- texts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Screen:
    """The text for a person: a clause per group of ranks in the same state, culprits first.

    Attributes:
        snapshot: the looks at all ranks.
        calls: the calls concerned, by rank.
        culprits: the ranks that block the job.
        waiting: the ranks that wait.
        kind: a key of ADVICE.
    """

    snapshot: JobSnapshot
    calls: Calls
    culprits: Sequence[int]
    waiting: Sequence[int]
    kind: str

    def text(self, hangs: bool) -> str:
        """Return the whole text, for a job that hangs, or that continues with wrong calls."""
        wrong = "these calls do not match, so their results are wrong"
        head = self._hang() if hangs else f"{self._clauses(self.calls)}; {wrong}"
        looks = [self.snapshot.by_rank[rank] for rank in self.culprits[:1]]
        details = [d for look in looks for d in (*look.dead_workers, *look.workers, look.detail)]
        off = {look.recorder for look in self.snapshot.answering if look.recorder}
        notes = [
            f"torch's flight recorder is off ({name}), so only stacks are known" for name in off
        ]
        waiting = [self.calls[rank] for rank in self.waiting if rank in self.calls]
        advice = MESSAGE_ADVICE if any(call.is_message for call in waiting) else ADVICE[self.kind]
        lines = [advice, *(printable(detail) for detail in details if detail), *notes]
        return "\n".join([f"anyrank: {head}", *(f"  {line}" for line in lines), *self._stacks()])

    def _hang(self) -> str:
        """Return the sentence for a job that hangs."""
        idle_sec = self.snapshot.idle_sec
        idle = "" if idle_sec is None else f" (no step for {idle_sec:.0f} s)"
        called = [rank for rank in self.waiting if rank in self.calls]
        waiting = self._alike(sorted(called, key=lambda rank: not self.calls[rank].is_message))
        if self.culprits:
            head = f"{self._orders()}{self._clauses(self.culprits)}"
            if not waiting:
                return f"{head}{idle}"
            verb = "waits" if len(waiting[0]) == 1 else "wait"
            waits = f" and {verb} there" if self.calls[waiting[0][0]].is_counted else ""
            return f"{head}; {self._clause(waiting[0])}{waits}{idle}"
        if len(waiting) > 1 or self.calls[called[0]].is_message:
            head = self._orders() or "cannot tell which rank is at fault: "
            return f"{head}{self._clauses(self.waiting)}; all wait{idle}"
        first = self.waiting[0]
        return (
            f"all ranks of the group wait in {self.calls[first].describe()} at "
            f"{self.snapshot.line(first, self.calls)}{idle}, and none is missing. Check the "
            "network, ranks outside of the group, and whether all ranks pass the same root and "
            "reduce operation, which are not recorded"
        )

    def _orders(self) -> str:
        """Return the start of a sentence if ranks wait for each other in several groups."""
        if self.kind != "order":
            return ""
        groups = dict.fromkeys(call.group for call in self.calls.values() if not call.is_done)
        return f"ranks call groups {' and '.join(groups)} in different orders: "

    def _alike(self, ranks: Iterable[int]) -> list[list[int]]:
        """Group the ranks that are in the same call, or at the same line."""
        groups: dict[object, list[int]] = collections.defaultdict(list)
        for rank in ranks:
            call, line = self.calls.get(rank), self.snapshot.line(rank, self.calls)
            groups[(call.key, call.signature) if call else line].append(rank)
        return [*groups.values()]

    def first_ranks(self) -> list[int]:
        """Return the first rank of each group in the sentence, whose line represents the group."""
        groups = self._alike((*self.culprits, *self.waiting) if self.culprits else self.calls)
        return [group[0] for group in groups[:SHOWN_RANKS]]

    def _clauses(self, ranks: Iterable[int]) -> str:
        """Return a clause per group of ranks; the culprits first."""
        groups = self._alike(sorted(ranks, key=lambda rank: rank not in self.culprits))
        return "; ".join(first_few([*map(self._clause, groups)], SHOWN_RANKS))

    def _clause(self, ranks: Sequence[int]) -> str:
        """Return the clause for ranks that do the same, with their line."""
        call, line = self.calls.get(ranks[0]), self.snapshot.line(ranks[0], self.calls)
        where = f" at {line}" if line else ""
        if call is None:
            does = self._does(self.snapshot.by_rank[ranks[0]])
            verb, _, rest = does.partition(" ")
            verb = PLURALS[verb] if len(ranks) > 1 else verb
            return f"{name_ranks(ranks)} {verb} {rest}{where}"
        others = [self.calls[rank] for rank in self.calls if rank not in ranks]
        with_sizes = any(
            (other.key, other.name) == (call.key, call.name) and other.signature != call.signature
            for other in others
        )
        verb = "called" if call.is_counted else "waits in" if len(ranks) == 1 else "wait in"
        return f"{name_ranks(ranks)} {verb} {call.describe(with_sizes)}{where}"

    def _does(self, look: Look) -> str:
        """Return what a rank does that is in no call."""
        known = DOES.get(look.state) or DOES.get(self.kind)
        return known or ("is busy in one place" if look.is_busy else "is in no collective")

    def _stacks(self) -> list[str]:
        """Return the lines of the user's code for each group of ranks, the largest group first."""
        groups: dict[tuple[str, Stack, Stack], list[int]] = collections.defaultdict(list)
        for look in self.snapshot.looks:
            call = self.calls.get(look.rank)
            shown = call.describe() if call else look.state.replace("answers", "in no collective")
            lines_of_call = self.snapshot.stack_of(call) if call else ()
            groups[shown, lines_of_call, own_frames(look.stack)].append(look.rank)
        lines: list[str] = []
        for group, ranks in sorted(groups.items(), key=lambda item: -len(item[1]))[:SHOWN_RANKS]:
            shown, call_lines, main_lines = group
            lines.append(f"  {name_ranks(ranks)}: {shown}")
            lines += [f"    {frame}" for frame in (call_lines or main_lines)[:SHOWN_FRAMES]]
            if call_lines and main_lines and main_lines != call_lines:
                lines.append(f"    now at {main_lines[0]}")
        return lines
