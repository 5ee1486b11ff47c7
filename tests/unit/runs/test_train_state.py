"""TrainState and Checkpoints in one process: parts of every kind, bad input, locks, cadence."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.runs import resume, save
from torch import nn
from torch.optim.swa_utils import AveragedModel

import anyrank
from anyrank.files.json_codec import from_json, to_json
from anyrank.runs.resume.options import parse_cadence
from anyrank.testing import RanksFailed, run_ranks


def build(width: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 6), nn.BatchNorm1d(6), nn.Linear(6, width))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Tracker:
    """Anything with the two methods: numbers of all kinds, and tensors."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


def save_one(path: Path, **parts: Any) -> anyrank.TrainState:
    model, optimizer = build()
    step(model, optimizer)
    state = anyrank.TrainState(model, optimizer, **parts)
    with anyrank.Checkpoints(path, state) as ckpts:
        ckpts.step_done()
        ckpts.save()
    return state


SCHEDULERS = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=20),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_goes_on(tmp_path: Path, name: str) -> None:
    runs: list[list[float]] = []
    for is_resumed in (False, True):
        model, optimizer = build()
        schedule = SCHEDULERS[name](optimizer)
        state = anyrank.TrainState(model, optimizer, scheduler=schedule)
        with anyrank.Checkpoints(tmp_path, state) as ckpts:
            if is_resumed:
                ckpts.resume(3)  # the newest is the last step, saved on leaving
            rates: list[float] = []
            for number in range(3 if is_resumed else 0, 8):
                step(model, optimizer)
                schedule.step(1.0) if name == "plateau" else schedule.step()
                rates.append(optimizer.param_groups[0]["lr"])
                ckpts.step_done()
                if number == 2 and not is_resumed:
                    ckpts.save()
        runs.append(rates)
    assert runs[0][3:] == runs[1]


def test_every_kind_of_part_is_saved_and_resumed(tmp_path: Path) -> None:
    model, optimizer = build()
    ema = AveragedModel(model, use_buffers=True)
    other = torch.optim.SGD(ema.module.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    noise = torch.Generator().manual_seed(5)
    value = {"best": float("-inf"), "seen": (1, 2), "table": torch.arange(3), 4: {"x", "y"}}
    tracker = Tracker(value)
    parts = {"scaler": scaler, "ema": ema, "second": other, "tracker": tracker}
    state = anyrank.TrainState(model, optimizer, generators={"noise": noise}, **parts)
    step(model, optimizer)
    ema.update_parameters(model)
    torch.rand(3, generator=noise)
    with anyrank.Checkpoints(tmp_path, state) as ckpts:
        ckpts.step_done()
        ckpts.save()
    expected = copy.deepcopy(ema.state_dict()), torch.rand(3), torch.rand(3, generator=noise)

    torch.manual_seed(77)
    model, optimizer = build()
    ema = AveragedModel(model, use_buffers=True)
    noise = torch.Generator()
    other = torch.optim.SGD(ema.module.parameters(), lr=0.1)
    tracker, scaler = Tracker(), torch.amp.GradScaler("cpu")
    parts = {"scaler": scaler, "ema": ema, "second": other, "tracker": tracker}
    fresh = anyrank.TrainState(model, optimizer, generators={"noise": noise}, **parts)
    report = resume(tmp_path, fresh, "must")
    assert report is not None
    assert set(report.components.values()) == {"exact"}
    found = ema.state_dict(), torch.rand(3), torch.rand(3, generator=noise)
    assert found[0].keys() == expected[0].keys()
    assert all(torch.equal(found[0][key], expected[0][key]) for key in found[0])
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2], expected[2])
    assert torch.equal(tracker.value.pop("table"), torch.arange(3))
    value.pop("table")
    assert tracker.value == value
    assert type(tracker.value["seen"]) is tuple
    assert other.param_groups[0]["lr"] == 0.5
    assert scaler.get_scale() == 8.0
    assert json.loads(report.to_json())["components"]["ema"] == "exact"


def test_a_scaler_that_was_off_stays_as_it_is(tmp_path: Path) -> None:
    save_one(tmp_path, scaler=torch.amp.GradScaler("cpu", enabled=False))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    report = resume(tmp_path, anyrank.TrainState(*build(), scaler=scaler))
    assert report is not None
    assert report.components["scaler"] == "fresh"
    assert report.components["scaler"].reason == "it had no state when it was saved"
    assert scaler.get_scale() == 4.0


def test_frozen_parts_are_stored_by_source_and_hash(tmp_path: Path) -> None:
    source = str(tmp_path / "vae.safetensors")
    part = nn.Linear(4, 4)
    save_file(part.state_dict(), source)

    def whole(frozen: nn.Module, source: str | None) -> nn.Module:
        torch.manual_seed(1)
        return nn.ModuleDict(
            {"vae": anyrank.freeze(frozen, source=source), "head": nn.Linear(4, 4)}
        )

    run = tmp_path / "run"
    save(run, anyrank.TrainState(whole(part, source)))
    listed = json.loads((run / "step-00000000" / "tensors.json").read_text())["tensors"]
    assert sorted(name for name, *_ in listed if name.startswith("model.")) == [
        "model.head.bias",
        "model.head.weight",
    ]
    with anyrank.meta():
        without_values = nn.Linear(4, 4)
    model = whole(without_values, source)
    resume(run, anyrank.TrainState(model))
    assert torch.equal(model["vae"].weight, part.weight)
    other = whole(nn.Linear(4, 4), source)
    with pytest.raises(anyrank.CheckpointError, match=r"model.vae: is frozen, and had the digest"):
        resume(run, anyrank.TrainState(other))
    thawed = nn.ModuleDict({"vae": nn.Linear(4, 4), "head": nn.Linear(4, 4)})
    with pytest.raises(anyrank.CheckpointError, match="was frozen with source"):
        resume(run, anyrank.TrainState(thawed))
    Path(source).unlink()
    with anyrank.meta():
        unread = whole(nn.Linear(4, 4), source)
    with pytest.raises(anyrank.CheckpointError, match=r"model.vae: its source cannot be read"):
        resume(run, anyrank.TrainState(unread))


@pytest.mark.parametrize("source", [None, "vae.safetensors"])
def test_a_frozen_part_that_was_written_to_is_not_saved(tmp_path: Path, source: str | None) -> None:
    part = anyrank.freeze(nn.ModuleDict({"head": nn.Linear(2, 2)}), source=source)
    with anyrank.Checkpoints(tmp_path, anyrank.TrainState(nn.ModuleDict({"vae": part}))) as ckpts:
        with torch.no_grad():
            part["head"].weight.add_(1)
        with pytest.raises(
            anyrank.CheckpointError, match=r"^model.vae.head.weight: is frozen, and was"
        ):
            ckpts.save()
        assert ckpts.saved() == []


@pytest.mark.parametrize("call", ["save", "resume"])
def test_a_model_that_holds_no_plain_tensors_is_refused(tmp_path: Path, call: str) -> None:
    if call == "resume":
        save(tmp_path, anyrank.TrainState(nn.Linear(4, 4)))
    ckpts = anyrank.Checkpoints(tmp_path, anyrank.TrainState(nn.LazyLinear(4)))
    with pytest.raises(anyrank.CheckpointError, match="weight: is a lazy parameter"):
        getattr(ckpts, call)()
    ckpts.close()


def test_tied_weights_are_stored_once_and_other_tools_find_both_names(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    with anyrank.Checkpoints(tmp_path, anyrank.TrainState(model)) as ckpts:
        ckpts.save()
        folder = Path(ckpts.latest() or "")
    listed = json.loads((folder / "tensors.json").read_text())["tensors"]
    assert "model.b.weight" not in [name for name, *_ in listed]
    untied = {"model": nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}).state_dict()}
    with warnings.catch_warnings(action="ignore"):
        torch.distributed.checkpoint.load(untied, checkpoint_id=folder, no_dist=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(untied["model"][name], tensor)


# -- what does not fit ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0),
    ],
)
def test_a_scheduler_of_another_class_is_refused_before_anything_moves(
    tmp_path: Path, make: Any
) -> None:
    model, optimizer = build()
    save_one(tmp_path, scheduler=torch.optim.lr_scheduler.StepLR(build()[1], 2))
    scheduler = make(optimizer)
    state = anyrank.TrainState(model, optimizer, scheduler=scheduler)
    before, weight = scheduler.state_dict(), next(model.parameters()).detach().clone()
    name = type(scheduler).__name__
    text = rf"scheduler: is a {name}, but the checkpoint was saved with a StepLR.*\n?.*skip="
    with pytest.raises(anyrank.CheckpointError, match=text):
        resume(tmp_path, state)
    assert scheduler.state_dict() == before
    assert torch.equal(next(model.parameters()), weight)
    report = resume(tmp_path, state, skip=["scheduler"])
    assert report is not None
    assert report.components["scheduler"] == "skipped"


def misfits() -> dict[str, tuple[Any, str]]:
    model, _ = build()
    wide = build(5)
    half = build()[0].half()
    extra = nn.Sequential(*model, nn.Linear(4, 4))
    return {
        "another shape": (wide, r"model.0.weight: has shape \[6, 5\], but \[6, 4\] in"),
        "another dtype": ((half, torch.optim.AdamW(half.parameters())), "a resume does not cast"),
        "a new layer": (
            (extra, torch.optim.AdamW(extra.parameters())),
            "missing from the checkpoint: 3.",
        ),
        "fewer layers": (
            (model[:2], torch.optim.AdamW(model[:2].parameters())),
            "in the checkpoint, but not in the model: 2.",
        ),
        "no optimizer": ((model,), "the checkpoint has the part optimizer, but the TrainState"),
    }


@pytest.mark.parametrize("case", misfits())
def test_a_state_that_does_not_fit_is_left_as_it_was(tmp_path: Path, case: str) -> None:
    save_one(tmp_path)
    parts, match = misfits()[case]
    before = copy.deepcopy(parts[0].state_dict())
    files = sorted(tmp_path.rglob("*"))
    state = anyrank.TrainState(*parts)
    with anyrank.Checkpoints(tmp_path, state) as ckpts:
        with pytest.raises(anyrank.CheckpointError, match=match):
            ckpts.resume()
        state.parts.check_usable()
    assert all(torch.equal(tensor, before[name]) for name, tensor in parts[0].state_dict().items())
    assert sorted(tmp_path.rglob("*")) == files


def test_a_part_can_be_left_out(tmp_path: Path) -> None:
    save_one(tmp_path)
    model, _ = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    report = resume(tmp_path, anyrank.TrainState(model, optimizer), skip=["optimizer"])
    assert report is not None
    assert report.components["optimizer"] == "skipped"
    assert report.components["model"] == "exact"
    assert not optimizer.state


def test_another_dataset_is_refused_before_anything_changes(tmp_path: Path) -> None:
    loader = anyrank.ElasticLoader(list(range(10)), global_batch=2, microbatch=1)
    save_one(tmp_path, data=loader)
    model, optimizer = build()
    before = copy.deepcopy(model.state_dict())
    other = anyrank.ElasticLoader(list(range(11)), global_batch=2, microbatch=1)
    with pytest.raises(
        anyrank.CheckpointError, match="a dataset of length 10, but this loader has 11"
    ):
        resume(tmp_path, anyrank.TrainState(model, optimizer, data=other))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_proof_of_finished_epochs_is_kept(tmp_path: Path) -> None:
    def make() -> tuple[anyrank.ElasticLoader, anyrank.TrainState]:
        loader = anyrank.ElasticLoader(torch.arange(10.0), global_batch=4, microbatch=2)
        return loader, anyrank.TrainState(*build(), data=loader)

    loader, state = make()
    with anyrank.Checkpoints(tmp_path, state) as ckpts:
        for epoch in range(3):
            for number, one in enumerate(loader):
                for _ in one.microbatches(nn.Linear(1, 1)):
                    pass
                ckpts.step_done()
                if epoch == 2 and number == 1:
                    ckpts.save()
                    break
    loader, state = make()
    with anyrank.Checkpoints(tmp_path, state) as ckpts:
        report = ckpts.resume()
        assert report is not None
        assert (report.epoch, report.samples) == (2, 28)
        assert report.notes == ["epochs 0 to 1: 10 samples each, exactly once"]
        for one in loader:
            for _ in one.microbatches(nn.Linear(1, 1)):
                pass
            ckpts.step_done()
    assert [tuple(one) for one in loader.receipts] == [(n, 10, "exactly once") for n in range(3)]


def test_a_folder_of_weights_is_no_run(tmp_path: Path) -> None:
    model, _ = build()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with anyrank.Checkpoints(tmp_path, anyrank.TrainState(model)) as ckpts:
        for which in ("auto", "must"):
            with pytest.raises(anyrank.CheckpointError, match=r"model.safetensors.*anyrank.load"):
                ckpts.resume(which)


def test_verify_says_what_is_compared(tmp_path: Path) -> None:
    save_one(tmp_path)
    step = tmp_path / "step-00000001"
    (*_, first_byte), *_ = json.loads((step / "__0_0.json").read_text())["boxes"]
    data = bytearray((step / "__0_0.distcp").read_bytes())
    data[first_byte] ^= 1
    (step / "__0_0.distcp").write_bytes(data)
    assert resume(tmp_path, anyrank.TrainState(*build()), verify=False) is not None
    with pytest.raises(anyrank.CorruptCheckpoint, match="its only checkpoint is corrupt"):
        resume(tmp_path, anyrank.TrainState(*build()), verify=True)


def test_a_save_within_a_step_is_refused(tmp_path: Path) -> None:
    loader = anyrank.ElasticLoader(torch.arange(8.0), global_batch=4, microbatch=2)
    model, optimizer = build()
    state = anyrank.TrainState(model, optimizer, data=loader)
    with anyrank.Checkpoints(tmp_path, state) as ckpts:
        for number, one in enumerate(loader):
            for _ in one.microbatches(model):
                with pytest.raises(anyrank.CheckpointError, match="in the middle of a step"):
                    ckpts.save()
            ckpts.step_done()
            ckpts.save()
            assert state.samples == 4 * (number + 1)
    assert [one.samples for one in ckpts.saved()] == [8, 4]


def test_nan_is_the_users_business(tmp_path: Path) -> None:
    model, optimizer = build()
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    save(tmp_path, anyrank.TrainState(model, optimizer, tracker=Tracker(float("nan"))))
    fresh, other = build()
    tracker = Tracker()
    resume(tmp_path, anyrank.TrainState(fresh, other, tracker=tracker), "must")
    assert fresh[0].weight.isnan().all()
    assert tracker.value != tracker.value


STATE = anyrank.TrainState()


def test_a_rename_without_a_path_is_told() -> None:
    with pytest.raises(ValueError, match="whose path must be passed"):
        anyrank.Checkpoints("x", anyrank.TrainState()).resume("must", rename={})


# -- when and where -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "expected"),
    [(500, (500, None)), ("500", (500, None)), ("10min", (None, 600.0)), ("1.5 h", (None, 5400.0))],
)
def test_a_cadence_is_steps_or_time(every: Any, expected: tuple[Any, Any]) -> None:
    found = parse_cadence(every)
    assert (found.steps, found.seconds) == expected


def test_saves_come_when_due_and_old_ones_go(tmp_path: Path) -> None:
    state = anyrank.TrainState(*build())
    seen: list[int] = []
    with anyrank.Checkpoints(
        tmp_path,
        state,
        every=2,
        keep_every=4,
        keep=2,
        on_commit=lambda record: seen.append(record.step),
    ) as ckpts:
        for _ in range(12):
            ckpts.step_done()
        assert [one.step for one in ckpts.saved()] == [12, 10, 8, 4]
        assert ckpts.latest() == str(tmp_path / "step-00000012")
        assert seen == [2, 4, 6, 8, 10, 12]
        ckpts.save(unless_saved=True)
        assert len(seen) == 6
    assert (tmp_path / "latest").read_text() == "step-00000012\n"
    assert not (tmp_path / ".lock").exists()


def test_a_function_says_which_steps_stay(tmp_path: Path) -> None:
    state, best = anyrank.TrainState(*build()), {3}
    with anyrank.Checkpoints(
        tmp_path, state, every=1, keep=2, keep_every=lambda step: step in best
    ) as ckpts:
        for _ in range(6):
            ckpts.step_done()
        assert [one.step for one in ckpts.saved()] == [6, 5, 3]
        best.clear()
        ckpts.step_done()
        assert [one.step for one in ckpts.saved()] == [7, 6]


def test_retention_never_goes_under_two_good_ones(tmp_path: Path) -> None:
    state = anyrank.TrainState(*build())
    with anyrank.Checkpoints(tmp_path, state, every=1, keep=2) as ckpts:
        for number in range(4):
            ckpts.step_done()
            if number == 2:
                (tmp_path / "step-00000003" / "tensors.json").unlink()
        assert sorted(path.name for path in tmp_path.glob("step-*")) == [
            "step-00000002",
            "step-00000003",
            "step-00000004",
        ]


def test_a_run_can_branch_off_an_older_step(tmp_path: Path) -> None:
    state = anyrank.TrainState(*build())
    with anyrank.Checkpoints(tmp_path, state, every=1, keep=9) as ckpts:
        for _ in range(5):
            ckpts.step_done()
    with anyrank.Checkpoints(tmp_path, state, every=2, keep=9) as ckpts:
        ckpts.resume(2)
        assert len(ckpts.saved()) == 5  # to look is not to leave
        ckpts.step_done()
        ckpts.step_done()
        assert [one.step for one in ckpts.saved()] == [4, 2, 1]
    aside = sorted(path.name for path in tmp_path.glob(".aside-superseded-*"))
    assert aside == [f".aside-superseded-step-0000000{number}" for number in (3, 4, 5)]


def test_time_is_a_cadence(tmp_path: Path) -> None:
    state = anyrank.TrainState(*build())
    with anyrank.Checkpoints(tmp_path, state, every="1h") as ckpts:
        ckpts.step_done()
        assert ckpts.saved() == []
        ckpts._last_save -= 3601
        ckpts.step_done()
        assert [one.step for one in ckpts.saved()] == [2]


def job_save(path: str, ends: bool = False) -> None:
    """A run of another process, which may end with its lock."""
    anyrank.Checkpoints(path, anyrank.TrainState(nn.Linear(2, 2))).save()
    if ends:
        os._exit(1)


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    state = anyrank.TrainState(*build())
    with anyrank.Checkpoints(tmp_path, state) as ckpts:
        ckpts.save()
        with pytest.raises(
            RanksFailed, match=rf"writing to this folder \(process {os.getpid()} on "
        ):
            run_ranks(1, job_save, str(tmp_path), init=False)


def test_a_new_run_does_not_mix_with_an_old_one(tmp_path: Path) -> None:
    save_one(tmp_path)
    state = anyrank.TrainState(*build())
    with anyrank.Checkpoints(tmp_path, state) as ckpts:
        with pytest.raises(anyrank.CheckpointError, match="contains step 1 of a different run"):
            ckpts.save()
        assert not (tmp_path / ".lock").exists()
        ckpts.resume()
        ckpts.step_done()
        ckpts.save()
        assert [one.step for one in ckpts.saved()] == [2, 1]


def test_the_lock_of_a_dead_process_is_stale(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="exited with code 1"):
        run_ranks(1, job_save, str(tmp_path), init=False, ends=True)
    assert (tmp_path / ".lock").exists()
    state = anyrank.TrainState(nn.Linear(2, 2))
    with anyrank.Checkpoints(tmp_path, state) as ckpts:
        ckpts.resume()
        ckpts.step_done()
        ckpts.save()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_at_the_next_step_boundary(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    state = anyrank.TrainState(*build())
    with anyrank.Checkpoints(tmp_path, state) as ckpts:
        ckpts.step_done()
        signal.raise_signal(number)
        if number == signal.SIGTERM:
            with pytest.raises(SystemExit) as ended:
                ckpts.step_done()
            assert ended.value.code == 128 + signal.SIGTERM
        else:
            ckpts.step_done()
            ckpts.step_done()
        assert [one.step for one in ckpts.saved()] == [2]
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("how", ["with", "resume"])
def test_a_signal_before_the_first_step_saves_at_its_end(tmp_path: Path, how: str) -> None:
    ckpts = anyrank.Checkpoints(tmp_path, anyrank.TrainState(*build()))
    with ckpts if how == "with" else contextlib.closing(ckpts):
        if how == "resume":
            ckpts.resume("auto")
        signal.raise_signal(signal.SIGUSR1)
        ckpts.step_done()
        assert [one.step for one in ckpts.saved()] == [1]


@pytest.mark.parametrize("how", ["with", "close"])
def test_a_sigterm_after_the_last_boundary_reaches_the_process_at_the_end(
    tmp_path: Path, how: str
) -> None:
    reached: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: reached.append(number))
    try:
        state = anyrank.TrainState(*build())
        with anyrank.Checkpoints(tmp_path, state) as ckpts:
            ckpts.step_done()
            signal.raise_signal(signal.SIGTERM)  # as in a last evaluation
            if how == "close":
                ckpts.save()
                ckpts.close()
            assert reached == ([] if how == "with" else [signal.SIGTERM])
        assert reached == [signal.SIGTERM]
        assert [one.step for one in ckpts.saved()] == [1]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("where", ["commit", "position.advance"])
def test_a_step_that_was_interrupted_while_it_was_counted_is_not_trained_again(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = build()
    loader = anyrank.ElasticLoader(torch.randn(16, 4), global_batch=4, microbatch=2)
    state = anyrank.TrainState(model, optimizer, data=loader)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def train(ckpts: anyrank.Checkpoints, interrupted: int | None = None) -> None:
        for step in ckpts.steps(until=3):
            for x in step.microbatches(model):
                step.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if step.number == interrupted:
                *path, name = where.split(".")
                monkeypatch.setattr(getattr(loader, path[0]) if path else loader, name, interrupt)

    with anyrank.Checkpoints(tmp_path, state, every=1) as ckpts:
        with pytest.raises(KeyboardInterrupt):
            train(ckpts, 1)
        monkeypatch.undo()
        for call in (lambda: train(ckpts), ckpts.step_done, ckpts.save):
            with pytest.raises(anyrank.CheckpointError, match="interrupted while it was counted"):
                call()
        ckpts.resume("must")
        train(ckpts)
        assert [one.step for one in ckpts.saved()] == [3, 2, 1]


class Counts(nn.Linear):
    """A module with a value of its own in its state_dict()."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "count"] = torch.ones(())


class Whole(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {**super().state_dict(*args, **kwargs), "count": torch.ones(())}


def hooked() -> nn.Module:
    module = nn.Linear(4, 4)
    module.register_state_dict_post_hook(
        lambda module, state, prefix, _: state.update({f"{prefix}count": torch.ones(())})
    )
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda: Counts(4, 4),
        lambda: nn.Sequential(nn.Linear(4, 4), Counts(4, 4)),
        lambda: Whole(4, 4),
        hooked,
    ],
    ids=["override", "inside", "state_dict", "hook"],
)
def test_what_only_a_modules_own_code_saves_is_refused_by_name(tmp_path: Path, make: Any) -> None:
    with pytest.raises(anyrank.CheckpointError, match=r"by its own code.*count\. Register them"):
        save(tmp_path, anyrank.TrainState(make()))


def test_own_code_that_adds_nothing_of_its_own_is_saved_as_ever(tmp_path: Path) -> None:
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4))
    model.register_state_dict_post_hook(  # as the scales of a quantized weight
        lambda module, state, *_: state.update({"1.weight.scale": torch.ones(())})
    )
    state = anyrank.TrainState(torch.compile(model, backend="eager"))
    save(tmp_path / "a", state)
    assert resume(tmp_path / "a", state).components["model"] == "exact"
    model.requires_grad_(False)
    model[1].weight.requires_grad_()
    state = anyrank.TrainState(model, torch.optim.SGD(model[1].parameters(), lr=0.1), base="x")
    save(tmp_path / "b", state)
    assert resume(tmp_path / "b", state).components["model"] == "exact"


def test_what_differs_is_logged_as_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_one(tmp_path)
    with caplog.at_level(logging.WARNING, "anyrank"):
        resume(tmp_path, anyrank.TrainState(*build()))
        assert caplog.messages == []
        resume(tmp_path, anyrank.TrainState(build()[0]), skip=["optimizer"])
    assert caplog.messages == ["optimizer is skipped: requested with skip="]


def test_the_random_streams_are_skipped_by_their_name(tmp_path: Path) -> None:
    torch.manual_seed(1)
    save_one(tmp_path)
    torch.manual_seed(2)
    right = torch.rand(3)
    for skip, is_right in ((["random"], True), ([], False)):
        state = anyrank.TrainState(*build())
        torch.manual_seed(2)
        report = resume(tmp_path, state, skip=skip)
        assert report.components["random"] == ("skipped" if skip else "exact")
        assert torch.equal(torch.rand(3), right) is is_right


# -- values as JSON -------------------------------------------------------------------------------


def test_values_come_back_with_their_types() -> None:
    import numpy as np

    kept: list[torch.Tensor] = []

    def put(where: str, tensor: torch.Tensor) -> Any:
        kept.append(tensor)
        return {"~kept": len(kept) - 1}

    value = {
        "plain": [None, True, 3, 1 << 70, 2.5, "text"],
        "floats": (float("inf"), float("-inf")),
        "keys": {1: "a", (2, 3): {"~odd": b"\x00\xff"}},
        "sets": [{1, 2}, frozenset({"x"})],
        "torch": [torch.float8_e4m3fn, torch.device("cpu"), torch.ones(2)],
        "numpy": [np.int16(3), np.float32(0.1), np.complex64(1j), np.array(2.5), np.arange(3)],
    }
    text = json.dumps(to_json(value, "value", put))
    found = from_json(json.loads(text), lambda table: kept[table["~kept"]])
    assert torch.equal(found["torch"].pop(), value["torch"].pop())  # type: ignore[attr-defined]
    assert np.array_equal(found["numpy"].pop(), value["numpy"].pop())  # type: ignore[attr-defined]
    assert found == value
    kinds = [int, np.float32, np.complex64, np.ndarray]
    assert [type(number) for number in found["numpy"]] == kinds  # type: ignore[attr-defined]
    assert from_json(to_json(np.array("adam"), "x", put), dict) == "adam"
    assert np.isnan(from_json(to_json(float("nan"), "x", put), dict))


@pytest.mark.parametrize("value", [object(), print, 1j, slice(3), Path("x")])
def test_other_values_are_refused_by_key(value: Any) -> None:
    with pytest.raises(anyrank.CheckpointError, match=r"^part.a.1: a .* cannot be saved"):
        to_json({"a": [1, value]}, "part", lambda where, tensor: None)


# -- what would be lost without a word ------------------------------------------------------------


class Extra(nn.Module):
    """A module with a state of its own beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.count: Any = None

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


@pytest.mark.parametrize("value", [7, {"amax": torch.arange(3.0)}, io.BytesIO(b"bytes")], ids=str)
def test_extra_state_of_modules_is_kept(tmp_path: Path, value: Any) -> None:
    model = nn.ModuleDict({"a": Extra(), "b": nn.Linear(2, 2)})
    model["a"].count = value
    save(tmp_path, anyrank.TrainState(model))
    fresh = nn.ModuleDict({"a": Extra(), "b": nn.Linear(2, 2)})
    resume(tmp_path, anyrank.TrainState(fresh))
    found = fresh["a"].count
    if isinstance(value, dict):
        assert torch.equal(found["amax"], value["amax"])
    else:
        assert getattr(found, "getvalue", lambda: found)() in (7, b"bytes")
    plain = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2)})
    with pytest.raises(anyrank.CheckpointError, match="extra state of modules that are not"):
        resume(tmp_path, anyrank.TrainState(plain))


def with_frozen(source: str | None, count: Any) -> nn.Module:
    """A model with extra state in a frozen part, and below a frozen part."""
    parts = [Extra(), nn.ModuleDict({"inner": Extra()})]
    model = nn.ModuleDict({f"{n}": part for n, part in enumerate(parts)} | {"own": Extra()})
    for module in model.modules():
        if isinstance(module, Extra):
            module.count = count
    for part in parts:
        anyrank.freeze(part, source=source)
    return model


def counts(model: Any) -> list[Any]:
    return [model["0"].count, model["1"]["inner"].count, model["own"].count]


@pytest.mark.parametrize("value", [7, torch.arange(3.0)], ids=["number", "tensor"])
def test_extra_state_of_frozen_parts_is_kept_with_their_weights(tmp_path: Path, value: Any) -> None:
    save(tmp_path, anyrank.TrainState(with_frozen(None, value)))
    state = anyrank.TrainState(with_frozen(None, value * 0))
    with anyrank.Checkpoints(tmp_path, state) as ckpts:
        ckpts.resume()
        found = torch.stack([torch.as_tensor(one) for one in counts(state.parts.by_name["model"])])
        assert bool((found == value).all())
        state.step += 1
        ckpts.save()  # the parts are what they were when they were resumed


def test_extra_state_of_frozen_parts_with_a_source_stays_there(tmp_path: Path) -> None:
    save(tmp_path, anyrank.TrainState(with_frozen("elsewhere.safetensors", 7)))
    fresh = with_frozen("elsewhere.safetensors", 1)
    resume(tmp_path, anyrank.TrainState(fresh))
    assert counts(fresh) == [1, 1, 7]


@pytest.mark.parametrize(
    "value",
    [{"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, {1: torch.ones(1), "1": torch.ones(1)}],
)
def test_two_tensors_of_one_name_are_refused_at_the_save(tmp_path: Path, value: Any) -> None:
    state = anyrank.TrainState(nn.Linear(1, 1), tracker=Tracker(value))
    with pytest.raises(anyrank.CheckpointError, match=r"saved under the name tracker\.value"):
        save(tmp_path, state)


def test_modules_with_alike_names_do_not_meet(tmp_path: Path) -> None:
    def make() -> tuple[anyrank.TrainState, torch.optim.Optimizer]:
        model = nn.ModuleDict({"head": nn.Linear(2, 2)})
        head = nn.Linear(2, 2)
        optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
        return anyrank.TrainState(model, optimizer, head=head), optimizer

    state, optimizer = make()
    for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    fresh, other = make()
    save(tmp_path, state)
    resume(tmp_path, fresh)
    for mine, theirs in zip(other.state.values(), optimizer.state.values(), strict=True):
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"])


def test_tensors_without_elements_come_back(tmp_path: Path) -> None:
    state = anyrank.TrainState(nn.Linear(1, 1), tracker=Tracker(torch.empty(0, 3)))
    fresh = anyrank.TrainState(nn.Linear(1, 1), tracker=Tracker())
    save(tmp_path, state)
    resume(tmp_path, fresh)
    assert fresh.parts.by_name["tracker"].value.shape == (0, 3)


def test_weights_that_were_apart_are_not_tied(tmp_path: Path) -> None:
    apart = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    tied = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    tied["b"].weight = tied["a"].weight
    save(tmp_path, anyrank.TrainState(apart))
    with pytest.raises(anyrank.CheckpointError, match="several in the checkpoint"):
        resume(tmp_path, anyrank.TrainState(tied))


def test_wrapped_tensors_are_refused_by_name(tmp_path: Path) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    tracker = Tracker(TwoTensor(torch.ones(2), torch.ones(2)))
    with pytest.raises(anyrank.AnyrankError, match=r"tracker\.value: a TwoTensor cannot be saved"):
        save(tmp_path, anyrank.TrainState(nn.Linear(1, 1), tracker=tracker))


def test_how_an_optimizer_steps_stays_as_it_is_made(tmp_path: Path) -> None:
    model, _ = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    step(model, optimizer)
    fused = torch.optim.AdamW(model.parameters(), lr=0.9, fused=True)
    save(tmp_path, anyrank.TrainState(model, optimizer))
    resume(tmp_path, anyrank.TrainState(model, fused))
    group = fused.param_groups[0]
    assert (group["lr"], group["fused"], group["foreach"]) == (0.1, True, None)
    step(model, fused)


def test_a_background_save_outlives_an_interrupted_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with anyrank.Checkpoints(tmp_path, anyrank.TrainState(*build()), background=True) as ckpts:
        ckpts.save()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "join", interrupt)
            with pytest.raises(KeyboardInterrupt):
                ckpts.wait()
        ckpts.wait()
        assert [one.step for one in ckpts.saved()] == [0]


END_OF_PROCESS = """
import errno, os, sys
import torch, anyrank
from anyrank import faults

def full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

if sys.argv[2] == "full":
    faults.armed["save.write"] = full
state = anyrank.TrainState(torch.nn.Linear(300, 300))
anyrank.Checkpoints(sys.argv[1], state, background=True).save()
"""


@pytest.mark.parametrize("disk", ["free", "full"])
def test_a_process_that_ends_finishes_its_background_save(tmp_path: Path, disk: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", END_OF_PROCESS, str(tmp_path), disk],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    committed = (tmp_path / "step-00000000" / "anyrank.json").exists()
    assert committed is (disk == "free")
    if disk == "free":
        assert (run.returncode, run.stderr) == (0, "")
    else:
        assert "step 0 was not saved" in run.stderr
        assert "No space left on device" in run.stderr


# -- Accelerate's wrappers ------------------------------------------------------------------------


@pytest.mark.parametrize(("split_batches", "step_with_optimizer"), [(True, True), (False, False)])
def test_what_accelerate_wraps_is_what_is_saved(
    split_batches: bool, step_with_optimizer: bool
) -> None:
    pytest.importorskip("accelerate").Accelerator(cpu=True)
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler

    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))
    prepared = AcceleratedOptimizer(optimizer)
    wrapped = AcceleratedScheduler(
        scheduler, prepared, step_with_optimizer, split_batches=split_batches
    )
    state = anyrank.TrainState(net, prepared, scheduler=wrapped)
    assert state.parts.by_name["optimizer"] is optimizer
    assert state.parts.by_name["scheduler"] is scheduler


@pytest.mark.parametrize(("length", "outcome"), [(8, "exact"), (4, "derived")])
def test_a_schedule_of_another_length_is_told_of(tmp_path: Path, length: int, outcome: str) -> None:
    def state_of(length: int) -> tuple[anyrank.TrainState, Any]:
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: max(0.0, 1 - n / length))
        return anyrank.TrainState(net, optimizer, scheduler=schedule), (optimizer, schedule)

    state, (optimizer, schedule) = state_of(8)
    for _ in range(2):
        optimizer.step()
        schedule.step()
    with anyrank.Checkpoints(tmp_path, state) as ckpts:
        ckpts.save()
    with anyrank.Checkpoints(tmp_path, state_of(length)[0]) as ckpts:
        report = ckpts.resume("must")
    assert report is not None
    assert report.components["scheduler"] == outcome
    words = "returns a learning rate of 0.25 at step 2, but 0.375"
    assert (words in report.components["scheduler"].reason) == (outcome == "derived")


def test_a_scheduler_that_counts_processes_is_refused() -> None:
    pytest.importorskip("accelerate").Accelerator(cpu=True)
    from accelerate.scheduler import AcceleratedScheduler

    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))
    derived = type("Derived", (AcceleratedScheduler,), {})
    for given in (AcceleratedScheduler(scheduler, optimizer), derived(scheduler, optimizer)):
        with pytest.raises(ValueError, match="steps once per process"):
            anyrank.TrainState(net, optimizer, scheduler=given)


class Refusing(Tracker):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise RuntimeError("not today")


def test_an_error_of_a_parts_own_code_names_the_part(tmp_path: Path) -> None:
    state = anyrank.TrainState(nn.Linear(1, 1), extra=Refusing())
    with anyrank.Checkpoints(tmp_path, state) as ckpts:
        ckpts.save()
        with pytest.raises(
            anyrank.CheckpointError, match=r"extra: .* Refusing raised .* not today"
        ):
            ckpts.resume()
