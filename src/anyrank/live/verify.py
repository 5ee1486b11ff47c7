"""Compare both ends of a sync with digests of the same elements, whatever the two layouts are."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

import torch

from anyrank.errors import LoadError
from anyrank.files.content_hash import BLOCK_BYTES, hash_of
from anyrank.loading.sharing.flows import Flow
from anyrank.loading.sharing.passing import exchange
from anyrank.loading.sharing.places import LocalMemory
from anyrank.loading.sharing.transfers import Transfer
from anyrank.wording import count
from anyrank.world.ranks import Ranks

DIGEST_BYTES = 16  # for one transfer


def differing(flows: Sequence[Flow], places: LocalMemory, ranks: Ranks) -> list[str]:
    """List the tensors whose two ends have different values, on any rank. Collective.

    Each transfer is digested at its source, with the cast for the other end, and at its target:
    every element of `dst` once, on each rank that holds it.
    """
    rank = ranks.rank
    pairs = [(flow, transfer) for flow in flows for transfer in flow.transfers]
    sends = [(flow, transfer) for flow, transfer in pairs if transfer.sender == rank]
    receives = [(flow, transfer) for flow, transfer in pairs if transfer.receiver == rank]

    def digest_here() -> list[bytes]:
        sources = (_source(flow, transfer, places) for flow, transfer in sends)
        targets = (_target(flow, transfer, places) for flow, transfer in receives)
        return [bytes.fromhex(hash_of(parts)) for parts in chain(sources, targets)]

    digests = ranks.run("digesting both ends", digest_here)
    sources, targets = digests[: len(sends)], digests[len(sends) :]
    sent, own_digests = dict[int, bytes](), list[bytes]()
    for (_, transfer), digest in zip(sends, sources, strict=True):
        if transfer.receiver == rank:
            own_digests.append(digest)
        else:
            sent[transfer.receiver] = sent.get(transfer.receiver, b"") + digest
    counts = Counter(transfer.sender for _, transfer in receives if transfer.sender != rank)
    received = {
        sender: torch.empty(count * DIGEST_BYTES, dtype=torch.uint8, device="cpu")
        for sender, count in counts.items()
    }
    if ranks.size > 1:
        outgoing = [(_as_tensor(data), receiver) for receiver, data in sent.items()]
        incoming = [(tensor, sender) for sender, tensor in received.items()]
        exchange(ranks, outgoing, incoming, "comparing both ends")
    expected = {sender: _digests_in(tensor) for sender, tensor in received.items()}
    expected[rank] = iter(own_digests)
    wrong = {
        flow.name
        for (flow, transfer), digest in zip(receives, targets, strict=True)
        if next(expected[transfer.sender]) != digest
    }
    return sorted(ranks.reduce("comparing both ends", wrong, operator.or_))


def check_equal(flows: Sequence[Flow], places: LocalMemory, ranks: Ranks) -> None:
    """Check that `dst` has the values of `src`. Collective.

    Raises:
        LoadError: values differ; the error names the tensors; on every rank.
    """
    wrong = differing(flows, places, ranks)
    if wrong:
        raise LoadError(
            f"{count(len(wrong), 'tensor differs', 'tensors differ')} between dst and src after "
            f"the sync: {', '.join(wrong[:10])}. Either something wrote to one of the two during "
            "the call, or tensors of dst share memory"
        )


def check_before(flows: Sequence[Flow], places: LocalMemory, ranks: Ranks) -> None:
    """Check values that are not sent and must be equal: frozen parts and ties of `dst`. Collective.

    Raises:
        LoadError: values differ; the error names the tensors; on every rank.
    """
    compared = [flow for flow in flows if flow.is_compared]
    wrong = differing(compared, places, ranks) if compared else []
    twins = {flow.name for flow in compared if flow.twin >= 0}
    if twins.intersection(wrong):
        raise LoadError(
            f"{', '.join(name for name in wrong if name in twins)} are tied in dst, but have "
            "different values in src. Untie them in dst, or tie them in src"
        )
    if wrong:
        raise LoadError(
            f"{', '.join(wrong[:10])}: frozen in dst, but src has different values. Freeze the "
            "part with the weights that belong to src, or do not freeze it"
        )


def _source(flow: Flow, transfer: Transfer, places: LocalMemory) -> Iterator[torch.Tensor]:
    """Yield what a rank sends, in parts, with the dtype in which it arrives."""
    for box in transfer.box.cut(BLOCK_BYTES // flow.target_dtype.itemsize):
        yield places.source_view(flow, transfer, box).to(flow.wire_dtype).to(flow.target_dtype)


def _target(flow: Flow, transfer: Transfer, places: LocalMemory) -> Iterator[torch.Tensor]:
    """Yield what has arrived, in the same parts."""
    for box in transfer.box.cut(BLOCK_BYTES // flow.target_dtype.itemsize):
        yield places.target_view(flow, transfer, box)


def _digests_in(data: torch.Tensor) -> Iterator[bytes]:
    """Yield the digests from another rank, in an order that both ranks know."""
    return (bytes(row) for row in data.view(-1, DIGEST_BYTES).tolist())


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
