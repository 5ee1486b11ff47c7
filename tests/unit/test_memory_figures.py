"""The figures of docs/memory.md are those of benchmarks/results/memory.json, and goals stay met."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULT: dict[str, Any] = json.loads((ROOT / "benchmarks/results/memory.json").read_text("utf-8"))
# Row of the page -> way of the benchmark.
MLP = {
    "plain": "plain",
    "torch's checkpoint of each tile, then `cat`": "torch checkpoint per tile",
    "DeepSpeed's `TiledMLP`": "DeepSpeed TiledMLP",
    "Liger's `tiled_mlp`": "Liger tiled_mlp",
    "`tile`": "anyrank.tile",
    "`tile` with `grad_dtype=torch.float32`": "anyrank.tile, grad_dtype",
}
LOSS = {
    "all logits": "all logits",
    "torch's checkpoint of each tile": "torch checkpoint per tile",
    "torch's `linear_cross_entropy`": "torch linear_cross_entropy",
    "`tiled_loss`, fused": "anyrank.tiled_loss",
    '`tiled_loss`, `impl="recompute"`': "anyrank.tiled_loss, recompute",
}
# What a function that is run as a whole cannot do with so few tiles.
NOT_REACHED = {"tiled MLP, 16 tiles, MiB"}


def rows_of_page() -> dict[str, list[str]]:
    lines = (ROOT / "docs/memory.md").read_text("utf-8").splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    return {row[0]: row[1:] for row in cells}


def test_the_page_holds_the_figures_of_the_mlp() -> None:
    bytes_of = {
        (row["way"], row["tiles"]): row.get("allocated_mib", row["live_mib"])
        for row in RESULT["mlp"]
    }
    times = {row["way"]: row["ratio"]["median"] for row in RESULT["mlp_time"]}
    page = rows_of_page()
    for title, way in MLP.items():
        calls = RESULT["nested_calls"][way]
        expected = [*(bytes_of[way, n] for n in (16, 32, 64)), round(calls, 1)]
        assert [float(cell) for cell in page[title]] == [*expected, round(times[way], 2)], title


def test_the_page_holds_the_figures_of_the_loss() -> None:
    bytes_of = {(row["way"], row["tokens"]): row["live_mib"] for row in RESULT["loss"]}
    page = rows_of_page()
    for title, way in LOSS.items():
        expected = [bytes_of[way, 4096], bytes_of[way, 65536]]
        assert [float(cell) for cell in page[title]] == expected, title


def test_goals_that_were_met_stay_met() -> None:
    missed = {goal["what"] for goal in RESULT["goals"] if not goal["met"]}
    assert missed <= NOT_REACHED
    assert len(RESULT["goals"]) >= 9
