"""Finds who holds up a job, and where, from one look at every rank. Pure.

A rank waits in its oldest call that has not ended. Ranks that made a call of one group vote on what
it is, and the odd one out holds up the others; else it is the rank that others wait for and that
waits for nobody itself. A rank at work is waited for, but is not a hang.
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
# The action of a rank that is in no call, after its name: by its state, else by the kind.
DOES = {
    "killed": "has ended",
    "lost": "does not answer, on another machine: see `anyrank stacks` there",
    "stopped": "is stopped (SIGSTOP, a debugger, or a batch system)",
    "gil": "holds the GIL in C",
    "no core": "has had no core",
    "absent": "has never called anyrank.watch",
    "left": "has ended its group",
    "worker": "has lost a worker of its DataLoader, and stands",
    "ending": "is at the end of its script",
    "loader": "is in its loader",
}
PLURALS = {"is": "are", "has": "have", "waits": "wait", "does": "do", "holds": "hold"}
ADVICE = {
    "skipped": "every rank has to call it as often as the others",
    "order": "every rank has to call the groups in the same order",
    "mismatch": "every rank has to make the same calls, with as many elements of the same dtype",
    "loader": "the others wait for its data",
    "worker": "start it with fewer workers, or look for what killed it (memory, /dev/shm)",
    "stopped": "kill -CONT continues it",
    "killed": "its processes may still hold its sockets",
    "gil": "no other thread of it runs: the call has to release the GIL, or to return",
    "store": "no rank sets the key, or the process with the store has ended",
    "slow": "the others wait for it",
    "ending": "it has finished, and the others have not",
}
MESSAGE_ADVICE = (
    "what a rank waits for has to come: a send and a recv of one tag, or a key of the store"
)


@dataclass(frozen=True)
class Verdict:
    """The ranks that hold up the job. The fields up to `stacks` are the report's keys.

    Attributes:
        culprits: ranks, in order; empty if nothing tells which of several it is.
        kind: a key of ADVICE.
        file, line, function: the innermost line of the user's own code at the first culprit's call,
            else in its main thread; None if no stack can be had.
        waiting: the other ranks that wait.
        collective: the culprit's, else the one the others wait in: "all_gather #412".
        stacks: stacks of every rank, as text.
        screen: the text for a person.
        unread: ranks whose recorded stacks would tell more, for another look.
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
        """The report."""
        plain = asdict(self)
        del plain["screen"], plain["unread"]
        return json.dumps(plain, indent=2)


Calls = Mapping[int, Call]  # by rank


def conclude(looks: Sequence[Look], idle_sec: float | None) -> Verdict | None:
    """Find who holds up the job; None if a rank is at work.

    Args:
        looks: looks at every rank.
        idle_sec: seconds since the last step, if known.
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
    if silent:  # in a collective, which may hold the GIL too; counts only if nobody else stands out
        return snapshot.verdict([look.rank for look in silent], "gil")
    return None if any(look.state == "no core" for look in looks) else verdict


def conclude_mismatch(looks: Sequence[Look]) -> Verdict | None:
    """Find the ranks that have made other calls than the rest, in a job that continues.

    Args:
        looks: looks with the calls of one group.
    """
    snapshot = JobSnapshot(looks, None)
    for key in sorted({call.key for look in looks for call in look.calls}):
        calls = {rank: call for rank, call in snapshot.calls_of(key).items() if call.name}
        if len({call.signature for call in calls.values()}) > 1:
            return snapshot.verdict(_odd_ranks(calls), "mismatch", calls, hangs=False)
    return None


class JobSnapshot:
    """All looks, and the call that each rank waits in.

    Args:
        looks: looks at every rank.
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
        """Find who holds up the job among the ranks that have answered."""
        if dispute := self.disputed_calls():
            return self.verdict(_odd_ranks(dispute), "mismatch", dispute)
        return self.idle_ranks_verdict() or self.waiting_ranks_verdict()

    def _behind(self, call: Call) -> set[int]:
        """Ranks that have never made a call; by stacks alone, ranks that are not in it."""
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
        """The calls of one number of one group, if ranks that wait in them made different ones."""
        positions = collections.Counter(
            call.key for call in self.pending.values() if call.is_counted
        )
        for key in dict(positions.most_common()):
            calls = self.calls_of(key)
            if len({call.signature for call in calls.values()}) > 1:
                return calls
            # A call that some have not made may have ended on a rank that only sends.
            behind = [rank for call in calls.values() for rank in self._behind(call)]
            if len({call.is_done for call in calls.values()}) > 1 and not behind:
                return calls
        return {}

    def calls_of(self, key: tuple[str, int]) -> dict[int, Call]:
        """The call of one number of one group, of each rank that has made it."""
        calls: dict[int, Call] = {}
        for look in self.answering:
            call = next((call for call in look.calls if call.key == key), None)
            if call is None and _newest(look, key[0]) > key[1]:
                call = Call(*key, "", is_done=True)  # it is no longer recorded
            if call is not None:
                calls[look.rank] = call
        return calls

    def idle_ranks_verdict(self) -> Verdict | None:
        """Blame the ranks in no collective; None if all are in one, or have ended."""
        free = [look for look in self.answering if look.rank not in self.pending]
        if ranks_with_dead_workers := [look.rank for look in free if look.dead_workers]:
            return self.verdict(ranks_with_dead_workers, "worker")
        if self.awaited:
            free = [look for look in free if look.rank in self.awaited]
        if not self.pending:  # ranks at their end hold up nobody
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
        """Find who is to blame if all ranks wait.

        These are ranks that others wait for and that wait for nobody, ranks that do not watch, or
        the odd ones of a ring.
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
            return None  # all have called, and a device may still be busy with earlier work
        is_order = not is_alike and all(call.is_counted for call in ring.values())
        return self.verdict(_odd_ranks(ring), "order" if is_order else "mismatch", ring)

    def _without_message(self, ring: Calls) -> list[int]:
        """Find ranks that left out their message, among ranks that wait for each other.

        A rank that waits for a message is never wrong by itself: its other end may be, if it has
        called something else. For gloo that end is not known; but the recorder counts messages.
        """
        waiting = {rank: call for rank, call in ring.items() if call.is_message}
        called = ring.keys() - waiting.keys()
        odd = [rank for rank in called if ring[rank].arrival == OTHER]
        if odd and (len(odd) < len(called) or len(called) == 1):  # all of them: after an evaluation
            return sorted(odd)
        known = [self.waits_for[rank] for rank, call in waiting.items() if call.group]
        if ends := called & set[int]().union(*known):
            return sorted(ends)
        alike = collections.Counter(call.signature for call in waiting.values())
        ((_, most),) = alike.most_common(1)
        is_exchange = 2 * most > len(ring) and most == len(waiting)  # of most ranks, at one line
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
            culprits: empty if nothing tells which it is.
            kind: a key of ADVICE.
            calls: calls of the ranks concerned; default: where each rank waits.
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
        """Ranks whose recorded stacks would tell more.

        Either a line of the screen, or, if the calls alone do not tell, which rank is wrong.
        """
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
        """The innermost own line of a rank's call, else of its main thread."""
        call = calls.get(rank)
        stack = (self.stack_of(call) if call else ()) or own_frames(self.by_rank[rank].stack)
        return stack[0] if stack else None

    def stack_of(self, call: Call) -> Stack:
        """The lines of a call, or of the same call on another rank: not all ranks report them."""
        return call.stack or self.stacks.get((call.key, call.signature), ())


def _pending_call(look: Look) -> Call | None:
    """The call that a rank waits in: its oldest unfinished one, else the one its stack shows."""
    for call in look.calls:
        if not call.is_done:
            return call
    name = "" if look.has_finished else collective_of(look.stack)
    return Call("", 0, name, stack=own_frames(look.stack)) if name else None


def _newest(look: Look, group: str) -> int:
    """The number of a rank's newest call of a group."""
    return max((call.number for call in look.calls if call.group == group), default=-1)


def _is_ending(look: Look) -> bool:
    """Return whether a rank is at the end of its script."""
    return look.has_finished or ends(look.stack)


def _odd_ranks(calls: Calls) -> list[int]:
    """The ranks outside the largest group that has made one call.

    If several groups are equally large, it is the one that arrived as never before, and nobody if
    that does not tell one group from the others.
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
        return []  # a rank that only sends has gone on, whoever is wrong
    if len(largest) != 1 or len(groups) == 1:
        return []
    return [rank for rank in calls if rank not in largest[0]]


def _groups_of(calls: Calls) -> list[list[int]]:
    """The ranks of each call; if all made the same one, those that are done with it separately."""
    groups: dict[object, list[int]] = collections.defaultdict(list)
    is_one_call = len({(call.key, call.signature) for call in calls.values()}) == 1
    for rank, call in calls.items():
        groups[call.key, call.is_done if is_one_call else call.signature].append(rank)
    return [*groups.values()]


# -- texts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Screen:
    """The text for a person: a clause for each group of ranks in the same state, culprits first.

    Attributes:
        snapshot: the looks.
        calls: the calls concerned, by rank.
        culprits: ranks.
        waiting: ranks that wait.
        kind: a key of ADVICE.
    """

    snapshot: JobSnapshot
    calls: Calls
    culprits: Sequence[int]
    waiting: Sequence[int]
    kind: str

    def text(self, hangs: bool) -> str:
        """The whole text, for a job that hangs, or that continues with wrong calls."""
        head = self._hang() if hangs else f"{self._clauses(self.calls)}: the result is wrong"
        looks = [self.snapshot.by_rank[rank] for rank in self.culprits[:1]]
        details = [d for look in looks for d in (*look.dead_workers, *look.workers, look.detail)]
        off = {look.recorder for look in self.snapshot.answering if look.recorder}
        notes = [f"torch's flight recorder is off ({name}): only stacks are seen" for name in off]
        waiting = [self.calls[rank] for rank in self.waiting if rank in self.calls]
        advice = MESSAGE_ADVICE if any(call.is_message for call in waiting) else ADVICE[self.kind]
        lines = [advice, *(printable(detail) for detail in details if detail), *notes]
        return "\n".join([f"anyrank: {head}", *(f"  {line}" for line in lines), *self._stacks()])

    def _hang(self) -> str:
        """The sentence for a job that hangs."""
        idle_sec = self.snapshot.idle_sec
        lasting = " now" if idle_sec is None else f", for {idle_sec:.0f} s"
        called = [rank for rank in self.waiting if rank in self.calls]
        waiting = self._alike(sorted(called, key=lambda rank: not self.calls[rank].is_message))
        if self.culprits:
            head = f"{self._orders()}{self._clauses(self.culprits)}"
            if not waiting:
                return f"{head}; no step{lasting}" if self.waiting else f"{head}{lasting}"
            verb = "waits" if len(waiting[0]) == 1 else "wait"
            waits = f" and {verb} there" if self.calls[waiting[0][0]].is_counted else ""
            return f"{head}; {self._clause(waiting[0])}{waits}{lasting}"
        if len(waiting) > 1 or self.calls[called[0]].is_message:
            head = self._orders() or "nothing tells which rank is wrong: "
            return f"{head}{self._clauses(self.waiting)}; all wait{lasting}"
        first = self.waiting[0]
        return (
            f"all ranks wait in {self.calls[first].describe()}{lasting}, at "
            f"{self.snapshot.line(first, self.calls)}, and none is missing: look at the network, "
            "at ranks that are not in this group, and at roots and reduce operations, of which "
            "there is no record"
        )

    def _orders(self) -> str:
        """Say that ranks wait for each other in several groups."""
        if self.kind != "order":
            return ""
        groups = dict.fromkeys(call.group for call in self.calls.values() if not call.is_done)
        return f"ranks call groups {' and '.join(groups)} in different orders: "

    def _alike(self, ranks: Iterable[int]) -> list[list[int]]:
        """Group the ranks that do the same."""
        groups: dict[object, list[int]] = collections.defaultdict(list)
        for rank in ranks:
            call, line = self.calls.get(rank), self.snapshot.line(rank, self.calls)
            groups[(call.key, call.signature) if call else line].append(rank)
        return [*groups.values()]

    def first_ranks(self) -> list[int]:
        """The first rank of each group in the sentence: its line stands for them all."""
        groups = self._alike((*self.culprits, *self.waiting) if self.culprits else self.calls)
        return [group[0] for group in groups[:SHOWN_RANKS]]

    def _clauses(self, ranks: Iterable[int]) -> str:
        """A clause for each group of ranks; the culprits first."""
        groups = self._alike(sorted(ranks, key=lambda rank: rank not in self.culprits))
        return "; ".join(first_few([*map(self._clause, groups)], SHOWN_RANKS))

    def _clause(self, ranks: Sequence[int]) -> str:
        """The clause for ranks that do the same, and their line."""
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
        """The action of a rank that is in no call."""
        known = DOES.get(look.state) or DOES.get(self.kind)
        return known or ("is at work in one place" if look.is_busy else "is in no collective")

    def _stacks(self) -> list[str]:
        """The user's own lines of each group of ranks, the largest group first."""
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
