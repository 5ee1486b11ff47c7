"""`anyrank.materialize`: initial values for a model on meta, the same for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from anyrank.checks import check_choice, check_model
from anyrank.errors import LoadError
from anyrank.filling.report import LoadReport
from anyrank.model.allocate import allocate, default_device, device_for
from anyrank.model.buffers import rebuilt_values
from anyrank.model.fits import parametrised, shared_on_meta
from anyrank.model.initialise import Initialiser
from anyrank.model.memory_meter import Meter
from anyrank.model.replace import Replacement, replace
from anyrank.model.tensors import ModelTensor, find_tensors
from anyrank.world.arguments import same_arguments
from anyrank.world.group import Group
from anyrank.world.ranks import open_ranks


def materialize(
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    init: Literal["auto"] | Callable[[nn.Module], object] = "auto",
    process_group: Group = None,
) -> LoadReport:
    """Give every tensor on meta its initial values; what is real already stays as it is.

    Every rank of the group calls it. Values depend on the first rank's torch seed and on the
    tensors' names alone, so a model that is sharded over any number of ranks starts with the same
    ones, bit by bit on the same kind of device, as on one rank. A rank holds its share and one
    whole tensor at a time.

    Example::

        with anyrank.meta():
            model = torch.nn.Linear(8, 8)
        torch.manual_seed(0)
        report = anyrank.materialize(model, device="cpu")
        assert report.initialised["weight"] == "Linear.reset_parameters"

    Args:
        model: plain or sharded (FSDP2, tensor parallel), before or after.
        device: where plain tensors go. Default: to the model's real parameters, else to the rank's
            own device. Sharded tensors go where their mesh and offload policy say.
        init: "auto" takes the model's own rules (`_init_weights`, `reset_parameters`,
            `init_weights`); a callable is called with each module that owns a tensor to fill.
        process_group: the ranks that take part, or `anyrank.ALONE` for this process by itself.
            Default: all, or this process alone where no group is initialised.

    Returns:
        A report whose `initialised` and `rebuilt` name each tensor and its rule; equal on all
        ranks.

    Raises:
        LoadError: tensors that no rule writes, named, or of a frozen part that has a source, or
            arguments that differ between ranks; on all ranks, and nothing is changed.
        ValueError, TypeError: an argument that is wrong in itself; on all ranks.
    """
    meter = Meter()

    def check() -> None:
        check_model(model)
        if not callable(init):
            check_choice("init", init, ("auto",))
        if device is not None:
            _device_of(device)

    with torch.inference_mode(False), open_ranks(process_group, "materialize()") as ranks:
        given = {"init": init}
        seed, *_ = same_arguments(ranks, "materialize", given, LoadError, check, torch.initial_seed)

        def look() -> tuple[list[ModelTensor], torch.device]:
            tensors = find_tensors(model)
            return tensors, default_device(tensors) if device is None else _device_of(device)

        tensors, default = ranks.own("looking at the model", look)
        meter.watch({default, *(tensor.tensor.device for tensor in tensors)})
        initialiser = Initialiser(model, seed, None if init == "auto" else init)
        filled = ranks.own("initialising", lambda: _fill(tensors, initialiser, default, meter))
        rebuilt, replacements = rebuilt_values(tensors, ranks, initialiser, default)
        replacements += [Replacement(tensor, local) for tensor, local in filled.locals_]
        renewed = ranks.together("putting the values in place", lambda: replace(replacements))
        rules = filled.rules
        peaks = ranks.gather((*meter.peaks(), meter.seconds()))
    host, device_peaks, seconds = zip(*peaks, strict=True)
    return LoadReport(
        initialised=rules,
        rebuilt=rebuilt,
        renewed=sorted({name for names in renewed for name in names}),
        format="initial values",
        strategy="own",
        reason="each rank computes its own share",
        tensors=len(rules),
        peak_host_bytes=list(host),
        peak_device_bytes=list(device_peaks),
        bytes_read=[0] * len(host),
        bytes_sent=[0] * len(host),
        seconds=max(seconds),
    )


@dataclass(frozen=True)
class _Filled:
    """First values on this rank, not in place yet.

    Attributes:
        rules: tensor -> the rule that gave its values.
        locals_: tensors that were on meta, with this rank's share.
    """

    rules: dict[str, str]
    locals_: list[tuple[ModelTensor, torch.Tensor]]


def _fill(
    tensors: list[ModelTensor], initialiser: Initialiser, default: torch.device, meter: Meter
) -> _Filled:
    """Allocate and initialise what is on meta. Each rank by itself.

    Raises:
        LoadError: tensors without a rule; names each of them. One of a frozen part with a source.
    """
    filled = _Filled({}, [])
    without: list[str] = []
    wanted = [tensor for tensor in tensors if tensor.is_meta and tensor.kind != "derived"]
    for tensor in wanted:
        _check_no_source(tensor)
    if problems := shared_on_meta(tensors) + parametrised(wanted):
        raise LoadError("\n".join(problems))
    for tensor in wanted:
        local = allocate(tensor, device_for(tensor, default))
        filled.locals_.append((tensor, local))
        rule = initialiser.fill(tensor, local)
        if rule is None:
            without.append(tensor.name)
        filled.rules[tensor.name] = rule or ""
        meter.sample()
    if without:
        raise LoadError(
            f"no rule gives initial values to {', '.join(without)}: give their modules a "
            "reset_parameters(), or pass init=a function of the module"
        )
    return filled


def _check_no_source(tensor: ModelTensor) -> None:
    """Refuse a tensor of a frozen part whose values are in a file of its own."""
    part: Any = tensor.frozen
    if part is not None and part.anyrank_frozen.source is not None:
        raise LoadError(
            f"{tensor.name}: belongs to a frozen part whose weights are in "
            f"{part.anyrank_frozen.source}, so initial "
            "values would be others: call anyrank.load on the part, with that source, before"
        )


def _device_of(device: torch.device | str) -> torch.device:
    given: Any = device  # whatever it is
    if isinstance(given, bool) or not isinstance(given, (torch.device, str, int)):
        raise TypeError(f"device= takes a torch.device or its name, not {type(given).__name__}")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r}: {str(error).splitlines()[0]}") from error
