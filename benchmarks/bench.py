"""What all benchmarks share: ways in turn, figures with their spread, commands, files, the machine.

A benchmark sets something up and says what each of its ways does; `Case` runs them in turn:

    case = Case("save", SAVES, job)              # job("dcp", 0) -> {"seconds": 0.4}
    runs = case.run(5, warm=1)                   # way -> one such table for each repetition
    ratios(runs["anyrank"], runs["dcp"], "seconds")
    cells = Case("truncated", WAYS, job).once()  # way -> the outcome of its only run

and `main` makes a command of it, which gives it fresh ranks and writes its result to
`results/NAME.json`. Nothing heavy is imported, so that a rank or a process of a benchmark loads
what it needs alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launch import Launcher

HERE = Path(__file__).parent
FOLDER = HERE / "results"
WIDTH = 100  # of a line of results
MIB, GIB = 1 << 20, 1 << 30
PAGE = 4096
MADV_POPULATE_WRITE = 23  # Linux 5.14
PACKAGES = (
    *("torch", "transformers", "accelerate", "safetensors", "anyrank"),
    *("torch_checkpointing", "deepspeed", "liger_kernel"),  # peers
)

Run = dict[str, Any]  # what one way did in one repetition: figure -> value
Runs = dict[str, list[Run]]


# -- ways in turn ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Ways that are compared with one another.

    Attributes:
        name: what is compared, as it is printed.
        ways: their names, or a table by their names.
        job: runs a way once; called with its name and the number of the repetition.
    """

    name: str
    ways: Iterable[str]
    job: Callable[[str, int], Run]

    def run(self, repeats: int, warm: int = 0, is_told: bool = True) -> Runs:
        """Every way in each repetition, which begins with another one.

        Args:
            repeats: how many count.
            warm: how many go before, which do not count.
            is_told: each run is printed.
        """
        runs: Runs = {way: [] for way in self.ways}
        for number in range(-warm, repeats):
            for way in in_turn(runs, number):
                run = self.job(way, number)
                if number >= 0:
                    runs[way].append(run)
                    if is_told:
                        tell(f"{self.name}: {way}", run)
        return runs

    def once(self) -> Run:
        """What each way did in its only repetition."""
        return {way: runs[0] for way, runs in self.run(1).items()}


def in_turn(names: Iterable[str], repetition: int) -> list[str]:
    """The names, beginning with another one in each repetition."""
    every = [*names]
    first = repetition % max(1, len(every))
    return every[first:] + every[:first]


def slowest(by_rank: Sequence[Runs]) -> Runs:
    """Runs of which each rank has its own: the highest of each figure in each repetition."""
    return {
        way: [
            {figure: max(run[figure] for run in of_ranks) for figure in of_ranks[0]}
            for of_ranks in zip(*(runs[way] for runs in by_rank), strict=True)
        ]
        for way in by_rank[0]
    }


def tell(what: str, figures: Any) -> None:
    """Print a line."""
    if isinstance(figures, dict):
        figures = {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}
    print(f"{what}: {json.dumps(figures, default=str)}", flush=True)


# -- figures --------------------------------------------------------------------------------------


def known(runs: Iterable[Run], figure: str) -> list[float]:
    """A figure in the repetitions that have it."""
    return [run[figure] for run in runs if figure in run]


def median(runs: Iterable[Run], figure: str) -> float:
    """Of one figure of a way's repetitions."""
    return statistics.median(known(runs, figure))


def spread(values: Iterable[float]) -> Run:
    """Median, least, most, and how many values they are of; nothing where there are none."""
    every = [*values]
    if not every:
        return {}
    figures = {"median": statistics.median(every), "least": min(every), "most": max(every)}
    return {name: round(value, 4) for name, value in figures.items()} | {"n": len(every)}


def ratios(ours: Iterable[Run], theirs: Iterable[Run], figure: str) -> Run:
    """`spread` of the ratios of a figure, each of two ways in one repetition that both have."""
    pairs = [pair for pair in zip(ours, theirs, strict=False) if all(figure in run for run in pair)]
    return spread(a[figure] / b[figure] for a, b in pairs)


def go_on(name: str, keys: Iterable[str], job: Callable[[str], Run]) -> dict[str, Run]:
    """A long job for each of many keys; a call that was stopped is gone on with by the next one.

    Args:
        name: of the file in the system's temporary folder that has what is done meanwhile.
        keys: what is to be done, which also says what a result depends on.
        job: from a key to its result.
    """
    path = Path(tempfile.gettempdir(), f"anyrank-{name}.jsonl")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    done: dict[str, Run] = dict(json.loads(line) for line in lines)
    wanted = [*keys]
    with path.open("a", buffering=1, encoding="utf-8") as file:
        for key in wanted:
            if key not in done:
                done[key] = job(key)
                file.write(json.dumps([key, done[key]]) + "\n")
                tell(key, done[key])
    path.unlink()
    return {key: done[key] for key in wanted}


def goal(what: str, value: float, at_most: float) -> dict[str, Any]:
    """What was to be reached, and whether it was; printed."""
    found = {"what": what, "value": value, "at_most": at_most, "met": value <= at_most}
    tell("goal", found)
    return found


# -- commands and files ---------------------------------------------------------------------------


def main(
    name: str,
    measure: Callable[[argparse.Namespace, Launcher], Run],
    quick: Run | None = None,
    choices: Sequence[str] = (),
    in_tables: bool = False,
    **defaults: Any,
) -> None:
    """The command of a benchmark: reads its options, measures, and writes down what was found.

    Args:
        name: of its module, which its ranks have imported before they start, and of its results.
        measure: from the options and the starter of fresh ranks to the results.
        quick: what --quick sets, which writes nothing.
        choices: options that choose a part of it: their use writes nothing, unless --out is given.
        in_tables: the results are tables, each with its own machine; those of earlier calls stay.
        defaults: all other options with their defaults, which give them their types.
    """
    from launch import Launcher

    options = parse(defaults, quick)
    here = describe_machine()
    tell("machine", here)
    before = load_average()
    result = measure(options, Launcher(name))
    is_part = options.quick or any(getattr(options, one) != defaults[one] for one in choices)
    here |= {"load_average": [before, load_average()]}
    if options.out or not is_part:
        if in_tables:
            keep(name, read(name) | {one: here | result[one] for one in result}, options.out)
        else:
            keep(name, here | result, options.out)


def parse(
    defaults: dict[str, Any], quick: dict[str, Any] | None, arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """The options of a command; a list's words are separated by spaces."""
    parser = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    for option, default in defaults.items():
        flag = f"--{option.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, list):
            kind = type(default[0]) if default else str
            parser.add_argument(flag, nargs="+", type=kind, default=default)
        else:
            kind = str if default is None else type(default)
            parser.add_argument(flag, type=kind, default=default)
    parser.add_argument("--quick", action="store_true", help="small, and nothing is written")
    parser.add_argument("--out", help="file of the results")
    options = parser.parse_args(arguments)
    vars(options).update((quick or {}) if options.quick else {})
    return options


def read(name: str) -> dict[str, Any]:
    """A result file, or nothing if there is none yet."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def keep(name: str, result: dict[str, Any], path: str | Path | None = None) -> None:
    """Write a result file, `results/NAME.json` unless a path is given, and say so."""
    path = Path(path or FOLDER / f"{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_text(result) + "\n", encoding="utf-8")
    print(f"written to {path}")


def as_text(value: Any, indent: int = 0) -> str:
    """JSON with a line for each value that fits in one."""
    flat = json.dumps(value)
    if len(flat) + indent <= WIDTH or not isinstance(value, (dict, list)):
        return flat
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {as_text(item, indent + 1)}" for key, item in value.items()]
        start, stop = "{", "}"
    else:
        parts = [as_text(item, indent + 1) for item in value]
        parts = parts if not all(isinstance(item, str) for item in value) else [*_filled(parts)]
        start, stop = "[", "]"
    line = "\n" + " " * indent
    return f"{start}{line} " + f",{line} ".join(parts) + f"{line}{stop}"


def _filled(texts: Iterable[str]) -> Iterator[str]:
    """Texts as lines of several, as JSON has them between commas."""
    line = ""
    for text in texts:
        if line and len(line) + len(text) > WIDTH - 10:
            yield line
            line = ""
        line += f", {text}" if line else text
    yield line


# -- the machine ----------------------------------------------------------------------------------


def describe_machine() -> Run:
    """One line of hardware, the versions, the command and the date; part of every result file."""
    arguments = [argument.removeprefix(f"{HERE.parent}/") for argument in sys.argv]
    return {
        "command": shlex.join(["python", *arguments]),
        "machine": hardware_line(),
        "versions": {"python": platform.python_version(), **versions()},
        "date": time.strftime("%Y-%m-%d"),
    }


def hardware_line() -> str:
    """CPU, cores, memory, huge pages and kernel."""
    text = Path("/proc/cpuinfo").read_text(encoding="ascii")
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    setting = huge.read_text(encoding="ascii").split("[")[-1].split("]")[0] if huge.exists() else ""
    return (
        f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}, "
        f"{meminfo('MemTotal') / GIB:.0f} GiB memory, huge pages {setting or 'unknown'}, "
        f"{platform.system()} {platform.release()}"
    )


def versions() -> dict[str, str]:
    """Package -> version, of those that are installed."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def meminfo(name: str) -> int:
    """A field of /proc/meminfo, in bytes."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/meminfo has no field {name}")


def load_average() -> float:
    """Processes that want a core, averaged over the last minute: tells when others were busy."""
    return round(os.getloadavg()[0], 2)


def warm_memory(nbytes: int) -> None:
    """Touch memory and free it, so that no contender pays for the hypervisor giving it.

    A virtual machine may hand free memory back to its host, huge blocks first and within seconds;
    the next use of it is then ten times slower than on a machine of its own.

    Args:
        nbytes: how much; at most 85 % of what is free is taken.
    """
    nbytes = min(nbytes, meminfo("MemFree") * 85 // 100) // PAGE * PAGE
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        with contextlib.suppress(OSError):  # no huge pages on this machine
            memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(MADV_POPULATE_WRITE)


def warm_files(folder: Path) -> None:
    """Read every file of a folder once into the page cache."""
    block = bytearray(8 << 20)
    for path in sorted(folder.iterdir()):
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
