"""Recompute layers, and tile MLPs and losses, of transformers models under any wrapper."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

import anyrank
from anyrank.wording import count

log = logging.getLogger("anyrank.integrations")

BY_HAND = "call anyrank.tiled_loss(head, hidden, labels) in your own forward"
MLPS = ("mlp", "feed_forward", "ffn", "shared_expert", "shared_experts", "shared_mlp")


class MemoryHandle:
    """The handle that undoes a change by a function of this module.

    Attributes:
        names: the changed modules.
    """

    def __init__(self, names: Sequence[str], undo: Sequence[Callable[[], object]]) -> None:
        self.names = list(names)
        self._undo = list(undo)

    def remove(self) -> None:
        """Restore the model. A second call does nothing."""
        while self._undo:
            self._undo.pop()()


def enable_recompute(model: nn.Module, offload: anyrank.Offload | None = None) -> MemoryHandle:
    """Recompute the layers of a transformers model in backward, like `anyrank.recompute`.

    It replaces the model's own activation checkpointing; the model determines which modules are its
    layers. With gradients, the layers get no cache (see `anyrank.recompute_`); without gradients
    they do. Call it before or after wrapping; no coordination between ranks is needed. Leave
    `gradient_checkpointing` of TrainingArguments off, because it would recompute again.

    Args:
        model: a model, wrapped or not; a PEFT model too.
        offload: moves the layers' inputs to host memory until backward.

    Returns:
        A handle whose `remove()` restores the model, and whose `names` lists the layers.

    Raises:
        ValueError: the model does not contain a transformers model, the transformers model does not
            support gradient checkpointing, or its layers are already recomputed.

    Example::

        from transformers import GPT2Config, GPT2LMHeadModel

        model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=8)).train()
        handle = anyrank.integrations.transformers.enable_recompute(model)
        tokens = torch.tensor([[1, 2, 3]])
        model(input_ids=tokens, labels=tokens).loss.backward()
        assert handle.names == ["transformer.h.0", "transformer.h.1"]
    """
    inner: Any = _inner_model(model)
    if not getattr(inner, "supports_gradient_checkpointing", False):
        raise ValueError(
            f"{type(inner).__name__} does not support gradient checkpointing. Recompute its layers "
            "with anyrank.recompute_(model, pattern)"
        )
    undo: list[Callable[[], object]] = [lambda: inner._set_gradient_checkpointing(False)]
    inner._set_gradient_checkpointing(True, functools.partial(anyrank.recompute, offload=offload))
    marked = {id(part) for part in inner.modules() if getattr(part, "gradient_checkpointing", 0)}
    layers = {
        name: part
        for name, part in inner.named_modules()
        if id(part) in marked and not any(id(p) in marked for p in part.modules() if p is not part)
    }
    if all(isinstance(layer, GradientCheckpointingLayer) for layer in layers.values()):
        # These drop their cache in training mode, even without gradients, when generate() needs
        # it. Only a model with its own code calls the function that it receives.
        undo.pop()()
        try:
            for name in layers:
                undo.append(anyrank.recompute_(inner, name, offload=offload).remove)
        except BaseException:
            for restore in undo:
                restore()
            raise
    if any(not parameter.requires_grad for parameter in inner.parameters()):
        # A layer with frozen weights and trained adapters needs an input that requires a gradient.
        inner.enable_input_require_grads()
        undo.append(inner.disable_input_require_grads)
    return MemoryHandle(list(layers), undo)


def tile_mlps(
    model: nn.Module, chunk_size: int = 8192, *, grad_dtype: torch.dtype | None = None
) -> MemoryHandle:
    """Run the MLPs of a transformers model in tiles of tokens, like `anyrank.tile_`.

    It finds dense MLPs, including those of vision towers and shared experts, and the experts of MoE
    layers. The block around the experts computes the router's logits once, and is not tiled. An MLP
    that takes more than rows and their residual (the height of an image, a state, a mask) may need
    all rows at a time: it is not tiled, and a warning names it. Call it before or after wrapping;
    no coordination between ranks is needed.

    Args:
        model: a model, wrapped or not; a PEFT model too.
        chunk_size: tokens per tile.
        grad_dtype: as in `anyrank.tile_`.

    Returns:
        A handle whose `remove()` restores the model, and whose `names` lists the modules.

    Raises:
        ValueError: the model has no such module; the message names an alternative.

    Example::

        from transformers import GPT2Config, GPT2LMHeadModel

        model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=8))
        handle = anyrank.integrations.transformers.tile_mlps(model, chunk_size=256)
        assert handle.names == ["transformer.h.0.mlp", "transformer.h.1.mlp"]
    """
    inner, names, undo = _inner_model(model), list[str](), list[Callable[[], object]]()
    try:
        for name, dims in _mlps(inner):
            handle = anyrank.tile_(
                inner, name, chunk_size=chunk_size, grad_dtype=grad_dtype, **dims
            )
            names += handle.names
            undo.append(handle.remove)
    except BaseException:
        for restore in undo:
            restore()
        raise
    if not names:
        hint = "call anyrank.tile_(model, pattern), which accepts the name of any module"
        if any(hasattr(part, "chunk_size_feed_forward") for part in inner.modules()):
            hint = f"set config.chunk_size_feed_forward, or {hint}"
        known = ", ".join(MLPS)
        raise ValueError(f"{type(inner).__name__} has no MLP to tile ({known}). Instead, {hint}")
    return MemoryHandle(names, undo)


def tiled_loss(
    model: nn.Module, chunk_size: int = 1024, *, grad_dtype: torch.dtype | None = None
) -> MemoryHandle:
    """Compute a causal language model's loss without its logits, like `anyrank.tiled_loss`.

    With gradients and labels, the `logits` of the model's result are None, as with other fused
    losses: code that reads logits during training (metrics, distillation) cannot be combined with
    it, and needs its own function for `anyrank.tiled_loss`. Without gradients (evaluation,
    generation) or without labels (your own loss) nothing changes. Names of parameters, ties and
    checkpoints do not change. Call it before or after wrapping; no coordination between ranks is
    needed.

    Args:
        model: a model with `ForCausalLMLoss` as its loss, wrapped or not; a PEFT model too.
        chunk_size: tokens per tile.
        grad_dtype: as in `anyrank.tiled_loss`.

    Returns:
        A handle whose `remove()` restores the model, and whose `names` has the head.

    Raises:
        ValueError: a head that is not a plain nn.Linear (such as one with adapters, or an FSDP2
            unit), a different loss, a model that computes its loss in its forward (T5, Whisper);
            when it runs: a model that scales or caps its logits, or whose head or loss function was
            replaced or wrapped afterwards.

    Example::

        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=8, num_attention_heads=1, **sizes))
        handle = anyrank.integrations.transformers.tiled_loss(model, chunk_size=256)
        tokens = torch.tensor([[1, 2, 3]])
        model(input_ids=tokens, labels=tokens).loss.backward()
    """
    inner: Any = _inner_model(model)
    head: Any = inner.get_output_embeddings()
    plain = inner.loss_function
    if getattr(head, "__dict__", {}).get("forward") is not None:
        raise ValueError("the head is already patched. Call tiled_loss() only once")
    if getattr(plain, "__name__", "") != "ForCausalLMLoss":
        raise ValueError(
            f"the loss of {type(inner).__name__} is not ForCausalLMLoss. Instead, {BY_HAND}"
        )
    if not _asks_for_its_loss(type(inner)):
        raise ValueError(
            f"the forward of {type(inner).__name__} computes its loss itself, not with "
            f"self.loss_function, which tiled_loss() replaces. Instead, {BY_HAND}"
        )
    _check_head(head)
    patch = _HeadAndLoss(head, plain, {"chunk_size": chunk_size, "grad_dtype": grad_dtype})
    head.forward, inner.loss_function = patch.forward, patch.loss
    hooks = [
        inner.register_forward_pre_hook(patch.begin, with_kwargs=True),
        inner.register_forward_hook(patch.end, always_call=True),
    ]

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        vars(head).pop("forward", None)
        if inner.loss_function == patch.loss:  # otherwise the user has set a different one
            inner.loss_function = plain

    return MemoryHandle([name for name, part in inner.named_modules() if part is head], [undo])


def _asks_for_its_loss(kind: type) -> bool:
    """Return True if a class of models, or a base of it, uses `loss_function` in its forward.

    A use in one of several branches counts, because each forward checks what actually runs.
    """
    forwards = (
        inspect.unwrap(vars(base)["forward"]) for base in kind.__mro__ if "forward" in vars(base)
    )
    codes = (getattr(forward, "__code__", None) for forward in forwards)
    return any(code is not None and "loss_function" in code.co_names for code in codes)


def _check_head(head: Any) -> None:
    """Check that a head is only a matrix product, which is computed together with the loss.

    Raises:
        ValueError: it is not an nn.Linear, or has hooks.
    """
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if type(head) is not nn.Linear or any(vars(head)[name] for name in names):
        raise ValueError(
            f"the head is a {type(head).__name__}, but must be a plain nn.Linear without hooks. "
            f"Do not add adapters to it or make it an FSDP2 unit, or {BY_HAND}"
        )


class _HeadAndLoss:
    """A head that passes its input on, and the loss that applies the head."""

    def __init__(self, head: Any, plain: Callable[..., Any], options: dict[str, Any]) -> None:
        self.head, self.plain, self.options = head, plain, options
        self.handed: torch.Tensor | None = None
        # The model takes these hidden states for its logits; its result must not contain them.
        self.supposed: list[torch.Tensor] = []
        self.has_labels = False  # whether the model runs and will call the loss function

    def begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Prepare for the model's forward."""
        if model.get_output_embeddings() is not self.head:
            raise ValueError(
                "the model's head was replaced after tiled_loss(), for example by get_peft_model() "
                "with the head among its targets. Remove it from the targets"
            )
        self.handed = None
        bound = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        self.has_labels = {**bound, **bound.get("kwargs", {})}.get("labels") is not None

    def end(self, model: Any, args: tuple[Any, ...], result: Any) -> Any:
        """Finish the forward, even if it raised; return the result without logits."""
        self.has_labels = False
        handed, self.handed = self.handed, None
        supposed, self.supposed = self.supposed, []
        # If forward raised there is no result, and the user must see its own error.
        if handed is not None and result is not None:
            raise ValueError(
                f"the forward of {type(model).__name__} used its head, but not the loss function "
                "of tiled_loss(), so its loss is computed from hidden states (either it computes "
                "the loss itself, or model.loss_function was set later). Call remove() of the "
                f"handle of tiled_loss(), and {BY_HAND}"
            )
        if not supposed:
            return None

        def unless_supposed(value: Any) -> Any:
            return None if any(value is tensor for tensor in supposed) else value

        if isinstance(result, tuple):
            return tuple(map(unless_supposed, result))
        if isinstance(result, dict):  # a new object, because a ModelOutput has no keys for None
            kind: Any = type(cast("Any", result))
            return kind(**{key: unless_supposed(value) for key, value in result.items()})
        return result

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.has_labels or not torch.is_grad_enabled():
            return type(self.head).forward(self.head, hidden)
        _check_head(self.head)  # it may have been wrapped after tiled_loss()
        if self.handed is not None:
            raise ValueError(
                "the model uses its head twice before its loss, but tiled_loss() can replace only "
                f"one use. Instead, {BY_HAND}"
            )
        self.handed = hidden
        return hidden

    def loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        handed, self.handed = self.handed, None
        if handed is None:
            return self.plain(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels
            )
        if logits is not handed and not torch.equal(logits, handed.to(logits.dtype)):
            raise ValueError(
                "the model modifies its logits between head and loss (scaling, capping, slicing), "
                "which tiled_loss() cannot reproduce. Call remove() of its handle, and call "
                "anyrank.tiled_loss() with a function that does the same"
            )
        self.supposed = [handed, logits]
        if shift_labels is None:  # the label of a token is the next token
            shift_labels = F.pad(labels[..., 1:], (0, 1), value=ignore_index)
        # The same parameters in a module with a plain forward, computed in one pass.
        twin = copy.copy(self.head)
        del twin.__dict__["forward"]
        return anyrank.tiled_loss(
            twin,
            handed,
            shift_labels.to(handed.device),
            count=num_items_in_batch,
            ignore_index=ignore_index,
            **self.options,
        )


def _inner_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside the wrappers of DDP, torch.compile and PEFT.

    Raises:
        ValueError: there is none.
    """
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            return part
    raise ValueError(
        f"{type(model).__name__} does not contain a transformers model. Pass one, wrapped or not"
    )


def _mlps(model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each MLP and of each layer's experts, with the dims for `tile_`."""
    whole: dict[str, list[str]] = {}
    for name, part in model.named_modules():
        last = name.rpartition(".")[2]
        if last == "experts" and not isinstance(part, nn.ModuleList):
            yield name, {"in_dims": (0, 0, 0), "out_dims": 0}
        elif last in MLPS and not hasattr(part, "experts"):
            rows, *others = _arguments(part) or [""]
            unknown = [other for other in others if other not in ("residual", "layer_idx")]
            if unknown:
                whole[name] = unknown
            else:
                yield name, {"in_dims": {rows: -2, "residual": -2}} if "residual" in others else {}
    if whole:
        name, arguments = next(iter(whole.items()))
        log.warning(
            "tile_mlps: %s not tiled, such as %s, because the forward takes %s in addition to rows "
            "of tokens. If rows are independent, use anyrank.tile_(..., in_dims=...)",
            count(len(whole), "module"),
            name,
            ", ".join(arguments),
        )


def _arguments(module: nn.Module) -> list[str]:
    """Return the names of arguments of a module's forward, except `*args` and `**kwargs`."""
    parameters = inspect.signature(module.forward).parameters.values()
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
