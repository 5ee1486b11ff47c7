"""Adapters that are trained on a frozen quantized base (QLoRA).

A run has the adapters, and a digest of the numbers of the base.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import anyrank
from anyrank.integrations import peft as adapters
from anyrank.testing import run_ranks

PACKAGES = Path(sys.prefix) / "quantized"  # where `make` installs them, apart from all others
KINDS = ["bitsandbytes 4", "bitsandbytes 8", "torchao"]
X = torch.arange(32).reshape(2, 16)

pytestmark = pytest.mark.skipif(not PACKAGES.is_dir(), reason=f"there is no {PACKAGES}")


def write_base(folder: str, seed: int = 0) -> str:
    """Write a small Llama with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def quantized(folder: str, kind: str) -> Any:
    """Read a base with quantized linear layers."""
    sys.path.append(str(PACKAGES))  # on a rank of the pool, which sets it back
    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        model = AutoModelForCausalLM.from_pretrained(folder)
        quantize_(model.model.layers, Int8WeightOnlyConfig())
        return model
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    how = (
        {**four, "bnb_4bit_compute_dtype": torch.float32} if "4" in kind else {"load_in_8bit": True}
    )
    config = BitsAndBytesConfig(**how)
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map={"": "cpu"}
    )


def adapted(folder: str, kind: str) -> Any:
    """Read a base, freeze it, and add adapters."""
    warnings.simplefilter("ignore")  # the libraries' own
    model = quantized(folder, kind).requires_grad_(False)
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))


def job_train(
    run: str, folder: str, kind: str, steps: int, wrapper: str = "ddp"
) -> tuple[list[float], Any]:
    """Train adapters to a step. Returns the losses, and the outcomes of the resume."""
    model = adapted(folder, kind)
    if wrapper == "fsdp2":
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    elif kind != "torchao":  # whose tensors neither wrapper can send
        model = DistributedDataParallel(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-6)
    rows = [X[0] + n for n in range(16)]
    loader = anyrank.ElasticLoader(rows, global_batch=8, microbatch=2)
    state = anyrank.TrainState(model, optimizer, data=loader, base=folder)
    losses: list[float] = []
    with anyrank.Checkpoints(run, state) as ckpts:
        report = ckpts.resume()
        for step in ckpts.steps(until=steps):
            for batch in step.microbatches(model):
                step.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(step.loss())
    return losses, report.components if report else None


def job_refused_run(run: str, folder: str, kind: str) -> str:
    with pytest.raises(anyrank.CheckpointError) as caught:
        job_train(run, folder, kind, 6)
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_continues_on_another_number_of_ranks_without_its_base(
    tmp_path: Path, kind: str
) -> None:
    base = write_base(str(tmp_path / "base"))
    ((whole, _),) = run_ranks(1, job_train, str(tmp_path / "one"), base, kind, 5)
    run = str(tmp_path / "many")
    ranks = 1 if kind == "torchao" else 2
    wrapper = "fsdp2" if kind == "bitsandbytes 4" else "ddp"
    losses, _ = run_ranks(ranks, job_train, run, base, kind, 3, wrapper)[0]
    more, components = run_ranks(1, job_train, run, base, kind, 5)[0]
    assert components["model"] == ("exact" if ranks == 1 else "resharded")
    assert [*losses, *more] == pytest.approx(whole, rel=1e-4)
    step = anyrank.Checkpoints(run, anyrank.TrainState()).latest()
    assert step is not None
    names = [one.name for one in anyrank.inspect(step).tensors]
    assert names
    assert all("lora_" in name for name in names)
    other = write_base(str(tmp_path / "other"), seed=5)
    (told,) = run_ranks(1, job_refused_run, run, other, kind)
    assert "the frozen base has different values" in told


def job_refusals(tmp_path: Path, folder: str, kind: str) -> list[str]:
    """What is said of a quantized base that would have to be read or written."""
    texts: list[str] = []
    model = adapted(folder, kind)
    calls = [
        lambda: anyrank.Checkpoints(tmp_path / "new", anyrank.TrainState(model)).save(),
        lambda: anyrank.load(model, folder),
        lambda: anyrank.load(model, folder, missing="keep"),
        lambda: anyrank.convert(model, tmp_path / "converted"),
        lambda: anyrank.sync(model, model),
    ]
    if kind == "torchao":  # the others cannot be moved to meta
        on_meta = adapted(folder, kind).to("meta")
        empty = {"other": torch.ones(1)}
        calls.append(lambda: anyrank.load(on_meta, empty, missing="keep", unexpected="ignore"))
    for call in calls:
        with pytest.raises(anyrank.AnyrankError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


@pytest.mark.parametrize("kind", KINDS)
def test_a_base_that_would_be_read_or_written_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    (texts,) = run_ranks(1, job_refusals, tmp_path, write_base(str(tmp_path / "base")), kind)
    unsaved, *others = texts
    assert "self_attn.q_proj.base_layer.weight: is a" in unsaved
    assert "TrainState(base=...)" in unsaved
    for text in others:
        assert "whose bytes are not its values; load or save the model before" in text


def job_adapter(adapter: str, folder: str, kind: str) -> None:
    """An adapter is written, and read by anyrank and by PEFT."""
    model = adapted(folder, kind)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    wanted = model(input_ids=X).logits
    adapters.save(model, adapter)
    by_load, by_adapters = adapted(folder, kind), adapted(folder, kind)
    assert not torch.equal(by_load(input_ids=X).logits, wanted)
    assert anyrank.load(by_load, adapter).tensors == 8
    assert adapters.load(by_adapters, adapter).tensors == 8
    by_peft = peft.PeftModel.from_pretrained(quantized(folder, kind), adapter)
    for other in (by_load, by_adapters, by_peft):
        assert torch.equal(other(input_ids=X).logits, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_a_quantized_base_is_saved_and_loaded(tmp_path: Path, kind: str) -> None:
    run_ranks(1, job_adapter, str(tmp_path / "adapter"), write_base(str(tmp_path / "base")), kind)
