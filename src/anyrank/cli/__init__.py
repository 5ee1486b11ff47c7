"""The command line: `anyrank COMMAND`, with a module in this package for each command.

Exit codes: 0 success, 1 findings or an error in the input, 2 wrong usage or a missing package.
"""

from __future__ import annotations

import difflib
import errno
import os
from importlib import import_module
from typing import Any

import click

from anyrank import __version__
from anyrank.errors import AnyrankError

COMMANDS = ("inspect", "verify", "diff", "convert", "plan", "check", "stacks", "run", "demo")


class Commands(click.Group):
    """A group that imports a command's module on demand; a command imports torch when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None  # `resolve_command` suggests a similar name
        command: click.Command = import_module(f"anyrank.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command as click does; for an unknown one, suggest a similar name."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            similar = difflib.get_close_matches(args[0], COMMANDS, n=1)
            if not similar:
                raise
            text = f"{error.message} Did you mean {similar[0]!r}?"
            raise click.UsageError(text, ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; report an AnyrankError, or a full disk, without a traceback."""
        try:
            return super().invoke(ctx)
        except AnyrankError as error:
            raise click.ClickException(str(error)) from error
        except ImportError as error:  # an optional package; the message names it
            raise click.UsageError(str(error)) from error
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else buffered bytes fail again at exit
            raise click.ClickException(f"cannot write the output: {error}") from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="anyrank %(version)s")
def main() -> None:
    """Your PyTorch training state, on any rank, on any number of ranks."""
