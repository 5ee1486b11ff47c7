"""`convert(merge=True)` of a base and an adapter that PEFT saved, against PEFT's own merge."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import anyrank
from anyrank.errors import LoadError
from anyrank.testing import run_ranks

peft = pytest.importorskip("peft")
merge = anyrank.integrations.peft.merge


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 700)
        self.down = nn.Linear(700, 6, bias=False)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(self.embed(tokens))))


def adapter(folder: Path, **options: Any) -> Any:
    """Saves a base and a trained adapter; the model that PEFT makes of them."""
    torch.manual_seed(0)
    base = Net()
    save_file(base.state_dict(), folder / "base.safetensors")
    config = peft.LoraConfig(target_modules=["embed", "up", "down"], r=4, **options)
    model = peft.get_peft_model(base, config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    model.save_pretrained(folder / "adapter")
    return model


def test_an_adapter_that_is_still_in_its_model_is_not_written_as_weights(tmp_path: Path) -> None:
    model = adapter(tmp_path)
    with anyrank.Checkpoints(tmp_path / "run", anyrank.TrainState(model)) as ckpts:
        ckpts.save()
    with pytest.raises(LoadError, match=r"lora_\w+\.default.*not merged, so a reader.*peft\.merge"):
        anyrank.convert(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    anyrank.convert(tmp_path / "run", tmp_path / "all.pt", to="torch")
    torch.manual_seed(1)
    again = peft.get_peft_model(Net(), model.peft_config["default"])
    anyrank.load(again, tmp_path / "all.pt")
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_an_adapter_by_itself_stays_one(tmp_path: Path) -> None:
    adapter(tmp_path)
    report = anyrank.convert(tmp_path / "adapter", tmp_path / "out", dtype="bfloat16")
    assert "adapter_model.safetensors" in report.files
    assert "adapter_config.json" in report.copied
    model = peft.PeftModel.from_pretrained(Net(), tmp_path / "out")
    assert model.peft_config


def test_a_base_with_an_adapter_is_refused_with_the_ways_to_merge(tmp_path: Path) -> None:
    adapter(tmp_path)
    sources = [tmp_path / "base.safetensors", tmp_path / "adapter"]
    with pytest.raises(LoadError, match=r"Pass one of them.*peft\.merge.*merge_and_unload"):
        anyrank.convert(sources, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["head"]}, {"use_dora": True}])
def test_a_merged_model_is_written_under_the_names_of_its_base(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    model = adapter(tmp_path, **options)
    merged = merge(model)
    plain = adapter(tmp_path, **options).merge_and_unload().state_dict()
    for number, given in enumerate((merged, model.base_model, model.get_base_model())):
        anyrank.convert(given, tmp_path / f"out{number}")
        written = load_file(tmp_path / f"out{number}/model.safetensors")
        assert written.keys() == plain.keys()
        assert all(torch.equal(written[name], plain[name]) for name in plain)


def test_rows_of_an_embedding_that_were_trained_are_written_merged(tmp_path: Path) -> None:
    rows = {"embed": [0, 3]}
    config = peft.LoraConfig(target_modules=["up"], r=2, trainable_token_indices=rows)
    model = peft.get_peft_model(Net(), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    plain = copy.deepcopy(model).merge_and_unload().state_dict()
    with pytest.raises(LoadError, match=r"belongs to an adapter\. First merge it"):
        anyrank.convert(model, tmp_path / "out")
    anyrank.convert(merge(model), tmp_path / "out")
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == plain.keys()
    assert all(torch.equal(written[name], plain[name]) for name in plain)


def test_a_merge_that_is_not_complete_is_refused(tmp_path: Path) -> None:
    model = adapter(tmp_path)
    model.add_adapter("other", peft.LoraConfig(target_modules=["up", "head"], r=2))
    merge(model, adapter="other")
    with pytest.raises(LoadError, match=r"belongs to an adapter\. First merge it"):
        anyrank.convert(model, tmp_path / "out")
    model = adapter(tmp_path)
    model.add_adapter("other", peft.LoraConfig(target_modules=["up", "head"], r=2))
    model.base_model.set_adapter(["default", "other"])
    merge(model, adapter="default")
    with pytest.raises(LoadError, match=r"belongs to an adapter\. First merge it"):
        anyrank.convert(model, tmp_path / "out")


def job_merged(folder: str) -> None:
    model = peft.get_peft_model(Net(), peft.LoraConfig(target_modules=["up", "down"], r=4))
    anyrank.load(model, f"{folder}/all.pt")
    anyrank.convert(merge(fully_shard(model)), f"{folder}/sharded")


def test_a_sharded_merged_model_is_written_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = peft.get_peft_model(Net(), peft.LoraConfig(target_modules=["up", "down"], r=4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    torch.save(model.state_dict(), tmp_path / "all.pt")
    run_ranks(2, job_merged, str(tmp_path))
    written = load_file(tmp_path / "sharded/model.safetensors")
    plain = model.merge_and_unload().state_dict()
    assert written.keys() == plain.keys()
    assert all(torch.allclose(written[name], plain[name], atol=1e-5) for name in plain)


@pytest.mark.parametrize("missing", ["error", "keep", "init"])
def test_the_file_of_an_adapter_leaves_the_base_as_it_is(missing: Any, tmp_path: Path) -> None:
    model = adapter(tmp_path, modules_to_save=["head"])
    torch.manual_seed(1)
    again: Any = peft.get_peft_model(Net(), model.peft_config["default"])
    base = again.base_model.model.up.base_layer.weight.clone()
    report = anyrank.load(again, tmp_path / "adapter", missing=missing)
    assert report.missing == []
    assert torch.equal(again.base_model.model.up.base_layer.weight, base)
    for key, value in peft.get_peft_model_state_dict(model).items():
        assert torch.equal(peft.get_peft_model_state_dict(again)[key], value), key
