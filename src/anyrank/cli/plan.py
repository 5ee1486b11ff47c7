"""`anyrank plan`: the memory that a rank would need, for any number of ranks."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict

import click

from anyrank.wording import FLOATS


def _parse_mesh(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """Sizes of a device mesh: (2, 4) for "2x4"."""
    if value is None:
        return None
    if not re.fullmatch(r"[1-9][0-9]{0,6}(x[1-9][0-9]{0,6}){0,7}", value):
        raise click.BadParameter(f"{value!r} is not a mesh; give sizes like 8 or 2x4", ctx, param)
    return tuple(int(size) for size in value.split("x"))


@click.command("plan")
@click.argument("path")
@click.option("--ranks", type=click.IntRange(1), help="Ranks in all.")
@click.option(
    "--mesh",
    callback=_parse_mesh,
    metavar="RxS",
    help="Mesh of the ranks, the sharded axis last: 2x4 is two replicas of four shards.  "
    "[default: one axis]",
)
@click.option(
    "--dtype",
    type=click.Choice([*FLOATS]),
    help="Of the model's floating tensors.  [default: as in PATH]",
)
@click.option("--json", "as_json", is_flag=True, help="In bytes, as a JSON object.")
def command(
    path: str, ranks: int | None, mesh: tuple[int, ...] | None, dtype: str | None, as_json: bool
) -> None:
    """Show what a rank would hold of PATH, and at most while it loads.

    Needs no process group, no GPU and no model: headers alone. The tensors of PATH stand for the
    model's, cut along their first dim over the last axis of the mesh (FSDP2, HSDP). A mesh of 4x1
    is four whole copies (DDP). The rank is the one that holds most.
    """
    *axes, shards = sizes = _sizes(ranks, mesh)
    import torch

    from anyrank.cli.console import out, write
    from anyrank.loading.plan import Forecast, forecast
    from anyrank.wording import count, in_units

    floats = None if dtype is None else getattr(torch, FLOATS[dtype])
    share: Forecast = forecast(path, shards, floats)
    world = math.prod(sizes)
    if as_json:
        plain = {"path": path, "ranks": world, "mesh": sizes, **asdict(share)}
        click.echo(json.dumps(plain, indent=2))
        return
    copies = count(math.prod(axes), "copy", "copies")
    write(
        out(),
        f"{path}: {share.format}, {in_units(share.source_bytes)}",
        f"each of {count(world, 'rank')} ({copies} of {count(shards, 'shard')}) holds "
        f"{in_units(share.share_bytes)}, at most {in_units(share.peak_bytes)} while it loads",
    )


def _sizes(ranks: int | None, mesh: tuple[int, ...] | None) -> tuple[int, ...]:
    """The sizes of the mesh, from options that must agree."""
    if mesh is None:
        if ranks is None:
            raise click.UsageError("Give --ranks, or --mesh, or both.")
        return (ranks,)
    world = math.prod(mesh)
    if ranks not in (None, world):
        shown = "x".join(map(str, mesh))
        raise click.UsageError(f"--mesh {shown} has {world} ranks, --ranks says {ranks}.")
    return mesh
