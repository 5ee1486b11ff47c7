"""An adapter is judged alike by load, resume, sync, convert and merge: what it means, which names
of a tied weight it changes, and whose tensors a file holds."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.errors import LoadError
from anyrank.integrations import peft
from anyrank.testing import run_ranks

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
IDS = torch.arange(12)[None]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def llama(tied: bool = True) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config).eval()


def experts() -> Any:
    torch.manual_seed(0)
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **more)).eval()


def adapted(model: Any, seed: int = 1, **options: Any) -> Any:
    """The model with LoRA whose tensors are random."""
    chosen = {"r": 4, "target_modules": ["q_proj"], **options}
    return with_adapter(model, LoraConfig(**chosen), seed)


def with_adapter(model: Any, config: Any, seed: int) -> Any:
    """The model with an adapter whose tensors are random."""
    model = get_peft_model(model, config).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    return model


def error_of(model: Any, other: Any) -> float:
    with torch.no_grad():
        return float((model(IDS).logits - other(IDS).logits).abs().max())


# -- what an adapter means ------------------------------------------------------------------------


def without(folder: Path, *names: str, **others: Any) -> str:
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    config = {name: value for name, value in config.items() if name not in names} | others
    path.write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lora_alpha", 32),
        ("use_rslora", True),
        ("alpha_pattern", {"q_proj": 3}),
    ],
)
def test_a_setting_that_a_folder_leaves_out_is_pefts_default(
    tmp_path: Path, name: str, value: Any
) -> None:
    adapted(llama()).save_pretrained(tmp_path)
    folder = without(tmp_path, name)
    model = adapted(llama(), seed=2, **{name: value})
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for load, kind in ((anyrank.load, anyrank.LoadError), (peft.load, ValueError)):
        with pytest.raises(kind, match=f"{name} is "):
            load(model, folder)
    assert all(torch.equal(before[key], t) for key, t in model.state_dict().items())
    same = adapted(llama(), seed=2)
    anyrank.load(same, folder)
    assert error_of(same, PeftModel.from_pretrained(llama(), folder).eval()) == 0
    peft.load(same, folder)


def test_other_methods_and_what_may_differ(tmp_path: Path) -> None:
    def loha(**options: Any) -> Any:
        return get_peft_model(llama(), LoHaConfig(target_modules=["q_proj"], **options))

    loha(alpha=4).save_pretrained(tmp_path / "loha")
    with pytest.raises(anyrank.LoadError, match="alpha is 9, but was saved with 4"):
        anyrank.load(loha(alpha=9), tmp_path / "loha")
    anyrank.load(loha(alpha=4, module_dropout=0.5), tmp_path / "loha")
    adapted(llama()).save_pretrained(tmp_path / "lora")
    folder = without(tmp_path / "lora", "peft_version", a_setting_of_tomorrow=True)
    for load in (anyrank.load, peft.load):
        load(adapted(llama(), lora_dropout=0.1, task_type="CAUSAL_LM"), folder)


@pytest.mark.parametrize(
    "other", [{"lora_alpha": 32}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 3}}]
)
def test_a_run_is_not_resumed_at_another_scale(tmp_path: Path, other: dict[str, Any]) -> None:
    both = {"target_modules": ["q_proj", "v_proj"]}
    with anyrank.Checkpoints(tmp_path, anyrank.TrainState(adapted(llama(), **both))) as ckpts:
        ckpts.save()
    model = adapted(llama(), seed=2, **both, **other)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    ckpts = anyrank.Checkpoints(tmp_path, anyrank.TrainState(model))
    with pytest.raises(anyrank.CheckpointError, match=r"is scaled by .* in the run"):
        ckpts.resume()
    assert all(torch.equal(before[key], t) for key, t in model.state_dict().items())
    same = adapted(llama(), seed=2, **both)
    with anyrank.Checkpoints(tmp_path, anyrank.TrainState(same)) as ckpts:
        ckpts.resume()
    assert error_of(same, adapted(llama(), **both)) == 0


SCALED: dict[str, Any] = {
    "LoRA": LoraConfig(r=4, target_modules=["q_proj"]),
    "rsLoRA": LoraConfig(r=4, target_modules=["q_proj"], use_rslora=True),
    "a pattern": LoraConfig(target_modules=["q_proj"], alpha_pattern={"q_proj": 3}),
    "DoRA": LoraConfig(r=4, target_modules=["q_proj"], use_dora=True),
    "an embedding": LoraConfig(r=4, target_modules=["embed_tokens"]),
    "experts": LoraConfig(r=2, target_parameters=["experts.down_proj"]),
    "LoHa": LoHaConfig(r=4, target_modules=["q_proj"]),
    "LoKr": LoKrConfig(r=4, target_modules=["q_proj"]),
}


def scaled_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "scale_layer")]


@pytest.mark.parametrize("kind", SCALED)
def test_a_scale_that_the_model_was_given_is_compared(tmp_path: Path, kind: str) -> None:
    def made(seed: int = 1) -> Any:
        base = experts() if kind == "experts" else llama(tied=kind != "an embedding")
        return with_adapter(base, copy.deepcopy(SCALED[kind]), seed)

    trained = made()
    peft.save(trained, tmp_path / "folder")
    calls: dict[str, Any] = {
        "load": lambda model: anyrank.load(model, tmp_path / "folder"),
        "plan": lambda model: anyrank.plan(model, tmp_path / "folder"),
        "peft.load": lambda model: peft.load(model, tmp_path / "folder"),
        "sync": lambda model: anyrank.sync(model, trained),
        "peft.save": lambda model: peft.save(model, tmp_path / "again"),
    }
    model = made(seed=2)
    for layer in scaled_layers(model):
        layer.set_scale("default", 0.5)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for call in calls.values():
        with pytest.raises((ValueError, anyrank.LoadError), match=r"its adapter is scaled by "):
            call(model)
    assert all(torch.equal(before[key], t) for key, t in model.state_dict().items())
    assert not (tmp_path / "again").exists()
    anyrank.load(model, tmp_path / "folder" / peft.WEIGHTS)  # the file alone says no scale
    for layer in scaled_layers(model):
        layer.set_scale("default", 1)
        layer.scaling["default"] *= 1 + 1e-15  # as after a division by what it was multiplied by
    for call in calls.values():
        call(model)
    assert error_of(model, trained) < 1e-5


def job_scaled(folder: str, wrapper: str) -> list[str]:
    wrap: Any = DistributedDataParallel if wrapper == "ddp" else fully_shard
    peft.save(wrap(adapted(llama())), folder)
    model = wrap(adapted(llama(), seed=2))
    scaled_layers(model)[0].set_scale("default", 2)
    errors: list[str] = []
    for call in (anyrank.load, peft.load, peft.save):
        with pytest.raises((ValueError, anyrank.LoadError)) as caught:
            call(model, folder)
        errors.append(str(caught.value))
    return errors


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_a_scale_is_compared_under_wrappers(tmp_path: Path, wrapper: str) -> None:
    for errors in run_ranks(2, job_scaled, str(tmp_path), wrapper):
        assert all("q_proj.lora_A.default.weight: its adapter is scaled by 4" in e for e in errors)


# -- what is merged -------------------------------------------------------------------------------


class Layers(nn.Module):
    """A convolution, and linear layers with and without a bias."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(self.conv(x).flatten(2).transpose(1, 2)))


def layers(kind: str) -> Any:
    torch.manual_seed(0)
    conv = {
        "a group": nn.Conv2d(4, 4, 1, groups=2),
        "Conv1d": nn.Conv1d(4, 4, 3, padding=1),
        "Conv3d": nn.Conv3d(4, 4, 1),
    }.get(kind, nn.Conv2d(4, 4, 3, padding=1))
    more: dict[str, Any] = {
        "biases": {"target_modules": ["a", "b"], "lora_bias": True},
        "a bias": {"target_modules": ["conv", "a"], "lora_bias": True},
        "DoRA": {"target_modules": ["a", "b"], "use_dora": True},
        "LoRA": {"target_modules": ["a", "b"]},
        "NaN": {"target_modules": ["a", "b"]},
        "off": {"target_modules": ["a", "b"]},
        "one off": {"target_modules": ["a", "b"]},
    }.get(kind, {"target_modules": ["a", "conv"]})
    model: Any = get_peft_model(Layers(conv), LoraConfig(r=2, **more)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
        if kind == "NaN":
            model.base_model.model.b.lora_A["default"].weight[0, 0] = torch.nan
    return model


def switch_off(model: Any, kind: str) -> Any:
    if kind == "off":
        model.base_model.disable_adapter_layers()
    if kind == "one off":
        model.base_model.model.b.enable_adapters(False)
    return model


WHOLE = {"LoRA", "DoRA", "a bias", "Conv1d", "Conv2d"}  # what PEFT merges into a whole model
MERGED = {"a sharded model": {"LoRA"}, "a whole model": WHOLE, "a replica": WHOLE}
KINDS = [*sorted(WHOLE), "Conv3d", "a group", "biases", "NaN", "off", "one off"]


def job_merged_layers(where: str, kind: str) -> str:
    """Merge, and return the error; the model computes what it did, or has not changed."""
    model = layers(kind)
    x = torch.randn(1, 4, *[6] * {"Conv1d": 1, "Conv3d": 3}.get(kind, 2))
    with torch.no_grad():
        want = model(x)
        if where == "a sharded model":
            fully_shard(model)
        given = DistributedDataParallel(model) if where == "a replica" else model
        switch_off(model, kind)
        before = {key: whole(tensor) for key, tensor in model.state_dict().items()}
        try:
            peft.merge(given)
        except ValueError as error:
            after = {key: whole(tensor) for key, tensor in model.state_dict().items()}
            assert all(
                torch.equal(before[k].nan_to_num(), t.nan_to_num()) for k, t in after.items()
            )
            assert not any(layer.merged for layer in scaled_layers(model))
            for layer in scaled_layers(model):
                layer.enable_adapters(True)
            if where != "a sharded model" and kind != "NaN":
                assert torch.equal(model(x), want)
            return str(error)
        assert all(layer.merged for layer in scaled_layers(model))
        torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-3)
        return ""


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", MERGED)
def test_a_merge_is_done_or_refused_before_anything_changes(where: str, kind: str) -> None:
    ranks = 1 if where == "a whole model" else 2
    for error in run_ranks(ranks, job_merged_layers, where, kind):
        assert (error == "") == (kind in MERGED[where]), error
        named = "NaN" if kind == "NaN" and where == "a sharded model" else "base_model.model."
        assert not error or named in error, error


@pytest.mark.parametrize("kind", ["off", "one off"])
def test_disabled_adapters_are_merged_by_none(kind: str, tmp_path: Path) -> None:
    for call, kind_of_error in (
        (lambda model: anyrank.sync(Layers(nn.Conv2d(4, 4, 3)), model, merge=True), LoadError),
        (peft.merge, ValueError),
    ):
        with pytest.raises(kind_of_error, match="its adapters are disabled; enable them"):
            call(switch_off(layers(kind), kind))
    with pytest.raises(LoadError, match="belongs to an adapter"):
        anyrank.convert(switch_off(layers(kind), kind), tmp_path / "out")


# -- ties -----------------------------------------------------------------------------------------

LORA, BOTH = {"target_modules": ["q_proj", "lm_head"]}, {"ensure_weight_tying": True}
COPIES: dict[str, dict[str, Any]] = {
    "a trained embedding": {"modules_to_save": ["embed_tokens"]},
    "a trained head": {"modules_to_save": ["lm_head"]},
    "both, apart": {"modules_to_save": ["embed_tokens", "lm_head"]},
}
ADDED: dict[str, dict[str, Any]] = {
    "LoRA on the head": LORA,
    "LoRA on the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
}
TIED: dict[str, dict[str, Any]] = {
    "a trained embedding, tied": {"modules_to_save": ["embed_tokens"], **BOTH},
    "LoRA, tied by the head": {**LORA, **BOTH},
    "LoRA, tied by the embedding": {"target_modules": ["q_proj", "embed_tokens"], **BOTH},
}


@pytest.mark.parametrize("kind", COPIES)
def test_a_trained_copy_of_one_name_goes_only_where_the_names_are_two(kind: str) -> None:
    model = adapted(llama(), **COPIES[kind])
    tied = llama()
    with pytest.raises(anyrank.LoadError, match=r"tied in dst.*Untie"):
        anyrank.sync(tied, model, merge=True)
    assert error_of(tied, llama()) == 0
    untied = llama(tied=False)
    anyrank.sync(untied, model, merge=True)
    assert error_of(untied, model) < 1e-4
    peft.merge(model)
    assert error_of(untied, model) < 1e-4


@pytest.mark.parametrize("kind", ADDED)
def test_an_adapter_of_one_name_of_a_tied_weight_is_not_added(kind: str) -> None:
    model = adapted(llama(), **ADDED[kind])
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for target in (llama(), llama(tied=False)):
        with pytest.raises(anyrank.LoadError, match=r"is tied with .*ensure_weight_tying"):
            anyrank.sync(target, model, merge=True)
    with pytest.raises(ValueError, match=r"is tied with .*ensure_weight_tying"):
        peft.merge(model)
    assert all(torch.equal(before[key], t) for key, t in model.state_dict().items())
    alone = adapted(llama(tied=False), **ADDED[kind])
    target = llama(tied=False)
    anyrank.sync(target, alone, merge=True)
    assert error_of(target, alone) < 1e-4
    peft.merge(alone)
    assert error_of(target, alone) < 1e-4


@pytest.mark.parametrize("kind", TIED)
def test_an_adapter_that_is_tied_as_well_counts_once(kind: str, tmp_path: Path) -> None:
    model = adapted(llama(), **TIED[kind])
    for tied in (True, False):
        target = llama(tied)
        anyrank.sync(target, model, merge=True)
        assert error_of(target, model) < 1e-4
    model.save_pretrained(tmp_path / "peft")
    for fill in (
        lambda other: anyrank.load(other, tmp_path / "peft"),
        lambda other: peft.load(other, tmp_path / "peft"),
        lambda other: anyrank.sync(other, model),
        lambda other: anyrank.load(other, dict(model.state_dict())),
    ):
        other = adapted(llama(), seed=2, **TIED[kind])
        fill(other)
        assert error_of(other, model) == 0
    state = anyrank.TrainState(model)
    anyrank.Checkpoints(str(tmp_path / "run"), state).save()
    other = adapted(llama(), seed=2, **TIED[kind])
    anyrank.load(other, tmp_path / "run")
    assert error_of(other, model) == 0
    resumed = adapted(llama(), seed=2, **TIED[kind])
    anyrank.Checkpoints(str(tmp_path / "run"), anyrank.TrainState(resumed)).resume()
    assert error_of(resumed, model) == 0
    if "LoRA" in kind:
        with pytest.raises(ValueError, match="2 layers would each add"):
            peft.merge(model)


def test_tied_factors_of_a_file_that_differ_are_refused(tmp_path: Path) -> None:
    options = TIED["LoRA, tied by the head"]
    adapted(llama(), **options).save_pretrained(tmp_path)
    path = tmp_path / peft.WEIGHTS
    tensors = load_file(path)
    key = "base_model.model.lm_head.lora_A.weight"
    tensors[key] = tensors[key] + 1
    save_file(tensors, path)
    model = adapted(llama(), seed=2, **options)
    want = adapted(llama(), seed=2, **options)
    with pytest.raises(anyrank.LoadError, match=r"tied in the model, but differ in the source"):
        anyrank.load(model, tmp_path)
    assert error_of(model, want) == 0


# -- whose tensors a file holds -------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*ADDED, *TIED])
def test_a_folder_with_a_base_tensor_is_an_adapters(tmp_path: Path, kind: str) -> None:
    options = {**ADDED, **TIED}[kind]
    adapted(llama(), **options).save_pretrained(tmp_path)
    for source in (tmp_path, tmp_path / peft.WEIGHTS, load_file(tmp_path / peft.WEIGHTS)):
        for missing in ("error", "init", "keep"):
            model = adapted(llama(), seed=2, **options)
            name = "base_model.model.model.layers.0.mlp.up_proj.weight"
            before = model.state_dict()[name].clone()
            anyrank.load(model, source, missing=missing)
            assert torch.equal(model.state_dict()[name], before)
            assert error_of(model, adapted(llama(), **options)) == 0


def test_a_model_s_own_state_that_lacks_a_base_tensor_is_no_adapter(tmp_path: Path) -> None:
    model = adapted(llama(), **LORA)
    state = dict(model.state_dict())
    del state["base_model.model.model.layers.0.mlp.up_proj.weight"]
    torch.save(state, tmp_path / "state.pt")
    for source in (state, tmp_path / "state.pt"):
        with pytest.raises(anyrank.LoadError, match=r"missing from the source \(1\)"):
            anyrank.load(adapted(llama(), **LORA), source)


# -- experts --------------------------------------------------------------------------------------

EXPERTS: dict[str, Any] = {
    "r": 2,
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}


def test_adapters_of_two_parameters_of_one_module(tmp_path: Path) -> None:
    model = adapted(experts(), **EXPERTS)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    state = anyrank.TrainState(model, torch.optim.AdamW(trained))
    anyrank.Checkpoints(str(tmp_path / "run"), state).save()
    model.save_pretrained(tmp_path / "peft")
    peft.save(model, tmp_path / "ours")
    want, got = (load_file(tmp_path / name / peft.WEIGHTS) for name in ("peft", "ours"))
    assert want.keys() == got.keys()
    assert all(torch.equal(want[key], got[key]) for key in want)
    for fill in (
        lambda other: anyrank.load(other, tmp_path / "peft"),
        lambda other: anyrank.load(other, tmp_path / "run"),
        lambda other: peft.load(other, tmp_path / "ours"),
        lambda other: anyrank.sync(other, model),
        lambda other: anyrank.load(other, dict(model.state_dict())),
    ):
        other = adapted(experts(), seed=2, **EXPERTS)
        assert error_of(other, model) > 0
        fill(other)
        assert error_of(other, model) == 0
    other = adapted(experts(), seed=2, **EXPERTS)
    anyrank.load(other, dict(experts().state_dict()))  # the base alone
    with pytest.raises(anyrank.LoadError, match="ParamWrapper"):
        anyrank.sync(experts(), model, merge=True)
    whole = peft.merge(model)
    assert error_of(whole, other) > 0


def job_experts(folder: str) -> str:
    model = adapted(experts(), **EXPERTS)
    with torch.no_grad():
        want = model(IDS).logits
    fully_shard(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    state = anyrank.TrainState(model, torch.optim.AdamW(trained))
    with anyrank.Checkpoints(folder, state) as ckpts:
        ckpts.save()
    other = fully_shard(adapted(experts(), seed=2, **EXPERTS))
    trained = [parameter for parameter in other.parameters() if parameter.requires_grad]
    with anyrank.Checkpoints(folder, anyrank.TrainState(other, torch.optim.AdamW(trained))) as c:
        c.resume()
    with torch.no_grad():
        assert torch.allclose(other(IDS).logits, want, atol=1e-5)
    try:
        peft.merge(model)
    except ValueError as error:
        return str(error)
    return "none"


def test_experts_under_fsdp2(tmp_path: Path) -> None:
    for text in run_ranks(2, job_experts, str(tmp_path / "run")):
        assert "experts" in text
        assert "ParamWrapper" in text


def job_tied() -> list[str]:
    errors: list[str] = []
    for options in (*ADDED.values(), TIED["a trained embedding, tied"]):
        model = fully_shard(adapted(llama(), **options))
        before = [parameter.full_tensor() for parameter in model.parameters()]
        try:
            peft.merge(model)
            errors.append("none")
        except ValueError as error:
            errors.append(str(error))
            after = [parameter.full_tensor() for parameter in model.parameters()]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return errors


def test_a_tied_weight_is_not_merged_under_fsdp2() -> None:
    for errors in run_ranks(2, job_tied):
        named = ["is tied" in text for text in errors]
        assert named == [True, True, False], errors


# -- two objects that are one tensor, without PEFT ------------------------------------------------


class Twins(nn.Module):
    """Two parameters of one memory, as they are or turned."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(6, 4)
        weight = self.embed.weight.detach()
        self.head = nn.Parameter(weight if kind == "same" else weight.T)


@pytest.mark.parametrize("kind", ["same", "turned"])
def test_one_memory_in_two_objects(kind: str, tmp_path: Path) -> None:
    source = Twins(kind, seed=1)
    values = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    for given in (
        values,
        {"embed.weight": values["embed.weight"]},
        {"head": values["head"]},
    ):
        model = Twins(kind)
        report = anyrank.load(model, given)
        assert torch.equal(model.head, source.head)
        assert torch.equal(model.embed.weight, source.embed.weight)
        assert report.tied == {"head": ["embed.weight"]}
    wrong = {**values, "head": values["head"] + 1}
    model = Twins(kind)
    for fill in (
        lambda: anyrank.load(model, wrong),
        lambda: anyrank.sync(model, wrong),
    ):
        with pytest.raises(
            anyrank.LoadError, match=r"tied in (the model|dst), but .*(differ|different)"
        ):
            fill()
        assert torch.equal(model.embed.weight, Twins(kind).embed.weight)
    anyrank.sync(model, source)
    assert torch.equal(model.head, source.head)
    anyrank.Checkpoints(str(tmp_path / "run"), anyrank.TrainState(source)).save()
    resumed = Twins(kind)
    anyrank.Checkpoints(str(tmp_path / "run"), anyrank.TrainState(resumed)).resume()
    assert torch.equal(resumed.head, source.head)
    loaded = Twins(kind)
    anyrank.load(loaded, tmp_path / "run")
    assert torch.equal(loaded.head, source.head)


# -- ties of a live model -------------------------------------------------------------------------


def untied() -> Any:
    model = llama()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)
    return model


UNTIED: dict[str, Any] = {
    "by hand": untied,
    "by a merge of the head": lambda: adapted(
        llama(), **COPIES["a trained head"]
    ).merge_and_unload(),
    "by a merge of both": lambda: adapted(llama(), **COPIES["both, apart"]).merge_and_unload(),
    "merged, and not unloaded": lambda: peft.merge(adapted(llama(), **COPIES["a trained head"])),
}


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("kind", UNTIED)
def test_ties_are_read_from_the_tensors(kind: str, declared: bool, tmp_path: Path) -> None:
    model = UNTIED[kind]()
    model.config.tie_word_embeddings = declared
    for to in ("safetensors", "torch", "dcp"):
        anyrank.convert(model, tmp_path / to, to=to)
        other = llama(tied=False)
        anyrank.load(other, tmp_path / to)
        assert error_of(other, model) < 1e-5
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "safetensors").eval()
    assert error_of(again, model) < 1e-5
    tied = anyrank.convert(llama(), tmp_path / "tied")
    assert tied.tied == {"lm_head.weight": "model.embed_tokens.weight"}


def job_untied(folder: str) -> None:
    model = untied()
    with torch.no_grad():
        want = model(IDS).logits
    anyrank.convert(fully_shard(model), folder)
    other = llama(tied=False)
    anyrank.load(other, folder)
    with torch.no_grad():
        assert torch.allclose(other(IDS).logits, want, atol=1e-5)


def test_ties_under_fsdp2_too(tmp_path: Path) -> None:
    run_ranks(2, job_untied, str(tmp_path / "out"))
