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
from collections.abc import Iterator, Sequence
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
SHOWN_CONDITIONS = 3
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
    return "wait" if is_last and WAITS.search(source_line(own[0])) else ""


def waits_for_store(stack: Stack) -> bool:
    """Whether a thread waits for a key of a store."""
    own = own_frames(stack)
    if any(
        "store" in one.function and DISTRIBUTED.search(one.file) for one in _inner_frames(stack)
    ):
        return True
    return bool(own) and bool(STORE_WAITS.search(source_line(own[0])))


def ends(stack: Stack) -> bool:
    """Whether a thread ends its group, as at the end of a script."""
    return any(one.function == END for one in _inner_frames(stack))


def fetches(stack: Stack) -> bool:
    """Whether a thread fetches data: in a DataLoader, or in what a `for` or `next()` goes over."""
    if any(FETCHING.search(one.file) for one in stack):
        return True
    own = own_frames(stack)
    return any(_is_iterated(caller) for caller in own[1:])


def is_in_model(stack: Stack) -> bool:
    """Whether a thread is in a module's forward, or in a backward."""
    return any(BACKWARD.search(one.file) or MODULES.search(one.file) for one in stack)


def source_line(frame: Frame) -> str:
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
        is_reordered: whether both arms call the same functions, in different orders.
    """

    line: int
    text: str
    arm: int
    is_by_rank: bool
    is_reordered: bool


class Place(NamedTuple):
    """What the source says about a line.

    Attributes:
        conditions: that it is within, the outermost first.
        swallows: lines of the `try` around it whose handlers go on.
        handles: lines of the `try` in whose `except` or after-life it is.
        may_be_skipped: whether something before it in its loop or function may jump over it.
    """

    conditions: tuple[Condition, ...] = ()
    swallows: tuple[int, ...] = ()
    handles: tuple[int, ...] = ()
    may_be_skipped: bool = False


def place_of(frame: Frame) -> Place:
    """What the source says about a frame's line; nothing where it cannot be read."""
    tree = _tree(frame.file)
    if tree is None:
        return Place()
    path = _path_to(tree, frame.line)
    conditions: list[Condition] = []
    swallows: list[int] = []
    handles: list[int] = []
    jumps = False
    for parent, child in itertools.pairwise(path):
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
            conditions, swallows, handles, jumps = [], [], [], False  # an inner function's own
        if isinstance(parent, ast.If) and child is not parent.test:
            conditions.append(_condition(parent, child, tree))
        if isinstance(parent, ast.Try):
            if child in parent.body and any(map(_goes_on, parent.handlers)):
                swallows.append(parent.lineno)
            elif child in parent.handlers:
                handles.append(parent.lineno)
        if isinstance(parent, ast.FunctionDef | ast.For | ast.While | ast.AsyncFunctionDef):
            before = [node for node in parent.body if node.lineno < child.lineno]  # pyright: ignore
            jumps = jumps or any(map(_may_jump, before))
    may = jumps or bool(conditions) or bool(swallows)
    return Place(tuple(conditions), tuple(swallows), tuple(handles), may)


def rank_conditions(file: str) -> list[str]:
    """Where a file asks for the rank in an `if`: "26: if rank == 1"; the first few."""
    tree = _tree(file)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.If)] if tree else []
    asking = [node for node in nodes if _is_by_rank(node.test, tree)]
    return [f"{node.lineno}: if {ast.unparse(node.test)}" for node in asking[:SHOWN_CONDITIONS]]


def _condition(node: ast.If, child: ast.AST, tree: ast.AST | None) -> Condition:
    arm = int(child in node.orelse)
    calls = [_calls(part) for part in (node.body, node.orelse)]
    is_reordered = (
        calls[0] != calls[1] and len(calls[0]) > 1 and sorted(calls[0]) == sorted(calls[1])
    )
    is_by_rank = _is_by_rank(node.test, tree)
    return Condition(node.lineno, ast.unparse(node.test), arm, is_by_rank, is_reordered)


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


def _calls(body: Sequence[ast.stmt]) -> list[str]:
    """The names of the functions that statements call, in order."""
    nodes = [node for part in body for node in ast.walk(part) if isinstance(node, ast.Call)]
    return [ast.unparse(node.func) for node in sorted(nodes, key=lambda one: one.lineno)]


def _goes_on(handler: ast.ExceptHandler) -> bool:
    """Whether the script goes on after an `except`."""
    return not any(isinstance(node, ast.Raise) for node in ast.walk(handler))


def _may_jump(statement: ast.stmt) -> bool:
    """Whether a statement may leave a loop's body or a function."""
    jumps = ast.Continue | ast.Break | ast.Return
    return any(isinstance(node, jumps) for node in ast.walk(statement))


def _is_iterated(frame: Frame) -> bool:
    """Whether a line is the head of a `for`, or calls `next`."""
    tree = _tree(frame.file)
    if tree is None or not frame.line:
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and node.iter.lineno <= frame.line <= (
            node.iter.end_lineno or 0
        ):
            return True
        is_next = isinstance(node, ast.Call) and ast.unparse(node.func) == "next"
        if is_next and node.lineno == frame.line:  # pyright: ignore[reportAttributeAccessIssue]
            return True
    return False


def _path_to(tree: ast.AST, line: int) -> list[ast.AST]:
    """The nodes around a line, the outermost first."""
    path: list[ast.AST] = [tree]
    while True:
        inside = [node for node in _children(path[-1]) if _holds(node, line)]
        if not inside:
            return path
        path.append(inside[-1])


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The statements and `except` parts right below a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler):
            yield child


def _holds(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", None)
    return bool(first) and first <= line <= (last or 0)


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
