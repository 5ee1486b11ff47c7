"""Recomputed layers and tiled MLPs of transformers models, under any wrapper."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

import anyrank

log = logging.getLogger("anyrank.integrations")

MLPS = ("mlp", "feed_forward", "ffn", "shared_expert", "shared_experts", "shared_mlp")


class MemoryHandle:
    """Undoes what a function of this module did.

    Attributes:
        names: the modules that were changed.
    """

    def __init__(self, names: Sequence[str], undo: Sequence[Callable[[], object]]) -> None:
        self.names = list(names)
        self._undo = list(undo)

    def remove(self) -> None:
        """Restore the model. A second call does nothing."""
        while self._undo:
            self._undo.pop()()


def enable_recompute(model: nn.Module, offload: anyrank.Offload | None = None) -> MemoryHandle:
    """Recompute the layers of a transformers model in backward, as `anyrank.recompute` does.

    In place of the model's own activation checkpointing: the model itself says which modules are
    its layers, and switches its cache off. Each rank by itself, before or after wrapping. Leave
    `gradient_checkpointing` of TrainingArguments off, which would put torch's function back.
    Layers are recomputed in training mode only: call `model.train()`.

    Args:
        model: a model, wrapped or not; PEFT's too.
        offload: moves the layers' inputs to host memory until backward.

    Returns:
        A handle whose `remove()` restores the model, and whose `names` lists the layers.

    Raises:
        ValueError: no transformers model is in it, or it supports no activation checkpointing.

    Example::

        from transformers import GPT2Config, GPT2LMHeadModel

        model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=8)).train()
        handle = anyrank.integrations.transformers.enable_recompute(model)
        tokens = torch.tensor([[1, 2, 3]])
        model(input_ids=tokens, labels=tokens).loss.backward()
        assert handle.names == ["transformer.h.0", "transformer.h.1"]
    """
    inner: Any = inner_model(model)
    if not getattr(inner, "supports_gradient_checkpointing", False):
        raise ValueError(
            f"{type(inner).__name__} supports no activation checkpointing of its own: patch its "
            "layers with anyrank.recompute_(model, pattern)"
        )
    run = functools.partial(anyrank.recompute, offload=offload)
    inner._set_gradient_checkpointing(True, run)
    undo: list[Callable[[], object]] = [lambda: inner._set_gradient_checkpointing(False)]
    if any(not parameter.requires_grad for parameter in inner.parameters()):
        # A layer of frozen weights and trained adapters needs an input to give a gradient to.
        inner.enable_input_require_grads()
        undo.append(inner.disable_input_require_grads)
    marked = {id(part) for part in inner.modules() if getattr(part, "gradient_checkpointing", 0)}
    layers = [
        name
        for name, part in inner.named_modules()
        if id(part) in marked and not any(id(p) in marked for p in part.modules() if p is not part)
    ]
    return MemoryHandle(layers, undo)


def tile_mlps(
    model: nn.Module, chunk_size: int = 8192, *, grad_dtype: torch.dtype | None = None
) -> MemoryHandle:
    """Run the MLPs of a transformers model in tiles of tokens, as `anyrank.tile_` does.

    Finds dense MLPs, vision towers' and shared experts included, and the experts of MoE layers: of
    these, the block around them stays whole, which computes the router's logits once. An MLP that
    takes more than rows and their residual (the height of an image, a state, a mask) may need all
    rows at a time: it stays whole, and a warning names it. Each rank by itself, before or after
    wrapping.

    Args:
        model: a model, wrapped or not; PEFT's too.
        chunk_size: tokens of a tile.
        grad_dtype: as in `anyrank.tile_`.

    Returns:
        A handle whose `remove()` restores the model, and whose `names` lists the modules.

    Raises:
        ValueError: the model has no such module; names a way.

    Example::

        from transformers import GPT2Config, GPT2LMHeadModel

        model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=8))
        handle = anyrank.integrations.transformers.tile_mlps(model, chunk_size=256)
        assert handle.names == ["transformer.h.0.mlp", "transformer.h.1.mlp"]
    """
    inner, found, undo = inner_model(model), list[str](), list[Callable[[], object]]()
    try:
        for name, dims in _mlps(inner):
            handle = anyrank.tile_(
                inner, name, chunk_size=chunk_size, grad_dtype=grad_dtype, **dims
            )
            found += handle.names
            undo.append(handle.remove)
    except BaseException:
        for restore in undo:
            restore()
        raise
    if not found:
        hint = "anyrank.tile_(model, pattern) takes any module's name"
        if any(hasattr(part, "chunk_size_feed_forward") for part in inner.modules()):
            hint = f"make it with config.chunk_size_feed_forward, or {hint}"
        names = ", ".join(MLPS)
        raise ValueError(f"{type(inner).__name__} has no MLP to tile ({names}): {hint}")
    return MemoryHandle(found, undo)


def inner_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model in the wrappers of DDP, torch.compile and PEFT.

    Raises:
        ValueError: there is none.
    """
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            return part
    raise ValueError(f"{type(model).__name__} holds no transformers model: give one")


def _mlps(model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name of each MLP and of each layer's experts, and the dims of `tile_`."""
    whole: dict[str, list[str]] = {}
    for name, part in model.named_modules():
        last = name.rpartition(".")[2]
        if last == "experts" and not isinstance(part, nn.ModuleList):
            yield name, {"in_dims": (0, 0, 0), "out_dims": 0}
        elif last in MLPS and not hasattr(part, "experts"):
            rows, *others = _arguments(part) or [""]
            unknown = [each for each in others if each not in ("residual", "layer_idx")]
            if unknown:
                whole[name] = unknown
            else:
                yield name, {"in_dims": {rows: -2, "residual": -2}} if "residual" in others else {}
    if whole:
        name, arguments = next(iter(whole.items()))
        log.warning(
            "tile_mlps: %d modules stay whole, as %s, whose forward takes %s besides rows of "
            "tokens; if each row is computed alone, give in_dims to anyrank.tile_",
            len(whole),
            name,
            ", ".join(arguments),
        )


def _arguments(module: nn.Module) -> list[str]:
    """Names of what a module's forward takes, without `*args` and `**kwargs`."""
    parameters = inspect.signature(module.forward).parameters.values()
    return [
        each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
