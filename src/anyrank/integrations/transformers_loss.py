"""`tiled_loss` for the causal language models of transformers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import anyrank
from anyrank.integrations.transformers_memory import MemoryHandle, inner_model

BY_HAND = "call anyrank.tiled_loss(head, hidden, labels) in a forward of your own"


def tiled_loss(
    model: nn.Module, chunk_size: int = 1024, *, grad_dtype: torch.dtype | None = None
) -> MemoryHandle:
    """Compute a causal language model's loss without its logits, as `anyrank.tiled_loss` does.

    With gradients and labels, the `logits` of the model's result are hidden states. Without
    gradients (evaluation, generation) or labels (a loss of one's own) everything is as before.
    Names of parameters, ties and checkpoints stay. Each rank by itself, before or after wrapping.

    Args:
        model: with `ForCausalLMLoss` as its loss, wrapped or not; PEFT's too.
        chunk_size: tokens of a tile.
        grad_dtype: as in `anyrank.tiled_loss`.

    Returns:
        A handle whose `remove()` restores the model, and whose `names` has the head.

    Raises:
        ValueError: a head that is no nn.Linear with a forward of its own (with adapters, or a unit
            of FSDP2), another loss; when it runs: a model that scales or caps its logits, or whose
            head was replaced or wrapped since.

    Example::

        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=8, num_attention_heads=1, **sizes))
        handle = anyrank.integrations.transformers.tiled_loss(model, chunk_size=256)
        tokens = torch.tensor([[1, 2, 3]])
        model(input_ids=tokens, labels=tokens).loss.backward()
    """
    inner: Any = inner_model(model)
    head: Any = inner.get_output_embeddings()
    plain = inner.loss_function
    if getattr(head, "__dict__", {}).get("forward") is not None:
        raise ValueError("the head has a forward of its own already: call tiled_loss() once")
    if getattr(plain, "__name__", "") != "ForCausalLMLoss":
        raise ValueError(f"the loss of {type(inner).__name__} is not ForCausalLMLoss: {BY_HAND}")
    _check_head(head)
    own = vars(inner).get("_loss_function")
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
        vars(inner).pop("_loss_function", None)
        if own is not None:
            inner.loss_function = own

    return MemoryHandle([name for name, part in inner.named_modules() if part is head], [undo])


def _check_head(head: Any) -> None:
    """Refuse a head that is more than its product, as it is computed in one pass with the loss.

    Raises:
        ValueError: it is no nn.Linear, or has hooks.
    """
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if type(head) is not nn.Linear or any(vars(head)[name] for name in names):
        raise ValueError(
            f"the head is a {type(head).__name__}, and not a plain nn.Linear without hooks: leave "
            f"it out of adapters and of FSDP2's units of their own, or {BY_HAND}"
        )


class _HeadAndLoss:
    """A head that hands its input on, and the loss that applies it."""

    def __init__(self, head: Any, plain: Callable[..., Any], options: dict[str, Any]) -> None:
        self.head, self.plain, self.options = head, plain, options
        self.handed: torch.Tensor | None = None
        self.has_labels = False  # whether the model runs, and will ask for its loss

    def begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the model's forward."""
        if model.get_output_embeddings() is not self.head:
            raise ValueError(
                "the model's head was replaced after tiled_loss(), as by get_peft_model() with it "
                "among the targets: leave it out of them"
            )
        given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        self.has_labels = {**given, **given.get("kwargs", {})}.get("labels") is not None

    def end(self, *_: Any) -> None:
        """After it, also where it raised."""
        self.has_labels = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.has_labels or not torch.is_grad_enabled():
            return type(self.head).forward(self.head, hidden)
        _check_head(self.head)  # it may have been wrapped since
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
                "the model changes its logits (scales, caps or cuts them) between head and loss, "
                "so the hidden states that stand for them are not its own: remove tiled_loss(), "
                "and call anyrank.tiled_loss() with a function that does the same"
            )
        if shift_labels is None:  # the label of a token is the next one
            shift_labels = F.pad(labels[..., 1:], (0, 1), value=ignore_index)
        # The same parameters in a module whose forward is its own: computed in one pass.
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
