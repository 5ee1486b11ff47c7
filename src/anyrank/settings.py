"""Every ANYRANK_* environment variable, in one table. Argument > environment > default.

None changes what is computed; they only bound memory, time and output.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from anyrank.errors import AnyrankError

MIB = 1 << 20
MAX_BYTES = 1 << 36  # 64 GiB
MAX_SEC = 1_000_000  # 11 days; deadlines of 2**31 milliseconds overflow in torch's libraries
MAX_THREADS = 1024
SHOWN_CHARACTERS = 40  # at most that many of a value in a message


@dataclass(frozen=True)
class Knob:
    """One environment variable that holds a positive integer.

    Attributes:
        name: the name of the variable; its unit is the last word.
        default: the value if the variable is not set.
        most: the largest value; the smallest is 1.
        help: one line for the documentation.
    """

    name: str
    default: int
    most: int
    help: str

    def get(self) -> int:
        """Return the value of the variable, or the default if it is not set.

        Raises:
            AnyrankError: the value is not a positive integer, or is above `most`.
        """
        text = os.environ.get(self.name)
        if text is None:
            return self.default
        digits = text.strip().lstrip("0")
        if not digits.isdecimal():
            raise AnyrankError(
                f"{self.name}={text!r}: must be a positive integer. Unset it to use the default, "
                f"{self.default}"
            )
        # Python does not convert thousands of digits.
        if len(digits) > len(str(self.most)) or int(digits) > self.most:
            raise AnyrankError(
                f"{self.name}={text[:SHOWN_CHARACTERS]}: must be between 1 and {self.most}. Unset "
                f"it to use the default, {self.default}"
            )
        return int(digits)


BUFFER_BYTES = Knob(
    "ANYRANK_BUFFER_BYTES",
    8 * MIB,
    MAX_BYTES,
    "read and exchange buffer of one rank, for CPU targets",
)
CUDA_BUFFER_BYTES = Knob(
    "ANYRANK_CUDA_BUFFER_BYTES",
    128 * MIB,
    MAX_BYTES,
    "pinned read buffer of one rank, for CUDA targets",
)
READ_THREADS = Knob(
    "ANYRANK_READ_THREADS",
    16,  # a thread copies 3.5 to 5 GB/s out of the page cache, and a GPU's bus takes 55
    MAX_THREADS,
    "maximum number of threads that one rank reads with, if cores are free",
)
TIMEOUT_SEC = Knob(
    "ANYRANK_TIMEOUT_SEC",
    1800,
    MAX_SEC,
    "seconds a rank waits for other ranks before it raises an error that names the missing ones",
)

# Not a knob: the launcher sets it, such as `anyrank run` for its scripts.
PEERS_FOLDER = "ANYRANK_PEERS_FOLDER"  # a folder in memory that outlives the ranks

KNOBS = (BUFFER_BYTES, CUDA_BUFFER_BYTES, READ_THREADS, TIMEOUT_SEC)
