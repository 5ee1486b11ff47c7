"""Every ANYRANK_* environment knob, in one table. Argument > environment > default.

No knob changes what is computed; they bound memory, time and output only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from anyrank.errors import AnyrankError

MIB = 1 << 20


@dataclass(frozen=True)
class Knob:
    """One environment variable that holds a positive integer.

    Attributes:
        name: the variable's name, its unit last.
        default: the value without the variable.
        help: one line for the documentation.
    """

    name: str
    default: int
    help: str

    def get(self) -> int:
        """The value in force. Raises AnyrankError when the variable is not a positive integer."""
        text = os.environ.get(self.name)
        if text is None:
            return self.default
        if not text.strip().isdigit() or int(text) == 0:
            raise AnyrankError(
                f"{self.name}={text!r} is not a positive integer: unset it, or give {self.default}"
            )
        return int(text)


BUFFER_BYTES = Knob(
    "ANYRANK_BUFFER_BYTES", 8 * MIB, "read and exchange buffer of one rank, CPU targets"
)
CUDA_BUFFER_BYTES = Knob(
    "ANYRANK_CUDA_BUFFER_BYTES", 128 * MIB, "pinned read buffer of one rank, CUDA targets"
)
READ_THREADS = Knob(
    "ANYRANK_READ_THREADS", 4, "most threads that one rank reads with, where cores are free"
)
TIMEOUT_SEC = Knob(
    "ANYRANK_TIMEOUT_SEC", 1800, "how long a rank waits for the others before it names the missing"
)

LOCK_SEC = Knob(
    "ANYRANK_LOCK_SEC", 600, "silence after which another machine's lock on a run folder is stale"
)

KNOBS = (BUFFER_BYTES, CUDA_BUFFER_BYTES, READ_THREADS, TIMEOUT_SEC, LOCK_SEC)
