"""The names that the tensors of an adapter have in PEFT's folders."""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from torch import nn


def keys_in_folder(model: PeftModel, own: dict[str, Any], adapter: str) -> dict[str, str]:
    """Key in a PEFT folder -> name in the model, of what PEFT itself saves of an adapter.

    PEFT chooses among tensors without values, so that it gathers none.

    Raises:
        ValueError: it saves what it computes of them.
    """
    if model.peft_config[adapter].is_prompt_learning:
        return {"prompt_embeddings": _prompts(model, adapter)}
    outline = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in own.items()
        if isinstance(tensor, torch.Tensor)
    }
    names = {id(tensor): name for name, tensor in outline.items()}
    chosen = get_peft_model_state_dict(
        model, state_dict=outline, adapter_name=adapter, save_embedding_layers=False
    )
    computed = sorted(key for key, tensor in chosen.items() if id(tensor) not in names)
    if computed:
        raise ValueError(
            f"{adapter!r} is of {model.peft_config[adapter].peft_type}, of which PEFT saves "
            f"{computed[0]}, which is not a tensor of the model: save it with PEFT "
            "(save_pretrained), from a model that is whole"
        )
    return {key: names[id(chosen[key])] for key in sorted(chosen)}


def _prompts(model: PeftModel, adapter: str) -> str:
    """The name of a prompt method's one tensor.

    Raises:
        ValueError: it has several, of which PEFT saves what they give together.
    """
    encoder: nn.Module = model.prompt_encoder[adapter]
    names = [name for name, _ in encoder.named_parameters()]
    if names != ["embedding.weight"]:
        method = model.peft_config[adapter].peft_type
        raise ValueError(
            f"{adapter!r} is of {method}, of which PEFT saves what {', '.join(names)} give "
            "together: save it with PEFT (save_pretrained), from a model that is whole"
        )
    return f"prompt_encoder.{adapter}.embedding.weight"
