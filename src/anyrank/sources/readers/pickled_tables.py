"""The tables in a file of `torch.save`: the weights, and everything else."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from anyrank.errors import LoadError, UnsafeFile
from anyrank.files.listing import EXTRA_STATE
from anyrank.sources.part_names import NESTED, is_other_part
from anyrank.sources.readers.memory import extra_of
from anyrank.sources.readers.pickles import (
    SAVE_STATE,
    Bytesless,
    DTensorRef,
    Inert,
    Record,
    TensorRef,
)
from anyrank.wording import first_few

NOT_WEIGHTS = "not among the weights"
MAX_DEPTH, MAX_TABLES = 64, 10_000_000  # nested dicts and lists, each counted at every place


@dataclass(frozen=True)
class FoundTable:
    """The weights in a checkpoint.

    Attributes:
        table: key -> tensor, or a table of tensors.
        others: everything else, with the reason why it is not among the weights.
        name: name of the table; "" if it is the checkpoint itself.
        tables: names of tables that may hold weights, and of tables in them, with dots.
    """

    table: dict[Any, Any]
    others: list[str]
    name: str = ""
    tables: frozenset[str] = frozenset()


def find_table(tree: Any, path: str) -> FoundTable:
    """Find the table of weights in a checkpoint, and everything else that it holds.

    It is the tree itself if that holds tensors, else its first entry named in NESTED. If both do,
    it is the one with more tensors: a generator's state may lie alongside the weights. Tables of
    other names are left to the caller.

    Raises:
        LoadError: there is no table at all.
        UnsafeFile: its values hold one another without end.
    """
    if isinstance(tree, TensorRef):
        return FoundTable({"": tree}, [])
    if isinstance(tree, dict | list | tuple):
        _check_nesting(tree, path)
    if isinstance(tree, list | tuple):
        tree = _numbered(tree)
    if not isinstance(tree, dict):
        raise LoadError(f"{path}: holds {_what_is(tree)}")
    entries = cast("dict[Any, Any]", tree)
    direct = {key: value for key, value in entries.items() if isinstance(value, TensorRef)}
    _check_whole(entries, path)
    tables = _tables_of(entries)
    for name in NESTED:
        inner = entries.get(name)
        if isinstance(inner, dict):
            _check_whole(cast("dict[Any, Any]", inner), path)
        table = cast("dict[Any, Any]", inner) if isinstance(inner, dict) else {}
        unread = unread_of(table)
        if (refs := refs_of(table)) and len(refs) + len(unread) > len(direct):
            others = {key: value for key, value in entries.items() if key != name}
            notes = [_why_not(*entry, chosen=name) for entry in others.items()]
            notes += [f"{key}: {what}" for key, what in unread.items()]
            return FoundTable(table, notes, name, _prefixes(tables))
    if direct:
        known = {*direct, *extras_of(entries)}
        notes = [_why_not(k, v) for k, v in entries.items() if k not in known]
        return FoundTable(entries, notes, tables=_prefixes(tables))
    tables = tables or _tables_of(_numbered(entries))
    if tables:
        others = [_why_not(k, v) for k, v in entries.items() if k not in tables]
        return FoundTable({**tables}, others, tables=_prefixes(tables))
    for key, what in unread_of(entries).items():
        raise LoadError(f"{path}: no dense tensors; {key}: is {what}")
    if arrays := _arrays_in(entries):
        raise LoadError(
            f"{path}: holds arrays of NumPy ({', '.join(first_few(arrays, 3))}) and no tensors: "
            "save a dict of torch.from_numpy(...)"
        )
    objects = [key for key, value in entries.items() if isinstance(value, Inert)]
    if objects:
        key = objects[0]
        raise LoadError(
            f"{path}: no dict of weights; {key} is a {type(entries[key]).__name__}: "
            f"{SAVE_STATE.format(f'[{key!r}]')}"
        )
    keys = ", ".join(str(key) for key in list(entries)[:20])
    raise LoadError(
        f"{path}: no dict of weights; looked in {', '.join(NESTED)}; found {keys}: "
        "give the inner dict, as torch.load(path, weights_only=True)[key]"
    )


def _check_nesting(tree: Any, path: str) -> None:
    """Refuse values that contain themselves, or nest so often that a walk would not end."""
    waiting: list[tuple[Any, int]] = [(tree, 0)]
    met = 0
    while waiting:
        value, depth = waiting.pop()
        met += 1
        if depth > MAX_DEPTH or met > MAX_TABLES:
            raise UnsafeFile(
                f"{path}: its dicts and lists hold one another over {MAX_DEPTH} deep, or over "
                f"{MAX_TABLES:,} times: save the dict of weights alone"
            )
        inner = value.values() if isinstance(value, dict) else value
        waiting += [(part, depth + 1) for part in inner if isinstance(part, dict | list | tuple)]


def _numbered(value: Any) -> Any:
    """Turn a list that contains tables of tensors, anywhere in a value, into a table by number.

    So `rename=` can choose one of several models, as it does in a dict: {"models.1": ""}.
    """
    if type(value) in (dict, OrderedDict):
        table = cast("dict[Any, Any]", value)
        return {key: _numbered(inner) for key, inner in table.items()}
    if not isinstance(value, list | tuple):
        return value
    items = [_numbered(item) for item in cast("list[Any]", value)]
    inner = [item for item in items if isinstance(item, dict) and "param_groups" not in item]
    are_tables = any(map(refs_of, inner))
    return {str(number): item for number, item in enumerate(items)} if are_tables else value


def _what_is(tree: Any) -> str:
    """Describe a file that does not hold a dict, and the way out."""
    what = f"a {type(tree).__name__}, not a dict of weights"
    if isinstance(tree, list | tuple):
        return f"{what}: save the dict of weights with torch.save, and give that"
    if tree is None or isinstance(tree, str | int | float | bytes):
        return f"{what}, and no tensors: give the file that has the weights"
    return f"{what}: {SAVE_STATE.format('')}"


def _tables_of(entries: dict[Any, Any]) -> dict[str, dict[Any, Any]]:
    """The entries of a checkpoint that are tables of tensors, by name, without optimizers."""
    return {
        key: cast("dict[Any, Any]", value)
        for key, value in entries.items()
        if isinstance(key, str) and isinstance(value, dict) and not is_other_part(key)
        if not _is_extra(key) and "param_groups" not in value
        if refs_of(cast("dict[Any, Any]", value))
    }


def _prefixes(tables: Mapping[Any, Any]) -> frozenset[str]:
    """The names of tables, and of tables in them."""
    names: set[str] = set()
    for key, value in tables.items():
        if isinstance(value, dict):
            names.add(str(key))
            names |= {f"{key}.{name}" for name in _prefixes(cast("dict[Any, Any]", value))}
    return frozenset(names)


def values_beside(tree: Any, content: FoundTable) -> Iterator[tuple[str, TensorRef | Bytesless]]:
    """The tensors of a checkpoint outside the table of weights, by whole keys.

    Includes tensors of optimizers and in lists.
    """
    entries = cast("dict[Any, Any]", tree) if isinstance(tree, dict) else {}
    for key, value in entries.items():
        if content.name:
            is_chosen = key == content.name
        elif any(isinstance(inner, TensorRef) for inner in entries.values()):
            is_chosen = isinstance(value, TensorRef | Bytesless) or _is_extra(key)
        else:
            is_chosen = key in content.tables
        if not is_chosen:
            yield from _values(value, str(key))


def _values(value: Any, key: str) -> Iterator[tuple[str, TensorRef | Bytesless]]:
    if isinstance(value, TensorRef | Bytesless):
        yield key, value
    elif isinstance(value, dict | list | tuple):
        inner: Any = value
        for name, part in inner.items() if isinstance(value, dict) else enumerate(inner):
            yield from _values(part, f"{key}.{name}")


def _arrays_in(table: Mapping[Any, Any]) -> list[str]:
    """The names of NumPy arrays in a table, and in the tables in it."""
    names: list[str] = []
    for key, value in table.items():
        if isinstance(value, dict):
            inner = _arrays_in(cast("dict[Any, Any]", value))
            names += [f"{key}.{name}" for name in inner]
        elif type(value).__name__ == "_reconstruct":
            names.append(str(key))
    return names


def _check_whole(table: Mapping[Any, Any], path: str) -> None:
    """Refuse a table with one rank's shares: the tensors beside them are only the rest.

    Raises:
        LoadError: names some.
    """
    shares = [str(key) for key, value in table.items() if isinstance(value, DTensorRef)]
    if shares:
        raise LoadError(
            f"{path}: holds DTensors ({', '.join(first_few(shares, 3))}), of which one rank's file "
            "has that rank's part alone, as torch.save of a sharded model's state_dict() leaves "
            "them: on as many ranks as saved them give each rank its own, anyrank.load(model, "
            "torch.load(its file, weights_only=False)[...]); or save with "
            "torch.distributed.checkpoint or anyrank.Checkpoints, which any number of ranks reads"
        )


def _why_not(key: Any, value: Any, chosen: str = "") -> str:
    if key in NESTED and isinstance(value, dict) and refs_of(cast("dict[Any, Any]", value)):
        return f"{key}: weights too, and those of {chosen or 'the root'} were read"
    return f"{key}: {_what_is_unread(key, value) or NOT_WEIGHTS}"


def refs_of(table: dict[Any, Any]) -> dict[str, TensorRef]:
    """The tensors of a table of weights; those of nested tables if it has none of its own."""
    if any(isinstance(value, TensorRef) for value in table.values()):
        return {str(key): ref for key, ref in table.items() if isinstance(ref, TensorRef)}
    return dict(_tensors(table))


def unread_of(table: Mapping[Any, Any], prefix: str = "") -> dict[str, str]:
    """Keys of a table of weights (as in `refs_of`) whose values are not read, and the way out.

    They are tensors without bytes, and objects of the user's code with tensors.
    """
    unread: dict[str, str] = {}
    is_flat = any(isinstance(value, TensorRef) for value in table.values())
    for key, value in table.items():
        if what := _what_is_unread(key, value):
            unread[f"{prefix}{key}"] = what
        elif isinstance(value, dict) and not is_flat:
            unread |= unread_of(cast("dict[Any, Any]", value), f"{prefix}{key}.")
    return unread


def _what_is_unread(key: object, value: object) -> str | None:
    """Describe a value that may be weights and is not read, and the way out; None for others."""
    if isinstance(value, Bytesless):
        return f"a {value.kind}"
    if isinstance(value, Record) and _holds_tensors(value):
        return f"a {type(value).__name__}, an object with tensors in it: " + SAVE_STATE.format(
            "[its key]"
        )
    return None


def _holds_tensors(value: Any, depth: int = 6) -> bool:
    """Return whether a pickled object was constructed with tensors, or has some in its fields."""
    if isinstance(value, TensorRef | Bytesless):
        return True
    parts: Any = (*value.arguments, value.fields) if isinstance(value, Record) else value
    parts = parts.values() if isinstance(parts, dict) else parts
    is_container = isinstance(value, Record | dict | list | tuple)
    return is_container and depth > 0 and any(_holds_tensors(part, depth - 1) for part in parts)


def extras_of(table: dict[Any, Any]) -> dict[str, tuple[Any] | None]:
    """Extra state of modules that stands among the weights and is not a tensor."""
    return {
        str(key): extra_of(value)
        for key, value in table.items()
        if _is_extra(key) and not isinstance(value, TensorRef)
    }


def _is_extra(key: Any) -> bool:
    return str(key).rsplit(".", 1)[-1] == EXTRA_STATE


def _tensors(tree: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, TensorRef]]:
    for key, value in tree.items():
        if isinstance(value, TensorRef):
            yield f"{prefix}{key}", value
        elif isinstance(value, dict):
            yield from _tensors(value, f"{prefix}{key}.")
