"""A folder that holds a whole model beside an adapter: `peft.load` means the adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

import anyrank
from anyrank.integrations import peft


def adapted(**options: Any) -> Any:
    torch.manual_seed(1)
    base = torch.nn.Sequential(torch.nn.Linear(4, 4))
    return get_peft_model(base, LoraConfig(r=2, target_modules=["0"], **options))


def mixed(folder: Path, *, safe: bool) -> dict[str, torch.Tensor]:
    """A folder of both, and the tensors of its adapter."""
    model = adapted()
    factors = {k: t.normal_() for k, t in model.state_dict().items() if "lora_" in k}
    model.save_pretrained(folder, safe_serialization=safe)
    save_file({"0.weight": torch.ones(4, 4), "0.bias": torch.ones(4)}, folder / "model.safetensors")
    return factors


@pytest.mark.parametrize("safe", [True, False])
def test_the_adapter_is_loaded_beside_a_model(safe: bool, tmp_path: Path) -> None:
    factors, fresh = mixed(tmp_path, safe=safe), adapted()
    before = {key: t.clone() for key, t in fresh.state_dict().items() if key not in factors}
    assert peft.load(fresh, tmp_path).tensors == 2
    state = fresh.state_dict()
    assert all(torch.equal(state[key], t) for key, t in (factors | before).items())


def test_its_settings_are_compared_as_well(tmp_path: Path) -> None:
    mixed(tmp_path, safe=True)
    for name, value in (("lora_alpha", 3), ("init_lora_weights", "pissa")):
        with pytest.raises(ValueError, match=f"{name} is "):
            peft.load(adapted(**{name: value}), tmp_path)


def test_an_adapter_of_another_name_beside_a_model_is_refused(tmp_path: Path) -> None:
    mixed(tmp_path, safe=True)
    (tmp_path / peft.WEIGHTS).rename(tmp_path / "adapter.safetensors")
    with pytest.raises(anyrank.LoadError, match=r"cannot read an adapter.* a model"):
        peft.load(adapted(), tmp_path)
