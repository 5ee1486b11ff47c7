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


def tiled_loss(
    model: nn.Module, chunk_size: int = 1024, *, grad_dtype: torch.dtype | None = None
) -> MemoryHandle:
    """Compute a causal language model's loss without its logits, as `anyrank.tiled_loss` does.

    With gradients and labels, the head hands on the hidden states, and `model.loss_function`
    applies the head a tile of tokens at a time; the `logits` of the model's result are hidden
    states then. Without gradients (evaluation, generation) or without labels (a loss of one's own,
    as the Trainer's label_smoothing_factor) everything is as before. Names of parameters, ties and
    checkpoints stay. Each rank by itself, before or after wrapping, and after PEFT has wrapped the
    head.

    Args:
        model: with `ForCausalLMLoss` as its loss, wrapped or not; PEFT's too.
        chunk_size: tokens of a tile.
        grad_dtype: as in `anyrank.tiled_loss`.

    Returns:
        A handle whose `remove()` restores the model, and whose `names` has the head.

    Raises:
        ValueError: no head, another loss; when it runs: a model that scales or caps its logits, or
            whose head was replaced since.

    Example::

        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=8, num_attention_heads=1, **sizes))
        handle = anyrank.integrations.transformers.tiled_loss(model, chunk_size=256)
        tokens = torch.tensor([[1, 2, 3]])
        model(input_ids=tokens, labels=tokens).loss.backward()
    """
    inner: Any = inner_model(model)
    head = inner.get_output_embeddings()
    if head is not None and "forward" in vars(head):
        patch = getattr(vars(head)["forward"], "__self__", None)
        if not isinstance(patch, _HeadAndLoss) or patch.switch.is_on:
            raise ValueError("the head has a forward of its own already: call tiled_loss() once")
        del head.forward  # of a copy, whose original was restored
        inner.loss_function = patch.plain
    plain = inner.loss_function
    if head is None or getattr(plain, "__name__", "") != "ForCausalLMLoss":
        raise ValueError(
            f"{type(inner).__name__} has no head, or its loss is not ForCausalLMLoss: call "
            "anyrank.tiled_loss(head, hidden, labels) in a forward of your own"
        )
    patch = _HeadAndLoss(head, plain, chunk_size, grad_dtype)
    own = vars(inner).get("_loss_function")
    head.forward, inner.loss_function = patch.forward, patch.loss
    hooks = [
        inner.register_forward_pre_hook(patch.begin, with_kwargs=True),
        inner.register_forward_hook(patch.end, always_call=True),
    ]

    def undo() -> None:
        patch.switch.is_on = False  # for copies of the model
        for hook in hooks:
            hook.remove()
        vars(head).pop("forward", None)
        vars(inner).pop("_loss_function", None)
        if own is not None:
            inner.loss_function = own

    return MemoryHandle([name for name, part in inner.named_modules() if part is head], [undo])


class _Switch:
    """Whether the patch of a model, and of its copies, is in force."""

    is_on = True

    def __deepcopy__(self, memo: dict[int, Any]) -> _Switch:
        return self


class _HeadAndLoss:
    """A head that hands its input on, and the loss that applies it."""

    def __init__(
        self, head: Any, plain: Callable[..., Any], chunk_size: int, grad_dtype: torch.dtype | None
    ) -> None:
        self.head, self.plain = head, plain
        self.chunk_size, self.grad_dtype = chunk_size, grad_dtype
        self.handed: torch.Tensor | None = None
        self.is_real = False  # whether the head computes logits
        self.has_labels = False  # whether the model runs, and will ask for its loss
        self.switch = _Switch()

    def begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the model's forward."""
        if not self.switch.is_on:
            return
        if model.get_output_embeddings() is not self.head:
            raise ValueError(
                "the model's head was replaced after tiled_loss(), as by get_peft_model() with it "
                "among the targets: call tiled_loss() after that"
            )
        given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        self.has_labels = {**given, **given.get("kwargs", {})}.get("labels") is not None

    def end(self, *_: Any) -> None:
        """After it, also where it raised."""
        self.has_labels = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.is_real or not self.has_labels or not torch.is_grad_enabled():
            return type(self.head).forward(self.head, hidden)
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
        shift_labels = shift_labels.to(handed.device)
        options: dict[str, Any] = {"chunk_size": self.chunk_size, "grad_dtype": self.grad_dtype}
        options |= {"count": num_items_in_batch, "ignore_index": ignore_index}
        if type(self.head) is nn.Linear and not _is_hooked(self.head):
            # The same parameters in a module whose forward is its own: computed in one pass.
            twin = copy.copy(self.head)
            del twin.__dict__["forward"]
            return anyrank.tiled_loss(twin, handed, shift_labels, **options)

        def token_losses(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            self.is_real = True
            try:
                scores = self.head(hidden).float()
            finally:
                self.is_real = False
            return F.cross_entropy(scores, targets, reduction="none", ignore_index=ignore_index)

        return anyrank.tiled_loss(token_losses, handed, shift_labels, **options)


def _is_hooked(module: nn.Module) -> bool:
    """Whether a module's call does more than its forward, as a unit of FSDP2's."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(vars(module)[name] for name in names)
