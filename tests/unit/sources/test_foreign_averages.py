"""Files with two sets of weights: the optimizer's are taken, or it is said that nobody knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

import anyrank


def trained() -> tuple[nn.Module, torch.optim.Optimizer, AveragedModel]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    average = AveragedModel(model)
    for _ in range(4):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return model, optimizer, average


MODEL, OPTIMIZER, AVERAGE = trained()
RAW, AVERAGED = MODEL.state_dict(), AVERAGE.module.state_dict()
NAMES = "does not say which"
KNOWN = "appears to hold averaged weights"


def begin(path: Path, **options: Any) -> tuple[nn.Module, anyrank.ResumeReport]:
    model = nn.Linear(3, 2)
    parts: dict[str, Any] = options.pop("more", {})
    state = anyrank.TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1), **parts)
    with anyrank.Checkpoints(path.parent / options.pop("at", "run"), state) as ckpts:
        report = ckpts.resume(path, **options)
    assert report is not None
    return model, report


def file_of(folder: Path, name: str = "last.pth", **tables: Any) -> Path:
    torch.save({**tables, "optimizer": OPTIMIZER.state_dict(), "step": 4}, folder / name)
    return folder / name


# Which tables a tool writes, which of them is taken, and what is warned of.
FILES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "timm": ({"state_dict": RAW, "state_dict_ema": AVERAGED}, RAW, ""),
    "torchvision": ({"model": RAW, "model_ema": AVERAGE.state_dict()}, RAW, ""),
    "BasicSR": ({"params": RAW, "params_ema": AVERAGED}, RAW, ""),
    "ignite": ({"model": RAW, "ema_model": AVERAGED}, RAW, ""),
    "the average first": ({"net_ema": AVERAGED, "net": RAW}, RAW, ""),
    "an AveragedModel": ({"model": AVERAGE.state_dict()}, AVERAGED, KNOWN),
    "YOLO, of tables": ({"model": None, "ema": AVERAGED}, AVERAGED, KNOWN),
    "two of a kind": ({"model": RAW, "online": AVERAGED}, RAW, NAMES),
    "of another shape": ({"model": RAW, "critic": nn.Linear(2, 2).state_dict()}, RAW, ""),
}


@pytest.mark.parametrize("tool", FILES)
def test_the_optimizers_weights_are_taken_or_it_is_said(tool: str, tmp_path: Path) -> None:
    tables, expected, words = FILES[tool]
    model, report = begin(file_of(tmp_path, **tables))
    torch.testing.assert_close(dict(model.state_dict()), dict(expected), rtol=0, atol=0)
    warned = [note for note in report.notes if KNOWN in note or NAMES in note]
    assert [words in note for note in warned] == [True] * bool(words)


def test_a_file_that_is_named_after_an_average_is_named(tmp_path: Path) -> None:
    _, report = begin(file_of(tmp_path, "epoch3-EMA.ckpt", state_dict=AVERAGED))  # as NeMo's
    assert any(KNOWN in note and "epoch3-EMA.ckpt" in note for note in report.notes)
    _, report = begin(file_of(tmp_path, "ema_run.ckpt", state_dict=RAW, state_dict_ema=AVERAGED))
    assert not any(KNOWN in note for note in report.notes)


@pytest.mark.parametrize(
    ("tables", "name", "expected", "words"),
    [
        ({"student": RAW, "teacher": AVERAGED}, "student", RAW, ""),  # as DINO's
        ({"student": RAW, "teacher": AVERAGED}, "teacher", AVERAGED, KNOWN),
        (
            {"online": RAW, "target": AVERAGED},
            "target",
            AVERAGED,
            "",
        ),  # as BYOL's: the user says it
    ],
)
def test_without_a_models_name_the_user_gives_it(
    tables: dict[str, Any], name: str, expected: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = file_of(tmp_path, **tables)
    with pytest.raises(
        anyrank.CheckpointError, match=r"which table holds the model's weights.*parts="
    ):
        begin(path)
    model, report = begin(path, parts={"model": name})
    torch.testing.assert_close(dict(model.state_dict()), dict(expected), rtol=0, atol=0)
    warned = [note for note in report.notes if KNOWN in note or NAMES in note]
    assert [words in note for note in warned] == [True] * bool(words)


def test_without_an_optimizer_an_average_is_as_good(tmp_path: Path) -> None:
    path = file_of(tmp_path, model=AVERAGE.state_dict())
    _, report = begin(path, skip=["optimizer"])
    assert not any(KNOWN in note for note in report.notes)


def test_a_second_model_of_accelerate_is_named_unless_it_is_a_part(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint_0"
    folder.mkdir()
    save_file(RAW, folder / "model.safetensors")
    save_file(AVERAGED, folder / "model_1.safetensors")
    torch.save(OPTIMIZER.state_dict(), folder / "optimizer.bin")
    torch.save({"step": 4}, folder / "random_states_0.pkl")
    model, report = begin(folder)
    assert torch.equal(model.state_dict()["weight"], RAW["weight"])
    assert any(NAMES in note and "model_1" in note for note in report.notes)
    _, report = begin(
        folder.rename(tmp_path / "other"), more={"model_1": nn.Linear(3, 2)}, at="second"
    )
    assert not any(NAMES in note for note in report.notes)


@pytest.mark.parametrize("part", ["ema", "WeightAveraging_average_model"])
@pytest.mark.parametrize("kind", ["a copy", "torch's AveragedModel"])
def test_lightnings_average_goes_to_the_part_of_its_shapes(
    kind: str, part: str, tmp_path: Path
) -> None:
    extra = {"n_averaged": AVERAGE.n_averaged}
    tables = {"state_dict": AVERAGED, "current_model_state": RAW, "averaging_state": extra}
    path = file_of(tmp_path, "last.ckpt", **tables)
    average = nn.Linear(3, 2) if kind == "a copy" else AveragedModel(nn.Linear(3, 2))
    model, report = begin(path, more={part: average})
    assert torch.equal(model.state_dict()["weight"], RAW["weight"])
    inner = average.module if isinstance(average, AveragedModel) else average
    assert torch.equal(inner.state_dict()["weight"], AVERAGED["weight"])
    assert getattr(average, "n_averaged", 4) == 4
    assert report.components["model"] == report.components[part] == "exact"
    assert not any(KNOWN in note or NAMES in note for note in report.notes)
    plain = nn.Linear(3, 2)
    anyrank.load(plain, path)  # weights alone are what evaluates best, as in Lightning
    assert torch.equal(plain.weight, AVERAGED["weight"])


class Wrapper(nn.Module):
    """As timm's ModelEma is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model


@pytest.mark.parametrize("rename", [None, [("^", "module.")], {"": "module"}])
@pytest.mark.parametrize("of_average", ["", "module.", "module.module."])
@pytest.mark.parametrize("of_model", ["", "module."])
@pytest.mark.parametrize("make", [AveragedModel, Wrapper, lambda model: model])
def test_the_wrappers_prefix_is_each_parts_own(
    make: Any, of_model: str, of_average: str, rename: Any, tmp_path: Path
) -> None:
    tables = {"state_dict": (of_model, RAW), "state_dict_ema": (of_average, AVERAGED)}
    named = {
        table: {prefix + key: value for key, value in values.items()}
        for table, (prefix, values) in tables.items()
    }
    average = make(nn.Linear(3, 2))
    model, report = begin(file_of(tmp_path, **named), more={"ema": average}, rename=rename)
    inner = getattr(average, "module", average)
    assert torch.equal(model.state_dict()["weight"], RAW["weight"])
    assert torch.equal(inner.state_dict()["weight"], AVERAGED["weight"])
    assert report.components["model"] == "exact"
    assert report.components["ema"] == ("derived" if make is AveragedModel else "exact")


@pytest.mark.parametrize("fresh", [(), ("n_averaged",), ("*averaged",)])
@pytest.mark.parametrize("step", [4, None])
@pytest.mark.parametrize("own", [0, 7])
def test_an_average_without_a_counter_outlives_the_next_update(
    own: int, step: int | None, fresh: tuple[str, ...], tmp_path: Path
) -> None:
    tables: dict[str, Any] = {"state_dict": RAW, "state_dict_ema": AVERAGED}
    torch.save(tables | ({"step": step} if step else {}), tmp_path / "last.pth")
    average = AveragedModel(nn.Linear(3, 2))
    average.n_averaged.fill_(own)
    model, report = begin(tmp_path / "last.pth", more={"ema": average}, fresh=fresh)
    count = own or step or 1
    assert int(average.n_averaged) == count
    assert (
        f"n_averaged is set to {count}, because the checkpoint" in report.components["ema"].reason
    )
    average.update_parameters(model)
    expected = AVERAGED["weight"] + (RAW["weight"] - AVERAGED["weight"]) / (count + 1)
    torch.testing.assert_close(average.module.state_dict()["weight"], expected)


def test_an_average_that_is_not_in_the_file_still_begins_with_the_weights(tmp_path: Path) -> None:
    average = AveragedModel(nn.Linear(3, 2))
    model, report = begin(file_of(tmp_path, state_dict=RAW), more={"ema": average})
    assert report.components["ema"] == "fresh"
    average.update_parameters(model)
    assert torch.equal(average.module.state_dict()["weight"], RAW["weight"])
