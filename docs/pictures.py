"""Draw the pictures of the documentation, each once for light and once for dark pages.

python docs/pictures.py

The rows in `share` are those that the planner computes: who holds what on 4 ranks and on 3, and
which bytes move. The streets name the stations that data passes, and the folder that does the work.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import torch

from anyrank.tensors.box import Box, row_major
from anyrank.tensors.layout import Layout, Piece, Placement, local_pieces
from anyrank.tensors.reads import Read, plan_reads
from anyrank.tensors.spec import Chunk, StoredTensor

FOLDER = Path(__file__).parent / "pictures"
FONT = "ui-sans-serif, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
SHAPE, DTYPE = (1536, 4096), torch.bfloat16
SAVED_ON, RESUMED_ON = 4, 3


@dataclass(frozen=True)
class Theme:
    """Colors of one kind of page, and one color for each rank that resumes."""

    name: str
    text: str
    muted: str
    line: str
    box: str
    ranks: tuple[str, ...]


THEMES = (
    Theme("light", "#1f2328", "#57606a", "#8c959f", "#eef1f4", ("#2f6fb3", "#b85c00", "#1f7a4d")),
    Theme("dark", "#e6edf3", "#a5afba", "#6e7681", "#21262d", ("#6cb0f5", "#f0a04b", "#56c98d")),
)


# -- drawing --------------------------------------------------------------------------------------


def text(x: float, y: float, words: str, fill: str, **style: str | float) -> str:
    """One line of words; style: size, anchor, weight, family."""
    size, anchor = style.get("size", 14), style.get("anchor", "start")
    weight, family = style.get("weight", "normal"), style.get("family", FONT)
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{fill}" font-family="{family}" font-size="{size}" '
        f'font-weight="{weight}" text-anchor="{anchor}">{escape(words)}</text>'
    )


def rect(x: float, y: float, width: float, height: float, fill: str, line: str) -> str:
    """A box with round corners."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
        f'fill="{fill}" stroke="{line}"/>'
    )


def picture(width: int, height: int, title: str, parts: list[str]) -> str:
    """The file."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">'
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>", ""])


# -- a share that moves from 4 ranks to 3 ---------------------------------------------------------


def shares(ranks: int) -> list[tuple[Piece, ...]]:
    """What each rank holds of the tensor under FSDP2: rows, cut along the first dim."""
    layout = Layout((ranks,), (Placement("shard", 0),))
    return [local_pieces(SHAPE, layout, (rank,)) for rank in range(ranks)]


def saved() -> StoredTensor:
    """The tensor as the ranks that saved it left it: one chunk in each rank's file."""
    chunks = [
        Chunk(piece.box, rank, 0, row_major(piece.box.sizes))
        for rank, pieces in enumerate(shares(SAVED_ON))
        for piece in pieces
    ]
    return StoredTensor("layers.0.weight", SHAPE, DTYPE, tuple(chunks))


def reads() -> list[list[Read]]:
    """The reads of each rank that resumes."""
    return [plan_reads(saved(), pieces) for pieces in shares(RESUMED_ON)]


def rows_of(box: Box) -> tuple[int, int]:
    """First row, and the row after the last."""
    return box.offsets[0], box.offsets[0] + box.sizes[0]


def share(theme: Theme) -> str:
    """Rows of one tensor: the files of 4 ranks on the left, 3 ranks on the right."""
    top, scale, left, right, width = 66.0, 0.2, 16.0, 400.0, 144.0

    def place(row: int, ranks: int, rank: int) -> float:
        gap = 54.0 / (ranks - 1)  # both columns end at the same height
        return top + row * scale + rank * gap

    title = f"{saved().name} {list(SHAPE)}, saved on {SAVED_ON} ranks, resumed on {RESUMED_ON}"
    parts = [
        text(left, 22, title, theme.text, size=15, weight="bold"),
        text(left, 50, f"files of {SAVED_ON} ranks", theme.muted),
        text(right, 50, f"memory of {RESUMED_ON} ranks", theme.muted),
    ]
    for rank, wanted in enumerate(reads()):
        color = theme.ranks[rank]
        for read in wanted:
            first, end = rows_of(read.box)
            writer = read.chunk.file
            a, b = place(first, SAVED_ON, writer), place(end, SAVED_ON, writer)
            c, d = place(first, RESUMED_ON, rank), place(end, RESUMED_ON, rank)
            x, y, middle = left + width, right, (left + width + right) / 2
            parts.append(
                f'<path d="M{x:g} {a:g}C{middle:g} {a:g} {middle:g} {c:g} {y:g} {c:g}'
                f'L{y:g} {d:g}C{middle:g} {d:g} {middle:g} {b:g} {x:g} {b:g}Z" '
                f'fill="{color}" fill-opacity="0.35"/>'
            )
            label = f"{end - first} rows, {read.nbytes / 2**20:g} MiB"
            height = (a + b + c + d) / 4 + 5
            parts.append(text(middle, height, label, theme.text, size=13, anchor="middle"))
    for rank, pieces in enumerate(shares(SAVED_ON)):
        first, end = rows_of(pieces[0].box)
        y = place(first, SAVED_ON, rank)
        parts.append(rect(left, y, width, (end - first) * scale, theme.box, theme.line))
        parts.append(text(left + 10, y + 22, f"__{rank}_0.distcp", theme.text, family=MONO))
        parts.append(text(left + 10, y + 42, f"rows {first} to {end - 1}", theme.muted, size=13))
    for rank, pieces in enumerate(shares(RESUMED_ON)):
        first, end = rows_of(pieces[0].box)
        y = place(first, RESUMED_ON, rank)
        parts.append(rect(right, y, width, (end - first) * scale, theme.box, theme.ranks[rank]))
        parts.append(text(right + 10, y + 22, f"rank {rank}", theme.text, weight="bold"))
        parts.append(text(right + 10, y + 42, f"rows {first} to {end - 1}", theme.muted, size=13))
    return picture(560, 446, title, parts)


# -- the streets ----------------------------------------------------------------------------------

LOAD = (
    ("headers", "one rank reads names, shapes, dtypes and offsets", "files"),
    ("specs", "each rank lists its own tensors as boxes of the global ones", "tensors"),
    ("plan", "boxes wanted x boxes stored: every problem with names and shapes", "tensors"),
    ("agree", "all ranks compare, and raise the same error or go on", "world"),
    ("spans", "reads at offsets, joined where they are near, in file order", "files"),
    ("boxes", "straight into the tensor, or cast through a bounded buffer", "files"),
    ("report", "what was read, cast, tied, initialized; equal on all ranks", "loading"),
)
SAVE = (
    ("layouts", "each rank says which boxes it holds of each tensor", "runs/state"),
    ("plan", "every byte has one writer; replicas share the work evenly", "tensors"),
    ("agree", "all ranks compare; nothing is written if one cannot go on", "world"),
    ("spans", "each rank writes one file, with checksums, and syncs it", "files"),
    ("manifest", "the first rank writes sizes, checksums and all that is no tensor", "files"),
    ("commit", "one rename: from here on the checkpoint exists", "runs/saving"),
    ("retention", "older steps beyond keep= are removed", "runs/saving"),
)
RESUME = (
    ("choose", "the newest whole step; damaged ones are renamed and reported", "runs/resume"),
    ("manifest", "parts, layouts and checksums, as they were saved", "files"),
    ("plan", "saved boxes x this run's boxes; every difference at once", "tensors"),
    ("agree", "all ranks compare; the state is untouched if one cannot go on", "world"),
    ("spans", "each rank reads its share, wherever it was written", "files"),
    ("boxes", "into fresh memory, put in place when every rank has all", "runs/resume"),
    ("random", "streams last: exact, or derived for another rank count", "training/random_state"),
    ("report", "per part: exact, resharded, derived, skipped or fresh", "runs/resume"),
)
STREETS = {"load": LOAD, "save": SAVE, "resume": RESUME}


def street(name: str, theme: Theme) -> str:
    """Stations from top to bottom: what happens there, and in which folder of src/anyrank."""
    stations = STREETS[name]
    step, top, x = 46, 30, 28
    end = top + step * (len(stations) - 1)
    parts = [
        f'<line x1="{x}" y1="{top}" x2="{x}" y2="{end}" stroke="{theme.line}" stroke-width="3"/>'
    ]
    for number, (station, what, folder) in enumerate(stations):
        y = top + number * step
        parts += [
            f'<circle cx="{x}" cy="{y}" r="8" fill="{theme.box}" stroke="{theme.ranks[0]}" '
            'stroke-width="3"/>',
            text(x + 24, y - 1, station, theme.text, size=15, weight="bold"),
            text(x + 24, y + 17, what, theme.muted, size=13.5),
            text(548, y - 1, f"{folder}/", theme.muted, size=13, anchor="end", family=MONO),
        ]
    words = " -> ".join(station for station, _, _ in stations)
    return picture(560, end + 34, f"{name}: {words}", parts)


def drawn() -> dict[str, str]:
    """Name of each file -> its text."""
    files: dict[str, str] = {}
    for theme in THEMES:
        files[f"share-{theme.name}.svg"] = share(theme)
        for name in STREETS:
            files[f"{name}-{theme.name}.svg"] = street(name, theme)
    return files


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    for name, content in drawn().items():
        (FOLDER / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
