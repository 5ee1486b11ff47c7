"""New adapters of every PEFT method on meta: PEFT's own first values, or refused by name."""

from __future__ import annotations

import copy
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, LoraConfig, get_peft_model
from tests.integrations.families import build
from torch.distributed.fsdp import fully_shard

import anyrank
from anyrank.testing import run_ranks

# Methods whose rules run; of the others, those that PEFT builds on meta are refused.
RIGHT = {
    "BEFT", "BOFT", "C3A", "HIRA", "HRA", "IA3", "LILY", "LOHA", "LOKR", "LORA", "MISS", "OFT",
    "PEANUT", "POLY", "ROAD",
}  # fmt: skip
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


@cache
def base() -> Any:
    torch.manual_seed(1)
    model = build("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def adapted(method: str, model: Any = None, **more: Any) -> Any:
    """A tiny Llama with a new adapter.

    Raises:
        Exception: PEFT wants more than the tests know of.
    """
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


def built(method: str, model: Any = None, **more: Any) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return adapted(method, model, **more)
    except Exception as error:
        pytest.skip(f"PEFT does not build it from so little: {error!r:.200}")


@pytest.mark.parametrize("method", sorted(map(str.upper, map(str, PEFT_TYPE_TO_CONFIG_MAPPING))))
def test_a_new_adapter_has_the_methods_own_first_values(method: str) -> None:
    method = method.rpartition(".")[2]
    torch.manual_seed(2)
    theirs = built(method)
    with anyrank.meta():
        model = built(method)
    report, refused = load_or_refuse(model)
    if report is None:
        assert method not in RIGHT, refused
        named = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
        short = [".".join(n.replace(".default", "").split(".")[-3:]) for n in named]
        assert any(name in refused.replace(".default", "") for name in short), refused
        assert "load the base model first" in refused or "missing in the source" in refused
        assert all(p.is_meta for p in model.parameters())
        return
    expected = adapter_of(theirs)
    assert expected.keys() == adapter_of(model).keys()
    for name, value in adapter_of(model).items():
        assert_same_kind(value, expected[name], name)
    assert {name for name in report.initialised if "lora_magnitude" not in name}


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


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("C3A", {"init_weights": False}),
        ("C3A", {"init_weights": "gaussian"}),
        ("LOHA", {"init_weights": False}),
        ("LOKR", {"init_weights": False}),
        ("OFT", {"init_weights": False}),
    ],
)
def test_an_adapter_that_starts_at_random_does_so(method: str, more: dict[str, Any]) -> None:
    torch.manual_seed(2)
    expected = adapter_of(built(method, **more))
    with anyrank.meta():
        model = built(method, **more)
    anyrank.load(model, dict(base().state_dict()))
    for name, value in adapter_of(model).items():
        assert_same_kind(value, expected[name], name)


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("C3A", {"init_weights": True}),
        ("LOKR", {"init_weights": "lycoris"}),
        ("MISS", {"init_weights": "mini", "mini_r": 2}),
        ("IA3", {"init_ia3_weights": False}),
        ("LORA", {"init_lora_weights": "pissa"}),
    ],
)
def test_a_choice_without_a_rule_is_refused_before_anything_is_read(
    method: str, more: dict[str, Any]
) -> None:
    with anyrank.meta():
        model = built(method, **more)
    with pytest.raises(anyrank.LoadError, match="load the base model first"):
        anyrank.plan(model, dict(base().state_dict()))


def held_by(model: Any) -> dict[str, torch.Tensor]:
    """All tensors, those that state_dict leaves out included."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


CASES: list[tuple[str, dict[str, Any]]] = [
    (str(method).rpartition(".")[2].upper(), {}) for method in PEFT_TYPE_TO_CONFIG_MAPPING
]
CASES += [
    ("LORA", {"init_lora_weights": choice})
    for choice in ("gaussian", "orthogonal", "pissa", "olora", "eva", "mica", "lora_ga")
]
CASES += [("LORA", {"trainable_token_indices": [1, 3]}), ("LORA", {"use_dora": True})]


@pytest.mark.parametrize(("method", "more"), CASES)
def test_adapters_of_a_real_model_go_with_the_base_that_is_loaded(
    method: str, more: dict[str, Any]
) -> None:
    expected = held_by(built(method, copy.deepcopy(base()), **more))
    model = built(method, **more)
    before = {name: tensor.detach().clone() for name, tensor in held_by(model).items()}
    report, refused = load_or_refuse(model)
    if report is None:
        assert "PEFT may have computed these adapters from the base weights" in refused
        expected = before
    elif more.get("init_lora_weights") in ("pissa", "olora"):
        raise AssertionError("it takes the adapter out of the base weights")
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
    with pytest.raises(anyrank.LoadError, match="load the base model first"):
        anyrank.load(model, dict(base().state_dict()) | adapter)
    anyrank.load(model, state)  # which has what is left of the base
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_rows_of_tokens_that_were_trained_stay_and_go_with_the_new_base() -> None:
    tokens = {"trainable_token_indices": [1, 3]}
    model = adapted("LORA", **tokens)
    layer = model.base_model.model.model.embed_tokens.token_adapter
    with torch.no_grad():
        layer.trainable_tokens_delta["default"].fill_(7)
    report = anyrank.load(model, dict(base().state_dict()))
    assert not [name for name in report.initialised if "delta" in name]
    assert (layer.trainable_tokens_delta["default"] == 7).all()
    model.merge_adapter()
    model.unmerge_adapter()  # puts the original rows back
    assert torch.equal(layer.base_layer.weight, base().model.embed_tokens.weight)


def job_tokens(folder: str) -> None:
    torch.manual_seed(torch.distributed.get_rank())  # another base on each rank
    model = get_peft_model(
        build("llama"), LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[1, 3])
    )
    layer = model.base_model.model.model.embed_tokens.token_adapter
    fully_shard(layer)
    fully_shard(model)
    report = anyrank.load(model, f"{folder}/w.pt")
    assert [name for name in report.initialised if "delta" in name]
    rows = torch.load(f"{folder}/w.pt")["model.embed_tokens.weight"][[1, 3]]
    assert torch.equal(layer.trainable_tokens_delta["default"].full_tensor(), rows)
    assert torch.equal(layer.trainable_tokens_original["default"], rows)


def test_rows_of_tokens_are_those_of_a_sharded_base(tmp_path: Path) -> None:
    torch.save(dict(base().state_dict()), tmp_path / "w.pt")
    run_ranks(2, job_tokens, str(tmp_path))


@pytest.mark.parametrize("more", [{"init_lora_weights": "pissa"}, {"use_dora": True}])
def test_a_sync_of_a_base_alone_is_refused_where_adapters_follow_it(more: dict[str, Any]) -> None:
    model = adapted("LORA", **more)
    with pytest.raises(anyrank.LoadError, match="PEFT may have computed these adapters"):
        anyrank.sync(model, base())
    anyrank.sync(model, adapted("LORA", **more))
