"""Calls that ranks make differently and that do not hang are told, once, with both lines."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.scripts import fork_ranks

import anyrank
from anyrank.testing import run_ranks
from anyrank.watching import mismatch

ODD, NUMBER = 2, 24


class Warnings(logging.Handler):
    """What a rank says at WARNING of its watch."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def other_dtype(group: Any) -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.int32), group=group)


def same(group: Any) -> None:
    dist.all_reduce(torch.ones(2, 2), group=group)  # as many elements in another shape


def job_calls(odd: Callable[[Any], None]) -> tuple[list[str], str]:
    """Calls until the watch says something, or has compared the odd one; returns what it said."""
    warnings = Warnings()
    log = logging.getLogger("anyrank.watching")
    log.addHandler(warnings)
    mismatch.SHARE = 0  # at each look of the watch
    watching = anyrank.watch("1h")
    group = dist.new_group()
    end, over = time.monotonic() + 60, torch.zeros(1)
    number = 0
    try:
        while not over.item():
            number += 1
            if number == NUMBER and dist.get_rank() == ODD:
                odd(group)
            else:
                dist.all_reduce(torch.ones(4), group=group)
            time.sleep(0.005)
            is_over = bool(warnings.texts) or time.monotonic() > end or number > 600
            over.fill_(is_over)
            dist.broadcast(over, 0)
    finally:
        watching.close()
        log.removeHandler(warnings)
    return warnings.texts, group.group_name  # pyright: ignore


def test_a_call_that_differs_is_told_with_both_lines() -> None:
    """Gloo lets these mismatches pass; unit/watching/test_hang_verdicts.py has the others."""
    (texts, group), *others = run_ranks(3, job_calls, other_dtype)
    assert [other for other, _ in others] == [[], []]
    (text,) = texts
    first, *_ = text.splitlines()
    assert first.startswith(f"anyrank: rank {ODD} called ")
    assert f"#{NUMBER} of" in first
    assert re.search(rf"{Path(__file__).name}:\d+ other_dtype; ranks 0, 1 called", first)
    assert f"group {group}" in first


def main_that_ends(folder: str) -> None:
    """Calls until the watch ends the job, which goes on by itself."""
    os.chdir(folder)
    dist.init_process_group("gloo")
    mismatch.SHARE = 0
    with contextlib.closing(anyrank.watch("1h", exit=True, report="out")):  # as Python's end does
        for number in range(1, 10_000):
            (other_dtype if number == NUMBER and dist.get_rank() == ODD else same)(None)
            time.sleep(0.005)


def test_with_exit_a_call_that_differs_ends_the_job(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert fork_ranks(3, str(log), main_that_ends, str(tmp_path)) == [124] * 3, log.read_text()
    (screen,) = [line for line in log.read_text().splitlines() if line.startswith("anyrank: ")]
    report = json.loads((tmp_path / "out").read_text())
    assert (report["culprits"], report["kind"], report["waiting"]) == ([ODD], "mismatch", [0, 1])
    lines, first = inspect.getsourcelines(other_dtype)
    assert (report["file"], report["line"]) == (__file__, first + len(lines) - 1)
    assert f"#{NUMBER} of" in screen


def test_calls_that_are_alike_are_not_told() -> None:
    for texts, _ in run_ranks(3, job_calls, same):
        assert texts == []
