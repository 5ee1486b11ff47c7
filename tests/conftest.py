"""Ends the rank processes with the session; leaves out the GPU tests, and says so, without a
GPU.
"""

from __future__ import annotations

import pytest
import torch

from anyrank.testing import close_pool


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not torch.cuda.is_available():
        terminalreporter.write_line("no CUDA device here: tests/gpu did not run (make gpu)")
    skipped = [
        one for one in terminalreporter.getreports("skipped") if "tests/machines" in one.nodeid
    ]
    if skipped:
        terminalreporter.write_line(f"tests/machines did not run: {skipped[0].longrepr[2]}")


def pytest_unconfigure() -> None:
    close_pool()
