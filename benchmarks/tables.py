"""Write the tables on the pages from the result files.

python benchmarks/tables.py
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench import HERE, MIB, read

from anyrank.wording import count

ROOT = HERE.parent
DTYPES = {"bf16": "bf16 file into bf16 parameters", "fp32": "bf16 file into fp32 parameters"}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; all columns but the first are aligned right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


Columns = dict[str, Callable[[Any], str]]  # head -> what it says of a row


def table_of(rows: Iterable[Any], columns: Columns) -> str:
    """Return a table with a column for each entry of `columns`."""
    return table([*columns], [[cell(row) for cell in columns.values()] for row in rows])


# The machines of the results, and what they have in common; the page explains the letters.
MACHINES = {"AMD EPYC": "A", "Intel(R) Xeon(R) Processor @ 2.80GHz": "B"}
MACHINE = re.compile(r"2 cores of (.+), 24 GiB memory, huge pages madvise, Linux 6\.18\.44-fc-v\d+")
VERSIONS = {
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "transformers": "5.23.0",
    "accelerate": "1.15.0",
    "safetensors": "0.8.0",
    "anyrank": "0.1.0",
    "torch_checkpointing": "0.1.1",
}


def section(result: dict[str, Any], what: str, *tables: str) -> str:
    """Return what was measured, how and where, above its tables.

    Raises:
        ValueError: the page does not explain the result's machine.
    """
    machine = MACHINE.fullmatch(result["machine"])
    if machine is None or machine[1] not in MACHINES:
        raise ValueError(f"{result['command']}: no letter for the machine {result['machine']}")
    others = [
        f", {name} {version}"
        for name, version in result["versions"].items()
        if VERSIONS.get(name) != version
    ]
    letter = MACHINES[machine[1]]
    where = f"`{result['command']}`, {result['date']}, machine {letter}{''.join(others)}."
    return "\n\n".join([f"{what} {where}".strip(), *tables])


def machines(_: dict[str, Any]) -> str:
    """Return what the letters of the machines stand for, and the versions."""
    letters = "; ".join(f"{letter}: 2 cores of {name}" for name, letter in MACHINES.items())
    kinds = ", ".join(f"{name} {version}" for name, version in VERSIONS.items())
    return (
        f"Machine {letters}. Both have 24 GiB of memory, transparent huge pages set to madvise, "
        f"and Linux 6.18.44. Versions: {kinds}."
    )


def with_range(figure: dict[str, float]) -> str:
    """Return a median with its range."""
    return f"{figure['median']:.2f} ({figure['least']:.2f} to {figure['most']:.2f})"


# -- load -----------------------------------------------------------------------------------------


def load_tables(result: dict[str, Any]) -> str:
    """Return memory and time of every contender, in a table per layout on several rank counts."""
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
        f"{counts(result['rows'], 'usable_sec')}. Memory: the highest value, "
        f"{counts(result['rows'], 'peak_x')}."
    )
    return section(result, what, *parts)


def counts(rows: list[dict[str, Any]], key: str) -> str:
    """Return the number of repetitions, and which contenders have fewer."""
    most: dict[str, int] = {}
    for row in rows:
        if key in row:
            most[row["title"]] = max(most.get(row["title"], 0), row[key]["n"])
    whole = max(most.values())
    fewer: dict[int, list[str]] = {}
    for title, number in most.items():
        if number < whole:
            fewer.setdefault(number, []).append(title)
    few = [f"n = {number} for {'; '.join(titles)}" for number, titles in fewer.items()]
    return f"n = {whole}" + (f" (except {', '.join(few)})" if few else "")


def memory_cell(row: dict[str, Any] | None) -> str:
    """Return the peak of added memory over the target's bytes."""
    if row is None:
        return ""
    if "peak_x" not in row:
        return "too large" if "memory" in row.get("not_run", "") else "not run"
    return f"{row['peak_x']['most']:.3f}" + (" WRONG" if "wrong" in row else "")


def time_cell(row: dict[str, Any] | None) -> str:
    """Return the time over that of the hand-written minimum."""
    if row is None or "usable_sec" not in row:
        return ""
    if row["contender"] == "hand" or "time_x_hand" not in row:
        return f"{row['usable_sec']['median']:.2f} s"
    ratio = row["time_x_hand"]
    return with_range(ratio) if ratio["n"] > 1 else f"{ratio['median']:.2f}"


def memory_row(result: dict[str, Any]) -> str:
    """Return the cells of memory in the table of all ways."""
    rows = {(row["group"], row["contender"]): row for row in result["rows"]}
    cells = [
        " / ".join(f"{rows[f'fsdp {kind} 4', way]['peak_x']['most']:.1f}" for kind in DTYPES)
        for way in ("load_file", "dcp", "transformers", "accelerate", "anyrank")
    ]
    return " | ".join(cells)


# -- traps and frozen parts -----------------------------------------------------------------------


def trap_table(result: dict[str, Any]) -> str:
    """Return the table of traps and ways of loading."""
    ways = result["ways"]
    body = [
        [row["title"], *(bold(row["cells"][way]["verdict"]) for way in ways)]
        for row in result["rows"]
    ]
    return section(result, "", table(["", *ways.values()], body))


def bold(verdict: str) -> str:
    """Return a cell, in bold if the result is silently wrong."""
    return f"**{verdict}**" if verdict.startswith("SILENT") else verdict


def frozen_table(result: dict[str, Any]) -> str:
    """Return the table of a frozen part's cost under DDP."""
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
    """Return bytes, in MiB if there are many."""
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
    """Return the table of a tiled MLP: MiB by number of tiles, calls and time."""
    mib = {(row["way"], row["tiles"]): row["mib"] for row in result["mlp"]}
    times = {row["way"]: row["ratio"]["median"] for row in result["mlp_time"]}
    calls, tiles = result["nested_calls"], (16, 32, 64)
    body = [
        [title, *(str(mib[way, n]) for n in tiles), f"{calls[way]:.1f}", f"{times[way]:.2f}"]
        for way, title in MLPS.items()
    ]
    runs = "runs of the MLP in a recomputed block"
    head = ["", *(f"{n} tiles" for n in tiles), runs, "time"]
    what = "An MLP of 4096 and 14336 in bf16 with 65536 tokens, in MiB beyond output and gradients."
    return section(result, what, table(head, body))


def loss_table(result: dict[str, Any]) -> str:
    """Return the table of a tiled loss: MiB by number of tokens."""
    mib = {(row["way"], row["tokens"]): str(row["mib"]) for row in result["loss"]}
    tokens = (4096, 65536)
    body = [[title, *(mib[way, n] for n in tokens)] for way, title in LOSSES.items()]
    what = "A vocabulary of 128256 with hidden states of 4096 in bf16, in MiB beyond the gradients."
    return section(result, what, table(["", *(f"{n} tokens" for n in tokens)], body))


# -- integrations ---------------------------------------------------------------------------------


def integrations_table(result: dict[str, Any]) -> str:
    """Return the table of a training step with an integration, beside the framework alone."""
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
    """Return the medians of every way, then the ratios with their goals."""
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
        table(["save", "durable after s", "stall s", "MiB per rank beyond its share"], saves),
        table(["load", *(f"{move} ranks, s" for move in moves)], loads),
        table_of(result["ratios"], ratios),
    )


def stall(row: dict[str, Any]) -> str:
    """Return how long the training stops: for a whole save, if it is not in the background."""
    return f"{row['stall_seconds'] or row['seconds']:.2f}"


def kill_table(result: dict[str, Any]) -> str:
    """Return the worst outcome of each contender, with a column for each event."""
    rows = result["rows"]
    body = [
        [title, *(bold(row["cells"][way]["verdict"]) for row in rows)]
        for way, title in result["ways"].items()
    ]
    events = [row["title"] + instants(row) for row in rows]
    return section(result, "", table(["", *events], body))


def instants(row: dict[str, Any]) -> str:
    """Return the number of instants at which an event was tried; nothing for one."""
    counts = sorted({sum(cell["instants"].values()) for cell in row["cells"].values()})
    if counts == [1]:
        return ""
    return f" ({'-'.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} instants)"


CONVERSIONS = {
    "cp": "`cp`",
    "safetensors": "`convert`, safetensors to safetensors",
    "cast to bf16": "the same, cast to bfloat16",
    "run": "`convert`, a run to safetensors",
    "dcp": "`convert`, safetensors to DCP",
    "torch from dcp": "`convert`, DCP to a torch file",
    "dcp_to_torch_save": "torch's `dcp_to_torch_save`",
}


def convert_table(result: dict[str, Any]) -> str:
    """Return the table of conversions: speed beside `cp`, and memory."""
    body = [
        [
            title,
            f"{statistics.median(result['ways'][way]['seconds']):.2f}",
            f"{result['ways'][way]['speed_over_cp']:.2f}",
            f"{result['ways'][way]['anon_mib']:.0f}",
        ]
        for way, title in CONVERSIONS.items()
    ]
    what = f"{result['mib']} MiB, medians of {result['repeats']}."
    head = ["", "seconds", "speed / `cp`", "MiB of memory beyond torch's"]
    return section(result, what, table(head, body))


def percent(share: float, digits: int) -> str:
    """Return a share as percent."""
    return f"{100 * share:.{digits}f} %"


def checked_table(result: dict[str, Any]) -> str:
    """Return the cost of the checks of saves and resumes."""
    figures = result["figures"]
    verified = [
        [f"on {ranks} rank{'s' * (ranks > 1)}{from_disk}"]
        + [
            with_range(figures[f"verified, saved on 2, resumed on {ranks}{from_disk}, {kind}"])
            for kind in ("clock", "cpu")
        ]
        for from_disk in ("", ", from the disk")
        for ranks in (2, 1)
    ]
    beyond = [
        percent(figures[f"bytes beyond, saved on 4, resumed on {ranks}"]["median"], 1)
        for ranks in (1, 2, 3)
    ]
    first = figures["verified, saved on 2, resumed on 2, clock"]
    every, replicas = figures["replicas_every=100"], figures["replicas"]
    head = ["resume of a save of 2 ranks", "time, verify=True / verify=False", "CPU time"]
    return section(
        result,
        f"{result['verified_mib']} MiB, n = {first['n']}, goal {first['goal']:g}.",
        table(head, verified),
        f"- A resume of a save of 4 ranks reads {beyond[0]} more than it needs on 1 rank, "
        f"{beyond[1]} on 2 and {beyond[2]} on 3 (goal 2 %), because it verifies whole blocks of "
        "64 KiB.\n"
        f"- Comparing the replicas takes {percent(replicas['median'], 1)} of the time of ten saves "
        f"({percent(replicas['least'], 1)} to {percent(replicas['most'], 1)}, "
        f"n = {replicas['n']}).\n"
        f"- `replicas_every=100` takes {percent(every['median'], 2)} of the time "
        f"({percent(every['least'], 2)} to {percent(every['most'], 2)}, n = {every['n']}): one "
        f"comparison of {result['replicas_mib']} MiB on each of 2 ranks in a hundred steps.",
    )


# -- live weights, a killed rank, the same bits ---------------------------------------------------


def sync_table(result: dict[str, Any]) -> str:
    """Return the table of syncs between layouts: time, memory and bytes, beside other ways."""
    columns: Columns = {
        "weights, ranks: method": lambda row: f"{row['mib']} MiB, {row['case']}: {row['way']}",
        "seconds": lambda row: f"{row['median_sec']:.2f}",
        "anyrank's time / this one's": lambda row: (
            f"{row['anyrank_of_it']:.2f}" if "anyrank_of_it" in row else ""
        ),
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
    """Return the times from SIGKILL of a rank to the next step, and to the first new one."""
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
        f"{result['every']} steps, n = {len(result['runs']['memory'])}. In parentheses: the "
        "median ratio to torchrun in the same repetition."
    )
    head = ["", "until the next step ends", "until the killed step ends"]
    return section(result, what, table(head, body))


RATIOS = (
    # contender, measured against, at most
    ("ddp exact", "ddp stock", 1.10),
    ("fsdp exact", "fsdp each", 1.00),
    ("fsdp exact", "fsdp stock", 1.05),
)


def exact_table(result: dict[str, Any]) -> str:
    """Return the cost of exact=True, and the runs that had the same bits."""
    times, bits = result["times"], result["bits"]
    goals = {f"{name} / {other}": most for name, other, most in RATIOS}
    body = [
        [f"{row['ranks']} ranks, {count(row['rounds'], 'microbatch', 'microbatches')} each"]
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
    """Return a figure with its goal, and whether the goal is met."""
    verdict = "met" if round(figure, 2) <= round(goal, 2) else "missed"
    return f"{figure:.2f} (goal {goal:.2f}, {verdict})"


# -- the pages ------------------------------------------------------------------------------------


def streams_table(result: dict[str, Any]) -> str:
    """Return the rows that each tool lost or repeated, and an epoch's time beside a DataLoader."""
    columns: Columns = {
        "": lambda row: f"{row['tool']} {row['version']}".strip() + f": {row['title']}",
        "rows lost": lambda row: str(row.get("lost", row.get("not_run"))),
        "rows seen twice": lambda row: str(row.get("twice", "")),
        "steps with different rows": lambda row: str(row.get("other_steps", "")),
        "steps": lambda row: str(row.get("steps", "")),
    }
    times: Columns = {
        "workers": lambda row: str(row["workers"]),
        "rows per microbatch": lambda row: str(row["microbatch"]),
        "DataLoader, us per row": lambda row: f"{row['us_a_row']['DataLoader']:.1f}",
        "anyrank, us per row": lambda row: f"{row['us_a_row']['anyrank']:.1f}",
        "speed of anyrank / DataLoader": lambda row: (
            "{median:.2f} ({least:.2f} to {most:.2f})".format_map(row["speed"])
        ),
    }
    tables = table_of(result["rows"], columns), table_of(result["times"], times)
    return section(result, "", "\n\n".join(tables))


def scale_table(result: dict[str, Any]) -> str:
    """Return the bytes that all ranks send in each phase, and its seconds."""
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
    """Return the README's rows: a load and a save beside DCP's, by number of ranks."""
    rows = {(row["phase"], row["ranks"]): row for row in result["rows"]}
    sizes = sorted({size for _, size in rows})

    def pair(phase: str, size: int) -> str:
        ours, theirs = rows[phase, size], rows[f"dcp.{phase}", size]
        return f"{ours['seconds']:.1f} / {theirs['seconds']:.1f} s"

    head = ["anyrank / DCP", *(f"{size} ranks" for size in sizes)]
    body = [[phase, *(pair(phase, size) for size in sizes)] for phase in ("load", "save")]
    return table(head, body)


def between(section: str) -> str:
    """Return a pattern for the text of a section, between its two marker comments."""
    return (
        rf"(<!-- {section}: made by benchmarks/tables.py -->\n\n).*?(\n\n<!-- end of {section} -->)"
    )


Section = tuple[str, str, Callable[[dict[str, Any]], str]]  # where, from which result, and how
PAGES: dict[str, list[Section]] = {
    "README.md": [
        (r"(\n\n)\| anyrank / DCP \|.*?(\n\n)", "scale", scale_rows),
    ],
    "docs/benchmarks.md": [
        (between("machines"), "load", machines),
        (r"(\n\| memory of 4 ranks[^|]*\| )[^\n]*( \|\n)", "load", memory_row),
        (between("mlp"), "memory", mlp_table),
        (between("loss"), "memory", loss_table),
        (between("convert"), "convert", convert_table),
        (between("checked"), "checked", checked_table),
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
    """Return a page with its tables made again from the results.

    Raises:
        ValueError: the page has no place for a table, or several.
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
