"""The runs of `anyrank demo`: one process forks all their ranks.

Started as `python -m anyrank.cli.demo_runs PARENT WEIGHTS FOLDER`, where PARENT is the process of
the command. The process imports the packages of the training script once, which would take each of
ten ranks 6 s. Until it has forked the last rank, it runs no tensor operation and starts no thread,
so that forking is safe.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import runpy
import signal
import sys
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import anyrank
from anyrank.cli import torchrun
from anyrank.cli.demo import RESULTS
from anyrank.cli.launcher import end_with
from anyrank.errors import AnyrankError
from anyrank.files.manifest import read_manifest, step_name
from anyrank.files.reader import memory_of
from anyrank.files.storage import storage_for
from anyrank.models.memory_meter import PeakMemory
from anyrank.sources.readers.runs import steps_in
from anyrank.sources.step_listing import open_step
from anyrank.tools.inspect.inspect import inspect
from anyrank.tools.inspect.stream import boxes_of, open_values

SCRIPT = "finetune.py"
STEPS, SAVE_STEPS, ROWS = 6, 1, 36  # steps of the run, steps per save, samples: two epochs
LEGS = ((4, 2), (3, 4), (2, None))  # ranks, and the step during whose save they are killed
POLL_SEC = 0.01
Ranks = Any  # torch.multiprocessing's ProcessContext, which has no type hints


def main(weights: str, scratch: str) -> None:
    """Run both runs, and write the results as a JSON file to the folder `scratch`."""
    train = runpy.run_path(_find_script())["main"]
    for name in anyrank.__all__:  # which imports its module before the fork
        getattr(anyrank, name)
    gc.freeze()  # so that no rank searches imported modules for garbage
    moved, alone = (os.path.join(scratch, name) for name in ("moved", "alone"))
    single = _start_ranks(1, train, weights, alone)
    legs = _run_with_kills(train, weights, moved)
    while not single.join():
        pass
    inspection = inspect(weights)
    results = {
        **_results(moved),
        "reference": _results(alone)["losses"],
        "legs": legs,
        "sha256": sha256_of(moved),
        "reference_sha256": sha256_of(alone),
        "parameters": inspection.parameters,
        "weights_bytes": inspection.nbytes,
        "load_file_bytes": load_file_peak(weights),
        "torch": torch.__version__,
    }
    Path(scratch, RESULTS).write_text(json.dumps(results), encoding="utf-8")


def _find_script() -> str:
    """Return the path of the training script, in the package or the checkout."""
    inside = files("anyrank").joinpath("cli", SCRIPT)
    example = Path(__file__).parents[3] / "examples" / SCRIPT
    for path in (inside, example):
        if path.is_file():
            return str(path)
    raise AnyrankError(f"{SCRIPT} is missing from the package. Reinstall anyrank")


# -- ranks ----------------------------------------------------------------------------------------


def _start_ranks(ranks: int, train: Callable[[], None], weights: str, folder: str) -> Ranks:
    """Fork ranks that train and continue the run in the folder."""
    flags = [
        SCRIPT,
        f"--weights={weights}",
        f"--folder={folder}",
        f"--wrap={_exact_wrapper()}",
        f"--steps={STEPS}",
        f"--every={SAVE_STEPS}",
        f"--rows={ROWS}",
        f"--results={folder}.json",
        "--exact",
    ]
    port = mp.get_context("fork").SimpleQueue()
    return mp.start_processes(  # pyright: ignore[reportPrivateImportUsage]
        _rank,
        (ranks, os.getpid(), train, flags, port),
        nprocs=ranks,
        join=False,
        start_method="fork",
    )


def _exact_wrapper() -> str:
    """Return the wrapper to train with: exact=True with FSDP2 needs torch 2.13."""
    from torch.torch_version import TorchVersion, __version__

    return "fsdp2" if __version__ >= TorchVersion("2.13") else "ddp"


def _rank(
    rank: int, ranks: int, parent: int, train: Callable[[], None], flags: list[str], port: Any
) -> None:
    """Run one rank from fork to exit, in the environment that torchrun sets for a script."""
    end_with(parent, signal.SIGKILL)
    if rank == 0:  # the store of rank 0 takes a free port, and rank 0 sends it to the others
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
        for _ in range(ranks):
            port.put(store.port)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port.get()), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["TORCHELASTIC_RUN_ID"] = "demo"
    sys.argv[:] = flags
    train()


def _run_with_kills(
    train: Callable[[], None], weights: str, folder: str
) -> list[dict[str, int | None]]:
    """Train on 4, 3 and 2 ranks; SIGKILL ends the first two legs at a random moment of a save."""
    legs: list[dict[str, int | None]] = []
    for count, kill_at in LEGS:
        newest = max(committed(folder), default=0)
        legs.append({"ranks": count, "from_step": newest, "killed_in_save_of": kill_at})
        ranks = _start_ranks(count, train, weights, folder)
        if kill_at is None:
            while not ranks.join():
                pass
        else:
            _wait_for_save(ranks, folder, kill_at)
            # Stop all of them first, so that no rank notices the death of another.
            torchrun.send(signal.SIGSTOP, ranks.pids())
            torchrun.send(signal.SIGKILL, ranks.pids())
            for process in ranks.processes:
                process.join()
    return legs


def _wait_for_save(ranks: Ranks, folder: str, step: int) -> None:
    """Wait until a random moment after the save of a step has started; it may be over by then.

    Raises:
        Exception: a rank failed.
    """
    sign = step_name(step)
    while not (os.path.isdir(folder) and any(n.startswith(sign) for n in os.listdir(folder))):
        if ranks.join(timeout=POLL_SEC):
            raise AnyrankError(f"the run ended before it saved step {step}")
    time.sleep(random.random() * 0.2)  # noqa: S311


def committed(folder: str) -> list[int]:
    """Return the committed steps of a run."""
    return [saved.step for saved in steps_in(folder)]


# -- what the runs are compared by ----------------------------------------------------------------


def load_file_peak(weights: str) -> int:
    """Return the peak bytes of host memory to build a model and call `load_file`."""
    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel

    config = BertConfig.from_pretrained(weights)
    with PeakMemory() as memory:
        model = BertModel(config)
        model.load_state_dict(load_file(os.path.join(weights, "model.safetensors")), strict=False)
    return memory.peak_bytes


def sha256_of(folder: str) -> str:
    """Return the SHA-256 of the weights and the optimizer state in a run's newest step."""
    path = os.path.join(folder, step_name(max(committed(folder))))
    storage, digest = storage_for(path), hashlib.sha256()
    listing = open_step(storage, path, read_manifest(storage, path)).listing
    with open_values(listing) as values:
        for name, stored in sorted(listing.tensors.items()):
            digest.update(f"{name} {stored.shape} {stored.dtype}".encode())
            for box in boxes_of(stored):
                # Kept in a variable, because the digest only reads its memory.
                part = values.read(stored, box)
                digest.update(memory_of(part))
    return digest.hexdigest()


def _results(folder: str) -> dict[str, Any]:
    with open(f"{folder}.json", encoding="utf-8") as file:
        results: dict[str, Any] = json.load(file)
    return results


if __name__ == "__main__":
    if end_with(int(sys.argv[1])):
        main(*sys.argv[2:])
