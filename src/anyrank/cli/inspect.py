"""`anyrank inspect`: the tensors of a file or a folder."""

from __future__ import annotations

import click


@click.command("inspect")
@click.argument("path")
@click.option(
    "--all", "show_all", is_flag=True, help="Print a row per tensor; do not group layers."
)
@click.option("--quiet", is_flag=True, help="Print only tensor names, one per line.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as a JSON object.")
@click.option("--plot", metavar="FILE", help="Draw a run's loss and rank counts: .svg, .png, .pdf.")
def command(path: str, show_all: bool, quiet: bool, as_json: bool, plot: str | None) -> None:
    """List the tensors in PATH.

    PATH is a file (.safetensors, .pt, .pth, .bin, .ckpt), a Hugging Face, DCP or anyrank folder,
    or a URL. Reads only headers: no weights are loaded, and no code in the file runs.
    """
    from anyrank.cli.console import out, write
    from anyrank.tools.inspect.inspect import inspect, notes, summary, tensor_rows
    from anyrank.wording import printable

    if plot is not None:
        from anyrank.tools.inspect.plot import draw

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
        rows = tensor_rows(inspection, grouped=not show_all)
        write(out(), *summary(inspection), *rows, *notes(inspection))
