"""Groups of tensors as a tree of their names, with shape, dtype, count and bytes in columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.text import Text
from rich.tree import Tree

from anyrank.inspection.groups import TensorGroup
from anyrank.wording import in_units, short_dtype

GUIDE_COLUMNS = 4  # rich indents each level by this
MAX_LEVELS = 16  # the remaining parts of longer names stay together

Cells = tuple[str, str, str, str]


class _Branch:
    """One part of names: the parts below, and the groups whose names end here."""

    def __init__(self) -> None:
        self.below: dict[str, _Branch] = {}
        self.here: list[TensorGroup] = []

    def add(self, group: TensorGroup) -> None:
        """File a group under its parts."""
        branch, split = self, MAX_LEVELS - 1
        parts = group.parts
        for part in (*parts[:split], *([".".join(parts[split:])] if parts[split:] else [])):
            branch = branch.below.setdefault(part, _Branch())
        branch.here.append(group)

    def entries(self) -> Iterator[tuple[str, _Branch]]:
        """Names and branches below; single parts are joined with the next: model.layers."""
        for name, branch in self.below.items():
            while len(branch.below) == 1 and not branch.here:
                ((part, branch),) = branch.below.items()
                name = f"{name}.{part}"
            yield name, branch

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors at and below this branch."""
        below = sum(branch.nbytes for branch in self.below.values())
        return below + sum(group.nbytes for group in self.here)


def tree(groups: Iterable[TensorGroup]) -> Tree:
    """The groups as a tree that rich prints."""
    root = _Branch()
    for group in groups:
        root.add(group)
    rows = list(_rows(root, 0))
    name_columns = max((GUIDE_COLUMNS * level + len(name) for level, name, _ in rows), default=0)
    widths = [max((len(cells[i]) for _, _, cells in rows), default=0) for i in range(4)]
    made = Tree("", hide_root=True, guide_style="dim")
    parents = [made]
    for level, name, (shape, dtype, times, size) in rows:
        label = Text(
            name.ljust(name_columns - GUIDE_COLUMNS * level), no_wrap=True, overflow="ellipsis"
        )
        label.append(f"  {shape:<{widths[0]}}", "cyan")
        label.append(f"  {dtype:<{widths[1]}}", "green")
        label.append(f"  {times:>{widths[2]}}")
        label.append(f"  {size:>{widths[3]}}", "" if shape else "dim")
        parents[level + 1 :] = [parents[level].add(label)]
    return made


def _rows(branch: _Branch, level: int) -> Iterator[tuple[int, str, Cells]]:
    """Level, name and cells of each line, top to bottom."""
    for name, below in branch.entries():
        for group in below.here:
            times = f"x{group.count}" if group.count > 1 else ""
            size = in_units(group.nbytes)
            yield level, name, (str(list(group.shape)), short_dtype(group.dtype), times, size)
        if below.below:
            if not below.here:
                yield level, name, ("", "", "", in_units(below.nbytes))
            yield from _rows(below, level + 1)
