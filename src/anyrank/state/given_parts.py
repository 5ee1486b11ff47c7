"""`TrainState(layout=)`: plain tensors that are parts, found when a run is opened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from anyrank.errors import CheckpointError, LoadError
from anyrank.model.given_layouts import GivenLayout, RankMesh, apply_layout, warn_of_unused
from anyrank.model.tensors import ModelTensor
from anyrank.state.modules import in_part
from anyrank.steps.loader import ElasticLoader
from anyrank.tensors.layout import local_pieces
from anyrank.world.ranks import Ranks

Modules = Mapping[str, Sequence[ModelTensor]]


class GivenParts:
    """Which tensors of a state are parts, and of what.

    Args:
        layout: as it was given; may be None on some ranks.
    """

    def __init__(self, layout: GivenLayout) -> None:
        self.layout = layout
        self._known: dict[str, ModelTensor] = {}

    def read(self, find: Callable[[], Modules], data: object, ranks: Ranks) -> None:
        """Find the parts; by this rank alone, as each save and resume compares what all ranks hold.

        Args:
            find: the tensors of each module.
            data: of the state; a loader that averages gradients must not do so among parts.
            ranks: that save and resume together.

        Raises:
            CheckpointError: parts that are not those of the layout, or whose gradients would be
                averaged.
        """
        self._known = {}
        if self.layout is None:
            return
        try:
            tensors = [
                in_part(part, tensor) for part, members in find().items() for tensor in members
            ]
            meshes = apply_layout(tensors, self.layout, ranks)
        except LoadError as error:
            raise CheckpointError(str(error)) from error
        warn_of_unused(self.layout, tensors)
        parts = [(tensors[index], mesh) for index, mesh in meshes.items()]
        _check_data(parts, data)
        self._known = {target.name: target for target, _ in parts}

    def apply(self, modules: Modules) -> None:
        """Say of each part what it is a part of.

        Args:
            modules: the tensors of each module; changed in place.

        Raises:
            CheckpointError: a tensor has another shape than when `layout=` was read.
        """
        for part, tensors in modules.items():
            for tensor in tensors:
                known = self._known.get(f"{part}.{tensor.name}")
                if known is None or tensor.layout is not None:
                    continue
                now, before = list(tensor.tensor.shape), list(known.tensor.shape)
                if now != before:
                    raise CheckpointError(
                        f"{known.name}: is {now} here, and was {before} when its layout= was read: "
                        "open the run after the model has its shapes"
                    )
                tensor.layout, tensor.coordinate = known.layout, known.coordinate
                tensor.shape = known.shape


def _check_data(parts: Iterable[tuple[ModelTensor, RankMesh]], data: object) -> None:
    """Refuse a loader that would average the gradients of different parts, or sum them exactly.

    Raises:
        CheckpointError: names the tensor and the ranks.
    """
    if not isinstance(data, ElasticLoader):
        return
    averaged = data.position.data_ranks()
    for target, mesh in parts:
        if not target.tensor.requires_grad:
            continue
        others = [
            rank
            for rank in mesh.ranks
            if local_pieces(target.shape, target.layout, mesh.coordinate(rank)) != target.pieces
        ]
        shared = [rank for rank in others if rank in averaged]
        if shared:
            raise CheckpointError(
                f"{target.name}: rank {shared[0]} holds another part of it by layout=, and the "
                "loader would average the gradients of both: give it the data-parallel "
                "process_group, whose ranks hold the same parts"
            )
        if others and data.position.exact:
            raise CheckpointError(
                f"exact=True: {target.name} is sharded over ranks {list(mesh.ranks)} by layout=: "
                "tensor parallelism adds up in an order of its own; use FSDP2 or DDP over the "
                "ranks of the data"
            )
