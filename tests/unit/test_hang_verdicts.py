"""What `anyrank.watch` concludes from stacks, sources and records. Without processes."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

import anyrank
from anyrank.watching import system
from anyrank.watching.looks import Look, Operation, works
from anyrank.watching.options import read_options
from anyrank.watching.stacks import (
    Frame,
    Stack,
    branches_around,
    collective_of,
    fetches,
    is_own,
    own_frames,
    read_faulthandler,
    read_py_spy,
    tries_around,
    waits_for_store,
)
from anyrank.watching.system import Workers, ended, oom_kills, state_of
from anyrank.watching.verdict import ADVICE, conclude

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
    return Look(rank, stack=in_collective(name, main_at(line)), steps=5, **more)


def elsewhere(rank: int, state: str = "answers", **more: Any) -> Look:
    """A rank that is in no collective."""
    return Look(rank, state, stack=(main_at(30),), **more)


def runs(
    name: str, number: int, *, group: str = "0", sizes: str = "[[4]]", is_done: bool = False
) -> Operation:
    return Operation(group, number, name, sizes, is_done)


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
    assert (collective_of(first), collective_of(third)) == ("wait", "")
    assert (waits_for_store(second), waits_for_store(third)) == (True, False)


def test_a_loader_is_torchs_or_anyranks() -> None:
    assert fetches((Frame(f"{TORCH}/utils/data/dataloader.py", 1, "__next__"), main_at(1)))
    assert not fetches((main_at(1),))


SOURCE = """
def main():
    for step in steps:
        if step < 3:
            continue
        if rank == 0:
            save()
            gather()
        else:
            gather()
            save()
        try:
            reduce()
        except ValueError:
            log()
        try:
            reduce()
        except ValueError:
            raise
def other():
    reduce()
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (5, (['"if step < 3"'], set())),
        (7, (['"if rank == 0"'], set())),
        (10, (['the else of "if rank == 0"'], set())),
        (13, ([], {12})),
        (15, ([], set())),
        (17, ([], set())),
        (21, ([], set())),
        (99, ([], set())),
    ],
)
def test_the_source_says_what_a_line_hangs_on(
    line: int, expected: tuple[object, ...], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SOURCE)
    frame = Frame(str(script), line, "main")
    assert ([str(branch) for branch in branches_around(frame)], tries_around(frame)) == expected


@pytest.mark.parametrize("text", ["def (", "\x00", ""])
def test_a_source_that_cannot_be_read_says_nothing(text: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    for file in (str(script), "<string>"):
        assert branches_around(Frame(file, 1, "main")) == []
        assert collective_of((Frame(file, 1, "main"),)) == ""


# -- at work or not -------------------------------------------------------------------------------


def test_a_rank_is_known_by_the_name_that_the_script_gives_it(tmp_path: Path) -> None:
    script = str(tmp_path / "train.py")
    lines = ["R = dist.get_rank()", "net = DDP(net, device_ids=[local_rank])"]
    lines += ["if step == 30 and R == 0:", "    dist.barrier()", "if net is None:", "    pass"]
    Path(script).write_text("\n".join(lines))
    branches = [branches_around(Frame(script, line, "f"))[0] for line in (4, 6)]
    assert [branch.asks_for_rank for branch in branches] == [True, False]


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


# -- verdicts -------------------------------------------------------------------------------------


MEMBERS = {"a": [0, 1, 2], "b": [2, 3], "c": [3, 4]}
# What the ranks do -> their looks, and what is concluded: culprits, kind, line, words; or nothing.
SCENES: dict[str, tuple[list[Look], tuple[list[int], str, int | None, list[str]] | None]] = {
    "one elsewhere": (
        [waits(0), waits(1, "all_gather", 20), waits(2), waits(3)],
        (
            [1],
            "skipped",
            20,
            ["rank 1 is in all_gather", "ranks 0, 2, 3 wait in all_reduce since 61 s"],
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
        ([1, 2], "slow", 30, ["ranks 1, 2 are in no collective", "rank 1 is at"]),
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
    "all at their end": ([Look(0, has_finished=True), Look(1, has_finished=True)], None),
    "one at its end": ([waits(0), Look(1, has_finished=True)], ([1], "ending", None, [])),
    "all in one place": ([waits(0), waits(1)], ([], "mismatch", None, ["none is missing"])),
    "one is done where the others wait": (
        [
            waits(0, operations=[runs("all_reduce", 7)]),
            waits(1, operations=[runs("all_reduce", 7)]),
            waits(
                2,
                "all_gather",
                20,
                operations=[runs("all_reduce", 7, is_done=True), runs("all_gather", 8)],
            ),
        ],
        ([2], "mismatch", 20, []),
    ),
    "shapes that differ": (
        [
            waits(0, operations=[runs("all_reduce", 7)]),
            waits(1, operations=[runs("all_reduce", 7)]),
            waits(2, operations=[runs("all_reduce", 7, sizes="[[0]]")]),
        ],
        ([2], "mismatch", 10, ["all_reduce #7"]),
    ),
    # Ranks 0, 1 wait in one group, 2 waits for 3 in another, and 3 for nobody that is missing.
    "several groups": (
        [
            waits(0, line=1, operations=[runs("all_reduce", 5, group="a")], members=MEMBERS),
            waits(1, line=1, operations=[runs("all_reduce", 5, group="a")], members=MEMBERS),
            waits(2, line=2, operations=[runs("all_reduce", 3, group="b")], members=MEMBERS),
            waits(3, line=3, operations=[runs("all_reduce", 1, group="c")], members=MEMBERS),
        ],
        ([3], "skipped", 3, []),
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


@pytest.mark.parametrize(
    ("test", "culprit"),
    [
        ("rank == 0", 1),
        ("dist.get_rank() == 0", 1),
        ("args.local_rank in (-1, 0)", 1),
        ("master_process", 1),
        ("trainer.is_global_zero", 1),
        ("config.lora_rank > 4", 2),
        ("step % 10 == 0", 2),
    ],
)
def test_of_two_ranks_that_are_alike_an_if_that_asks_for_the_rank_tells(
    test: str, culprit: int, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"if {test}:\n    gather()\nreduce()\n")
    under = Look(1, stack=in_collective("all_gather", Frame(str(script), 2, "<module>")))
    other = Look(2, stack=in_collective("all_reduce", Frame(str(script), 3, "<module>")))
    verdict = conclude([under, other], 61)
    assert verdict is not None
    assert verdict.culprits == [culprit]
    assert (verdict.kind == "branch") == (culprit == 1)
    assert (f'under "if {test}"' in verdict.screen) == (culprit == 1)


SAVE = """\
def save():
    if world > 1:
        if args.rank == 2:
            gather()
if step == 4:
    if loss > 9:
        save()
    reduce()
"""
HELPER = """\
def sync():
    if world > 1:
        gather()
reduce()
sync()
"""


@pytest.mark.parametrize(
    ("text", "wait", "within", "kind", "words"),
    [
        (SAVE, 8, [(4, "save"), (7, "<module>")], "branch", '"if loss > 9", "if args.rank == 2":'),
        (HELPER, 4, [(3, "sync"), (5, "<module>")], "skipped", ""),
    ],
    ids=["each that parts the ranks", "none of a helper"],
)
def test_an_if_that_parts_the_ranks_is_named_and_further_in_one_that_asks_for_the_rank(
    text: str, wait: int, within: list[tuple[int, str]], kind: str, words: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    others = in_collective("all_reduce", Frame(str(script), wait, "<module>"))
    own = in_collective("all_gather", *(Frame(str(script), *place) for place in within))
    verdict = conclude([Look(0, stack=others), Look(1, stack=others), Look(2, stack=own)], 61)
    assert verdict is not None
    assert (verdict.culprits, verdict.kind) == ([2], kind)
    assert words in verdict.screen
    assert ("under" in verdict.screen) == bool(words)


def test_the_report_has_the_keys_that_the_page_names() -> None:
    verdict = conclude([waits(0), waits(1, "all_gather", 20), waits(2)], 61)
    assert verdict is not None
    report = json.loads(verdict.to_json())
    assert list(report) == [
        *("culprits", "kind", "file", "line", "function", "waiting", "collective", "stacks")
    ]
    page = (Path(__file__).parents[2] / "docs/watch.md").read_text(encoding="utf-8")
    assert [key for key in (*report, *ADVICE) if f"`{key}`" not in page] == []


def test_a_look_travels_as_text() -> None:
    look = waits(3)
    look.operations, look.members = [Operation("0", 1, "barrier", "", True)], {"0": [0, 3]}
    assert Look.from_json(look.to_json()) == look


# -- arguments, and the system --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "seconds"), [("60s", 60), ("10min", 600), ("1h", 3600), (2.5, 2.5)]
)
def test_times_are_read(after: str | float, seconds: float) -> None:
    assert read_options(after, False, None) == (seconds, None)


def test_a_watch_before_the_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(anyrank.AnyrankError, match=r"call it after init_process_group\(\)"):
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
    assert ended(9) == "signal 9 (SIGKILL)"
    assert ended(3 << 8) == "exit code 3"
    assert state_of(2**22 + 1) == ""
    assert Workers().find_dead() == []


def test_kills_for_memory_are_those_of_the_own_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/self/cgroup": "4:cpu:/x\n0::/job\n",
        "/sys/fs/cgroup/job/memory.events": "low 0\noom_kill 3\n",
    }
    monkeypatch.setattr(system, "open", lambda path, **_: io.StringIO(files[path]), raising=False)
    assert oom_kills() == 3
    files.clear()
    assert oom_kills() == 0
