"""Recognizes the format of a folder by the names of its entries.

A new format of folders needs a row of FOLDERS here, and one of LISTERS in `sources/source.py`;
another tool's run needs a row of FOLDERS here, and one of TOOLS in `sources/foreign/read.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from anyrank.files.manifest import MANIFEST, STEP
from anyrank.sources.endings import ENDINGS
from anyrank.sources.run_step import ASIDE, METADATA

# Writer of folders -> rows of patterns. A folder is of a kind if, for one of its rows, every
# pattern matches an entry. Kinds are tried in this order, and the empty row of WEIGHTS matches
# every folder.
RUN, DCP, WEIGHTS = "anyrank", "dcp", "weights"
FOLDERS: dict[str, tuple[tuple[str, ...], ...]] = {
    RUN: ((re.escape(MANIFEST),), (STEP.pattern,), (re.escape(ASIDE) + ".*",)),
    "trainer": ((r"trainer_state\.json",),),
    "accelerate": ((r"random_states_\d+\.pkl",), (r"pytorch_model_fsdp(_\d+)?(\.bin)?",)),
    "deepspeed": (
        (r"(bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt",),
        (r"(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt",),
        ("latest", "global_step.*"),
    ),
    "verl": ((r"model_world_size_\d+_rank_\d+\.pt",),),
    "torch_checkpointing": ((r"model_0\.pt",), (r"metadata\.pkl", r"\w+?_\d+\.pt")),
    "megatron": ((re.escape(METADATA), r"common\.pt"),),
    DCP: ((re.escape(METADATA),),),
    WEIGHTS: ((),),
}


def looks_like(name: str, names: Sequence[str]) -> bool:
    """Return whether a folder with these entries has the format with this name in FOLDERS."""
    return any(
        all(any(re.fullmatch(pattern, entry) for entry in names) for pattern in row)
        for row in FOLDERS[name]
    )


def format_of_folder(names: Sequence[str]) -> str:
    """Return the name in FOLDERS of the format of a folder with these entries."""
    return next(name for name in FOLDERS if looks_like(name, names))


def is_foreign_checkpoint(names: Sequence[str]) -> bool:
    """Return whether a folder with these entries is a checkpoint that no run of anyrank wrote.

    Folders of DCP are, even if `convert` wrote them.
    """
    return format_of_folder(names) not in (RUN, WEIGHTS)


def checkpoint_among(names: Sequence[str]) -> str | None:
    """Return the kind of checkpoint in a folder with these entries, by names only, or None."""
    if METADATA in names or any(name.endswith(".distcp") for name in names):
        return "a torch.distributed.checkpoint folder"
    return next((name for name in sorted(names) if name.lower().endswith(ENDINGS)), None)
