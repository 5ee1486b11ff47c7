"""`anyrank stacks`: find the rank of a running job that holds up the others, and where."""

from __future__ import annotations

import json
import sys

import click


@click.command("stacks")
@click.option("--json", "as_json", is_flag=True, help="The ranks, and who holds them up, as JSON.")
@click.argument("pid", required=False, type=click.IntRange(1))
def command(pid: int | None, as_json: bool) -> None:
    """Say which rank of a job holds up the others, and at which line.

    PID is the process of torchrun, or of one of its ranks on this machine; without it, the only job
    that runs here. The job needs nothing of anyrank, and goes on. py-spy reads the stacks; without
    it, the processes are named. Exit status 1 if a rank is named that holds up the others.
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
