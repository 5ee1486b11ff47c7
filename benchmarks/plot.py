"""Write what pages say of the results, and the plot docs/load-memory.svg.

python benchmarks/plot.py
"""

from __future__ import annotations

from typing import Any

from bench import read
from tables import DTYPES, PAGES, ROOT, filled

PLOT = ROOT / "docs/load-memory.svg"
COLOURS = {"2": "#a6c8e0", "4": "#4a90c2", "8": "#1b4f72"}
OURS = {"2": "#f5c08a", "4": "#e8862e", "8": "#a85310"}


def draw(result: dict[str, Any]) -> None:
    """Bars of peak memory over the model's bytes, by contender and rank count, FSDP2."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "anyrank", "svg.fonttype": "none", "font.size": 8}
    import matplotlib.pyplot as plt

    rows = {(row["group"], row["contender"]): row for row in result["rows"]}
    kinds = [k for k in DTYPES if any(group.startswith(f"fsdp {k}") for group, _ in rows)]
    figure, axes = plt.subplots(
        1, len(kinds), figsize=(9, 4), sharey=True, layout="constrained", squeeze=False
    )
    for axis, kind in zip(axes[0], kinds, strict=True):
        panel(axis, rows, kind)
    axes[0][0].invert_yaxis()  # shared by all
    handles = [mpl.patches.Patch(color=COLOURS[size], label=f"{size} ranks") for size in COLOURS]
    axes[0][-1].legend(handles=handles, loc="lower right", frameon=False)
    figure.suptitle(
        "Peak of added host memory / model bytes (time / hand-written minimum's), FSDP2"
    )
    figure.savefig(PLOT, metadata={"Date": None})


def panel(axis: Any, rows: dict[tuple[str, str], dict[str, Any]], kind: str) -> None:
    """One dtype."""
    groups = [group for group, _ in rows if group.startswith(f"fsdp {kind} ")]
    sizes = sorted({group.split()[2] for group in groups}, key=int)
    names = list(dict.fromkeys(name for group, name in rows if group in groups))
    for place, name in enumerate(names):
        colours = OURS if name == "anyrank" else COLOURS
        for number, size in enumerate(sizes):
            row = rows.get((f"fsdp {kind} {size}", name), {})
            height = place + 0.26 * (number - (len(sizes) - 1) / 2)
            if "peak_x" not in row:
                axis.text(
                    0.05,
                    height,
                    f"{size}: {row.get('not_run', 'not run')}",
                    va="center",
                    fontsize=6,
                )
                continue
            value = row["peak_x"]["most"]
            axis.barh(height, value, 0.24, color=colours.get(size, "#888888"))
            text = f" {value:.2f}" + time_of(row)
            axis.text(value, height, text, va="center", fontsize=6)
    titles = {name: row["title"] for (_, name), row in rows.items()}
    axis.set_yticks(range(len(names)), [titles[name] for name in names])
    axis.axvline(1, color="black", linewidth=0.6, linestyle=":")
    axis.set_title(DTYPES[kind], fontsize=8)
    peaks = [row["peak_x"]["most"] for row in rows.values() if "peak_x" in row]
    axis.set_xlim(0, 1.35 * max([2.0, *peaks]))
    axis.spines[["top", "right"]].set_visible(False)


def time_of(row: dict[str, Any]) -> str:
    """The time beside a bar."""
    if "time_x_hand" not in row:
        return ""
    return f"  ({row['time_x_hand']['median']:.1f} x time)"


def main() -> None:
    """Write all of them."""
    draw(read("load"))
    for page in PAGES:
        (ROOT / page).write_text(filled(page), encoding="utf-8")
    print(f"written to {PLOT}, {', '.join(PAGES)}")


if __name__ == "__main__":
    main()
