"""The frozen base of a model whose adapters are trained: recorded in a run, and not written.

Of the base a run keeps the source and a digest of the values, which does not depend on how they lie
on the ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Sequence
from typing import Any

from anyrank.checks import check_path, check_type
from anyrank.errors import CheckpointError
from anyrank.models.tensors import ModelTensor
from anyrank.runs.state.box_digest import digest_of_box
from anyrank.tensors.sharded_tensor import version_of
from anyrank.world.arguments import compare_arguments
from anyrank.world.ranks import Ranks


class Base:
    """The parameters of a model that need no gradient, and are in no optimizer and no adapter.

    Attributes:
        source: paths or URLs that they come from.
        digest: of their names, shapes, dtypes and values; None before `measure`.
    """

    def __init__(self, source: Any) -> None:
        paths = [source] if isinstance(source, str | os.PathLike) else source
        check_type("base", paths, Sequence, "a path, a URL or a list of them")
        if not paths:
            raise ValueError(f"base={source!r}: give a path, a URL or a list of them")
        self.source = [check_path("base", path) for path in paths]
        self.digest: str | None = None
        self._writes: dict[str, int] = {}

    def without(
        self, targets: Sequence[ModelTensor], trained: Collection[int]
    ) -> list[ModelTensor]:
        """The tensors that a run writes.

        Args:
            targets: all of the model's.
            trained: ids of the parameters that optimizers hold.
        """
        return [target for target in targets if not _is_of_base(target, trained)]

    def measure(
        self, targets: Sequence[ModelTensor], trained: Collection[int], ranks: Ranks
    ) -> None:
        """Compute the digest, unless the values are those of the last one. All ranks.

        Raises:
            CheckpointError: the base is on meta; replicas of it differ; on all ranks.
        """
        compare_arguments(ranks, "TrainState", {"base": self.source}, CheckpointError)
        base_tensors = [target for target in targets if _is_of_base(target, trained)]

        def is_known() -> bool:
            on_meta = [target.name for target in base_tensors if target.is_meta]
            if on_meta:
                raise CheckpointError(
                    f"{on_meta[0]}: the base is on meta: anyrank.load(model, "
                    f"{self.source[0]!r}) before the run is resumed or saved"
                )
            return self.digest is not None and self._writes == _writes(base_tensors)

        if not all(ranks.together("looking at the base", is_known)):
            described = [[t.name, list(t.shape), str(t.dtype)] for t in base_tensors]
            rows = ranks.together("comparing the base", lambda: (described, _digests(base_tensors)))
            self.digest, self._writes = _joined(rows), _writes(base_tensors)

    def record(self, targets: Sequence[ModelTensor], trained: Collection[int]) -> dict[str, Any]:
        """What a save keeps of the base.

        Raises:
            CheckpointError: it was written to since it was measured.
        """
        now = _writes([target for target in targets if _is_of_base(target, trained)])
        names = now.keys() | self._writes.keys()
        wrong = sorted(name for name in names if now.get(name) != self._writes.get(name))
        if wrong:
            raise CheckpointError(
                f"model.{wrong[0]}: belongs to the base {self.source[0]}, and was written to or "
                "frozen since the run began: a base stays as it is; load it before Checkpoints is "
                "used, or leave base= out to save it with the run"
            )
        return {"source": self.source, "digest": self.digest}


def base_problems(base: Base | None, record: Any) -> list[str]:
    """How the base of a saved model and the one that is here differ."""
    known = record.get("base")
    if known is None and base is None:
        return []
    if known is None:
        return ["model: its base was saved with the run: leave out TrainState(base=...)"]
    if base is None:
        return [
            f"model: its base {', '.join(known['source'])} is not in the checkpoint: load it, "
            "freeze its parameters, and give TrainState(base=...) that source"
        ]
    if known["digest"] != base.digest:
        return [
            f"model: the frozen base has other values ({base.digest}) than in the run "
            f"({known['digest']}, from {', '.join(known['source'])}): load the run's own base"
        ]
    return []


def _is_of_base(target: ModelTensor, trained: Collection[int]) -> bool:
    tensor = target.tensor
    free = target.kind == "parameter" and not tensor.requires_grad and not target.adapter
    return free and target.frozen is None and id(tensor) not in trained


def _writes(base_tensors: Sequence[ModelTensor]) -> dict[str, int]:
    return {target.name: version_of(target.tensor) for target in base_tensors}


def _digests(base_tensors: Sequence[ModelTensor]) -> list[list[Any]]:
    """Of each piece that this rank holds: number of its tensor, box, digest."""
    rows: list[list[Any]] = []
    for number, target in enumerate(base_tensors):
        local = target.local()
        for piece in target.pieces:
            where = [list(piece.box.offsets), list(piece.box.sizes)]
            digest = digest_of_box(local[piece.local_slices()], piece.box, target.shape, number)
            rows.append([number, *where, digest])
    return rows


def _joined(answers: Sequence[tuple[list[Any], list[Any]]]) -> str:
    """One digest of what all ranks hold, each element counted once.

    Raises:
        CheckpointError: two ranks hold different values of the same part.
    """
    described = answers[0][0]
    totals, digests = [0] * len(described), dict[str, int]()
    for others, rows in answers:
        if others != described:
            raise CheckpointError(
                "model: the ranks have different frozen parameters: freeze the same on all of them"
            )
        for number, offsets, sizes, digest in rows:
            piece = f"{number} {offsets} {sizes}"
            if piece not in digests:
                digests[piece] = digest
                totals[number] = (totals[number] + digest) % (1 << 64)
            elif digests[piece] != digest:
                raise CheckpointError(
                    f"model.{described[number][0]}: the frozen base differs between the ranks: "
                    "load the same on all of them"
                )
    text = json.dumps([described, totals])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
