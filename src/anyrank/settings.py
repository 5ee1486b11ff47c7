"""Every ANYRANK_* environment knob, in one table. Argument > environment > default.

No knob changes what is computed; they bound memory, time and output only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from anyrank.errors import AnyrankError

MIB = 1 << 20
MAX_BYTES = 1 << 36  # 64 GiB
MAX_SEC = 1_000_000  # 11 days; deadlines of 2**31 milliseconds overflow below torch
MAX_THREADS = 1024
SHOWN_CHARACTERS = 40  # of a value in a message


@dataclass(frozen=True)
class Knob:
    """One environment variable that holds a positive integer.

    Attributes:
        name: the variable's name, its unit last.
        default: the value without the variable.
        most: the largest value; the smallest is 1.
        help: one line for the documentation.
    """

    name: str
    default: int
    most: int
    help: str

    def get(self) -> int:
        """The value in force.

        Raises:
            AnyrankError: the variable is not a positive integer, or above `most`.
        """
        text = os.environ.get(self.name)
        if text is None:
            return self.default
        digits = text.strip().lstrip("0")
        if not digits.isdecimal():
            raise AnyrankError(
                f"{self.name}={text!r} is not a positive integer: unset it, or give {self.default}"
            )
        # Python refuses to convert thousands of digits.
        if len(digits) > len(str(self.most)) or int(digits) > self.most:
            raise AnyrankError(
                f"{self.name}={text[:SHOWN_CHARACTERS]} is out of bounds: unset it, or give 1 to "
                f"{self.most}; the default is {self.default}"
            )
        return int(digits)


BUFFER_BYTES = Knob(
    "ANYRANK_BUFFER_BYTES", 8 * MIB, MAX_BYTES, "read and exchange buffer of one rank, CPU targets"
)
CUDA_BUFFER_BYTES = Knob(
    "ANYRANK_CUDA_BUFFER_BYTES",
    128 * MIB,
    MAX_BYTES,
    "pinned read buffer of one rank, CUDA targets",
)
READ_THREADS = Knob(
    "ANYRANK_READ_THREADS",
    16,  # one copies 3.5 to 5 GB/s out of the page cache, and a GPU's bus takes 55
    MAX_THREADS,
    "most threads that one rank reads with, where cores are free",
)
TIMEOUT_SEC = Knob(
    "ANYRANK_TIMEOUT_SEC",
    1800,
    MAX_SEC,
    "how long a rank waits for the others before it names the missing",
)

# Not knobs: `anyrank run` sets them for the scripts that it starts.
PEERS_FOLDER = "ANYRANK_PEERS_FOLDER"  # memory that outlives the ranks

KNOBS = (BUFFER_BYTES, CUDA_BUFFER_BYTES, READ_THREADS, TIMEOUT_SEC)
