"""The calls that torch's flight recorders have kept of a rank, and our own agreements.

gloo has one recorder, NCCL another in builds for CUDA; their entries are alike. An entry has the
stack at the call: under NCCL a collective returns at once, and the main thread stands elsewhere.
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

ACTIVE = 64  # calls under way that a rank tells of, the oldest first
PASSED = 8  # the newest calls of each group that have ended
FRAMES = 6  # of a call's own lines
SAFE_NCCL = (2, 14)  # before, a dump of NCCL's recorder may crash a job that runs
SWITCHES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
VAGUE = re.compile(r"|backward|torch\.distributed|.*\(\)")  # by a stack; the record has its name
UNEVEN = ("all_to_all", "alltoall", "_oop")  # calls for which ranks may have other sizes
AGREEMENTS = "anyrank"  # how the groups of our own agreements begin
MESSAGES = "messages "  # how those begin that stand for one direction between two ranks
MESSAGE = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
ONE_ENDED = ("send", "recv", WAIT)  # within a name by a stack: there is no record of these
USUAL, OTHER, FIRST, UNREAD = "usual", "other", "first", "unread"
COALESCED = "coalesced"  # an entry that ends with all calls of its number, which never do


@dataclass
class Call:
    """What a rank has called, or waits in.

    Attributes:
        group, number: equal on ranks that wait for each other in it; no group where only a stack
            shows it.
        name: "all_gather", or what an agreement is for; none where it is not known any more.
        shown: the public function that was called, as all_gather_object.
        time_ns: when, by the rank's clock.
        arrival: how the rank has come to it: USUAL, by OTHER calls than ever, or the FIRST time;
            UNREAD where the calls have no stacks, by which calls are told apart.
        operation: its number among all that the rank has called in the group: messages too.
        sizes, dtypes: of its tensors; none where ranks may have others.
        is_done: whether it has ended on this rank.
        stack: the user's own lines at the call.
        on_device: whether it returned at once, and waits on a device.
        members: ranks of the group; none where that is not known.
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
        self.stack = tuple(Frame(*frame) for frame in self.stack)  # lists, where it was JSON

    @property
    def key(self) -> tuple[str, int]:
        """The same on ranks that have to make the same call."""
        return self.group, self.number

    @property
    def signature(self) -> tuple[object, ...]:
        """What is equal on ranks that make the same call: shapes may differ, elements may not."""
        if not self.group:
            return self.name, self.stack
        return self.name, sum(map(math.prod, self.sizes)), *sorted({*self.dtypes})

    @property
    def is_counted(self) -> bool:
        """Whether it is a collective of which the flight recorder has the number."""
        return bool(self.group) and not self.group.startswith((AGREEMENTS, MESSAGES))

    @property
    def is_message(self) -> bool:
        """Whether one rank has to do something else for it: to send, to receive, to set a key."""
        if self.group:
            return self.group.startswith(MESSAGES)
        return any(word in self.name for word in ONE_ENDED)

    def describe(self, with_sizes: bool = False) -> str:
        """As text: "all_gather #412 of group mesh_tp 3"."""
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
    """Reads what the recorders write: numbers, texts, lists and dicts."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} in a flight recorder's dump")


def read_entries(with_stacks: bool, is_still: bool) -> list[dict[str, Any]]:
    """The entries of both recorders; none of one that does not answer.

    Args:
        with_stacks: which takes up to two seconds the first time.
        is_still: whether the job stands, so that no dump can meet a call.
    """
    # No public name: without these, the stacks alone say where a rank waits.
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
    """All calls of a job that runs that can be read safely, the oldest first."""
    return _calls(read_entries(with_stacks, is_still=False))


def _calls(entries: Sequence[dict[str, Any]]) -> list[Call]:
    """All calls but those of our own groups, which have no name there (`own_calls` has them), and
    messages that have arrived, whose number both ends do not share.
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
        if calls and call.number < calls[-1].number:  # a new group has the name of a former one
            calls.clear()
        calls.append(call)
    return sorted(itertools.chain(*groups.values()), key=lambda call: call.time_ns)


def _launch(entry: dict[str, Any]) -> tuple[object, ...]:
    """The same for all calls that NCCL launches together."""
    number = "p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id"
    return *entry["process_group"], number, entry.get(number)


def _name(entry: dict[str, Any]) -> str:
    """What an entry is of, without its backend: "all_gather", "send 0->1"."""
    return str(entry["profiling_name"]).rpartition(":")[2].strip("_")


def calls_of(entries: Sequence[dict[str, Any]]) -> list[Call]:
    """The calls of a recorder's entries that are under way, and of each group the newest others."""
    calls = _calls(entries)
    active = [call for call in calls if not call.is_done][:ACTIVE]
    has_stacks = any(entry.get("frames") for entry in entries)
    for call in active[:1]:  # in which the rank waits
        call.arrival = _arrival(calls[: calls.index(call) + 1]) if has_stacks else UNREAD
    groups = dict.fromkeys(call.group for call in calls)
    ended = [[call for call in calls if call.is_done and call.group == group] for group in groups]
    members = {group: _members(group.rpartition(" ")[2]) for group in groups}
    kept = [*(call for of_group in ended for call in of_group[-PASSED:]), *active]
    for call in kept:
        call.members = call.members or members[call.group]
    return kept


def _arrival(calls: Sequence[Call]) -> str:
    """How a rank has come to the last of its calls, beside how it came there before.

    Consecutive calls from one line count as one step with a length, as in a loop over parameters.
    Only lengths up to the longest before are usual.
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
    """A `send` or `recv` under way; its two ends have one group, and nobody else."""
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
    """A call from a recorder's entry, and from the one that says whether it has ended."""
    backend = str(entry["profiling_name"]).rpartition(":")[0]
    name = _name(entry).split(" ")[0]
    group, description = map(str, entry["process_group"])
    if description not in ("", "undefined", "default_pg", "default"):
        group = f"{description} {group}"
    # A call of NCCL is retired at its time-out too; gloo's recorder knows no other end.
    is_done = end["state"] == "completed" or (bool(end["retired"]) and backend != "nccl")
    side = (
        "output" if (name.startswith("all") and "gather" in name) or name == "scatter" else "input"
    )
    sizes, dtypes = entry.get(f"{side}_sizes", []), entry.get(f"{side}_dtypes", [])
    if any(text in name for text in UNEVEN):
        sizes = []  # ranks may have others
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
    """The ranks of a group, by its name; none where it is not known any more."""
    c10d: Any = torch._C._distributed_c10d  # pyright: ignore
    try:
        return dist.get_process_group_ranks(c10d._resolve_process_group(group))
    except (AttributeError, RuntimeError, ValueError):
        return []


def note_line(calls: Sequence[Call], stack: Stack) -> None:
    """Note the line of the only call that is under way, where the main thread stands in it.

    Args:
        calls: without stacks.
        stack: of the main thread.
    """
    active = [call for call in calls if not call.is_done]
    shown = collective_of(stack)
    is_ours = shown == AGREEMENT or any(word in shown for word in ONE_ENDED)
    if len(active) == 1 and not active[0].on_device and not is_ours and not VAGUE.fullmatch(shown):
        active[0].shown, active[0].stack = shown, own_frames(stack)[:FRAMES]


def own_calls(stack: Stack) -> list[Call]:
    """Our own agreements: the newest of each group, and the one that the main thread waits in.

    Args:
        stack: of the main thread.
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
        if number is None:  # messages between two ranks are not counted
            group, number, ranks = f"{group} messages", 0, [*waiting.peers]
        lines = own_frames(stack)[:FRAMES]
        calls.append(Call(group, number, waiting.what, stack=lines, members=ranks))
    return calls


def switched_off() -> str:
    """The variable by which the user has switched a recorder off; "" without."""
    off = (name for name in SWITCHES if os.environ.get(name, "").strip() == "0")
    return next((f"{name}=0" for name in off), "")
