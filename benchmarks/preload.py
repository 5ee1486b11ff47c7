"""Imports all that any contender needs, so that no measured time holds an import."""

from __future__ import annotations

import ctypes
import gc

import accelerate.utils.fsdp_utils
import safetensors.torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.checkpoint.hf_storage
import torch.distributed.checkpoint.quantized_hf_storage
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor
import transformers.integrations
import transformers.models.llama.modeling_llama
import xxhash

import anyrank
import contenders

MODULES = [accelerate, safetensors, torch, transformers, xxhash, contenders]
NAMES = [getattr(anyrank, name) for name in anyrank.__all__]

gc.collect()
gc.freeze()  # what was imported is no garbage: a collection in a rank need not look at it
ctypes.CDLL(None).malloc_trim(0)
