"""Commands run in process, in a folder of their own; their output is compared byte for byte."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from anyrank.cli import main

SNAPSHOTS = Path(__file__).parent / "snapshots"


@pytest.fixture
def anyrank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Result]:
    """`anyrank("inspect x")`: a command line in an empty folder, 80 columns wide, no colors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "80")

    def run(line: str) -> Result:
        return CliRunner().invoke(main, shlex.split(line), prog_name="anyrank")

    return run


@pytest.fixture
def snapshot(anyrank: Callable[[str], Result], tmp_path: Path) -> Callable[[str, str], Result]:
    """`snapshot("name", "inspect x")`: runs it, and compares all it says with snapshots/name.txt.

    A missing snapshot is written, and the test fails once: read it before it is committed.
    """

    def check(name: str, line: str) -> Result:
        result = anyrank(line)
        said = f"$ anyrank {line}\n{result.stdout}"
        if result.stderr:
            said += f"--- stderr\n{result.stderr}"
        said = f"{said}--- exit {result.exit_code}\n".replace(str(tmp_path), "DIR")
        path = SNAPSHOTS / f"{name}.txt"
        if not path.exists():
            path.write_bytes(said.encode())
            pytest.fail(f"{path.name} was written: read it, and run the test again")
        assert said == path.read_bytes().decode()
        return result

    return check
