"""Promise 8: what could not be restored exactly is in the report, at WARNING; what must not differ
raises.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.integrations.families import build, save
from tests.ranks.spies import warnings_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import anyrank
from anyrank.sources.source import list_source
from anyrank.testing import run_ranks


def job(family: str, source: Any, how: str, options: dict[str, Any]) -> tuple[Any, Any, list[str]]:
    """Load into FSDP2; returns weights and buffers or the error, the report, and the warnings."""
    with warnings_of("anyrank") as told:
        if how == "meta":
            with torch.device("meta"):  # buffers too, as many trainers do it
                model = build(family)
        else:
            with anyrank.meta():
                model = build(family)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        try:
            report = anyrank.load(model, source, **options)
        except anyrank.AnyrankError as error:
            return error, None, told
        tensors: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        whole = {
            name: t.full_tensor().detach() if hasattr(t, "full_tensor") else t.detach()
            for name, t in tensors.items()
        }
        return whole, report, told


def run(family: str, source: Any, how: str = "meta", **options: Any) -> tuple[Any, Any, list[str]]:
    results = run_ranks(2, job, family, source, how, options)
    first, report, told = results[0]
    other = results[1][0]
    if isinstance(first, Exception):
        assert type(first) is type(other)
        assert str(first) == str(other)
    return first, report, told


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder with its weights."""
    save("llama", tmp_path)
    return tmp_path


def test_rotary_buffers_of_a_model_on_meta_are_rebuilt(llama: Path) -> None:
    weights, report, _ = run("llama", str(llama))
    expected = dict(build("llama").named_buffers())
    assert expected
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name
    assert set(report.rebuilt) == set(expected)


def test_buffers_under_meta_were_never_lost(llama: Path) -> None:
    weights, report, _ = run("llama", str(llama), how="anyrank.meta")
    for name, value in build("llama").named_buffers():
        assert torch.equal(weights[name], value), name
    assert report.rebuilt == {}


def test_a_tied_head_that_is_not_in_the_file(tmp_path: Path) -> None:
    expected = save("llama_tied", tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    weights, report, _ = run("llama_tied", str(tmp_path))
    assert torch.equal(weights["model.embed_tokens.weight"], expected["lm_head.weight"])
    assert report.tied == {"model.embed_tokens.weight": ["lm_head.weight"]}


def without(folder: Path, key: str) -> Path:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors[key]
    save_file(tensors, path, {"format": "pt"})
    return path


def test_a_missing_key_that_is_initialized_is_told(llama: Path) -> None:
    without(llama, "model.layers.1.mlp.up_proj.weight")
    weights, report, told = run("llama", str(llama), missing="init")
    name = "model.layers.1.mlp.up_proj.weight"
    assert list(report.initialised) == [name]
    assert report.missing == [name]
    assert 0.01 < float(weights[name].std()) < 0.04  # the model's initializer_range is 0.02
    assert any("and initialized" in text and name in text for text in told)


def test_a_missing_key_on_meta_cannot_be_kept(llama: Path) -> None:
    without(llama, "model.norm.weight")
    error, _, _ = run("llama", str(llama), missing="keep")
    assert isinstance(error, anyrank.LoadError)
    assert "no values to keep" in str(error)


def test_an_unexpected_key_raises_or_is_told(llama: Path) -> None:
    path = llama / "model.safetensors"
    save_file({**load_file(path), "model.extra": torch.zeros(3)}, path)
    error, _, _ = run("llama", str(llama))
    assert "model.extra" in str(error)
    _, report, told = run("llama", str(llama), unexpected="ignore")
    assert report.unexpected == ["model.extra"]
    assert any("model.extra" in text for text in told)


def test_a_leftover_file_beside_an_index_is_passed_over(llama: Path) -> None:
    expected = save("llama", llama)
    whole = load_file(llama / "model.safetensors")
    save_file(
        {k: torch.zeros_like(v) for k, v in whole.items()}, llama / "consolidated.safetensors"
    )
    torch.save({k: torch.ones_like(v) for k, v in whole.items()}, llama / "pytorch_model.bin")
    weights, report, _ = run("llama", str(llama))
    assert torch.equal(weights["model.norm.weight"], expected["model.norm.weight"])
    chosen = "model.safetensors was chosen"
    assert f"consolidated.safetensors: {chosen}" in report.skipped
    assert f"pytorch_model.bin: {chosen}" in report.skipped


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def test_a_flipped_bit_is_noticed_where_the_format_has_checksums(llama: Path) -> None:
    path = llama / "w.pt"
    torch.save(load_file(llama / "model.safetensors"), path)
    weights, report, _ = run("llama", str(path), verify=True)
    assert not isinstance(weights, Exception)
    assert "CRC-32 of" in report.verified
    chunk = list_source(str(path)).tensors["model.norm.weight"].chunks[0]
    flip(path, chunk.offset + 5)
    error, _, _ = run("llama", str(path), verify=True)
    assert isinstance(error, anyrank.LoadError)
    assert "The file is corrupt" in str(error)


def test_a_flipped_bit_is_noticed_where_the_publisher_gave_a_digest(llama: Path) -> None:
    """The layout of a Hugging Face cache: each file is a link to a blob that bears its SHA-256."""
    blobs, snapshot = llama / "blobs", llama / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    data = (llama / "model.safetensors").read_bytes()
    blob = blobs / hashlib.sha256(data).hexdigest()
    blob.write_bytes(data)
    (snapshot / "model.safetensors").symlink_to(blob)
    _, report, _ = run("llama", str(snapshot), verify=True)
    assert "SHA-256 of 1 file" in report.verified
    flip(blob, len(data) - 5)
    error, _, _ = run("llama", str(snapshot), verify=True)
    assert "SHA-256 is" in str(error)
    assert "corrupt" in str(error)


def test_without_any_checksum_that_is_told(llama: Path) -> None:
    _, report, told = run("llama", str(llama), verify=True)
    assert "no checksums" in report.verified
    assert any("corruption cannot be detected" in text for text in told)


def test_nan_is_loaded_and_told(llama: Path) -> None:
    path, name = llama / "model.safetensors", "model.norm.weight"
    save_file({**load_file(path), name: torch.full((32,), float("nan"))}, path)
    weights, report, told = run("llama", str(llama), verify=True)
    assert bool(weights[name].isnan().all())
    assert set(report.nonfinite) == {name}
    assert any("NaN or infinite" in text and name in text for text in told)


def job_not_finite(path: str) -> tuple[dict[str, int], dict[str, int]]:
    sharded = nn.Linear(4, 4, bias=False)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    replicated = nn.Linear(4, 4, bias=False)
    reports = [anyrank.load(model, path, verify=True) for model in (sharded, replicated)]
    return reports[0].nonfinite, reports[1].nonfinite


def test_values_that_are_not_finite_are_counted_over_the_shards_once(tmp_path: Path) -> None:
    weight = torch.zeros(4, 4)
    weight[0, :3], weight[3, :2] = float("nan"), float("inf")
    save_file({"weight": weight}, tmp_path / "w.safetensors")
    for counts in run_ranks(2, job_not_finite, str(tmp_path / "w.safetensors")):
        assert counts == ({"weight": 5}, {"weight": 5})


def test_a_cast_is_in_the_report(llama: Path) -> None:
    path = llama / "model.safetensors"
    save_file({k: v.bfloat16() for k, v in load_file(path).items()}, path)
    weights, report, _ = run("llama", str(llama))
    assert report.cast["model.norm.weight"] == "bfloat16 -> float32"
    assert weights["model.norm.weight"].dtype == torch.float32


class Derived(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.arange(2.0), persistent=False)


def test_a_buffer_that_nobody_can_rebuild_raises() -> None:
    with torch.device("meta"):
        model = Derived()
    with pytest.raises(anyrank.LoadError, match=r"no rule of their module fills: table"):
        anyrank.load(model, {"weight": torch.zeros(2)})
    assert model.weight.is_meta


def job_one_rank_has_it() -> str:
    with torch.device("cpu" if torch.distributed.get_rank() == 1 else "meta"):
        model = Derived()
    with pytest.raises(anyrank.LoadError) as caught:
        anyrank.load(model, {"weight": torch.zeros(2)})
    return str(caught.value)


def test_a_buffer_that_one_rank_alone_has_raises_on_all() -> None:
    for text in run_ranks(3, job_one_rank_has_it):
        assert "no rule of their module fills: table" in text


def job_diverged() -> str:
    value = torch.full((2,), float(torch.distributed.get_rank() // 2))
    with pytest.raises(anyrank.LoadError) as caught:
        anyrank.load(Derived(), {"weight": value}, verify=True)
    return str(caught.value)


def test_replicas_that_differ_raise_with_their_names() -> None:
    """Every rank has a table of its own, and they differ."""
    for text in run_ranks(4, job_diverged):
        assert "weight: different values on ranks 0, 1 and on ranks 2, 3" in text


class Tied(nn.Module):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.one = nn.Linear(width, width, bias=False)
        self.other = nn.Linear(width, width, bias=False)
        self.other.weight = self.one.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ends_of_a_tie_in_the_source(dtype: torch.dtype) -> None:
    same = {"one.weight": torch.ones(2, 2), "other.weight": torch.ones(2, 2, dtype=dtype)}
    same["one.weight"][0] = same["other.weight"][0] = torch.nan
    report = anyrank.load(Tied(), same)
    assert report.duplicates == {"other.weight": "one.weight"}
    differ = {**same, "other.weight": torch.zeros(2, 2)}
    with pytest.raises(anyrank.LoadError, match=r"tied in the model, but differ in") as caught:
        anyrank.load(Tied(), differ)
    assert "tie_word_embeddings=False" in str(caught.value)
    for left_out, kept in (("other.weight", "one.weight"), ("one.weight", "other.weight")):
        assert f"{'other.weight'!r}: ''" in str(caught.value)
        model = Tied()
        anyrank.load(model, differ, rename={left_out: ""})
        assert torch.equal(model.one.weight.nan_to_num(7), differ[kept].nan_to_num(7))


def job_differing_tie(path: str) -> tuple[str, list[bool]]:
    """The last rows alone differ, which one of the ranks compares."""
    with anyrank.meta():
        model = Tied(1024)
    model = fully_shard(model)
    with pytest.raises(anyrank.LoadError) as caught:
        anyrank.load(model, path)
    return str(caught.value), [p.is_meta for p in model.parameters()]


def test_ranks_share_the_comparison_of_a_tie_and_all_have_its_error(tmp_path: Path) -> None:
    one, other = torch.ones(1024, 1024), torch.ones(1024, 1024)
    other[-1, -1] = 2
    save_file({"one.weight": one, "other.weight": other}, tmp_path / "w.safetensors")
    for text, on_meta in run_ranks(2, job_differing_tie, str(tmp_path / "w.safetensors")):
        assert "other.weight and one.weight are tied in the model" in text
        assert all(on_meta)


def job_other_strides() -> torch.Tensor:
    """The same table on both ranks, but it lies differently in their memory."""
    value = torch.arange(12.0).reshape(3, 4)
    weight = value.t() if torch.distributed.get_rank() == 0 else value.t().contiguous()
    linear = nn.Linear(3, 4, bias=False)
    anyrank.load(linear, {"weight": weight})
    return linear.weight.detach()


def test_a_table_that_lies_differently_in_each_ranks_memory() -> None:
    for weight in run_ranks(2, job_other_strides):
        assert torch.equal(weight, torch.arange(12.0).reshape(3, 4).t())


def job_other_buffer(strategy: str) -> None:
    size = 4096 if torch.distributed.get_rank() == 0 else 1 << 20
    linear = nn.Linear(300, 300)
    table = {"weight": torch.ones(300, 300), "bias": torch.ones(300)}
    anyrank.load(linear, table, strategy=strategy, buffer_bytes=size)
    assert bool((linear.weight == 1).all())


@pytest.mark.parametrize("strategy", ["stripe", "scatter"])
def test_buffers_of_different_size_agree_on_one(strategy: str) -> None:
    run_ranks(3, job_other_buffer, strategy)


@pytest.mark.parametrize("strategy", ["own", "stripe", "scatter"])
def test_every_strategy_works_without_a_process_group(strategy: str) -> None:
    linear = nn.Linear(2, 2, bias=False)
    anyrank.load(linear, {"weight": torch.ones(2, 2)}, strategy=strategy)
    assert bool((linear.weight == 1).all())
