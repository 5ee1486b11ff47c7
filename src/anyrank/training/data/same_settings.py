"""The settings of a loader that must be the same at a resume, and errors about differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anyrank.errors import CheckpointError
from anyrank.training.data.order import IDENTITY_NAME

# The first word of a name, up to its version -> the kind of data, and the arguments on which the
# rest
# of the name depends on.
KINDS = {
    "lanes": ("a stream", "window=, transform=, endless=, until= and names in mix="),
    "shards": ("shards with lengths=", "shards and lengths="),
    "buckets": ("a dataset with keys=", "keys="),
    "weighted": ("a dataset with weights=", "weights="),
}
PLAIN = ("a dataset", "shuffle=")
TITLES = {"version": "format version", "n": "a dataset of length", "key": "dataset key"}
WAYS = {
    "version": "Use the anyrank version that wrote it, or a newer one.",
    "n": "Pass the dataset of the saved run; or restart the data with skip=['data']; or start a "
    "new run from the weights.",
}


def compare_settings(
    saved: Mapping[str, Any], current: Mapping[str, Any], names: Sequence[str]
) -> None:
    """Compare the settings in the states of a run and of a loader.

    Args:
        saved, current: states of the run and of the loader.
        names: entries, besides "order", that must agree.

    Raises:
        CheckpointError: one of them differs.
    """
    _check_kind(saved["order"], current["order"])
    for name in names:
        if saved[name] != current[name]:
            way_out = WAYS.get(name, f"Set {name}={saved[name]!r}.")
            raise CheckpointError(
                f"ElasticLoader: the saved run has {TITLES.get(name, name)} {saved[name]!r}, but "
                f"this loader has {current[name]!r}. {way_out}"
            )
    _check_order(saved["order"], current["order"])


def _check_kind(saved: str, current: str) -> None:
    """Raise CheckpointError if a run and a loader have different kinds of data."""
    (kind, _), (own_kind, _) = _kind_of(saved), _kind_of(current)
    if kind != own_kind:
        raise CheckpointError(
            f"ElasticLoader: the saved run has {kind}, but this loader has {own_kind}. Pass the "
            "data of the saved run; or restart the data with skip=['data']; or start a new run "
            "from the weights."
        )


def _check_order(saved: str, current: str) -> None:
    """Raise CheckpointError if a run and a loader of the same kind have different orders."""
    if saved == current:
        return
    shuffles = [IDENTITY_NAME not in name.replace(",", "").split() for name in (saved, current)]
    if shuffles[0] != shuffles[1]:
        raise CheckpointError(
            f"ElasticLoader: the saved run has shuffle={shuffles[0]}, but this loader has "
            f"shuffle={shuffles[1]}. Set shuffle={shuffles[0]}."
        )
    way_out = f"Pass the saved run's {_kind_of(current)[1]}, or start a new run from the weights."
    if saved.split()[0] != current.split()[0]:
        way_out = "Use the anyrank version that wrote it, or a newer one."
    raise CheckpointError(
        f"ElasticLoader: the saved run has the order {saved!r}, but this loader has {current!r}. "
        f"{way_out}"
    )


def _kind_of(name: str) -> tuple[str, str]:
    return KINDS.get(name.partition("-v")[0], PLAIN)
