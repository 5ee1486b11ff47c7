"""`anyrank plan`: the cost of a load, for any number of ranks."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from anyrank.wording import FLOATS

if TYPE_CHECKING:
    from rich.padding import Padding

    from anyrank.filling.plan import LoadPlan

STRATEGIES = ("own", "stripe", "scatter")
MAX_RANKS = 1 << 20


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
@click.option("--ranks", type=click.IntRange(1, MAX_RANKS), help="Ranks in all.")
@click.option(
    "--mesh",
    callback=_parse_mesh,
    metavar="RxS",
    help="Mesh of the ranks, the sharded axis last: 2x4 is two replicas of four shards.  "
    "[default: one axis]",
)
@click.option("--nodes", type=click.IntRange(1), help="Machines.  [default: 8 ranks on each]")
@click.option(
    "--dtype",
    type=click.Choice([*FLOATS]),
    help="Of the model's floating tensors.  [default: as in PATH]",
)
@click.option(
    "--strategy", type=click.Choice(["auto", *STRATEGIES]), help="Only this one.  [default: all]"
)
@click.option("--json", "as_json", is_flag=True, help="Every rank's bytes as a JSON object.")
def command(
    path: str,
    ranks: int | None,
    mesh: tuple[int, ...] | None,
    nodes: int | None,
    dtype: str | None,
    strategy: str | None,
    as_json: bool,
) -> None:
    """Show what loading PATH takes, by rank and by machine.

    Needs no process group, no GPU and no model: headers alone. The tensors of PATH stand for the
    model's, cut along their first dim over the last axis of the mesh (FSDP2, HSDP). A mesh of 4x1
    is four whole copies (DDP).
    """
    world = _world_size(ranks, mesh, nodes)
    import torch

    from anyrank.filling.plan import plan_source

    def plan_with(name: str) -> LoadPlan:
        return plan_source(
            path,
            world_size=world,
            mesh=mesh,
            ranks_per_node=None if nodes is None else world // nodes,
            dtype=None if dtype is None else getattr(torch, FLOATS[dtype]),
            strategy=name,
        )

    chosen = plan_with("auto")
    plans = [plan_with(name) for name in ((strategy,) if strategy else STRATEGIES)]
    if as_json:
        auto = {"strategy": chosen.strategy, "reason": chosen.reason}
        plain = {"path": path, "auto": auto, "plans": [asdict(plan) for plan in plans]}
        click.echo(json.dumps(plain, indent=2))
        return
    _show(path, mesh or (world,), chosen, plans)


def _world_size(ranks: int | None, mesh: tuple[int, ...] | None, nodes: int | None) -> int:
    """Ranks in all, from options that must agree."""
    if ranks is None and mesh is None:
        raise click.UsageError("Give --ranks, or --mesh, or both.")
    world = ranks if ranks is not None else math.prod(mesh or ())
    if mesh is not None and math.prod(mesh) != world:
        shown = "x".join(map(str, mesh))
        raise click.UsageError(f"--mesh {shown} has {math.prod(mesh)} ranks, --ranks says {world}.")
    if world > MAX_RANKS:
        raise click.UsageError(f"A mesh of {world} ranks is too large; the maximum is {MAX_RANKS}.")
    if nodes is not None and world % nodes:
        raise click.UsageError(f"{world} ranks cannot be spread evenly over --nodes {nodes}.")
    return world


def _show(path: str, mesh: tuple[int, ...], chosen: LoadPlan, plans: list[LoadPlan]) -> None:
    from anyrank.cli.console import out, write
    from anyrank.filling.plan import READ_BYTES_PER_SEC, SEND_BYTES_PER_SEC
    from anyrank.wording import count, in_units

    copies, shards = count(math.prod(mesh[:-1]), "copy", "copies"), count(mesh[-1], "shard")
    places = f"{count(chosen.world_size, 'rank')} on {count(chosen.nodes, 'node')}"
    storage, network = in_units(READ_BYTES_PER_SEC), in_units(SEND_BYTES_PER_SEC)
    write(
        out(),
        f"{path}: {chosen.format}, {in_units(chosen.source_bytes)}",
        f"  model  {in_units(chosen.model_bytes)}, {copies} of {shards}: {places}",
        f"  auto   {chosen.strategy}: {chosen.reason}",
        _table(plans),
        f"  peak: share and buffer; sec: at {storage}/s read by a node, {network}/s sent by a rank",
    )


def _table(plans: list[LoadPlan]) -> Padding:
    """A row for each strategy, with the maximum over ranks and nodes."""
    from rich.padding import Padding

    from anyrank.cli.console import table
    from anyrank.wording import in_units

    ranks = ("rank\nholds", "rank\npeak", "rank\nreads", "rank\nsends")
    rows = table("\nstrategy", *ranks, "node\npeak", "node\nreads", "all\nread", "about\nsec")
    for plan in plans:
        maxima = [
            max(values)
            for values in (
                plan.share_bytes,
                plan.peak_bytes,
                plan.read_bytes,
                plan.sent_bytes,
                plan.node_peak_bytes,
                plan.node_read_bytes,
            )
        ]
        cells = [in_units(nbytes) for nbytes in (*maxima, sum(plan.read_bytes))]
        rows.add_row(plan.strategy, *cells, f"{plan.seconds:.1f}")
    return Padding.indent(rows, 2)
