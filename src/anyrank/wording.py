"""Numbers, sizes and lists of names, as reports and errors show them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

NAMES = 10  # listed below a title

# Users' names for dtypes -> torch's names, for the dtypes to which weights are cast.
FLOATS = {name: name for name in ("float64", "float32", "float16", "bfloat16")} | {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
}


def count(number: int, noun: str, plural: str | None = None) -> str:
    """A number and its noun: "1 tensor", "1,024 tensors"."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def in_units(nbytes: int) -> str:
    """Bytes as a person reads them: "512 B", "86.7 MiB", "1.4 TiB"."""
    if nbytes < 1024:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:,.1f} TiB"


def short_dtype(dtype: str) -> str:
    """A dtype's short name: "bf16", "fp32", "fp8_e4m3fn"; other names do not change."""
    return dtype.replace("bfloat", "bf").replace("float", "fp")


def printable(text: str) -> str:
    """Text from a file, its line breaks and terminal codes escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def first_few(items: Sequence[object], limit: int) -> list[str]:
    """The first items, and how many more there are: ["a", "b", "and 7 more"]."""
    texts = [str(item) for item in items[:limit]]
    return texts if len(items) <= limit else [*texts, f"and {len(items) - limit} more"]


def join_first(items: Sequence[object], limit: int, between: str = ", ") -> str:
    """The first items in a line: "a, b and 7 more"."""
    texts = first_few(items, limit)
    if len(items) <= limit:
        return between.join(texts)
    return f"{between.join(texts[:-1])} {texts[-1]}"


def listed(title: str, names: Sequence[str], hint: Callable[[str], str] = lambda name: "") -> str:
    """The first of many names below a title, with hints at the names they may stand for."""
    lines = [f"{name}{hint(name)}" for name in names[:NAMES]]
    lines += first_few(names, NAMES)[NAMES:]
    return f"{title} ({len(names)}):\n  " + "\n  ".join(lines)


def rows(groups: Iterable[tuple[str, Sequence[object]]], width: int, limit: int) -> Iterator[str]:
    """Lines of a report: each has a group's title, padded to `width`, and one of its items."""
    for title, items in groups:
        for text in first_few(items, limit):
            yield f"  {title:<{width}}{printable(text)}"


def group_by_part(reason_lines: Iterable[str]) -> list[str]:
    """Lines "name: reason", joined by reason and part: "optimizer.* (9): not weights".

    A part is a name up to its first dot.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for line in reason_lines:
        name, _, reason = line.partition(": ")
        groups.setdefault((name.partition(".")[0], reason), []).append(line)
    return [
        lines[0] if len(lines) == 1 else f"{part}.* ({len(lines):,}): {reason}"
        for (part, reason), lines in groups.items()
    ]
