"""Promise 7: a run's counts continue when it begins with other data, by `skip=["data"]`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import anyrank

SIZES: dict[str, Any] = {"global_batch": 4, "microbatch": 2}


def map_style(rows: int) -> anyrank.ElasticLoader:
    return anyrank.ElasticLoader(torch.ones(rows, 1), **SIZES)


def stream(rows: int) -> anyrank.ElasticLoader:
    def read(size: int) -> list[torch.Tensor]:
        return [torch.ones(1)] * size

    return anyrank.ElasticLoader.from_shards([rows // 2, rows - rows // 2], read, **SIZES)


def train(
    folder: Path, loaders: dict[str, Any], until: int, which: Any = "auto", skip: Sequence[str] = ()
) -> tuple[anyrank.TrainState, list[tuple[int, float]]]:
    """Train a run on each of its loaders in turn; also return step numbers and random numbers."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = anyrank.TrainState(model, optimizer, **loaders)
    seen: list[tuple[int, float]] = []
    with anyrank.Checkpoints(folder, state, every=1) as ckpts:
        report = ckpts.resume(which, skip=skip)
        assert report is None or report.samples == state.samples
        while state.step < until:
            for step in [*loaders.values()][state.step % len(loaders)]:
                for batch in step.microbatches(model):
                    seen.append((step.number, torch.rand(()).item()))
                    step.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
                ckpts.step_done()
                break
        assert ckpts.saved()[0].samples == state.samples
    return state, seen


@pytest.mark.parametrize("before", [map_style, stream])
@pytest.mark.parametrize("after", [map_style, stream])
def test_counts_continue_with_other_data(before: Any, after: Any, tmp_path: Path) -> None:
    _, seen = train(tmp_path, {"data": before(40)}, 4)
    loader = after(60)
    state, more = train(tmp_path, {"data": loader}, 8, skip=["data"])
    assert (state.step, state.samples, loader.step, loader.samples) == (8, 32, 8, 32)
    assert (loader.epoch, loader.consumed) == (0, 16)
    again = after(60)
    state, last = train(tmp_path, {"data": again}, 9)  # skip= was for the first resume alone
    assert (state.samples, again.samples, again.consumed) == (36, 36, 20)
    numbers = [number for number, _ in seen + more + last]
    assert numbers == [n for n in range(9) for _ in range(2)]
    drawn = [value for _, value in seen + more + last]
    assert len({*drawn}) == len(drawn)


def test_counts_continue_from_another_run(tmp_path: Path) -> None:
    train(tmp_path / "a", {"data": map_style(40)}, 4)
    state, seen = train(
        tmp_path / "b", {"data": stream(60)}, 6, tmp_path / "a/step-00000003", ["data"]
    )
    assert (state.samples, seen[0][0], seen[-1][0]) == (24, 3, 5)


def test_each_of_several_loaders_counts_on_from_its_own(tmp_path: Path) -> None:
    train(tmp_path, {"data": map_style(40), "books": map_style(80)}, 5)
    loaders = {"data": map_style(60), "books": map_style(80)}
    state, _ = train(tmp_path, loaders, 8, skip=["data"])
    assert (state.samples, loaders["data"].step, loaders["books"].step) == (32, 4, 4)
    assert (loaders["data"].consumed, loaders["books"].consumed) == (4, 16)


def test_samples_of_a_loader_that_is_gone_stay_counted(tmp_path: Path) -> None:
    train(tmp_path, {"data": map_style(40), "books": map_style(80)}, 5)
    for until in (6, 7):
        skip = ["books"] if until == 6 else []
        state, _ = train(tmp_path, {"data": map_style(40)}, until, skip=skip)
        assert state.samples == 4 * until


def test_a_loader_that_is_further_stays_where_it_is(tmp_path: Path) -> None:
    """As after a loss that has become nan: the model goes back, the data does not."""
    loader, model = map_style(80), nn.Linear(1, 1)
    state = anyrank.TrainState(model, data=loader)
    with anyrank.Checkpoints(tmp_path, state, every=1, keep=9) as ckpts:
        ckpts.resume()
        for step in ckpts.steps(until=6):
            for batch in step.microbatches(model):
                step.backward(model(batch).mean())
        ckpts.resume(2, skip=["data"])
        assert (state.step, loader.step, loader.consumed) == (2, 6, 24)


def test_counts_continue_from_another_tool(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-7"
    folder.mkdir()
    save_file({"weight": torch.ones(1, 1), "bias": torch.ones(1)}, folder / "model.safetensors")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 7, "epoch": 1.0}))
    loader, model = map_style(60), nn.Linear(1, 1)
    state = anyrank.TrainState(model, data=loader)
    with anyrank.Checkpoints(tmp_path / "run", state) as ckpts:
        ckpts.resume(folder, skip=["data"])
        assert (state.step, loader.step, loader.epoch) == (7, 7, 0)
