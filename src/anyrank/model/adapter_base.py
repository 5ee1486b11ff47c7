"""Adapters that PEFT computes from the base weights: what becomes of them under another base.

Copies of token embeddings are computed again. Of the other methods, those that are known to draw
their initial values without the base are let through; the rest is refused by name, since the values
that are there may be of the weights that are replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from anyrank.model.adapter_rules import config_of, is_adapter_layer, method_of
from anyrank.model.dora import is_magnitude, whole
from anyrank.model.tensors import ModelTensor, Registration
from anyrank.tensors.box import Box
from anyrank.tensors.spec import StoredTensor

# Methods of PEFT 0.21 whose initial values are the same on any base (tests/integrations).
INDEPENDENT = frozenset({
    "adalora", "beft", "boft", "c3a", "cartridge", "fourierft", "glora", "gralora", "hira", "hra",
    "ia3", "lily", "loha", "lokr", "miss", "multitask_prompt_tuning", "oft", "p_tuning", "peanut",
    "poly", "prefix_tuning", "prompt_tuning", "pvera", "randlora", "road", "shira", "unilora",
    "vblora", "vera", "waveft",
})  # fmt: skip
LORA_INDEPENDENT = (True, False, "gaussian", "orthogonal")  # of init_lora_weights
LORA_OF_BASE = ("eva", "mica")  # computed from the base, which stays as it is; others change it
TOKENS = "trainable_tokens_delta"
ORIGINALS = "trainable_tokens_original"


def stale_adapters(
    tensors: list[ModelTensor], stored: Mapping[int, StoredTensor], kept: Iterable[int], live: bool
) -> list[str]:
    """Names of adapters whose layers get base weights that they may not go with.

    Args:
        tensors: of the model.
        stored: tensor -> what fills it.
        kept: tensors that keep their values.
        live: nothing is computed again afterwards.
    """
    if "peft" not in sys.modules:
        return []
    plain: dict[int, bool] = {}  # layer whose base is filled -> by a file of the base alone
    for index, given in stored.items():
        if not tensors[index].adapter:
            for place in tensors[index].registrations:
                layer = _layer_of(place)
                if layer is not None:
                    is_plain = "base_layer" not in given.name.split(".")
                    plain[id(layer)] = plain.get(id(layer), False) or is_plain
    keeps = {index for index in kept if tensors[index].adapter}
    found: list[str] = []
    for index, tensor in enumerate(tensors):
        layer = _layer_of(tensor.registrations[0])
        if not tensor.adapter or layer is None or id(layer) not in plain:
            continue
        # Of a layer: a table of the whole model is none that its layers' weights give.
        computed = tensor.kind == "derived" and not hasattr(layer, "peft_config")
        if is_magnitude(tensor) or hasattr(layer, TOKENS):
            stale = live and index in keeps
        else:
            changes, follows = _follows(tensor.registrations[0], layer)
            stale = (changes and plain[id(layer)]) or (follows and (computed or index in keeps))
        if stale:
            found.append(tensor.name)
    return found


def _layer_of(place: Registration) -> nn.Module | None:
    """The PEFT layer that a tensor is below, or the whole PEFT model."""
    return next((m for m in reversed(place.path) if is_adapter_layer(m)), None)


def _follows(place: Registration, layer: nn.Module) -> tuple[bool, bool]:
    """Whether a method changes the base weights, and whether it computes its own from them."""
    _, config = config_of(place)
    method = method_of(layer) or str(getattr(config, "peft_type", "")).rpartition(".")[2].lower()
    choice = getattr(config, "init_lora_weights", True)
    if choice not in LORA_INDEPENDENT:
        return choice not in LORA_OF_BASE, True
    prompt = getattr(config, "prompt_tuning_init", None)
    from_base = prompt is not None and str(prompt).rpartition(".")[2] != "RANDOM"
    return False, from_base or method not in (*INDEPENDENT, "lora")


def is_token_row(target: ModelTensor) -> bool:
    """Whether a tensor has copies of rows of an embedding."""
    segments = target.registrations[0].names[0].split(".") if target.adapter else ()
    return (TOKENS in segments or ORIGINALS in segments) and not target.is_meta


def recompute_token_rows(targets: Iterable[ModelTensor], filled: set[int]) -> dict[str, str]:
    """Give copies of token embeddings (`trainable_token_indices`) the rows that are there now.

    Rows that were trained are kept. All ranks that share the layers call it with the same targets:
    a sharded embedding is gathered.

    Args:
        targets: copies of rows, in place.
        filled: ids of the tensors that the source filled.

    Returns:
        Name -> the rule that was run, by this rank.
    """
    targets, rules = list(targets), {}
    # The originals last: a row that differs from its original was trained.
    for table in (TOKENS, ORIGINALS):
        for target in targets:
            place = target.registrations[0]
            if table not in place.names[0].split("."):
                continue
            layer: Any = next(m for m in reversed(place.path) if hasattr(m, TOKENS))
            weight = layer.get_base_layer().weight
            adapter = place.attribute
            if id(weight) not in filled or id(target.tensor) in filled:
                continue
            rows = whole(weight)[layer.token_indices[adapter]]
            originals, local = layer.trainable_tokens_original[adapter], target.local()
            for piece in target.pieces:
                part = local[Box(piece.local, piece.box.sizes).slices()]
                # By part: before the load the ranks may have had other bases.
                if table == TOKENS and not torch.equal(part, originals[piece.box.slices()]):
                    continue
                part.copy_(rows[piece.box.slices()])
                rules[target.name] = "rows of the embedding"
    return rules
