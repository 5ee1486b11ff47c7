"""The tables in a torch.save file: the weights, and everything else."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from anyrank.errors import LoadError, UnsafeFile
from anyrank.files.listing import ABSENT, EXTRA_STATE, NOT_A_TENSOR
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
ARRAY = "a NumPy array, not a tensor: save torch.from_numpy() of it"
PLAIN = {int, float, bool, str, bytes, type(None)}  # types of values that hold no tensors
MAX_DEPTH, MAX_TABLES = 64, 10_000_000  # nested dicts and lists, counted at every position


@dataclass(frozen=True)
class FoundTable:
    """The weights in a checkpoint.

    Attributes:
        tensors: the tensors by key, with dots for those in inner tables and lists.
        others: all other keys -> the reason why they are not among the weights.
        unread: keys among the weights whose values are not read -> their kind, and the way out;
            `others` has them too.
        extras: extra state of modules among the weights that is not a tensor.
        name: name of the table; "" if it is the checkpoint itself.
        tables: names of tables that may hold weights, and of tables inside them, with dots.
    """

    tensors: dict[str, TensorRef]
    others: dict[str, str] = field(default_factory=dict[str, str])
    unread: dict[str, str] = field(default_factory=dict[str, str])
    extras: dict[str, tuple[Any] | None] = field(default_factory=dict[str, tuple[Any] | None])
    name: str = ""
    tables: frozenset[str] = frozenset()

    def within(
        self, tables: Mapping[str, Any], others: Mapping[str, str], name: str = ""
    ) -> FoundTable:
        """Return the table with its position in a checkpoint: the tables and keys around it."""
        return replace(self, others={**others, **self.others}, name=name, tables=_prefixes(tables))


def find_table(tree: Any, path: str) -> FoundTable:
    """Find the table of weights in a checkpoint, and everything else in it.

    It is the tree itself if that has tensors, else its first entry named in NESTED. If both have
    tensors, it is the one with more, because a generator's state may be next to the weights. Tables
    with other names are left to the caller.

    Raises:
        LoadError: the file has no table.
        UnsafeFile: its values are nested without end.
    """
    if isinstance(tree, TensorRef):
        return FoundTable({"": tree})
    if isinstance(tree, dict | list | tuple):
        _check_nesting(tree, path)
    if isinstance(tree, list | tuple):
        tree = _numbered(tree)
    if not isinstance(tree, dict):
        raise LoadError(f"{path}: contains {_describe_root(tree)}")
    entries = cast("dict[Any, Any]", tree)
    own_entries = {key: value for key, value in entries.items() if not _is_table(key, value)}
    content = _contents(own_entries, path)
    tables = _tables_of(entries)
    for name in NESTED:
        if not isinstance(entries.get(name), dict):
            continue
        inner = _contents(entries[name], path)
        if inner.tensors and len(inner.tensors) + len(inner.unread) > len(content.tensors):
            others = {str(k): _why_not(k, v, name) for k, v in entries.items() if k != name}
            return inner.within(tables, others, name)
    if content.tensors:
        others = {str(k): _why_not(k, v) for k, v in entries.items() if k not in own_entries}
        return content.within(tables, others)
    tables = tables or _tables_of(_numbered(entries))
    if tables:
        others = {str(k): _why_not(k, v) for k, v in entries.items() if k not in tables}
        return _contents(tables, path).within(tables, others)
    leaves = [*_leaves(entries)]
    for key, value in leaves:
        if not _is_array(value) and (what := _describe_unread(value)):
            raise LoadError(f"{path}: has no dense tensors; {key} is {what}")
    if arrays := [key for key, value in leaves if _is_array(value)]:
        raise LoadError(
            f"{path}: contains NumPy arrays ({', '.join(first_few(arrays, 3))}) but no tensors. "
            "Save a dict of torch.from_numpy(...)."
        )
    objects = [key for key, value in entries.items() if isinstance(value, Inert)]
    if objects:
        key = objects[0]
        raise LoadError(
            f"{path}: has no dict of tensors; {key} is a {type(entries[key]).__name__}. "
            f"{SAVE_STATE.format(f'[{key!r}]')}"
        )
    keys = ", ".join(str(key) for key in list(entries)[:20])
    raise LoadError(
        f"{path}: has no dict of tensors under {', '.join(NESTED)}; it contains {keys}. Pass the "
        "inner dict, for example torch.load(path, weights_only=True)[key]."
    )


def _contents(table: Mapping[Any, Any], path: str) -> FoundTable:
    """Return everything in a table of weights, and in the tables and lists in it.

    Raises:
        LoadError: it contains one rank's shards of DTensors, or two tensors have the same key.
    """
    content = FoundTable({})
    shares: list[str] = []
    for key, value in _leaves(table):
        what = _describe_unread(value)
        if isinstance(value, TensorRef):
            if key in content.tensors:
                raise LoadError(
                    f"{path}: two tensors have the key {key}, one of them in inner tables. Rename "
                    "one, and save the file again."
                )
            content.tensors[key] = value
        elif is_extra(key):
            content.extras[key] = extra_of(value)
        elif isinstance(value, DTensorRef):
            shares.append(key)
        else:
            content.others[key] = what or (ABSENT if value is None else NOT_A_TENSOR)
            content.unread.update({key: what} if what else {})
    if shares:
        raise LoadError(
            f"{path}: contains one rank's local shards of DTensors "
            f"({', '.join(first_few(shares, 3))}), because a sharded state_dict() was saved with "
            "torch.save. On the same number of ranks, load each rank's own file with "
            "anyrank.load(model, torch.load(file, weights_only=False)[...]). For other numbers of "
            "ranks, save with torch.distributed.checkpoint or anyrank.Checkpoints."
        )
    return content


def _leaves(table: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a table by key, with dots for those in inner tables and lists.

    A table or list without possible weights is one value, and so is extra state.
    """
    for name, value in table.items():
        key = f"{prefix}{name}"
        if _is_table(key, value):
            yield from _leaves(dict(_entries(value)), f"{key}.")
        else:
            yield key, value


def _is_table(key: Any, value: Any) -> bool:
    """Return whether an entry is a table or list that contains possible weights.

    It stops at the first such value, and builds no keys: a sampler's positions may be a million
    numbers.
    """
    if is_extra(key) or not _is_container(value):
        return False
    if not isinstance(value, dict) and {*map(type, value)} <= PLAIN:
        return False
    return any(
        _is_table(name, inner) or _may_be_weights((str(name), inner))
        for name, inner in _entries(value)
    )


def _entries(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the entries of a table, or of a list by position."""
    return value.items() if isinstance(value, dict) else enumerate(value)


def _may_be_weights(leaf: tuple[str, Any]) -> bool:
    key, value = leaf
    is_tensor = isinstance(value, TensorRef | DTensorRef)
    return is_tensor or is_extra(key) or _describe_unread(value) is not None


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | list | tuple)


def _check_nesting(tree: Any, path: str) -> None:
    """Raise UnsafeFile for values that contain themselves, or nest so much that a walk would not
    end.
    """
    waiting: list[tuple[Any, int]] = [(tree, 0)]
    met = 0
    while waiting:
        value, depth = waiting.pop()
        met += 1
        if depth > MAX_DEPTH or met > MAX_TABLES:
            raise UnsafeFile(
                f"{path}: its dicts and lists are nested more than {MAX_DEPTH} levels deep, or "
                f"more than {MAX_TABLES:,} times. Save only the dict of tensors."
            )
        inner = value.values() if isinstance(value, dict) else value
        waiting += [(part, depth + 1) for part in inner if isinstance(part, dict | list | tuple)]


def _numbered(value: Any) -> Any:
    """Turn lists that contain tables of tensors, anywhere in a value, into tables by number.

    So `rename=` can choose one of several models, as in a dict: {"models.1": ""}.
    """
    if type(value) in (dict, OrderedDict):
        table = cast("dict[Any, Any]", value)
        return {key: _numbered(inner) for key, inner in table.items()}
    if not isinstance(value, list | tuple):
        return value
    items = [_numbered(item) for item in cast("list[Any]", value)]
    inner = [item for item in items if isinstance(item, dict) and "param_groups" not in item]
    are_tables = any(map(_has_tensors, inner))
    return {str(number): item for number, item in enumerate(items)} if are_tables else value


def _describe_root(tree: Any) -> str:
    """Return the error text for a file that does not contain a dict."""
    what = f"a {type(tree).__name__}, not a dict of tensors"
    if isinstance(tree, list | tuple):
        return f"{what}; save the dict of tensors with torch.save, and pass that file"
    if tree is None or isinstance(tree, str | int | float | bytes):
        return f"{what}, and no tensors; pass the file with the weights"
    return f"{what}. {SAVE_STATE.format('')}"


def _tables_of(entries: dict[Any, Any]) -> dict[str, dict[Any, Any]]:
    """Return the entries of a checkpoint that are tables of tensors, without optimizers."""
    return {
        key: cast("dict[Any, Any]", value)
        for key, value in entries.items()
        if isinstance(key, str) and isinstance(value, dict) and not is_other_part(key)
        if not is_extra(key) and "param_groups" not in value
        if _has_tensors(value)
    }


def _prefixes(tables: Mapping[Any, Any]) -> frozenset[str]:
    """Return the names of tables, and of tables in them."""
    names: set[str] = set()
    for key, value in tables.items():
        if isinstance(value, dict):
            names.add(str(key))
            names |= {f"{key}.{name}" for name in _prefixes(cast("dict[Any, Any]", value))}
    return frozenset(names)


def values_beside(tree: Any, content: FoundTable) -> Iterator[tuple[str, TensorRef | str]]:
    """Yield the tensors of a checkpoint outside the table of weights, by whole keys.

    Includes tensors of optimizers and in lists. A tensor that is not read has its kind instead.
    """
    entries = cast("dict[Any, Any]", tree) if isinstance(tree, dict) else {}
    for key, value in entries.items():
        if content.name:
            is_chosen = key == content.name
        elif any(isinstance(inner, TensorRef) for inner in entries.values()):
            is_chosen = not _is_table(key, value)
        else:
            is_chosen = key in content.tables
        if is_chosen:
            continue
        leaves = [*_leaves({key: value})]
        among = {n.rpartition(".")[0] for n, inner in leaves if isinstance(inner, TensorRef)}
        for name, inner in leaves:
            # Other arrays, such as states of random generators, are not weights.
            is_foreign = _is_array(inner) and name.rpartition(".")[0] not in among
            what = None if is_foreign else _describe_unread(inner)
            if isinstance(inner, TensorRef):
                yield name, inner
            elif what is not None:
                yield name, what


def _why_not(key: Any, value: Any, chosen: str = "") -> str:
    if key in NESTED and isinstance(value, dict) and _has_tensors(value):
        return f"also weights, but those of {chosen or 'the root'} were read"
    return _describe_unread(value) or NOT_WEIGHTS


def _has_tensors(value: Any) -> bool:
    """Return whether nested tables have tensors; lists of tensors belong to optimizers and similar
    parts.
    """
    if isinstance(value, dict):
        return any(map(_has_tensors, cast("dict[Any, Any]", value).values()))
    return isinstance(value, TensorRef)


def _describe_unread(value: object) -> str | None:
    """Return the kind of a possible weight that is not read, and the way out; None for other
    values.
    """
    if isinstance(value, Bytesless):
        return f"a {value.kind}"
    if _is_array(value):
        return ARRAY
    if isinstance(value, Record) and _holds_tensors(value):
        return f"a {type(value).__name__}, an object with tensors in it. " + SAVE_STATE.format(
            "[its key]"
        )
    return None


def _is_array(value: object) -> bool:
    return type(value).__name__ == "_reconstruct"


def _holds_tensors(value: Any, depth: int = 6) -> bool:
    """Return whether the arguments or fields of a pickled object contain tensors."""
    if isinstance(value, TensorRef | Bytesless):
        return True
    parts: Any = (*value.arguments, value.fields) if isinstance(value, Record) else value
    parts = parts.values() if isinstance(parts, dict) else parts
    is_container = isinstance(value, Record | dict | list | tuple)
    return is_container and depth > 0 and any(_holds_tensors(part, depth - 1) for part in parts)


def is_extra(key: Any) -> bool:
    """Return whether a key is that of a module's extra state."""
    return str(key).rsplit(".", 1)[-1] == EXTRA_STATE
