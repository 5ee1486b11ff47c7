"""A message through the tree of ranks: a head of fixed length, and a longer value if needed."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

HEAD_BYTES = 128  # of every message; a short value is in the head, a longer one follows
HEAD = struct.Struct("<16sBQ?")  # digest, status, length of the value, whether it is compressed
# Values of these lengths are compressed, because ranks mostly send the same text; longer ones are
# tensors of a module's extra state, for which compression would take seconds.
LONG_BYTES, HUGE_BYTES = 512, 1 << 20
# All took this action and succeeded; they did not; the error for all; the group has ended, and why
FINE, TROUBLE, END, ENDED = range(4)


@dataclass(frozen=True)
class Message:
    """A digest of the sender's action, whether it and the ranks below succeeded, and a value."""

    digest: bytes
    status: int
    value: bytes

    @cached_property
    def parts(self) -> list[bytes]:
        """Return the pieces to send: the head, and the value unless it fits into the head."""
        value, is_long = self.value, LONG_BYTES < len(self.value) <= HUGE_BYTES
        if is_long:
            value = zlib.compress(value, 1)
        head = HEAD.pack(self.digest, self.status, len(value), is_long)
        if len(head) + len(value) <= HEAD_BYTES:
            return [(head + value).ljust(HEAD_BYTES, b"\0")]
        return [head.ljust(HEAD_BYTES, b"\0"), value]

    @classmethod
    def unpack(cls, head: bytes, receive: Callable[[int], bytes]) -> Message:
        """Read a message whose head has arrived.

        Args:
            head: the first of the message's `parts`.
            receive: receives the given number of bytes, which follow.
        """
        digest, status, length, is_long = HEAD.unpack_from(head)
        is_short = HEAD.size + length <= HEAD_BYTES
        value = head[HEAD.size : HEAD.size + length] if is_short else receive(length)
        return cls(digest, status, zlib.decompress(value) if is_long else value)
