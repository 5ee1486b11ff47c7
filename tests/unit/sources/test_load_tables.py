"""Which tensors of a source are the weights: names that rename= gives decide, then a table's."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import anyrank

RAW, EMA = -1.0, 7.0


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def table(value: float, prefix: str = "") -> dict[str, torch.Tensor]:
    return {prefix + key: torch.full_like(t, value) for key, t in net().state_dict().items()}


def flat() -> dict[str, torch.Tensor]:
    return {**table(RAW, "model."), **table(EMA, "model_ema.")}


def parts() -> dict[str, Any]:
    return {"model": table(RAW), "ema": table(EMA), "step": 3}


def save_run(path: Path) -> None:
    model, ema = net(), net()
    model.load_state_dict(table(RAW))
    ema.load_state_dict(table(EMA))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model.load_state_dict(table(RAW))
    with anyrank.Checkpoints(path, anyrank.TrainState(model, optimizer, ema=ema)) as ckpts:
        ckpts.save()


def save_folder(state: dict[str, Any], path: Path) -> None:
    with pytest.warns(UserWarning, match="single process"):
        dcp_save(state, checkpoint_id=path)


FLAT: dict[str, Callable[[Path], object]] = {
    "dict": lambda path: None,
    "safetensors": lambda path: save_file(flat(), path),
    "folder": lambda path: (path.mkdir(), save_file(flat(), path / "model.safetensors")),
    "pt": lambda path: torch.save(flat(), path),
    "pt in a table": lambda path: torch.save({"state_dict": flat(), "epoch": 1}, path),
    "legacy": lambda path: torch.save(flat(), path, _use_new_zipfile_serialization=False),
    "dcp": lambda path: save_folder(flat(), path),
}
PARTS: dict[str, Callable[[Path], object]] = {
    "pt": lambda path: torch.save(parts(), path),
    "pt without a known name": lambda path: torch.save(
        {"student": table(RAW), "ema": table(EMA), "optimizer": {"state": {0: {"a": table(1)}}}},
        path,
    ),
    "dcp": lambda path: save_folder(parts(), path),
    "run": save_run,
}
RENAMES: dict[str, Any] = {
    "a prefix": {"model_ema": ""},
    "a regex": [(r"^model_ema\.", "")],
    "a function": lambda key: key[10:] if key.startswith("model_ema.") else f"other.{key}",
    "all": {"model_ema": "", "model": "unused"},
}


def first_value(model: nn.Module) -> float:
    values = {x for p in model.parameters() for x in p.unique().tolist()}
    assert len(values) == 1
    return values.pop()


@pytest.mark.parametrize("rename", RENAMES)
@pytest.mark.parametrize("form", FLAT)
def test_rename_decides_which_of_two_tables_is_read(form: str, rename: str, tmp_path: Path) -> None:
    path = tmp_path / ("w.pt" if form.startswith(("pt", "legacy")) else "w")
    source = flat() if FLAT[form](path) is None and form == "dict" else path
    model = net()
    with pytest.raises(anyrank.LoadError, match=r"(?s)unexpected in the source.*0\.weight"):
        anyrank.load(model, source, rename=RENAMES[rename])
    anyrank.plan(model, source, rename=RENAMES[rename], unexpected="ignore")
    anyrank.load(model, source, rename=RENAMES[rename], unexpected="ignore")
    assert first_value(model) == EMA


@pytest.mark.parametrize("form", FLAT)
def test_two_keys_that_come_to_mean_one_tensor_are_an_error(form: str, tmp_path: Path) -> None:
    path = tmp_path / ("w.pt" if form.startswith(("pt", "legacy")) else "w")
    source = flat() if FLAT[form](path) is None and form == "dict" else path
    with pytest.raises(
        anyrank.LoadError, match=r"model\.0\.\w+ and model_ema\.0\.\w+ of .* both mean"
    ):
        anyrank.load(net(), source, rename=[(r"^model(_ema)?\.", "")])


@pytest.mark.parametrize("form", PARTS)
def test_a_part_is_named_by_rename(form: str, tmp_path: Path) -> None:
    path = tmp_path / ("w.pt" if form.startswith("pt") else "w")
    PARTS[form](path)
    model = net()
    report = anyrank.load(model, path, rename={"ema": ""})
    assert first_value(model) == EMA
    other = "student" if "without" in form else "model"
    assert any(note.startswith(other) for note in report.skipped)
    assert not any(note.startswith("ema") for note in report.skipped)
    anyrank.convert(path, tmp_path / "out", rename={"ema": ""})
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == table(EMA).keys()
    assert all((tensor == EMA).all() for tensor in written.values())
    anyrank.convert(path, tmp_path / "again", rename={"ema": ""}, model=net())
    assert load_file(tmp_path / "again/model.safetensors")["0.weight"].eq(EMA).all()
    with pytest.raises(anyrank.LoadError, match="both"):
        anyrank.load(model, path, rename=[(rf"^({other}|ema)\.", "")])


@pytest.mark.parametrize("form", ["pt", "dcp", "run"])
def test_without_a_name_the_known_part_is_read(form: str, tmp_path: Path) -> None:
    path = tmp_path / ("w.pt" if form == "pt" else "w")
    PARTS[form](path)
    model = net()
    anyrank.load(model, path)
    assert first_value(model) == RAW
    wrapped = nn.ModuleDict({"body": net()})
    anyrank.load(wrapped, path, rename=[("^", "body.")])  # of the names in the table
    assert first_value(wrapped) == RAW


def state_of_gan(first: str, second: str) -> dict[str, Any]:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {first: table(RAW), second: table(EMA), "opt_g": optimizer.state_dict(), "step": 3}


def save_gan_run(state: dict[str, Any], path: Path) -> None:
    first, second = (name for name in state if name not in ("opt_g", "step"))
    models = {first: net(), second: net()}
    for name, model in models.items():
        model.load_state_dict(state[name])
    optimizer = torch.optim.Adam(models[first].parameters())
    parts = {**models, "opt_g": optimizer}
    with anyrank.Checkpoints(path, anyrank.TrainState(**parts)) as ckpts:
        ckpts.save()


GANS: dict[str, Callable[[dict[str, Any], Path], object]] = {
    "pt": torch.save,
    "dcp": save_folder,
    "run": save_gan_run,
    "safetensors": lambda state, path: save_file(
        {f"{n}.{k}": t for n, m in [*state.items()][:2] for k, t in m.items()}, path
    ),
}


@pytest.mark.parametrize("names", [("generator", "discriminator"), ("model", "ema")])
@pytest.mark.parametrize("form", GANS)
def test_several_parts_are_read_into_several_models_in_one_call(
    form: str, names: tuple[str, str], tmp_path: Path
) -> None:
    GANS[form](state_of_gan(*names), tmp_path / "saved")
    models = nn.ModuleDict({name: net() for name in names})
    report = anyrank.load(models, tmp_path / "saved")
    assert [first_value(models[name]) for name in names] == [RAW, EMA]
    assert report.tensors == 8
    assert not report.unexpected
    mine = nn.ModuleDict({"netG": net(), "netD": net()})
    anyrank.load(mine, tmp_path / "saved", rename=dict(zip(names, mine, strict=True)))
    assert [first_value(model) for model in mine.values()] == [RAW, EMA]


@pytest.mark.parametrize("form", ["pt", "dcp", "safetensors"])
def test_a_part_that_none_of_the_models_takes_is_unexpected(form: str, tmp_path: Path) -> None:
    GANS[form](state_of_gan("generator", "discriminator"), tmp_path / "saved")
    models = nn.ModuleDict({"generator": net()})
    with pytest.raises(anyrank.LoadError, match=r"unexpected in the source \(4\):"):
        anyrank.load(models, tmp_path / "saved")


def test_a_part_below_one_name_above_all_is_named(tmp_path: Path) -> None:
    save_folder({"app": {"model": table(RAW), "ema": table(EMA)}}, tmp_path / "w")
    model = net()
    anyrank.load(model, tmp_path / "w", rename={"app.ema": ""})
    assert first_value(model) == EMA


def test_a_file_without_a_known_table_says_which_there_are(tmp_path: Path) -> None:
    torch.save({"teacher": table(EMA), "epoch": 3}, tmp_path / "w.pt")
    with pytest.raises(anyrank.LoadError, match=re.escape("rename={'teacher': ''}")):
        anyrank.load(net(), tmp_path / "w.pt")
    assert len(anyrank.inspect(tmp_path / "w.pt").tensors) == 4


@pytest.mark.parametrize("prefix", ["net.", "model.", "state_dict."])
def test_a_tensor_beside_a_flat_table_is_unexpected(prefix: str, tmp_path: Path) -> None:
    source = {**table(5.0, prefix), "projector.weight": torch.ones(2)}
    save_file(source, tmp_path / "w.safetensors")
    for given in (source, tmp_path / "w.safetensors"):
        with pytest.raises(anyrank.LoadError, match=r"(?s)unexpected.*projector\.weight"):
            anyrank.load(net(), given)
        report = anyrank.load(net(), given, unexpected="ignore")
        assert report.unexpected == ["projector.weight"]
    optimizer = {**table(5.0, prefix), "optimizer.state.0.exp_avg": torch.ones(2)}
    report = anyrank.load(net(), optimizer)
    assert report.skipped == ["optimizer.state.0.exp_avg: not weights"]


def test_a_function_that_knows_the_names_in_the_table_alone_is_called_with_them(
    tmp_path: Path,
) -> None:
    torch.save({"state_dict": table(EMA, "net."), "epoch": 1}, tmp_path / "w.ckpt")
    names = {f"net.{key}": key for key in table(EMA)}
    model = net()
    anyrank.load(model, tmp_path / "w.ckpt", rename=lambda key: names[key])
    assert first_value(model) == EMA


def test_a_table_that_is_not_read_here_is_no_reason_to_refuse_the_others(tmp_path: Path) -> None:
    lazy = torch.ones(2, dtype=torch.complex64).conj()
    torch.save({"model": table(RAW), "ema": {"x": lazy}}, tmp_path / "w.pt")
    model = net()
    anyrank.load(model, tmp_path / "w.pt")
    assert first_value(model) == RAW


def test_a_head_of_another_size_has_a_way_out_that_works() -> None:
    source = table(EMA)
    wider = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5))
    with pytest.raises(
        anyrank.LoadError, match="build the model with the source's sizes; or"
    ) as error:
        anyrank.load(wider, source)
    assert "rename={'1.weight': '', '1.bias': ''} and missing='init'" in str(error.value)
    anyrank.load(wider, source, rename={"1.weight": "", "1.bias": ""}, missing="init")
    assert wider[0].weight.eq(EMA).all()  # type: ignore[operator]
    assert wider[1].weight.shape == (5, 3)


def converted(_: nn.Module, path: Path, rename: Any) -> None:
    anyrank.convert(path, path.with_suffix(".out"), rename=rename)


@pytest.mark.parametrize("call", [anyrank.load, anyrank.plan, converted])
@pytest.mark.parametrize(
    ("state", "old", "near"),
    [
        ({"model": table(RAW), "model_ema": table(EMA)}, "model_emma", "near: model_ema"),
        ({"state_dict": table(RAW), "state_dict_ema": table(EMA)}, "ema", "state_dict_ema"),
        ({"app": {"model": table(RAW), "ema": table(EMA)}}, "ema", "app.ema, app.model"),
    ],
)
def test_a_table_that_is_not_there_is_an_error_where_one_would_be_guessed(
    call: Any, state: dict[str, Any], old: str, near: str, tmp_path: Path
) -> None:
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(anyrank.LoadError, match=f"rename= refers to '{old}'.*{near}"):
        call(net(), tmp_path / "w.pt", rename={old: ""})
    mistyped = (f"^{old}[.]", "")
    with pytest.raises(
        anyrank.LoadError, match=f"rename= refers to '.{old}.*The source has the tables"
    ):
        call(net(), tmp_path / "w.pt", rename=[mistyped])
    # A list for files of several kinds has regexes that are not for this one.
    call(net(), tmp_path / "w.pt", rename=[mistyped, ("weight$", "weight")])


DEEPER: dict[str, Any] = {
    "a prefix": {"ema": ""},
    "with another": {"ema": "", "1": "1"},
    "a regex": [(r"^ema\.", "")],
    "a function": lambda key: key.removeprefix("ema."),
}


@pytest.mark.parametrize("rename", DEEPER)
@pytest.mark.parametrize("inner", ["shadow", "model", "ema"])
@pytest.mark.parametrize("form", ["pt", "legacy", "ckpt", "dcp"])
def test_a_named_table_whose_weights_are_deeper_is_not_another_one(
    form: str, inner: str, rename: str, tmp_path: Path
) -> None:
    path, known = tmp_path / "w.pt", "state_dict" if form == "ckpt" else "model"
    state: dict[str, Any] = {known: table(RAW), "ema": {inner: table(EMA)}}
    if form == "dcp":
        save_folder(state, path)
    else:
        state |= {"pytorch-lightning_version": "2.6"} if form == "ckpt" else {"step": 1}
        torch.save(state, path, _use_new_zipfile_serialization=form != "legacy")
    model = net()
    with pytest.raises(anyrank.LoadError, match=rf"match with rename={{'ema.{inner}': ''}}"):
        anyrank.load(model, path, rename=DEEPER[rename])
    anyrank.load(model, path, rename={f"ema.{inner}": ""})  # as the error says
    assert first_value(model) == EMA
    report = anyrank.convert(path, tmp_path / "out", rename={f"ema.{inner}": ""})
    assert load_file(tmp_path / "out" / report.files[0]).keys() == table(EMA).keys()


def test_a_named_table_of_tensors_without_names_is_not_another_one(tmp_path: Path) -> None:
    shadow = {"decay": 0.9, "shadow_params": [*table(EMA).values()]}  # as torch_ema has it
    torch.save({"model": table(RAW), "ema": shadow}, tmp_path / "w.pt")
    with pytest.raises(anyrank.LoadError, match=r"ema[.]shadow_params[.]0"):
        anyrank.load(net(), tmp_path / "w.pt", rename={"ema": ""})


@pytest.mark.parametrize("form", ["ckpt", "dcp"])
def test_weights_in_a_callback_are_taken_by_their_whole_place(form: str, tmp_path: Path) -> None:
    path, ema = tmp_path / "w.ckpt", {"EMA": {"average": table(EMA, "net.")}}
    state: dict[str, Any] = {"state_dict": table(RAW, "net."), "callbacks": ema}
    if form == "dcp":
        save_folder(state, path)
    else:
        torch.save(state | {"pytorch-lightning_version": "2.6"}, path)
    model, rename = net(), {"callbacks.EMA.average.net": ""}
    anyrank.load(model, path, rename=rename)
    assert first_value(model) == EMA
    anyrank.convert(path, tmp_path / "out", rename=rename)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == table(EMA).keys()
    assert written["0.weight"][0, 0] == EMA
    anyrank.load(model, path, rename={"net": "", "callbacks": ""})  # which leaves them out
    assert first_value(model) == RAW


RULES: dict[str, Any] = {
    "a regex": [(r"net\.", "")],
    "a function": lambda key: key.replace("net.", ""),
    "left out": {"optimizer": "", "net": ""},
}


@pytest.mark.parametrize("above", ["", "app."])
@pytest.mark.parametrize("rename", RULES)
def test_a_name_within_tables_takes_nothing_out_of_an_optimizer(
    rename: str, above: str, tmp_path: Path
) -> None:
    model = nn.Sequential(OrderedDict(net=net()))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    save_folder({"app": state} if above else state, tmp_path / "dcp")
    chosen = RULES[rename]
    if above and isinstance(chosen, dict):
        chosen = {f"{above}optimizer": "", "net": ""}
    anyrank.convert(tmp_path / "dcp", tmp_path / "out", rename=chosen, overwrite=True)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {key.removeprefix("model.").removeprefix("net.") for key in written} == {*table(RAW)}
    loaded = net()
    anyrank.load(loaded, tmp_path / "dcp", rename=chosen)
    assert torch.equal(loaded[0].weight, model.net[0].weight)  # type: ignore[union-attr, index]


def test_a_dict_for_several_files_takes_no_other_table_for_meant(tmp_path: Path) -> None:
    state = {"model": table(RAW, "enc."), "aux": table(EMA)}
    torch.save(state, tmp_path / "w.pt")
    model = net()
    anyrank.load(model, tmp_path / "w.pt", rename={"enc": "", "aux": "aux_head"})
    assert first_value(model) == RAW
    torch.save({"model": table(RAW, "enc."), "ema": {"shadow": table(EMA)}}, tmp_path / "x.pt")
    with pytest.raises(anyrank.LoadError, match=r"match with rename={'ema.shadow': ''}"):
        anyrank.load(model, tmp_path / "x.pt", rename={"enc": "", "ema": ""})
    save_folder({"model": table(RAW), "ema": {"module": table(EMA)}}, tmp_path / "dcp")
    anyrank.load(model, tmp_path / "dcp", rename=[(r"module\.", "")])
    assert first_value(model) == RAW


def test_a_table_that_was_not_chosen_may_hold_weights(tmp_path: Path) -> None:
    torch.save({"model": table(RAW), "ema": table(EMA), "optimizer": table(EMA)}, tmp_path / "w.pt")
    skipped = anyrank.load(net(), tmp_path / "w.pt", rename={"ema": ""}).skipped
    assert "model.0.weight: of another table" in skipped
    assert "optimizer: not among the weights" in skipped


def test_an_entry_of_rename_that_matches_nothing_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save({"model": table(RAW), "optimizer": table(EMA)}, tmp_path / "w.pt")
    note = "1.weigth: this entry of rename= matches no key (near: 1.weight)"
    rename = {"1.weigth": "x", "0.bias": "0.bias", "optimizer": ""}
    assert note in anyrank.load(net(), tmp_path / "w.pt", rename=rename).skipped
    anyrank.plan(net(), tmp_path / "w.pt", rename=rename)
    anyrank.sync(net(), net(), rename={"1.weigth": "x", "0.bias": "0.bias"})
    assert [record.message for record in caplog.records].count(note) == 3


def test_each_regex_of_rename_is_asked_for_what_those_before_it_made() -> None:
    weights = {f"net.{key}": value for key, value in table(RAW).items()}
    report = anyrank.load(net(), weights, rename=[("^net[.]", "a."), ("^a[.]", "")])
    assert report.skipped == []


def test_a_colon_in_a_name_hides_no_value_that_is_not_read() -> None:
    model = nn.ModuleDict({"a: b": nn.Linear(2, 2)})
    source = {**model.state_dict(), "a: b.bias": [0.0, 0.0]}
    with pytest.raises(anyrank.LoadError, match=r"a: b\.bias: is not a tensor\. anyrank does not"):
        anyrank.load(model, source, missing="init")


def test_only_groups_of_parameters_make_a_table_an_optimizer(tmp_path: Path) -> None:
    tables = {"first": {**table(RAW), "param_groups_seen": 3}, "second": table(EMA)}
    torch.save(tables, tmp_path / "w.pt")
    report = anyrank.convert(tmp_path / "w.pt", tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == {f"{name}.{key}" for name in tables for key in table(RAW)}
    assert report.skipped == ["first.param_groups_seen: not a tensor"]
