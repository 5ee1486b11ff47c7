"""The calls that torch's flight recorders keep for a rank, and anyrank's own agreements.

gloo has a recorder, and NCCL has another one in CUDA builds; their entries have the same form. An
entry has the stack of the call, because with NCCL a collective returns at once, and the main thread
continues.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from anyrank.watching.stacks import AGREEMENT, WAIT, Frame, Stack, collective_of, own_frames
from anyrank.world.rendezvous import open_connections
from anyrank.world.waits import GroupState, Wait

ACTIVE = 64  # pending calls that a rank reports, the oldest first
PASSED = 8  # ended calls that a rank reports per group, the newest ones
FRAMES = 6  # lines of user code per call
SAFE_NCCL = (2, 14)  # before it, a dump of NCCL's recorder may crash a running job
SWITCHES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
# Names from stacks for which the record has a better one.
VAGUE = re.compile(r"|backward|torch\.distributed|.*\(\)")
UNEVEN = ("all_to_all", "alltoall", "_oop")  # calls in which sizes may differ between ranks
AGREEMENTS = "anyrank"  # prefix of the groups of anyrank's own agreements
MESSAGES = "messages "  # prefix of groups that stand for one direction between two ranks
MESSAGE = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
ONE_ENDED = ("send", "recv", WAIT)  # in names from stacks: these calls have no record
USUAL, OTHER, FIRST, UNREAD = "usual", "other", "first", "unread"
COALESCED = "coalesced"  # an entry that completes in place of all calls of its number


@dataclass
class Call:
    """A call of a rank, possibly one in which it waits.

    Attributes:
        group, number: the same on ranks that wait for each other in the call; no group if only a
            stack shows the call.
        name: "all_gather", or the purpose of an agreement; empty if no longer known.
        shown: the public function that was called, such as all_gather_object.
        time_ns: time of the call, by the clock of the rank.
        arrival: how the rank arrived at the call: USUAL, after OTHER calls than ever before, or for
            the FIRST time; UNREAD if calls were read without stacks, which distinguish them.
        operation: number of the call among all operations of the rank in the group, including
            messages.
        sizes, dtypes: those of the tensors; empty if they may differ between ranks.
        is_done: whether the call has ended on this rank.
        stack: the lines of user code at the call.
        on_device: whether the call returned at once, and a device executes it.
        members: ranks of the group; empty if unknown.
    """

    group: str
    number: int
    name: str
    sizes: list[list[int]] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    is_done: bool = False
    on_device: bool = False
    stack: Stack = ()
    members: list[int] = field(default_factory=list)
    shown: str = ""
    time_ns: int = 0
    arrival: str = USUAL
    operation: int = 0

    def __post_init__(self) -> None:
        self.stack = tuple(Frame(*frame) for frame in self.stack)  # lists, if it was read from JSON

    @property
    def key(self) -> tuple[str, int]:
        """A key that is the same on all ranks that must make the same call."""
        return self.group, self.number

    @property
    def signature(self) -> tuple[object, ...]:
        """A value that is the same for matching calls: shapes may differ, element counts not."""
        if not self.group:
            return self.name, self.stack
        return self.name, sum(map(math.prod, self.sizes)), *sorted({*self.dtypes})

    @property
    def is_counted(self) -> bool:
        """True if it is a collective that the flight recorder has numbered."""
        return bool(self.group) and not self.group.startswith((AGREEMENTS, MESSAGES))

    @property
    def is_message(self) -> bool:
        """True if it waits for an action of a single rank: a send, a recv, or a set of a key."""
        if self.group:
            return self.group.startswith(MESSAGES)
        return any(word in self.name for word in ONE_ENDED)

    def describe(self, with_sizes: bool = False) -> str:
        """Return the call as text: "all_gather #412 of group mesh_tp 3"."""
        if self.group.startswith(AGREEMENTS):
            return f'anyrank\'s agreement "{self.name}"'
        if self.group.startswith(MESSAGES):
            return self.name
        number = f" #{self.number}" if self.group else ""
        tensors = ", ".join([*map(str, self.sizes), *sorted({*self.dtypes})])
        group = "" if self.group in ("", "0") else f" of group {self.group}"
        return (
            f"{self.shown or self.name}{number}"
            + (f" of {tensors}" if with_sizes and tensors else "")
            + group
        )


class _Plain(pickle.Unpickler):
    """An unpickler for what the recorders write: numbers, strings, lists and dicts."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} in a flight recorder's dump")


def read_entries(with_stacks: bool, is_still: bool) -> list[dict[str, Any]]:
    """Return the entries of both recorders; none for a recorder that does not answer.

    Args:
        with_stacks: whether to read stacks too, which takes up to two seconds the first time.
        is_still: whether the rank stands still, so that a dump cannot collide with a call.
    """
    # These have no public names. Without them, only stacks show where a rank waits.
    c10d: Any = torch._C._distributed_c10d  # pyright: ignore
    dumps = [getattr(c10d, "_dump_fr_trace", None)]
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if is_still or version >= SAFE_NCCL:
        dumps.append(getattr(c10d, "_dump_nccl_trace", None))
    entries: list[dict[str, Any]] = []
    for dump in filter(None, dumps):
        try:
            record = _Plain(io.BytesIO(dump(True, with_stacks, False))).load()
        except (RuntimeError, TypeError, ValueError, pickle.UnpicklingError):
            continue
        entries += record.get("entries", [])
    return entries


def read_calls(with_stacks: bool) -> list[Call]:
    """Return all calls that can be read safely while the job runs, the oldest first."""
    return _calls(read_entries(with_stacks, is_still=False))


def _calls(entries: Sequence[dict[str, Any]]) -> list[Call]:
    """Return all calls, except those of anyrank's own groups, and messages that have ended.

    anyrank's own groups have no name in the record; `own_calls` has them. The two ends of a message
    have different numbers.
    """
    groups: dict[str, list[Call]] = {}
    ends = {_launch(entry): entry for entry in entries if _name(entry) == COALESCED}
    for entry in entries:
        if not entry["process_group"][0] or _name(entry) == COALESCED:
            continue
        call = _read(entry, ends.get(_launch(entry), entry) if ends else entry)
        if entry.get("is_p2p"):
            call = None if call.is_done else _message(call, entry)
        if call is None:
            continue
        calls = groups.setdefault(call.group, [])
        if calls and call.number < calls[-1].number:  # a new group has the name of an old one
            calls.clear()
        calls.append(call)
    return sorted(itertools.chain(*groups.values()), key=lambda call: call.time_ns)


def _launch(entry: dict[str, Any]) -> tuple[object, ...]:
    """Return a key that is the same for all calls that NCCL launches together."""
    number = "p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id"
    return *entry["process_group"], number, entry.get(number)


def _name(entry: dict[str, Any]) -> str:
    """Return the operation of an entry, without the backend: "all_gather", "send 0->1"."""
    return str(entry["profiling_name"]).rpartition(":")[2].strip("_")


def calls_of(entries: Sequence[dict[str, Any]]) -> list[Call]:
    """Return the pending calls among a recorder's entries, and the newest ended ones per group."""
    calls = _calls(entries)
    active = [call for call in calls if not call.is_done][:ACTIVE]
    has_stacks = any(entry.get("frames") for entry in entries)
    for call in active[:1]:  # the rank waits in this one
        call.arrival = _arrival(calls[: calls.index(call) + 1]) if has_stacks else UNREAD
    groups = dict.fromkeys(call.group for call in calls)
    ended = [[call for call in calls if call.is_done and call.group == group] for group in groups]
    members = {group: _members(group.rpartition(" ")[2]) for group in groups}
    kept = [*(call for of_group in ended for call in of_group[-PASSED:]), *active]
    for call in kept:
        call.members = call.members or members[call.group]
    return kept


def _arrival(calls: Sequence[Call]) -> str:
    """Return how a rank arrived at the last of its calls, compared with earlier arrivals.

    Consecutive calls from one line, such as in a loop over parameters, count as one step with a
    length. Only lengths up to the longest earlier one are usual.
    """
    steps: list[object] = []
    begun: dict[str, int] = {}  # messages, by group
    for call in calls:
        messages = call.operation - call.number
        if number := messages - begun.get(call.group, messages):
            steps.append(number)
        begun[call.group] = messages
        steps.append((call.group, call.name, call.stack))
    runs = [(step, len([*same])) for step, same in itertools.groupby(steps)]
    last, number = runs[-1]
    seen = [index for index, (step, _) in enumerate(runs) if step == last]
    if len(seen) == 1 and number > 1:
        return USUAL
    if len(seen) < 3:
        return FIRST
    *before, between = [runs[a + 1 : b] for a, b in itertools.pairwise(seen)]
    most = max(runs[index][1] for index in seen[:-1])
    return USUAL if between in before and number <= most else OTHER


def _message(call: Call, entry: dict[str, Any]) -> Call | None:
    """Return a pending `send` or `recv` as a call in a group of only its two ends."""
    match = MESSAGE.match(_name(entry))
    if match is None:
        return None
    ends = (match[2], match[3]) if match[1] == "send" else (match[3], match[2])
    ranks = _members(call.group.rpartition(" ")[2])
    call.members = [ranks[int(end)] if ranks else int(end) for end in ends]
    call.name = call.shown = match[0]
    call.group, call.number = f"{MESSAGES}{'->'.join(ends)} {call.group}", 0
    return call


def _read(entry: dict[str, Any], end: dict[str, Any]) -> Call:
    """Return the call of a recorder's entry; another entry may say whether it has ended."""
    backend = str(entry["profiling_name"]).rpartition(":")[0]
    name = _name(entry).split(" ")[0]
    group, description = map(str, entry["process_group"])
    if description not in ("", "undefined", "default_pg", "default"):
        group = f"{description} {group}"
    # gloo's recorder only retires calls. NCCL retires a call at its timeout too.
    is_done = end["state"] == "completed" or (bool(end["retired"]) and backend != "nccl")
    side = (
        "output" if (name.startswith("all") and "gather" in name) or name == "scatter" else "input"
    )
    sizes, dtypes = entry.get(f"{side}_sizes", []), entry.get(f"{side}_dtypes", [])
    if any(text in name for text in UNEVEN):
        sizes = []  # they may differ between ranks
    frames = entry.get("frames") or []
    stack = tuple(Frame(f["filename"], int(f["line"]), f["name"]) for f in frames)
    shown = collective_of(stack)
    return Call(
        group,
        int(entry["collective_seq_id"]),
        name,
        [list(size) for size in sizes],
        list(dtypes),
        is_done,
        backend == "nccl",
        own_frames(stack)[:FRAMES],
        shown="" if VAGUE.fullmatch(shown) else shown,
        time_ns=int(entry["time_created_ns"]),
        operation=int(entry["op_id"]),
    )


def _members(group: str) -> list[int]:
    """Return the ranks of a group by its name; empty if torch no longer has the group."""
    c10d: Any = torch._C._distributed_c10d  # pyright: ignore
    try:
        return dist.get_process_group_ranks(c10d._resolve_process_group(group))
    except (AttributeError, RuntimeError, ValueError):
        return []


def note_line(calls: Sequence[Call], stack: Stack) -> None:
    """Set the line of the only pending call, if the main thread is in it.

    Args:
        calls: calls without stacks.
        stack: the stack of the main thread.
    """
    active = [call for call in calls if not call.is_done]
    shown = collective_of(stack)
    is_ours = shown == AGREEMENT or any(word in shown for word in ONE_ENDED)
    if len(active) == 1 and not active[0].on_device and not is_ours and not VAGUE.fullmatch(shown):
        active[0].shown, active[0].stack = shown, own_frames(stack)[:FRAMES]


def own_calls(stack: Stack) -> list[Call]:
    """Return anyrank's own agreements: the newest per group, and that of the main thread.

    Args:
        stack: the stack of the main thread.
    """
    names: dict[GroupState, str] = {}
    calls: list[Call] = []
    for name, connections in open_connections().items():
        names[connections.state] = name
        ranks = [*connections.state.ranks]
        calls.append(
            Call(f"{AGREEMENTS} {name}", connections.waits, "", is_done=True, members=ranks)
        )
    waiting = Wait.current
    if waiting is not None and collective_of(stack) == AGREEMENT:
        ranks = [*waiting.state.ranks]
        group, number = f"{AGREEMENTS} {names.get(waiting.state, ranks)}", waiting.number
        if number is None:  # messages between two ranks have no number
            group, number, ranks = f"{group} messages", 0, [*waiting.peers]
        lines = own_frames(stack)[:FRAMES]
        calls.append(Call(group, number, waiting.what, stack=lines, members=ranks))
    return calls


def switched_off() -> str:
    """Return the setting with which the user has disabled a recorder; "" for none."""
    off = (name for name in SWITCHES if os.environ.get(name, "").strip() == "0")
    return next((f"{name}=0" for name in off), "")
