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
INSTALLED = re.compile(r"(^<)|([/\\](site|dist)-packages[/\\])|([/\\]lib(64)?/python3\.\d+/)")
RANK_WORDS = re.compile(r"rank|is_(main|master|local_main|world|global)|main_process|is_primary")
RANK_CALLS = re.compile(r"get_rank\(|environ\W.*rank|process_index|is_main_process")
# Functions of torch.distributed that wait for other ranks, as its own frames name them.
COLLECTIVES = {
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "gather"),
    *("all_gather_coalesced", "all_reduce_coalesced", "all_to_all", "all_to_all_single"),
    *("barrier", "monitored_barrier", "broadcast", "broadcast_object_list", "gather_object"),
    *("recv", "send", "recv_object_list", "send_object_list", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "scatter_object_list", "wait_tensor"),
}
DISTRIBUTED = re.compile(r"torch/(distributed|nn/parallel/distributed\.py)")
FETCHING = re.compile(r"torch/utils/data/|anyrank/data/fetch")
WAITS = re.compile(r"\.(wait|item|cpu|tolist|synchronize)\(")  # in C, so that the line alone shows
STORE_WAITS = re.compile(r"store\w*\.(wait|get|multi_get|barrier)\(")
BACKWARD = re.compile(r"torch/autograd/(graph|__init__)\.py$")
MODULES = re.compile(r"torch/nn/modules/module\.py$")
END = "destroy_process_group"


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        shown = self.file.removeprefix(f"{os.getcwd()}/")
        return f"{printable(shown)}:{self.line} {printable(self.function)}"


Stack = tuple[Frame, ...]  # the innermost frame first


def read_faulthandler(text: str) -> dict[int, Stack]:
    """Thread -> its stack, of one dump by `faulthandler`; what cannot be read is left out."""
    found: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if head := HEADER.match(line):
            frames = found.setdefault(int(head[1], 16), [])
        elif match := FRAME.match(line):
            number = int(match[2]) if match[2].isdigit() else 0
            frames.append(Frame(match[1], number, match[3]))
    return {thread: tuple(stack) for thread, stack in found.items()}


def read_py_spy(text: str) -> Stack:
    """The main thread's stack, of `py-spy dump --json`; empty where it has none."""
    threads = json.loads(text)
    chosen = [one for one in threads if one.get("thread_name") == "MainThread"] or threads[-1:]
    frames = chosen[0].get("frames", []) if chosen else []
    return tuple(Frame(one["filename"], int(one["line"]), one["name"]) for one in frames)


def is_own(frame: Frame) -> bool:
    """Whether a frame is in the user's own code."""
    return not INSTALLED.search(frame.file) and not frame.file.startswith(_installed())


@functools.cache
def _installed() -> tuple[str, ...]:
    """Folders of torch and of anyrank, where these are not installed but used from a clone."""
    specs = [find_spec("torch"), find_spec("anyrank")]
    return tuple(f"{os.path.dirname(one.origin)}/" for one in specs if one and one.origin)


def own_frames(stack: Stack) -> Stack:
    """The frames of the user's own code, the innermost first."""
    return tuple(frame for frame in stack if is_own(frame))


def _inner_frames(stack: Stack) -> Stack:
    """The frames that the innermost own one has called, directly or not."""
    for number, frame in enumerate(stack):
        if is_own(frame):
            return stack[:number]
    return stack


def collective_of(stack: Stack) -> str:
    """The collective that a thread stands in, by its stack: "all_reduce", "backward"; or ""."""
    inner = _inner_frames(stack)
    names = [one.function for one in inner if DISTRIBUTED.search(one.file)]
    known = [name for name in names if name in COLLECTIVES]
    if known:
        return known[-1]  # the outermost: all_gather_object, and not the all_gather within
    if any(BACKWARD.search(one.file) for one in inner):
        return "backward"
    if names and not ends(stack) and not waits_for_store(stack):
        return "torch.distributed"
    own = own_frames(stack)
    is_last = bool(own) and not inner
    return "wait" if is_last and WAITS.search(_source_line(own[0])) else ""


def waits_for_store(stack: Stack) -> bool:
    """Whether a thread waits for a key of a store."""
    own = own_frames(stack)
    if any(
        "store" in one.function and DISTRIBUTED.search(one.file) for one in _inner_frames(stack)
    ):
        return True
    return bool(own) and bool(STORE_WAITS.search(_source_line(own[0])))


def ends(stack: Stack) -> bool:
    """Whether a thread ends its group, as at the end of a script."""
    return any(one.function == END for one in _inner_frames(stack))


def fetches(stack: Stack) -> bool:
    """Whether a thread fetches data, in torch's loader or in anyrank's."""
    return any(FETCHING.search(one.file) for one in stack)


def is_in_model(stack: Stack) -> bool:
    """Whether a thread is in a module's forward, or in a backward."""
    return any(BACKWARD.search(one.file) or MODULES.search(one.file) for one in stack)


def _source_line(frame: Frame) -> str:
    """The text of a frame's line; "" where it cannot be read."""
    lines = _text(frame.file).splitlines()
    return lines[frame.line - 1].strip() if 0 < frame.line <= len(lines) else ""


class Condition(NamedTuple):
    """An `if` that a line is within.

    Attributes:
        line: of the `if`.
        text: its test.
        arm: 0 for its body, 1 for its `else`.
        is_by_rank: whether the test asks for the rank.
    """

    line: int
    text: str
    arm: int
    is_by_rank: bool


class Place(NamedTuple):
    """What the source says about a line.

    Attributes:
        conditions: that it is within, the outermost first.
        swallows: lines of the `try` around it whose handlers go on.
    """

    conditions: tuple[Condition, ...] = ()
    swallows: tuple[int, ...] = ()


def place_of(frame: Frame) -> Place:
    """What the source says about a frame's line; nothing where it cannot be read."""
    tree = _tree(frame.file)
    conditions: list[Condition] = []
    swallows: list[int] = []
    for parent, child in itertools.pairwise(_path_to(tree, frame.line) if tree else ()):
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
            conditions, swallows = [], []  # an inner function's own
        if isinstance(parent, ast.If) and child is not parent.test:
            arm, by_rank = int(child in parent.orelse), _is_by_rank(parent.test, tree)
            conditions.append(Condition(parent.lineno, ast.unparse(parent.test), arm, by_rank))
        if isinstance(parent, ast.Try) and child in parent.body and _goes_on(parent):
            swallows.append(parent.lineno)
    return Place(tuple(conditions), tuple(swallows))


def _is_by_rank(test: ast.expr, tree: ast.AST | None) -> bool:
    """Whether a test asks for the rank, by a usual name or by one that the file gives it."""
    if RANK_WORDS.search(ast.unparse(test).lower()):
        return True
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    return any(
        target.id in names
        for node in (ast.walk(tree) if tree else ())
        if isinstance(node, ast.Assign) and RANK_CALLS.search(ast.unparse(node.value).lower())
        for target in node.targets
        if isinstance(target, ast.Name)
    )


def _goes_on(node: ast.Try) -> bool:
    """Whether the script goes on after an `except`."""
    parts = [[*ast.walk(handler)] for handler in node.handlers]
    return any(not any(isinstance(one, ast.Raise) for one in part) for part in parts)


def _path_to(tree: ast.AST, line: int) -> list[ast.AST]:
    """The nodes around a line, the outermost first."""
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt | ast.ExceptHandler)
        and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return [tree, *around]  # a walk comes to what is outside first


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
        return ast.parse(_text(file)) if _text(file) else None
    except (SyntaxError, ValueError, RecursionError):
        return None
