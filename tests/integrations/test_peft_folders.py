"""Adapters of sharded and wrapped models as PEFT folders, and runs without the frozen base."""

from __future__ import annotations

import copy
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    LoHaConfig,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file, save_file
from tests.integrations.families import build
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.integrations import peft
from anyrank.testing import run_ranks

TOKENS = torch.arange(24).reshape(2, 12)
OPTIONS: dict[str, dict[str, Any]] = {
    "lora": {"r": 2, "target_modules": "all-linear"},
    "dora": {"r": 2, "target_modules": ["q_proj", "v_proj"], "use_dora": True},
    "head": {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


def base() -> Any:
    torch.manual_seed(3)
    return build("llama").eval()


def adapted(kind: str, **more: Any) -> Any:
    """A model whose adapter does something, the same on each rank."""
    options = copy.deepcopy(OPTIONS[kind])
    model = get_peft_model(base(), LoraConfig(**(options | more)))
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def wrapped(model: Any, wrapper: str) -> Any:
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    if wrapper == "fsdp2":
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        return fully_shard(model)
    return model


def full(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def job(kind: str, wrapper: str, folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Save on these ranks, load into a fresh model on them. Returns what both compute."""
    model = wrapped(adapted(kind), wrapper)
    peft.save(model, folder)
    torch.manual_seed(torch.distributed.get_rank())
    fresh = wrapped(get_peft_model(base(), LoraConfig(**OPTIONS[kind])), wrapper)
    report = peft.load(fresh, folder)
    assert report.unexpected == []
    return model(input_ids=TOKENS).logits.detach(), fresh(input_ids=TOKENS).logits.detach()


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_folder_of_several_ranks_is_what_peft_reads(
    tmp_path: Path, kind: str, wrapper: str
) -> None:
    for saved, loaded in run_ranks(2, job, kind, wrapper, str(tmp_path / "ours")):
        torch.testing.assert_close(loaded, saved)
    one = adapted(kind)
    one.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    ours = load_file(tmp_path / "ours" / peft.WEIGHTS)
    theirs = load_file(tmp_path / "peft" / peft.WEIGHTS)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    read = PeftModel.from_pretrained(base(), tmp_path / "ours")
    torch.testing.assert_close(read(input_ids=TOKENS).logits, one(input_ids=TOKENS).logits)
    assert sorted(os.listdir(tmp_path / "ours")) == ["adapter_config.json", peft.WEIGHTS]


def resized(folder: str) -> Any:
    """A model with more tokens than its base in a folder, and an adapter."""
    model = type(base()).from_pretrained(folder)
    model.resize_token_embeddings(model.config.vocab_size + 3)
    return get_peft_model(model, LoraConfig(**OPTIONS["lora"]))


def job_resized(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    model = wrapped(resized(f"{folder}/base"), "fsdp2")
    peft.save(model, f"{folder}/ours")
    torch.manual_seed(6)
    fresh = wrapped(resized(f"{folder}/base"), "fsdp2")
    peft.load(fresh, f"{folder}/ours")
    return model(input_ids=TOKENS).logits.detach(), fresh(input_ids=TOKENS).logits.detach()


def test_resized_embeddings_are_saved_as_peft_saves_them(tmp_path: Path) -> None:
    base().save_pretrained(tmp_path / "base")
    for saved, loaded in run_ranks(2, job_resized, str(tmp_path)):
        torch.testing.assert_close(loaded, saved)
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, that it saves the embeddings, and transformers'
        resized(f"{tmp_path}/base").save_pretrained(tmp_path / "peft")
    ours, theirs = (load_file(tmp_path / name / peft.WEIGHTS) for name in ("ours", "peft"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_all_biases_beside_a_trained_copy(tmp_path: Path) -> None:
    def model() -> Any:
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        options = {"target_modules": ["0"], "modules_to_save": ["1"], "bias": "all"}
        return get_peft_model(net, LoraConfig(r=2, **options))

    one, fresh, other = model(), model(), model()
    peft.save(one, tmp_path)
    peft.load(fresh, tmp_path)
    anyrank.load(other, tmp_path)
    for key, tensor in one.state_dict().items():
        if "lora" in key or "bias" in key or "modules_to_save" in key:
            assert torch.equal(fresh.state_dict()[key], tensor)
            assert torch.equal(other.state_dict()[key], tensor)
    path = tmp_path / peft.WEIGHTS
    saved = load_file(path)
    saved["base_model.model.1.modules_to_save.bias"] += 1
    save_file(saved, path)
    with pytest.raises(anyrank.LoadError, match=r"modules_to_save\.bias"):
        anyrank.load(other, tmp_path)


def test_the_active_one_of_two_adapters_is_meant(tmp_path: Path) -> None:
    model: Any = adapted("lora")
    model.add_adapter("second", model.peft_config["default"])
    model.set_adapter("second")
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if ".second." in name:
                tensor.fill_(0.5)
    peft.save(model, tmp_path)
    assert all(
        bool((tensor == 0.5).all()) for tensor in load_file(tmp_path / peft.WEIGHTS).values()
    )
    assert peft.load(model, tmp_path).tensors == len(load_file(tmp_path / peft.WEIGHTS))
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ValueError, match=r"\['default', 'second'\] are active\. Select one"):
        peft.save(model, tmp_path)
    peft.save(model, tmp_path / "default", adapter="default")


def job_merge(wrapper: str) -> dict[str, torch.Tensor]:
    model = wrapped(adapted("lora"), wrapper)
    merged: Any = peft.merge(model)
    with pytest.raises(ValueError, match="already merged"):
        peft.merge(model)
    logits = model(input_ids=TOKENS).logits.detach()
    weights = {k: full(v) for k, v in merged.state_dict().items() if "base_layer" in k}
    return weights | {"logits": logits}


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_merged_weights_are_those_of_peft(wrapper: str) -> None:
    model = adapted("lora")
    logits = model(input_ids=TOKENS).logits
    model.merge_adapter()
    wanted = {k: v for k, v in model.state_dict().items() if "base_layer" in k}
    for found in run_ranks(2, job_merge, wrapper):
        torch.testing.assert_close(found.pop("logits"), logits)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value)


def job_refused(folder: str) -> list[str]:
    told: list[str] = []
    sharded = wrapped(adapted("dora"), "fsdp2")
    for call in (
        lambda: peft.merge(sharded),
        lambda: peft.save(sharded, f"{folder}/file/below"),
        lambda: peft.save(sharded, folder, adapter="other"),
        lambda: peft.save(torch.nn.Linear(2, 2), folder),
    ):
        try:
            call()
        except (ValueError, anyrank.CheckpointError) as error:
            told.append(str(error))
    return told


def test_wrong_uses_are_refused_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for told in run_ranks(2, job_refused, str(tmp_path)):
        assert "only plain LoRA can be merged while sharded" in told[0]
        assert "file/below: cannot write the adapter: [Errno 20] Not a directory" in told[1]
        assert "adapter='other': no such adapter; the model has ['default']" in told[2]
        assert "Linear does not contain a PeftModel" in told[3]


def job_one_rank_fails(folder: str) -> list[str]:
    """Errors of one rank alone: in looking at the model, in its memory, in reading a folder."""
    rank = torch.distributed.get_rank()
    model = wrapped(adapted("lora"), "fsdp2")
    told: list[str] = []

    def fails(call: Any, *kinds: type[Exception]) -> None:
        with pytest.raises(kinds) as caught:
            call()
        told.append(f"{type(caught.value).__name__}: {caught.value}")

    plain = torch.nn.Linear(2, 2)
    fails(lambda: peft.save(plain if rank else model, folder), ValueError)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            real = torch.empty

            def empty(*sizes: Any, **options: Any) -> torch.Tensor:
                if options.get("device") == "cpu":
                    raise RuntimeError("not enough memory")
                return real(*sizes, **options)

            patch.setattr(torch, "empty", empty)
        fails(lambda: peft.save(model, folder), anyrank.RankError)
    fails(lambda: peft.load(plain if rank else model, folder), ValueError)
    fails(lambda: peft.load(model, f"{folder}/none"), anyrank.LoadError)
    return told


def test_one_rank_s_error_is_every_rank_s(tmp_path: Path) -> None:
    first, second = run_ranks(2, job_one_rank_fails, str(tmp_path), timeout=60)
    assert first == second
    assert "[rank 1] Linear does not contain a PeftModel" in first[0]
    assert "not enough memory" in first[1]
    assert "Linear does not contain a PeftModel" in first[2]
    assert "none: cannot read an adapter" in first[3]
    assert os.listdir(tmp_path) == []


def test_an_adapter_that_computes_otherwise_is_refused(tmp_path: Path) -> None:
    peft.save(adapted("lora", lora_alpha=4), tmp_path)
    model = adapted("lora")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"lora_alpha is 8, but was saved with 4"):
        peft.load(model, tmp_path)
    with pytest.raises(ValueError, match="r is 3, but was saved with 2"):
        peft.load(adapted("lora", r=3, lora_alpha=4), tmp_path)
    model = adapted("lora", lora_alpha=4, modules_to_save=["lm_head"])
    with pytest.raises(anyrank.LoadError, match=r"lacks 1 tensor of the adapter.*lm_head"):
        peft.load(model, tmp_path)
    weights = load_file(tmp_path / peft.WEIGHTS)
    save_file({**weights, "stray": torch.zeros(2)}, tmp_path / peft.WEIGHTS)
    model = adapted("lora", lora_alpha=4)
    with pytest.raises(anyrank.LoadError, match="stray"):
        peft.load(model, tmp_path)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("then", "now", "text"),
    [
        ({"lora_alpha": 4}, {}, "lora_alpha is 8, but was saved with 4"),
        ({"use_rslora": True}, {}, "use_rslora is False, but was saved with True"),
        (
            {"alpha_pattern": {"q_proj": 3}},
            {},
            "alpha_pattern is {}, but was saved with {'q_proj': 3}",
        ),
        (
            {},
            {"alpha_pattern": {"q_proj": 3}},
            "alpha_pattern is {'q_proj': 3}, but was saved with {}",
        ),
    ],
)
def test_a_load_of_a_folder_compares_how_the_adapter_is_scaled(
    tmp_path: Path, then: dict[str, Any], now: dict[str, Any], text: str
) -> None:
    adapted("lora", **then).save_pretrained(tmp_path)
    model = adapted("lora", **now)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(anyrank.LoadError, match=re.escape(text)):
        anyrank.load(model, tmp_path, missing="keep")
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    same = adapted("lora", **then, lora_dropout=0.5)  # which scales nothing that is saved
    with torch.no_grad():
        for name, parameter in same.named_parameters():
            if "lora" in name:
                parameter.zero_()
    assert anyrank.load(same, tmp_path, missing="keep").tensors > 0
    # By the file itself, for who means another scale.
    assert anyrank.load(model, tmp_path / peft.WEIGHTS, missing="keep").tensors > 0


@pytest.mark.parametrize(
    ("then", "now"), [("pissa", True), ("olora", "gaussian"), (True, "pissa"), (False, "olora")]
)
def test_a_load_compares_what_first_values_took_out_of_the_base(
    tmp_path: Path, then: Any, now: Any
) -> None:
    adapted("lora", init_lora_weights=then).save_pretrained(tmp_path)
    model = adapted("lora", init_lora_weights=now)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for load in (peft.load, lambda *two: anyrank.load(*two, missing="keep")):
        with pytest.raises(
            anyrank.LoadError, match=f"weights is {now!r}, but was saved with {then!r}"
        ):
            load(model, tmp_path)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert peft.load(adapted("lora", init_lora_weights=then), tmp_path).tensors > 0


@pytest.mark.parametrize("then", ["gaussian", "Gaussian", "mica", False, "orthogonal", True])
def test_first_values_that_leave_the_base_alone_are_not_compared(tmp_path: Path, then: Any) -> None:
    adapted("lora", init_lora_weights=then).save_pretrained(tmp_path)
    assert peft.load(adapted("lora"), tmp_path).tensors > 0
    assert anyrank.load(adapted("lora"), tmp_path, missing="keep").tensors > 0


def test_the_adapter_that_a_model_has_not_is_named_as_one(tmp_path: Path) -> None:
    adapted("lora").save_pretrained(tmp_path)
    with pytest.raises(
        anyrank.LoadError, match="belong to an adapter that the model does not have"
    ):
        anyrank.load(base(), tmp_path)
    made = get_peft_model(base(), PeftConfig.from_pretrained(tmp_path))  # as the error says
    assert anyrank.load(made, tmp_path).tensors > 0


def test_other_adapters_are_compared_by_their_own_setting_and_beside_their_base(
    tmp_path: Path,
) -> None:
    def made(alpha: int) -> Any:
        options: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"], "alpha": alpha}
        return get_peft_model(base(), LoHaConfig(**options))

    made(4).save_pretrained(tmp_path / "adapter")
    base().save_pretrained(tmp_path / "base")
    folders = [tmp_path / "base", tmp_path / "adapter"]
    with pytest.raises(anyrank.LoadError, match="alpha is 8, but was saved with 4"):
        anyrank.load(made(8), folders)
    assert anyrank.load(made(4), folders).tensors > 2
    # The base alone has no setting of an adapter.
    anyrank.load(adapted("lora", lora_alpha=3), tmp_path / "base")


def test_each_of_several_folders_has_the_settings_of_its_own_tensors(tmp_path: Path) -> None:
    both: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
    for name, alpha in (("q_proj", 8), ("v_proj", 4)):
        saved = adapted("lora", target_modules=[name], lora_alpha=alpha)
        saved.save_pretrained(tmp_path / name)
    model = adapted("lora", **both)
    folders = [tmp_path / "q_proj", tmp_path / "v_proj"]
    for order in (folders, folders[::-1]):
        with pytest.raises(anyrank.LoadError, match="lora_alpha is 8, but was saved with 4"):
            anyrank.load(model, order, missing="keep")
    saved = adapted("lora", target_modules=["v_proj"])
    saved.save_pretrained(tmp_path / "v_proj")
    report = anyrank.load(model, folders, missing="keep")
    assert report.tensors == sum(t.requires_grad for t in model.parameters())


def test_a_pickle_of_peft_is_loaded(tmp_path: Path) -> None:
    trained = adapted("lora")
    trained.save_pretrained(tmp_path, safe_serialization=False)
    assert sorted(os.listdir(tmp_path)) == ["README.md", "adapter_config.json", "adapter_model.bin"]
    model = get_peft_model(base(), LoraConfig(**OPTIONS["lora"]))
    peft.load(model, tmp_path)
    assert all(torch.equal(t, model.state_dict()[k]) for k, t in trained.state_dict().items())


def test_keys_that_begin_otherwise_are_shown_with_those_that_are_looked_for(tmp_path: Path) -> None:
    peft.save(adapted("lora"), tmp_path)
    weights = load_file(tmp_path / peft.WEIGHTS)
    renamed = {key.replace(".model.model.", ".model.inner.model."): t for key, t in weights.items()}
    save_file(renamed, tmp_path / peft.WEIGHTS)
    expected = r"such as base_model\.model\.model\.layers.*, and has .*base_model\.model\.inner"
    with pytest.raises(anyrank.LoadError, match=f"{expected}.*prefixes differ.*target_modules"):
        peft.load(adapted("lora"), tmp_path)


def test_a_folder_with_a_model_and_an_adapter_is_refused(tmp_path: Path) -> None:
    """PEFT would read both, and transformers does; a list of both is both."""
    trained = adapted("lora")
    peft.save(trained, tmp_path)
    save_file(
        {k: t.clone() for k, t in base().state_dict().items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "optimizer.pt").write_bytes(b"of another tool")
    model = get_peft_model(build("llama").eval(), LoraConfig(**OPTIONS["lora"]))
    with pytest.raises(anyrank.LoadError, match=r"a model \(model\..*an adapter \(adapter_model"):
        anyrank.load(model, tmp_path)
    files = [tmp_path / name for name in ("model.safetensors", peft.WEIGHTS)]
    anyrank.load(model, files)
    assert all(torch.equal(t, model.state_dict()[k]) for k, t in trained.state_dict().items())
    (tmp_path / "model.safetensors").unlink()
    assert anyrank.load(model, tmp_path, missing="keep").tensors == len(load_file(files[1]))


# -- a run without its base -----------------------------------------------------------------------


def job_run(folder: str, wrapper: str, steps: int, change: str = "") -> list[float]:
    """Train adapters to a step. Returns the losses."""
    model = get_peft_model(base(), LoraConfig(r=2, target_modules="all-linear"))
    if change == "other base":
        with torch.no_grad():
            model.base_model.model.lm_head.weight[3, 5] += 1e-3
    model = wrapped(model.double(), wrapper)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-6)
    loader = anyrank.ElasticLoader(torch.arange(48).reshape(16, 3), global_batch=8, microbatch=2)
    source = None if change == "no base" else "llama.safetensors"
    state = anyrank.TrainState(model, optimizer, data=loader, base=source)
    losses: list[float] = []
    with anyrank.Checkpoints(folder, state) as ckpts:
        ckpts.resume()
        if change == "written":
            next(p for p in model.parameters() if not p.requires_grad).mul_(2)
        for step in ckpts.steps(until=steps):
            for batch in step.microbatches(model):
                step.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(step.loss())
    return losses


def job_refused_run(folder: str, change: str) -> str:
    with pytest.raises(anyrank.CheckpointError) as caught:
        job_run(folder, "ddp", 8, change)
    return str(caught.value)


def test_a_frozen_base_is_not_written_and_is_compared(tmp_path: Path) -> None:
    (whole,) = run_ranks(1, job_run, str(tmp_path / "one"), "none", 6)
    folder = str(tmp_path / "many")
    losses = run_ranks(3, job_run, folder, "fsdp2", 2)[0]
    losses += run_ranks(2, job_run, folder, "ddp", 4)[0]
    losses += run_ranks(4, job_run, folder, "fsdp2", 6)[0]
    assert losses == pytest.approx(whole, rel=1e-7)
    step = anyrank.Checkpoints(folder, anyrank.TrainState()).latest()
    assert step is not None
    names = [one.name for one in anyrank.inspect(step).tensors]
    assert names
    assert all("lora_" in name for name in names)
    assert '"llama.safetensors"' in (Path(step) / "anyrank.json").read_text()
    for change, told in (
        ("other base", "the frozen base has different values"),
        ("no base", "its base llama.safetensors is not in the checkpoint"),
        ("written", "belongs to the frozen base llama.safetensors, but was modified"),
    ):
        assert all(told in one for one in run_ranks(2, job_refused_run, folder, change))


def test_a_base_that_was_saved_or_is_missing_is_named(tmp_path: Path) -> None:
    model = adapted("lora")
    with anyrank.Checkpoints(tmp_path, anyrank.TrainState(model)) as ckpts:
        ckpts.save()
    with (
        anyrank.Checkpoints(tmp_path, anyrank.TrainState(model, base="x")) as ckpts,
        pytest.raises(anyrank.CheckpointError, match="its base was saved with the run"),
    ):
        ckpts.resume()
    with pytest.raises(ValueError, match="Pass model="):
        anyrank.TrainState(base="x")
    with pytest.raises(TypeError, match="base=3: expected a path"):
        anyrank.TrainState(model, base=3)
    with torch.device("meta"):
        outline = build("llama").requires_grad_(False)
    ckpts = anyrank.Checkpoints(tmp_path / "new", anyrank.TrainState(outline, base="x"))
    with pytest.raises(anyrank.CheckpointError, match="the base is on the meta device"):
        ckpts.save()


OTHERS: dict[str, Any] = {
    "vera": lambda: VeraConfig(r=2, target_modules=["q_proj", "v_proj"]),
    "prompt": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix": lambda: PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "tokens": lambda: LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[1, 3]),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_methods_that_share_modules_go_through_the_same_folders(tmp_path: Path, kind: str) -> None:
    model, fresh, other = (get_peft_model(base(), OTHERS[kind]()).eval() for _ in range(3))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    if kind in ("prompt", "prefix"):
        model.save_pretrained(tmp_path / "ours")
        anyrank.load(fresh, [tmp_path / "ours" / peft.WEIGHTS], missing="keep")
    else:
        peft.save(model, tmp_path / "ours")
        assert peft.load(fresh, tmp_path / "ours").unexpected == []
    read = PeftModel.from_pretrained(base(), tmp_path / "ours").eval()
    base().save_pretrained(tmp_path / "base")
    files = [tmp_path / "base" / "model.safetensors", tmp_path / "ours" / peft.WEIGHTS]
    wanted = model(input_ids=TOKENS).logits
    for each in (read, fresh):
        assert torch.equal(each(input_ids=TOKENS).logits, wanted)
    if kind == "tokens":  # copies of rows that no file holds
        with pytest.raises(
            anyrank.LoadError, match=r"trainable_tokens_original.*\n.*load the base first"
        ):
            anyrank.load(other, files)
        return
    for source in (files, model.state_dict()):
        anyrank.load(other, source)
        assert torch.equal(other(input_ids=TOKENS).logits, wanted)


@pytest.mark.parametrize("call", [peft.save, peft.load])
@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_prompts_are_left_to_peft(tmp_path: Path, kind: str, call: Any) -> None:
    model = get_peft_model(base(), OTHERS[kind]())
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"_TUNING\. For it PEFT saves .* Save it with PEFT"):
        call(model, tmp_path)
    with pytest.raises(ValueError, match="changes no weight of the model"):
        peft.merge(model)


def test_an_adapter_with_computed_tensors_is_refused_by_name(tmp_path: Path) -> None:
    import peft

    config = peft.ShiraConfig(target_modules=["0"], r=2)
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 8)), config)
    with pytest.raises(
        ValueError, match=r"SHIRA\. For it PEFT saves .*shira_indices, which is not"
    ):
        anyrank.integrations.peft.save(model, tmp_path / "adapter")


def test_a_run_with_trained_copies_resumes_and_is_loaded(tmp_path: Path) -> None:
    model = adapted("head")
    head = model.base_model.model.lm_head
    assert not torch.equal(head.modules_to_save.default.weight, head.original_module.weight)
    with anyrank.Checkpoints(tmp_path, anyrank.TrainState(model)) as ckpts:
        ckpts.save()
    for how in ("resume", "load"):
        fresh = get_peft_model(base(), LoraConfig(**OPTIONS["head"]))
        if how == "load":
            anyrank.load(fresh, tmp_path)
        else:
            with anyrank.Checkpoints(tmp_path, anyrank.TrainState(fresh)) as ckpts:
                ckpts.resume("must")
        for name, tensor in fresh.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name]), (how, name)
