"""The demo's second half: a run that is killed twice during a save, and resumed on other ranks.

The training script is `examples/finetune.py`. The reference runs at the same time: the same script
on one rank, without interruption.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, BinaryIO

from anyrank.cli import torchrun
from anyrank.errors import AnyrankError
from anyrank.wording import count

SCRIPT = "finetune.py"
SAVES = 12  # in a whole run
POLL_SEC = 0.01


@dataclass(frozen=True)
class _Leg:
    """The part of a run on one number of ranks.

    Attributes:
        ranks: their number.
        kill_at: SIGKILL to all of them while this step is saved; None to run to the end.
    """

    ranks: int
    kill_at: int | None


def _find_script() -> str:
    """The training script, from the package or the checkout."""
    inside = files("anyrank").joinpath("cli", SCRIPT)
    example = Path(__file__).parents[3] / "examples" / SCRIPT
    found = next((str(path) for path in (inside, example) if path.is_file()), None)
    if found is None:
        raise AnyrankError(f"{SCRIPT} is missing in the package: reinstall anyrank")
    return found


def _plan_legs(ranks: int, steps: int, chance: random.Random) -> list[_Leg]:
    """Three legs, each on fewer ranks; the first two end at a random moment of a save."""
    every = steps // SAVES
    first = chance.randint(3, 4) * every
    second = chance.randint(7, 8) * every
    counts = [max(1, ranks - lost) for lost in range(3)]
    return [_Leg(counts[0], first), _Leg(counts[1], second), _Leg(counts[2], None)]


def run_with_kills(
    weights: str, scratch: str, log: str, ranks: int, steps: int, environ: dict[str, str]
) -> dict[str, Any]:
    """The results of the reference and of the killed run, leg by leg.

    Raises:
        AnyrankError: a rank failed unexpectedly, or `torchrun.LIMIT_SEC` have passed.
    """
    folder = os.path.join(scratch, "run")
    deadline = time.monotonic() + torchrun.LIMIT_SEC
    with open(log, "ab") as file:
        options = (weights, steps, file, environ)
        single = _start(1, os.path.join(scratch, "reference"), steps, *options)
        try:
            legs = [
                _run_leg(leg, folder, deadline, *options)
                for leg in _plan_legs(ranks, steps, random.Random())  # noqa: S311
            ]
            torchrun.finish(single, deadline, log)
        finally:
            torchrun.kill_all(single)
    alone = os.path.join(scratch, "reference")
    both = {"sha256": sha256_of(folder), "reference_sha256": sha256_of(alone)}
    return {"reference": _results(alone)["losses"], "legs": legs} | both | _results(folder)


def _start(
    ranks: int,
    folder: str,
    every: int,
    weights: str,
    steps: int,
    file: BinaryIO,
    environ: dict[str, str],
) -> subprocess.Popen[bytes]:
    flags = [
        f"--weights={weights}",
        f"--folder={folder}",
        f"--steps={steps}",
        f"--every={every}",
        f"--rows={6 * steps}",
        f"--results={folder}.json",
        "--exact",
    ]
    return torchrun.start(torchrun.line(ranks, _find_script(), *flags), file, environ)


def _run_leg(
    leg: _Leg,
    folder: str,
    deadline: float,
    weights: str,
    steps: int,
    file: BinaryIO,
    environ: dict[str, str],
) -> dict[str, Any]:
    """Run one leg; its results, with the newest step committed by its end."""
    start = time.perf_counter()
    before = committed(folder)
    process = _start(leg.ranks, folder, steps // SAVES, weights, steps, file, environ)
    try:
        if leg.kill_at is None:
            torchrun.finish(process, deadline, file.name)
        else:
            _wait_for_save(process, folder, leg.kill_at, deadline, file.name)
    finally:
        torchrun.kill_all(process)
    done = committed(folder)
    return {
        "ranks": leg.ranks,
        "from_step": max(before, default=0),
        "killed_in_save_of": leg.kill_at,
        "committed": max(done, default=0),
        "seconds": time.perf_counter() - start,
    }


def committed(folder: str) -> list[int]:
    """The committed steps of a run."""
    from anyrank.formats.run_folder import steps_of  # loads torch, which `anyrank --help` does not

    return [step for step, _ in steps_of(os.listdir(folder))] if os.path.isdir(folder) else []


def _wait_for_save(
    process: subprocess.Popen[bytes], folder: str, step: int, deadline: float, log: str
) -> None:
    """Return a random moment after the save of a step has begun, which may be over by then."""
    from anyrank.files.manifest import step_name

    sign = step_name(step)
    while not (os.path.isdir(folder) and any(n.startswith(sign) for n in os.listdir(folder))):
        if process.poll() is not None or time.monotonic() > deadline:
            output = torchrun.tail(log)
            raise AnyrankError(f"{log}: the run ended before step {step} was saved:\n{output}")
        time.sleep(POLL_SEC)
    time.sleep(random.random() * 0.2)  # noqa: S311


def sha256_of(folder: str) -> str:
    """SHA-256 of all tensors in a run's newest step: weights and optimizer state."""
    from anyrank.files.manifest import read_manifest, step_name
    from anyrank.files.reader import memory_of
    from anyrank.files.storage import storage_for
    from anyrank.formats.run_folder import list_step
    from anyrank.inspection.stream import boxes_of, open_values

    path = os.path.join(folder, step_name(max(committed(folder))))
    storage, digest = storage_for(path), hashlib.sha256()
    listing = list_step(storage, path, read_manifest(storage, path))
    with open_values(listing) as values:
        for name, stored in sorted(listing.tensors.items()):
            digest.update(f"{name} {stored.shape} {stored.dtype}".encode())
            for box in boxes_of(stored):
                part = values.read(stored, box)  # kept, as its memory is only looked at
                digest.update(memory_of(part))
    return digest.hexdigest()


def _results(folder: str) -> dict[str, Any]:
    with open(f"{folder}.json", encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found


def leg_lines(results: dict[str, Any]) -> list[str]:
    """The legs of the killed run, its saves and its data, as lines."""
    lines: list[str] = []
    for leg in results["legs"]:
        end = "to the end"
        if leg["killed_in_save_of"] is not None:
            end = f"SIGKILL while step {leg['killed_in_save_of']} was saved"
        lines.append(f"    {count(leg['ranks'], 'rank')}  from step {leg['from_step']}, {end}")
    saves = results["saves"]
    mib = saves[-1]["nbytes"] / (1 << 20)
    seconds = sum(save["seconds"] for save in saves) / len(saves)
    stall = sum(save["stall_seconds"] for save in saves) / len(saves)
    lines.append(
        f"  a save    {mib:.0f} MiB in {seconds:.2f} s alongside the training, which pauses "
        f"for {stall:.2f} s; a resume {results['resumed']['seconds']:.2f} s"
    )
    seen = [f"epoch {epoch}: {count} {verdict}" for epoch, count, verdict in results["receipts"]]
    lines.append(f"  samples   {', '.join(seen)}")
    return lines


def same_bits_line(results: dict[str, Any]) -> str:
    """How the killed run ended beside the one on one rank, as a line."""
    way = " -> ".join(str(leg["ranks"]) for leg in results["legs"])
    same = "the same" if results["sha256"] == results["reference_sha256"] else "another"
    return f"  one rank  never stopped: {same} SHA-256 of weights and optimizer as on {way} ranks"


def findings_of(results: dict[str, Any]) -> list[str]:
    """The findings of a killed run, as sentences."""
    found: list[str] = []
    if results["losses"] != results["reference"]:
        found.append("losses differ from those of one rank: see report.json")
    if results["sha256"] != results["reference_sha256"]:
        both = f"SHA-256 {results['sha256']} and {results['reference_sha256']}"
        found.append(f"weights and optimizer differ from those of one rank: {both}")
    wrong = [row for row in results["receipts"] if not row[2].startswith("exactly once")]
    if wrong or not results["receipts"]:
        found.append(f"samples were not seen exactly once: {results['receipts']}")
    return found
