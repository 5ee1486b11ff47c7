"""How a saved tensor lies that nothing holds yet: like the parameter that it is of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from anyrank.models.tensors import ModelTensor
from anyrank.tensors.torch_classes import is_dtensor


class LikeParameters:
    """The sharded parameters of a state, by which parts of it are laid out that are empty now: an
    average that begins later has tensors of its parameters' shapes.

    Args:
        targets: tensors of the state's modules.
    """

    def __init__(self, targets: Iterable[ModelTensor]) -> None:
        self._sharded = [target for target in targets if is_dtensor(target.tensor)]

    def __bool__(self) -> bool:
        return bool(self._sharded)

    def find(self, where: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """A parameter that lies as a tensor does; None where nothing says which.

        Args:
            where: the tensor's key, which may end with the parameter's name.
            shape: of the tensor.
        """
        alike = [target for target in self._sharded if tuple(target.shape) == tuple(shape)]
        named = [target for target in alike if f".{where}".endswith(f".{target.name}")]
        tensors: list[Any] = [target.tensor for target in named or alike]
        layouts = {(tensor.device_mesh, tensor.placements) for tensor in tensors}
        return tensors[0].detach() if len(layouts) == 1 else None
