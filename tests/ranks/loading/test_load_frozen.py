"""`load` and frozen parts: filled from their own source, compared, equal on all ranks."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.loading import headers
from anyrank.testing import run_ranks


class Pair(nn.Module):
    """A frozen encoder with a buffer, and a head that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 2)


@pytest.fixture
def pair() -> Pair:
    torch.manual_seed(0)
    model = Pair()
    nn.init.normal_(model.encoder[1].running_mean)
    return model


@pytest.fixture
def folder(tmp_path: Path, pair: Pair) -> Path:
    save_file(pair.encoder.state_dict(), tmp_path / "encoder.safetensors")
    save_file(pair.head.state_dict(), tmp_path / "head.safetensors")
    save_file(pair.state_dict(), tmp_path / "all.safetensors")
    return tmp_path


def job_from_meta(folder: str, kind: str) -> tuple[dict[str, torch.Tensor], Any, str]:
    with anyrank.meta():
        model = Pair()
    anyrank.freeze(model.encoder, source=f"{folder}/encoder.safetensors")
    whole: Any = fully_shard(model) if kind == "fsdp" else model
    rename = {"weight": "head.weight", "bias": "head.bias"}
    report = anyrank.load(whole, f"{folder}/head.safetensors", rename=rename, verify=True)
    if kind == "ddp":
        whole = DistributedDataParallel(model)
    weights = {k: v.clone() for k, v in model.encoder.state_dict().items()}
    assert not model.encoder.training
    assert not any(name.startswith("encoder") for name in whole.state_dict())
    return weights, report, model.encoder.anyrank_frozen.digest


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_part_on_meta_comes_from_its_own_source(folder: Path, pair: Pair, kind: str) -> None:
    expected = anyrank.freeze(pair.encoder).anyrank_frozen.digest
    for weights, report, digest in run_ranks(2, job_from_meta, str(folder), kind):
        for name, value in pair.encoder.state_dict().items():
            assert torch.equal(weights[name], value), name
        assert report.frozen == {"encoder": f"{folder}/encoder.safetensors"}
        assert digest == expected


def job_counting_headers(folder: str) -> list[str]:
    with anyrank.meta():
        model = Pair()
    anyrank.freeze(model.encoder, source=f"{folder}/encoder.safetensors")
    listed: list[str] = []
    usual = headers.list_headers

    def count(path: Any) -> Any:
        listed.append(Path(path).name)
        return usual(path)

    rename = {"weight": "head.weight", "bias": "head.bias"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headers, "list_headers", count)
        anyrank.load(model, f"{folder}/head.safetensors", rename=rename)
    return listed


def test_one_rank_reads_the_headers_of_a_frozen_parts_source(folder: Path) -> None:
    first, second = run_ranks(2, job_counting_headers, str(folder))
    assert first == ["head.safetensors", "encoder.safetensors"]
    assert second == []


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_source_that_holds_other_values_is_refused(
    folder: Path, pair: Pair, on_meta: bool
) -> None:
    tensors = {k: v.clone() for k, v in pair.state_dict().items()}
    tensors["encoder.0.weight"] += 1
    save_file(tensors, folder / "other.safetensors")
    with anyrank.meta() if on_meta else contextlib.nullcontext():
        model = Pair()
    if not on_meta:
        model.load_state_dict(pair.state_dict())
    anyrank.freeze(model.encoder, source=f"{folder}/encoder.safetensors")
    with pytest.raises(anyrank.LoadError, match=r"encoder.0.weight: is frozen, but the source h"):
        anyrank.load(model, folder / "other.safetensors")
    assert model.head.weight.is_meta == on_meta
    assert on_meta or torch.equal(model.encoder[0].weight, pair.encoder[0].weight)
    report = anyrank.load(model, folder / "all.safetensors")
    own = {"encoder": f"{folder}/encoder.safetensors"}
    assert report.frozen == (own if on_meta else {})  # what was filled from its own source
    assert torch.equal(model.encoder[0].weight, pair.encoder[0].weight)


def test_a_part_that_something_wrote_to_is_noticed(folder: Path, pair: Pair) -> None:
    anyrank.freeze(pair.encoder, source=f"{folder}/encoder.safetensors")
    pair.encoder[0].weight.data.add_(1)
    with pytest.raises(anyrank.LoadError, match=r"encoder.0.weight: is frozen"):
        anyrank.load(pair, folder / "all.safetensors")


def job_unequal(folder: str) -> str:
    torch.manual_seed(torch.distributed.get_rank())
    model = Pair()
    anyrank.freeze(model.encoder, source=f"{folder}/encoder.safetensors")
    with pytest.raises(anyrank.LoadError) as caught:
        anyrank.load(model, f"{folder}/all.safetensors")
    return str(caught.value)


def test_parts_that_differ_between_ranks_are_refused(folder: Path) -> None:
    """Nobody broadcasts them, so nobody would ever notice."""
    for text in run_ranks(2, job_unequal, str(folder)):
        assert "the frozen part encoder differs between ranks" in text


# -- without a source: loaded with the parent ------------------------------------------------------


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_part_without_a_source_is_loaded_with_its_parent(
    folder: Path, pair: Pair, on_meta: bool
) -> None:
    with torch.device("meta" if on_meta else "cpu"):
        model = Pair()
    anyrank.freeze(model.encoder)
    report = anyrank.load(model, folder / "all.safetensors")
    assert torch.equal(model.encoder[0].weight, pair.encoder[0].weight)
    assert torch.equal(model.encoder[1].running_mean, pair.encoder[1].running_mean)
    assert report.own_code_not_run == {}
    with anyrank.Checkpoints(folder / "run", anyrank.TrainState(model)) as ckpts:
        ckpts.save()  # which compares the part with what was loaded
    with pytest.raises(
        anyrank.LoadError, match=r"missing from the source \(7\):\n  encoder.0.weight"
    ):
        anyrank.load(
            model,
            folder / "head.safetensors",
            rename={"bias": "head.bias", "weight": "head.weight"},
        )


def job_filled(folder: str) -> bool:
    torch.manual_seed(torch.distributed.get_rank())
    model = Pair()
    anyrank.freeze(model.encoder)
    sharded: Any = fully_shard(model)
    anyrank.load(sharded, f"{folder}/all.safetensors", verify=True)
    other = Pair()
    anyrank.freeze(other.encoder)
    anyrank.load(fully_shard(other), sharded.state_dict())  # of sharded tensors: a sync
    return torch.equal(model.encoder[0].weight, other.encoder[0].weight)


def test_parts_that_differed_between_ranks_and_are_filled_are_equal(folder: Path) -> None:
    assert run_ranks(2, job_filled, str(folder)) == [True, True]


def job_nested(folder: str) -> bool:
    torch.manual_seed(torch.distributed.get_rank())
    model = Pair()
    anyrank.freeze(model.encoder[0])  # type: ignore[arg-type]
    anyrank.freeze(model.encoder)
    anyrank.load(model, f"{folder}/all.safetensors", verify=True)
    with anyrank.Checkpoints(f"{folder}/run", anyrank.TrainState(model)) as ckpts:
        ckpts.save()  # which compares both parts with what was loaded
    return True


def test_parts_within_parts_are_filled_as_one(folder: Path) -> None:
    assert run_ranks(2, job_nested, str(folder)) == [True, True]


def test_a_part_with_a_source_inside_of_one_without(folder: Path, pair: Pair) -> None:
    with anyrank.meta():
        model: Any = nn.ModuleDict({"outer": Pair()})
    anyrank.freeze(model["outer"].encoder, source=folder / "encoder.safetensors")
    anyrank.freeze(model["outer"])
    head = {f"outer.head.{name}": tensor for name, tensor in pair.head.state_dict().items()}
    report = anyrank.load(model, head)
    assert list(report.frozen) == ["outer.encoder"]
    assert torch.equal(model["outer"].encoder[0].weight, pair.encoder[0].weight)
    assert torch.equal(model["outer"].head.weight, pair.head.weight)


@pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")
@pytest.mark.parametrize("form", ["app.model", "app.model in DCP", "ema", "module."])
def test_a_parts_source_is_read_as_load_reads_it(tmp_path: Path, pair: Pair, form: str) -> None:
    state, other = pair.encoder.state_dict(), Pair().encoder.state_dict()
    optimizer = {"state": {0: {"momentum": torch.ones(4)}}, "param_groups": [{"params": [0]}]}
    source = tmp_path / ("dcp" if form.endswith("DCP") else "w.pt")
    trees: dict[str, Any] = {
        "app.model": {"app": {"model": state, "optimizer": optimizer}},
        "app.model in DCP": {"app": {"model": state, "optimizer": optimizer}},
        "ema": {"model": state, "ema": other},
        "module.": {f"module.{key}": tensor for key, tensor in state.items()},
    }
    if form.endswith("DCP"):
        dcp.save(trees[form], checkpoint_id=source, no_dist=True)
    else:
        torch.save(trees[form], source)
    with anyrank.meta():
        model, alone = Pair(), Pair().encoder
    anyrank.load(alone, source)
    anyrank.freeze(model.encoder, source=source)
    anyrank.load(model, {f"head.{key}": t for key, t in pair.head.state_dict().items()})
    for key, tensor in state.items():
        assert torch.equal(model.encoder.state_dict()[key], tensor)
        assert torch.equal(alone.state_dict()[key], tensor)


# -- sources that are another model's --------------------------------------------------------------


@pytest.mark.parametrize("missing", ["error", "init", "keep"])
@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("held", ["nothing", "a part"])
def test_a_source_that_does_not_hold_its_part_is_an_error(
    folder: Path, pair: Pair, held: str, on_meta: bool, missing: Any
) -> None:
    state = pair.encoder.state_dict()
    kept = {"0.weight": state["0.weight"]} if held == "a part" else {"x": torch.ones(1)}
    save_file(kept, folder / "other.safetensors")
    with torch.device("meta" if on_meta else "cpu"):
        model = Pair()
    anyrank.freeze(model.encoder, source=folder / "other.safetensors")
    given = pair.state_dict() if on_meta else {"head.weight": pair.head.weight.detach()}
    with pytest.raises(
        anyrank.LoadError, match=r"encoder: is frozen with source .*other.* which does not contain"
    ):
        anyrank.load(model, given, missing=missing)


class Shifted(nn.Linear):
    """Its checkpoints hold one less."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] + 1
        super()._load_from_state_dict(state, prefix, *rest)


def test_code_of_a_part_is_named_and_the_part_can_be_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Sequential(Shifted(2, 2)))
    anyrank.freeze(model[0])
    state = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    assert list(anyrank.load(model, state).own_code_not_run) == ["0.0"]
    assert not model[0][0].weight.any()  # type: ignore[index, union-attr]
    with anyrank.Checkpoints(tmp_path, anyrank.TrainState(model)) as ckpts:
        ckpts.save()
