"""What is not documented is private: the public attributes of each public class, listed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import anyrank


def checkpoints() -> anyrank.Checkpoints:
    return anyrank.Checkpoints("run", anyrank.TrainState(nn.Linear(1, 1)))


def saved() -> anyrank.Checkpoints:
    ckpts = checkpoints()
    ckpts.save()
    ckpts.close()
    return ckpts


# A function that makes an instance of the class, and the instance's public attributes.
NAMES: dict[str, tuple[Callable[[], Any], str]] = {
    "TrainState": (anyrank.TrainState, "step epoch samples run lineage data"),
    "Checkpoints": (
        checkpoints,
        "path resume steps step_done save wait close latest saved stats",
    ),
    "SavedStep": (
        lambda: saved().saved()[0],
        "step epoch samples written ranks nbytes path",
    ),
    "SaveRecord": (
        lambda: saved().stats()[0],
        "step path nbytes seconds stall_seconds removed",
    ),
    "ResumeReport": (
        lambda: saved().resume(),
        "step epoch samples path saved_on ranks lost_steps lost_samples set_aside components"
        " notes verified bytes_read seconds to_json",
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_class_shows_what_is_documented_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, names = NAMES[name]
    assert {each for each in dir(make()) if not each.startswith("_")} == set(names.split())
