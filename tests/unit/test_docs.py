"""The documentation, as its readers use it: examples run and print what the page says, links lead
somewhere, commands exist, and every public name, argument and knob is explained.

A comment before a block of Python says how it runs; without one it runs in this process, after the
blocks above it on its page:

    <!-- file: NAME -->       it is the text of a file, which the blocks of every page can import
    <!-- run: N ranks -->     on N ranks, with the imports, functions and classes above it
    <!-- run: torchrun N -->  as a script, in this process and by torchrun on N ranks
    <!-- run: tests -->       as a file of tests, each of which is called
    <!-- skip: REASON -->     it only has to compile
    <!-- check: CODE -->      after a block: what the example must have led to

A block of text after it is what it prints, on the first rank, and the error that it ends in. Numbers
with a decimal point (seconds, MiB) may differ.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import anyrank
from anyrank import cli, settings
from anyrank.testing import run_ranks

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src/anyrank"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
MARK = re.compile(r"<!-- (file|run|skip|check): (.*) -->$")
SHELL = ("sh", "console")


@dataclass
class Block:
    """One fenced block, and what the comments around it say.

    Attributes:
        page: the file that it is in.
        line: number of its first line, from 1.
        kind: the word behind the fence.
        text: its lines.
        marks: "file", "run", "skip" or "check" -> what the comment says.
        output: the block of text behind it, where there is one.
    """

    page: Path
    line: int
    kind: str
    text: str
    marks: dict[str, str] = field(default_factory=dict[str, str])
    output: str | None = None


def find_blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    made: list[Block] = []
    marks: dict[str, str] = {}
    follows = False  # nothing but empty lines and checks since the last block
    lines = iter(enumerate(page.read_text(encoding="utf-8").splitlines(), 1))
    for number, line in lines:
        mark = MARK.match(line)
        if mark and mark[1] == "check":
            made[-1].marks["check"] = mark[2]
        elif mark:
            marks[mark[1]] = mark[2]
        elif line.startswith("```"):
            inside = [text for _, text in iter(lambda: next(lines), None) if not _ends(text)]
            made.append(Block(page, number + 1, line[3:].strip(), "\n".join(inside), marks))
            if follows and made[-1].kind == "text" and made[-2].kind == "python":
                made[-2].output = made[-1].text
            marks, follows = {}, True
        elif line:
            follows = False
    return made
