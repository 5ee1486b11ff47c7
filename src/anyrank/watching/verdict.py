"""Who holds up a job, and where, from one look at every rank. Pure.

A rank waits in its oldest call that has not ended. Ranks that made one call of a group vote on what
it is, and the odd one out holds up the others; else it is the rank that others wait for, and that
waits for nobody itself. A rank that is at work is waited for, and no hang.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from anyrank.watching.looks import Look
from anyrank.watching.recorder import AGREEMENTS, Call
from anyrank.watching.stacks import (
    Branch,
    Frame,
    Stack,
    branches_around,
    collective_of,
    ends,
    fetches,
    own_frames,
    waits_for_store,
)
from anyrank.wording import printable
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
    "order": "every rank has to call the groups in the same order",
    "mismatch": "every rank has to make the same calls, with as many elements of the same dtype",
    "branch": "every rank has to call it",
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
        culprits: ranks, in order; none where nothing tells which of several it is.
        kind: a key of ADVICE.
        file, line, function: the innermost line of the user's own code at the first culprit's call,
            else in its main thread; None where no stack can be had.
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


Calls = Mapping[int, Call]  # by rank


def conclude(looks: Sequence[Look], idle_sec: float | None) -> Verdict | None:
    """Who holds up the job; None where somebody is at work.

    Args:
        looks: at every rank.
        idle_sec: seconds since the last step, where it is known.
    """
    scene = _Scene(looks, idle_sec)
    for state in ("killed", "lost", "stopped", "gil"):
        silent = [look.rank for look in looks if look.state == state]
        if silent and state == "gil" and any(look.at_work for look in looks):
            return None
        if silent:
            return scene.verdict(silent, "killed" if state == "lost" else state)
    if any(look.at_work for look in scene.answering):
        return None
    if dispute := scene.disputed_calls():
        culprits, others = _vote(dispute)
        return scene.verdict(culprits, _kind(dispute, culprits, others, "mismatch"), dispute)
    return scene.judge_free() or scene.judge_waiting()


def conclude_mismatch(looks: Sequence[Look]) -> Verdict | None:
    """Which ranks have made other calls than the others, in a job that goes on.

    Args:
        looks: with the calls of one group.
    """
    scene = _Scene(looks, None)
    for key in sorted({call.key for look in looks for call in look.calls}):
        calls = {rank: call for rank, call in scene.calls_of(key).items() if call.name}
        if len({call.signature for call in calls.values()}) > 1:
            return scene.verdict(_vote(calls)[0], "mismatch", calls, hangs=False)
    return None


class _Scene:
    """All looks, and what each rank waits in.

    Args:
        looks: at every rank.
        idle_sec: see `conclude`.
    """

    def __init__(self, looks: Sequence[Look], idle_sec: float | None) -> None:
        self.looks, self.idle_sec = looks, idle_sec
        self.by_rank = {look.rank: look for look in looks}
        self.answering = [look for look in looks if look.state == "answers"]
        self.pending = {look.rank: call for look in self.answering if (call := _pending_call(look))}
        self.waits_for = {rank: self._behind(call) for rank, call in self.pending.items()}
        self.blamed = set[int]().union(*self.waits_for.values())

    def _behind(self, call: Call) -> set[int]:
        """Ranks that have never made a call; by stacks alone, those that are in none."""
        if not call.group:
            return {look.rank for look in self.answering if look.rank not in self.pending}
        members = call.members or self.by_rank
        return {
            look.rank
            for look in self.answering
            if look.rank in members and _newest(look, call.group) < call.number
        }

    def disputed_calls(self) -> dict[int, Call]:
        """The calls of one number of one group, where ranks have made different ones of them: of
        those that ranks wait in.
        """
        positions = collections.Counter(
            call.key for call in self.pending.values() if not call.group.startswith(AGREEMENTS)
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
        group, number = key
        if not group:  # stacks alone
            return {rank: call for rank, call in self.pending.items() if not call.group}
        calls: dict[int, Call] = {}
        for look in self.answering:
            call = next((call for call in look.calls if call.key == key), None)
            if call is None and _newest(look, group) > number:
                call = Call(group, number, "", is_done=True)  # it is not kept any more
            if call is not None:
                calls[look.rank] = call
        return calls

    def judge_free(self) -> Verdict | None:
        """Those in no collective hold up the others; None where all are, or have ended."""
        free = [look for look in self.answering if look.rank not in self.pending]
        if bereft := [look.rank for look in free if look.dead_workers]:
            return self.verdict(bereft, "worker")
        if self.blamed:
            free = [look for look in free if look.rank in self.blamed]
        if not self.pending:  # those at their end hold up nobody
            free = [look for look in free if not _is_ending(look)]
        free = [look for look in free if not waits_for_store(look.stack)] or free
        ranks = [look.rank for look in free]
        return self.verdict(ranks, _kind_of_free(free[0])) if free else None

    def judge_waiting(self) -> Verdict | None:
        """Where all wait: ranks that others wait for and that wait for nobody, those that do not
        watch, or the odd ones of a ring.
        """
        if not self.pending:
            return None
        last = [rank for rank in self.pending if rank in self.blamed and not self.waits_for[rank]]
        rest = [rank for rank in self.pending if rank not in last]
        if last and rest:
            return self.verdict(last, _kind(self.pending, last, rest, "skipped"), self.pending)
        if missing := [look for look in self.looks if look.state in ("absent", "left")]:
            kind = "ending" if missing[0].state == "left" else "skipped"
            return self.verdict([look.rank for look in missing], kind)
        ring = {rank: call for rank, call in self.pending.items() if rank in self.blamed}
        ring = ring or self.pending
        kind = "order" if len({call.key for call in ring.values()}) > 1 else "mismatch"
        if kind == "mismatch" and any(call.on_device for call in ring.values()):
            return None  # all have called, and a device may be busy with what came before
        culprits, others = _vote(ring)
        return self.verdict(culprits, _kind(ring, culprits, others, kind), ring)

    def verdict(
        self,
        culprits: Sequence[int],
        kind: str,
        calls: Calls | None = None,
        hangs: bool = True,
    ) -> Verdict:
        """What is concluded.

        Args:
            culprits: none where nothing tells which it is.
            kind: a key of ADVICE.
            calls: of the ranks that it is about; without, where each waits.
            hangs: whether the job does.
        """
        calls = {**self.pending, **(calls or {})} if hangs else calls or {}
        rest = [look.rank for look in self.answering if look.rank not in culprits]
        waits = self.pending if culprits else calls  # of which some may have ended
        waiting = [rank for rank in rest if rank in waits] or rest
        line = self.line(culprits[0], calls) if culprits else None
        shown = [calls[rank] for rank in (*culprits[:1], *waiting) if rank in calls]
        words = _Words(self, calls, waiting)
        sentences = words.sentences(culprits, kind) if hangs else words.mismatch(culprits)
        stacks = [f"rank {look.rank}, {look.state}\n{look.text}" for look in self.looks]
        return Verdict(
            [*culprits],
            kind,
            *(line or (None, None, None)),
            waiting,
            shown[0].describe() if shown else None,
            "\n".join(stacks),
            "\n".join([*sentences, *_screen_of_stacks(self.looks, calls)]),
        )

    def line(self, rank: int, calls: Calls) -> Frame | None:
        """The innermost own line of a rank's call, else of its main thread."""
        call = calls.get(rank)
        stack = (call.stack if call else ()) or own_frames(self.by_rank[rank].stack)
        return stack[0] if stack else None


def _pending_call(look: Look) -> Call | None:
    """What a rank waits in: its oldest call that has not ended, else what its stack shows."""
    for call in look.calls:
        if not call.is_done:
            return call
    name = "" if look.has_finished else collective_of(look.stack)
    return Call("", 0, name, stack=own_frames(look.stack)) if name else None


def _newest(look: Look, group: str) -> int:
    """The number of a rank's newest call of a group."""
    return max((call.number for call in look.calls if call.group == group), default=-1)


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


def _kind(calls: Calls, culprits: Sequence[int], others: Sequence[int], kind: str) -> str:
    """The kind, where no `if` leads to the culprits' call alone."""
    if not culprits or not others:
        return kind
    return "branch" if _branches_apart(calls[culprits[0]], calls[others[0]]) else kind


def _vote(calls: Calls) -> tuple[list[int], list[int]]:
    """The ranks whose calls are not those of the most, and the others.

    Where no group is larger it is those whose way there hangs on their rank, and nobody where that
    tells nothing.
    """
    groups: dict[object, list[int]] = collections.defaultdict(list)
    signatures = {(call.key, call.signature) for call in calls.values()}
    for rank, call in calls.items():
        signature = call.signature if len(signatures) > 1 else call.is_done
        groups[call.key, signature].append(rank)
    most = max(map(len, groups.values()))
    largest = [group for group in groups.values() if len(group) == most]
    if len(largest) > 1:
        largest = [group for group in largest if not _is_led_by_rank(calls[group[0]])]
    if len(largest) != 1 or len(groups) == 1:
        return [], [*calls]
    return [rank for rank in calls if rank not in largest[0]], largest[0]


def _is_led_by_rank(call: Call) -> bool:
    """Whether an `if` that asks for the rank has led to a call."""
    return any(branch.asks_for_rank for frame in call.stack for branch in branches_around(frame))


def _branches_apart(call: Call, other: Call) -> list[Branch]:
    """Each `if` that one call is within, and another is not, where their ways part; further in,
    those that ask for the rank.
    """
    parting: tuple[Frame, Frame] | None = None
    frames = call.stack[::-1]
    for pair in zip(frames, other.stack[::-1], strict=False):
        if (pair[0].file, pair[0].function) != (pair[1].file, pair[1].function):
            break
        parting = pair
        if pair[0].line != pair[1].line:
            break
    if parting is None:
        return []
    shared = branches_around(parting[1])
    return [
        *(branch for branch in branches_around(parting[0]) if branch not in shared),
        *(
            branch
            for frame in frames[frames.index(parting[0]) + 1 :]
            for branch in branches_around(frame)
            if branch.asks_for_rank
        ),
    ]


# -- words ----------------------------------------------------------------------------------------


class _Words:
    """What is said of a scene.

    Args:
        scene: it is.
        calls: that it is about, by rank.
        waiting: ranks that wait.
    """

    def __init__(self, scene: _Scene, calls: Calls, waiting: Sequence[int]) -> None:
        self.scene, self.calls, self.waiting = scene, calls, waiting
        idle_sec = scene.idle_sec
        self.since = "now" if idle_sec is None else f"since {idle_sec:.0f} s"

    def sentences(self, culprits: Sequence[int], kind: str) -> list[str]:
        """What is said before the stacks."""
        if not culprits:
            return [self._undecided(), f"  {ADVICE[kind]}", *self._notes()]
        first = culprits[0]
        look, line = self.scene.by_rank[first], self.scene.line(first, self.calls)
        if first in self.calls:
            is_last = first in self.scene.blamed and not self.scene.waits_for[first]
            orders = "" if is_last else self._orders()
            head = f"{orders}{self._call(culprits)}; {self._wait(first)}"
            second = ADVICE[kind]
        else:
            verb, _, rest = _what(look, kind).partition(" ")
            verb = PLURALS[verb] if len(culprits) > 1 else verb
            head = f"{name_ranks(culprits)} {verb} {rest}"
            if any(rank in self.calls for rank in self.waiting):
                head += f"; {self._wait(first)}"
            else:
                head += f"; no step {self.since}" if self.waiting else f", {self.since}"
            who = "it" if len(culprits) == 1 else name_ranks([first])
            where = f"{who} is at {line}" if line else "no stack can be had of it"
            second = f"{where}: {ADVICE[kind]}"
        details = [*look.dead_workers, *look.workers, *filter(None, [look.detail])]
        shown = [f"  {printable(detail)}" for detail in details]
        return [f"anyrank: {head}", f"  {second}", *shown, *self._notes()]

    def mismatch(self, culprits: Sequence[int]) -> list[str]:
        """What is said of different calls in a job that goes on."""
        groups = self._alike([*culprits, *(rank for rank in self.calls if rank not in culprits)])
        clauses = "; ".join(map(self._call, groups))
        return [f"anyrank: {clauses}: what came of it is wrong", f"  {ADVICE['mismatch']}"]

    def _alike(self, ranks: Sequence[int]) -> list[list[int]]:
        """The ranks, those with the same call together."""
        groups: dict[object, list[int]] = collections.defaultdict(list)
        for rank in ranks:
            call = self.calls[rank]
            groups[call.key, call.signature].append(rank)
        return [*groups.values()]

    def _orders(self) -> str:
        """That ranks wait in several groups; nothing where one waits for an agreement of ours."""
        places = [call for call in self.calls.values() if not call.is_done]
        groups = dict.fromkeys(call.group for call in places)
        if len(groups) < 2 or not all(call.is_counted for call in places):
            return ""
        return f"ranks call groups {' and '.join(groups)} in different orders: "

    def _undecided(self) -> str:
        """What is said where nothing tells which rank is wrong."""
        groups = self._alike(self.waiting)
        if len(groups) > 1:
            clauses = "; ".join(map(self._call, groups))
            head = self._orders() or "nothing tells which rank is wrong: "
            return f"anyrank: {head}{clauses}; all wait {self.since}"
        first = self.waiting[0]
        return (
            f"anyrank: all ranks wait in {self.calls[first].describe()} {self.since}, at "
            f"{self.scene.line(first, self.calls)}, and none is missing: look at the network, and "
            "at ranks that are not in this group"
        )

    def _wait(self, culprit: int) -> str:
        """What the first of those that wait do, beside a culprit."""
        waiting = [rank for rank in self.waiting if rank in self.calls]
        first = self.calls[waiting[0]]
        alike = self._alike(waiting)[0]
        verb = "waits" if len(alike) == 1 else "wait"
        waits = f" and {verb} there" if first.is_counted else ""
        return f"{self._call(alike, culprit)}{waits} {self.since}"

    def _call(self, ranks: Sequence[int], beside: int | None = None) -> str:
        """The call of ranks that are alike: what, and at which line."""
        call, line = self.calls[ranks[0]], self.scene.line(ranks[0], self.calls)
        others = [self.calls[rank] for rank in self.calls if rank not in ranks]
        alike = [other for other in others if (other.key, other.name) == (call.key, call.name)]
        with_sizes = any(other.signature != call.signature for other in alike)
        verb = "called" if call.is_counted else "waits in" if len(ranks) == 1 else "wait in"
        unlike = next((other for other in others if other not in alike), None)
        other = unlike if beside is None else self.calls.get(beside)
        branches = _branches_apart(call, other) if other else []
        under = f", under {', '.join(map(str, branches))}" if branches else ""
        where = f" at {line}" if line else ""
        return f"{name_ranks(ranks)} {verb} {call.describe(with_sizes)}{where}{under}"

    def _notes(self) -> list[str]:
        """What keeps this from being seen better."""
        off = {look.recorder for look in self.scene.answering if look.recorder}
        return [f"  torch's flight recorder is off ({name}): only stacks are seen" for name in off]


def _what(look: Look, kind: str) -> str:
    """What a culprit does that waits in no call, after its name."""
    if look.state != "answers":
        return STATES[look.state]
    return KINDS.get(kind) or ("is at work in one place" if look.is_busy else "is in no collective")


def _screen_of_stacks(looks: Sequence[Look], calls: Calls) -> list[str]:
    """The user's own lines of each group of ranks, the largest group first."""
    groups: dict[tuple[str, Stack, Stack], list[int]] = collections.defaultdict(list)
    for look in looks:
        call = calls.get(look.rank)
        shown = call.describe() if call else look.state.replace("answers", "in no collective")
        groups[shown, call.stack if call else (), own_frames(look.stack)].append(look.rank)
    lines: list[str] = []
    for group, ranks in sorted(groups.items(), key=lambda item: -len(item[1]))[:SHOWN_RANKS]:
        shown, call_lines, main_lines = group
        lines.append(f"  {name_ranks(ranks)}: {shown}")
        lines += [f"    {frame}" for frame in (call_lines or main_lines)[:SHOWN_FRAMES]]
        if call_lines and main_lines and main_lines != call_lines:
            lines.append(f"    now at {main_lines[0]}")
    return lines
