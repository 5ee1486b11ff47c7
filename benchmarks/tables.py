"""The tables of docs/benchmarks.md, from the result files. Pure text; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MIB = 1 << 20
DTYPES = {"bf16": "bf16 file into bf16 parameters", "fp32": "bf16 file into fp32 parameters"}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def provenance(result: dict[str, Any]) -> str:
    """Where and how a result was measured."""
    kinds = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"`{result['command']}`, {result['date']}: {result['machine']}; {kinds}."


# -- load -----------------------------------------------------------------------------------------


def load_tables(result: dict[str, Any]) -> str:
    """Memory and time of every contender and layout."""
    rows = {(row["group"], row["contender"]): row for row in result["rows"]}
    groups = list(dict.fromkeys(group for group, _ in rows))
    titles = {row["contender"]: row["title"] for row in result["rows"]}
    size = result["model"]["bf16_bytes"] / MIB
    parts = [
        f"A random Llama of {size:.0f} MiB in bf16, in {result['model']['shards']} shards. Time: "
        "median and range of the ratio to the hand-written minimum of the same repetition, "
        f"{counts(result['rows'], 'usable_sec')}. Memory: the highest of all repetitions, "
        f"{counts(result['rows'], 'peak_x')}. {provenance(result)}"
    ]
    layouts = dict.fromkeys(tuple(group.split()[:2]) for group in groups)
    sizes_of = {
        key: [g.split()[2] for g in groups if tuple(g.split()[:2]) == key] for key in layouts
    }
    for (layout, kind), sizes in sizes_of.items():
        if len(sizes) == 1:
            continue
        head = ["", *(f"memory, {n} ranks" for n in sizes), *(f"time, {n} ranks" for n in sizes)]
        body: list[list[str]] = []
        for name, title in titles.items():
            ours = [rows.get((f"{layout} {kind} {n}", name)) for n in sizes]
            if any(ours):
                body.append([title, *map(memory_cell, ours), *map(time_cell, ours)])
        parts += [f"**{layout.upper()}, {DTYPES[kind]}**", table(head, body)]
    return "\n\n".join(parts)


def counts(rows: list[dict[str, Any]], key: str) -> str:
    """How many repetitions there are, and of what fewer."""
    most: dict[str, int] = {}
    for row in rows:
        if key in row:
            most[row["title"]] = max(most.get(row["title"], 0), row[key]["n"])
    whole = max(most.values())
    fewer: dict[int, list[str]] = {}
    for title, number in most.items():
        if number < whole:
            fewer.setdefault(number, []).append(title)
    extra = "".join(f"; {number} of {', '.join(titles)}" for number, titles in fewer.items())
    return f"n = {whole}{extra}"


def memory_cell(row: dict[str, Any] | None) -> str:
    """Peak of added memory over the target's bytes."""
    if row is None:
        return ""
    if "peak_x" not in row:
        return "too large" if "memory" in row.get("not_run", "") else "not run"
    return f"{row['peak_x']['most']:.3f}" + (" WRONG" if row["wrong"] else "")


def time_cell(row: dict[str, Any] | None) -> str:
    """Time over the hand-written minimum's."""
    if row is None or "usable_sec" not in row:
        return ""
    if row["contender"] == "hand" or "time_x_hand" not in row:
        return f"{row['usable_sec']['median']:.2f} s"
    ratio = row["time_x_hand"]
    spread = f" ({ratio['least']:.2f} to {ratio['most']:.2f})" if ratio["n"] > 1 else ""
    return f"{ratio['median']:.2f}{spread}"


# -- traps and frozen parts -----------------------------------------------------------------------


def trap_table(result: dict[str, Any]) -> str:
    """Trap by way of loading."""
    ways = result["ways"]
    body = [
        [row["title"], *(bold(row["cells"][way]["verdict"]) for way in ways)]
        for row in result["rows"]
    ]
    return f"{provenance(result)}\n\n{table(['', *ways.values()], body)}"


def bold(verdict: str) -> str:
    """A cell, with what is silently wrong made to stand out."""
    return f"**{verdict}**" if verdict.startswith("SILENT") else verdict


def frozen_table(result: dict[str, Any]) -> str:
    """What a frozen part costs under DDP."""
    body = [
        [
            row["title"],
            amount(row["frozen_built_bytes"]),
            amount(row["frozen_step_bytes"]),
            bold(row["a_rank_that_differs"]),
        ]
        for row in result["rows"]
        if row["kind"] != "none"
    ]
    head = ["", "sent at construction", "sent per step", "a rank whose part differs"]
    size = f"{result['mib']} MiB of parameters and {result['mib']} MiB of buffers"
    return f"{size}, {result['ranks']} ranks. {provenance(result)}\n\n{table(head, body)}"


def amount(nbytes: int) -> str:
    """Bytes, in MiB when there are many."""
    return f"{nbytes / MIB:.0f} MiB" if nbytes >= MIB else f"{nbytes} B"


# -- integrations ---------------------------------------------------------------------------------


def integrations_table(result: dict[str, Any]) -> str:
    """A training step with an integration, beside the framework alone."""
    kinds = ("wall_fastest_tenth", "cpu_fastest_tenth", "wall_median", "cpu_median")
    body = [
        [row["framework"], row["model"], str(row["steps"])]
        + [
            f"{row[kind]['ratio']:.2f} of {row[kind]['alone_ms']:.0f} ms "
            f"({row[kind]['anyrank_ms'] - row[kind]['alone_ms']:+.1f} ms)"
            for kind in kinds
        ]
        for row in result["rows"]
    ]
    head = ["", "model", "n", *(kind.replace("_", ", ").replace("t, t", "t t") for kind in kinds)]
    return f"{provenance(result)}\n\n{table(head, body)}"


# -- small tensors, checks, a slow link -----------------------------------------------------------


def busy(result: dict[str, Any]) -> str:
    """How many processes wanted a core before and after, which the ratios do not hide."""
    before, after = result["load_average"]
    return f"Load average {before:.1f} before and {after:.1f} after. {provenance(result)}"


def spread(figure: dict[str, float], digits: int = 2) -> str:
    """A median with its range."""
    return "{median:.{d}f} ({least:.{d}f} to {most:.{d}f})".format(**figure, d=digits)


# -- saves and resumes ----------------------------------------------------------------------------


def save_table(result: dict[str, Any]) -> str:
    """Medians of every way, then the ratios with their goals."""
    rows, titles = result["rows"], result["titles"]
    saves = [
        [titles[kind], f"{row['seconds']:.2f}", stall(row), f"{row['beyond_mib']:.0f}"]
        for kind, row in rows.items()
        if "->" not in kind and "seconds" in row
    ]
    moves = list(dict.fromkeys(kind.split()[1] for kind in rows if "->" in kind))
    kinds = list(dict.fromkeys(kind.split()[0] for kind in rows if "->" in kind))
    loads = [
        [titles[f"load {kind}"], *(f"{rows[f'{kind} {move}']['seconds']:.2f}" for move in moves)]
        for kind in kinds
    ]
    ratios = [
        [
            row["what"],
            f"{row['median']:.2f} ({row['least']:.2f} to {row['most']:.2f})",
            f"{row['goal']:g}",
            "yes" if row["median"] <= row["goal"] else "**no**",
        ]
        for row in result["ratios"]
    ]
    head = (
        f"{result['mib']} MiB of fp32 parameters and Adam state, FSDP2 on {result['ranks']} ranks, "
        f"n = {result['n']}. {provenance(result)}"
    )
    return "\n\n".join(
        [
            head,
            table(["save", "durable after s", "stall s", "MiB a rank beyond the share"], saves),
            table(["load", *(f"{move} ranks, s" for move in moves)], loads),
            table(["", "median (range)", "goal", "met"], ratios),
        ]
    )


def stall(row: dict[str, Any]) -> str:
    """How long the training stands still: for all of a save that is not in the background."""
    return f"{row['stall_seconds'] or row['seconds']:.2f}"


def kill_table(result: dict[str, Any]) -> str:
    """The worst outcome of each contender by event, of which there are fewer."""
    rows = result["rows"]
    body = [
        [title, *(bold(row["cells"][way]["verdict"]) for row in rows)]
        for way, title in result["ways"].items()
    ]
    events = [row["title"] + instants(row) for row in rows]
    return f"{provenance(result)}\n\n{table(['', *events], body)}"


def instants(row: dict[str, Any]) -> str:
    """At how many instants an event was tried, where that is more than one."""
    counts = sorted({len(cell["instants"]) for cell in row["cells"].values()})
    if counts == [1]:
        return ""
    return f" ({'-'.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} instants)"
