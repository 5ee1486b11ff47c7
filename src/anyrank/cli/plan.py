"""`anyrank plan`: what a load would cost on ranks that do not exist yet."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.table import Table

    from anyrank.loading.planning import LoadPlan

STRATEGIES = ("own", "stripe", "scatter")
DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class Mesh(click.ParamType[tuple[int, ...]]):
    """Sizes of a device mesh, the sharded axis last: 2x4."""

    name = "mesh"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if not re.fullmatch(r"[1-9][0-9]{0,6}(x[1-9][0-9]{0,6})*", str(value)):
            self.fail(f"{value!r} is not a mesh: give sizes like 8 or 2x4", param, ctx)
        return tuple(int(size) for size in str(value).split("x"))


@click.command("plan")
@click.argument("source")
