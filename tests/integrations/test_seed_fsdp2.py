"""The FSDP2 seed case: outputs and three training steps as on one process, for each kind of
model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from examples import fsdp2_pretrained
from tests.scripts import run_python

from anyrank.testing import run_ranks

CASES = [
    ("llama", False, False),
    ("llama", True, True),
    ("mixtral", False, False),
    ("mixtral", True, False),
    ("llava", False, False),
    ("llava", True, False),
    ("llama", False, True),
]


def job(name: str, lora: bool, tied: bool, folder: str) -> tuple[Any, list[float], list[float]]:
    return fsdp2_pretrained.main(name, lora, tied, folder)


@pytest.mark.parametrize(("name", "lora", "tied"), CASES)
def test_as_on_one_process(tmp_path: Path, name: str, lora: bool, tied: bool) -> None:
    for report, ours, theirs in run_ranks(2, job, name, lora, tied, str(tmp_path)):
        assert report.missing == report.unexpected == []
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert ours[2] < ours[0]
        assert bool(report.tied) == tied


def test_the_example_runs_unchanged_under_python() -> None:
    assert "losses with FSDP2" in run_python(fsdp2_pretrained.__file__, "--tied")
