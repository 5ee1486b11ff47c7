"""Checkpoints of other tools in one process: what comes over, what is refused, and why."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import anyrank
from anyrank.files.storage import storage_for
from anyrank.sources.foreign.checkpoint import Collector
from anyrank.sources.source import list_source


class Payload:
    def __reduce__(self) -> Any:
        return eval, ("1 / 0",)


def net_of(seed: int = 0, width: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 4), nn.Linear(4, 2))


def stepped(net: nn.Module, kind: Any = torch.optim.AdamW, steps: int = 5) -> Any:
    optimizer = kind(net.parameters(), lr=1e-2)
    for _ in range(steps):
        net(torch.randn(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def accelerate_folder(folder: Path, ranks: int = 1, kind: Any = torch.optim.AdamW) -> Any:
    """In the layout of `accelerate.checkpointing.save_accelerator_state`."""
    folder.mkdir()
    net = net_of()
    optimizer = stepped(net, kind)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scheduler.last_epoch = 5 * ranks
    save_file(net.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    torch.save(scheduler.state_dict(), folder / "scheduler.bin")
    for rank in range(ranks):
        torch.save({"step": 5}, folder / f"random_states_{rank}.pkl")
    return net, optimizer


def begin(path: Path, source: Any, state: anyrank.TrainState, **options: Any) -> Any:
    with anyrank.Checkpoints(path, state) as ckpts:
        return ckpts.resume(source, **options)


def state_of(net: nn.Module | None = None, **parts: Any) -> anyrank.TrainState:
    net = net or net_of(1)
    return anyrank.TrainState(net, torch.optim.AdamW(net.parameters(), lr=1.0), **parts)


def test_what_is_not_there_is_fresh_with_a_reason(tmp_path: Path) -> None:
    accelerate_folder(tmp_path / "a")
    state = state_of(ema=net_of(2), scaler=torch.amp.GradScaler("cpu"))
    report = begin(tmp_path / "run", tmp_path / "a", state, skip=["scaler"])
    assert report.components["model"] == report.components["optimizer"] == "exact"
    assert report.components["ema"] == "fresh"
    assert report.components["ema"].reason.startswith(
        "the checkpoint of Accelerate does not have it"
    )
    assert report.components["scaler"] == "skipped"
    assert any("ignored: scheduler" in note for note in report.notes)
    assert (state.step, state.run) == (5, None)


def test_a_scheduler_that_counted_processes_is_divided(tmp_path: Path) -> None:
    accelerate_folder(tmp_path / "a", ranks=2)
    net = net_of(1)
    optimizer = torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = anyrank.TrainState(net, optimizer, scheduler=scheduler)
    report = begin(tmp_path / "run", tmp_path / "a", state)
    assert report.components["scheduler"].reason.endswith("is now f(2 * step)")
    assert (scheduler.last_epoch, scheduler.step_size) == (5, 1)


def test_a_scheduler_that_cannot_be_divided_is_an_error(tmp_path: Path) -> None:
    accelerate_folder(tmp_path / "a", ranks=2, kind=torch.optim.SGD)
    net = net_of(1)
    optimizer = torch.optim.SGD(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = anyrank.TrainState(net, optimizer, scheduler=scheduler)
    with pytest.raises(
        anyrank.CheckpointError, match=r"does not count steps\. .* restart it with skip="
    ):
        begin(tmp_path / "run", tmp_path / "a", state)


def test_a_scheduler_of_another_class_is_refused(tmp_path: Path) -> None:
    accelerate_folder(tmp_path / "a")
    net = net_of(1)
    optimizer = torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    state = anyrank.TrainState(net, optimizer, scheduler=scheduler)
    with pytest.raises(anyrank.CheckpointError, match=r"LambdaLR, .* gamma, lr_lambdas, step_size"):
        begin(tmp_path / "run", tmp_path / "a", state)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def run_code(path: Path) -> None:
    torch.save({"state": {}, "param_groups": [], "extra": Payload()}, path)


BROKEN: dict[str, tuple[Callable[[Path], object], Any, str]] = {
    "truncated weights": (lambda f: cut(f / "model.safetensors"), anyrank.UnsafeFile, "truncated"),
    "truncated optimizer": (lambda f: cut(f / "optimizer.bin"), anyrank.UnsafeFile, "truncated"),
    "code in the optimizer": (lambda f: run_code(f / "optimizer.bin"), anyrank.UnsafeFile, "eval"),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        anyrank.CheckpointError,
        "contains no weights of a model",
    ),
    "no optimizer in it": (
        lambda f: torch.save({"a": 1}, f / "optimizer.bin"),
        anyrank.CheckpointError,
        "not the state of a torch optimizer",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_checkpoint_is_refused_and_changes_nothing(tmp_path: Path, what: str) -> None:
    accelerate_folder(tmp_path / "a")
    damage, error, match = BROKEN[what]
    damage(tmp_path / "a")
    net = net_of(1)
    state = state_of(net)
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(error, match=match):
        begin(tmp_path / "run", tmp_path / "a", state)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert state.step == 0


def of_another_class(net: nn.Module) -> Any:
    return torch.optim.SGD(net.parameters(), lr=1.0)


def of_half(net: nn.Module) -> Any:
    return torch.optim.AdamW([*net.parameters()][:2])


OTHERS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], str]] = {
    "class": (net_of, of_another_class, "is a SGD, .* without dampening, momentum, nesterov"),
    "adam": (
        net_of,
        lambda n: torch.optim.Adam(n.parameters()),
        "applies weight decay differently",
    ),
    "adamax": (net_of, lambda n: torch.optim.Adamax(n.parameters()), "has no exp_inf"),
    "number": (net_of, of_half, r"has groups of \[4\] parameters .* has \[2\]"),
    "model": (lambda: net_of(1, 5), lambda n: torch.optim.AdamW(n.parameters()), r"shape \[4, 5\]"),
    "order": (
        net_of,
        lambda n: torch.optim.AdamW(reversed([*n.parameters()])),
        r"exp_avg: has shape \[4, 3\] in the checkpoint, but its parameter has \[2\]",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_state_of_another_model_or_optimizer_is_refused(tmp_path: Path, what: str) -> None:
    accelerate_folder(tmp_path / "a")
    build, optimize, match = OTHERS[what]
    net = build()
    optimizer = optimize(net)
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(anyrank.CheckpointError, match=match):
        begin(tmp_path / "run", tmp_path / "a", anyrank.TrainState(net, optimizer))
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert not optimizer.state
    if what != "model":
        state = anyrank.TrainState(net, optimizer)
        report = begin(tmp_path / "run", tmp_path / "a", state, skip=["optimizer"])
        assert report.components["optimizer"] == "skipped"


@pytest.mark.parametrize("name", ["checkpoint.pth.tar", "last.tar", "weights.th", "checkpoint"])
def test_a_file_of_torch_save_is_known_by_its_first_bytes(name: str, tmp_path: Path) -> None:
    net = net_of()
    optimizer = stepped(net)
    tables = {"state_dict": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}
    torch.save(tables, tmp_path / name)
    state = state_of()
    report = begin(tmp_path / "run", tmp_path / name, state)
    assert report.components["model"] == report.components["optimizer"] == "exact"
    assert state.step == 5


def test_a_file_of_weights_alone_is_named(tmp_path: Path) -> None:
    save_file(net_of().state_dict(), tmp_path / "w")
    with pytest.raises(anyrank.CheckpointError, match=r"files of torch\.save and folders"):
        begin(tmp_path / "run", tmp_path / "w", state_of())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_of_an_optimizers_own_state_dict(tmp_path: Path) -> None:
    """DCP makes strings of the parameters' numbers in keys, and not of those in the groups."""

    def make(net: Any) -> Any:
        groups = [{"params": net[1].parameters()}, {"params": net[0].parameters(), "lr": 0.5}]
        return torch.optim.AdamW(groups, lr=0.1)

    net = net_of()
    optimizer = stepped(net, lambda *_, **__: make(net))
    tables = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(tables, checkpoint_id=tmp_path / "dcp")
    again = net_of(1)
    mine = make(again)
    report = begin(tmp_path / "run", tmp_path / "dcp", anyrank.TrainState(again, mine))
    assert report.components["optimizer"] == "exact"
    for ours, theirs in zip(again.parameters(), net.parameters(), strict=True):
        assert torch.equal(mine.state[ours]["exp_avg"], optimizer.state[theirs]["exp_avg"])
    assert [group["lr"] for group in mine.param_groups] == [0.1, 0.5]


SCALER = {"scale": 64.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9}


@pytest.mark.parametrize("name", ["amp_scaler", "fp16_scaler", "mine"])
def test_a_scaler_of_a_script(name: str, tmp_path: Path) -> None:
    tables = {"state_dict": net_of(), "state_dict_ema": net_of(2)}
    saved = {key: net.state_dict() for key, net in tables.items()}
    torch.save({**saved, name: {**SCALER, "_growth_tracker": 1}}, tmp_path / "a.pt")
    scaler = torch.amp.GradScaler("cpu")
    net = net_of(1)
    report = begin(tmp_path / "run", tmp_path / "a.pt", anyrank.TrainState(net, scaler=scaler))
    if name == "mine":
        reason = report.components["scaler"].reason
        assert reason.endswith("it has mine. parts={'scaler': 'mine'} reads that")
        return
    assert report.components["scaler"] == "exact"
    assert scaler.state_dict() == {**SCALER, "_growth_tracker": 1}


def pair_of(nets: Any, optimizers: Any, form: str) -> dict[str, Any]:
    saved = [[thing.state_dict() for thing in things] for things in (nets, optimizers)]
    if form == "list":
        return dict(zip(("models", "optimizers"), saved, strict=True))
    tables = [dict(zip("gd", states, strict=True)) for states in saved]
    if form == "dict":
        return dict(zip(("models", "optimizers"), tables, strict=True))
    return {f"{name}_model": state for name, state in tables[0].items()} | {
        f"{name}_optim": state for name, state in tables[1].items()
    }


PAIRS = {
    "list": ("models.0", "models.1", "optimizers.0", "optimizers.1"),
    "dict": ("models.g", "models.d", "optimizers.g", "optimizers.d"),
    "named": ("g_model", "d_model", "g_optim", "d_optim"),
}


@pytest.mark.parametrize("form", PAIRS)
def test_parts_names_models_and_optimizers_in_tables_of_these_names(
    form: str, tmp_path: Path
) -> None:
    """Also where a file has nothing under the names that a single model and optimizer have."""
    nets = net_of(), net_of(1)
    optimizers = [stepped(net) for net in nets]
    torch.save(pair_of(nets, optimizers, form), tmp_path / "a.pt")
    again = net_of(2), net_of(3)
    mine = [torch.optim.AdamW(net.parameters()) for net in again]
    parts: dict[str, Any] = dict(zip(("g", "d", "opt_g", "opt_d"), (*again, *mine), strict=True))
    names = dict(zip(parts, PAIRS[form], strict=True))
    report = begin(tmp_path / "run", tmp_path / "a.pt", anyrank.TrainState(**parts), parts=names)
    assert all(report.components[part] == "exact" for part in parts)
    for saved, filled, old, new in zip(nets, again, optimizers, mine, strict=True):
        for theirs, ours in zip(saved.parameters(), filled.parameters(), strict=True):
            assert torch.equal(theirs, ours)
            assert torch.equal(old.state[theirs]["exp_avg"], new.state[ours]["exp_avg"])


def test_no_part_is_advised_to_read_anothers_table(tmp_path: Path) -> None:
    nets = net_of(), net_of(1)
    tables = pair_of(nets, [stepped(net) for net in nets], "named")
    torch.save(tables, tmp_path / "a.pt")
    parts: dict[str, Any] = {"d": net_of(2), "other": net_of(3)}
    report = begin(tmp_path / "run", tmp_path / "a.pt", anyrank.TrainState(**parts))
    assert "parts={'d': 'd_model'} reads that" in report.components["d"].reason
    assert "parts={'other': ...} reads one of them" in report.components["other"].reason


def test_flat_parameters_of_fsdp1_are_named(tmp_path: Path) -> None:
    accelerate_folder(tmp_path / "a")
    flat = torch.optim.AdamW([nn.Parameter(torch.ones(26))])
    torch.save(flat.state_dict(), tmp_path / "a/optimizer.bin")
    with pytest.raises(anyrank.CheckpointError, match=r"\[1\] parameters \(flat ones, if FSDP1"):
        begin(tmp_path / "run", tmp_path / "a", state_of())


def test_skip_is_for_the_beginning_and_not_for_the_runs_own_steps(tmp_path: Path) -> None:
    """A job that is started again by the same call goes on, and does not lose its optimizer."""
    accelerate_folder(tmp_path / "a")
    net = net_of()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1.0)
    state = anyrank.TrainState(net, optimizer)
    with anyrank.Checkpoints(tmp_path / "run", state) as ckpts:
        assert ckpts.resume(tmp_path / "a", skip=["optimizer"]).components["optimizer"] == "skipped"
        net(torch.randn(2, 3)).sum().backward()
        optimizer.step()
        ckpts.step_done()
    other = net_of(1)
    again = torch.optim.AdamW(other.parameters())
    state = anyrank.TrainState(other, again)
    report = begin(tmp_path / "run", tmp_path / "a", state, skip=["optimizer"])
    assert report.components["optimizer"] == "exact"
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    held = [state["exp_avg"] for state in again.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, held, strict=True))


def test_a_wrong_name_in_skip_is_an_error_where_the_run_begins(tmp_path: Path) -> None:
    accelerate_folder(tmp_path / "a")
    wrong = r"skip= contains 'optimzer', which the state does not have\. Its .*: .*model.*optimizer"
    with (
        anyrank.Checkpoints(tmp_path / "run", state_of(net_of())) as ckpts,
        pytest.raises(anyrank.CheckpointError, match=wrong),
    ):
        ckpts.resume(tmp_path / "a", skip=["optimzer"])


def test_a_part_that_only_the_beginning_had_is_skipped_at_every_restart(tmp_path: Path) -> None:
    with anyrank.Checkpoints(tmp_path / "a", state_of(net_of())) as ckpts:
        ckpts.save()
    for _ in range(3):  # runs/a has an optimizer; neither this state nor its own steps have one
        with anyrank.Checkpoints(tmp_path / "b", anyrank.TrainState(net_of())) as ckpts:
            report = ckpts.resume(tmp_path / "a", skip=["optimizer"])
            assert report is not None
            assert report.components["model"] == "exact"
            ckpts.save()


def test_state_takes_the_dtype_of_its_parameter_and_says_so(tmp_path: Path) -> None:
    accelerate_folder(tmp_path / "a")
    state = state_of(net_of(1).bfloat16())
    report = begin(tmp_path / "run", tmp_path / "a", state)
    assert report.components["optimizer"] == "derived"
    assert report.components["model"].reason == "cast from float32 to bfloat16"


def test_a_missing_path_names_what_resume_takes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no such path.*Pass 'auto', 'must'"):
        begin(tmp_path / "run", "latest", state_of())
    (tmp_path / "out/step_10").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"or a path \(.*out contains step_10\)$"):
        begin(tmp_path / "run", tmp_path / "out/step_11", state_of())


def test_a_folder_of_no_known_tool_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(
        anyrank.CheckpointError, match=r"is not a checkpoint of a supported tool.* notes.txt"
    ):
        begin(tmp_path / "run", tmp_path, state_of())


@pytest.mark.parametrize("number", [int, torch.tensor])
def test_a_training_scripts_file_with_an_ema(tmp_path: Path, number: Any) -> None:
    """With the keys that Sana's trainer writes."""
    net, ema = net_of(), net_of(7)
    optimizer = stepped(net)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    numpy = pytest.importorskip("numpy")
    streams = {"torch": torch.get_rng_state(), "numpy": numpy.random.get_state()}
    table = {
        "state_dict": net.state_dict(),
        "state_dict_ema": ema.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "epoch": number(3),
        "step": number(12),
        "generator": torch.Generator().get_state(),
        "rng_state": streams,
    }
    torch.save(table, tmp_path / "sana.pth")
    mine, my_ema = net_of(1), net_of(2)
    opt = torch.optim.AdamW(mine.parameters())
    curve = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 1.0)
    data = anyrank.ElasticLoader(torch.randn(8, 3), global_batch=4, microbatch=2)
    state = anyrank.TrainState(mine, opt, scheduler=curve, data=data, ema=my_ema)
    report = begin(tmp_path / "run", str(tmp_path / "sana.pth"), state)
    for part in ("model", "optimizer", "ema", "scheduler"):
        assert report.components[part] == "exact", report
    assert report.components["data"].reason == "3 whole epochs; the next one starts"
    assert (state.step, state.epoch, state.samples) == (12, 3, 24)
    assert torch.equal(my_ema[0].weight, ema[0].weight)
    assert opt.param_groups[0]["lr"] == 1e-2
    assert any("rng_state" in note for note in report.notes)


def of_script(path: Path, **table: Any) -> Path:
    """A training script's file with a model and these tables."""
    torch.save({"model": net_of().state_dict(), **table}, path / "x.pt")
    return path / "x.pt"


def test_a_table_that_was_passed_over_is_named(tmp_path: Path) -> None:
    path = of_script(tmp_path, state_dict=net_of(7).state_dict())
    mine, net = net_of(1), net_of(1)
    report = begin(tmp_path / "run", path, state_of(mine))
    assert "ignored: model: the part model was read from state_dict" in report.notes
    loaded = anyrank.load(net, path)
    assert loaded.skipped == ["model: also weights, but those of state_dict were read"]
    assert loaded.skipped[0] in str(loaded)
    for model in (mine, net):
        assert torch.equal(model[0].weight, net_of(7)[0].weight)


def test_a_module_is_read_from_the_table_of_its_name(tmp_path: Path) -> None:
    teacher = net_of(2)
    path = of_script(tmp_path, teacher=net_of(7).state_dict())
    report = begin(tmp_path / "run", path, state_of(teacher=teacher))
    assert report.components["teacher"] == "exact"
    assert torch.equal(teacher[0].weight, net_of(7)[0].weight)


def test_an_averaged_model_fills_a_plain_one(tmp_path: Path) -> None:
    ema = net_of(2)
    averaged = torch.optim.swa_utils.AveragedModel(net_of(7))
    report = begin(
        tmp_path / "run", of_script(tmp_path, ema=averaged.state_dict()), state_of(ema=ema)
    )
    assert "ignored: n_averaged of ema, which the model does not need" in report.notes
    assert torch.equal(ema[0].weight, net_of(7)[0].weight)


def test_the_ways_out_of_an_error_work_for_resume(tmp_path: Path) -> None:
    held = net_of().state_dict()
    held["more"] = held.pop("1.bias")
    path = of_script(tmp_path, model=held)
    with pytest.raises(anyrank.CheckpointError) as error:
        begin(tmp_path / "run", path, state_of())
    assert "rename=..., or fresh=[...] for those that keep" in str(error.value)
    assert "'' as the new name drops a tensor, or skip=['model']" in str(error.value)
    net = net_of(1)
    bias = net[1].bias.clone()
    report = begin(tmp_path / "run", path, state_of(net), rename={"more": ""}, fresh=["1.bias"])
    assert (
        report.components["model"].reason
        == "kept, because the checkpoint does not have them: 1.bias"
    )
    assert "ignored: more of model, which the model does not need" in report.notes
    assert torch.equal(net[1].bias, bias)
    assert torch.equal(net[0].weight, net_of()[0].weight)


@pytest.mark.parametrize("value", ["3", -3, 2.5, float("inf"), True, [3]])
def test_what_is_no_step_is_said(tmp_path: Path, value: Any) -> None:
    state = state_of()
    report = begin(tmp_path / "run", of_script(tmp_path, step=value), state)
    said = f"the checkpoint's step is {value!r}, which is not a step, so the run counts from 0"
    assert said in report.notes
    assert state.step == 0


@pytest.mark.parametrize("name", ["opt", "optim_state_dict"])
def test_usual_names_of_an_optimizer(tmp_path: Path, name: str) -> None:
    table = {name: stepped(net_of()).state_dict()}
    report = begin(tmp_path / "run", of_script(tmp_path, **table), state_of())
    assert report.components["optimizer"] == "exact"


# -- another run, a step's place, and parameters that came later ----------------------------------


@pytest.mark.parametrize("which", ["a", "a/step-00000002"])
def test_another_run_begins_this_one(tmp_path: Path, which: str) -> None:
    net = net_of()
    state = anyrank.TrainState(net, stepped(net))
    with anyrank.Checkpoints(tmp_path / "a", state) as ckpts:
        for _ in range(3 if which == "a" else 4):
            ckpts.step_done()
            ckpts.save()
    other = state_of()
    report = begin(tmp_path / "b", tmp_path / which, other)
    assert other.step == report.step == (3 if which == "a" else 2)
    assert report.components["optimizer"] == "exact"
    with anyrank.Checkpoints(tmp_path / "b", other) as ckpts:
        ckpts.save()
        assert [saved.step for saved in ckpts.saved()] == [other.step]
    assert other.run not in (None, state.run)
    assert begin(tmp_path / "b", tmp_path / which, state_of()).step == other.step


def test_a_damaged_step_of_another_run_keeps_its_name(tmp_path: Path) -> None:
    state = state_of()
    with anyrank.Checkpoints(tmp_path / "a", state) as ckpts:
        ckpts.save()
    (tmp_path / "a/step-00000000/tensors.json").write_text("{}")
    with pytest.raises(
        anyrank.CorruptCheckpoint, match="step 0, requested by its number, is corrupt"
    ):
        begin(tmp_path / "b", tmp_path / "a", state_of())
    assert (tmp_path / "a/step-00000000").is_dir()


def test_a_save_never_moves_another_tools_checkpoint(tmp_path: Path) -> None:
    accelerate_folder(tmp_path / "a")
    shutil.move(tmp_path / "a", tmp_path / "run-step")
    (tmp_path / "run").mkdir()
    shutil.move(tmp_path / "run-step", tmp_path / "run/step-00000000")
    with pytest.raises(anyrank.CheckpointError, match="another tool's checkpoint"):
        anyrank.Checkpoints(tmp_path / "run", state_of()).save()
    assert (tmp_path / "run/step-00000000/model.safetensors").is_file()


class Wide(nn.Module):
    """The same model, with a part that came later."""

    def __init__(self) -> None:
        super().__init__()
        self.base = net_of(1)
        self.lora_a = nn.Parameter(torch.full((4, 2), 7.0))


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = net_of()


@pytest.mark.parametrize("separate", [False, True])
def test_new_parameters_start_fresh_when_asked(tmp_path: Path, separate: bool) -> None:
    old = Narrow()
    saved = stepped(old.base)
    curve = torch.optim.lr_scheduler.LambdaLR(saved, lambda n: 1.0)
    with anyrank.Checkpoints(tmp_path, anyrank.TrainState(old, saved, scheduler=curve)) as ckpts:
        ckpts.save()

    def wide() -> tuple[Wide, anyrank.TrainState]:
        net = Wide()
        parts: Any = [*net.base.parameters()], [net.lora_a]
        groups: Any = [{"params": one} for one in parts] if separate else net.parameters()
        optimizer = torch.optim.AdamW(groups, lr=0.5)
        curve = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
        return net, anyrank.TrainState(net, optimizer, scheduler=curve)

    net, state = wide()
    with pytest.raises(
        anyrank.CheckpointError, match=r"lora_a\. If that is intended, pass fresh=\['lora_a'\]"
    ):
        begin(tmp_path, "auto", state)
    report = begin(tmp_path, "auto", state, fresh=["lora_*"])
    assert (
        report.components["model"].reason
        == "kept, because the checkpoint does not have them: lora_a"
    )
    assert report.components["optimizer"] == "derived"
    assert torch.equal(net.lora_a.detach(), torch.full((4, 2), 7.0))
    assert torch.equal(net.base[0].weight, old.base[0].weight)
    optimizer = state.parts.by_name["optimizer"]
    assert len(optimizer.state) == 4
    assert [group["lr"] for group in optimizer.param_groups] == (
        [1e-2, 0.5] if separate else [1e-2]
    )
    net.lora_a.grad = torch.ones_like(net.lora_a)
    optimizer.step()
    state.parts.by_name["scheduler"].step()
    with anyrank.Checkpoints(tmp_path, state) as ckpts:
        ckpts.step_done()
        ckpts.save()
    net, state = wide()  # a job that restarts with the same call has everything again
    report = begin(tmp_path, "auto", state, fresh=["lora_*"])
    assert report.components["optimizer"] == report.components["model"] == "exact"
    assert len(state.parts.by_name["optimizer"].state) == 5


def test_weights_that_are_tied_here_and_differ_there_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    apart = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    torch.save({"state_dict": apart.state_dict(), "step": 1}, tmp_path / "last.pt")
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    before = tied[0].weight.detach().clone()
    with pytest.raises(
        anyrank.CheckpointError, match=r"1\.weight and 0\.weight are tied in the model"
    ):
        begin(tmp_path / "run", tmp_path / "last.pt", anyrank.TrainState(tied))
    assert torch.equal(tied[0].weight, before)


def test_settings_of_an_adapter_stay_with_its_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_file({name: torch.ones(1)}, tmp_path / name / "adapter_model.safetensors")
        (tmp_path / name / "adapter_config.json").write_text(f'{{"of": "{name}"}}')
    files = Collector(storage_for(str(tmp_path)), str(tmp_path))
    for name in ("a", "b"):
        added = files.add(list_source(str(tmp_path / name)))
        assert added.adapters == {added.tensors[name].chunks[0].file: {"of": name}}
