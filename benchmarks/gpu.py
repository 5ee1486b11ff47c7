"""What a machine with GPUs shows in six minutes, beside torch, safetensors, DCP and transformers.

    python benchmarks/gpu.py                      # every case; results/gpu.json, case by case
    python benchmarks/gpu.py --cases load hangs   # those that begin with a word; nothing is written
    python benchmarks/gpu.py --tiny               # small; nothing is written
    python benchmarks/gpu.py --sim                # small, on the device that the tests simulate

There are as many ranks as GPUs, and four on the only one, which share it: NCCL 2.30 and newer allow
that with NCCL_MULTI_RANK_GPU_ENABLE=1, which is set here. Where torch has an older one, preload a
newer: LD_PRELOAD=/path/to/libnccl.so.2 python benchmarks/gpu.py. Collectives of ranks that share a
GPU are right, and their times are not those of GPUs of their own. Each case has a limit in seconds;
what torch refuses, or what takes longer, is a row that says so. Clocks wait for the device; memory
is the device's own peak. `make gpu` runs the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench
import gpu_jobs
import gpu_sync
import load
import save
import sync
import torch
from bench import GIB, HERE, MIB, Run, Runs, median, tell
from launch import ENVIRON, KIND, Launcher
from torch.cuda import nccl
from watch import ROOT, launched

NO_GPU = "torch sees no CUDA device here, so nothing is measured"
DRIVER = Path("/proc/driver/nvidia/version")
SHARED = "NCCL_MULTI_RANK_GPU_ENABLE"
RANKS_OF_ONE = 4  # on a machine with one GPU
SIM_RANKS = 2
MAX_TEXT = 160  # of why there is no figure
Rows = Iterable[Run]


@dataclass
class Machine:
    """Where the cases run.

    Attributes:
        launcher: of ranks.
        size: how many ranks.
        is_tiny: each case is as small as it can be.
    """

    launcher: Launcher
    size: int
    is_tiny: bool

    def pick(self, large: Any, tiny: Any) -> Any:
        """What fits."""
        return tiny if self.is_tiny else large

    def environ(self) -> dict[str, str]:
        """Of scripts, whose ranks ask `launch` for their device."""
        paths = [str(ROOT / "src"), str(ROOT), str(HERE)]
        return {"PYTHONPATH": os.pathsep.join(paths), KIND: self.launcher.kind}

    def left(self) -> float:
        """Seconds of the case's limit."""
        return max(1.0, self.launcher.ends_at - time.monotonic())


# -- cases ----------------------------------------------------------------------------------------


def rates(runs: Runs) -> Rows:
    """A row for each way that has GB/s, or seconds."""
    for way, of_way in runs.items():
        figure, first = next(iter(of_way[0].items()))
        is_number = figure != "refused"
        yield {"way": way, figure: round(median(of_way, figure), 3) if is_number else first}


def reads(machine: Machine) -> Rows:
    """Out of the page cache, through page-locked memory."""
    nbytes, threads = machine.pick(4 * GIB, 4 * MIB), machine.pick([1, 4, 8, 16], [1, 2])
    with tempfile.TemporaryDirectory() as folder:
        path = gpu_jobs.file_of(folder, nbytes)
        given = (path, threads, machine.pick(3, 1))
        yield from rates(machine.launcher.values(1, gpu_jobs.read_ways, *given)[0])


def loads(machine: Machine) -> Rows:
    """One rank."""
    width, layers = machine.pick((4096, 64), (64, 2))
    with tempfile.TemporaryDirectory() as folder:
        given = (folder, width, layers, machine.pick([4, 8, 16], [2]), machine.pick(3, 1))
        yield from rates(machine.launcher.values(1, gpu_jobs.load_ways, *given)[0])
        small = f"{folder}/small.pt"
        torch.save(torch.nn.Linear(64, 64).state_dict(), small)
        done = run_script(machine, [sys.executable, "-c", gpu_jobs.FIRST, small], folder)
        for way, seconds in zip(("first", "second"), done.split(), strict=True):
            yield {"way": f"small, the {way} of a process", "seconds": round(float(seconds), 3)}


def loads_of_ranks(machine: Machine) -> Rows:
    """Several ranks, FSDP2."""
    options = argparse.Namespace(
        ranks=[machine.size],
        dtype=["bf16"],
        layout=["fsdp"],
        contenders=["anyrank", "dcp", "rank0"],
        repeats=machine.pick(3, 1),
        memory_repeats=1,
        gib=machine.pick(1.0, 0.05),
        model=None,
    )
    for row in load.measure(options, machine.launcher)["rows"]:
        found = {"way": row["title"], "wrong": len(row.get("wrong", ()))}
        found |= {"refused": row["not_run"][:MAX_TEXT]} if row.get("not_run") else {}
        for figure in ("usable_sec", "peak_x"):
            found |= {figure: round(row[figure]["median"], 3)} if figure in row else {}
        yield found


def saves(machine: Machine) -> Rows:
    """FSDP2 with Adam's state: the whole save, what the step waits for, and a verified load."""
    options = argparse.Namespace(
        ranks=2,
        loads=[1],
        ways=["dcp", "dcp_async", "anyrank", "anyrank_background"],
        layers=machine.pick(42, 2),
        width=machine.pick(save.WIDTH, 256),
        repeats=machine.pick(2, 1),
    )
    for way, figures in save.measure(options, machine.launcher)["rows"].items():
        yield {"way": way, **figures}


def peaks(machine: Machine) -> Rows:
    """A step of a Llama on one rank."""
    hidden, layers = machine.pick((2048, 16), (64, 2))
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "vocab_size": 32000, **heads}
    sizes |= {"num_hidden_layers": layers, "vocab_size": machine.pick(32000, 128)}
    given = (sizes, machine.pick(16384, 64), machine.pick(4, 1))
    for way in gpu_jobs.PEAKS:
        row = one_row(lambda way=way: machine.launcher.values(1, gpu_jobs.peak_of, way, *given))
        yield {"way": way, **row}


def one_row(work: Callable[[], list[Run]]) -> Run:
    """The first rank's figures, or why there are none."""
    try:
        return work()[0]
    except RuntimeError as error:
        return refused(error)


def syncs(machine: Machine) -> Rows:
    """Within one rank, and between all."""
    for size in (1, machine.size):
        mib, repeats = machine.pick([256, 2048] if size == 1 else [1024], [8]), machine.pick(3, 1)
        options = argparse.Namespace(mib=mib, ranks=size, repeats=repeats)
        for row in sync.measure(options, machine.launcher)["rows"]:
            ratio = {"anyrank / it": row["anyrank_of_it"]} if "anyrank_of_it" in row else {}
            kept = ("mib", "case", "way", "median_sec")
            yield {name: row[name] for name in kept} | {"most_mib": max(row["memory_mib"])} | ratio


def channels(machine: Machine) -> Rows:
    """From device to device by the channel, on a device that ranks share too: kept plans."""
    given = (machine.pick(1024, 8), machine.pick(5, 1))
    for case, ends in sync.cases_of(machine.size).items():
        by_rank = machine.launcher.values(machine.size, gpu_sync.channel_ways, ends, *given)
        runs = bench.slowest([of_rank for of_rank, _ in by_rank])
        base = median(runs["all_to_all_single"], "seconds")
        for way, of_way in runs.items():
            seconds = median(of_way, "seconds")
            found = {"case": case, "way": way, "seconds": round(seconds, 4)}
            found |= {"of all_to_all": round(seconds / base, 2), "peak_mib": of_way[-1]["peak_mib"]}
            yield found | (by_rank[0][1] if way == "channel" else {})


def exact_runs(machine: Machine) -> Rows:
    """Kills, fewer ranks after each, and the bits of one rank that never stopped."""
    until, launcher = machine.pick(8, 4), machine.launcher
    with tempfile.TemporaryDirectory() as folder:
        whole = launcher.values(1, gpu_jobs.go_on, "plain", f"{folder}/one", until, 0)[0]
        for kind in machine.pick(["ddp", "fsdp"], ["ddp"]):
            sizes = sorted({machine.size, max(1, machine.size // 2), 1}, reverse=True)
            kills = {size: 3 + 2 * number for number, size in enumerate(sizes[:-1])}
            row: Run = {"way": f"{kind}, {' kill '.join(map(str, sizes))} ranks"}
            for size in sizes:
                outcome = launcher.run(
                    *(size, gpu_jobs.go_on, kind, f"{folder}/{kind}", until, kills.get(size, 0)),
                    timeout_sec=60.0,
                )
                if size not in kills and not outcome.error:
                    found = outcome.stages[0][0]["value"]
                    row |= {"sha256": found[:16], "is_equal": found == whole}
                elif not any(table.get("end") == "died" for table in outcome.stages[-1]):
                    row |= refused(RuntimeError(outcome.error))
                    break
            yield row


def hangs(machine: Machine) -> Rows:
    """What `anyrank.watch("5s")` says on three ranks."""
    for way, what in machine.pick(gpu_jobs.HANGS, {"loops": gpu_jobs.HANGS["loops"]}).items():
        limit = min(60.0, machine.left())
        variables = machine.environ()
        with launched(gpu_jobs.HANG, "train.py", way, limit_sec=limit, variables=variables) as (
            folder,
            said,
            has_ended,
        ):
            report = folder / "out"
            row: Run = {"way": what, "has_ended": has_ended}
            if report.exists():
                found = json.loads(report.read_text(encoding="utf-8"))
                row |= {"culprits": found["culprits"], "line": found["line"]}
                row["lines_of_it"] = gpu_jobs.lines_of(way)
            spoken = [line for line in said.splitlines() if line.startswith("anyrank: ")]
            yield row | {"said": (spoken or ["nothing"])[0].removeprefix("anyrank: ")[:MAX_TEXT]}


def restarts(machine: Machine) -> Rows:
    """SIGKILL of a rank under `anyrank run`, until the end of the next step."""
    then = machine.pick("2", "1")
    command = [sys.executable, "-m", "anyrank", "run", "--ranks", "2", "--then", then, "train.py"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(gpu_jobs.RESTART, encoding="utf-8")
        run_script(machine, command, name)
        lost = round(gpu_jobs.seconds_lost(folder), 2)
        yield {"way": f"anyrank run, 2 ranks to {then}", "seconds to the next step": lost}


def run_script(machine: Machine, command: list[str], folder: str) -> str:
    """What a command prints.

    Raises:
        RuntimeError: it fails; its last words.
        subprocess.TimeoutExpired: it does not end within the limit of the case.
    """
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **ENVIRON, **machine.environ()},
        capture_output=True,
        text=True,
        timeout=machine.left(),
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


# Case -> what measures it, and its limit in seconds.
CASES: dict[str, tuple[Callable[[Machine], Rows], float]] = {
    "reads": (reads, 30),
    "load": (loads, 60),
    "load on ranks": (loads_of_ranks, 60),
    "save": (saves, 70),
    "peaks": (peaks, 70),
    "sync": (syncs, 45),
    "channel": (channels, 45),
    "exact": (exact_runs, 90),
    "hangs": (hangs, 120),
    "restart": (restarts, 60),
}


# -- the command ----------------------------------------------------------------------------------


def refused(error: Exception) -> Run:
    """Why there is no figure, in a line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return {"refused": lines[-1][:MAX_TEXT]}


def measure(name: str, machine: Machine) -> Run:
    """A case within its limit: its rows, and how long it took."""
    work, limit_sec = CASES[name]
    start, rows = time.monotonic(), list[Run]()
    machine.launcher.ends_at = start + (limit_sec if not machine.is_tiny else 10 * limit_sec)
    try:
        for row in work(machine):
            rows.append(row)
            tell(name, row)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        rows.append({"way": "the rest", **refused(error)})
    return {"rows": rows, "seconds": round(time.monotonic() - start, 1), "limit_sec": limit_sec}


def describe_devices(kind: str, size: int, count: int) -> Run:
    """Which they are, what drives them, and how many ranks have one."""
    found: Run = {"ranks": size, "devices": f"{count} simulated"}
    if kind == "cuda":
        names = {torch.cuda.get_device_name(number) for number in range(count)}
        driver = DRIVER.read_text(encoding="ascii").splitlines()[0] if DRIVER.exists() else "?"
        found |= {"devices": f"{count} of {', '.join(sorted(names))}", "driver": driver}
        found |= {"cuda": torch.version.cuda, "nccl": nccl.version()}
    if count < size:
        found["shared"] = f"{size} ranks on {count} device, {SHARED}={os.environ[SHARED]}"
    return found


def tables(result: Run) -> str:
    """Every case as lines of aligned cells."""
    parts: list[str] = []
    for name, case in result["cases"].items():
        rows = case["rows"]
        heads = [*dict.fromkeys(figure for row in rows for figure in row)]
        cells = [heads, *([str(row.get(head, "")) for head in heads] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)] if heads else []
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
        parts.append("\n".join([f"== {name}, {case['seconds']} s", *lines]))
    return "\n\n".join(parts)


def main() -> int:
    """The command; ends with 2 where there is no device."""
    options = bench.parse({"sim": False, "tiny": False, "cases": [""]}, None)
    kind = "sim" if options.sim else "cuda"
    if options.sim:
        sys.path[:0] = [str(ROOT)]  # where the tests are
        from tests.device.build_sim import build

        build()
    elif not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    count = int(os.environ.get("SIM_DEVICES", "1")) if options.sim else torch.cuda.device_count()
    size = count if count > 1 else SIM_RANKS if options.sim else RANKS_OF_ONE
    if count < size:
        os.environ[SHARED] = "1"
    is_tiny = options.sim or options.tiny or options.quick
    machine = Machine(Launcher("gpu", kind), size, is_tiny)
    result = bench.describe_machine() | describe_devices(kind, size, count) | {"cases": {}}
    tell("devices", result)
    for name in CASES:
        if name.startswith(tuple(options.cases)):
            result["cases"][name] = measure(name, machine)
            if options.out or not (is_tiny or options.cases != [""]):
                bench.keep("gpu", result, options.out)
    print(tables(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
