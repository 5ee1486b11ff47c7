"""A loop of Accelerate's, saved and resumed on other numbers of ranks by anyrank's Accelerator."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from anyrank.testing import run_ranks

pytest.importorskip("accelerate")

END, STOP, ROWS = 16, 6, 46  # an epoch has 4 steps


def fresh() -> None:
    """Accelerate keeps its state in classes, and a rank of the pool is one of several runs."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train(arguments: list[str]) -> dict[str, Any]:
    """The example on this rank: its losses, what it read, and what it came to."""
    from examples import accelerate_resume

    fresh()
    ids: list[int] = []

    class Seen(accelerate_resume.Points):
        def __getitem__(self, index: int) -> Any:
            if len(self) == ROWS:
                ids.append(index)
            return super().__getitem__(index)

    with pytest.MonkeyPatch.context() as patch:  # the process is a rank of later tests as well
        patch.setattr(accelerate_resume, "Points", Seen)
        result = accelerate_resume.main(arguments)
    accelerator = result["accelerator"]
    run = accelerator.run
    found = {
        "losses": result["losses"],
        "errors": result["errors"],
        "ids": ids,
        "report": accelerator.report,
        "receipts": result["data"].loader.receipts,
        "counts": (run.step, run.samples, run.epoch),
        "ema": {name: tensor.clone() for name, tensor in result["ema"].state_dict().items()},
    }
    accelerator.free_memory()
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run on one rank, never stopped."""
    return run_ranks(1, train, ["--folder", str(tmp_path_factory.mktemp("reference"))])[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    folder = str(tmp_path_factory.mktemp("saved"))
    return folder, run_ranks(3, train, ["--folder", folder, "--stop", str(STOP)])


@pytest.mark.slow
def test_three_ranks_continue_on_two_and_then_on_four(
    tmp_path: Path, reference: dict[str, Any], saved: tuple[str, list[dict[str, Any]]]
) -> None:
    folder, first = saved
    shutil.copytree(folder, tmp_path / "run")
    arguments = ["--folder", str(tmp_path / "run")]
    second = run_ranks(2, train, [*arguments, "--stop", "8"])
    third = run_ranks(4, train, arguments)
    for results, steps in ((first, range(STOP)), (second, range(STOP, 8)), (third, range(8, END))):
        for result in results:
            assert list(result["losses"]) == [step + 1 for step in steps]
            for step, loss in result["losses"].items():
                assert loss == pytest.approx(reference["losses"][step], rel=1e-9), step
    components = second[0]["report"].components
    assert {components[part] for part in ("scheduler", "data")} == {"exact"}
    # The rest of the second epoch: each sample on one of the ranks, and nothing else.
    read = [index for result in second for index in set(result["ids"])]
    assert sorted(read) == sorted(reference["ids"][ROWS + 24 : ROWS + ROWS])
    for result in third:
        assert result["counts"] == reference["counts"] == (END, 4 * ROWS, 4)
        assert result["receipts"] == [(epoch, ROWS, "exactly once") for epoch in range(4)]
        assert result["errors"][-2:] == pytest.approx(reference["errors"][-2:], rel=1e-9)
        for name, tensor in reference["ema"].items():
            torch.testing.assert_close(result["ema"][name], tensor, rtol=1e-7, atol=1e-9)
