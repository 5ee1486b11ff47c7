"""The torch versions that are tested: the warning for another, and the places that name them."""

from __future__ import annotations

import logging
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from anyrank import versions
from anyrank.integrations import framework_names

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("installed", [*versions.TESTED_TORCH, "2.13.0+cpu", "2.14.0", "2.15.3"])
def test_a_tested_version_is_quiet(installed: str) -> None:
    assert versions.untested_torch(installed) is None


@pytest.mark.parametrize(
    "installed", ["2.10.0", "2.16.0", "3.0.0", "2.16.0.dev20261101+cu132", "x"]
)
def test_another_version_is_named_with_the_range_and_the_way_out(installed: str) -> None:
    reason = versions.untested_torch(installed)
    assert reason is not None
    assert installed in reason
    assert "2.11.0 to 2.15.0" in reason
    assert f"make compat TORCH={installed}" in reason


def test_the_warning_comes_once_and_on_the_first_rank(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions.warn_of_untested_torch.cache_clear()
    with caplog.at_level(logging.WARNING, "anyrank"):
        monkeypatch.setenv("RANK", "1")
        versions.warn_of_untested_torch("9.1.0")
        assert caplog.records == []
        monkeypatch.setenv("RANK", "0")
        versions.warn_of_untested_torch("9.2.0")
        versions.warn_of_untested_torch("9.2.0")
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_the_first_name_that_needs_torch_warns_and_works() -> None:
    script = (
        "import torch, anyrank\n"
        "torch.__version__ = '9.9.0'\n"
        "print(callable(anyrank.load), callable(anyrank.sync))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.split() == ["True", "True"]
    assert done.stderr.count("not tested with torch 9.9.0") == 1


def test_the_floor_in_pyproject_is_the_first_tested_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    minor = ".".join(versions.TESTED_TORCH[0].split(".")[:2])
    assert f"torch>={minor}" in project["dependencies"]


def floors_of(requirements: list[str]) -> dict[str, str]:
    """Package -> the version behind >=."""
    return dict(one.split(">=", 1) for one in requirements)


def test_the_floors_of_extras_agree_and_are_what_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [floors_of(extra) for extra in project["optional-dependencies"].values()]
    for extra in extras:
        for package, floor in extra.items():
            assert {other.get(package, floor) for other in extras} == {floor}, package
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    for package in ("accelerate", "lightning", "peft", "transformers"):
        (floor,) = {extra[package] for extra in extras if package in extra}
        assert pinned[package].split(".")[:2] == floor.split("."), package
        assert framework_names.TESTED.get(package, floor) == floor, package


def test_the_running_version_is_tested() -> None:
    assert versions.untested_torch(torch.__version__) is None
