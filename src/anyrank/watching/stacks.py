"""Python stacks as text: read, told apart, and what the source says about a line. No process group.

A stack is read from what `faulthandler` or py-spy writes. Lines are the user's own unless their
file belongs to Python, to an installed package or to anyrank.
"""

from __future__ import annotations

import ast
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
WAITS = re.compile(r"\.(wait|item|cpu|tolist|synchronize)\(")  # in C, so that the line alone shows
STORE_WAITS = re.compile(r"store\w*\.(wait|get|multi_get|barrier)\(")
BACKWARD = re.compile(r"torch/autograd/(graph|__init__)\.py$")
AGREEING = re.compile(r"anyrank/world/")
PIPELINES = re.compile(r"torch/distributed/pipelining/")  # wait for messages alone
# What a thread waits in, where no function has its name.
AGREEMENT, STORE, WAIT = "an agreement of anyrank", "store.wait()", "wait()"
END = "destroy_process_group"
# In the test of an `if` that asks for the rank; lora_rank is none.
RANK = re.compile(
    r"\b(?!lora|low)(\w+_)?rank\b|(rank|global|process)_zero"
    r"|(main|master)_process|\bis_(main|master)\b|process_index"
)
NEGATED = re.compile(r"\bnot\b|!=")
LETS_IN, KEEPS_OUT = "lets in", "keeps out"


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        shown = self.file.removeprefix(f"{os.getcwd()}/")
        return f"{printable(shown)}:{self.line} {printable(self.function)}"


Stack = tuple[Frame, ...]  # the innermost frame first


def unescape(dump: str) -> str:
    """A dump of `faulthandler`, which writes no letter of a path or name that is not ASCII."""
    return _ESCAPED_LETTER.sub(lambda match: chr(int(match[match.lastindex or 0], 16)), dump)


def read_faulthandler(text: str) -> dict[int, Stack]:
    """Thread -> its stack, of one dump by `faulthandler`; what cannot be read is left out."""
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
    """The main thread's stack, of `py-spy dump --json`; empty where it has none."""
    threads = json.loads(text)
    main = [thread for thread in threads if thread.get("thread_name") == "MainThread"]
    frames = next((thread.get("frames", []) for thread in main or threads[-1:]), [])
    return tuple(Frame(frame["filename"], int(frame["line"]), frame["name"]) for frame in frames)


def is_own(frame: Frame) -> bool:
    """Whether a frame is in the user's own code."""
    return not INSTALLED.search(frame.file) and not frame.file.startswith(_installed())


@functools.cache
def _installed() -> tuple[str, ...]:
    """Folders of torch and of anyrank, where these are not installed but used from a clone."""
    specs = [find_spec("torch"), find_spec("anyrank")]
    return tuple(f"{os.path.dirname(spec.origin)}/" for spec in specs if spec and spec.origin)


def own_frames(stack: Stack) -> Stack:
    """The frames of the user's own code, the innermost first."""
    return tuple(frame for frame in stack if is_own(frame))


def _inner_frames(stack: Stack) -> Stack:
    """The frames that the innermost own one has called, directly or not."""
    return tuple(itertools.takewhile(lambda frame: not is_own(frame), stack))


def collective_of(stack: Stack) -> str:
    """The collective that a thread stands in, by its stack: "all_reduce", "backward"; or ""."""
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
        return public[-1]  # the outermost: all_gather_object, and not the all_gather within
    if any(BACKWARD.search(frame.file) for frame in inner):
        return "backward"
    if any(PIPELINES.search(frame.file) for frame in inner):
        return WAIT
    if waits := WAITS.search(line):
        return f"{waits[1]}()"
    return "torch.distributed" if any(DISTRIBUTED.search(frame.file) for frame in inner) else ""


def ends(stack: Stack) -> bool:
    """Whether a thread ends its group, as at the end of a script."""
    return any(frame.function == END for frame in _inner_frames(stack))


def fetches(stack: Stack) -> bool:
    """Whether a thread fetches data, in torch's loader or in anyrank's."""
    return any(FETCHING.search(frame.file) for frame in stack)


# -- what the source says -------------------------------------------------------------------------


class Branch(NamedTuple):
    """An `if` that a line is within.

    Attributes:
        line: of the `if`.
        test: as text.
        is_else: whether the line is in its `else`.
        effect: of a test that asks for the rank, by a usual name: LETS_IN one rank, or KEEPS_OUT
            one, as an `else` or a `not` does; of another "".
    """

    line: int
    test: str
    is_else: bool
    effect: str

    def __str__(self) -> str:
        return f'{"the else of " if self.is_else else ""}"if {self.test}"'


def branches_around(frame: Frame) -> list[Branch]:
    """Each `if` of its function that a frame's line is within, the outermost first."""
    branches: list[Branch] = []
    for parent, child in itertools.pairwise(_nodes_around(frame)):
        if isinstance(parent, ast.If):
            test, is_else = ast.unparse(parent.test), child in parent.orelse
            effect = LETS_IN if is_else == bool(NEGATED.search(test)) else KEEPS_OUT
            asks_for_rank = RANK.search(test.lower())
            branches.append(Branch(parent.lineno, test, is_else, effect if asks_for_rank else ""))
    return branches


def branches_apart(stack: Stack, other: Stack) -> list[Branch]:
    """Each `if` that one call is within, and another is not, where their ways part; further in,
    those that ask for the rank.
    """
    branches: list[Branch] = []
    have_parted = False
    others = itertools.chain(other[::-1], itertools.repeat(None))
    for frame, beside in zip(stack[::-1], others, strict=False):
        is_beside = not have_parted and beside and beside[::2] == frame[::2]  # in one function
        shared = branches_around(beside) if beside and is_beside else []
        around = [branch for branch in branches_around(frame) if branch not in shared]
        branches += around if is_beside else [branch for branch in around if branch.effect]
        have_parted = frame != beside
    return branches


def _nodes_around(frame: Frame) -> list[ast.AST]:
    """The statements of its function around a frame's line, the outermost first; none where the
    source cannot be read.
    """
    nodes: list[ast.AST] = []
    tree = _tree(frame.file)
    for node in ast.walk(tree) if tree else ():  # a walk comes to what is outside first
        is_statement = isinstance(node, ast.stmt | ast.ExceptHandler)
        if is_statement and node.lineno <= frame.line <= (node.end_lineno or 0):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                nodes.clear()
            nodes.append(node)
    return nodes


def _source_line(stack: Stack) -> str:
    """The text of a stack's innermost line; "" where it cannot be read."""
    lines = _text(stack[0].file).splitlines() if stack else []
    return lines[stack[0].line - 1] if stack and 0 < stack[0].line <= len(lines) else ""


@functools.lru_cache(64)
def _text(file: str) -> str:
    try:
        with open(file, encoding="utf-8", errors="replace") as opened:
            return opened.read()
    except (OSError, ValueError):
        return ""


@functools.lru_cache(64)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse(_text(file))
    except (SyntaxError, ValueError, RecursionError):
        return None
