"""A LoRA adapter merged into its base while both are read: W + scaling * B @ A, rounded once.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021; the scaling by the square
root of the rank is Kalajdzievski's rsLoRA, 2023. Files are as PEFT writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from anyrank.conversion.content import StoredContent, all_finite, cast_into
from anyrank.conversion.selection import Selection
from anyrank.errors import LoadError
from anyrank.files.output import FileSpan
from anyrank.files.storage import join_path, read_whole, storage_for
from anyrank.tensors.box import Box
from anyrank.tensors.low_rank import product
from anyrank.tensors.names import PEFT_PREFIX, is_of_adapter
from anyrank.tensors.spec import StoredTensor

CONFIG = "adapter_config.json"
MAX_BYTES = 16 << 20  # of a configuration
BASE_LAYER = ".base_layer."
KEPT = 8  # factors that stay in memory
BY_PEFT = "merge with PEFT (merge_and_unload), and convert the result"
# What the configuration of plain LoRA may say; all else in it has to be empty.
PLAIN = {
    *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"),
    *("fan_in_fan_out", "init_lora_weights", "lora_dropout", "bias", "eva_config"),
    *("target_modules", "exclude_modules", "modules_to_save"),
    *("layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size"),
    *("base_model_name_or_path", "revision", "task_type", "auto_mapping"),
    *("inference_mode", "peft_version", "runtime_config"),
}
# Values of init_lora_weights with which PEFT leaves the base's weights as they are.
LEAVE_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
EMBEDDING_A = "lora_embedding_A"
FACTOR = re.compile(
    r"^(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B)(?:\.weight)?$"
)


@dataclass(frozen=True)
class LowRank:
    """What is added to one weight: scaling * B @ A, or its transpose.

    Attributes:
        a: [rank, columns].
        b: [rows, rank].
        scaling: as PEFT computes it.
        transposed: whether the weight is stored [in, out].
    """

    a: StoredTensor
    b: StoredTensor
    scaling: float
    transposed: bool


def merged(selection: Selection, paths: Sequence[str]) -> tuple[Selection, dict[str, LowRank]]:
    """The base's tensors, with what an adapter adds to them.

    Args:
        selection: of the base and the adapter together.
        paths: the sources, of which one is the adapter's folder.

    Raises:
        LoadError: no adapter, one that is not plain LoRA, or that does not fit the base.
    """
    config = _config(paths)
    adapter = {name: t for name, t in selection.tensors.items() if is_of_adapter(name)}
    base = {name: t for name, t in selection.tensors.items() if name not in adapter}
    trained: list[str] = []  # whole
    if not adapter or not base:
        raise LoadError("merge=True takes [base, adapter]: a base, and a folder that PEFT saved")
    factors: dict[str, dict[str, StoredTensor]] = {}
    for key, stored in adapter.items():
        name = key.removeprefix(PEFT_PREFIX)
        factor = FACTOR.match(name)
        if factor is not None:
            factors.setdefault(factor["module"], {})[factor["kind"]] = stored
        elif name in base and base[name].shape == stored.shape:
            base[name] = stored
            trained.append(name)
        elif _is_copy_of_base(name, stored, base):
            base[name.replace(BASE_LAYER, ".")] = stored
        else:
            raise LoadError(
                f"{key}: is neither a factor of LoRA nor a tensor of the base: {BY_PEFT}"
            )
    added = {
        f"{module}.weight": _low_rank(module, kinds, base, config)
        for module, kinds in factors.items()
    }
    embeddings = [f"{module}.weight" for module, kinds in factors.items() if EMBEDDING_A in kinds]
    _check_untied([*trained, *embeddings], base, paths)
    return replace(selection, tensors=base), added


def _is_copy_of_base(name: str, stored: StoredTensor, base: Mapping[str, StoredTensor]) -> bool:
    """Whether it is an embedding's or head's own weight, which PEFT saves beside its factors."""
    weight = base.get(name.replace(BASE_LAYER, "."))
    return BASE_LAYER in name and weight is not None and weight.shape == stored.shape


def _config(paths: Sequence[str]) -> dict[str, Any]:
    for path in paths:
        storage = storage_for(path)
        if storage.is_dir(path) and CONFIG in storage.names(path):
            break
    else:
        raise LoadError(f"merge=True takes [base, adapter], and no {CONFIG} is in any of {paths}")
    where = join_path(path, CONFIG)
    config = _read_json(where, "a LoRA adapter")
    try:
        kind, alpha = config["peft_type"], float(config.get("lora_alpha") or 0)
        patterns = config.get("alpha_pattern") or {}
        alphas = {str(key): float(value) for key, value in patterns.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise LoadError(f"{where}: is not a configuration of a LoRA adapter ({error!r})") from error
    odd = sorted(key for key, value in config.items() if value and key not in PLAIN)
    how = config.get("init_lora_weights")
    if kind != "LORA" or odd:
        what = f"LORA with {', '.join(odd)}" if kind == "LORA" else kind
        raise LoadError(f"{where}: is {what}, and only plain LoRA is merged: {BY_PEFT}")
    if how not in LEAVE_BASE:
        raise LoadError(
            f"{where}: init_lora_weights is {how!r}, which may have changed the base's weights "
            f"before the training, so that the adapter does not fit the base as it is: {BY_PEFT}; "
            "or save the adapter as plain LoRA "
            "(save_pretrained with path_initial_model_for_weight_conversion=)"
        )
    return {**config, "lora_alpha": alpha, "alpha_pattern": alphas}


def _read_json(path: str, owner: str) -> dict[str, Any]:
    """A configuration.

    Raises:
        LoadError: it is none.
    """
    try:
        config: Any = json.loads(read_whole(storage_for(path), path, MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path}: is not a configuration of {owner} ({error!r})") from error
    if not isinstance(config, dict):
        raise LoadError(f"{path}: is not a configuration of {owner}, but a {type(config).__name__}")
    return config


def _check_untied(
    trained: Sequence[str], base: Mapping[str, StoredTensor], paths: Sequence[str]
) -> None:
    """Refuse a trained embedding (whole, or by LoRA) of a base that ties its head to it.

    The head stays that of the base, and whoever opens the result would tie them again.
    """
    for path in paths:
        where = join_path(path, "config.json")
        if not storage_for(path).is_file(where):
            continue
        config = _read_json(where, "a model")
        text = config.get("text_config", config)
        rows = text.get("vocab_size") if isinstance(text, dict) else None
        tied = [
            name for name in trained if len(base[name].shape) == 2 and base[name].shape[0] == rows
        ]
        if tied and config.get("tie_word_embeddings", True):
            raise LoadError(
                f"{tied[0]}: was trained by the adapter, and config.json ties the embedding to the "
                "head, so that the result would have two: untie them (tie_word_embeddings=False) "
                f"before PEFT merges, or {BY_PEFT}"
            )


def _low_rank(
    module: str,
    kinds: Mapping[str, StoredTensor],
    base: Mapping[str, StoredTensor],
    config: Mapping[str, Any],
) -> LowRank:
    weight = base.get(f"{module}.weight")
    is_embedding = EMBEDDING_A in kinds
    names = (EMBEDDING_A, "lora_embedding_B") if is_embedding else ("lora_A", "lora_B")
    if weight is None or set(kinds) != set(names):
        what = "is not in the base" if weight is None else f"has only {sorted(kinds)}"
        raise LoadError(
            f"{module}.weight: {what}: give the base that the adapter was trained on, or rename="
        )
    a, b = (kinds[name] for name in names)
    transposed = is_embedding or bool(config.get("fan_in_fan_out"))
    fits = len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1]
    shape = (b.shape[0], a.shape[1]) if fits else ()
    if not fits or weight.shape != (shape[::-1] if transposed else shape):
        raise LoadError(
            f"{module}.weight: is {list(weight.shape)} in the base; the adapter's factors are "
            f"{list(b.shape)} and {list(a.shape)}: merge with PEFT (merge_and_unload)"
        )
    if not weight.dtype.is_floating_point or weight.dtype.itemsize == 1:
        raise LoadError(
            f"{module}.weight: is {weight.dtype}: give dtype=, with which it is "
            "dequantised where that is known, or the base before it was quantised"
        )
    patterns: Mapping[str, float] = config["alpha_pattern"]
    key = next((k for k in patterns if re.match(rf"(.*\.)?({k})$", module)), None)
    alpha = config["lora_alpha"] if key is None else patterns[key]
    rank = a.shape[0]
    return LowRank(a, b, alpha / (rank**0.5 if config.get("use_rslora") else rank), transposed)


class MergedContent:
    """The base's tensors, with the adapter's products added to some.

    Args:
        base: of all tensors.
        added: name -> what is added.
    """

    def __init__(self, base: StoredContent, added: Mapping[str, LowRank]) -> None:
        self.base, self.added = base, added
        self.factors = lru_cache(KEPT)(self._read_factors)

    def fill(self, pieces: Sequence[tuple[FileSpan, torch.Tensor]]) -> None:
        plain = [piece for piece in pieces if piece[0].tensor.name not in self.added]
        self.base.fill(plain)
        for span, memory in pieces:
            low = self.added.get(span.tensor.name)
            if low is not None:
                cast_into(memory, self._sum(span.tensor.name, span.box, low), span.tensor.name)

    def _sum(self, name: str, box: Box, low: LowRank) -> torch.Tensor:
        values = self.base.reader.read(self.base.tensors[name], box)
        wide = torch.promote_types(values.dtype, torch.float32)
        a, b = (factor.to(wide) for factor in self.factors(name))
        total = values.to(wide) + product(a, b, box, low.scaling, transposed=low.transposed)
        if not all_finite(total):
            raise LoadError(
                f"{name}: {int((~total.isfinite()).sum())} values of the base with the adapter "
                "are NaN or infinite: anyrank.verify(..., finite=True) finds which of the two has "
                "them; give a base and an adapter without"
            )
        return total

    def _read_factors(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        low = self.added[name]
        return self.base.reader.read(low.a), self.base.reader.read(low.b)
