"""`anyrank plan`: the memory that a rank needs to load a source, for any number of ranks."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict

import click

from anyrank.wording import FLOATS, count, in_units


def _parse_mesh(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """Return the sizes of a device mesh: (2, 4) for "2x4"."""
    if value is None:
        return None
    if not re.fullmatch(r"[1-9][0-9]{0,6}(x[1-9][0-9]{0,6}){0,7}", value):
        raise click.BadParameter(
            f"{value!r} is not a mesh. Pass sizes such as 8 or 2x4", ctx, param
        )
    return tuple(int(size) for size in value.split("x"))


@click.command("plan")
@click.argument("path")
@click.option("--ranks", type=click.IntRange(1), help="Total number of ranks.")
@click.option(
    "--mesh",
    callback=_parse_mesh,
    metavar="RxS",
    help="Device mesh, the sharded axis last: 2x4 is two replicas of four shards.  "
    "[default: one axis]",
)
@click.option(
    "--dtype",
    type=click.Choice([*FLOATS]),
    help="Dtype of the model's floating-point tensors.  [default: as in PATH]",
)
@click.option("--json", "as_json", is_flag=True, help="Print sizes in bytes, as a JSON object.")
def command(
    path: str, ranks: int | None, mesh: tuple[int, ...] | None, dtype: str | None, as_json: bool
) -> None:
    """Show how much memory one rank needs to load PATH.

    This is its share of the weights, and the peak during the load. Reads only headers, and needs no
    process group, GPU or model. Assumes that each tensor is split along dim 0 over the last axis of
    the mesh (FSDP2, HSDP). A mesh of 4x1 is four full copies (DDP). The numbers are those of the
    rank with the largest share.
    """
    *axes, shards = sizes = _sizes(ranks, mesh)
    import torch

    from anyrank.cli.console import out, write
    from anyrank.loading.plan import Forecast, forecast

    floats = None if dtype is None else getattr(torch, FLOATS[dtype])
    share: Forecast = forecast(path, shards, floats)
    world = math.prod(sizes)
    if as_json:
        plain = {"path": path, "ranks": world, "mesh": sizes, **asdict(share)}
        click.echo(json.dumps(plain, indent=2))
        return
    replicas = count(math.prod(axes), "replica")
    write(
        out(),
        f"{path}: {share.format}, {in_units(share.source_bytes)}",
        f"each of {count(world, 'rank')} ({replicas} of {count(shards, 'shard')}) holds up to "
        f"{in_units(share.share_bytes)}, and peaks at {in_units(share.peak_bytes)} during the load",
    )


def _sizes(ranks: int | None, mesh: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the sizes of the mesh from options that must agree."""
    if mesh is None:
        if ranks is None:
            raise click.UsageError("Pass --ranks, or --mesh, or both.")
        return (ranks,)
    world = math.prod(mesh)
    if ranks not in (None, world):
        shown = "x".join(map(str, mesh))
        raise click.UsageError(
            f"--mesh {shown} needs {count(world, 'rank')}, but --ranks is {ranks}."
        )
    return mesh
