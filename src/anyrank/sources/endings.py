"""Names of weight files: which ending belongs to which format."""

from __future__ import annotations

import os
import re

# Files of Meta's own releases: each holds one tensor-parallel rank's part.
META_PART = re.compile(r"consolidated\.\d+\.pth$")
OF_META = (
    "one rank's part of a tensor parallel model, as Meta releases them, and the parts do not say "
    "how they were cut: give the Hugging Face folder of the model, or convert it by transformers' "
    "convert_llama_weights_to_hf.py"
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
    """The name of a file's format, from the ending of its name; None for an unknown ending."""
    return FILES.get(os.path.splitext(path)[1].lower())
