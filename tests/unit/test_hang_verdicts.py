"""What `anyrank.watch` concludes from stacks, sources and records. Without processes."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

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


def waits(rank: int, name: str = "all_reduce", line: int = 10, steps: int = 5) -> Look:
    return Look(rank, stack=in_collective(name, main_at(line)), steps=steps)


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


def test_the_odd_one_out_is_it() -> None:
    verdict = conclude([waits(0), waits(1, "all_gather", 20), waits(2), waits(3)], 61)
    assert verdict is not None
    assert (verdict.culprits, verdict.waiting, verdict.line) == ([1], [0, 2, 3], 20)
    assert "rank 1 is in all_gather" in verdict.screen
    assert "ranks 0, 2, 3 wait in all_reduce since 61 s" in verdict.screen


def test_a_rank_at_work_is_waited_for() -> None:
    busy = Look(1, stack=(main_at(30),), at_work=True, is_busy=True)
    assert conclude([waits(0), busy, waits(2)], 61) is None
    busy.at_work = False
    verdict = conclude([waits(0), busy, waits(2)], 61)
    assert verdict is not None
    assert (verdict.culprits, verdict.kind, verdict.line) == ([1], "slow", 30)


def test_several_are_spoken_of_as_several() -> None:
    stopped = [Look(rank, "stopped") for rank in (1, 2)]
    verdict = conclude([waits(0), *stopped], 61)
    assert verdict is not None
    assert "ranks 1, 2 are stopped" in verdict.screen
    idle = [Look(rank, stack=(main_at(30),)) for rank in (1, 2)]
    verdict = conclude([waits(0), waits(3), waits(4), *idle], 61)
    assert verdict is not None
    assert "ranks 1, 2 are in no collective" in verdict.screen
    assert "rank 1 is at" in verdict.screen


@pytest.mark.parametrize("state", ["stopped", "killed"])
def test_a_process_that_cannot_answer_is_it_whatever_the_others_do(state: str) -> None:
    verdict = conclude([waits(0), Look(1, state, detail="signal 9"), Look(2, at_work=True)], 61)
    assert verdict is not None
    assert (verdict.culprits, verdict.kind, verdict.line) == ([1], state, None)
    assert "signal 9" in verdict.screen


def test_a_lost_worker_counts_where_its_rank_stands_still() -> None:
    rank = Look(1, stack=(main_at(30),), dead_workers=["worker process 7: signal 9"])
    verdict = conclude([waits(0), rank], 61)
    assert verdict is not None
    assert (verdict.culprits, verdict.kind) == ([1], "worker")
    assert "worker process 7: signal 9" in verdict.screen
    rank.at_work = True  # it has another loader by now
    assert conclude([waits(0), rank], 61) is None


def test_the_gil_needs_two_looks_alike() -> None:
    stack = (main_at(30),)
    assert conclude([waits(0), Look(1, "gil", stack, at_work=True)], 61) is None
    verdict = conclude([waits(0), Look(1, "gil", stack)], 61)
    assert verdict is not None
    assert (verdict.kind, verdict.line) == ("gil", 30)


def test_ranks_that_are_all_at_their_end_hold_up_nobody() -> None:
    assert conclude([Look(0, has_finished=True), Look(1, has_finished=True)], 61) is None
    verdict = conclude([waits(0), Look(1, has_finished=True)], 61)
    assert verdict is not None
    assert (verdict.culprits, verdict.kind) == ([1], "ending")


def test_all_ranks_in_one_place_name_nobody() -> None:
    verdict = conclude([waits(0), waits(1)], 61)
    assert verdict is not None
    assert (verdict.culprits, verdict.waiting) == ([], [0, 1])
    assert "none is missing" in verdict.screen


def test_of_two_ranks_the_one_under_its_rank_is_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("if rank == 0:\n    gather()\nreduce()\n")
    own = Look(0, stack=in_collective("all_gather", Frame(str(script), 2, "<module>")))
    other = Look(1, stack=in_collective("all_reduce", Frame(str(script), 3, "<module>")))
    verdict = conclude([own, other], 61)
    assert verdict is not None
    assert (verdict.culprits, verdict.kind) == ([0], "branch")
    assert 'under "if rank == 0"' in verdict.screen


@pytest.mark.parametrize(
    ("test", "culprit"),
    [
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
    assert (f'under "if {test}"' in verdict.screen) == (culprit == 1)


def test_each_if_that_parts_the_ranks_is_named_and_further_in_those_that_ask_for_the_rank(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    lines = [
        "def save():",
        "    if world > 1:",
        "        if args.rank == 2:",
        "            gather()",
    ]
    lines += ["if step == 4:", "    if loss > 9:", "        save()", "    reduce()"]
    script.write_text("\n".join(lines))
    looks = [
        Look(rank, stack=in_collective("all_reduce", Frame(str(script), 8, "<module>")))
        for rank in (0, 1)
    ]
    within = Frame(str(script), 4, "save"), Frame(str(script), 7, "<module>")
    verdict = conclude([*looks, Look(2, stack=in_collective("all_gather", *within))], 61)
    assert verdict is not None
    assert (verdict.culprits, verdict.kind) == ([2], "branch")
    assert 'save, under "if loss > 9", "if args.rank == 2": every rank' in verdict.screen


def test_an_if_of_a_helper_makes_no_branch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    lines = ["def sync():", "    if world > 1:", "        gather()", "reduce()", "sync()"]
    script.write_text("\n".join(lines))
    looks = [
        Look(rank, stack=in_collective("all_reduce", Frame(str(script), 4, "<module>")))
        for rank in (0, 1)
    ]
    within = Frame(str(script), 3, "sync"), Frame(str(script), 5, "<module>")
    verdict = conclude([*looks, Look(2, stack=in_collective("all_gather", *within))], 61)
    assert verdict is not None
    assert (verdict.culprits, verdict.kind) == ([2], "skipped")
    assert "under" not in verdict.screen


def test_a_rank_that_is_done_where_the_others_wait_is_a_mismatch() -> None:
    looks = [waits(0), waits(1), waits(2, "all_gather", 20)]
    for look in looks:
        is_done = look.rank == 2
        look.operations = [Operation("0", 7, "all_reduce", "[[4]]", is_done)]
        look.operations += [Operation("0", 8, "all_gather", "[[4]]", False)] if is_done else []
    verdict = conclude(looks, 61)
    assert verdict is not None
    assert (verdict.culprits, verdict.kind) == ([2], "mismatch")


def test_shapes_that_differ_are_a_mismatch() -> None:
    looks = [waits(rank) for rank in range(3)]
    for look in looks:
        sizes = "[[0]]" if look.rank == 2 else "[[4]]"
        look.operations = [Operation("0", 7, "all_reduce", sizes, False)]
    verdict = conclude(looks, 61)
    assert verdict is not None
    assert (verdict.culprits, verdict.kind, verdict.collective) == (
        [2],
        "mismatch",
        "all_reduce #7",
    )


def test_in_several_groups_the_one_that_all_others_wait_for_is_it() -> None:
    """Ranks 0, 1 wait in one group, 2 waits for 3 in another, and 3 for nobody that is missing."""
    names = {0: ("a", 5), 1: ("a", 5), 2: ("b", 3), 3: ("c", 1)}
    looks: list[Look] = []
    for rank, (group, number) in names.items():
        look = waits(rank, line=10 + ord(group))
        look.operations = [Operation(group, number, "all_reduce", "", False)]
        look.members = {"a": [0, 1, 2], "b": [2, 3], "c": [3, 4]}
        looks.append(look)
    verdict = conclude(looks, 61)
    assert verdict is not None
    assert verdict.culprits == [3]


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


@pytest.mark.parametrize("after", ["", "0s", "-1s", "soon", "60 days", -3, 0])
def test_what_is_no_time_is_refused(after: object) -> None:
    with pytest.raises(ValueError, match=r"give a time above 0, such as '60s'"):
        read_options(after, False, None)


def test_arguments_of_other_types_are_refused(tmp_path: Path) -> None:
    for after, exit, report in (
        (None, False, None),
        ("1s", 1, None),
        ("1s", False, 3),
        (True, False, None),
    ):
        with pytest.raises(TypeError, match="takes"):
            read_options(after, exit, report)
    with pytest.raises(ValueError, match="give a file in a folder that exists"):
        read_options("1s", False, str(tmp_path / "none" / "report"))
    with pytest.raises(ValueError, match="give a file"):
        read_options("1s", False, str(tmp_path))


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
