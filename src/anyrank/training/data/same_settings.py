"""The settings of a loader that a resume must find again, and what differs, for an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anyrank.errors import CheckpointError
from anyrank.training.data.order import IDENTITY_NAME

# The first word of a name, up to its version -> the kind of data, and the arguments that the rest
# of the name depends on.
KINDS = {
    "lanes": ("a stream", "window=, transform=, endless=, until= and names in mix="),
    "shards": ("shards with lengths=", "shards and lengths="),
    "buckets": ("a dataset with keys=", "keys="),
    "weighted": ("a dataset with weights=", "weights="),
}
PLAIN = ("a dataset", "shuffle=")
TITLES = {"version": "format version", "n": "a dataset of length", "key": "the dataset key"}
WAYS = {
    "version": "use the anyrank version that wrote it, or a newer one",
    "n": "give the dataset of the run, or begin an epoch of this one by skip=['data'], or start "
    "a new run from its weights",
}


def compare_settings(
    saved: Mapping[str, Any], current: Mapping[str, Any], names: Sequence[str]
) -> None:
    """Compare the settings in the states of a run and of a loader.

    Args:
        saved, current: states of the run and of the loader.
        names: entries, beside "order", that must agree.

    Raises:
        CheckpointError: one of them differs.
    """
    _check_kind(saved["order"], current["order"])
    for name in names:
        if saved[name] != current[name]:
            way_out = WAYS.get(name, f"give {name}={saved[name]!r}")
            raise CheckpointError(
                f"data position: the run has {TITLES.get(name, name)} {saved[name]!r}, here it is "
                f"{current[name]!r}: {way_out}"
            )
    _check_order(saved["order"], current["order"])


def _check_kind(saved: str, current: str) -> None:
    """Raise CheckpointError if the order of a run is of another kind of data than a loader's."""
    (kind, _), (own_kind, _) = _kind_of(saved), _kind_of(current)
    if kind != own_kind:
        raise CheckpointError(
            f"data position: the run has {kind}, and the loader {own_kind}: give the data of the "
            "run, or begin with this one by skip=['data'], or start a new run from its weights"
        )


def _check_order(saved: str, current: str) -> None:
    """Raise CheckpointError if the order of a run differs from a loader's, of the same kind."""
    if saved == current:
        return
    shuffles = [IDENTITY_NAME not in name.replace(",", "").split() for name in (saved, current)]
    if shuffles[0] != shuffles[1]:
        raise CheckpointError(
            f"data position: the run has shuffle={shuffles[0]}, here it is {shuffles[1]}: give "
            f"shuffle={shuffles[0]}"
        )
    way_out = f"give the run's {_kind_of(current)[1]}, or start a new run from its weights"
    if saved.split()[0] != current.split()[0]:
        way_out = "use the anyrank version that wrote it, or a newer one"
    raise CheckpointError(
        f"data position: the run has the order {saved!r}, here it is {current!r}: {way_out}"
    )


def _kind_of(name: str) -> tuple[str, str]:
    return KINDS.get(name.partition("-v")[0], PLAIN)
