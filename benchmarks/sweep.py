"""Every model of transformers that can be built small, loaded by anyrank and by from_pretrained.

    python benchmarks/sweep.py                    # results/sweep.json; goes on where one stopped
    python benchmarks/sweep.py --sample 100       # 100 of them, drawn with --seed
    python benchmarks/sweep.py --only llama llava # these model types, and nothing is written

For each type of config: its base model, and its first model with a head. The default config is
made small by the names of its fields, the model filled with random values and saved with
`save_pretrained`. Parameters, buffers and ties of `anyrank.load`, into a model on meta and into a
real one, are compared bit for bit with `from_pretrained`, in a fresh process for each pair.
"""

from __future__ import annotations

import argparse
import copy
import gc
import logging
import random
import re
import tempfile
import warnings
from typing import Any, NamedTuple

import bench
import torch
from bench import Run
from launch import Launcher
from torch import nn

import anyrank

CASE_SEC = 120.0  # after which a pair is given up
DETAIL = 70  # characters of a reason that are kept
TITLES = {
    "equal": "equal in all bits, on meta and real",
    "not built": "the default config cannot be made, or made small, by the names of its fields",
    "too big": "too big, even made small",
    "no reference": "save_pretrained or from_pretrained raises",
    "reference differs": "anyrank gives what was saved, from_pretrained does not",
    "refused": "anyrank refuses",
    "differs": "anyrank gives other bits",
    "died": "the process ended, or took too long",
}
MAX_PARAMETERS = 16_000_000
MAX_TEXT = 300
# Fields of configs by the ends of their names -> their greatest value.
SIZES: list[tuple[str, int]] = [
    (r"(vocab_size|num_embeddings|codebook_size|vocab_size_per_layer_input)", 512),
    (r"(token_id|token_index|_id)", 500),
    (r"(num_experts_per_tok|moe_topk|top_k|topk_group|n_group|num_experts_per_token)", 1),
    (r"(experts)", 4),
    (r"(num_key_value_heads|kv_heads|num_kv_heads|num_query_groups)", 2),
    (r"(heads|n_head|num_head)", 4),
    (r"(layers|n_layer|num_blocks|depth|num_hidden_layers_per_stage)", 2),
    (r"(qk_rope_head_dim|qk_nope_head_dim|v_head_dim|head_dim|head_size|kv_channels)", 8),
    (r"(lora_rank|rank)", 16),
    (r"(intermediate_size|ffn_dim|d_ff|inner_dim|n_inner|mlp_dim|ff_dim|feedforward_dim)", 64),
    (
        r"(hidden_size|d_model|n_embd|embed_dim|hidden_dim|embedding_size|projection_dim|dim|width)",
        32,
    ),
    (r"(max_position_embeddings|n_positions|max_source_positions|max_target_positions)", 128),
]
HEADS = (
    "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "MASKED_LM",
    "PRETRAINING", "IMAGE_CLASSIFICATION", "OBJECT_DETECTION", "AUDIO_CLASSIFICATION", "CTC",
    "SEQUENCE_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "DEPTH_ESTIMATION", "TEXT_TO_WAVEFORM",
)  # fmt: skip


class Pair(NamedTuple):
    """A type of config, and the class that is built from it."""

    model_type: str
    kind: str


class NotBuilt(Exception):
    """The model cannot be built, or not small."""


def all_pairs() -> list[Pair]:
    """For each type of config, its base model and its first model with a head."""
    from transformers.models.auto import modeling_auto as auto

    def kinds(table: dict[str, Any], model_type: str) -> list[str]:
        found = table.get(model_type, ())
        return [found] if isinstance(found, str) else list(found)

    tables = [getattr(auto, f"MODEL_FOR_{head}_MAPPING_NAMES", {}) for head in HEADS]
    types = {model_type for table in (auto.MODEL_MAPPING_NAMES, *tables) for model_type in table}
    pairs: set[Pair] = set()
    for model_type in types:
        heads = [kind for table in tables for kind in kinds(table, model_type)]
        base = kinds(auto.MODEL_MAPPING_NAMES, model_type)
        pairs |= {Pair(model_type, kind) for kind in [*base, *heads[:1]]}
    return sorted(pairs)


def check_pair(pair: Pair) -> tuple[str, str]:
    """Load one model in both ways; the outcome, and what there is to say."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    gc.collect()
    try:
        kind, config = build_small(pair)
        # save_pretrained writes names of dtypes into the config, which some constructors refuse.
        model = filled(kind(copy.deepcopy(config)))
    except Exception as error:
        big = isinstance(error, NotBuilt)
        return "too big" if big else "not built", said(error)
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.save_pretrained(folder)
            reference = kind.from_pretrained(folder, dtype=torch.float32)
        except Exception as error:
            return "no reference", said(error)
        found: list[str] = []
        try:
            with anyrank.meta():
                on_meta = kind(config)
            for name, loaded in (("meta", on_meta), ("real", kind(config))):
                anyrank.load(loaded, folder, progress=False)
                other = differences(loaded, reference)
                if other and not differences(loaded, model):
                    return "reference differs", f"{name}: {', '.join(other)}"[:MAX_TEXT]
                found += [f"{name}: {text}" for text in other]
        except Exception as error:
            return "refused", said(error).replace(folder, "FOLDER")
    return ("differs", ", ".join(found)[:MAX_TEXT]) if found else ("equal", "")


def build_small(pair: Pair) -> tuple[Any, Any]:
    """The class and a small config.

    Raises:
        NotBuilt: it has too many parameters.
        Exception: the class cannot be built from what was made of its default config.
    """
    import transformers

    kind = getattr(transformers, pair.kind)
    too_many = NotBuilt(f"more than {MAX_PARAMETERS:,} parameters")
    problem: Exception = too_many
    for sizes in (SIZES, SIZES[:7], SIZES[:2] + SIZES[6:7], []):
        try:
            config = small_config(transformers.CONFIG_MAPPING[pair.model_type], sizes)
            with torch.device("meta"):
                count = sum(parameter.numel() for parameter in kind(config).parameters())
            if count <= MAX_PARAMETERS:
                return kind, config
            problem = too_many
        except Exception as error:
            problem = error if problem is not too_many or sizes is SIZES else problem
    raise problem


def small_config(kind: Any, sizes: list[tuple[str, int]]) -> Any:
    """The default config of a class with smaller numbers."""
    return kind(**small_fields(kind(), sizes))


def small_fields(config: Any, sizes: list[tuple[str, int]]) -> dict[str, Any]:
    """Fields of a config whose numbers are too big, and of the configs in it."""
    from transformers import PretrainedConfig

    fields: dict[str, Any] = {}
    lengths = {
        config.to_dict().get(name) for name in ("num_hidden_layers", "num_layers", "n_layer")
    }
    for name in config.to_dict():
        value = getattr(config, name, None)
        if isinstance(value, PretrainedConfig):
            inner = small_fields(value, sizes)
            fields[name] = {**inner, "model_type": value.model_type}
        elif isinstance(value, int) and not isinstance(value, bool):
            most = next((most for end, most in sizes if re.search(end + "$", name)), value)
            if value > most:
                fields[name] = most
        elif isinstance(value, list) and len(value) in lengths and len(value) > 2 and sizes:
            fields[name] = value[:2]  # one entry a layer
    return fields


def filled(model: Any) -> Any:
    """The model with other values than the rules of initialization give, and none of them alike."""
    generator = torch.Generator().manual_seed(1)
    own = model.state_dict()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.normal_(generator=generator)
        for name, buffer in model.named_buffers():
            if name in own and buffer.is_floating_point():
                buffer.uniform_(0.5, 1.5, generator=generator)
    return model.float()


def differences(loaded: nn.Module, reference: nn.Module) -> list[str]:
    """Names that differ in shape, dtype, bits, or in what they are tied to."""
    mine, theirs = tensors_of(loaded), tensors_of(reference)
    names = sorted(mine.keys() ^ theirs.keys())
    names += [n for n in mine.keys() & theirs.keys() if not same_bits(mine[n], theirs[n])]
    ours, other = ties_of(mine), ties_of(theirs)
    return sorted(names) + [f"ties of {', '.join(sorted(tie))}" for tie in ours ^ other]


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return {**dict(model.named_parameters(remove_duplicate=False)), **buffers}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype) or a.is_meta or b.is_meta:
        return False
    return torch.equal(*(tensor.detach().reshape(-1).view(torch.uint8) for tensor in (a, b)))


def ties_of(tensors: dict[str, torch.Tensor]) -> set[frozenset[str]]:
    groups: dict[int, set[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), set()).add(name)
    return {frozenset(group) for group in groups.values() if len(group) > 1}


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_TEXT]


# -- figures --------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, launcher: Launcher) -> Run:
    """The outcome of each pair; those that are not equal are told once more at the end."""
    every = all_pairs()
    pairs = random.Random(options.seed).sample(every, len(every))[: options.sample or None]
    if options.only:
        pairs = [pair for pair in every if pair.model_type in options.only]
    by_name = {f"{pair.kind} ({pair.model_type})": pair for pair in pairs}

    def check(name: str) -> Run:
        outcome = launcher.run(1, check_pair, by_name[name], timeout_sec=CASE_SEC)
        found, detail = ("died", "") if outcome.error else outcome.stages[0][0]["value"]
        return {"outcome": found, "detail": detail}

    done = bench.go_on("sweep", by_name, check)
    names: dict[str, list[str]] = {
        outcome: [name for name in by_name if done[name]["outcome"] == outcome]
        for outcome in TITLES
    }
    for outcome, title in TITLES.items():
        print(f"{len(names[outcome]):5} {outcome:18} {title}")
    for outcome in ("refused", "differs", "reference differs", "died"):
        for name in names[outcome]:
            print(f"  {name}: {outcome}: {done[name]['detail']}")
    others: dict[str, dict[str, list[str]]] = {}
    for name in by_name:
        outcome, reason = done[name]["outcome"], done[name]["detail"][:DETAIL]
        if outcome != "equal":
            others.setdefault(outcome, {}).setdefault(reason, []).append(name)
    result: Run = {
        "cases": len(pairs),
        "of": len(every),
        "seed": options.seed,
        "outcomes": {outcome: len(same) for outcome, same in names.items()},
        "others": others,
    }
    return result | {"goals": goals_of(result)}


def goals_of(result: Run) -> list[Run]:
    """What anyrank is to reach, and what it did."""
    outcomes, cases = result["outcomes"], result["cases"]
    return [
        bench.goal("models that differ", outcomes["differs"] + outcomes["died"], 0),
        bench.goal("models that nothing is said of", cases - sum(outcomes.values()), 0),
        bench.goal("models that are not loaded / all", 1 - outcomes["equal"] / cases, 0.3),
    ]


if __name__ == "__main__":
    small = {"only": ["llama", "gpt2"]}
    bench.main("sweep", measure, small, ["only"], sample=0, seed=0, only=[])
