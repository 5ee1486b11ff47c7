"""Find calls that differ between ranks without a hang.

With NCCL, an all_reduce of one element on some ranks and of two on another returns wrong values.
Each rank therefore publishes digests of its calls, and rank 0 compares them. A digest is of a block
of calls by their numbers in a group, so ranks need not read them at the same time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time

from anyrank.watching.recorder import Call, read_calls
from anyrank.world.store import Store

log = logging.getLogger("anyrank.watching")

BLOCK = 16  # calls of one group per digest
SHARE = 500  # pause between two reads, in durations of a read: 0.2 % of the time
Digests = dict[str, dict[str, str]]  # group -> block -> digest


class CallDigests:
    """The digests of calls: this rank publishes its own; rank 0 finds a block that differs.

    If a recorder has overwritten calls between two reads, they are not compared; a warning is
    logged once.

    Args:
        store: the store of the watch.
        rank, size: this rank, and the number of ranks of the job.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._next_look = 0.0 if size > 1 else float("inf")
        self._digests: Digests = {}
        self._newest: dict[str, int] = {}  # newest call of each group at the last read
        self._has_wrapped = False

    def tick(self) -> tuple[str, int] | None:
        """Read if it is time, and return the group and block that differ; in the watch's thread."""
        if time.monotonic() < self._next_look:
            return None
        start = time.thread_time()
        self._read()
        self._store.set(f"digests/{self._rank}", json.dumps(self._digests))
        differing = self._compare() if self._rank == 0 else None
        seconds = SHARE * (time.thread_time() - start)
        self._next_look = float("inf") if differing else time.monotonic() + seconds
        return differing

    def _read(self) -> None:
        """Compute the digests of all blocks that the recorder has completely."""
        groups: dict[str, dict[int, list[Call]]] = {}
        for call in read_calls(with_stacks=False):
            groups.setdefault(call.group, {}).setdefault(call.number, []).append(call)
        digests: Digests = {}
        for group, calls in groups.items():
            oldest, newest = min(calls), max(calls)
            known, before = self._digests.get(group, {}), self._newest.get(group, oldest)
            if self._rank == 0 and oldest > before + 1 and not self._has_wrapped:
                self._has_wrapped = True
                log.warning(
                    "calls %d to %d of group %s are not compared between ranks, because torch's "
                    "flight recorder no longer has them. Raise TORCH_FR_BUFFER_SIZE, the number of "
                    "calls that it keeps",
                    before + 1,
                    oldest - 1,
                    group,
                )
            first = 0 if oldest <= 1 else -(-oldest // BLOCK)
            whole = {str(block): calls for block in range(first, newest // BLOCK)}
            digests[group] = {
                block: known.get(block) or _digest(whole[block], int(block)) for block in whole
            }
            self._newest[group] = newest
        self._digests = digests

    def _compare(self) -> tuple[str, int] | None:
        """Return the first block that differs between two ranks."""
        keys = [f"digests/{rank}" for rank in range(self._size)]
        if not self._store.has(keys):
            return None
        values = self._store.call(lambda store: store.multi_get(keys))
        seen: dict[tuple[str, int], str] = {}
        for value in values:
            for group, blocks in json.loads(value).items():
                for block, digest in blocks.items():
                    if seen.setdefault((group, int(block)), digest) != digest:
                        return group, int(block)
        return None


def _digest(calls: dict[int, list[Call]], block: int) -> str:
    """Return the digest of the calls in a block."""
    numbers = range(block * BLOCK, (block + 1) * BLOCK)
    lines = [call.signature for number in numbers for call in calls.get(number, ())]
    return hashlib.blake2b(repr(lines).encode(), digest_size=6).hexdigest()


def calls_of_block(group: str, block: int, with_stacks: bool) -> list[Call]:
    """Return the calls of this rank in a block; with stacks, also the lines that made them."""
    calls = read_calls(with_stacks)
    return [call for call in calls if (call.group, call.number // BLOCK) == (group, block)]
