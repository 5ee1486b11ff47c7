"""The contents of another tool's checkpoint by part, and how its files are collected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard, TypeVar, cast

import torch

from anyrank.errors import LoadError, UnsafeFile
from anyrank.files.listing import NOT_A_TENSOR, Checksum, FileInfo, Listing
from anyrank.files.storage import Storage, join_path, read_range, read_whole
from anyrank.sources.foreign import shards
from anyrank.sources.part_names import is_average
from anyrank.sources.readers import pickles, torch_file
from anyrank.sources.readers.memory import extra_of
from anyrank.sources.readers.pickled_tables import ARRAY, is_extra
from anyrank.sources.weight_files import explain_unreadable
from anyrank.tensors.spec import StoredTensor

V = TypeVar("V")

MAX_JSON_BYTES = 1 << 30
MOMENTS_STAY = "its moments start at zero, because they are sharded by the tool's own parallelism"


@dataclass(frozen=True)
class ForeignGroup:
    """A parameter group of an optimizer.

    Attributes:
        params: its parameters, by name or by number in the optimizer.
        options: hyperparameters; plain values, or stored tensors.
    """

    params: list[str | int]
    options: dict[str, Any]


@dataclass(frozen=True)
class ForeignOptimizer:
    """The state of an optimizer.

    Attributes:
        groups: groups, in the tool's order.
        state: parameter, by name or number -> key -> stored tensor or plain value.
    """

    groups: list[ForeignGroup]
    state: dict[str | int, dict[str, Any]]


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A checkpoint of another tool, known from headers and small values only.

    Attributes:
        tool: the tool that wrote it.
        listing: its files, to which `weights` and the other tables refer.
        weights: name of a model -> its tensors, extra state and metadata, without files.
        optimizers: name -> state.
        states: name -> the `state_dict()` of a scheduler, scaler or other part.
        step: completed optimizer steps, or None if the tool did not save them.
        not_a_step: error text for an invalid value in place of the step, or "".
        epoch: epochs, including the fraction of the current one; None as for `step`.
        batches: batches of the current epoch, if its fraction is unknown.
        samples: samples of completed steps; None as for `step`.
        ranks: number of processes that saved it, or None.
        scheduler_steps: number of scheduler steps in each optimizer step.
        says_scheduler_steps: whether the user passed that number; otherwise it is the usual one of
            the tool.
        not_read: name of any other part -> why it is not used.
        keys: name of a part here -> the tool's name for it, if that differs.
        optimizer_steps: number of optimizer steps according to the optimizer's state; None if it
            has no count.
        assumed: the assumptions, in sentences for the report.
        tree: the checkpoint's tables, for parts inside them that parts= names.
    """

    tool: str
    listing: Listing
    weights: dict[str, Listing]
    optimizers: dict[str, ForeignOptimizer] = field(default_factory=dict[str, ForeignOptimizer])
    states: dict[str, Any] = field(default_factory=dict[str, Any])
    step: int | None = None
    not_a_step: str = ""
    epoch: float | None = None
    batches: int = 0
    samples: int | None = None
    ranks: int | None = None
    scheduler_steps: int = 1
    says_scheduler_steps: bool = False
    not_read: dict[str, str] = field(default_factory=dict[str, str])
    keys: dict[str, str] = field(default_factory=dict[str, str])
    optimizer_steps: int | None = None
    assumed: list[str] = field(default_factory=list[str])
    tree: dict[str, Any] = field(default_factory=dict[str, Any])

    def for_parts(self, names: Collection[str], chosen: Mapping[str, str]) -> ForeignCheckpoint:
        """Return the checkpoint with its parts named as those of a state are.

        Args:
            names: names of the state's parts. A name that the tool uses for a part gets that part.
            chosen: part of the state -> name of the part here, or the tool's name; a part inside a
                table or list is named with dots.

        Raises:
            LoadError: the checkpoint does not have such a part.
        """
        weights, optimizers, states = {**self.weights}, {**self.optimizers}, {**self.states}
        own_names = {key: name for name, key in self.keys.items()}
        known = {*self.weights, *self.optimizers, *self.states}
        moves = {key: name for key, name in own_names.items() if key in names and key not in known}
        for part, key in chosen.items():
            moves[part] = own_names.get(key, key)
            inner = None if moves[part] in known else _inner(self.tree, key)
            if inner:
                states[key] = inner
                if "param_groups" in inner:
                    optimizers[key] = optimizer_of(inner, key)
                elif flat(inner):
                    weights[key] = weights_of(inner)
            elif moves[part] not in known:
                shown = ", ".join(sorted(self.keys.get(name, name) for name in known))
                raise LoadError(
                    f"parts={{{part!r}: {key!r}}}: the checkpoint has no such part; it has {shown}"
                )
        if not moves:
            return self
        keys = {name: key for name, key in self.keys.items() if name not in moves.values()}
        keys |= {part: self.keys.get(name, name) for part, name in moves.items()}
        return replace(
            self,
            weights=_moved(weights, moves),
            optimizers=_moved(optimizers, moves),
            states=_moved(states, moves),
            keys={part: key for part, key in keys.items() if part != key},
        )

    def tables(self) -> list[str]:
        """Return the names of its innermost tables of weights, with averages last."""
        names = [
            inner
            for name in self.weights
            for key in (self.keys.get(name, name),)
            for inner in _tables_in(self.tree.get(key), key) or [key]
        ]
        return sorted(names, key=lambda name: (is_average(name), name))

    def models(self) -> str:
        """Return the tool's names of its models."""
        return ", ".join(sorted(self.keys.get(name, name) for name in self.weights)) or "none"

    def model(self, name: str) -> Listing:
        """Return the weights of one model, as a source for `load`.

        Raises:
            LoadError: the checkpoint has no model of this name.
        """
        if name not in self.weights:
            raise LoadError(
                f"the checkpoint has no weights of {name}; it has those of {self.models()}"
            )
        files = self.listing.files, self.listing.checksums
        return replace(self.weights[name], files=files[0], checksums=files[1], sums={})


def _inner(tree: Any, name: str) -> dict[Any, Any] | None:
    """Return the table with this dotted name in nested tables and lists, or None."""
    if isinstance(tree, list) and len(cast("list[Any]", tree)) == 1 and not name:
        tree = cast("list[Any]", tree)[0]
    if not name:
        return cast("dict[Any, Any]", tree) if isinstance(tree, dict) else None
    if isinstance(tree, list):
        tree = dict(enumerate(cast("list[Any]", tree)))
    for key, value in cast("dict[Any, Any]", tree).items() if isinstance(tree, dict) else ():
        if f"{name}.".startswith(f"{key}."):
            inner = _inner(value, name[len(str(key)) + 1 :])
            if inner is not None:
                return inner
    return None


def _tables_in(tree: Any, name: str) -> list[str]:
    """Return the names of the innermost tables of weights, without those of optimizers."""
    if not isinstance(tree, dict) or "param_groups" in tree:
        return []
    table = cast("dict[Any, Any]", tree)
    if any(isinstance(value, StoredTensor) for value in table.values()):
        return [name]
    return [inner for key, value in table.items() for inner in _tables_in(value, f"{name}.{key}")]


def weights_of(table: Any) -> Listing:
    """Return the weights in tables and lists, extra state of modules, and what is not read."""
    listing = Listing("", (), {})
    others: dict[str, str] = {}

    def walk(value: Any, key: str) -> None:
        if isinstance(value, StoredTensor):
            listing.tensors[key] = value.renamed(key)
        elif is_extra(key):
            listing.extras[key] = extra_of(value)
        elif isinstance(value, dict) or _has_more_than_numbers(value):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for name, inner in pairs:
                walk(inner, f"{key}.{name}" if key else str(name))
        elif isinstance(value, Unread) and value.is_array:
            listing.unreadable[key] = ARRAY
        else:
            others[key] = NOT_A_TENSOR

    walk(table, "")
    return replace(listing, skipped=others | listing.unreadable)


def _has_more_than_numbers(value: Any) -> bool:
    """Return whether a list has entries other than plain values, which must then be examined."""
    return isinstance(value, list | tuple) and not all(isinstance(v, PLAIN) for v in value)


def _moved(table: dict[str, V], moves: Mapping[str, str]) -> dict[str, V]:
    """Rename the entries of a table to names of parts; `moves` maps new names to old ones."""
    left = {name: value for name, value in table.items() if name not in moves.values()}
    return left | {part: table[name] for part, name in moves.items() if name in table}


class Collector:
    """Collects the files of one checkpoint, which are read one after the other, into one list."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self.storage, self.folder = storage, folder
        self.files: list[FileInfo] = []
        self.checksums: list[Checksum] = []

    def add(self, listing: Listing) -> Listing:
        """Add the files of a listing to this checkpoint; return the listing with new numbers."""
        base = len(self.files)
        self.files += listing.files
        self.checksums += (replace(c, file=c.file + base) for c in listing.checksums)
        tensors = {key: stored.with_file_offset(base) for key, stored in listing.tensors.items()}
        adapters = {base + number: config for number, config in listing.adapters.items()}
        return replace(listing, tensors=tensors, adapters=adapters)

    def tree(self, path: str) -> Any:
        """Read a torch.save file: plain values, and stored tensors.

        Raises:
            UnsafeFile: it is corrupt, or its pickle names unknown globals.
        """
        with explain_unreadable(self.storage, path):
            read = torch_file.read_file(self.storage, path)
        base = len(self.files)
        self.files.append(read.info)
        self.checksums += (replace(c, file=base) for c in read.checksums)
        return bound(read.tree, path, lambda key, ref: read.stored(key, ref).with_file_offset(base))

    def named(self, *names: str) -> str:
        """Return the path of a file in the folder."""
        return join_path(self.folder, "/".join(names))

    def value(self, stored: StoredTensor) -> float | None:
        """Read the value of a stored tensor of one element."""
        chunk = stored.chunks[0]
        path = self.files[chunk.file].path
        with closing(self.storage.open(path)) as file:
            data = read_range(file, chunk.offset, stored.dtype.itemsize)
        return torch.frombuffer(bytearray(data), dtype=stored.dtype).item()

    def steps_of(self, optimizer: ForeignOptimizer) -> int | None:
        """Return the number of steps of an optimizer: the largest count of its parameters."""
        counts: list[float] = []
        for entries in optimizer.state.values():
            count = entries.get("step")
            if isinstance(count, StoredTensor) and count.numel == 1 and count.chunks:
                count = self.value(count)
            if is_plain_number(count):
                counts.append(count)
        return int(max(counts)) if counts else None

    def small(self, path: str) -> bytes:
        """Read all bytes of a small file.

        Raises:
            LoadError: it is too large.
        """
        return read_whole(self.storage, path, MAX_JSON_BYTES)

    def listing(self, tool: str) -> Listing:
        """Return a listing of all files, without tensors."""
        return Listing(tool, tuple(self.files), {}, checksums=tuple(self.checksums))


@dataclass(frozen=True)
class Unread:
    """Stands for an object of a class that is not read.

    Attributes:
        name: name of the class.
    """

    name: str

    @property
    def is_array(self) -> bool:
        """True if it is a NumPy array."""
        return self.name == "_reconstruct"


PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)


def _class_of(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__


def bound(tree: Any, path: str, bind: Callable[[str, pickles.TensorRef], Any]) -> Any:
    """Replace the tensor references in a tree by stored tensors. Shared containers stay shared.

    Values that are neither containers nor plain become `Unread`.

    Raises:
        UnsafeFile: the tree contains itself.
    """
    done: dict[int, Any] = {}

    def walk(value: Any, where: str) -> Any:
        if isinstance(value, pickles.TensorRef):
            return bind(where or "tensor", value)
        if isinstance(value, pickles.DTensorRef):
            return shards.shard_of(bind(where or "tensor", value.local), value.spec, path)
        if not isinstance(value, (dict, list, tuple)):
            return value if isinstance(value, PLAIN) else Unread(_class_of(value))
        known: Any = cast("Any", value)
        if id(known) in done:
            return done[id(known)]
        if isinstance(known, dict):
            table = cast("dict[Any, Any]", known)
            pairs = [
                (k if isinstance(k, PLAIN) else Unread(_class_of(k)), v) for k, v in table.items()
            ]
            copy: Any = {key: walk(item, f"{where}.{key}".lstrip(".")) for key, item in pairs}
            copy = Counter(copy) if isinstance(known, Counter) else copy
        else:
            parts = [walk(item, f"{where}.{n}") for n, item in enumerate(known)]
            copy = tuple(parts) if isinstance(known, tuple) else parts
        done[id(known)] = copy
        return copy

    try:
        return walk(tree, "")
    except RecursionError as error:
        raise UnsafeFile(f"{path}: its pickle is nested without end") from error


def optimizer_of(tree: Any, path: str) -> ForeignOptimizer:
    """Parse the result of `Optimizer.state_dict()` or of torch's state dict functions.

    Raises:
        LoadError: it is neither.
    """
    table: Any = tree if isinstance(tree, dict) else {}
    groups, state = table.get("param_groups"), table.get("state")
    if not isinstance(groups, list) or not isinstance(state, dict):
        shown = ", ".join(map(str, cast("dict[Any, Any]", table))) or type(tree).__name__
        raise LoadError(f"{path}: is not the state of a torch optimizer; it contains {shown[:200]}")
    parsed: list[ForeignGroup] = []
    names: dict[str | int, str | int] = {}
    for group in cast("list[Any]", groups):
        if not isinstance(group, dict) or not isinstance(group.get("params"), (list, tuple)):
            raise LoadError(f"{path}: a group of the optimizer has no list of parameters")
        options = {str(key): value for key, value in cast("dict[Any, Any]", group).items()}
        params = [_name(param, path) for param in options.pop("params")]
        param_names = options.pop("param_names", None)  # if built with named_parameters()
        if isinstance(param_names, list) and len(cast("list[Any]", param_names)) == len(params):
            named = [_name(param, path) for param in cast("list[Any]", param_names)]
            names |= zip(params, named, strict=True)
            params = named
        parsed.append(ForeignGroup(params, options))
    keys = {key: _name(key, path) for key in cast("dict[Any, Any]", state)}
    return ForeignOptimizer(
        parsed,
        {names.get(keys[key], keys[key]): _entries(state[key], path) for key in keys},
    )


def _name(key: Any, path: str) -> str | int:
    if isinstance(key, (str, int)) and not isinstance(key, bool):
        return key
    raise LoadError(f"{path}: {str(key)[:80]!r} is not the name or number of a parameter")


def _entries(entries: Any, path: str) -> dict[str, Any]:
    if not isinstance(entries, dict):
        raise LoadError(
            f"{path}: expected a dict as the state of a parameter, got {type(entries).__name__}"
        )
    return {str(key): value for key, value in cast("dict[Any, Any]", entries).items()}


def flat(tree: Any, prefix: str = "") -> dict[str, StoredTensor]:
    """Return the stored tensors of nested tables, by keys joined with dots."""
    tensors: dict[str, StoredTensor] = {}
    for key, value in cast("dict[Any, Any]", tree).items() if isinstance(tree, dict) else ():
        if isinstance(value, StoredTensor):
            tensors[f"{prefix}{key}"] = value.renamed(f"{prefix}{key}")
        else:
            tensors |= flat(value, f"{prefix}{key}.")
    return tensors


def is_plain_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a value is an int or a float, but not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def count_of(table: Mapping[str, Any], key: str) -> int | None:
    """Return a count of at least 0 from unchecked values, or None."""
    value = table.get(key)
    return value if type(value) is int and value >= 0 else None
