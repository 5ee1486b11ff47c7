"""For users who are not root: the tests between machines, in namespaces of the user's own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.machines.machines import namespace_of_this_user, reason_not_to

ROOT = Path(__file__).parents[2]
START = namespace_of_this_user() if reason_not_to() else []

if START:  # else they run as they are, or are skipped with the reason

    def test_machines_in_a_namespace_of_this_user() -> None:
        command = [*START, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command.append("tests/machines/test_two_machines.py")
        run = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
        )
        assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
        assert re.search(r"^\d+ passed in", run.stdout, re.MULTILINE), run.stdout
