"""A user's file passes the type checker: the annotations that `py.typed` promises are usable."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import anyrank

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "tests/typing/all_names.py"
WRONG = """
import torch
import anyrank

anyrank.laod(torch.nn.Linear(1, 1), "x")
anyrank.load(torch.nn.Linear(1, 1), "x", missing="erorr")
anyrank.Checkpoints("runs/a")
"""


def names_used(text: str) -> set[str]:
    """What a program takes from `anyrank`."""
    return {
        node.attr
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "anyrank"
    }


def errors_in(*files: Path) -> dict[str, list[str]]:
    """File -> what pyright, in its strict mode, has to say of it."""
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(
        [*command, *map(str, files)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=ROOT,
    )
    assert done.stdout.startswith("{"), done.stderr
    found: dict[str, list[str]] = {file.name: [] for file in files}
    for one in json.loads(done.stdout)["generalDiagnostics"]:
        line = one["range"]["start"]["line"] + 1
        found[Path(one["file"]).name].append(f"{line}: {one['message']}")
    return found


def test_the_program_uses_every_public_name() -> None:
    assert names_used(PROGRAM.read_text(encoding="utf-8")) == set(anyrank.__all__)


@pytest.mark.slow
def test_a_users_program_is_typed_and_a_wrong_one_is_found(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(WRONG, encoding="utf-8")
    found = errors_in(PROGRAM, wrong)
    assert found[PROGRAM.name] == []
    assert [error.split(":")[0] for error in found["wrong.py"]] == ["5", "6", "7"]
