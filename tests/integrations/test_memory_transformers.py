"""Tiles and recomputed layers in transformers models: views, routers, caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from accelerate.utils.operations import convert_to_fp32
from peft import LoraConfig, get_peft_model
from tests.integrations.families import CONFIGS, SMALL, build
from tests.nets import whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_outputs import CausalLMOutputWithPast

import anyrank
from anyrank.integrations.transformers import enable_recompute, tile_mlps, tiled_loss
from anyrank.testing import run_ranks

TOKENS = torch.arange(24).reshape(2, 12)


# Of layers that are built otherwise than those of `families.py`.
OTHERS: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=None),
    "phi3": lambda: transformers.Phi3Config(**SMALL, pad_token_id=0),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SMALL),
    "bloom": lambda: transformers.BloomConfig(
        hidden_size=16, n_layer=2, n_head=2, vocab_size=96, hidden_dropout=0.0
    ),
    "mpt": lambda: transformers.MptConfig(
        d_model=16, n_layers=2, n_heads=2, vocab_size=96, max_seq_len=32
    ),
}
FAMILIES = [*CONFIGS, *OTHERS]


def make(family: str, **options: Any) -> Any:
    """In float64, in which a sum in another order is as good as the same; without dropout."""
    torch.manual_seed(0)
    if family in OTHERS:
        model = transformers.AutoModelForCausalLM.from_config(OTHERS[family]())
    else:
        model = build(family)
    model = model.double().train()
    model.set_experts_implementation("eager")  # the grouped product takes no float64
    for module in model.modules():  # GPT-2 has dropout by default
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for name, value in options.items():
        setattr(model.config, name, value)
    return model


def grads(model: Any, **more: Any) -> list[torch.Tensor]:
    loss = model(input_ids=TOKENS, labels=TOKENS, **{"use_cache": False, **more}).loss
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral", "qwen3_moe"])
def test_modules_that_view_their_input_are_tiled(family: str) -> None:
    model = make(family)
    plain = grads(model)
    assert len(anyrank.tile_(model, "**.mlp", chunk_size=5).names) == 2
    for mine, wanted in zip(grads(model), plain, strict=True):
        assert (mine is None) == (wanted is None)
        if mine is not None:
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-8)


def test_a_cache_is_in_both_runs_as_it_was() -> None:
    model = make("llama")
    plain = grads(model)
    anyrank.recompute_(model, "model.layers.*")
    for mine, wanted in zip(grads(model, use_cache=True), plain, strict=True):
        torch.testing.assert_close(mine, wanted)
    with torch.no_grad():
        assert model(input_ids=TOKENS).past_key_values.get_seq_length() == 12


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_recomputed_layers_in_training_mode_have_their_cache_without_gradients(family: str) -> None:
    model = make(family)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(TOKENS[:, :5] + 1, **options)
    handle = enable_recompute(model)
    assert torch.equal(model.generate(TOKENS[:, :5] + 1, **options), plain)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=TOKENS[:, :5], past_key_values=cache, use_cache=True)
    assert cache.get_seq_length() == 5
    with pytest.raises(anyrank.RecomputeError, match="a non-empty cache"):
        model(input_ids=TOKENS[:, 5:], past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="already has a recompute_ patch"):
        enable_recompute(model)
    handle.remove()
    assert not model.is_gradient_checkpointing


class OwnLayer(torch.nn.Linear):
    gradient_checkpointing = False


class OwnCode(transformers.PreTrainedModel):
    config_class = transformers.LlamaConfig
    supports_gradient_checkpointing = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layer = OwnLayer(4, 4)

    def forward(self, x: Any) -> Any:
        layer: Any = self.layer
        assert layer.gradient_checkpointing
        return layer._gradient_checkpointing_func(layer, x)


def test_a_model_that_calls_its_checkpointing_function_itself() -> None:
    model = OwnCode(transformers.LlamaConfig(**SMALL))
    handle = enable_recompute(model)
    assert handle.names == ["layer"]
    model(torch.randn(2, 4)).sum().backward()
    handle.remove()
    assert not model.is_gradient_checkpointing


# -- anyrank.integrations.transformers ------------------------------------------------------------


def loss_and_grads(model: Any) -> list[Any]:
    model.zero_grad()
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    return [loss.detach().double(), *(p.grad for p in model.parameters())]


def assert_close(mine: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(mine, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)  # logits are float32


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_the_same_with_all_three(family: str) -> None:
    model = make(family)
    plain, forwards = loss_and_grads(model), [type(m).forward for m in model.modules()]
    handles = [enable_recompute(model, offload=anyrank.Offload(pool_bytes=1 << 20))]
    assert len(handles[0].names) == (4 if family in ("llava", "qwen2_vl") else 2)
    if family == "bert":
        with pytest.raises(ValueError, match="chunk_size_feed_forward"):
            tile_mlps(model)
        with pytest.raises(ValueError, match="loss of BertForMaskedLM is not ForCausalLMLoss"):
            tiled_loss(model)
    else:
        handles += [tile_mlps(model, 5), tiled_loss(model, 5)]
        ends = {"mixtral": ".experts", "qwen3_moe": ".experts", "mpt": ".ffn"}.get(family, "mlp")
        assert all(name.endswith(ends) for name in handles[1].names)
    assert_close(loss_and_grads(model), plain)
    with torch.no_grad():  # evaluation has logits
        assert model(input_ids=TOKENS, labels=TOKENS).logits.shape[-1] == 96
    for handle in handles:
        handle.remove()
    assert [type(m).forward for m in model.modules()] == forwards
    assert not any("forward" in vars(module) for module in model.modules())
    assert_close(loss_and_grads(model), plain)


def test_mlps_that_need_all_rows_at_a_time_stay_whole_and_are_named(caplog: Any) -> None:
    model = transformers.RwkvModel(
        transformers.RwkvConfig(vocab_size=9, hidden_size=8, num_hidden_layers=2)
    )
    with pytest.raises(ValueError, match="no MLP to tile"):
        tile_mlps(model)
    assert (
        "2 modules not tiled, such as blocks.0.feed_forward, because the forward takes state"
        in caplog.text
    )


def test_the_number_of_items_divides_the_tiled_loss() -> None:
    model = make("llama")
    plain = model(input_ids=TOKENS, labels=TOKENS, num_items_in_batch=torch.tensor(50)).loss
    tiled_loss(model, 5)
    mine = model(input_ids=TOKENS, labels=TOKENS, num_items_in_batch=torch.tensor(50)).loss
    assert_close([mine.double()], [plain.double()])
    with pytest.raises(ValueError, match=r"Call tiled_loss\(\) only once"):
        tiled_loss(model)


def test_logits_that_the_model_scales_are_refused() -> None:
    config = transformers.GraniteConfig(**SMALL, logits_scaling=2.0)
    model = transformers.GraniteForCausalLM(config)
    tiled_loss(model, 5)
    with pytest.raises(ValueError, match="modifies its logits"):
        model(input_ids=TOKENS, labels=TOKENS)
    with torch.no_grad():
        model(input_ids=TOKENS, labels=TOKENS)


def test_adapters_over_a_frozen_base_are_recomputed() -> None:
    def lora() -> Any:
        torch.manual_seed(0)
        return get_peft_model(make("llama"), LoraConfig(r=2, init_lora_weights=False))

    plain, model = loss_and_grads(lora()), lora()
    enable_recompute(model)
    tile_mlps(model, 5)
    tiled_loss(model, 5)
    assert_close(loss_and_grads(model), plain)


def wrap(model: Any, kind: str) -> Any:
    """DDP; FSDP2 with a unit for each layer; tensor parallelism in the MLPs."""
    if kind == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    mlps = [name for name, _ in model.named_modules() if name.endswith(".gate_proj")]
    if kind == "tp":
        plan: dict[str, Any] = {}
        for name in (name.removesuffix("gate_proj") for name in mlps):
            plan |= {f"{name}{part}": ColwiseParallel() for part in ("gate_proj", "up_proj")}
            plan[f"{name}down_proj"] = RowwiseParallel()
        return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == 2:
            for layer in module:
                fully_shard(layer)
    return fully_shard(model)


def job_memory(kind: str, families: list[str]) -> list[list[Any]]:
    found: list[list[Any]] = []
    for family in families:
        wrapped = wrap(make(family), kind)
        enable_recompute(wrapped)
        if family != "bert":
            tile_mlps(wrapped, 5)
            tiled_loss(wrapped, 5)
        found.append([whole(one) for one in loss_and_grads(wrapped)])
    return found


GATED = ["llama", "llama_tied", "qwen2", "gemma2", "llava"]


@pytest.mark.parametrize(
    ("kind", "families"), [("ddp", FAMILIES), ("fsdp2", FAMILIES), ("tp", GATED)]
)
def test_wrapped_models_compute_the_same(kind: str, families: list[str]) -> None:
    plain = [loss_and_grads(make(family)) for family in families]
    for results in run_ranks(2, job_memory, kind, families):
        for result, wanted in zip(results, plain, strict=True):
            assert_close(result, wanted)


def test_without_labels_the_logits_are_logits() -> None:
    """As where the Trainer takes the labels out, for label_smoothing_factor or a loss function."""
    plain, model = make("llama"), make("llama")
    tiled_loss(model, 5)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    for given in ({"input_ids": TOKENS}, {"input_ids": TOKENS, "labels": None}):
        assert torch.equal(model(**given).logits, plain(**given).logits)


def test_a_head_that_is_wrapped_afterwards_is_refused() -> None:
    model = make("llama")
    tiled_loss(model, 5)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="head was replaced after tiled_loss"):
        wrapped(input_ids=TOKENS, labels=TOKENS)


@pytest.mark.parametrize("as_dict", [True, False])
@pytest.mark.parametrize("is_autocast", [True, False])
def test_logits_of_a_tiled_loss_are_none_in_training(as_dict: bool, is_autocast: bool) -> None:
    model, given = make("llama"), {"input_ids": TOKENS, "labels": TOKENS, "return_dict": as_dict}
    tiled_loss(model, 5)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        out = convert_to_fp32(model(**given))
    assert (out.logits if as_dict else out[1]) is None
    assert not as_dict or out.past_key_values is not None
    out[0].backward()
    with torch.no_grad():
        assert model(**given)[1].shape[-1] == 96


def lora_head(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"]))


def hooked_head(model: Any) -> Any:
    model.lm_head.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("change", [lora_head, hooked_head])
def test_a_head_that_is_more_than_its_product_is_refused(change: Any) -> None:
    with pytest.raises(ValueError, match=r"must be a plain nn\.Linear without hooks"):
        tiled_loss(change(make("llama")))
    model = make("llama")
    tiled_loss(model, 5)
    if change is hooked_head:  # after the call
        with pytest.raises(ValueError, match=r"must be a plain nn\.Linear without hooks"):
            change(model)(input_ids=TOKENS, labels=TOKENS)


T5: dict[str, Any] = {
    "d_model": 16,
    "d_ff": 16,
    "num_layers": 1,
    "num_heads": 2,
    "d_kv": 8,
    "vocab_size": 96,
}
SPEECH: dict[str, Any] = {
    "d_model": 16,
    "vocab_size": 96,
    "pad_token_id": 0,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 16,
}
OWN_LOSS: dict[str, Callable[[], Any]] = {
    "T5ForConditionalGeneration": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(**T5)
    ),
    "TrOCRForCausalLM": lambda: transformers.TrOCRForCausalLM(transformers.TrOCRConfig(**SPEECH)),
    "GPT2DoubleHeadsModel": lambda: transformers.GPT2DoubleHeadsModel(
        transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=96)
    ),
}


@pytest.mark.parametrize("name", OWN_LOSS)
def test_models_that_compute_their_loss_themselves_are_refused(name: str) -> None:
    model = OWN_LOSS[name]()
    with pytest.raises(ValueError, match=f"forward of {name} computes its loss itself"):
        tiled_loss(model)
    assert "forward" not in vars(model.get_output_embeddings())


LLAMA: Any = transformers.LlamaForCausalLM


class OwnLoss(LLAMA):
    """Its hidden states are as many as its words, so that nothing else fails."""

    def forward(self, input_ids: Any = None, labels: Any = None, **more: Any) -> Any:
        logits = self.lm_head(self.model(input_ids, use_cache=False).last_hidden_state)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def own_function(model: Any) -> None:
    model.loss_function = lambda logits, labels, **more: logits.float().square().mean()


@pytest.mark.parametrize("change", [OwnLoss, own_function])
def test_no_loss_of_hidden_states_leaves_a_forward(change: Any) -> None:
    sizes: dict[str, Any] = {**SMALL, "hidden_size": 96}
    config = transformers.LlamaConfig(**sizes)
    kind = OwnLoss if change is OwnLoss else transformers.LlamaForCausalLM
    plain, model = kind(config), kind(config)
    plain.load_state_dict(model.state_dict())
    handle = tiled_loss(model, 5)
    if change is own_function:
        own_function(plain)
        own_function(model)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"forward of {kind.__name__} used its head"):
            model(input_ids=TOKENS, labels=TOKENS)
    handle.remove()
    assert torch.equal(*(m(input_ids=TOKENS, labels=TOKENS).loss for m in (plain, model)))


class TwoHeads(LLAMA):
    def forward(self, input_ids: Any = None, labels: Any = None, **more: Any) -> Any:
        hidden = self.model(input_ids, use_cache=False).last_hidden_state
        first, logits = self.lm_head(hidden / 2), self.lm_head(hidden)
        loss_function: Any = self.loss_function
        return loss_function(logits, labels, 96) + first.mean()


def test_a_head_that_is_used_twice_is_refused() -> None:
    model = TwoHeads(transformers.LlamaConfig(**SMALL))
    tiled_loss(model, 5)
    with pytest.raises(ValueError, match="uses its head twice before its loss"):
        model(input_ids=TOKENS, labels=TOKENS)
