"""Models of the benchmarks, as ranks hold them: built, wrapped, cut into parts, and compared.

Also the random Llama that is loaded, and the check that a rank has what its files hold.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench import MIB
from launch import device
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

MAX_SHARD_MB = 200


# -- any model ------------------------------------------------------------------------------------


def linears(widths: Iterable[int], bias: bool = False) -> nn.Sequential:
    """Square layers, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=bias) for width in widths))


def sharded(model: Any, units: Iterable[nn.Module], mesh: Any = None, **options: Any) -> Any:
    """FSDP2 on a mesh, or on all ranks: each of the units, then what is left."""
    mesh = mesh or init_device_mesh(device().type, (dist.get_world_size(),))
    for unit in units:
        fully_shard(unit, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def wrapped(kind: str, model: Any, units: Iterable[nn.Module], **options: Any) -> Any:
    """A model as ranks train it: plain, ddp, fsdp, or hsdp with two replicas."""
    if kind == "plain":
        return model
    if kind == "ddp":
        return DistributedDataParallel(model)
    return sharded(model, units, mesh_of_two() if kind == "hsdp" else None, **options)


def mesh_of_two() -> DeviceMesh:
    """Two replicas, each of them sharded over half of the ranks."""
    shape = (2, dist.get_world_size() // 2)
    return init_device_mesh(device().type, shape, mesh_dim_names=("replicate", "shard"))


def local_part(tensor: Any) -> torch.Tensor:
    """What this rank holds."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "placements") else tensor


def whole(tensor: Any) -> torch.Tensor:
    """All of it, which ranks with parts gather. All ranks."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "placements") else tensor


def digest_of(net: nn.Module, optimizer: torch.optim.Optimizer, begin: bytes = b"") -> str:
    """SHA-256 of some bytes, of all weights and of all optimizer state."""
    digest = hashlib.sha256(begin)
    for parameter in net.parameters():
        state = optimizer.state[parameter]
        for tensor in (parameter, *(state[name] for name in sorted(state))):
            held = whole(tensor).cpu().contiguous().reshape(-1)
            digest.update(held.view(torch.uint8).numpy().data)
    return digest.hexdigest()


# -- the random Llama -----------------------------------------------------------------------------


def llama_config(gib: float) -> dict[str, Any]:
    """Sizes of a Llama whose bf16 weights take about `gib` GiB.

    From 0.5 GiB on they are those of a 1-billion-parameter model with fewer layers.
    """
    hidden, inner, vocabulary = (2048, 5632, 32000) if gib >= 0.5 else (512, 1408, 8000)
    layer_bytes = 2 * (4 * hidden * hidden + 3 * hidden * inner)
    layers = round((gib * 1024 * MIB - 4 * hidden * vocabulary) / layer_bytes)
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "num_hidden_layers": max(1, layers),
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    }


def make_model(gib: float) -> Path:
    """The folder of a random model of that size; written on the first call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = llama_config(gib)
    layers, hidden = sizes["num_hidden_layers"], sizes["hidden_size"]
    folder = Path(tempfile.gettempdir()) / f"anyrank-bench-llama-{hidden}x{layers}"
    if not (folder / "model.safetensors.index.json").exists():
        torch.manual_seed(0)
        config = LlamaConfig(**sizes, tie_word_embeddings=False, dtype="bfloat16")
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        shard_mb = min(MAX_SHARD_MB, round(gib * 1000 / 7))
        model.save_pretrained(folder, max_shard_size=f"{shard_mb}MB")
    return folder


def weight_map(folder: str | Path) -> dict[str, str]:
    """Key -> file, from the index."""
    text = (Path(folder) / "model.safetensors.index.json").read_text(encoding="utf-8")
    return dict(json.loads(text)["weight_map"])


def model_numel(folder: str | Path) -> int:
    """Elements of all tensors of a folder of bf16 shards."""
    text = (Path(folder) / "model.safetensors.index.json").read_text(encoding="utf-8")
    return int(json.loads(text)["metadata"]["total_size"]) // 2


def rows_of(parameter: Any) -> tuple[int, int]:
    """First and last row (exclusive) of dim 0 that this rank holds; all of them when not sharded.

    FSDP2's own arithmetic: chunks of ceil(rows / ranks).
    """
    low, high = 0, int(parameter.shape[0])
    placements = getattr(parameter, "placements", ())
    for dim, placement in enumerate(placements):
        if placement.is_shard():
            mesh = parameter.device_mesh
            chunk = -(-high // mesh.size(dim))
            low = min(chunk * mesh.get_local_rank(dim), high)
            return low, min(low + chunk, high)
    return low, high


def wrong_tensors(model: nn.Module, folder: str | Path, dtype: torch.dtype) -> list[str]:
    """Names of tensors that are not, bit for bit, what the files or the model's rules say."""
    from safetensors import safe_open
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    where, opened = weight_map(folder), {}
    wrong: list[str] = []
    for raw, parameter in model.named_parameters():
        name = raw.removeprefix("module.")
        if name not in where:
            wrong.append(name)
            continue
        file = where.pop(name)
        if file not in opened:
            opened[file] = safe_open(Path(folder) / file, "pt")  # pyright: ignore[reportArgumentType]
        low, high = rows_of(parameter)
        expected = opened[file].get_slice(name)[low:high].to(dtype)
        local = local_part(parameter).cpu()
        if local.dtype != dtype or not torch.equal(local, expected):
            wrong.append(name)
    rotary = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder)).inv_freq
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and not torch.equal(local_part(buffer).cpu(), rotary):
            wrong.append(name)
    return sorted([*wrong, *where])
