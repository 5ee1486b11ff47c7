"""File name endings of weight files, and the format of each."""

from __future__ import annotations

import os
import re

# Files of Meta's releases: each holds the shard of one tensor-parallel rank.
META_PART = re.compile(r"consolidated\.\d+\.pth$")
OF_META = (
    "one shard of a tensor-parallel model in Meta's format, which does not record how the tensors "
    "were split. Pass the Hugging Face folder of the model, or convert it with "
    "convert_llama_weights_to_hf.py of transformers."
)
# Files of torch's HuggingFaceStorageWriter(save_distributed=True), one for each rank.
RANK_PART = re.compile(r"shard-\d+-.+-\d+-of-\d+\.safetensors$")
OF_RANK = (
    "one rank's part of a model, from torch's HuggingFaceStorageWriter(save_distributed=True). "
    "Read the parts with torch.distributed.checkpoint.load and its HuggingFaceStorageReader, and "
    "save the whole tensors; or save with enable_consolidation=True."
)
# In the order in which folders are searched for them: safetensors before pickles.
FILES = {
    ".safetensors": "safetensors",
    ".bin": "torch",
    ".pth": "torch",
    ".pt": "torch",
    ".ckpt": "torch",
}
ENDINGS = (*FILES, *(f"{ending}.index.json" for ending in FILES))


def format_of(path: str) -> str | None:
    """Return the name of a file's format, from its ending; None if the ending is unknown."""
    return FILES.get(os.path.splitext(path)[1].lower())
