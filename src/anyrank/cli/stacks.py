"""`anyrank stacks`: find the rank of a running job that blocks the other ranks, and where."""

from __future__ import annotations

import json
import sys

import click


@click.command("stacks")
@click.option("--json", "as_json", is_flag=True, help="Print the ranks and the verdict as JSON.")
@click.argument("pid", required=False, type=click.IntRange(1))
def command(pid: int | None, as_json: bool) -> None:
    """Show which rank of a running job blocks the other ranks, and on which line.

    PID is the torchrun process, or one of its ranks on this machine. It may be omitted if only one
    job runs here. The job need not use anyrank, and continues to run. py-spy reads the stacks; if
    it is not installed, only the processes are listed. Exits with 1 if a blocking rank is found.
    """
    from anyrank.cli.console import out, write
    from anyrank.watching.job import describe, find_job, look_at_job

    job = find_job(pid)
    looks = look_at_job(job)
    lines, verdict = describe(job, looks)
    if as_json:
        ranks = [
            {
                "rank": look.rank,
                "pid": job.ranks[look.rank],
                "state": look.state,
                "stack": look.text,
            }
            for look in looks
        ]
        plain = json.loads(verdict.to_json()) if verdict else None
        click.echo(json.dumps({"launcher": job.launcher, "ranks": ranks, "verdict": plain}))
    else:
        write(out(), *lines)
    sys.exit(1 if verdict and verdict.culprits else 0)
