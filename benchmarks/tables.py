"""Write what pages say of the results: tables and a paragraph, from the result files.

python benchmarks/tables.py
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench import HERE, MIB, read

ROOT = HERE.parent
DTYPES = {"bf16": "bf16 file into bf16 parameters", "fp32": "bf16 file into fp32 parameters"}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


Columns = dict[str, Callable[[Any], str]]  # head -> what it says of a row


def table_of(rows: Iterable[Any], columns: Columns) -> str:
    """A table of alike rows."""
    return table([*columns], [[cell(row) for cell in columns.values()] for row in rows])


def section(result: dict[str, Any], what: str, *tables: str) -> str:
    """What was measured, how and where, above its tables."""
    kinds = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    where = f"`{result['command']}`, {result['date']}: {result['machine']}; {kinds}."
    return "\n\n".join([f"{what} {where}".strip(), *tables])


def with_range(figure: dict[str, float]) -> str:
    """A median with its range."""
    return f"{figure['median']:.2f} ({figure['least']:.2f} to {figure['most']:.2f})"


# -- load -----------------------------------------------------------------------------------------


def load_tables(result: dict[str, Any]) -> str:
    """Memory and time of every contender, a table for each layout that ran on several counts."""
    rows = {(row["group"], row["contender"]): row for row in result["rows"]}
    titles = {row["contender"]: row["title"] for row in result["rows"]}
    sizes_of: dict[tuple[str, str], list[str]] = {}
    for group in dict.fromkeys(group for group, _ in rows):
        layout, kind, size = group.split()
        sizes_of.setdefault((layout, kind), []).append(size)
    parts: list[str] = []
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
    what = (
        f"A random Llama of {result['model']['bf16_bytes'] / MIB:.0f} MiB in bf16, in "
        f"{result['model']['shards']} shards. Time: "
        "median and range of the ratio to the hand-written minimum of the same repetition, "
        f"{counts(result['rows'], 'usable_sec')}. Memory: the highest of all repetitions, "
        f"{counts(result['rows'], 'peak_x')}."
    )
    return section(result, what, *parts)


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
    return f"{row['peak_x']['most']:.3f}" + (" WRONG" if "wrong" in row else "")


def time_cell(row: dict[str, Any] | None) -> str:
    """Time over the hand-written minimum's."""
    if row is None or "usable_sec" not in row:
        return ""
    if row["contender"] == "hand" or "time_x_hand" not in row:
        return f"{row['usable_sec']['median']:.2f} s"
    ratio = row["time_x_hand"]
    return with_range(ratio) if ratio["n"] > 1 else f"{ratio['median']:.2f}"


def memory_row(result: dict[str, Any]) -> str:
    """The cells of memory in the table of all ways."""
    rows = {(row["group"], row["contender"]): row for row in result["rows"]}
    cells = [
        " / ".join(f"{rows[f'fsdp {kind} 4', way]['peak_x']['most']:.1f}" for kind in DTYPES)
        for way in ("load_file", "dcp", "transformers", "accelerate", "anyrank")
    ]
    return " | ".join(cells)


# -- traps and frozen parts -----------------------------------------------------------------------


def trap_table(result: dict[str, Any]) -> str:
    """Trap by way of loading."""
    ways = result["ways"]
    body = [
        [row["title"], *(bold(row["cells"][way]["verdict"]) for way in ways)]
        for row in result["rows"]
    ]
    return section(result, "", table(["", *ways.values()], body))


def bold(verdict: str) -> str:
    """A cell, with what is silently wrong made to stand out."""
    return f"**{verdict}**" if verdict.startswith("SILENT") else verdict


def frozen_table(result: dict[str, Any]) -> str:
    """What a frozen part costs under DDP."""
    columns: Columns = {
        "": lambda row: row["title"],
        "sent at construction": lambda row: amount(row["frozen_built_bytes"]),
        "sent per step": lambda row: amount(row["frozen_step_bytes"]),
        "a rank whose part differs": lambda row: bold(row["a_rank_that_differs"]),
    }
    rows = [row for row in result["rows"] if row["kind"] != "none"]
    size = f"{result['mib']} MiB of parameters and {result['mib']} MiB of buffers"
    return section(result, f"{size}, {result['ranks']} ranks.", table_of(rows, columns))


def amount(nbytes: int) -> str:
    """Bytes, in MiB when there are many."""
    return f"{nbytes / MIB:.0f} MiB" if nbytes >= MIB else f"{nbytes} B"


# -- tiles ----------------------------------------------------------------------------------------

MLPS = {
    "plain": "plain",
    "torch checkpoint per tile": "torch's checkpoint of each tile, then `cat`",
    "DeepSpeed TiledMLP": "DeepSpeed's `TiledMLP`",
    "Liger tiled_mlp": "Liger's `tiled_mlp`",
    "anyrank.tile": "`tile`",
    "anyrank.tile, grad_dtype": "`tile` with `grad_dtype=torch.float32`",
}
LOSSES = {
    "all logits": "all logits",
    "torch checkpoint per tile": "torch's checkpoint of each tile",
    "torch linear_cross_entropy": "torch's `linear_cross_entropy`",
    "anyrank.tiled_loss": "`tiled_loss`, fused",
    "anyrank.tiled_loss, recompute": "`tiled_loss` of `nn.Sequential(head)`",
}


def mlp_table(result: dict[str, Any]) -> str:
    """Bytes by number of tiles, calls and time of a tiled MLP."""
    mib = {(row["way"], row["tiles"]): row["mib"] for row in result["mlp"]}
    times = {row["way"]: row["ratio"]["median"] for row in result["mlp_time"]}
    calls, tiles = result["nested_calls"], (16, 32, 64)
    body = [
        [title, *(str(mib[way, n]) for n in tiles), f"{calls[way]:.1f}", f"{times[way]:.2f}"]
        for way, title in MLPS.items()
    ]
    runs = "runs of the MLP in a recomputed block"
    return table(["", *(f"{n} tiles" for n in tiles), runs, "time"], body)


def loss_table(result: dict[str, Any]) -> str:
    """Bytes of a tiled loss by number of tokens."""
    mib = {(row["way"], row["tokens"]): str(row["mib"]) for row in result["loss"]}
    tokens = (4096, 65536)
    body = [[title, *(mib[way, n] for n in tokens)] for way, title in LOSSES.items()]
    return table(["", *(f"{n} tokens" for n in tokens)], body)


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
    return section(result, "", table(head, body))


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
    ratios: Columns = {
        "": lambda row: row["what"],
        "median (range)": with_range,
        "goal": lambda row: f"{row['goal']:g}",
        "met": lambda row: "yes" if row["median"] <= row["goal"] else "**no**",
    }
    return section(
        result,
        f"{result['mib']} MiB of fp32 parameters and Adam state, FSDP2 on {result['ranks']} ranks, "
        f"n = {result['n']}.",
        table(["save", "durable after s", "stall s", "MiB a rank beyond the share"], saves),
        table(["load", *(f"{move} ranks, s" for move in moves)], loads),
        table_of(result["ratios"], ratios),
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
    return section(result, "", table(["", *events], body))


def instants(row: dict[str, Any]) -> str:
    """At how many instants an event was tried, where that is more than one."""
    counts = sorted({sum(cell["instants"].values()) for cell in row["cells"].values()})
    if counts == [1]:
        return ""
    return f" ({'-'.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} instants)"


# -- live weights, a killed rank, the same bits ---------------------------------------------------


def sync_table(result: dict[str, Any]) -> str:
    """Weights from one layout into another: time, memory and bytes, beside the other ways."""
    columns: Columns = {
        "weights, ranks: way": lambda row: f"{row['mib']} MiB, {row['case']}: {row['way']}",
        "seconds": lambda row: f"{row['median_sec']:.2f}",
        "anyrank / it": lambda row: f"{row['anyrank_of_it']:.2f}" if "anyrank_of_it" in row else "",
        "most MiB beside the shares": lambda row: f"{max(row['memory_mib']):.0f}",
        "MiB sent": lambda row: f"{sum(row['sent_mib']):.0f}",
    }
    what = f"4 ranks, medians of {result['repeats']}."
    return section(result, what, table_of(result["rows"], columns))


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
    return section(result, what, table(head, body))


RATIOS = (
    # contender, measured against, at most
    ("ddp exact", "ddp stock", 1.10),
    ("fsdp exact", "fsdp each", 1.00),
    ("fsdp exact", "fsdp stock", 1.05),
)


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
    what = f"SHA-256 of weights and Adam state after {bits['steps']} steps."
    return "\n\n".join(
        [
            section(times, f"Medians of {times['rows'][0]['n']}.", table(["", *goals], body)),
            section(bits, what, table(["SHA-256", "wrapper and number of ranks"], same)),
        ]
    )


def beside_goal(figure: float, goal: float) -> str:
    """A figure, the most that it was to be, and whether it is."""
    verdict = "met" if round(figure, 2) <= round(goal, 2) else "missed"
    return f"{figure:.2f} (goal {goal:.2f}, {verdict})"


# -- the pages ------------------------------------------------------------------------------------


def streams_table(result: dict[str, Any]) -> str:
    """What each tool has lost or read twice, and the time of an epoch beside a DataLoader."""
    columns: Columns = {
        "": lambda row: f"{row['tool']} {row['version']}".strip() + f": {row['title']}",
        "rows lost": lambda row: str(row.get("lost", row.get("not_run"))),
        "rows seen twice": lambda row: str(row.get("twice", "")),
        "steps with other rows": lambda row: str(row.get("other_steps", "")),
        "steps": lambda row: str(row.get("steps", "")),
    }
    times: Columns = {
        "workers of an epoch": lambda row: str(row["workers"]),
        "rows of a microbatch": lambda row: str(row["microbatch"]),
        "DataLoader, us a row": lambda row: f"{row['us_a_row']['DataLoader']:.1f}",
        "anyrank": lambda row: f"{row['us_a_row']['anyrank']:.1f}",
        "of its speed": lambda row: "{median:.2f} ({least:.2f} to {most:.2f})".format_map(
            row["speed"]
        ),
    }
    tables = table_of(result["rows"], columns), table_of(result["times"], times)
    return section(result, "", "\n\n".join(tables))


def scale_table(result: dict[str, Any]) -> str:
    """Bytes of all ranks in each phase, and its seconds."""
    rows = {(row["phase"], row["ranks"]): row for row in result["rows"]}
    sizes = sorted({size for _, size in rows})
    phases = dict.fromkeys(phase for phase, _ in rows)

    def cell(phase: str, size: int) -> str:
        row = rows.get((phase, size))
        return "" if row is None else f"{row['bytes'] / 1e6:,.2f} MB, {row['seconds']:.2f} s"

    body = [[phase, *(cell(phase, size) for size in sizes)] for phase in phases]
    head = ["", *(f"{size} ranks" for size in sizes)]
    return section(result, "", table(head, body))


def scale_rows(result: dict[str, Any]) -> str:
    """The README's rows: a load and a save beside DCP's, by the number of ranks."""
    rows = {(row["phase"], row["ranks"]): row for row in result["rows"]}
    sizes = sorted({size for _, size in rows})

    def pair(phase: str, size: int) -> str:
        ours, theirs = rows[phase, size], rows[f"dcp.{phase}", size]
        return f"{ours['seconds']:.1f} / {theirs['seconds']:.1f} s"

    head = ["anyrank / DCP", *(f"{size} ranks" for size in sizes)]
    body = [[phase, *(pair(phase, size) for size in sizes)] for phase in ("load", "save")]
    return table(head, body)


def between(section: str) -> str:
    """Where the text of a section stands: between its two marker comments."""
    return (
        rf"(<!-- {section}: made by benchmarks/tables.py -->\n\n).*?(\n\n<!-- end of {section} -->)"
    )


MEMORY_ROW = (r"(\n\| memory of 4 ranks[^|]*\| )[^\n]*( \|\n)", "load", memory_row)
Section = tuple[str, str, Callable[[dict[str, Any]], str]]  # where, from which result, and how
PAGES: dict[str, list[Section]] = {
    "README.md": [
        (r"(\n\n)\| anyrank / DCP \|.*?(\n\n)", "scale", scale_rows),
        MEMORY_ROW,
    ],
    "docs/memory.md": [
        (between("mlp"), "memory", mlp_table),
        (between("loss"), "memory", loss_table),
    ],
    "docs/benchmarks.md": [
        MEMORY_ROW,
        (between("load"), "load", load_tables),
        (between("traps"), "traps", trap_table),
        (between("frozen"), "frozen", frozen_table),
        (between("integrations"), "integrations", integrations_table),
        (between("save"), "save", save_table),
        (between("kills"), "kills", kill_table),
        (between("streams"), "streams", streams_table),
        (between("scale"), "scale", scale_table),
        (between("sync"), "sync", sync_table),
        (between("peers"), "peers", peers_table),
        (between("exact"), "exact", exact_table),
    ],
}


def filled(name: str) -> str:
    """A page with what is made from results written anew.

    Raises:
        ValueError: the page has no place for it, or several.
    """
    page = (ROOT / name).read_text(encoding="utf-8")
    for place, result, make in PAGES[name]:
        before, *rest = re.split(place, page, flags=re.DOTALL)
        if len(rest) != 3:
            raise ValueError(f"{name}: needs one place that matches {place}")
        page = "".join((before, rest[0], make(read(result)), rest[1], rest[2]))
    return page


if __name__ == "__main__":
    for page in PAGES:
        (ROOT / page).write_text(filled(page), encoding="utf-8")
    print(f"written to {', '.join(PAGES)}")
