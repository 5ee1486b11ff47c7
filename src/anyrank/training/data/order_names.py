"""The names of orders in checkpoints, and what differs between two of them, for an error."""

from __future__ import annotations

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


def check_kind(saved: str, own: str) -> None:
    """Raise CheckpointError if the order of a run is of another kind of data than a loader's."""
    (kind, _), (own_kind, _) = _kind_of(saved), _kind_of(own)
    if kind != own_kind:
        raise CheckpointError(
            f"data position: the run has {kind}, and the loader {own_kind}: give the data of the "
            "run, or begin with this one by skip=['data'], or start a new run from its weights"
        )


def check_order(saved: str, own: str) -> None:
    """Raise CheckpointError if the order of a run differs from a loader's, of the same kind."""
    if saved == own:
        return
    shuffles = [IDENTITY_NAME not in name.replace(",", "").split() for name in (saved, own)]
    if shuffles[0] != shuffles[1]:
        raise CheckpointError(
            f"data position: the run has shuffle={shuffles[0]}, here it is {shuffles[1]}: give "
            f"shuffle={shuffles[0]}"
        )
    way_out = f"give the run's {_kind_of(own)[1]}, or start a new run from its weights"
    if saved.split()[0] != own.split()[0]:
        way_out = "use the anyrank version that wrote it, or a newer one"
    raise CheckpointError(
        f"data position: the run has the order {saved!r}, here it is {own!r}: {way_out}"
    )


def _kind_of(name: str) -> tuple[str, str]:
    return KINDS.get(name.partition("-v")[0], PLAIN)
