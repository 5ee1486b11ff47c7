"""The frozen base of a model whose adapters are trained: recorded in a run, but not written.

A run records the base's source and a digest of its values, which does not depend on their layout on
the ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from anyrank.checks import check_path, check_type
from anyrank.errors import CheckpointError
from anyrank.models.alike import (
    TENSORS,
    Inventory,
    differing_replicas,
    find_coordinates,
    inventory_of,
)
from anyrank.models.tensors import ModelTensor
from anyrank.runs.state.box_digest import MODULUS, digest_of_box
from anyrank.tensors.sharded_tensor import Coordinates, replicas, shared, version_of
from anyrank.world.alike import join_digests
from anyrank.world.arguments import compare_arguments
from anyrank.world.ranks import Ranks


class Base:
    """The parameters of a model that need no gradient, and are in no optimizer and no adapter.

    Attributes:
        source: paths or URLs from which they are loaded.
        digest: digest of their names, shapes, dtypes and values; None before `measure`.
    """

    def __init__(self, source: Any) -> None:
        paths = [source] if isinstance(source, str | os.PathLike) else source
        check_type("base", paths, Sequence, "a path, a URL or a list of them")
        if not paths:
            raise ValueError(f"base={source!r}: must be a path, a URL or a list of them")
        self.source = [check_path("base", path) for path in paths]
        self.digest: str | None = None
        self._writes: dict[str, int] = {}

    def without(
        self, targets: Sequence[ModelTensor], trained: Collection[int]
    ) -> list[ModelTensor]:
        """Return the tensors that a run writes.

        Args:
            targets: all tensors of the model.
            trained: ids of the parameters that optimizers hold.
        """
        return [target for target in targets if not _is_of_base(target, trained)]

    def measure(
        self, targets: Sequence[ModelTensor], trained: Collection[int], ranks: Ranks
    ) -> None:
        """Compute the digest, unless the values have not changed since the last one. Collective.

        Raises:
            CheckpointError: the base is on meta; replicas of it differ; on every rank.
        """
        compare_arguments(ranks, "TrainState", {"base": self.source}, CheckpointError)
        base_tensors = [target for target in targets if _is_of_base(target, trained)]

        def is_known() -> bool:
            on_meta = [target.name for target in base_tensors if target.is_meta]
            if on_meta:
                raise CheckpointError(
                    f"{on_meta[0]}: the base is on the meta device. Call anyrank.load(model, "
                    f"{self.source[0]!r}) before the run is resumed or saved."
                )
            return self.digest is not None and self._writes == _writes(base_tensors)

        _, (is_measured, inventory) = ranks.run_and_reduce(
            "looking at the base",
            lambda: (None, (is_known(), inventory_of(base_tensors, ranks))),
            lambda some, others: (some[0] and others[0], join_digests(some[1], others[1])),
        )
        if not is_measured:
            coordinates = find_coordinates(base_tensors, inventory, ranks)
            self.digest = _measure(base_tensors, inventory, coordinates, ranks)
            self._writes = _writes(base_tensors)

    def record(self, targets: Sequence[ModelTensor], trained: Collection[int]) -> dict[str, Any]:
        """Return the record of the base that a save keeps.

        Raises:
            CheckpointError: the base was modified since it was measured.
        """
        now = _writes([target for target in targets if _is_of_base(target, trained)])
        names = now.keys() | self._writes.keys()
        wrong = sorted(name for name in names if now.get(name) != self._writes.get(name))
        if wrong:
            raise CheckpointError(
                f"model.{wrong[0]}: belongs to the frozen base {self.source[0]}, but was modified "
                "or frozen after the run started. A base must not change. Load and freeze it "
                "before the first call of Checkpoints, or remove base= to save it with the run."
            )
        return {"source": self.source, "digest": self.digest}


def base_problems(base: Base | None, record: Any) -> list[str]:
    """Describe the differences between the base of a saved model and the current one."""
    known = record.get("base")
    if known is None and base is None:
        return []
    if known is None:
        return ["model: its base was saved with the run. Remove TrainState(base=...)."]
    if base is None:
        return [
            f"model: its base {', '.join(known['source'])} is not in the checkpoint. Load it, "
            "freeze its parameters, and pass that source as TrainState(base=...)."
        ]
    if known["digest"] != base.digest:
        return [
            f"model: the frozen base has different values ({base.digest}) than in the run "
            f"({known['digest']}, from {', '.join(known['source'])}). Load the run's base."
        ]
    return []


def _is_of_base(target: ModelTensor, trained: Collection[int]) -> bool:
    tensor = target.tensor
    free = target.kind == "parameter" and not tensor.requires_grad and not target.adapter
    return free and target.frozen is None and id(tensor) not in trained


def _writes(base_tensors: Sequence[ModelTensor]) -> dict[str, int]:
    return {target.name: version_of(target.tensor) for target in base_tensors}


def _measure(
    base_tensors: Sequence[ModelTensor],
    inventory: Inventory,
    coordinates: Mapping[int, Coordinates],
    ranks: Ranks,
) -> str:
    """Return one digest of all ranks' values, each element counted once. Collective.

    Raises:
        CheckpointError: ranks hold different parameters, or different values of the same part.
    """
    if ranks.size > 1 and not inventory[TENSORS].digest:
        raise CheckpointError(
            "model: the ranks have different frozen parameters. Freeze the same ones on every rank."
        )
    digests = ranks.run("comparing the base", lambda: _digests(base_tensors))
    by_name = {t.name: row for t, row in zip(base_tensors, digests, strict=True)}
    wrong = differing_replicas(
        shared(base_tensors, coordinates),
        ranks,
        lambda tensors: [str(by_name[t.name]) for t in tensors],
    )
    if wrong:
        raise CheckpointError(
            f"model.{next(iter(wrong))}: the frozen base differs between the ranks. Load the same "
            "base on every rank."
        )
    own_totals = [0] * len(base_tensors)
    for index, tensor in enumerate(base_tensors):
        groups = replicas(index, tensor, coordinates).values()
        if any(members[0] == ranks.rank for members in groups):
            own_totals[index] = sum(digests[index]) % MODULUS
    totals = ranks.reduce("comparing the base", own_totals, _add_all)
    described = [[t.name, list(t.shape), str(t.dtype)] for t in base_tensors]
    text = json.dumps([described, totals])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _add_all(totals: list[int], others: list[int]) -> list[int]:
    return [(total + other) % MODULUS for total, other in zip(totals, others, strict=True)]


def _digests(base_tensors: Sequence[ModelTensor]) -> list[list[int]]:
    """Return, for each tensor, the digests of the pieces that this rank holds."""
    rows: list[list[int]] = []
    for number, target in enumerate(base_tensors):
        local = target.local()
        rows.append(
            [
                digest_of_box(local[piece.local_slices()], piece.box, target.shape, number)
                for piece in target.pieces
            ]
        )
    return rows
