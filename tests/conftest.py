"""Ends the rank processes with the session; leaves out what `make test` does not run; runs tests of
devices on the one that is there, and says so where none is.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from tests.device.build_sim import why_not
from tests.durations import Recorder
from tests.tiers import FastTier
from torch.distributed.fsdp import FSDPModule

from anyrank.runs.resume.signals import PendingSignals
from anyrank.testing import close_pool

# What is imported while tests are collected stays: to look it over for garbage takes a fifth of
# that time, and most of each collection afterwards.
gc.disable()

TIER = pytest.StashKey[FastTier]()

# A law holds on a busy machine too; pytest's own time-out ends a test that hangs.
TOO_SLOW = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("anyrank", deadline=None, suppress_health_check=TOO_SLOW)
hypothesis.settings.load_profile("anyrank")

# For tensors as small as those of tests, threads wait for each other longer than they compute, and
# beside other load ten times as long. The second line is for processes that a test starts.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# Each process that a test starts would compile anyrank again: half a second of it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False  # and each session all assertions


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=["cuda", "sim"], help="run tests/gpu and tests/device, on this device"
    )
    parser.addoption("--tier", choices=["fast", "all"], default="all", help="see tests/tiers.py")
    parser.addoption("--record", type=Path, help="file for the seconds that each test took")


def device_type(config: pytest.Config) -> str:
    """What the tests of devices run on, or nothing."""
    return config.getoption("--device") or ("cuda" if torch.cuda.is_available() else "")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") == "sim":
        import tests.device.sim  # noqa: F401 - before anything asks for an accelerator
    if config.getoption("--tier") == "fast":
        config.stash[TIER] = FastTier()
    if config.getoption("--record"):
        config.pluginmanager.register(Recorder(config.getoption("--record")))


def pytest_report_header(config: pytest.Config) -> str:
    tier = config.stash.get(TIER, None)
    return f"tier: {tier.header if tier else 'all tests'}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    tier = config.stash.get(TIER, None)
    return (tier is not None and tier.leaves_out(collection_path)) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("crowded") is None)
    device = device_type(config)
    tier = config.stash.get(TIER, None)
    unwanted = {
        "gpu": not device,
        "cuda": device != "cuda",
        "sim": device != "sim",
        "builds_sim": device == "sim",
    }
    left = [i for i in items if any(i.get_closest_marker(m) for m, out in unwanted.items() if out)]
    if tier is not None:
        slow = [item for item in items if item.get_closest_marker("slow")]
        left += [item for item in slow if tier.leaves_out_slow_of(item.path) and item not in left]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        for item in items:
            if item.get_closest_marker("exact_fsdp"):
                item.add_marker(pytest.mark.skip("exact=True under FSDP2 needs torch 2.13"))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def no_run_stays_open() -> Iterator[None]:
    """A run that a test leaves open, as an example of a docstring does, would hear the signals of a
    later test.
    """
    yield
    for signals in [*PendingSignals.open_runs]:
        signals.restore()


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The rank's device. On the simulated device a test ends without a race, and with a context on
    this device alone, unless it is marked for several.
    """
    kind = device_type(request.config)
    own = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    if kind == "cuda":
        yield own
        return
    simulated = torch.get_device_module(own)
    simulated.races()
    simulated.used_devices(clear=True)
    yield own
    several = request.node.get_closest_marker("several_devices")
    used = simulated.used_devices()
    assert simulated.races() == []
    assert used <= {own.index} or several, f"contexts on devices {used}"


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if not device_type(config):
        terminalreporter.write_line("no CUDA device here: tests/gpu did not run on one (make gpu)")
        if why_not():
            terminalreporter.write_line(f"no simulated device either: {why_not()}")
    skipped, passed = (
        [one for one in terminalreporter.getreports(how) if "tests/machines" in one.nodeid]
        for how in ("skipped", "passed")
    )
    if skipped and not passed:
        why = skipped[0].longrepr[2].removeprefix("Skipped: ")
        terminalreporter.write_line(f"promises 4 and 6 were not tried between machines: {why}")


def pytest_unconfigure() -> None:
    close_pool()
