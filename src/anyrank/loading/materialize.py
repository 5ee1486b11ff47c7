"""`anyrank.materialize`: initial values for a model on meta, the same for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from anyrank.checks import check_choice, check_model
from anyrank.errors import LoadError
from anyrank.loading.fill import Side, fill
from anyrank.loading.report import LoadReport
from anyrank.models.dialects.dialect import ModelMatch, match_of_rules
from anyrank.models.first_values.initialize import Initializer
from anyrank.models.first_values.parametrized import parametrized
from anyrank.models.memory_meter import Meter
from anyrank.models.overlaps import shared_on_meta
from anyrank.models.share import ModelShare
from anyrank.models.tensors import ModelTensor, find_tensors
from anyrank.world.arguments import compare_and_reduce
from anyrank.world.group import Group
from anyrank.world.ranks import open_ranks


def materialize(
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    init: Literal["auto"] | Callable[[nn.Module], object] = "auto",
    process_group: Group = None,
) -> LoadReport:
    """Give every tensor on the meta device its initial values; real tensors are unchanged.

    Collective: every rank of the group must call it. Values depend only on the first rank's torch
    seed and on the tensors' names. So a model that is sharded over any number of ranks starts with
    values that are bit-identical to those on one rank, on the same kind of device. A rank holds its
    share and one whole tensor at a time.

    Example::

        with anyrank.meta():
            model = torch.nn.Linear(8, 8)
        torch.manual_seed(0)
        report = anyrank.materialize(model, device="cpu")
        assert report.initialised["weight"] == "Linear.reset_parameters"

    Args:
        model: plain or sharded (FSDP2, tensor parallel).
        device: the device for plain tensors. Default: the device of the model's real parameters,
            else the rank's own device. Sharded tensors go where their mesh and offload policy say.
        init: "auto" uses the model's own rules (`_init_weights`, `reset_parameters`,
            `init_weights`); a callable is called with each module that owns a tensor to fill.
        process_group: the ranks that take part, or `anyrank.ALONE` for only this process.
            Default: all ranks, or only this process if no group is initialized.

    Returns:
        A report whose `initialised` and `rebuilt` name each tensor and its rule; the same on every
        rank.

    Raises:
        LoadError: tensors that no rule fills (named), tensors of a frozen part that has a source,
            or arguments that differ between ranks; on every rank, and nothing is changed.
        ValueError, TypeError: an argument that is wrong in itself; on every rank.
    """
    meter = Meter()

    def check() -> None:
        check_model(model)
        if not callable(init):
            check_choice("init", init, ("auto",))
        if device is not None:
            _device_of(device)

    with (
        torch.inference_mode(False),
        open_ranks(process_group, "materialize()", may_be_alone=True) as ranks,
    ):
        arguments = {"init": init}
        seed = compare_and_reduce(  # the first rank's
            ranks,
            "materialize",
            arguments,
            LoadError,
            check,
            torch.initial_seed,
            lambda first, _: first,
        )

        def make_share() -> ModelShare:
            match = _match(find_tensors(model))
            where = None if device is None else _device_of(device)
            rule = None if init == "auto" else init
            return ModelShare(match, meter, Initializer(model, seed, rule), device=where)

        share = ranks.run("finding the tensors to fill", make_share)
        result = fill(share, Side(), ranks, rebuild=True)
    return LoadReport(
        **result.fields(),
        format="initial values",
        strategy="own",
        reason="each rank computes its own share",
        tensors=len(result.rules),
        bytes_read=[moved.read for moved in result.moved],
    )


def _match(tensors: list[ModelTensor]) -> ModelMatch:
    """Match all tensors on meta with rules that fill them.

    Raises:
        LoadError: a tensor whose values are in a file, or that no rule fills.
    """
    on_meta = [i for i, t in enumerate(tensors) if t.is_meta and t.kind != "derived"]
    for index in on_meta:
        _check_no_source(tensors[index])
    problems = shared_on_meta(tensors) + parametrized(tensors[index] for index in on_meta)
    if problems:
        raise LoadError("\n".join(problems))
    return match_of_rules(tensors, on_meta)


def _check_no_source(tensor: ModelTensor) -> None:
    """Raise LoadError if the tensor belongs to a frozen part whose values are in a file."""
    part: Any = tensor.frozen
    if part is not None and part.anyrank_frozen.source is not None:
        raise LoadError(
            f"{tensor.name}: belongs to a frozen part whose weights are in "
            f"{part.anyrank_frozen.source}, so it must not be initialized. First load the part: "
            f"anyrank.load(part, {part.anyrank_frozen.source!r})"
        )


def _device_of(device: torch.device | str) -> torch.device:
    value: Any = device  # of any type
    if isinstance(value, bool) or not isinstance(value, (torch.device, str, int)):
        raise TypeError(
            f"device={value!r}: expected a torch.device or its name, got {type(value).__name__}"
        )
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r}: {str(error).splitlines()[0]}") from error
