"""`anyrank plan`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from safetensors.torch import save_file


@pytest.fixture(autouse=True)
def weights(tmp_path: Path) -> None:
    """64 KiB of weights and a scalar."""
    tensors = {"w": torch.zeros(128, 128), "n": torch.zeros((), dtype=torch.int64)}
    save_file(tensors, tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("plan", "--ranks 8"),
        ("plan_mesh", "--mesh 2x4 --dtype bf16"),
        ("plan_json", "--ranks 2 --json"),
    ],
)
def test_a_plan_is_what_a_rank_holds(
    name: str, flags: str, snapshot: Callable[[str, str], Result]
) -> None:
    assert snapshot(name, f"plan w.safetensors {flags}").exit_code == 0


@pytest.mark.parametrize(
    ("flags", "held"),
    [
        ("--mesh 2x4", 128 * 128 * 4 // 4 + 8),
        ("--ranks 3", 43 * 128 * 4 + 8),  # torch's chunks: 43, 43 and 42 rows
        ("--mesh 8x1 --dtype bf16", 128 * 128 * 2 + 8),
        ("--mesh 128x1024", 128 * 4 + 8),
    ],
)
def test_a_share_is_that_of_the_rank_that_holds_most(
    anyrank: Callable[[str], Result], flags: str, held: int
) -> None:
    said = json.loads(anyrank(f"plan w.safetensors {flags} --json").stdout)
    assert said["source_bytes"] == 128 * 128 * 4 + 8
    assert said["share_bytes"] == held
    assert held < said["peak_bytes"] <= held + said["source_bytes"]


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("plan_no_ranks", ""),
        ("plan_other_ranks", "--ranks 8 --mesh 2x3"),
        ("plan_not_a_mesh", "--mesh 2y4"),
        ("plan_no_such_dtype", "--ranks 8 --dtype fp12"),
    ],
)
def test_wrong_usage_is_exit_2_and_says_why(
    name: str, flags: str, snapshot: Callable[[str, str], Result]
) -> None:
    assert snapshot(name, f"plan w.safetensors {flags}".rstrip()).exit_code == 2


def test_a_bad_file_is_one_message_and_exit_1(snapshot: Callable[[str, str], Result]) -> None:
    assert snapshot("plan_missing", "plan nothing --ranks 8").exit_code == 1
