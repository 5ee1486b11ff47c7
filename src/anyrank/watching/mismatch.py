"""Finds calls that differ between ranks without a hang.

Under NCCL an all_reduce of one element on some ranks and of two on another returns garbage. So each
rank publishes digests of its calls, in blocks by the numbers of each group, which need no common
moment, and the first rank compares them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time

from anyrank.watching.recorder import Call, read_calls
from anyrank.world.store import Store

log = logging.getLogger("anyrank.watching")

BLOCK = 16  # calls of one group in a digest
SHARE = 500  # pause between two looks, in durations of a look: 0.2 %
Digests = dict[str, dict[str, str]]  # group -> block -> digest


class CallDigests:
    """Publishes this rank's digests, and on the first rank finds a block that differs.

    If a recorder has wrapped between two looks, the calls in between are not compared, which is
    logged once.

    Args:
        store: the watch's store.
        rank, size: this rank and the number of ranks of the job.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._next_look = 0.0 if size > 1 else float("inf")
        self._digests: Digests = {}
        self._newest: dict[str, int] = {}  # newest call of each group at the last look
        self._has_wrapped = False

    def tick(self) -> tuple[str, int] | None:
        """Look, if it is time; return the group and block that differ. By the watch's thread."""
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
        """Compute the digests of all blocks that are whole in the recorder."""
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
                    "calls %d to %d of group %s are not compared between ranks, as torch's flight "
                    "recorder had lost them: TORCH_FR_BUFFER_SIZE is how many it keeps",
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
        """The first block that differs between two ranks."""
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
    """The digest of the calls of a block."""
    numbers = range(block * BLOCK, (block + 1) * BLOCK)
    lines = [call.signature for number in numbers for call in calls.get(number, ())]
    return hashlib.blake2b(repr(lines).encode(), digest_size=6).hexdigest()


def calls_of_block(group: str, block: int, with_stacks: bool) -> list[Call]:
    """This rank's calls of a block, and the lines that made them."""
    calls = read_calls(with_stacks)
    return [call for call in calls if (call.group, call.number // BLOCK) == (group, block)]
