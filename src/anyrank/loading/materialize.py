"""`anyrank.materialize`: first values for a model on meta, the same for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from anyrank.errors import LoadError
from anyrank.loading.allocate import allocate, default_device, device_for
from anyrank.loading.buffers import rebuilt_values
from anyrank.loading.dora import is_magnitude, recompute_magnitudes
from anyrank.loading.initialise import Initialiser
from anyrank.loading.memory_meter import Meter
from anyrank.loading.model_tensors import Target, find_targets
from anyrank.loading.options import check_choice, check_model
from anyrank.loading.replace import Replacement, replace
from anyrank.loading.report import LoadReport
from anyrank.world.group import Group
from anyrank.world.ranks import open_ranks


def materialize(
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    init: Literal["auto"] | Callable[[nn.Module], object] = "auto",
    process_group: Group = None,
) -> LoadReport:
    """Give every tensor on meta its first values; what is real already stays as it is.

    Every rank of the group calls it. Values depend on the first rank's torch seed and on the
    tensors' names alone, so a model that is sharded over any number of ranks starts with the same
    ones, bit by bit on the same kind of device, as on one rank. A rank holds its share and one
    whole tensor at a time.

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
        LoadError: tensors that no rule writes, named, or arguments that differ between ranks; on
            all ranks, and nothing is changed.
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
        ranks.same_arguments("materialize", {"init": init}, LoadError, check)
        seed = ranks.gather(torch.initial_seed())[0]
        mine: list[Target] = []
        ranks.together("looking at the model", lambda: mine.extend(find_targets(model)))
        place = default_device(mine) if device is None else _device_of(device)
        meter.watch({place, *(target.tensor.device for target in mine)})
        rule = None if init == "auto" else init
        initialiser = Initialiser(model, seed, rule)
        rules: dict[str, str] = {}
        fresh: list[tuple[Target, torch.Tensor]] = []
        magnitudes: list[Target] = []

        def fill() -> None:
            lost: list[str] = []
            for target in mine:
                if target.is_meta and target.kind != "derived":
                    local = allocate(target, device_for(target, place))
                    if is_magnitude(target):  # computed from what is put in place
                        magnitudes.append(target)
                        fresh.append((target, local))
                        continue
                    name = initialiser.fill(target, local)
                    fresh.append((target, local))
                    lost += [target.name] if name is None else []
                    rules[target.name] = name or ""
                    meter.sample()
            if lost:
                raise LoadError(
                    f"no rule gives first values to {', '.join(lost)}: give their modules a "
                    "reset_parameters(), or pass init=a function of the module"
                )

        ranks.together("initialising", fill)

        rebuilt, replacements = rebuilt_values(mine, ranks, initialiser, place)

        def commit() -> list[str]:
            replacements.extend(Replacement(target, local) for target, local in fresh)
            return replace(replacements)

        renewed = ranks.together("putting the values in place", commit)
        rules.update(recompute_magnitudes(magnitudes, trained_too=True))
        peaks = ranks.gather((*meter.peaks(), meter.seconds()))
    host, device_peaks, seconds = zip(*peaks, strict=True)
    return LoadReport(
        initialised=rules,
        rebuilt=rebuilt,
        renewed=sorted({name for names in renewed for name in names}),
        format="first values",
        strategy="own",
        reason="each rank computes its own share",
        tensors=len(rules),
        peak_host_bytes=list(host),
        peak_device_bytes=list(device_peaks),
        bytes_read=[0] * len(host),
        bytes_sent=[0] * len(host),
        seconds=max(seconds),
    )


def _device_of(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r}: {str(error).splitlines()[0]}") from error
