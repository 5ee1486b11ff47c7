"""The last that the server of fresh ranks imports: a clock that runs later meets no import."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib

import transformers

import anyrank

OPTIONAL = ("accelerate.utils.fsdp_utils", "accelerate", "peft", "torch_checkpointing")
for name in ("transformers.models.llama.modeling_llama", *OPTIONAL):
    with contextlib.suppress(ImportError):  # what needs it is left out
        importlib.import_module(name)
transformers.utils.logging.disable_progress_bar()
NAMES = [getattr(anyrank, name) for name in anyrank.__all__]

gc.collect()
gc.freeze()  # what was imported is no garbage: a collection in a rank need not look at it
ctypes.CDLL(None).malloc_trim(0)
