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
        ("plan_mesh", "--mesh 2x4 --nodes 2 --dtype bf16"),
        ("plan_one", "--ranks 4 --strategy scatter"),
        ("plan_json", "--ranks 2 --strategy own --json"),
    ],
)
def test_a_plan_is_a_table_of_bytes(
    name: str, flags: str, snapshot: Callable[[str, str], Result]
) -> None:
    assert snapshot(name, f"plan w.safetensors {flags}").exit_code == 0


def test_json_has_every_strategy_and_every_rank(anyrank: Callable[[str], Result]) -> None:
    said = json.loads(anyrank("plan w.safetensors --mesh 2x4 --json").stdout)
    assert [plan["strategy"] for plan in said["plans"]] == ["own", "stripe", "scatter"]
    assert said["auto"]["strategy"] == "own"
    shares = [plan["share_bytes"] for plan in said["plans"]]
    assert [len(share) for share in shares] == [8, 8, 8]
    assert all(sum(share) >= 2 * 128 * 128 * 4 for share in shares)


def test_dtype_is_the_models_and_not_the_files(anyrank: Callable[[str], Result]) -> None:
    said = json.loads(anyrank("plan w.safetensors --ranks 1 --dtype bf16 --json").stdout)
    plan = said["plans"][0]
    assert plan["model_bytes"] == 128 * 128 * 2 + 8
    assert plan["source_bytes"] == 128 * 128 * 4 + 8


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("plan_no_ranks", ""),
        ("plan_other_ranks", "--ranks 8 --mesh 2x3"),
        ("plan_not_a_mesh", "--mesh 2y4"),
        ("plan_uneven_nodes", "--ranks 8 --nodes 3"),
        ("plan_too_many", "--mesh 1024x2048"),
        ("plan_no_such_dtype", "--ranks 8 --dtype fp12"),
    ],
)
def test_wrong_usage_is_exit_2_and_says_why(
    name: str, flags: str, snapshot: Callable[[str, str], Result]
) -> None:
    assert snapshot(name, f"plan w.safetensors {flags}".rstrip()).exit_code == 2


def test_a_bad_file_is_one_message_and_exit_1(snapshot: Callable[[str, str], Result]) -> None:
    assert snapshot("plan_missing", "plan nothing --ranks 8").exit_code == 1


def test_thousands_of_ranks_are_planned(anyrank: Callable[[str], Result]) -> None:
    result = anyrank("plan w.safetensors --mesh 128x128")
    assert result.exit_code == 0
    assert "16,384 ranks on 2,048 nodes" in result.stdout
