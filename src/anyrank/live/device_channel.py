"""The bytes of a sync from device to device, in rounds of one all-to-all each.

Each pair of ranks has one stream of bytes, cut into slots of one size at both ends; round k moves
slot k of every pair. So a rank knows each round's splits from its own part of the plan, no buffer
is longer than the limit, and the ranks must only agree on the number of rounds. While a round runs,
the previous one is unpacked and the next one is packed, so there are two buffers to send and two to
receive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from anyrank import faults
from anyrank.errors import RankError
from anyrank.live.device_group import (
    DeviceGroup,
    Open,
    Round,
    on_device,
    open_group,
    open_nccl,
)
from anyrank.live.route import Route
from anyrank.loading.sharing.flows import Flow
from anyrank.loading.sharing.messages import ALIGN, WHAT, Message, aligned, messages_of
from anyrank.loading.sharing.move import Mover
from anyrank.loading.sharing.places import LocalMemory
from anyrank.world.alike import digest_of
from anyrank.world.ranks import Interrupted, Ranks

CHANNEL_BYTES = 256 << 20  # for one rank: a smaller call takes less time than connecting a group
BUFFER_BYTES = 32 << 20  # for each of the four buffers
CHANNEL_ROUND = -1  # key of the channel's messages in a route

T = TypeVar("T")
Try = Callable[[Callable[[], object]], object]


@dataclass(frozen=True)
class ChannelKind:
    """A way in which ranks could pass bytes from device to device.

    Attributes:
        name: name of the library.
        open_raw: opens torch's group between all ranks of the call.
        from_bytes: smallest number of bytes, sent or received by one rank, for which the group pays
            off.
        buffer_bytes: size of each of the four buffers.
    """

    name: str
    open_raw: Open
    from_bytes: int = CHANNEL_BYTES
    buffer_bytes: int = BUFFER_BYTES


def choose_channel(devices: Sequence[str]) -> ChannelKind | None:
    """Choose the channel that ranks may use; None if everything goes over gloo.

    Two ranks on one device are recognized by its uuid, because each may call it cuda:0; NCCL
    rejects them, or serves them one by one.

    Args:
        devices: for each rank, type and uuid of the accelerator that holds all its tensors; "" or a
            different text if they are elsewhere. The same on every rank.
    """
    are_own = len(set(devices)) == len(devices) > 1
    if are_own and all(device.startswith("cuda:") for device in devices):
        return ChannelKind("nccl", open_nccl)
    return None


@dataclass(frozen=True)
class DeviceChannel:
    """The ranks' agreement on a channel, kept with its plan.

    Attributes:
        kind: kind of the channel.
        name: name of the group: the kind and the ranks' devices.
        slot_bytes: limit of the bytes that a pair of ranks passes in a round.
        rounds: number of rounds, the same on every rank.
    """

    kind: ChannelKind
    name: str
    slot_bytes: int
    rounds: int

    def messages(self, flows: Sequence[Flow], places: LocalMemory, route: Route) -> list[Message]:
        """Return this rank's slots and its own copies; the route keeps them."""
        return route.messages(
            CHANNEL_ROUND, lambda: messages_of(flows, self.slot_bytes, places.piece_bytes)
        )


def _find_channel(
    devices: Sequence[str],
    flows: Sequence[Flow],
    places: LocalMemory,
    ranks: Ranks,
    route: Route,
) -> DeviceChannel | None:
    """Return the channel of a plan; the first call agrees on it. Collective.

    Args:
        devices: see `choose_channel`.
        flows: all flows to move, with this rank's transfers.
        places: memory of this rank.
        ranks: ranks of the call.
        route: route of the plan.

    Raises:
        RankError: two ranks would cut their messages differently, which no library detects.
    """
    if route.channel is None:
        kind = choose_channel(devices) if ranks.size > 1 else None
        channel = None if kind is None else _agree(kind, devices, flows, places, ranks, route)
        route.channel = channel or False
    return route.channel or None


def _agree(
    kind: ChannelKind,
    devices: Sequence[str],
    flows: Sequence[Flow],
    places: LocalMemory,
    ranks: Ranks,
    route: Route,
) -> DeviceChannel | None:
    rank = ranks.rank
    sent, received = dict[int, int](), dict[int, int]()  # bytes by peer
    for flow in flows:
        for transfer in flow.transfers:
            nbytes = transfer.box.numel * flow.wire_dtype.itemsize
            if transfer.sender != rank:
                received[transfer.sender] = received.get(transfer.sender, 0) + nbytes
            elif transfer.receiver != rank:
                sent[transfer.receiver] = sent.get(transfer.receiver, 0) + nbytes
    peers = max(len(sent), len(received))
    nbytes = max(sum(sent.values()), sum(received.values()))
    peers, nbytes, is_on_one = ranks.reduce(
        WHAT,
        (peers, nbytes, places.is_on_one_device),
        lambda some, others: (
            max(some[0], others[0]),
            max(some[1], others[1]),
            some[2] and others[2],
        ),
    )
    if nbytes < kind.from_bytes or not is_on_one:
        return None
    peers = max(1, peers)
    slot = max(ALIGN, kind.buffer_bytes // peers // ALIGN * ALIGN)
    name = " ".join((kind.name, *devices))
    out, into, _ = _sorted(DeviceChannel(kind, name, slot, 0).messages(flows, places, route), rank)
    number = max(map(len, (*out.values(), *into.values())), default=0)
    balance = sum(_number(rank, peer, text) for peer, text in _digests(out).items())
    balance -= sum(_number(peer, rank, text) for peer, text in _digests(into).items())
    # Each pair is in the sum twice: once from the sender, and with the opposite sign from the
    # receiver.
    number, balance = ranks.reduce(
        WHAT, (number, balance), lambda some, others: (max(some[0], others[0]), some[1] + others[1])
    )
    if balance:
        _raise_mismatch(_digests(out), _digests(into), ranks)
    return DeviceChannel(kind, name, slot, number)


def _number(sender: int, receiver: int, text: str) -> int:
    return int(digest_of([sender, receiver, text]), 16)


def _raise_mismatch(out: Mapping[int, str], into: Mapping[int, str], ranks: Ranks) -> None:
    """Raise RankError with two ranks that would cut their messages differently. Collective."""
    answers = ranks.gather(WHAT, (out, into))  # once, for an error
    by_rank = dict(zip(ranks.ranks, answers, strict=True))
    for sender, (digests, _) in by_rank.items():
        for receiver in ranks.ranks:
            if digests.get(receiver) != by_rank[receiver][1].get(sender):
                raise RankError(
                    f"{WHAT}: ranks {sender} and {receiver} would cut their messages differently. "
                    "Please report this as a bug, and until then pass the tensors on the CPU"
                )


Slots = dict[int, list[Message]]


def _sorted(messages: Sequence[Message], rank: int) -> tuple[Slots, Slots, list[Message]]:
    """Group slots by receiver and by sender, and list the rank's own copies."""
    out, into, copies = Slots(), Slots(), list[Message]()
    for message in messages:
        if message.sender == message.receiver:
            copies.append(message)
        elif message.sender == rank:
            out.setdefault(message.receiver, []).append(message)
        else:
            into.setdefault(message.sender, []).append(message)
    return out, into, copies


def _digests(slots: Slots) -> dict[int, str]:
    """Compute a digest of the lengths of each pair's slots."""
    return {peer: digest_of(m.nbytes for m in messages) for peer, messages in slots.items()}


class ChannelRun:
    """The rounds of one call on a rank.

    Args:
        channel: channel that the ranks agreed on.
        messages: this rank's messages.
        places: memory of this rank.
        ranks: ranks of the call.
        attempt: function that runs work and keeps its error; it does nothing after an error.
        has_failed: function that returns True after an error.

    Attributes:
        sent, received, copied: bytes so far.
        buffer_bytes, group_bytes: device memory of the four buffers, and of the group.
    """

    def __init__(
        self,
        channel: DeviceChannel,
        messages: Sequence[Message],
        places: LocalMemory,
        ranks: Ranks,
        attempt: Try,
        has_failed: Callable[[], bool],
    ) -> None:
        self.channel, self.places, self.ranks = channel, places, ranks
        self.attempt, self.has_failed = attempt, has_failed
        self.out, self.into, self.copies = _sorted(messages, ranks.rank)
        self.device = next(iter(places.devices), torch.device("cpu"))
        self.buffers: list[torch.Tensor] = []
        self.sent = self.received = self.copied = self.buffer_bytes = self.group_bytes = 0

    def run(self, sample: Callable[[], None]) -> None:
        """Move everything, and wait for it. Collective.

        Args:
            sample: called after each round, to measure memory.

        Raises:
            Interrupted: this or another rank has failed.
            RankError: a rank died.
        """
        with on_device(self.device):
            self._run(sample)

    def _run(self, sample: Callable[[], None]) -> None:
        self.attempt(self._allocate)
        channel = self.channel
        group = open_group(
            self.ranks.ready(), channel.name, channel.kind.open_raw, self.device, WHAT
        )
        self.group_bytes = group.nbytes
        # No work of this rank is left on its device, and no rank starts before all have arrived:
        # pending work of a user's group on one of them could wait for work that follows a round.
        if self.ranks.any(WHAT, self.has_failed()):
            raise Interrupted
        last = self._rounds(group, sample)
        for round_under_way in last:
            round_under_way.finish()
        group.settle(WHAT)()

    def _rounds(self, group: DeviceGroup, sample: Callable[[], None]) -> list[Round]:
        """Run the rounds and return them; the last two may still be running."""
        count = self.channel.rounds
        rounds: list[Round] = []
        flags: dict[int, Callable[[], bool]] = {}
        for k in range(count + 1):
            if k >= 2:  # neither the host nor the buffers are ever more than two rounds ahead
                rounds[k - 2].finish()
                if k in flags and flags[k]():
                    rounds[k - 1].finish()  # all ranks stop here, while one round runs
                    raise Interrupted
            if k < count:
                rounds.append(self._start(group, k))
                if k + 2 < count:
                    flags[k + 2] = self.ranks.start_any(WHAT, self.has_failed())
            if k == 0:
                for message in self.copies:  # while the first round runs
                    self.attempt(lambda m=message: self._copy(m))
            else:
                rounds[k - 1].follow()
                self._unpack(k - 1)
                sample()
        return rounds[-2:]

    def _allocate(self) -> None:
        """Allocate two buffers to send and two to receive, for this rank's longest round."""
        rounds = range(self.channel.rounds)
        for side in (self.out, self.into):
            most = max((sum(self._splits(side, k)) for k in rounds), default=0)
            self.buffers += [
                torch.empty(most, dtype=torch.uint8, device=self.device)
                for _ in range(min(2, len(rounds)))
            ]
        self.buffer_bytes = sum(buffer.numel() for buffer in self.buffers)

    def _start(self, group: DeviceGroup, k: int) -> Round:
        """Pack a round and start it; a failed rank sends meaningless values."""
        half = len(self.buffers) // 2
        source, target = self.buffers[k % half], self.buffers[half + k % half]
        for message, start in self._slots(self.out, k):
            part = source[start : start + message.nbytes]
            self.attempt(lambda m=message, p=part: self._pack(m, p))
            self.sent += message.payload
        outs, ins = self._splits(self.into, k), self._splits(self.out, k)
        return group.start(target, source, outs, ins, WHAT)

    def _pack(self, message: Message, memory: torch.Tensor) -> None:
        faults.point("sync.send")
        self.places.pack(message, memory)

    def _unpack(self, k: int) -> None:
        half = len(self.buffers) // 2
        target = self.buffers[half + k % half]
        for message, start in self._slots(self.into, k):
            part = target[start : start + message.nbytes]
            self.attempt(lambda m=message, p=part: self._put(m, p))
            self.received += message.payload

    def _put(self, message: Message, memory: torch.Tensor) -> None:
        faults.point("sync.receive")
        self.places.unpack(message, memory)

    def _copy(self, message: Message) -> None:
        self.places.copy(message)
        self.copied += message.target_bytes

    def _slots(self, side: Slots, k: int) -> Iterator[tuple[Message, int]]:
        """Yield each message of a round that a rank sends or receives, and its start."""
        start = 0
        for rank in self.ranks.ranks:
            slots = side.get(rank, ())
            if k < len(slots):
                yield slots[k], start
                start += aligned(slots[k].nbytes)

    def _splits(self, side: Slots, k: int) -> list[int]:
        """Return the number of bytes to or from each rank."""
        lengths = dict.fromkeys(self.ranks.ranks, 0)
        for rank, slots in side.items():
            lengths[rank] = aligned(slots[k].nbytes) if k < len(slots) else 0
        return [*lengths.values()]


class ChannelMover(Mover):
    """The move of a kept plan: over its channel if it has one, otherwise over gloo.

    Args:
        rounds, places, ranks, window_bytes, sample: as for `Mover`.
        route: keeps the messages for a later call with the same rounds.
        accelerators: the accelerators of all ranks, as for `choose_channel`.

    Attributes:
        channel: name of the library that moved bytes from device to device, or "".
        buffer_bytes, group_bytes: device memory that the channel used.
    """

    def __init__(
        self,
        rounds: Iterable[Sequence[Flow]],
        places: LocalMemory,
        ranks: Ranks,
        window_bytes: int,
        sample: Callable[[], None],
        route: Route,
        accelerators: Sequence[str],
    ) -> None:
        self.route = route
        self.accelerators = accelerators
        self.channel = ""
        self.buffer_bytes = self.group_bytes = 0
        super().__init__(rounds, places, ranks, window_bytes, sample)

    def _move(self) -> None:
        flows = [flow for flows in self.rounds for flow in flows]
        channel = _find_channel(self.accelerators, flows, self.places, self.ranks, self.route)
        if channel is None:
            super()._move()
        else:
            self._take(channel, flows)

    def _take(self, channel: DeviceChannel, flows: Sequence[Flow]) -> None:
        """Move everything from device to device. Raises the same errors as `run`."""
        messages = channel.messages(flows, self.places, self.route)
        run = ChannelRun(
            channel, messages, self.places, self.ranks, self._try, lambda: bool(self.problem)
        )
        self.channel = channel.kind.name
        try:
            run.run(self.sample)
        finally:
            self.sent, self.received, self.copied = run.sent, run.received, run.copied
            self.buffer_bytes, self.group_bytes = run.buffer_bytes, run.group_bytes
            if self.problem is not None:
                raise self.problem

    def _messages(self, number: int, flows: Sequence[Flow]) -> list[Message]:
        return self.route.messages(
            number, lambda: messages_of(flows, self.message_bytes, self.places.piece_bytes)
        )

    def _allocate(self, nbytes: int) -> torch.Tensor:
        # A channel has its own buffers.
        return super()._allocate(0 if self.route.channel else nbytes)
