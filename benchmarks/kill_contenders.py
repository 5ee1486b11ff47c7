"""Ways to save a run and to go on with it, for `kills.py`; and how a rank dies within a save.

The state is filled with one number for each tensor, rank and version, so that what was loaded
tells of itself whose it is.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launch import Stages
from models import local_part
from save_contenders import (
    Save,
    State,
    dcp_async,
    dcp_save,
    give,
    load_dcp,
    make_state,
    manager_of_torch_checkpointing,
    rank0,
    state_dict_of,
    torch_checkpointing,
)

import anyrank

WIDTHS = [512] * 3  # 3 MiB of parameters, 9 MiB with Adam's state
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


# -- the state ------------------------------------------------------------------------------------


def mark(version: int, number: int, rank: int) -> float:
    """What a parameter is filled with; exact in float32."""
    return float(version * 100 + number * 10 + rank)


def marks(state: State, version: int) -> Iterator[tuple[torch.Tensor, float]]:
    """Every tensor that this rank holds, with the value that it has in a version."""
    model, optimizer = state
    parameters: Any = model.parameters()
    for number, parameter in enumerate(parameters):
        value = mark(version, number, dist.get_rank())
        yield local_part(parameter), value
        moments: Any = optimizer.state[parameter]
        if moments:
            yield local_part(moments["exp_avg"]), value + 0.25
            yield local_part(moments["exp_avg_sq"]), value + 0.5
            yield moments["step"], float(version)


def fill(state: State, version: int) -> None:
    """Give the state a version's values."""
    for tensor, value in marks(state, version):
        tensor.fill_(value)
    state[1].param_groups[0]["lr"] = float(version)


def versions_in(state: State) -> dict[str, int]:
    """How many tensors are those of version 1, of version 2, and of neither."""
    rate = torch.tensor(float(state[1].param_groups[0]["lr"]))
    first, second = [[*marks(state, n), (rate, float(n))] for n in (1, 2)]
    count = {"v1": 0, "v2": 0, "neither": 1 + 4 * len(WIDTHS) - len(first)}
    for (tensor, one), (_, two) in zip(first, second, strict=True):
        if bool((tensor == one).all()):
            count["v1"] += 1
        elif bool((tensor == two).all()):
            count["v2"] += 1
        else:
            count["neither"] += 1
    return count


# -- how a rank dies ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blow:
    """When which rank dies in the second save.

    Attributes:
        at: in words.
        events: rank -> the file event before which it kills itself, from 1; 0 is before the save.
        limits: rank -> the size in bytes that no file may pass: the kernel ends it there.
    """

    at: str
    events: dict[int, int] = field(default_factory=dict[int, int])
    limits: dict[int, int] = field(default_factory=dict[int, int])


def die() -> None:
    """SIGKILL; this thread must not get any further even if another one takes the signal."""
    os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(60)


def arm(blow: Blow | None, rank: int, folder: str, seen: list[tuple[str, str]]) -> None:
    """From here on note this rank's file events within the folder, and die as the blow says.

    Events are Python's own audit events, the same for all contenders. Bytes are counted by the
    kernel: RLIMIT_FSIZE with SIGXFSZ, which ends the process in the write, whatever code writes.
    """
    last = None if blow is None else blow.events.get(rank)
    most = None if blow is None else blow.limits.get(rank)

    def passed(event: str, args: tuple[Any, ...]) -> None:
        if event not in EVENTS or (event == "open" and not (args[2] or 0) & WRITES):
            return
        path = str(args[0])
        if path.startswith(folder):
            seen.append((event, os.path.basename(path)))
            if len(seen) == last:
                die()

    if last == 0:
        die()
    sys.addaudithook(passed)
    if most is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))


def hush() -> None:
    """No output: a limit on files would be met by a log as well."""
    warnings.simplefilter("ignore")
    nothing = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nothing, descriptor)


# -- ways to save ---------------------------------------------------------------------------------

Run = Callable[[State, str, str, Iterable[int]], None]  # state, folder, place in it, versions


def each(save: Save) -> Run:
    """Every version into a place, in whose name {} is the version."""

    def run(state: State, folder: str, place: str, versions: Iterable[int]) -> None:
        for version in versions:
            save(state, f"{folder}/{place.format(version)}")

    return run


def ours(background: bool = False) -> Run:
    """As the documentation says: every step is saved."""

    def run(state: State, folder: str, place: str, versions: Iterable[int]) -> None:
        train = anyrank.TrainState(*state)
        with anyrank.Checkpoints(folder, train, every=1, background=background) as ckpts:
            for _ in versions:
                ckpts.step_done()
                ckpts.wait()

    return run


def run_save(name: str, folder: str, blow: Blow | None) -> Stages:
    """Two versions saved, the second under the blow; the file events of the second."""
    hush()
    state = make_state(WIDTHS)
    seen: list[tuple[str, str]] = []

    def versions() -> Iterator[int]:
        for version in (1, 2):
            dist.barrier()
            fill(state, version)
            if version == 2:
                arm(blow, dist.get_rank(), folder, seen)
            yield version

    yield {}
    contender = CONTENDERS[name]
    contender.save(state, folder, contender.place, versions())
    yield {"seen": seen}


# -- ways to go on --------------------------------------------------------------------------------

Load = Callable[[State, str, str], bool]


def newest(folder: str, pattern: str) -> Path:
    """What matches, with the highest number in its name.

    Raises:
        FileNotFoundError: nothing does.
    """
    found = sorted(Path(folder).glob(pattern))  # the numbers have one digit, or leading zeros
    if not found:
        raise FileNotFoundError(f"{folder}: nothing is there to resume ({pattern})")
    return found[-1]


def newest_dcp(state: State, folder: str, pattern: str) -> bool:
    """torch.distributed.checkpoint."""
    load_dcp(state, str(newest(folder, pattern)))
    return False


def newest_whole(state: State, folder: str, pattern: str) -> bool:
    """torch.load on each rank, which keeps its part."""
    file = newest(folder, f"{pattern}/*.pt")
    give(state, torch.load(file, map_location="cpu"), is_full=True)
    return False


def newest_torch_checkpointing(state: State, folder: str, pattern: str) -> bool:
    """The package of that name, as its documentation loads."""
    manager = manager_of_torch_checkpointing()
    table = manager.load(str(newest(folder, pattern)), into=state_dict_of(state))
    manager.close()
    give(state, table)
    return False


def resume(verify: bool) -> Load:
    """anyrank finds the newest sound step by itself; whether it says that steps are lost."""

    def load(state: State, folder: str, pattern: str) -> bool:
        with anyrank.Checkpoints(folder, anyrank.TrainState(*state), verify=verify) as ckpts:
            report = ckpts.resume("auto")
        return report is not None and report.lost_steps > 0 and "LOST" in str(report)

    return load


@dataclass(frozen=True)
class Contender:
    """One row.

    Attributes:
        title: of it.
        save: how versions are saved.
        load: what its user calls to go on.
        place: of a version within the folder, {} for its number.
    """

    title: str
    save: Run
    load: Load
    place: str

    @property
    def pattern(self) -> str:
        """Where versions are, of which the newest gets damaged."""
        return self.place.replace("{}", "*")


ONE, NEW, STEPS = "latest", "step-{}", "step-????????"
CONTENDERS = {
    "anyrank": Contender("anyrank, verify=True", ours(), resume(True), STEPS),
    "anyrank_background": Contender(
        "anyrank, background=True, verify=True", ours(background=True), resume(True), STEPS
    ),
    "anyrank_size": Contender("anyrank, verify=False", ours(), resume(False), STEPS),
    "dcp": Contender("dcp.save, one folder", each(dcp_save), newest_dcp, ONE),
    "dcp_async": Contender("dcp.async_save, one folder", each(dcp_async), newest_dcp, ONE),
    "dcp_new": Contender("dcp.save, new folders", each(dcp_save), newest_dcp, NEW),
    "rank0": Contender("torch.save on rank 0, one file", each(rank0), newest_whole, ONE),
    "rank0_new": Contender("torch.save on rank 0, new files", each(rank0), newest_whole, NEW),
    "torch_checkpointing": Contender(
        "torch_checkpointing, new folders",
        each(torch_checkpointing),
        newest_torch_checkpointing,
        NEW,
    ),
}


def run_load(name: str, folder: str) -> Stages:
    """What a new process gets: a state of some version, or an error that ends the rank."""
    hush()
    contender, state = CONTENDERS[name], make_state(WIDTHS)
    fill(state, 0)
    state[1].state.clear()
    yield {}
    told = contender.load(state, folder, contender.pattern)
    yield {"versions": versions_in(state), "told": told}
