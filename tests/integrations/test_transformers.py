"""transformers models: the same weights as `from_pretrained`, sharded, tied, fused and with
adapters.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tests.integrations.families import CONFIGS, build, save
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    BertConfig,
    BertModel,
    CLIPTextConfig,
    CLIPTextModel,
    GPT2Config,
    GPT2Model,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    conversion_mapping,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter

import anyrank
from anyrank.testing import run_ranks
from anyrank.versions import warn_if_untested


def shard(model: Any) -> Any:
    for module in list(model.modules()):
        kind = type(module).__name__
        if kind.endswith(("DecoderLayer", "EncoderLayer", "GPT2Block", "VisionBlock", "BertLayer")):
            fully_shard(module)
    return fully_shard(model)


def full(tensor: torch.Tensor) -> torch.Tensor:
    whole: Any = tensor.detach()
    return whole.full_tensor() if hasattr(whole, "full_tensor") else whole


def job_family(family: str, folder: str, peft: bool) -> tuple[dict[str, Any], Any, Any]:
    torch.manual_seed(torch.distributed.get_rank() + 7)
    with anyrank.meta():
        model = build(family)
        if peft:
            model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    shard(model)
    report = anyrank.load(model, folder)
    base = model.get_base_model() if peft else model
    tied = base.get_output_embeddings()
    same = tied is not None and tied.weight is base.get_input_embeddings().weight
    return {k: full(v) for k, v in model.state_dict().items()}, report, same


def plain_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


CASES = [
    *((family, False) for family in CONFIGS),
    ("llama", True),
    ("llama_tied", True),
    ("mixtral", True),
    ("llava", True),
]


@pytest.mark.parametrize(("family", "peft"), CASES)
def test_same_weights_as_from_pretrained(tmp_path: Any, family: str, peft: bool) -> None:
    expected = save(family, tmp_path)
    results = run_ranks(2, job_family, family, str(tmp_path), peft)
    for weights, report, tied in results:
        found = {plain_name(k): v for k, v in weights.items() if "lora_" not in k}
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
        assert report.missing == report.unexpected == []
        assert tied == (family in ("llama_tied", "gpt2", "bert"))
    adapters = [{k: v for k, v in w.items() if "lora_" in k} for w, _, _ in results]
    assert bool(adapters[0]) == peft
    for name, value in adapters[0].items():
        assert torch.equal(value, adapters[1][name]), name
        assert bool((value == 0).all()) == ("lora_B" in name), name


@pytest.mark.parametrize("positions", [64, 512])
def test_the_positions_of_a_bert_on_meta_are_rebuilt(positions: int) -> None:
    config = BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=50,
        max_position_embeddings=positions,
    )
    normal = BertModel(config)
    with torch.device("meta"):
        model = BertModel(config)
    report = anyrank.load(model, normal.state_dict())
    assert "embeddings.position_ids" in report.rebuilt
    for name, buffer in normal.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


class Wrapped(torch.nn.Module):
    """A transformers model as a part of another one."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, torch.nn.Linear(2, 2)


@pytest.mark.parametrize("wrap", [torch.nn.Module.eval, Wrapped])
def test_keys_that_transformers_ignores_are_of_no_use(wrap: Any) -> None:
    small = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    old = {
        CLIPTextModel(CLIPTextConfig(**small, num_hidden_layers=1)): "old.position_ids",
        GPTNeoXForCausalLM(GPTNeoXConfig(**small, num_hidden_layers=1)): "old.attention.bias",
        GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=2)): "h.0.attn.masked_bias",
    }
    for inner, key in old.items():
        model = wrap(inner)
        key = f"inner.{key}" if model is not inner else key
        source = {**model.state_dict(), key: torch.zeros(2)}
        assert f"{key}: not needed by the model" in anyrank.load(model, source).skipped
        with pytest.raises(anyrank.LoadError, match="unexpected"):
            anyrank.load(model, {**source, "inner.stray": torch.zeros(2)})
    if wrap is Wrapped:  # what one part ignores is not ignored in another
        with pytest.raises(anyrank.LoadError, match="unexpected"):
            anyrank.load(model, {**model.state_dict(), "head.attention.bias": torch.zeros(2)})


@pytest.mark.parametrize("missing", ["error", "init"])
def test_a_tie_that_to_empty_broke_is_refused_with_the_way_out(tmp_path: Any, missing: Any) -> None:
    save("llama_tied", tmp_path)
    with torch.device("meta"):
        model = build("llama_tied")
    model.to_empty(device="cpu")
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    with pytest.raises(anyrank.LoadError, match=r"declared tied(?s:.*)model\.tie_weights\(\)"):
        anyrank.load(model, tmp_path, missing=missing)
    model.tie_weights()
    anyrank.load(model, tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def job_broken_tie(folder: str) -> None:
    with torch.device("meta"):
        model = build("llama_tied")
    wrapped = DistributedDataParallel(model.to_empty(device="cpu"))
    with pytest.raises(anyrank.LoadError, match=r"declared tied(?s:.*)model\.tie_weights\(\)"):
        anyrank.load(wrapped, folder)


def test_a_tie_that_to_empty_broke_is_seen_under_ddp(tmp_path: Any) -> None:
    save("llama_tied", tmp_path)
    run_ranks(2, job_broken_tie, str(tmp_path))


def test_a_conversion_that_lacks_an_expert_is_refused(tmp_path: Any) -> None:
    save("mixtral", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    lost = next(key for key in tensors if "experts.3.w1" in key)
    del tensors[lost]
    save_file(tensors, path)
    with pytest.raises(anyrank.LoadError, match=r"gate_up_proj is fused from(?s:.*)'keep' or"):
        anyrank.load(build("mixtral"), tmp_path)
    model = build("mixtral")
    (name,) = [n for n, _ in model.named_parameters() if "0.mlp.experts.gate_up_proj" in n]
    kept = model.get_parameter(name).detach().clone()
    layer = lost.split(".experts.")[0]
    parts = [key for key in tensors if key.startswith(f"{layer}.experts.") and "w2" not in key]
    anyrank.load(model, tmp_path, rename=dict.fromkeys(parts, ""), missing="keep")
    assert torch.equal(model.get_parameter(name), kept)


@pytest.mark.parametrize("call", ["load", "convert"])
def test_a_version_that_has_its_conversions_elsewhere_is_named(
    call: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("mixtral", tmp_path)
    model, file = build("mixtral"), tmp_path / "live.pt"
    torch.save(model.state_dict(), file)
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)
    calls = {
        "load": lambda: anyrank.load(model, tmp_path),
        "convert": lambda: anyrank.convert(file, tmp_path / "out", model=model),
    }
    with pytest.raises(
        anyrank.LoadError, match=r"Install transformers 5\.\d+, with which anyrank was tested"
    ):
        calls[call]()


def test_a_version_of_transformers_that_was_not_tested_is_named_once(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save("mixtral", tmp_path)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "5.99.0")
    warn_if_untested.cache_clear()
    for _ in range(2):
        anyrank.load(build("mixtral"), tmp_path)
    warn_if_untested.cache_clear()
    assert caplog.text.count("transformers 5.99.0 is untested") == 1


def test_only_transposes_of_stacked_experts_keep_their_names() -> None:
    """What `_fits_as_it_is` relies on when it skips the mapping."""
    get_checkpoint_conversion_mapping("llama")
    mapping: Any = conversion_mapping._checkpoint_conversion_mapping_cache
    for transforms in mapping.values():
        for one in transforms:
            kept = set(one._original_source_patterns) & set(one._original_target_patterns)
            if isinstance(one, WeightConverter) and kept:
                assert [type(op) for op in one.operations] == [Transpose], one
                assert all("experts" in pattern for pattern in kept), one


@pytest.mark.parametrize("together", [False, True])
def test_an_adapters_trained_copy_leaves_the_original_module_alone(
    tmp_path: Any, together: bool
) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    save("llama", tmp_path / "base")
    trained: Any = get_peft_model(build("llama"), copy.deepcopy(config))
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    trained.save_pretrained(tmp_path / "adapter")
    adapter = tmp_path / "adapter" / "adapter_model.safetensors"
    with anyrank.meta():
        model: Any = get_peft_model(build("llama"), copy.deepcopy(config))
    if together:
        base = tmp_path / "base" / "model.safetensors"
        anyrank.load(model, [base, adapter])
    else:
        anyrank.load(model, tmp_path / "base")
        anyrank.load(model, adapter, missing="keep")
    head = model.base_model.model.lm_head
    theirs = trained.base_model.model.lm_head
    saved = load_file(tmp_path / "base" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(head.original_module.weight, saved)
    assert torch.equal(head.modules_to_save.default.weight, theirs.modules_to_save.default.weight)


def two_adapters(model: Any) -> Any:
    """The second one has a trained copy of what the active one leaves alone."""
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]), adapter_name="one")
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model.add_adapter("two", config)
    return model


@pytest.mark.parametrize("on_meta", [False, True])
def test_the_copy_of_an_adapter_that_is_not_active_is_filled_from_the_base(
    tmp_path: Any, on_meta: bool
) -> None:
    save("llama", tmp_path)
    with anyrank.meta() if on_meta else contextlib.nullcontext():
        model = two_adapters(build("llama"))
    anyrank.load(model, tmp_path)
    base = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    head = model.base_model.model.lm_head
    assert torch.equal(head.original_module.weight, base)
    assert torch.equal(head.modules_to_save.two.weight, base)


def test_a_base_under_merged_adapters_is_refused_by_name(tmp_path: Any) -> None:
    save("llama", tmp_path)
    model: Any = get_peft_model(build("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
    model.merge_adapter()
    with pytest.raises(
        anyrank.LoadError, match=r"are merged .*\n  model.layers.0.self_attn.q_proj"
    ):
        anyrank.load(model, tmp_path)
    model.unmerge_adapter()
    anyrank.load(model, tmp_path)


DORA = {"r": 2, "target_modules": ["q_proj", "embed_tokens"], "use_dora": True}


def dora(base: Any) -> Any:
    return get_peft_model(base, LoraConfig(**DORA))


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_trained_dora_adapter_loads_with_its_base_and_keeps_its_magnitudes(
    tmp_path: Any, on_meta: bool
) -> None:
    save("llama", tmp_path / "base")
    trained = dora(type(build("llama")).from_pretrained(tmp_path / "base"))
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    trained.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    with torch.device("meta" if on_meta else "cpu"):
        model = dora(build("llama"))
    files = [
        tmp_path / "base" / "model.safetensors",
        tmp_path / "adapter" / "adapter_model.safetensors",
    ]
    anyrank.load(model, files)
    wanted = trained.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, wanted[name]), name
