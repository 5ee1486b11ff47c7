"""Numbers, sizes and lists of names in the form that reports and errors use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

NAMES = 10  # at most that many are listed below a title

# The names users write for dtypes -> torch's names, for the dtypes that weights are cast to.
FLOATS = {name: name for name in ("float64", "float32", "float16", "bfloat16")} | {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
}


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number and its noun: "1 tensor", "1,024 tensors"."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def alternatives(values: Sequence[object]) -> str:
    """Return the values that a caller may choose from: "'error', 'init' or 'keep'"."""
    *others, last = map(repr, values)
    return f"{', '.join(others)} or {last}" if others else last


def in_units(nbytes: int) -> str:
    """Return a size in units for a reader: "512 B", "86.7 MiB", "1.4 TiB"."""
    if nbytes < 1024:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:,.1f} TiB"


def short_dtype(dtype: str) -> str:
    """Return the short name of a dtype: "bf16", "fp32", "fp8_e4m3fn"; keep other names."""
    return dtype.replace("bfloat", "bf").replace("float", "fp")


def printable(text: str) -> str:
    """Return text from a file with line breaks and terminal codes escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def first_few(items: Sequence[object], limit: int) -> list[str]:
    """Return the first items and the number of the rest: ["a", "b", "and 7 more"]."""
    texts = [str(item) for item in items[:limit]]
    return texts if len(items) <= limit else [*texts, f"and {len(items) - limit} more"]


def join_first(items: Sequence[object], limit: int, between: str = ", ") -> str:
    """Return the first items on one line: "a, b and 7 more"."""
    texts = first_few(items, limit)
    if len(items) <= limit:
        return between.join(texts)
    return f"{between.join(texts[:-1])} {texts[-1]}"


def listed(title: str, names: Sequence[str], hint: Callable[[str], str] = lambda name: "") -> str:
    """Return a title and the first names below it, each with a hint such as a similar name."""
    lines = [f"{name}{hint(name)}" for name in names[:NAMES]]
    lines += first_few(names, NAMES)[NAMES:]
    return f"{title} ({len(names)}):\n  " + "\n  ".join(lines)


def rows(groups: Iterable[tuple[str, Sequence[object]]], width: int, limit: int) -> Iterator[str]:
    """Yield the lines of a report: a group's title, padded to `width`, and one of its items."""
    for title, items in groups:
        for text in first_few(items, limit):
            yield f"  {title:<{width}}{printable(text)}"


def group_by_part(reason_lines: Iterable[str]) -> list[str]:
    """Join lines "name: reason" that share part and reason: "optimizer.* (9): not weights".

    The part is the name up to its first dot.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for line in reason_lines:
        name, _, reason = line.partition(": ")
        groups.setdefault((name.partition(".")[0], reason), []).append(line)
    return [
        lines[0] if len(lines) == 1 else f"{part}.* ({len(lines):,}): {reason}"
        for (part, reason), lines in groups.items()
    ]
