"""Imports all that any contender needs, so that no measured time holds an import."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib

import contenders
import safetensors.torch
import torch._dynamo
import torch.distributed.checkpoint.hf_storage
import torch.distributed.checkpoint.quantized_hf_storage
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor
import transformers.models.llama.modeling_llama

import anyrank

OPTIONAL = ("accelerate.utils.fsdp_utils", "transformers.distributed", "peft")
OPTIONAL += ("accelerate", "torch_checkpointing")
for name in OPTIONAL:
    with contextlib.suppress(ImportError):  # what needs it is left out
        importlib.import_module(name)
transformers.utils.logging.disable_progress_bar()

MODULES = [safetensors, torch, transformers, contenders]
NAMES = [getattr(anyrank, name) for name in anyrank.__all__]

gc.collect()
gc.freeze()  # what was imported is no garbage: a collection in a rank need not look at it
ctypes.CDLL(None).malloc_trim(0)
