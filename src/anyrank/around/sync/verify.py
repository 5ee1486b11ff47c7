"""Both ends of a sync, compared by digests of the same elements, whatever the two layouts are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from anyrank.around.sharing.flows import Flow
from anyrank.around.sharing.places import LocalMemory
from anyrank.around.sharing.transfers import Transfer
from anyrank.errors import LoadError
from anyrank.files.content_hash import BLOCK_BYTES, hash_of
from anyrank.world.ranks import Ranks

DIGEST_BYTES = 16


def differing(flows: Sequence[Flow], places: LocalMemory, ranks: Ranks) -> list[str]:
    """Names of the tensors whose two ends do not hold the same values, on any rank. All ranks.

    Each transfer is digested where it comes from, cast as it was for the other end, and where it
    went to: every element of `dst` once, on each rank that holds it.
    """
    rank = ranks.rank
    pairs = [(flow, transfer) for flow in flows for transfer in flow.transfers]

    def digest_here() -> tuple[set[str], dict[int, bytes], list[tuple[str, int, bytes]]]:
        wrong: set[str] = set()
        sent: dict[int, bytes] = {}
        expected: list[tuple[str, int, bytes]] = []
        for flow, transfer in pairs:
            sent_digest = _digest_source(flow, transfer, places) if transfer.sender == rank else b""
            target_digest = (
                _digest_target(flow, transfer, places) if transfer.receiver == rank else b""
            )
            if sent_digest and target_digest and sent_digest != target_digest:
                wrong.add(flow.name)
            elif sent_digest and not target_digest:
                sent[transfer.receiver] = sent.get(transfer.receiver, b"") + sent_digest
            elif target_digest and not sent_digest:
                expected.append((flow.name, transfer.sender, target_digest))
        return wrong, sent, expected

    wrong, sent, expected = ranks.run("digesting both ends", digest_here)
    counts: dict[int, int] = {}
    for _, sender, _ in expected:
        counts[sender] = counts.get(sender, 0) + DIGEST_BYTES
    received = {sender: torch.empty(n, dtype=torch.uint8) for sender, n in counts.items()}
    outgoing = [(_as_tensor(data), receiver) for receiver, data in sent.items()]
    if ranks.size > 1:
        incoming = [(tensor, sender) for sender, tensor in received.items()]
        ranks.exchange(outgoing, incoming, "comparing both ends")
    position = dict.fromkeys(received, 0)
    for name, sender, target_digest in expected:
        sent_digest = received[sender][position[sender] : position[sender] + DIGEST_BYTES]
        position[sender] += DIGEST_BYTES
        if bytes(sent_digest.tolist()) != target_digest:
            wrong.add(name)
    by_rank = ranks.gather(sorted(wrong), "comparing both ends")
    return sorted(set().union(*by_rank))


def check_equal(flows: Sequence[Flow], places: LocalMemory, ranks: Ranks) -> None:
    """Refuse a `dst` that does not hold what `src` holds. All ranks.

    Raises:
        LoadError: names the tensors; on all ranks.
    """
    wrong = differing(flows, places, ranks)
    if wrong:
        raise LoadError(
            f"{len(wrong)} tensors of dst do not hold what src holds: {', '.join(wrong[:10])}: "
            "something wrote to one of the two during the call, or tensors of dst share memory"
        )


def check_before(flows: Sequence[Flow], places: LocalMemory, ranks: Ranks) -> None:
    """Compare what is not sent, and has to be equal: frozen parts, and what `dst` ties. All ranks.

    Raises:
        LoadError: names the tensors; on all ranks.
    """
    compared = [flow for flow in flows if flow.is_compared]
    wrong = differing(compared, places, ranks) if compared else []
    twins = {flow.name for flow in compared if flow.twin >= 0}
    if twins.intersection(wrong):
        raise LoadError(
            f"{', '.join(name for name in wrong if name in twins)}: one tensor in dst, and "
            "different values in src: untie them in dst, or tie them in src"
        )
    if wrong:
        raise LoadError(
            f"{', '.join(wrong[:10])}: frozen in dst, and src holds other values: freeze the part "
            "with the weights that belong to src, or do not freeze it"
        )


def _digest_source(flow: Flow, transfer: Transfer, places: LocalMemory) -> bytes:
    boxes = transfer.box.cut(BLOCK_BYTES // flow.target_dtype.itemsize)
    parts = (
        places.source_view(flow, transfer, box).to(flow.wire_dtype).to(flow.target_dtype)
        for box in boxes
    )
    return _digest(parts)


def _digest_target(flow: Flow, transfer: Transfer, places: LocalMemory) -> bytes:
    boxes = transfer.box.cut(BLOCK_BYTES // flow.target_dtype.itemsize)
    return _digest(places.target_view(flow, transfer, box) for box in boxes)


def _digest(parts: Iterator[torch.Tensor]) -> bytes:
    return bytes.fromhex(hash_of(parts))


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
