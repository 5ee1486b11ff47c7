"""A LoRA adapter merged into its base while both are read: W + scaling * B @ A, rounded once.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021; the scaling by the square
root of the rank is Kalajdzievski's rsLoRA, 2023. Files are as PEFT writes them.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from anyrank.conversion.content import StoredContent, all_finite, cast_into
from anyrank.conversion.selection import Selection
from anyrank.errors import LoadError
from anyrank.files.output import FileSpan
from anyrank.files.storage import join_path, read_whole, storage_for
from anyrank.tensors.box import Box
from anyrank.tensors.low_rank import product
from anyrank.tensors.names import PEFT_PREFIX, of_adapter
from anyrank.tensors.spec import StoredTensor

CONFIG = "adapter_config.json"
MAX_BYTES = 16 << 20  # of a configuration
BASE_LAYER = ".base_layer."
KEPT = 8  # factors that stay in memory
# Values of init_lora_weights with which PEFT changes the base's weights as it adds the adapter.
CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Classes of transformers with a head that may be tied to the embedding, and names of the head.
HEADS = re.compile("LMHead|ForCausalLM|ForMaskedLM|ForConditionalGeneration|ForPreTraining")
HEAD = re.compile("head|embed_out|output|decoder|prediction")
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
    adapter = {name: t for name, t in selection.tensors.items() if of_adapter(name)}
    base = {name: t for name, t in selection.tensors.items() if name not in adapter}
    trained: list[str] = []  # whole
    if not adapter or not base:
        raise LoadError("merge=True takes [base, adapter]: a base, and a folder that PEFT saved")
    factors: dict[str, dict[str, StoredTensor]] = {}
    for key, stored in adapter.items():
        name = key.removeprefix(PEFT_PREFIX)
        found = FACTOR.match(name)
        if found is not None:
            factors.setdefault(found["module"], {})[found["kind"]] = stored
        elif name in base and base[name].shape == stored.shape:
            base[name] = stored
            trained.append(name)
        elif _is_copy_of_base(name, stored, base):
            base[name.replace(BASE_LAYER, ".")] = stored
        else:
            raise LoadError(
                f"{key}: is neither a factor of LoRA nor a tensor of the base, so not merged: "
                "merge with PEFT (merge_and_unload), and convert the result"
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
    own = base.get(name.replace(BASE_LAYER, "."))
    return BASE_LAYER in name and own is not None and own.shape == stored.shape


def _config(paths: Sequence[str]) -> dict[str, Any]:
    for path in paths:
        storage = storage_for(path)
        if storage.is_dir(path) and CONFIG in storage.names(path):
            break
    else:
        raise LoadError(f"merge=True takes [base, adapter], and no {CONFIG} is in any of {paths}")
    where = join_path(path, CONFIG)
    try:
        config: Any = json.loads(read_whole(storage, where, MAX_BYTES))
        kind = config["peft_type"]
        if kind != "LORA":
            raise LoadError(
                f"{where}: is {kind}, and only plain LoRA is merged: merge with PEFT "
                "(merge_and_unload), and convert the result"
            )
        alpha = float(config["lora_alpha"])
        patterns = config.get("alpha_pattern") or {}
        alphas = {str(key): float(value) for key, value in patterns.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise LoadError(f"{where}: is not a configuration of a LoRA adapter ({error!r})") from error
    odd = [
        key
        for key in ("use_dora", "use_qalora", "use_bdlora", "lora_bias", "megatron_config")
        if config.get(key)
    ]
    if odd:
        raise LoadError(
            f"{where}: is LORA with {', '.join(odd)}, and only plain LoRA is merged: merge with "
            "PEFT (merge_and_unload), and convert the result"
        )
    how = str(config.get("init_lora_weights")).lower()
    if how.startswith(CHANGE_BASE):
        raise LoadError(
            f"{where}: init_lora_weights is {how!r}, which changed the base's weights before the "
            "training, so the adapter does not fit the base as it is: merge with PEFT "
            "(merge_and_unload), and convert the result; or save the adapter as plain LoRA "
            "(save_pretrained with path_initial_model_for_weight_conversion=, not for loftq)"
        )
    return {**config, "lora_alpha": alpha, "alpha_pattern": alphas}


def _check_untied(
    trained: Sequence[str], base: Mapping[str, StoredTensor], paths: Sequence[str]
) -> None:
    """Refuse a trained embedding (whole, or by LoRA) whose head stays the embedding of the base.

    The base's files have one matrix for both, and whoever opens the result would tie them again.
    """
    for path in paths:
        storage, where = storage_for(path), join_path(path, "config.json")
        if not storage.is_file(where):
            continue
        try:
            config: Any = json.loads(read_whole(storage, where, MAX_BYTES))
            rows = config.get("text_config", config).get("vocab_size")
            has_head = any(HEADS.search(name) for name in config.get("architectures") or ())
            is_tied = config.get("tie_word_embeddings", True)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise LoadError(f"{where}: is not a configuration of a model ({error!r})") from error
        of_words = [name for name, t in base.items() if len(t.shape) == 2 and t.shape[0] == rows]
        stored = [name for name in of_words if HEAD.search(name)]
        tied = [name for name in trained if name in of_words and not stored]
        if has_head and is_tied and tied:
            raise LoadError(
                f"{tied[0]}: was trained by the adapter, and the head, which is tied to it in the "
                "base, was not, so that the result has two: untie them (tie_word_embeddings=False) "
                "before PEFT merges (merge_and_unload), and convert the result"
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
        self.lock = threading.Lock()
        self.factors: OrderedDict[str, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()

    def fill(self, pieces: Sequence[tuple[FileSpan, torch.Tensor]]) -> None:
        plain = [piece for piece in pieces if piece[0].tensor.name not in self.added]
        self.base.fill(plain)
        for span, memory in pieces:
            low = self.added.get(span.tensor.name)
            if low is not None:
                cast_into(memory, self._sum(span.tensor.name, span.box, low), span.tensor.name)

    def _sum(self, name: str, box: Box, low: LowRank) -> torch.Tensor:
        given = self.base.reader.read(self.base.tensors[name], box)
        wide = torch.promote_types(given.dtype, torch.float32)
        a, b = (factor.to(wide) for factor in self._factors(name, low))
        total = given.to(wide) + product(a, b, box, low.scaling, transposed=low.transposed)
        if not all_finite(total):
            raise LoadError(
                f"{name}: {int((~total.isfinite()).sum())} values of the base with the adapter "
                "are NaN or infinite: anyrank.verify(..., finite=True) finds which of the two has "
                "them; give a base and an adapter without"
            )
        return total

    def _factors(self, name: str, low: LowRank) -> tuple[torch.Tensor, torch.Tensor]:
        with self.lock:
            if name not in self.factors:
                self.factors[name] = self.base.reader.read(low.a), self.base.reader.read(low.b)
                while len(self.factors) > KEPT:
                    self.factors.popitem(last=False)
            return self.factors[name]
