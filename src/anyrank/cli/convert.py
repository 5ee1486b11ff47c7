"""`anyrank convert`: write the weights of any source in a format that other tools read."""

from __future__ import annotations

import re
from typing import get_args

import click

from anyrank.tools.convert.format_names import FormatName
from anyrank.wording import FLOATS

SIZE = re.compile(r"\s*([0-9]{1,15})\s*(?:([KMGT])(I?))?B?\s*", re.IGNORECASE)


def parse_bytes(text: str | None) -> int | None:
    """Parse "5GB", "512MiB" or a number of bytes.

    Raises:
        click.BadParameter: the text is not a size.
    """
    if text is None:
        return None
    match = SIZE.fullmatch(text)
    if match is None or not int(match[1]):
        raise click.BadParameter(f"--shard-bytes {text!r}: must be a size such as 5GB or 512MiB")
    power = "KMGT".index(match[2].upper()) + 1 if match[2] else 0
    return int(match[1]) * (1024 if match[3] else 1000) ** power


@click.command("convert")
@click.argument("sources", nargs=-1, metavar="SOURCES...")
@click.argument("destination")
@click.option(
    "--to",
    type=click.Choice(get_args(FormatName)),
    default="safetensors",
    show_default=True,
    help="A Hugging Face folder (or one file, if DESTINATION ends with .safetensors), a folder of"
    " torch.distributed.checkpoint, or one file of torch.save.",
)
@click.option(
    "--dtype",
    type=click.Choice([*FLOATS]),
    help="Cast floating-point tensors to this dtype; others keep theirs.",
)
@click.option(
    "--rename",
    multiple=True,
    metavar="OLD=NEW",
    help="Rename a tensor, or a prefix of names. May be repeated.",
)
@click.option("--shard-bytes", metavar="SIZE", help="Maximum size of one file.  [default: 5GB]")
@click.option("--overwrite", is_flag=True, help="If DESTINATION exists, rename it first.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole report as a JSON object.")
def command(
    sources: tuple[str, ...],
    destination: str,
    to: str,
    dtype: str | None,
    rename: tuple[str, ...],
    shard_bytes: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write the weights of SOURCES to DESTINATION.

    SOURCES is what `load` reads: a file, a folder, a run, a URL, or several files.
    """
    from anyrank.cli.console import show
    from anyrank.tools.convert.convert import convert

    if not sources:  # click assigns a single argument to the last name
        raise click.UsageError("Missing argument 'DESTINATION'.")
    wrong = [pair for pair in rename if "=" not in pair]
    if wrong:
        raise click.BadParameter(f"--rename {wrong[0]!r}: expected OLD=NEW")
    size = parse_bytes(shard_bytes)
    try:
        report = convert(
            sources[0] if len(sources) == 1 else list(sources),
            destination,
            to=to,  # type: ignore[arg-type]
            dtype=dtype,
            rename=dict(pair.split("=", 1) for pair in rename) or None,
            shard_bytes=size,
            overwrite=overwrite,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    show(report, as_json)
