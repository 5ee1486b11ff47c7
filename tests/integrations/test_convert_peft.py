"""`convert(merge=True)` of a base and an adapter that PEFT saved, against PEFT's own merge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import anyrank
from anyrank.errors import LoadError

peft = pytest.importorskip("peft")


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


@pytest.mark.parametrize(
    "options",
    [
        {"lora_alpha": 16},
        {"lora_alpha": 16, "use_rslora": True, "modules_to_save": ["head"]},
        {"lora_alpha": 8, "alpha_pattern": {"up": 3}, "rank_pattern": {"down": 2}},
    ],
)
def test_an_adapter_is_merged_as_peft_does(tmp_path: Path, options: dict[str, Any]) -> None:
    model = adapter(tmp_path, **options)
    sources = [tmp_path / "base.safetensors", tmp_path / "adapter"]
    report = anyrank.convert(sources, tmp_path / "out", merge=True)
    assert sorted(report.merged) == ["down.weight", "embed.weight", "up.weight"]
    wanted = model.merge_and_unload().state_dict()
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("how", ["whole", "lora", "head", "as many rows"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_trained_embedding_is_not_tied_to_the_head_again(
    tmp_path: Path, tied: bool, how: str
) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied))
    base.save_pretrained(tmp_path / "base")
    targets = {"whole": "q_proj", "lora": "embed_tokens", "head": "lm_head"}
    targets["as many rows"] = "gate_proj"  # as the embedding, and tied to nothing
    saved = ["embed_tokens"] if how == "whole" else None
    config = peft.LoraConfig(r=2, target_modules=[targets[how]], modules_to_save=saved)
    model = peft.get_peft_model(base, config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    model.save_pretrained(tmp_path / "adapter")
    sources, x = [tmp_path / "base", tmp_path / "adapter"], torch.arange(8)[None]
    if tied and how != "as many rows":
        text = r"embed_tokens\.weight: was trained by|lm_head.*nor a tensor of the base"
        with pytest.raises(LoadError, match=text):
            anyrank.convert(sources, tmp_path / "out", merge=True)
        return
    anyrank.convert(sources, tmp_path / "out", merge=True)
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(merged(x).logits, model.eval()(x).logits, rtol=1e-4, atol=1e-4)


def test_an_adapter_that_is_still_in_its_model_is_not_written_as_weights(tmp_path: Path) -> None:
    model = adapter(tmp_path)
    with anyrank.Checkpoints(tmp_path / "run", anyrank.TrainState(model)) as ckpts:
        ckpts.save()
    with pytest.raises(LoadError, match=r"lora_\w+\.default.*still in its model.*merge=True"):
        anyrank.convert(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    anyrank.convert(tmp_path / "run", tmp_path / "all.pt", to="torch")
    torch.manual_seed(1)
    again = peft.get_peft_model(Net(), model.peft_config["default"])
    anyrank.load(again, tmp_path / "all.pt")
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_what_is_not_plain_lora_is_refused(tmp_path: Path) -> None:
    adapter(tmp_path, use_dora=True)
    sources = [tmp_path / "base.safetensors", tmp_path / "adapter"]
    with pytest.raises(LoadError, match="use_dora"):
        anyrank.convert(sources, tmp_path / "out", merge=True)
    with pytest.raises(LoadError, match="merge=True"):
        anyrank.convert(sources, tmp_path / "out")
    with pytest.raises(LoadError, match=r"no adapter_config\.json"):
        anyrank.convert(sources[0], tmp_path / "out", merge=True)
    save_file({"other.weight": torch.ones(2)}, tmp_path / "other.safetensors")
    plain = tmp_path / "plain"
    plain.mkdir()
    adapter(plain)
    with pytest.raises(LoadError, match=r"\.weight: is not in the base"):
        anyrank.convert(
            [tmp_path / "other.safetensors", plain / "adapter"], tmp_path / "out", merge=True
        )


@pytest.mark.parametrize("how", ["pissa", "pissa_niter_4", "olora"])
def test_an_adapter_whose_initialisation_changed_the_base_is_refused(
    tmp_path: Path, how: str
) -> None:
    torch.manual_seed(0)
    base = Net()
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    config = peft.LoraConfig(target_modules=["up", "down"], r=4, init_lora_weights=how)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    sources = [tmp_path / "base.safetensors", tmp_path / "adapter"]
    with pytest.raises(LoadError, match=f"init_lora_weights is '{how}'"):
        anyrank.convert(sources, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_merged_weight_is_finite(tmp_path: Path, value: float) -> None:
    adapter(tmp_path)
    file = tmp_path / "adapter/adapter_model.safetensors"
    factors = load_file(file)
    factors["base_model.model.up.lora_A.weight"][0, 0] = value
    save_file(factors, file)
    sources = [tmp_path / "base.safetensors", tmp_path / "adapter"]
    with pytest.raises(LoadError, match=r"up\.weight: .* are NaN or infinite"):
        anyrank.convert(sources, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()


def test_an_adapter_by_itself_stays_one(tmp_path: Path) -> None:
    adapter(tmp_path)
    report = anyrank.convert(tmp_path / "adapter", tmp_path / "out", dtype="bfloat16")
    assert "adapter_model.safetensors" in report.files
    assert "adapter_config.json" in report.copied
    model = peft.PeftModel.from_pretrained(Net(), tmp_path / "out")
    assert model.peft_config


@pytest.mark.parametrize("kind", ["IA3Config", "LoHaConfig"])
def test_an_adapter_of_another_kind_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    base = Net()
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    more = {"feedforward_modules": []} if kind == "IA3Config" else {}
    config = getattr(peft, kind)(target_modules=["up"], **more)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    sources = [tmp_path / "base.safetensors", tmp_path / "adapter"]
    with pytest.raises(LoadError, match=r"is (IA3|LOHA), and only plain LoRA is merged"):
        anyrank.convert(sources, tmp_path / "out", merge=True)


def test_a_trained_layer_of_another_shape_is_not_put_into_the_base(tmp_path: Path) -> None:
    adapter(tmp_path, modules_to_save=["head"])
    base = load_file(tmp_path / "base.safetensors")
    base["head.weight"], base["head.bias"] = torch.zeros(5, 6), torch.zeros(5)
    save_file(base, tmp_path / "base.safetensors")
    sources = [tmp_path / "base.safetensors", tmp_path / "adapter"]
    with pytest.raises(LoadError, match=r"head.*neither a factor of LoRA nor a tensor of the base"):
        anyrank.convert(sources, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()
