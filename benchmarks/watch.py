"""Hangs on three ranks, and on many: does `anyrank.watch` name rank and line, at what cost?

    python benchmarks/watch.py                    # hangs, an uneven job, costs; results/watch.json
    python benchmarks/watch.py --parts uneven --minutes 62 --after 6
    python benchmarks/watch.py --parts many slow --ranks 16 32 48  # forked ranks, on these cores
    python benchmarks/watch.py --quick            # two hangs and costs, nothing is written
    python benchmarks/watch.py --parts hangs --device cuda  # over NCCL, on one GPU or on several
    python benchmarks/watch.py --parts hangs --device sim   # on the device that the tests simulate

Each hang runs twice under torchrun: with `anyrank.watch("5s", exit=True)`, and alone with a
time-out of 20 s and torch's flight recorder, whose records are written after 12 s and compared by
hand: the rank whose newest record differs from the others' is the one that they name, without a
line. A third time, where jinja2, aiohttp and tabulate are installed, with
`torch.distributed.debug`, whose dump of all stacks is read by hand too: the rank that is at another
line of the script than the others, or has no stack.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import bench
import torch
import torch.distributed as dist
from bench import HERE, Case, Run, Runs, median, ratios, spread, tell
from launch import ENVIRON, Launcher, torchrun
from models import linears, wrapped

import anyrank
from anyrank.watching.mismatch import SHARE, CallDigests
from anyrank.world.store import Store

ROOT = HERE.parent
PATHS = f"{ROOT / 'src'}:{ROOT}"
sys.path[:0] = PATHS.split(":")

from tests.hangs import HANGS, ON_DEVICE, ON_MANY_RANKS, PRELUDE, Hang  # noqa: E402 - the tests'
from tests.scripts import exit_code, fork  # noqa: E402

from anyrank.testing.pool import find_port  # noqa: E402
from anyrank.watching.launched import run_program  # noqa: E402

AFTER_SEC = 5
ALONE_SEC = 20
RECORD_SEC = 12
LIMIT_SEC = 150.0
RECORDED = 2000  # calls that torch's flight recorder keeps
MANY_AFTER_SEC = 8
MANY_LIMIT_SEC = 240.0
BUSY = 8  # processes that take what they get of the cores, beside the ranks
PARTS = ("hangs", "many", "slow", "uneven", "cost")
QUICK = ("skips a collective", "SIGSTOP")
RECORDER = f"""
def write_records():
    import torch._C._distributed_c10d as c10d
    time.sleep({RECORD_SEC})
    dump = c10d._dump_nccl_trace_json if device == "cuda" else c10d._dump_fr_trace_json
    pathlib.Path(f"record-{{rank}}").write_bytes(dump(True, False))

threading.Thread(target=write_records, daemon=True).start()
"""
DEBUG = """
from torch.distributed.debug import start_debug_server
start_debug_server(
    port=20000 + os.getppid() % 9000, dump_dir="dumps", dump_interval=2, start_method="fork",
    enabled_dumps={"stacks"}, fetch_timeout=3,
)
"""
UNEVEN = """
import random
draw = random.Random(rank)
big = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
end = time.monotonic() + {seconds}
go = torch.ones(1)
number = 0
while go.item():
    number += 1
    time.sleep(draw.random() * {after} * 0.6)
    step(x)
    if number % 8 == 3 and rank == 0:
        stop = time.monotonic() + {after} * 2.5
        while time.monotonic() < stop:
            big(torch.ones(512, 256)).sum().item()
    if number % 8 == 6 and rank == 1:
        stop = time.monotonic() + {after} * 2
        while time.monotonic() < stop:
            torch.save(big.state_dict(), "saved")
    go.fill_(float(time.monotonic() < end))
    dist.broadcast(go, 0)
if rank == 0:
    pathlib.Path("steps").write_text(str(number))
dist.destroy_process_group()
"""


@contextlib.contextmanager
def launched(
    script: str,
    *arguments: str,
    limit_sec: float = LIMIT_SEC,
    variables: dict[str, str] | None = None,
) -> Generator[tuple[Path, str, bool]]:
    """A script under torchrun: its folder, its error output, and whether it ended in time."""
    environ = {**os.environ, **ENVIRON, "PYTHONPATH": PATHS, **(variables or {})}
    with tempfile.TemporaryDirectory() as name:
        folder, has_ended = Path(name), True
        (folder / "train.py").write_text(script)
        process = subprocess.Popen(
            [*torchrun(3), *arguments],
            cwd=folder,
            env=environ,
            text=True,
            stderr=subprocess.PIPE,
            errors="replace",
        )
        try:
            _, said = process.communicate(timeout=limit_sec)
        except subprocess.TimeoutExpired:
            process.terminate()
            _, said = process.communicate()
            has_ended = False
        yield folder, said, has_ended


def odd_one(by_rank: dict[int, Any]) -> list[int]:
    """The ranks that are at something where no other one is."""
    counts = collections.Counter(map(str, by_rank.values()))
    return [rank for rank, at in by_rank.items() if counts[str(at)] == 1]


def program(hang: Hang, *arguments: str) -> list[str]:
    """The arguments of torchrun; a wrapper hides the end of a rank from it, where that is meant."""
    if not hang.outlives:
        return ["train.py", *arguments]
    text = " ".join([sys.executable, "train.py", *arguments])
    return ["--no-python", "bash", "-c", f"{text}; sleep 8"]


def last_step(folder: Path) -> float:
    """When any rank stepped last."""
    return max((path.stat().st_mtime for path in folder.glob("step-*")), default=0.0)


def watched(hang: Hang) -> Run:
    """What the watch says of a hang."""
    arguments = program(hang, f"{AFTER_SEC}s", "out")
    with launched(hang.script, *arguments) as (folder, said, _):
        screens = [line for line in said.splitlines() if line.startswith("anyrank: ")]
        if not (folder / "out").exists():
            return {"is_right": hang.culprit < 0, "said": said[-500:]}
        report = json.loads((folder / "out").read_text())
        late = (folder / "out").stat().st_mtime - last_step(folder) - AFTER_SEC
    line = report["line"]
    is_line = line in hang.lines if hang.has_line else line is None
    return {
        "is_right": report["culprits"] == [hang.culprit] and is_line,
        "kind": report["kind"],
        "culprits": report["culprits"],
        "line": line,
        "late_sec": round(late, 1),
        "said": screens[0] if screens else "",
    }


def alone(hang: Hang) -> Run:
    """What torchrun says of a hang, and what the flight recorder shows."""
    script = hang.script.replace(PRELUDE, PRELUDE + RECORDER)
    variables = {"TIMEOUT_SEC": str(ALONE_SEC), "TORCH_FR_BUFFER_SIZE": "2000"}
    start = time.time()
    with launched(script, *program(hang), variables=variables) as (folder, said, has_ended):
        seconds = time.time() - max(start, last_step(folder))
        newest: dict[int, Any] = {}
        for rank in range(3):
            path = folder / f"record-{rank}"
            entries = json.loads(path.read_text()).get("entries", []) if path.exists() else []
            if entries:
                last = entries[-1]
                newest[rank] = [last["collective_seq_id"], last["profiling_name"]]
    errors = re.findall(r"^(?:\[rank\d\]: )?((?:\w+\.)*\w*Error: .*)$", said, re.MULTILINE)
    ranks = sorted(
        {int(rank) for rank in re.findall(r"^\[rank(\d)\]: Traceback", said, re.MULTILINE)}
    )
    return {
        "sec": round(seconds, 1),
        "has_ended": has_ended,
        "errors_on": ranks,
        "error": errors[0][:160] if errors else "",
        "recorder_names": odd_one(newest) if len(newest) == 3 else [],
    }


def debugged(hang: Hang) -> Run:
    """What the last dump of `torch.distributed.debug` shows of a hang."""
    script = hang.script.replace(PRELUDE, PRELUDE + DEBUG)
    variables = {"TIMEOUT_SEC": str(ALONE_SEC)}
    with launched(script, *program(hang), variables=variables) as (folder, said, _):
        end = last_step(folder) + RECORD_SEC
        dumps = [one for one in folder.glob("dumps/stacks_*") if one.stat().st_mtime < end]
        if not dumps:
            return {"names": [], "lines": {}, "said": said[-300:]}
        text = max(dumps).read_text()
    lines: dict[int, int | None] = dict.fromkeys(range(3))
    for section in text.split("=== Rank ")[1:]:
        stacks = section.split("\n\n")
        main = next((one for one in stacks if "in <module>" in one), "")
        found = re.search(r'train.py", line (\d+)', main)
        lines[int(section[0])] = int(found[1]) if found else None
    odd = odd_one(lines)
    right = [n for n, line in enumerate(script.splitlines(), 1) if "# HERE" in line]
    is_line = odd == [hang.culprit] and lines[hang.culprit] in right
    return {"names": odd, "lines": lines, "is_line": is_line}


def uneven(minutes: float, after: int) -> Run:
    """An uneven job: does the watch keep still? Its pauses go with the limit, in seconds."""
    body = UNEVEN.format(seconds=minutes * 60, after=after)
    arguments, limit = ("train.py", f"{after}s", "out"), minutes * 60 + 300
    with launched(PRELUDE + body, *arguments, limit_sec=limit) as (folder, said, has_ended):
        steps = (folder / "steps").read_text() if (folder / "steps").exists() else "0"
        report = json.loads((folder / "out").read_text()) if (folder / "out").exists() else {}
        screens = [line for line in said.splitlines() if line.startswith("anyrank: ")]
    return {
        "minutes": minutes,
        "after_sec": after,
        "steps": int(steps),
        "alarms": max(len(screens), len(report) > 0),
        "said": [*screens, *filter(None, [report.get("stacks")])],
        "has_ended": has_ended,
    }


SLOW = """
big = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
end = time.monotonic() + {seconds}
go = torch.ones(1)
number = 0
while go.item():
    number += 1
    for _ in range({turns}):
        big(torch.ones(256, 256)).square().mean().backward()
    step(x)
    go.fill_(float(time.monotonic() < end))
    dist.broadcast(go, 0)
pathlib.Path(f"ended-{{rank}}").write_text(str(number))
dist.destroy_process_group()
"""


def run_rank(folder: str, *arguments: str) -> None:
    """A rank of a script, in its folder."""
    os.chdir(folder)
    torch.set_num_threads(1)
    run_program(("train.py", *arguments))


def fork_ranks(folder: str, ranks: int, *arguments: str) -> None:
    """All ranks of a script: forks of one process, which start at once."""
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), **ENVIRON}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_port())}
    pids: list[int] = []
    for rank in range(ranks):
        variables = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        pids.append(fork(f"{folder}/log", run_rank, [folder, *arguments], **variables))
    for pid in pids:
        exit_code(pid)


@contextlib.contextmanager
def forked(
    script: str, ranks: int, *arguments: str, limit_sec: float, busy: int = 0
) -> Generator[Path]:
    """A script on forked ranks, beside busy processes: its folder, once all ranks have ended."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "train.py").write_text(script)
        for _ in range(busy):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(process.kill)
        spawn = multiprocessing.get_context("spawn")
        parent = spawn.Process(target=fork_ranks, args=(name, ranks, *arguments))
        parent.start()
        parent.join(limit_sec)
        parent.kill()  # the ranks die with it
        parent.join()
        yield folder


def named(hang: Hang, ranks: int, busy: int) -> Run:
    """What the watch says of a hang of many ranks, and how long after the limit."""
    arguments = f"{MANY_AFTER_SEC}s", "out"
    with forked(hang.script, ranks, *arguments, limit_sec=MANY_LIMIT_SEC, busy=busy) as folder:
        said = (folder / "log").read_text(errors="replace")
        screens = [line for line in said.splitlines() if line.startswith("anyrank: ")]
        if not (folder / "out").exists():
            return {"is_right": False, "said": said[-500:]}
        report = json.loads((folder / "out").read_text())
        late = (folder / "out").stat().st_mtime - last_step(folder) - MANY_AFTER_SEC
    culprit, line = hang.culprit % ranks, report["line"]
    return {
        "is_right": report["culprits"] == [culprit] and (line in hang.lines or not hang.has_line),
        "kind": report["kind"],
        "culprits": report["culprits"],
        "late_sec": round(late, 1),
        "screens": len(screens),
    }


def slow(ranks: int, minutes: float, turns: int) -> Run:
    """A job that trains slowly on many ranks of few cores: does the watch keep still?"""
    body, limit = SLOW.format(seconds=minutes * 60, turns=turns), minutes * 60 + 200
    with forked(PRELUDE + body, ranks, f"{MANY_AFTER_SEC}s", "out", limit_sec=limit) as folder:
        said = (folder / "log").read_text(errors="replace")
        ended = [int(path.read_text()) for path in folder.glob("ended-*")]
        return {
            "ranks": ranks,
            "minutes": minutes,
            "steps": max(ended, default=0),
            "alarms": said.count("anyrank: "),
            "ended": len(ended),
            "said": said[:2000],
        }


def train(blocks: int, steps: int) -> Runs:
    """A rank's step time with and without a watch, in turns, and the CPU time of its threads."""
    for _ in range(RECORDED):  # so that each look at the calls is as long as it can be
        dist.all_reduce(torch.ones(1))
    net = wrapped("ddp", linears([256] * 8, bias=True), ())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    batch = torch.ones(64, 256)

    def once(way: str, number: int) -> Run:
        start = time.monotonic()
        watching = anyrank.watch("60s") if way == "watched" else None
        times: list[float] = []
        for _ in range(steps):
            before = time.perf_counter()
            net(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - before)
        share = seconds_of_threads() / (time.monotonic() - start)
        if watching is not None:
            watching.close()
        return {"sec": statistics.median(times), "cpu_share": share, "look_sec": seconds_of_look()}

    return Case("watch", ("alone", "watched"), once).run(blocks, warm=1, is_told=False)


def seconds_of_look() -> float:
    """CPU time of a look at all recorded calls for their digests, the first of its kind."""
    store = Store(dist.HashStore(), "look")  # pyright: ignore[reportPrivateImportUsage]
    digests = CallDigests(store, dist.get_rank(), dist.get_world_size())
    start = time.thread_time()
    digests.tick()
    return time.thread_time() - start


def seconds_of_threads() -> float:
    """CPU time of anyrank's threads in this process."""
    threads = [one for one in threading.enumerate() if one.name.startswith("anyrank-")]
    paths = [Path(f"/proc/self/task/{one.native_id}/schedstat") for one in threads]
    return sum(int(path.read_text(encoding="ascii").split()[0]) for path in paths) / 1e9


def cost(launcher: Launcher, blocks: int, steps: int) -> Run:
    """What a watch takes of a step, and of a core, on rank 0 of two.

    The flight recorder is full in both, if it is not switched off.
    """
    runs = launcher.values(2, train, blocks, steps)[0]
    return {
        "step_ms": {way: round(1000 * median(of, "sec"), 3) for way, of in runs.items()},
        "step_ratio": ratios(runs["watched"], runs["alone"], "sec"),
        "cpu_share": spread(run["cpu_share"] for run in runs["watched"]),
        "look_ms": spread(1000 * run["look_sec"] for run in runs["watched"]),
        "look_share": 1 / SHARE,  # of the time, as long as that between two looks
    }


WAYS: dict[str, Callable[[Hang], Run]] = {"watched": watched, "alone": alone}
if all(importlib.util.find_spec(name) for name in ("jinja2", "aiohttp", "tabulate")):
    WAYS["debugged"] = debugged


def measure(options: argparse.Namespace, launcher: Launcher) -> Run:
    """The parts that were asked for, a table each."""
    found: Run = {}
    rows: Run = {}
    if "hangs" in options.parts:
        hangs = {name: hang for name, hang in HANGS.items() if name in options.hangs}
        if options.device != "cpu":  # several ranks may share a GPU
            os.environ |= {"HANG_DEVICE": options.device, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
            hangs = dict(ON_DEVICE)
        if options.device == "sim":
            del hangs["one long kernel"]
        for name, hang in hangs.items():
            rows[name] = Case(name, WAYS, lambda way, _, hang=hang: WAYS[way](hang)).once()
        found["hangs"] = {"rows": rows}
    if "many" in options.parts:
        rows = {}
        for ranks, busy in itertools.product(map(int, options.ranks), (0, BUSY)):
            for name, hang in ON_MANY_RANKS.items():
                case = f"{name}, {ranks} ranks, {busy} busy processes"
                rows[case] = named(hang, ranks, busy)
                tell(case, rows[case])
        found["many"] = {"rows": rows}
    if "slow" in options.parts:
        found["slow"] = slow(max(map(int, options.ranks)), options.slow_minutes, options.turns)
        tell("slow", found["slow"])
    if "uneven" in options.parts:
        found["uneven"] = uneven(options.minutes, options.after)
    if "cost" in options.parts:
        found["cost"] = cost(launcher, options.blocks, options.steps)
        tell("cost", found["cost"])
    return found


def goals_of(result: Run) -> list[Run]:
    """What a watch is to reach, and what it did."""
    rows = {name: ways["watched"] for name, ways in result["hangs"]["rows"].items()}
    late = max(row.get("late_sec", 999) for row in rows.values())
    return [
        bench.goal("hangs that were left out", len(HANGS.keys() - rows.keys()), 0),
        bench.goal(
            "hangs that are not named", sum(not row["is_right"] for row in rows.values()), 1
        ),
        bench.goal("seconds after the limit", late, 10),
        bench.goal(
            "hangs of many ranks that are not named",
            sum(not row["is_right"] for row in result["many"]["rows"].values()),
            0,
        ),
        bench.goal(
            "seconds after the limit on many ranks",
            max(row.get("late_sec", 999) for row in result["many"]["rows"].values()),
            20,
        ),
        bench.goal("alarms of a slow job of many ranks", result["slow"]["alarms"], 0),
        bench.goal("alarms of an uneven job", result["uneven"]["alarms"], 0),
        bench.goal("uneven jobs that were ended", float(not result["uneven"]["has_ended"]), 0),
        bench.goal("share of a core", result["cost"]["cpu_share"]["most"], 0.005),
    ]


if __name__ == "__main__":
    small = {"parts": ["hangs", "cost"], "hangs": [*QUICK], "blocks": 2, "steps": 20}
    parts: Run = {"parts": [*PARTS], "hangs": [*HANGS], "ranks": ["16", "32", "48"]}
    sizes: Run = {
        "slow_minutes": 10.0,
        "turns": 20,
        "minutes": 4.0,
        "after": 4,
        "blocks": 12,
        "steps": 200,
        "device": "cpu",
    }
    bench.main("watch", measure, small, ["hangs"], in_tables=True, **parts, **sizes)
