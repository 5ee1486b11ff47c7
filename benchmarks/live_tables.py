"""Tables of docs/benchmarks.md about runs: live weights, a killed rank, the same bits."""

from __future__ import annotations

import statistics
from typing import Any

from tables import provenance, table


def sync_table(result: dict[str, Any]) -> str:
    """Weights from one layout into another: time, memory and bytes, beside the other ways."""
    body: list[list[str]] = []
    for row in result["rows"]:
        if "way" not in row or row["mib"] not in (256, 2048):
            continue
        ratio = row.get("anyrank_of_it")
        body.append(
            [
                f"{row['mib']} MiB, {row['case']}: {row['way']}",
                f"{row['median_sec']:.2f}",
                "" if ratio is None else f"{ratio:.2f}",
                f"{max(row['memory_mib']):.0f}",
                f"{sum(row['sent_mib']):.0f}",
            ]
        )
    what = f"4 ranks, medians of {result['repeats']}. {provenance(result)}"
    head = [
        "weights, ranks: way",
        "seconds",
        "anyrank / it",
        "most MiB beside the shares",
        "MiB sent",
    ]
    return f"{what}\n\n{table(head, body)}"


KILLS = {
    "torchrun": "`torchrun`, a checkpoint in files",
    "files": "`anyrank run`, a checkpoint in files",
    "memory": "`anyrank run`, `Checkpoints(peers=True)`",
}


def peers_table(result: dict[str, Any]) -> str:
    """From SIGKILL of a rank to the next optimizer step, and to the first that is new."""
    body: list[list[str]] = []
    for name, title in KILLS.items():
        cells = [title]
        for key in ("to_step", "to_new"):
            seconds = statistics.median(run[key] for run in result["runs"][name])
            ratio = result["ratios"].get(name, {}).get(key)
            cells.append(f"{seconds:.1f} s" + (f" ({ratio:.2f})" if ratio else ""))
        body.append(cells)
    what = (
        f"SIGKILL of 1 of {result['ranks']} ranks in step {result['killed_in_step']}, a save every "
        f"{result['every']} steps, n = {len(result['runs']['memory'])}; in brackets the median "
        "ratio to torchrun in the same repetition."
    )
    head = ["", "until a step", "until the first step that is new"]
    return f"{what} {provenance(result)}\n\n{table(head, body)}"


RATIOS = (
    # contender, measured against, at most
    ("ddp exact", "ddp stock", 1.10),
    ("fsdp exact", "fsdp each", 1.00),
    ("fsdp exact", "fsdp stock", 1.05),
)
EXTRA = {
    "fsdp exact": "fsdp each",
    "ddp exact": "ddp stock",
}


def exact_table(result: dict[str, Any]) -> str:
    """What exact=True costs, and which runs had the same bits."""
    times, bits = result["times"], result["bits"]
    goals = {f"{name} / {other}": most for name, other, most in RATIOS}
    body = [
        [f"{row['ranks']} ranks, {row['rounds']} microbatches each"]
        + [beside_goal(row["ratios"][name], goal) for name, goal in goals.items()]
        for row in times["rows"]
    ]
    by_digest: dict[str, list[str]] = {}
    for row in bits["rows"]:
        by_digest.setdefault(row["sha256"], []).append(f"{row['kind']} on {row['ranks']}")
    same = [[f"`{digest[:16]}`", ", ".join(runs)] for digest, runs in by_digest.items()]
    return "\n\n".join(
        [
            f"Medians of {times['rows'][0]['n']}. {provenance(times)}",
            table(["", *goals], body),
            f"SHA-256 of weights and Adam state after {bits['steps']} steps. {provenance(bits)}",
            table(["SHA-256", "wrapper and number of ranks"], same),
        ]
    )


def beside_goal(figure: float, goal: float) -> str:
    """A figure, the most that it was to be, and whether it is."""
    verdict = "met" if round(figure, 2) <= round(goal, 2) else "missed"
    return f"{figure:.2f} (goal {goal:.2f}, {verdict})"
