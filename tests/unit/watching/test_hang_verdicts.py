"""What `anyrank.watch` concludes from stacks, sources and records. Without processes."""

from __future__ import annotations

import functools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import anyrank
from anyrank.watching import looks as looks_module
from anyrank.watching import mismatch, system
from anyrank.watching.looks import Look, SelfObserver, look_from_outside, works
from anyrank.watching.mismatch import CallDigests
from anyrank.watching.options import read_options
from anyrank.watching.ras import look_by_nccl
from anyrank.watching.recorder import FIRST, OTHER, USUAL, Call, calls_of, read_entries
from anyrank.watching.stacks import (
    STORE,
    WAIT,
    Frame,
    Stack,
    collective_of,
    fetches,
    is_own,
    own_frames,
    read_faulthandler,
    read_py_spy,
)
from anyrank.watching.system import Workers, ended, oom_kills, state_of
from anyrank.watching.verdict import ADVICE, conclude, conclude_mismatch
from anyrank.world.store import Store

TORCH = "/v/lib/python3.11/site-packages/torch"
DUMP = f"""Current thread 0x00007f9ad21116c0 (most recent call first):
  File "/u/watch.py", line 11 in look

Thread 0x00007f9af322cb80 (most recent call first):
  File "{TORCH}/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "{TORCH}/distributed/c10d_logger.py", line 83 in wrapper
  File "/u/train.py", line 18 in <module>
"""


def in_collective(name: str, *own: Frame) -> Stack:
    return (Frame(f"{TORCH}/distributed/distributed_c10d.py", 1, name), *own)


def main_at(line: int, file: str = "/u/train.py") -> Frame:
    return Frame(file, line, "main")


def waits(rank: int, name: str = "all_reduce", line: int = 10, **more: Any) -> Look:
    """A rank without a record."""
    return Look(rank, stack=in_collective(name, main_at(line)), **more)


def elsewhere(rank: int, state: str = "answers", **more: Any) -> Look:
    """A rank that is in no collective."""
    return Look(rank, state, stack=(main_at(30),), **more)


def called(name: str, number: int, line: int = 10, **more: Any) -> Call:
    """A call of four elements by all of the ranks, at a line of their own."""
    more.setdefault("group", "0")
    more.setdefault("sizes", [[4]])
    return Call(number=number, name=name, dtypes=["Float"], stack=(main_at(line),), **more)


def stands(rank: int, *calls: Call, line: int = 30, **more: Any) -> Look:
    """A rank whose main thread reads a value, after it has called these."""
    return Look(rank, stack=(main_at(line),), calls=[*calls], **more)


# -- stacks ---------------------------------------------------------------------------------------


def test_a_dump_is_read_by_threads() -> None:
    stacks = read_faulthandler(DUMP)
    stack = stacks[0x7F9AF322CB80]
    assert stack[-1] == Frame("/u/train.py", 18, "<module>")
    assert own_frames(stack) == stack[-1:]
    assert collective_of(stack) == "all_reduce"


@pytest.mark.parametrize("text", ["", "\x00\xff", "Thread 0x (most", '  File "x", line ??? in f'])
def test_a_broken_dump_is_no_error(text: str) -> None:
    assert read_faulthandler(text) == {}


def test_py_spys_answer_is_read() -> None:
    frame = {"name": "main", "filename": "/u/train.py", "line": 3}
    threads = [
        {"thread_name": "other", "frames": []},
        {"thread_name": "MainThread", "frames": [frame]},
    ]
    assert read_py_spy(json.dumps(threads)) == (Frame("/u/train.py", 3, "main"),)
    assert read_py_spy("[]") == ()


@pytest.mark.parametrize(
    ("file", "own"),
    [
        ("/home-of/me/train.py", True),
        ("/u/lib/model.py", True),
        (f"{TORCH}/nn/modules/module.py", False),
        ("/usr/lib/python3.11/threading.py", False),
        ("<frozen runpy>", False),
        (anyrank.__file__, False),
    ],
)
def test_own_lines_are_neither_pythons_nor_a_packages(file: str, own: bool) -> None:
    assert is_own(Frame(file, 1, "f")) is own


def test_the_outermost_collective_is_the_one_that_was_called() -> None:
    inner = in_collective("all_gather")[0]
    assert collective_of((inner, *in_collective("all_gather_object", main_at(3)))) == (
        "all_gather_object"
    )


def test_a_backward_a_wait_in_c_and_a_store_are_told_apart(tmp_path: Path) -> None:
    engine = Frame(f"{TORCH}/autograd/graph.py", 1, "run")
    assert collective_of((engine, main_at(1))) == "backward"
    script = tmp_path / "train.py"
    script.write_text("handle.wait()\nstore.get('key')\nwork()\n")
    first, second, third = ((Frame(str(script), n, "main"),) for n in (1, 2, 3))
    assert [collective_of(stack) for stack in (first, second, third)] == [WAIT, STORE, ""]
    schedule = Frame(f"{TORCH}/distributed/pipelining/schedules.py", 1, "step")
    assert collective_of((schedule, main_at(1))) == WAIT


def test_a_loader_is_torchs_or_anyranks() -> None:
    assert fetches((Frame(f"{TORCH}/utils/data/dataloader.py", 1, "__next__"), main_at(1)))
    assert not fetches((main_at(1),))


@pytest.mark.parametrize("text", ["def (", "\x00", ""])
def test_a_source_that_cannot_be_read_says_nothing(text: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    for file in (str(script), "<string>"):
        assert collective_of((Frame(file, 1, "main"),)) == ""


# -- at work or not -------------------------------------------------------------------------------


def test_what_goes_from_function_to_function_is_at_work() -> None:
    one, other = (
        (Frame("/u/t.py", 5, "main"),),
        (Frame("/u/t.py", 9, "f"), Frame("/u/t.py", 5, "main")),
    )
    turned = (Frame("/u/t.py", 6, "main"),)
    assert works([one, other] * 5, is_busy=True)
    assert works([one, other] * 5, is_busy=False)
    assert not works([one, turned] * 5, is_busy=True)  # a loop within one function
    assert not works([*[one] * 19, other], is_busy=False)  # it wakes up to wait again
    assert works([*[one] * 19, other], is_busy=True)


@pytest.mark.parametrize("file", ["autograd/graph.py", "nn/modules/linear.py"])
def test_what_takes_a_core_in_a_library_is_at_work(file: str) -> None:
    stack = (Frame(f"{TORCH}/{file}", 1, "f"), main_at(1))
    assert works([stack] * 5, is_busy=True)
    assert not works([stack] * 5, is_busy=False)
    assert not works([stack] * 5, is_busy=True, is_waiting=True)  # for its GPU
    assert not works([(main_at(1),)] * 5, is_busy=True)  # in the user's own function


def test_a_pause_that_follows_on_work_counts_once_it_is_as_long_as_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(looks_module, "LOOKS", 4)
    observer = SelfObserver(0, 4)
    for _ in range(4):
        observer.tick()  # the main thread is in here
    with ThreadPoolExecutor(1) as pool:
        look = functools.partial(observer.look, time.sleep)
        jobs = look, lambda: [observer.tick() for _ in range(4)], look
        first, _, second = [pool.submit(job).result() for job in jobs]
    observer.close()
    assert isinstance(first, Look)
    assert isinstance(second, Look)
    assert (first.at_work, second.at_work) == (True, False)


def test_a_process_that_answers_no_signal_may_only_have_no_core(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A signal is answered without the GIL; so of one that is not, nothing is concluded yet."""
    monkeypatch.setattr(looks_module, "SIGNAL_SEC", 0.1)
    ignores = f"import signal, time; signal.signal({signal.SIGRTMIN + 5}, signal.SIG_IGN); "
    (tmp_path / "stacks").write_text(DUMP)  # an old one
    opens = f"file = open({str(tmp_path / 'stacks')!r}); print(file.fileno(), flush=True); "
    command = [sys.executable, "-c", f"{ignores}{opens}time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        file = int(child.stdout.readline())
        process = {"pid": child.pid, "main": 0, "file": file, "signal": signal.SIGRTMIN + 5}
        looks = look_from_outside({1: process, 2: process | {"signal": 0}}, time.sleep)
        child.kill()
    assert (looks[1].state, looks[2].state) == ("no core", "gil")
    assert conclude([waits(0), looks[1]], 61) is None


# -- verdicts -------------------------------------------------------------------------------------


A, B, C, PAIR, SECOND, OURS = (
    dict[str, Any](group=group, members=ranks)
    for group, ranks in {
        "a": [0, 1, 2],
        "b": [2, 3],
        "c": [3, 4],
        "pair": [0, 1],
        "other": [0, 1],
        "anyrank [0, 1, 2] 0": [0, 1, 2],
    }.items()
)
KEY = (Frame(f"{TORCH}/distributed/distributed_c10d.py", 1, "_store_based_barrier"), main_at(20))
MESSAGE_TO_1, MESSAGE_FROM_1 = (
    called(name, 0, 20, group=f"messages {way} 0", members=ranks)
    for name, way, ranks in (("send 0->1", "0->1", [0, 1]), ("recv 2<-1", "1->2", [1, 2]))
)
# What the ranks do -> their looks, and what is concluded: culprits, kind, line, words; or nothing.
SCENES: dict[str, tuple[list[Look], tuple[list[int], str, int | None, list[str]] | None]] = {
    "one elsewhere": (
        [waits(0), waits(1, "all_gather", 20), waits(2), waits(3)],
        (
            [1],
            "mismatch",
            20,
            [
                "rank 1 waits in all_gather at /u/train.py:20",
                "ranks 0, 2, 3 wait in all_reduce at /u/train.py:10 main (no step for 61 s)",
            ],
        ),
    ),
    "one at work": ([waits(0), elsewhere(1, at_work=True, is_busy=True), waits(2)], None),
    "one that is slow": (
        [waits(0), elsewhere(1, is_busy=True), waits(2)],
        ([1], "slow", 30, []),
    ),
    "two stopped": (
        [waits(0), Look(1, "stopped"), Look(2, "stopped")],
        ([1, 2], "stopped", None, ["ranks 1, 2 are stopped"]),
    ),
    "two elsewhere": (
        [waits(0), waits(3), waits(4), elsewhere(1), elsewhere(2)],
        (
            [1, 2],
            "slow",
            30,
            ["ranks 1, 2 are in no collective at /u/train.py:30 main; ranks 0, 3, 4"],
        ),
    ),
    "one stopped, one at work": (
        [waits(0), Look(1, "stopped", detail="signal 9"), Look(2, at_work=True)],
        ([1], "stopped", None, ["signal 9"]),
    ),
    "one killed, one at work": (
        [waits(0), Look(1, "killed", detail="signal 9"), Look(2, at_work=True)],
        ([1], "killed", None, ["signal 9"]),
    ),
    "a lost worker": (
        [waits(0), elsewhere(1, dead_workers=["worker process 7: signal 9"])],
        ([1], "worker", 30, ["worker process 7: signal 9"]),
    ),
    "a lost worker, and another loader by now": (
        [waits(0), elsewhere(1, dead_workers=["worker process 7: signal 9"], at_work=True)],
        None,
    ),
    "the GIL, two looks unlike": ([waits(0), elsewhere(1, "gil", at_work=True)], None),
    "the GIL, two looks alike": ([waits(0), elsewhere(1, "gil")], ([1], "gil", 30, [])),
    "no core, beside one that stands apart": (
        [waits(0), elsewhere(1), Look(2, "no core"), elsewhere(3, "no core")],
        ([1], "slow", 30, ["rank 2: no core"]),
    ),
    "no core, and nobody stands apart": ([waits(0), waits(1), Look(2, "no core")], None),
    "silent in a call, beside one that stands apart": (
        [waits(0, state="gil"), waits(1), elsewhere(2)],
        ([2], "slow", 30, []),
    ),
    "silent in a call, and nobody stands apart": (
        [waits(0, state="gil"), waits(1), waits(2)],
        ([0], "gil", 10, []),
    ),
    "all at their end": ([Look(0, has_finished=True), Look(1, has_finished=True)], None),
    "one at its end": ([waits(0), Look(1, has_finished=True)], ([1], "ending", None, [])),
    "all in one place": ([waits(0), waits(1)], ([], "mismatch", None, ["none is missing"])),
    "one is done where the others wait": (
        [
            stands(0, called("all_reduce", 7)),
            stands(1, called("all_reduce", 7)),
            stands(2, called("all_reduce", 7, is_done=True), called("all_gather", 8, 20)),
        ],
        ([2], "mismatch", 10, []),
    ),
    "a root that one has otherwise": (
        [
            stands(0, called("broadcast", 7, is_done=True), called("all_reduce", 8)),
            stands(1, called("broadcast", 7, is_done=True), called("all_reduce", 8)),
            stands(2, called("broadcast", 7)),
        ],
        ([], "mismatch", None, ["whether all ranks pass the same root and reduce operation"]),
    ),
    "sizes that differ": (
        [
            stands(0, called("all_reduce", 7)),
            stands(1, called("all_reduce", 7, sizes=[[2, 2]])),  # as many elements
            stands(2, called("all_reduce", 7, 12, sizes=[[0]])),
        ],
        ([2], "mismatch", 12, ["rank 2 called all_reduce #7 of [0], Float at /u/train.py:12"]),
    ),
    "one starts a collective alone, and goes on": (
        [
            stands(0, called("all_gather", 7, 12), called("all_reduce", 8, 26)),
            stands(1, called("all_reduce", 7, 26), called("all_reduce", 8, 26)),
            stands(2, called("all_reduce", 7, 26)),
        ],
        (
            [0],
            "mismatch",
            12,
            [
                "rank 0 called all_gather #7 at /u/train.py:12 main; ranks 1, 2 called all_reduce "
                "#7 at /u/train.py:26 main and wait there (no step for 61 s)",
                "now at /u/train.py:30 main",
            ],
        ),
    ),
    "one leaves out the last": (
        [
            stands(0, called("all_reduce", 6, is_done=True), called("all_reduce", 7, 26)),
            stands(1, called("all_reduce", 6, is_done=True), line=31),
            stands(2, called("all_reduce", 6, is_done=True), called("all_reduce", 7, 26)),
        ],
        (
            [1],
            "slow",
            31,
            ["rank 1 is in no collective at /u/train.py:31 main; ranks 0, 2 called all_reduce #7"],
        ),
    ),
    "one leaves out a call that another only sends to": (
        [
            stands(0, called("reduce", 7, 12)),
            stands(1, called("reduce", 7, 12, is_done=True), called("all_reduce", 8, 26)),
            stands(2, called("all_reduce", 6, 26, is_done=True), line=31),
        ],
        ([2], "slow", 31, []),
    ),
    "a call that is not kept any more": (
        [
            stands(0, called("all_reduce", 7)),
            stands(1, called("all_reduce", 7)),
            stands(2, called("barrier", 40, 20)),
        ],
        ([2], "mismatch", 30, []),
    ),
    "two that differ": (
        [stands(0, called("all_reduce", 7, 11)), stands(1, called("all_gather", 7, 12))],
        (
            [],
            "mismatch",
            None,
            ["rank 0 called all_reduce #7 at /u/train.py:11 main; rank 1 called all_gather #7 at"],
        ),
    ),
    "two that differ, and one has gone on": (
        [stands(0, called("all_reduce", 7, 11)), stands(1, called("barrier", 7, 12, is_done=True))],
        ([], "mismatch", None, ["rank 0 called all_reduce #7 at", "rank 1 called barrier #7 at"]),
    ),
    "two that differ, and one has come there as usual": (
        [
            stands(0, called("all_reduce", 7, 11)),
            stands(1, called("all_gather", 7, 12, arrival=OTHER)),
        ],
        ([1], "mismatch", 12, ["anyrank: rank 1 called all_gather #7 at"]),
    ),
    # Rank 1 has left out one of a group of two, and its next call is one of all.
    "one that leaves out a call of two ranks": (
        [
            stands(0, called("all_reduce", 6, 42, **PAIR)),
            stands(1, called("all_gather", 12, 51, arrival=OTHER, **A)),
            stands(2, called("all_gather", 12, 51, arrival=OTHER, **A)),
        ],
        ([1], "order", 51, ["rank 1 called all_gather #12 of group a at", "; rank 0 called"]),
    ),
    "one skips an exchange of messages that only stacks show": (
        [waits(0, "irecv", 41), waits(1, "irecv", 41), stands(2, called("all_gather", 12, 46))],
        ([2], "skipped", 46, ["rank 2 called all_gather #12 at"]),
    ),
    "a recv that nobody sends to": (
        [waits(0, "recv", 20), *(stands(rank, called("all_reduce", 7)) for rank in (1, 2))],
        (
            [],
            "mismatch",
            None,
            [
                "cannot tell which rank is at fault: rank 0 waits in recv at /u/train.py:20 main; "
                "ranks 1, 2 called all_reduce #7 at /u/train.py:10 main",
                "an operation is missing: a send or a recv",
            ],
        ),
    ),
    "a recv that nobody sends to, of two ranks": (
        [waits(0, "recv", 20), stands(1, called("all_reduce", 7, arrival=FIRST))],
        ([], "mismatch", None, ["rank 0 waits in recv at", "rank 1 called all_reduce #7 at"]),
    ),
    "a recv that one rank has sent to before": (
        [
            stands(0, called("all_reduce", 7)),
            stands(1, called("all_reduce", 7, arrival=OTHER)),
            waits(2, "recv", 20),
        ],
        ([1], "skipped", 10, ["rank 1 called all_reduce #7 at /u/train.py:10 main; rank 2 waits"]),
    ),
    "a recv behind an evaluation, after which all come by other calls": (
        [
            waits(0, "recv", 20),
            *(stands(rank, called("all_reduce", 7, arrival=OTHER)) for rank in (1, 2)),
        ],
        ([], "mismatch", None, ["cannot tell which rank is at fault"]),
    ),
    "a recv that its other end does not send to": (
        [
            stands(0, called("all_reduce", 7)),
            stands(1, called("all_reduce", 7)),
            stands(2, MESSAGE_FROM_1),
        ],
        ([1], "skipped", 10, ["rank 1 called all_reduce #7", "; rank 2 waits in recv 2<-1 at"]),
    ),
    "a send and a recv of other tags": (
        [waits(0, "send", 20), waits(1, "recv", 21), stands(2, called("all_reduce", 7))],
        ([], "mismatch", None, ["rank 0 waits in send", "rank 1 waits in recv", "rank 2 called"]),
    ),
    "two that receive from each other": (
        [waits(0, "recv", 20), waits(1, "recv", 20)],
        ([], "mismatch", None, ["ranks 0, 1 wait in recv at /u/train.py:20 main"]),
    ),
    "one that waits for a key": (
        [Look(0, stack=KEY), *(stands(rank, called("all_reduce", 7)) for rank in (1, 2))],
        ([0], "store", 20, ["rank 0 waits in store.wait() at /u/train.py:20 main"]),
    ),
    "most wait for a key": (
        [stands(0, called("all_reduce", 7)), Look(1, stack=KEY), Look(2, stack=KEY)],
        ([0], "skipped", 10, ["rank 0 called all_reduce #7", "; ranks 1, 2 wait in store.wait()"]),
    ),
    "a stage of a pipeline that stands, and only stacks show messages": (
        [waits(0, "recv", 20), waits(1, "send", 21), elsewhere(2)],
        ([2], "slow", 30, ["rank 2 is in no collective at"]),
    ),
    "a stage of a pipeline that stands": (
        [
            stands(0, called("all_reduce", 6, is_done=True), *(MESSAGE_TO_1,)),
            stands(1, called("all_reduce", 6, is_done=True), line=31),
            stands(2, called("all_reduce", 6, is_done=True), *(MESSAGE_FROM_1,)),
        ],
        (
            [1],
            "slow",
            31,
            ["rank 1 is in no collective at /u/train.py:31 main; rank 0 waits in send"],
        ),
    ),
    # Ranks 0, 1 wait in one group, 2 waits for 3 in another, and 3 for nobody that is missing.
    "several groups": (
        [
            stands(0, called("all_reduce", 5, 1, **A)),
            stands(1, called("all_reduce", 5, 1, **A)),
            stands(2, called("all_reduce", 3, 2, **B)),
            stands(3, called("all_reduce", 1, 3, **C)),
        ],
        ([3], "skipped", 3, ["anyrank: rank 3 called all_reduce #1 of group c at"]),
    ),
    "two groups in different orders, on a device": (
        [
            stands(0, called("all_reduce", 1, 11, **PAIR), called("barrier", 1, 12, **SECOND)),
            stands(1, called("barrier", 1, 21, **SECOND), called("all_reduce", 1, 22, **PAIR)),
        ],
        ([], "order", None, ["ranks call groups pair and other in different orders"]),
    ),
    "two groups in different orders, and each waits": (
        [
            stands(0, called("all_reduce", 1, 11, **PAIR)),
            stands(1, called("barrier", 1, 21, **SECOND)),
        ],
        (
            [],
            "order",
            None,
            [
                "ranks call groups pair and other in different orders",
                "rank 0 called all_reduce #1 of group pair at /u/train.py:11 main",
                "rank 1 called barrier #1 of group other at /u/train.py:21 main",
            ],
        ),
    ),
    # As under HSDP: each rank waits in another group, and rank 2 has come there by other calls.
    "four that wait in four groups": (
        [
            stands(0, called("all_reduce", 6, 1, group="r0", members=[0, 2])),
            stands(1, called("all_reduce", 6, 1, group="r1", members=[1, 3])),
            stands(2, called("barrier", 6, 2, arrival=OTHER)),
            stands(3, called("all_gather", 11, 1, group="s1", members=[2, 3])),
        ],
        ([2], "order", 2, ["rank 2 called barrier #6 at /u/train.py:2 main"]),
    ),
    "a call within a step of ours": (
        [
            stands(0, called("all_gather", 7, 12), called("", 6, is_done=True, **OURS)),
            stands(1, called("completing the step", 7, 26, **OURS)),
            stands(2, called("completing the step", 7, 26, **OURS)),
        ],
        (
            [0],
            "mismatch",
            12,
            [
                "anyrank: rank 0 called all_gather #7 at /u/train.py:12 main; ranks 1, 2 wait in "
                'anyrank\'s agreement "completing the step" at /u/train.py:26 main (no step for '
                "61 s)"
            ],
        ),
    ),
    "all have called, and a device is busy": (
        [stands(rank, called("all_reduce", 7, on_device=True)) for rank in (0, 1)],
        None,
    ),
    "a recorder that is off": (
        [waits(0), waits(1, "barrier", recorder="TORCH_FR_BUFFER_SIZE=0"), waits(2)],
        ([1], "mismatch", 10, ["recorder is off (TORCH_FR_BUFFER_SIZE=0)"]),
    ),
    "a worker that stands": (
        [waits(0), elsewhere(1, workers=["worker process 7 is at /u/data.py:3 __getitem__"])],
        ([1], "slow", 30, ["  worker process 7 is at /u/data.py:3 __getitem__"]),
    ),
}


@pytest.mark.parametrize("scene", SCENES)
def test_what_is_concluded_from_the_looks_of_all_ranks(scene: str) -> None:
    looks, expected = SCENES[scene]
    verdict = conclude(looks, 61)
    if verdict is None or expected is None:
        assert verdict == expected
        return
    *found, words = expected
    assert [verdict.culprits, verdict.kind, verdict.line] == found
    assert [word for word in words if word not in verdict.screen] == []


def test_a_rank_that_reads_a_value_waits_for_no_message(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("while True: loss.item()\nhandle.wait()\n")
    reads, waits_in_c = ((Frame(str(script), line, "main"),) for line in (1, 2))
    others = [stands(rank, called("all_reduce", 7)) for rank in (0, 1)]
    for stack, culprits in ((reads, [2]), (waits_in_c, [])):
        verdict = conclude([*others, Look(2, stack=stack)], 61)
        assert verdict is not None
        assert verdict.culprits == culprits


# An entry of NCCL, by hand after the fields of torch's FlightRecorder; none was recorded on a GPU.
def entry(number: int, name: str = "all_reduce", **more: Any) -> dict[str, Any]:
    own = {"filename": "/u/train.py", "line": number, "name": "main"}
    plain = {
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": number,
        "duration_ms": None,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "state": "scheduled",
        "retired": False,
        "timeout_ms": 600000,
        "is_p2p": False,
        "frames": [{"filename": f"{TORCH}/autograd/graph.py", "line": 1, "name": "run"}, own],
    }
    return plain | more


def test_an_entry_of_nccl_is_a_call_until_it_is_completed() -> None:
    timed_out = entry(7, retired=True)
    done = entry(6, "_all_gather_base", state="completed", retired=True, output_sizes=[[8]])
    message = entry(8, "send 0->1", is_p2p=True, state="completed")
    uneven = entry(9, "all_to_all")
    ended, first, second = calls_of([done, timed_out, message, uneven])
    assert (ended.name, ended.sizes, ended.is_done) == ("all_gather_base", [[8]], True)
    assert (first.number, first.is_done, first.on_device) == (7, False, True)
    assert first.stack == (Frame("/u/train.py", 7, "main"),)
    assert (second.name, second.sizes) == ("all_to_all", [])
    assert calls_of([entry(1, profiling_name="gloo:barrier", retired=True)])[0].is_done


def test_a_message_of_nccl_is_a_call_until_it_has_arrived() -> None:
    """Both ends have one group, whatever they have sent before; messages of a batch, which have no
    state of their own, end with it.
    """
    batch: dict[str, Any] = {"is_p2p": True, "p2p_seq_id": 3, "retired": True}
    entries = [
        entry(7, "send 0->1", is_p2p=True, p2p_seq_id=2),
        entry(8, "recv 0<-1", is_p2p=True, p2p_seq_id=3),
        entry(8, "coalesced", state="completed", **batch),
    ]
    (message,) = calls_of(entries)
    assert (message.group, message.number, message.members) == ("messages 0->1 0", 0, [0, 1])
    assert message.describe() == "send 0->1"
    (other,) = calls_of([entry(9, "recv 1<-0", is_p2p=True, p2p_seq_id=7)])
    assert other.key == message.key


def test_calls_that_nccl_launches_together_end_together() -> None:
    parts = [entry(7), entry(7, op_id=8, retired=True)]
    (*calls,) = calls_of([*parts, entry(7, "coalesced", state="completed", retired=True)])
    assert [call.is_done for call in calls] == [True, True]
    assert not any(call.is_done for call in calls_of([*parts, entry(7, "coalesced")]))


@pytest.mark.parametrize(
    ("lines", "arrival"),
    [
        ([1, 2, 3, 1, 2, 3, 1, 2, 3], USUAL),
        ([1, 2, 3, 1, 2, 3, 1, 3], OTHER),  # without 2
        ([1, 2, 3, 1, 2, 3, 4], FIRST),
        ([1, 2, 3, 1, 2, 3], FIRST),  # or nearly
        ([1, 1, 1, 3, 1, 1, 1, 3, 1], USUAL),  # a loop within a step
        ([1, 1, 3, 1, 1, 3, 1, 1, 1], OTHER),  # without 3, behind it
        ([1, 1, 1, 1], USUAL),
        ([0, 1, 1, 0, 1, 1, 0, 1, 1], USUAL),  # a message before each step, of which gloo has
        ([0, 1, 1, 0, 1, 1, 0, 1, 1, 1], OTHER),  # no record
    ],
)
def test_how_a_rank_has_come_to_its_call_is_told_by_the_calls_before(
    lines: list[int], arrival: str
) -> None:
    own = {"filename": "/u/train.py", "name": "main"}
    entries = [
        entry(n - lines[: n + 1].count(0), op_id=n, frames=[{**own, "line": at}], state="completed")
        for n, at in enumerate(lines)
        if at
    ]
    entries[-1]["state"] = "scheduled"
    assert calls_of(entries)[-1].arrival == arrival


def test_a_root_and_the_others_make_one_call() -> None:
    """A gather has outputs on its root alone, and a scatter inputs."""
    for name, side in (("gather", "output"), ("scatter", "input")):
        root, other = entry(1, name), entry(1, name, **{f"{side}_sizes": [], f"{side}_dtypes": []})
        assert calls_of([root])[0].signature == calls_of([other])[0].signature


def test_calls_under_way_and_the_newest_of_each_group_are_kept() -> None:
    of_group: dict[str, Any] = {"process_group": ("3", "mesh_tp"), "state": "completed"}
    calls = calls_of([*map(entry, range(90)), *(entry(n, **of_group) for n in range(20))])
    assert [call.number for call in calls if call.group == "0"] == [*range(64)]
    assert [call.number for call in calls if call.group == "mesh_tp 3"] == [*range(12, 20)]


def test_a_rank_that_gathers_alone_under_nccl_is_named_at_its_call() -> None:
    """All ranks stand where they read the loss."""
    looks = [stands(rank, *calls_of([entry(7), entry(8)]), line=26) for rank in (1, 2)]
    looks.append(stands(0, *calls_of([entry(7, "all_gather", output_sizes=[[4]] * 3), entry(8)])))
    verdict = conclude(sorted(looks, key=lambda look: look.rank), 61)
    assert verdict is not None
    assert (verdict.culprits, verdict.line, verdict.collective) == ([0], 7, "all_gather #7")


def test_a_group_of_the_name_of_a_former_one_begins_anew() -> None:
    former, new = entry(40, retired=True, state="completed"), entry(1, time_created_ns=41)
    assert [call.number for call in calls_of([former, new])] == [1]


def test_of_calls_that_go_on_the_first_that_differs_is_told_with_both_lines() -> None:
    first, odd = called("all_reduce", 1), called("reduce_scatter", 2, 12, is_done=True)
    usual, later = called("all_reduce", 2, 26), called("all_reduce", 3, 27)
    verdict = conclude_mismatch(
        [Look(0, calls=[first, usual]), Look(1, calls=[first, odd]), Look(2, calls=[usual, later])]
    )
    assert verdict is not None
    assert (verdict.culprits, verdict.kind, verdict.line) == ([1], "mismatch", 12)
    assert verdict.screen.splitlines()[0] == (
        "anyrank: rank 1 called reduce_scatter #2 at /u/train.py:12 main; ranks 0, 2 called "
        "all_reduce #2 at /u/train.py:26 main; these calls do not match, so their results are wrong"
    )
    assert conclude_mismatch([Look(0, calls=[first]), Look(1, calls=[first, usual])]) is None


def test_blocks_of_calls_are_compared_and_those_that_were_lost_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks look at unlike moments; block 1 differs, in a call that both recorders have."""
    store: Any = Store(torch.distributed.HashStore(), "test")  # pyright: ignore
    first, second = (CallDigests(store, rank, 2) for rank in (0, 1))
    monkeypatch.setattr(mismatch, "SHARE", 0)

    def look(of: CallDigests, numbers: range, odd: int = 0) -> tuple[str, int] | None:
        calls = [called("barrier" if n == odd else "all_reduce", n, is_done=True) for n in numbers]
        monkeypatch.setattr(mismatch, "read_calls", lambda with_stacks: calls)
        return of.tick()

    assert look(second, range(1, 18)) is None
    assert look(first, range(1, 40)) is None  # block 0 is alike
    assert look(second, range(10, 35), odd=20) is None
    assert look(first, range(30, 60)) is None  # which the recorder has no more of
    assert look(first, range(10, 60)) == ("0", 1)
    assert caplog.text == ""
    look(CallDigests(store, 1, 2), range(5, 20))
    third = CallDigests(store, 0, 2)
    look(third, range(1, 10))
    look(third, range(20, 30))
    assert "calls 10 to 19 of group 0 are not compared" in caplog.text


class Evil:
    def __reduce__(self) -> Any:
        return print, ("executed",)


def test_a_recorders_dump_runs_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    dumps = {"entries": [entry(1)]}, Evil()
    c10d: Any = torch._C._distributed_c10d  # pyright: ignore
    for name, dump in zip(("_dump_fr_trace", "_dump_nccl_trace"), dumps, strict=True):
        monkeypatch.setattr(c10d, name, lambda *_, dump=dump: pickle.dumps(dump), raising=False)
    assert read_entries(with_stacks=True, is_still=True) == [entry(1)]


def test_a_recorder_of_nccl_is_left_alone_where_a_dump_may_meet_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    c10d: Any = torch._C._distributed_c10d  # pyright: ignore
    record = pickle.dumps({"entries": [entry(1)]})
    monkeypatch.setattr(c10d, "_dump_fr_trace", lambda *_: pickle.dumps({}))
    monkeypatch.setattr(c10d, "_dump_nccl_trace", lambda *_: record, raising=False)
    for version, is_still, seen in (
        ("2.13.0", False, 0),
        ("2.13.0", True, 1),
        ("2.14.1", False, 1),
    ):
        monkeypatch.setattr(torch, "__version__", version)
        assert len(read_entries(with_stacks=False, is_still=is_still)) == seen


# By hand, in the form of the JSON that NCCL 2.28 and newer write; none was recorded on a GPU.
def process(rank: int, **more: Any) -> dict[str, Any]:
    plain = {"rank": rank, "host": "10.0.0.7", "pid": 4700 + rank, "cuda_dev": 0, "nvml_dev": 0}
    return plain | more


RAS: dict[str, Any] = {
    "nccl_version": "2.28.9",
    "communicators_count": 2,
    "communicators": [
        {"hash": "0x1", "size": 2, "ranks": [process(1, collective_counts={"AllReduce": 1})]},
        {
            "hash": "0x2",
            "size": 4,
            "ranks_count": 2,
            "missing_ranks_count": 2,
            "ranks": [
                process(0, collective_counts={"Broadcast": 1, "AllReduce": 107}),
                process(1, collective_counts={"Broadcast": 1, "AllReduce": 106}),
            ],
            "missing_ranks": [
                process(2, unresponsive=True, considered_dead=False),
                process(3, unresponsive=True, considered_dead=True),
            ],
        },
    ],
    "ras": {"collection_time_sec": 0.012, "timeouts_count": 0},
}


@pytest.mark.parametrize(
    ("rank", "state", "said"),
    [
        (
            1,
            "gil",
            "process 4701 on 10.0.0.7 is alive, and has launched 107 collectives; other ranks",
        ),
        (2, "lost", "NCCL says: process 4702 on 10.0.0.7 does not answer NCCL either"),
        (3, "killed", "NCCL says: process 4703 on 10.0.0.7 is dead"),
        (4, "lost", ""),
    ],
)
def test_of_a_rank_of_another_machine_nccl_says_whether_it_lives(
    rank: int, state: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def answer() -> None:
        connection, _ = server.accept()
        with connection, connection.makefile("rw") as lines:
            for reply in ("SERVER PROTOCOL 2", "OK", "OK", json.dumps(RAS, indent=2)):
                asked.append(lines.readline().strip())
                print(reply, file=lines, flush=True)

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("NCCL_RAS_ADDR", f"127.0.0.1:{server.getsockname()[1]}")
        thread = threading.Thread(target=answer)
        thread.start()
        look = look_by_nccl(rank, 4)
        thread.join()
    assert asked == ["client protocol 2", "set format json", "timeout 3", "verbose status"]
    assert look.state == state
    assert said in look.detail
    assert look_by_nccl(rank, 4).state == "lost"  # nobody listens any more


def test_the_report_has_the_keys_that_the_page_names() -> None:
    verdict = conclude([waits(0), waits(1, "all_gather", 20), waits(2)], 61)
    assert verdict is not None
    report = json.loads(verdict.to_json())
    assert list(report) == [
        *("culprits", "kind", "file", "line", "function", "waiting", "collective", "stacks")
    ]
    page = (Path(__file__).parents[3] / "docs/watch.md").read_text(encoding="utf-8")
    assert [key for key in (*report, *ADVICE) if f"`{key}`" not in page] == []


def test_a_look_travels_as_text() -> None:
    look = waits(3)
    look.calls = [called("barrier", 1, members=[0, 3])]
    assert Look.from_json(3, look.to_json()) == look


# -- arguments, and the system --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "seconds"), [("60s", 60), ("10min", 600), ("1h", 3600), (2.5, 2.5)]
)
def test_times_are_read(after: str | float, seconds: float) -> None:
    assert read_options(after, False, None) == (seconds, None)


def test_a_report_takes_the_place_of_a_file_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to a pipe").symlink_to("pipe")
    (tmp_path / "link").symlink_to("report")
    assert read_options(1, False, tmp_path / "link") == (1, str(tmp_path / "report"))
    for name in ("pipe", "to a pipe", "", "none/report"):
        with pytest.raises(ValueError, match="must be a file in a folder that exists"):
            read_options(1, False, tmp_path / name)


def test_a_watch_before_the_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(anyrank.AnyrankError, match=r"Call it after init_process_group\(\)"):
        anyrank.watch()


def test_a_process_alone_watches_itself(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    watching = anyrank.watch(0.2, report=str(report))
    deadline = time.monotonic() + 60
    while not report.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    watching.close()
    found = json.loads(report.read_text())
    assert (found["culprits"], found["kind"], found["file"]) == ([0], "slow", __file__)
    assert capfd.readouterr().err.count("anyrank: rank 0") == 1
    anyrank.watch("1h").close()  # another may begin


def test_ends_of_processes_are_told_in_words() -> None:
    assert ended(-9) == "signal 9 (SIGKILL)"
    assert ended(-200) == "signal 200"
    assert ended(3) == "exit code 3"
    assert state_of(2**22 + 1) == ""
    assert Workers().find_dead() == []


def test_kills_for_memory_are_those_of_the_own_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/self/cgroup": "4:cpu:/x\n0::/job\n",
        "/sys/fs/cgroup/job/memory.events": "low 0\noom_kill 3\n",
    }
    monkeypatch.setattr(system, "_text", lambda path: files.get(path, ""))
    assert oom_kills() == 3
    files.clear()
    assert oom_kills() == 0


def test_a_path_with_letters_beyond_ascii_is_read() -> None:
    dump = 'Thread 0x1 (most recent call first):\n  File "/a \\xe9\\u4e2d/x.py", line 3 in f'
    assert read_faulthandler(dump) == {1: (Frame("/a \u00e9\u4e2d/x.py", 3, "f"),)}
