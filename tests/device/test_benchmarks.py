"""What `benchmarks/gpu.py` shows on a device, in small on the simulated one, which ranks share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
Import = Callable[[str], ModuleType]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Import]:
    """Imports a benchmark's module as the script itself does, and forgets all of them after."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield import_module
    for script in FOLDER.glob("*.py"):
        sys.modules.pop(script.stem, None)


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The script, in a process of its own."""
    return subprocess.run(
        [sys.executable, str(FOLDER / "gpu.py"), *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.gpu
@pytest.mark.sim
@pytest.mark.slow
def test_every_case_runs_on_a_device_that_ranks_share(module: Import) -> None:
    done = run("--sim", SIM_DEVICES="1")
    assert done.returncode == 0, done.stderr[-4000:]
    said, tables = done.stdout.split("\n== ", 1)
    assert '"shared": "2 ranks on 1 device, NCCL_MULTI_RANK_GPU_ENABLE=1"' in said
    found = {part.split(",")[0]: part for part in tables.split("\n\n== ")}
    assert found.keys() == module("gpu").CASES.keys()
    refused = [line for line in tables.splitlines() if "Error" in line or "the rest" in line]
    assert len(refused) == 1  # safetensors knows no such device
    assert "load_file(device=)" in refused[0]
    assert "True" in found["exact"]  # the bits of one rank, after a kill
    assert "[2]" in found["hangs"]  # the rank that hangs
    assert found["channel"].count("simccl") == 2  # between halves, and on the same ranks


def test_without_a_device_nothing_is_measured() -> None:
    done = run(CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "torch sees no CUDA device here, so nothing is measured\n"


def test_what_a_case_cannot_show_is_a_row(module: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    """One way is refused, and the case comes to its limit at the next."""
    gpu = module("gpu")

    def rows(machine: object) -> Iterator[dict[str, object]]:
        yield {"way": "a", "seconds": 1.5}
        yield {"way": "b", **gpu.one_row(refuses)}
        raise RuntimeError("a rank hangs")

    def refuses() -> list[dict[str, object]]:
        raise RuntimeError("Traceback\nValueError: needs torch 9")

    monkeypatch.setitem(gpu.CASES, "some", (rows, 5))
    machine = gpu.Machine(gpu.Launcher("gpu"), 2, True)
    case = gpu.measure("some", machine)
    assert case["rows"] == [
        {"way": "a", "seconds": 1.5},
        {"way": "b", "refused": "ValueError: needs torch 9"},
        {"way": "the rest", "refused": "a rank hangs"},
    ]
    table = gpu.tables({"cases": {"some": case | {"seconds": 0.1}}})
    assert table.splitlines() == [
        "== some, 0.1 s",
        "way       seconds  refused",
        "a         1.5",
        "b                  ValueError: needs torch 9",
        "the rest           a rank hangs",
    ]


def test_a_case_ends_at_its_limit(module: Import) -> None:
    """Whatever limit its jobs have themselves."""
    launcher = module("launch").Launcher("gpu_jobs")
    launcher.ends_at = 0.0  # long ago
    outcome = launcher.run(1, max, 1, 2)
    assert outcome.error == "a rank hangs"
