"""The types of a training state's parts: what a save reads from each, and what a resume fills."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

import torch

from anyrank.errors import CheckpointError, LoadError
from anyrank.files.listing import Listing, TensorFill
from anyrank.models.dtensors import as_sharded
from anyrank.runs.state.resume_report import Outcome
from anyrank.tensors.sharded_tensor import ShardedTensor
from anyrank.tensors.spec import StoredTensor
from anyrank.tensors.wrapped import without_bytes
from anyrank.wording import count, join_first

SHOWN = 10

# How a record names a tensor of its step: a dict of one tag. Its value is the tensor's name; in an
# optimizer's record [name, layout], where the layout is "" if each rank has the whole tensor.
TENSOR_TAGS = (
    "~like",  # laid out like its parameter, which is sharded
    "~laid",  # a DTensor beside a plain parameter: it has its own layout
    "~whole",  # any other tensor that the ranks hold together
    "~rank",  # a plain tensor of each rank; [name, its parameter's layout]; see `own_name`
)


@dataclass
class PartState:
    """One part's contribution to a save.

    Attributes:
        record: JSON; `agreement` says how it may differ between the ranks.
        tensors: tensors that the ranks hold together; the same list on every rank.
        own_tensors: plain tensors that are saved with this rank's record, or once if they are the
            same on every rank; their names end with the rank.
        beside_shards: those of `own_tensors` that may be identical on every rank, by name without
            rank: an optimizer's, if nothing shows that they are shards of a parameter's.
        aliases: other name -> name, of tied tensors.
        agreement: of the record: "equal" on every rank, the "first" rank's if others may differ, or
            kept "per rank" if it differs.
        unsaved: names of attributes of an optimizer that hold tensors and are in no record.
    """

    record: Any
    tensors: list[ShardedTensor] = field(default_factory=list[ShardedTensor])
    own_tensors: list[ShardedTensor] = field(default_factory=list[ShardedTensor])
    beside_shards: dict[str, ShardedTensor] = field(default_factory=dict[str, ShardedTensor])
    aliases: dict[str, str] = field(default_factory=dict[str, str])
    agreement: Literal["equal", "first", "per rank"] = "equal"
    unsaved: list[str] = field(default_factory=list[str])


def shared_tensors(parts: Mapping[str, PartState]) -> list[ShardedTensor]:
    """List the tensors that the ranks hold together, in the same order on every rank."""
    return [tensor for saved in parts.values() for tensor in saved.tensors]


@dataclass
class PartMatch:
    """The plan of a resume for one part.

    Attributes:
        outcome: exact, resharded or another outcome, with the reason.
        fills: memory to fill, the same list on every rank.
        load: fills a module by itself and returns the bytes that this rank read. Collective.
        commit: puts everything else in place when the memory is filled.
        problems: all mismatches; nothing is changed while any part has one.
        notes: sentences for the report.
        warnings: those notes that users must know.
        is_regrouped: whether an optimizer's groups are not, in order, those of the checkpoint.
        groups: for each group of an optimizer, the saved group whose options it takes, if they are
            not the checkpoint's groups.
        has_meta_buffers: whether buffers that no checkpoint holds are on meta.
    """

    outcome: Outcome
    fills: list[TensorFill] = field(default_factory=list[TensorFill])
    load: Callable[[], int] | None = None
    commit: Callable[[], None] = lambda: None
    problems: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    warnings: list[str] = field(default_factory=list[str])
    is_regrouped: bool = False
    groups: Sequence[int | None] | None = None
    has_meta_buffers: bool = False


@dataclass(frozen=True)
class PartSource:
    """The source that parts are filled from: a committed step, or another tool's checkpoint.

    Attributes:
        listing: listing of its tensors.
        ranks: number of ranks that saved it.
        same_ranks: whether the same number of ranks resumes it.
        fresh: patterns of names of parameters that may be missing from the step.
        drop: patterns of names of parameters that may be missing from the state.
        casts: whether floating-point state is cast to its parameter's dtype, as torch does.
        joins: whether an optimizer's group may join parameters of different saved groups, because
            its hyperparameters are the script's.
    """

    listing: Listing
    ranks: int
    same_ranks: bool
    fresh: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    casts: bool = False
    joins: bool = False

    def is_fresh(self, name: str) -> bool:
        """Return True if a parameter that the step lacks is allowed, by its name or its end."""
        return _matches(name, self.fresh)

    def is_dropped(self, name: str) -> bool:
        """Return True if the step's state of a parameter may be dropped, by its name or its end."""
        return _matches(name, self.drop)

    def outcome_for(self, saved_layout: str, layout: str) -> Outcome:
        """Return "exact" if ranks and layout are those of the save, otherwise "resharded"."""
        if self.same_ranks and saved_layout == layout:
            return Outcome("exact")
        if self.same_ranks:
            return Outcome("resharded", "the layout changed")
        return Outcome("resharded", f"saved on {count(self.ranks, 'rank')}")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    parts = name.split(".")
    ends = [".".join(parts[n:]) for n in range(len(parts))]
    return any(fnmatchcase(end, pattern) for end in ends for pattern in patterns)


def other_names(fresh_title: str, fresh: Sequence[str], dropped: Sequence[str]) -> Outcome | None:
    """Return the outcome of a part with other names than the checkpoint; None for the same."""
    texts = [in_line(fresh_title, fresh)] if fresh else []
    texts += [in_line("dropped by drop=", dropped)] if dropped else []
    return Outcome("derived", "; ".join(texts)) if texts else None


def own_name(where: str, index: int) -> str:
    """Return the name of a plain tensor with the index of the rank that writes it."""
    return f"{where}@{index:05d}"


def hold_to_save(name: str, tensor: torch.Tensor) -> ShardedTensor:
    """Return a tensor in the form for a save; values of a conj or neg view are copied.

    Raises:
        CheckpointError: a checkpoint cannot hold the bytes of such a tensor.
    """
    is_dense = not hasattr(tensor, "placements") and tensor.layout == torch.strided
    plain = tensor.resolve_conj().resolve_neg() if is_dense else tensor
    check_has_bytes(name, plain)
    try:
        return as_sharded(name, plain)
    except LoadError as error:
        raise _cannot_be_saved(name, _kind(tensor)) from error


def check_has_bytes(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor's elements are in strided memory.

    Raises:
        CheckpointError: it is nested, sparse, quantized, on meta, or of a class that computes its
            values.
    """
    if what := without_bytes(tensor):
        of_class = "DTensor of " if hasattr(tensor, "placements") else ""
        raise _cannot_be_saved(name, f"{of_class}{what[0]}")
    if tensor.is_meta:
        raise _cannot_be_saved(name, "tensor on meta")


def _kind(tensor: Any) -> str:
    """Return the name of a tensor's class; for a DTensor also the class of its local tensor."""
    name = type(tensor).__name__
    if not hasattr(tensor, "placements"):
        return name
    return f"{name} of {type(tensor.to_local()).__name__}"


def _cannot_be_saved(name: str, kind: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: a {kind} cannot be saved. A checkpoint holds plain tensors, and sharded or "
        "replicated DTensors; store this value in one of these."
    )


def layout_digest(tensors: Sequence[ShardedTensor]) -> str:
    """Return a hash of the layout of tensors on the ranks."""
    rows = [(sharded.name, str(sharded.layout)) for sharded in tensors]
    return hashlib.blake2b(repr(rows).encode(), digest_size=8).hexdigest()


def misfits(stored: StoredTensor, target: ShardedTensor, part: str = "") -> str | None:
    """Return the reason why a stored tensor cannot fill this one, or None."""
    if stored.shape != target.shape:
        return (
            f"{target.name}: has shape {list(target.shape)}, but {list(stored.shape)} in the "
            "checkpoint. Build it with the configuration of the run" + _leaving_out(part)
        )
    if stored.dtype != target.dtype:
        return (
            f"{target.name}: is {target.dtype}, but {stored.dtype} in the checkpoint, and a resume "
            "does not cast. Use the dtype of the checkpoint, or load only the weights with "
            "anyrank.load()" + _leaving_out(part)
        )
    return None


def _leaving_out(part: str) -> str:
    """Return the option to continue without a part; the model has none, because it is the run."""
    return (
        f", or leave {part} unchanged with skip=[{part!r}]." if part not in ("", "model") else "."
    )


def other_class(part: str, name: str, saved: str) -> str:
    """Describe the problem of an object whose class differs from the checkpoint's."""
    return (
        f"{part}: is a {name}, but the checkpoint was saved with a {saved}. Use a {saved}, or "
        f"leave the {name} unchanged with skip=[{part!r}]."
    )


def in_line(title: str, names: Sequence[str]) -> str:
    """Join a title and the first of several names in one line."""
    return f"{title}: {join_first(names, SHOWN)}"


def differences(record: Any, other: Any, where: str = "") -> str:
    """Return the first place where two JSON values differ."""
    if isinstance(record, Mapping) and isinstance(other, Mapping):
        for key in sorted({*record, *other}):  # pyright: ignore[reportUnknownVariableType]
            if record.get(key) != other.get(key):
                return differences(record.get(key), other.get(key), f"{where}.{key}")
    if isinstance(record, list) and isinstance(other, list) and len(record) == len(other):
        pairs = enumerate(zip(cast("list[Any]", record), cast("list[Any]", other), strict=True))
        number, (first, second) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
        return differences(first, second, f"{where}.{number}")
    return f"{where.lstrip('.') or 'value'}: {str(record)[:80]} and {str(other)[:80]}"
