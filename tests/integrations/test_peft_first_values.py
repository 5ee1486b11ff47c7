"""Adapters and the base under them: LoRA's first values, every other method refused by name."""

from __future__ import annotations

import copy
import re
from functools import cache
from typing import Any

import pytest
import torch
from peft import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    LoraConfig,
    get_peft_model,
    inject_adapter_in_model,
)
from tests.integrations.families import build

import anyrank
from anyrank.models.tensors import find_tensors
from anyrank.versions import warn_if_untested

OPTIONS: dict[str, dict[str, Any]] = {
    "IA3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "ADALORA": {"total_step": 10, "init_r": 2, "target_modules": ["q_proj"]},
    "OFT": {"oft_block_size": 8, "r": 0, "target_modules": ["q_proj"]},
    "BOFT": {"boft_block_size": 8, "target_modules": ["q_proj"]},
    "C3A": {"block_size": 8, "target_modules": ["q_proj"]},
    "FOURIERFT": {"n_frequency": 10, "target_modules": ["q_proj"]},
    "WAVEFT": {"n_frequency": 10, "target_modules": ["q_proj"]},
    "TRAINABLE_TOKENS": {"token_indices": [1, 2], "target_modules": ["embed_tokens"]},
    "ROAD": {"group_size": 8, "target_modules": ["q_proj"]},
    "VBLORA": {"vector_length": 8, "num_vectors": 4, "topk": 2, "target_modules": ["q_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
}
# What PEFT itself does not make of a tiny Llama, or not on meta.
NEED_MORE = {"ADAMSS", "ADAPTION_PROMPT", "XLORA"}
METHODS = {str(kind).rpartition(".")[2].upper() for kind in PEFT_TYPE_TO_CONFIG_MAPPING} - NEED_MORE
ON_META = METHODS - {"FROD", "SHIRA"}


@cache
def base() -> Any:
    torch.manual_seed(1)
    model = build("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def adapted(method: str, model: Any = None, **more: Any) -> Any:
    """A tiny Llama with a new adapter."""
    kind = PEFT_TYPE_TO_CONFIG_MAPPING[method]  # pyright: ignore[reportArgumentType]
    fields = kind.__dataclass_fields__
    options = dict(OPTIONS.get(method, {"target_modules": ["q_proj"]}))
    if "num_virtual_tokens" in fields:
        options = {"num_virtual_tokens": 2, "task_type": "CAUSAL_LM"}
    if "r" in fields and method != "ADALORA":
        options.setdefault("r", 2)
    model = build("llama") if model is None else model
    torch.manual_seed(2)
    return get_peft_model(model, kind(**(options | more)))


def adapter_of(model: Any) -> dict[str, torch.Tensor]:
    own = set(base().state_dict())
    names = {
        name: name.replace("base_model.model.", "").replace(".base_layer", "")
        for name, _ in model.named_parameters()
    }
    return {n: p.detach() for n, p in model.named_parameters() if names[n] not in own}


@pytest.mark.filterwarnings("ignore")  # PEFT's, of what is on meta
@pytest.mark.parametrize(
    ("method", "more"),
    [(method, {}) for method in sorted(ON_META)]
    + [
        ("LORA", {"init_lora_weights": "pissa"}),
        ("LORA", {"init_lora_weights": "orthogonal"}),
        ("LORA", {"use_dora": True}),
        ("LORA", {"trainable_token_indices": [1, 3]}),
    ],
)
def test_every_new_adapter_on_meta_but_lora_is_refused_before_anything_is_read(
    method: str, more: dict[str, Any]
) -> None:
    with anyrank.meta():
        model = adapted(method, **more)
    report, refused = load_or_refuse(model)
    if report is not None:
        # LN tuning has no tensors of its own: the base fills its copies.
        assert not more
        assert method == "LORA" or not report.initialised
        return
    assert method != "LORA" or more, refused
    named = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    plain = [re.sub(r"\.(default|token_adapter)\b", "", name) for name in named]
    short = [".".join(name.split(".")[-3:]) for name in plain]
    assert any(name in refused.replace(".default", "") for name in short), refused
    assert (
        "load the base first, then create the adapter" in refused or "missing from the" in refused
    )
    assert all(p.is_meta for p in model.parameters())
    if "plain LoRA" in refused:
        with pytest.raises(anyrank.LoadError, match=r"not plain LoRA"):
            anyrank.materialize(model, device="cpu")


@pytest.mark.parametrize("choice", [True, False, "gaussian"])
@pytest.mark.parametrize("target", ["q_proj", "embed_tokens"])
def test_a_new_lora_on_meta_has_pefts_first_values(choice: Any, target: str) -> None:
    more = {"init_lora_weights": choice, "target_modules": [target]}
    expected = adapter_of(adapted("LORA", **more))
    with anyrank.meta():
        model = adapted("LORA", **more)
    if choice is False and target == "embed_tokens":  # drawn by the layer's constructor
        with pytest.raises(anyrank.LoadError, match="load the base first"):
            anyrank.load(model, dict(base().state_dict()))
        return
    report = anyrank.load(model, dict(base().state_dict()))
    assert expected.keys() == adapter_of(model).keys()
    assert len(report.initialised) == len(expected)
    for name, value in adapter_of(model).items():
        assert_same_kind(value, expected[name], name)


def load_or_refuse(model: Any) -> tuple[anyrank.LoadReport | None, str]:
    try:
        return anyrank.load(model, dict(base().state_dict())), ""
    except anyrank.LoadError as error:
        return None, str(error)


def assert_same_kind(value: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """The same constant, or random values of the same size."""
    assert (value.shape, value.dtype) == (expected.shape, expected.dtype), name
    assert bool(value.isfinite().all()), name
    if bool((expected == expected.flatten()[0]).all()) or len(expected.unique()) == 2:
        assert torch.equal(value, expected), name
    elif expected.numel() >= 32:
        assert float(value.std()) == pytest.approx(float(expected.std()), rel=0.6), name


def held_by(model: Any) -> dict[str, torch.Tensor]:
    """All tensors, those that state_dict leaves out included."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


CASES: list[tuple[str, dict[str, Any]]] = [(method, {}) for method in sorted(METHODS)]
CASES += [
    ("LORA", {"init_lora_weights": choice})
    for choice in ("gaussian", "orthogonal", "pissa", "olora", "eva", "mica", "lora_ga")
]
CASES += [("LORA", {"trainable_token_indices": [1, 3]}), ("LORA", {"use_dora": True})]


@pytest.mark.filterwarnings("ignore")  # PEFT's
@pytest.mark.parametrize(("method", "more"), CASES)
def test_adapters_of_a_real_model_go_with_the_base_that_is_loaded(
    method: str, more: dict[str, Any]
) -> None:
    expected = held_by(adapted(method, copy.deepcopy(base()), **more))
    model = adapted(method, **more)
    before = {name: tensor.detach().clone() for name, tensor in held_by(model).items()}
    report, refused = load_or_refuse(model)
    if report is None:
        assert "PEFT may compute these from the base weights" in refused
        expected = before
        assert method != "LORA" or more.get("init_lora_weights") != "gaussian"
    else:
        # LN tuning trains copies of the base, which the base fills.
        assert method in ("LORA", "LN_TUNING", "TRAINABLE_TOKENS"), method
        assert more in ({}, {"init_lora_weights": "gaussian"})
    for name, tensor in held_by(model).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("choice", ["pissa", "olora"])
@pytest.mark.parametrize("on_meta", [False, True])
def test_a_base_is_refused_where_peft_has_taken_the_adapter_out_of_it(
    choice: str, on_meta: bool
) -> None:
    whole = adapted("LORA", init_lora_weights=choice)
    state = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    adapter = {name: tensor for name, tensor in state.items() if "lora_" in name}
    if on_meta:
        with anyrank.meta():
            model = adapted("LORA")
        for config in model.peft_config.values():  # PEFT computes nothing on meta
            config.init_lora_weights = choice
    else:
        model = adapted("LORA", init_lora_weights=choice)
    with pytest.raises(anyrank.LoadError, match="load the base first"):
        anyrank.load(model, dict(base().state_dict()) | adapter)
    anyrank.load(model, state)  # which has what is left of the base
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize("more", [{"init_lora_weights": "pissa"}, {"use_dora": True}])
def test_a_sync_of_a_base_alone_is_refused_where_adapters_follow_it(more: dict[str, Any]) -> None:
    model = adapted("LORA", **more)
    with pytest.raises(anyrank.LoadError, match="PEFT may compute these"):
        anyrank.sync(model, base())
    anyrank.sync(model, adapted("LORA", **more))


def test_a_factor_has_one_name_however_the_adapter_was_added() -> None:
    config = LoraConfig(r=2, target_modules=["0"])
    for add in (get_peft_model, lambda model, config: inject_adapter_in_model(config, model)):
        model = add(torch.nn.Sequential(torch.nn.Linear(3, 3)), config)
        names = {tensor.name for tensor in find_tensors(model)}
        factors = {"0.lora_A.default.weight", "0.lora_B.default.weight"}
        assert names == {"0.weight", "0.bias"} | factors


def test_a_version_of_peft_that_was_not_tested_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = adapted("LORA")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.99.0")
    warn_if_untested.cache_clear()
    for _ in range(2):
        load_or_refuse(model)
    warn_if_untested.cache_clear()
    assert caplog.text.count("peft 0.99.0 is untested") == 1
