"""A run of a Trainer, saved and resumed on other numbers of ranks by the callback alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from anyrank.testing import run_ranks

pytest.importorskip("lightning")

END, STOP = 16, 6  # steps; an epoch has 4, validation comes after each second epoch
# As under torchrun, which Lightning recognises by this variable
TORCHRUN = {"TORCHELASTIC_RUN_ID": "test"}


def train(arguments: list[str]) -> dict[str, Any]:
    """The example on this rank: its losses, what it read, and what the callbacks came to."""
    import lightning
    from examples import lightning_resume

    ids: list[int] = []

    class Seen(lightning_resume.Points):
        def __getitem__(self, index: int) -> Any:
            if len(self) == 46:
                ids.append(index)
            return super().__getitem__(index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lightning_resume, "Points", Seen)
        patch.setattr(lightning.Trainer, "save_checkpoint", lambda *_: None)
        module, elastic = lightning_resume.main(arguments)
    trainer = module.trainer
    state = elastic.state
    return {
        "losses": module.losses,
        "ids": ids,
        "report": elastic.report,
        "receipts": elastic.loader.receipts,
        "counts": (trainer.global_step, trainer.current_epoch, state.step, state.samples),
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "val": trainer.callback_metrics.get("val"),
        "weights": {
            name: getattr(value, "full_tensor", lambda value=value: value)()
            for name, value in module.state_dict().items()
        },
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run on one rank, never stopped."""
    folder = tmp_path_factory.mktemp("reference")
    return run_ranks(1, train, ["--folder", str(folder)], env=TORCHRUN)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    folder = str(tmp_path_factory.mktemp("saved"))
    return folder, run_ranks(3, train, ["--folder", folder, "--stop", str(STOP)], env=TORCHRUN)


def equal(results: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    """Losses of every step, as on one rank."""
    for result in results:
        for step, loss in result["losses"].items():
            assert loss == pytest.approx(reference["losses"][step], rel=1e-9), step


@pytest.mark.slow
def test_three_ranks_go_on_on_two_and_then_on_four(
    tmp_path: Path, reference: dict[str, Any], saved: tuple[str, list[dict[str, Any]]]
) -> None:
    folder, first = saved
    shutil.copytree(folder, tmp_path / "run")
    arguments = ["--folder", str(tmp_path / "run")]
    second = run_ranks(2, train, [*arguments, "--stop", "8"], env=TORCHRUN)
    third = run_ranks(4, train, arguments, env=TORCHRUN)
    for results, steps in ((first, range(STOP)), (second, range(STOP, 8)), (third, range(8, END))):
        equal(results, reference)
        assert list(results[0]["losses"]) == [step + 1 for step in steps]
    assert second[0]["report"].saved_on.ranks == 3
    components = second[0]["report"].components
    assert {components[part] for part in ("scheduler", "data", "lightning")} == {"exact"}
    # The rest of the second epoch: each sample on one of the ranks, and nothing else.
    read = [index for result in second for index in set(result["ids"])]
    assert sorted(read) == sorted(reference["ids"][46 + 24 : 46 + 46])
    for result in third:
        assert result["counts"] == reference["counts"]
        assert result["receipts"] == [(epoch, 46, "exactly once") for epoch in range(4)]
        assert result["lr"] == pytest.approx(reference["lr"], abs=1e-12)
        assert result["val"] == pytest.approx(reference["val"])
        # What the callback EMAWeightAveraging leaves in the module at the end
        for name, tensor in reference["weights"].items():
            torch.testing.assert_close(result["weights"][name], tensor, rtol=1e-7, atol=1e-9)
