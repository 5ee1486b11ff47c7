"""`anyrank inspect`: the contents of a file or a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from anyrank.inspection.inspect import Inspection


@click.command("inspect")
@click.argument("path")
@click.option("--all", "every", is_flag=True, help="One row a tensor; layers are not collapsed.")
@click.option("--quiet", is_flag=True, help="Only the names of the tensors, one a line.")
@click.option("--json", "as_json", is_flag=True, help="The whole inspection as a JSON object.")
@click.option("--plot", metavar="FILE", help="Draw a run's loss and rank counts: .svg, .png, .pdf.")
def command(path: str, every: bool, quiet: bool, as_json: bool, plot: str | None) -> None:
    """Show the tensors of PATH, from its headers alone.

    PATH is a file (.safetensors, .pt, .pth, .bin, .ckpt), a Hugging Face, DCP or anyrank folder,
    or a URL. It is never loaded, and no code in it runs.
    """
    from anyrank.inspection.inspect import inspect
    from anyrank.wording import printable

    if plot is not None:
        from anyrank.inspection.plot import draw

        draw(path, plot)
        click.echo(plot)
        return
    inspection = inspect(path)
    if as_json:
        click.echo(inspection.to_json())
    elif quiet:
        for tensor in inspection.tensors:
            click.echo(printable(tensor.name))
    else:
        _show(inspection, every)


def _show(inspection: Inspection, every: bool) -> None:
    from anyrank.cli.console import out, write
    from anyrank.cli.tree import tree
    from anyrank.inspection.groups import TensorGroup, group
    from anyrank.inspection.inspect import notes, summary
    from anyrank.wording import printable

    tensors = [(t.name, t.shape, t.dtype, t.nbytes) for t in inspection.tensors]
    groups = group(tensors)
    if every:
        groups = [TensorGroup(tuple(printable(n).split(".")), s, d, 1, b) for n, s, d, b in tensors]
    write(out(), *summary(inspection), tree(groups), *notes(inspection))
