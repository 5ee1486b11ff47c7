"""A trial of the optimizer: does an element get the same bits wherever it stands in a shard?

Kernels may round the elements at the end of a tensor in another way (fused ones do), and optimizers
may look over a whole shard (norms, rows, blocks). On another number of ranks FSDP2's shards end
elsewhere. A small tensor and its pieces tell, whatever the optimizer.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from anyrank.exact.delivered import name_of
from anyrank.random_state.streams import seeded

log = logging.getLogger("anyrank.exact")

NUM_STEPS = 3
CUTS = (2, 3, 5)  # pieces
SIZE = 128  # of the dimensions that are not cut: any vector's width divides it
# Optimizers that factor or quantise their state leave small tensors alone: those with dimensions
# below 128, or of fewer than 4096 elements. The whole has more, its pieces may not.
MANY = 4096


@contextmanager
def optimizers_tried(
    tried: WeakSet[torch.optim.Optimizer], notes: list[str]
) -> Generator[None, None, None]:
    """Try each optimizer that steps sharded parameters before its first step in the block.

    Args:
        tried: those that need no further trial; the others are added.
        notes: gets a sentence for each one that cannot be tried.

    Raises:
        ValueError: from the optimizer's step, before it changes anything.
    """

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer in tried:
            return
        for group in optimizer.param_groups:
            for parameter in _one_of_each(group["params"]):
                try:
                    refusal = _refusal_of(optimizer, group, parameter)
                except Exception as error:
                    notes.append(
                        f"exact=True: a trial of {type(optimizer).__name__} failed, so whether its "
                        f"bits depend on the ranks is not known: {type(error).__name__}: {error}"
                    )
                    log.warning("%s", notes[-1])
                    break
                if refusal is not None:
                    raise ValueError(f"exact=True: {type(optimizer).__name__}{refusal}")
        tried.add(optimizer)

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        yield
    finally:
        handle.remove()


def _one_of_each(parameters: Sequence[Any]) -> Iterator[DTensor]:
    """The sharded ones among parameters, one for each kind of trial."""
    found: set[Any] = set()
    for parameter in parameters:
        if isinstance(parameter, DTensor) and any(map(is_shard, parameter.placements)):
            where = parameter.dtype, parameter.device, _cut_dim(parameter)
            kind = (*where, *_trial_shape(parameter))
            if kind not in found:
                found.add(kind)
                yield parameter


def is_shard(placement: object) -> bool:
    return isinstance(placement, Shard)


def _cut_dim(parameter: DTensor) -> int:
    """The dimension along which a parameter is sharded."""
    return next(place.dim for place in parameter.placements if isinstance(place, Shard))


def _trial_shape(parameter: DTensor) -> list[int]:
    """A shape like that of a parameter, of few but not too few elements."""
    shape = [size if size <= 2 * SIZE else SIZE + size % SIZE for size in parameter.shape]
    shape[_cut_dim(parameter)] = 1
    num_others = max(1, torch.Size(shape).numel())
    shape[_cut_dim(parameter)] = 5 + max(SIZE, MANY // num_others)
    return shape


def _treats_elements_alone(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: DTensor, dtype: torch.dtype
) -> bool:
    """Whether an optimizer gives the pieces of a tensor the bits of the whole tensor.

    Args:
        optimizer: of the class that is tried.
        group: its options.
        like: a parameter of the group.
        dtype: of the trial's tensors.
    """
    generator = torch.Generator().manual_seed(0)
    dim, shape = _cut_dim(like), _trial_shape(like)
    drawn = torch.complex64 if dtype.is_complex else torch.float32
    terms = [
        torch.randn(shape, generator=generator, dtype=drawn).to(like.device, dtype)
        for _ in range(1 + NUM_STEPS)
    ]

    def train(num_pieces: int) -> list[torch.Tensor]:
        # Reversed: random numbers that an optimizer draws for them are not those of the whole.
        pieces = [list(reversed(term.chunk(num_pieces, dim))) for term in terms]
        parameters = [nn.Parameter(piece.clone()) for piece in pieces[0]]
        trial = _of_same_kind(optimizer, group, parameters)
        with seeded(0, [like.device] if like.device.type != "cpu" else []):
            for gradients in pieces[1:]:
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient.clone()
                trial.step()
        rows = [[parameter, *_state_like(trial, parameter)] for parameter in parameters]
        return [torch.cat(row[::-1], dim).detach() for row in zip(*rows, strict=True)]

    whole = train(1)
    return all(
        torch.equal(one, other)
        for number in CUTS
        for one, other in zip(whole, train(number), strict=True)
    )


def _of_same_kind(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """An optimizer of the same class and options for other parameters."""
    kind: Any = type(optimizer)
    accepted = inspect.signature(kind).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    options: dict[str, Any] = {**group, "params": parameters}
    if not options.get("lr", 1):
        options["lr"] = options["lr"] + 1e-3  # a warm-up begins with 0, which shows nothing
    return kind([options], **defaults)


def _state_like(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[torch.Tensor]:
    """The state that an optimizer has for each element of a parameter."""
    state = optimizer.state[parameter]
    return [
        state[name]
        for name in sorted(state)
        if isinstance(state[name], torch.Tensor) and state[name].shape == parameter.shape
    ]


class _ViewsAsReal(TorchFunctionMode):
    """Finds out whether torch.view_as_real is called."""

    def __init__(self) -> None:
        super().__init__()
        self.is_called = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        self.is_called |= func is torch.view_as_real
        return func(*args, **(kwargs or {}))


def _refusal_of(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: DTensor
) -> str | None:
    """Why an optimizer cannot step a sharded parameter, and the way out; None if it can.

    Args:
        optimizer: the sentence goes on after its name.
        group: the parameter's.
        parameter: stands for all of its kind in the group.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return (
            " steps sharded parameters, and its dot products run over the whole model, of which "
            "each rank has a part: use DistributedDataParallel, or another optimizer"
        )
    dtype = parameter.dtype
    with _ViewsAsReal() as views:
        is_same = _treats_elements_alone(optimizer, group, parameter, dtype)
    if views.is_called:
        return (
            f" steps {name_of(parameter)}, a sharded parameter of {dtype}, by torch.view_as_real, "
            "which gives a copy of it on several ranks, so that the step is lost: make it a "
            "parameter of real numbers with a last dimension of 2, and call torch.view_as_complex "
            "in the forward; or use SGD, or DistributedDataParallel"
        )
    if is_same:
        return None
    if group.get("fused"):
        return (
            "(fused=True) steps sharded parameters, and its kernel rounds the elements at the end "
            "of a shard in another way: build it with foreach=True or foreach=False"
        )
    if dtype.itemsize == 2 and _treats_elements_alone(optimizer, group, parameter, torch.float32):
        return (
            f" gives an element of {dtype} other bits where its shard ends elsewhere, as shards "
            f"do on another number of ranks, and one of float32 the same ({name_of(parameter)}): "
            "keep sharded parameters in float32, with fully_shard(..., "
            f"mp_policy=MixedPrecisionPolicy(param_dtype={dtype}, reduce_dtype=torch.float32)), or "
            "use DistributedDataParallel"
        )
    return (
        " gives an element other bits where its shard ends elsewhere, as shards do on another "
        "number of ranks: use an optimizer that treats each element by itself, or "
        "DistributedDataParallel"
    )
