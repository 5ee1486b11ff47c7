"""Read Python stacks from text, and find the calls that they show. Needs no process group.

The text is the output of `faulthandler` or py-spy. A line is user code unless its file belongs to
Python, to an installed package, or to anyrank.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
from importlib.util import find_spec
from typing import NamedTuple

from anyrank.wording import printable

HEADER = re.compile(r"^(?:Current thread|Thread) 0x0*([0-9a-f]+)")
FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_ESCAPED_LETTER = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
INSTALLED = re.compile(r"(^<)|([/\\](site|dist)-packages[/\\])|([/\\]lib(64)?/python3\.\d+/)")
COLLECTIVES = re.compile(r"torch/distributed/distributed_c10d\.py$")
DISTRIBUTED = re.compile(r"torch/(distributed|nn/parallel/distributed\.py)")
FETCHING = re.compile(r"torch/utils/data/|anyrank/data/fetch")
# These wait in C, so only the source line shows them.
WAITS = re.compile(r"\.(wait|item|cpu|tolist|synchronize)\(")
STORE_WAITS = re.compile(r"store\w*\.(wait|get|multi_get|barrier)\(")
BACKWARD = re.compile(r"torch/autograd/(graph|__init__)\.py$")
AGREEING = re.compile(r"anyrank/world/")
PIPELINES = re.compile(r"torch/distributed/pipelining/")  # these wait only for messages
# Names for waits that no function name shows.
AGREEMENT, STORE, WAIT = "an agreement of anyrank", "store.wait()", "wait()"
END = "destroy_process_group"


class Frame(NamedTuple):
    """A frame of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        shown = self.file.removeprefix(f"{os.getcwd()}/")
        return f"{printable(shown)}:{self.line} {printable(self.function)}"


Stack = tuple[Frame, ...]  # the innermost frame first


def unescape(dump: str) -> str:
    """Restore non-ASCII letters of paths and names, which `faulthandler` escapes."""
    return _ESCAPED_LETTER.sub(lambda match: chr(int(match[match.lastindex or 0], 16)), dump)


def read_faulthandler(text: str) -> dict[int, Stack]:
    """Return the stack of each thread in a dump of `faulthandler`; skip unreadable parts."""
    stacks: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in unescape(text).splitlines():
        if head := HEADER.match(line):
            frames = stacks.setdefault(int(head[1], 16), [])
        elif match := FRAME.match(line):
            number = int(match[2]) if match[2].isdigit() else 0
            frames.append(Frame(match[1], number, match[3]))
    return {thread: tuple(stack) for thread, stack in stacks.items()}


def read_py_spy(text: str) -> Stack:
    """Return the stack of the main thread from `py-spy dump --json`; empty if it has none."""
    threads = json.loads(text)
    main = [thread for thread in threads if thread.get("thread_name") == "MainThread"]
    frames = next((thread.get("frames", []) for thread in main or threads[-1:]), [])
    return tuple(Frame(frame["filename"], int(frame["line"]), frame["name"]) for frame in frames)


def is_own(frame: Frame) -> bool:
    """Return whether a frame is in user code."""
    return not INSTALLED.search(frame.file) and not frame.file.startswith(_installed())


@functools.cache
def _installed() -> tuple[str, ...]:
    """Return the folders of torch and anyrank, which may be clones that are not installed."""
    specs = [find_spec("torch"), find_spec("anyrank")]
    return tuple(f"{os.path.dirname(spec.origin)}/" for spec in specs if spec and spec.origin)


def own_frames(stack: Stack) -> Stack:
    """Return the frames in user code, the innermost first."""
    return tuple(frame for frame in stack if is_own(frame))


def _inner_frames(stack: Stack) -> Stack:
    """Return the frames inside of the innermost frame in user code."""
    return tuple(itertools.takewhile(lambda frame: not is_own(frame), stack))


def collective_of(stack: Stack) -> str:
    """Return the collective in which a thread is: "all_reduce", "backward"; "" for none."""
    if ends(stack):
        return ""
    inner = _inner_frames(stack)
    line = "" if inner else _source_line(stack)
    in_store = any("store" in frame.function and DISTRIBUTED.search(frame.file) for frame in inner)
    if in_store or STORE_WAITS.search(line):
        return STORE
    if any(AGREEING.search(frame.file) for frame in inner):
        return AGREEMENT
    called = [frame.function for frame in inner if COLLECTIVES.search(frame.file)]
    public = [name for name in called if not name.startswith("_")]
    if public:
        return public[-1]  # the outermost: all_gather_object, not its all_gather
    if any(BACKWARD.search(frame.file) for frame in inner):
        return "backward"
    if any(PIPELINES.search(frame.file) for frame in inner):
        return WAIT
    if waits := WAITS.search(line):
        return f"{waits[1]}()"
    return "torch.distributed" if any(DISTRIBUTED.search(frame.file) for frame in inner) else ""


def ends(stack: Stack) -> bool:
    """Return whether a thread is destroying its process group, which scripts do at the end."""
    return any(frame.function == END for frame in _inner_frames(stack))


def fetches(stack: Stack) -> bool:
    """Return whether a thread fetches data in a loader of torch or anyrank."""
    return any(FETCHING.search(frame.file) for frame in stack)


def _source_line(stack: Stack) -> str:
    """Return the source text of the innermost line of a stack; "" if it cannot be read."""
    lines = _text(stack[0].file).splitlines() if stack else []
    return lines[stack[0].line - 1] if stack and 0 < stack[0].line <= len(lines) else ""


@functools.lru_cache(64)
def _text(file: str) -> str:
    try:
        with open(file, encoding="utf-8", errors="replace") as opened:
            return opened.read()
    except (OSError, ValueError):
        return ""
