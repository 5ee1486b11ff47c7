"""The layout of a saved tensor that does not exist yet: that of the parameter it belongs to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from anyrank.models.tensors import ModelTensor
from anyrank.tensors.torch_classes import is_dtensor


class LikeParameters:
    """The sharded parameters of a state, as layouts for parts of it that are empty now: an average
    that starts later has tensors of its parameters' shapes.

    Args:
        targets: tensors of the state's modules.
    """

    def __init__(self, targets: Iterable[ModelTensor]) -> None:
        self._sharded = [target for target in targets if is_dtensor(target.tensor)]

    def __bool__(self) -> bool:
        return bool(self._sharded)

    def find(self, where: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Find a parameter with the layout of a tensor; return None if there is not exactly one.

        Args:
            where: key of the tensor, which may end with the parameter's name.
            shape: shape of the tensor.
        """
        alike = [target for target in self._sharded if tuple(target.shape) == tuple(shape)]
        named = [target for target in alike if f".{where}".endswith(f".{target.name}")]
        tensors: list[Any] = [target.tensor for target in named or alike]
        layouts = {(tensor.device_mesh, tensor.placements) for tensor in tensors}
        return tensors[0].detach() if len(layouts) == 1 else None
