"""Names of a checkpoint's parts: which of them hold weights, and which do not."""

from __future__ import annotations

import re

# Names under which training scripts keep the weights in a checkpoint of several parts.
NESTED = ("state_dict", "model_state_dict", "model", "module", "net", "params", "weights")
# Names under which they and training tools keep other things; several of a kind are numbered.
OTHERS = frozenset(
    {
        *("optimizer", "optimizers", "optim", "optimizer_state_dict", "optimizer_states"),
        *("lr_scheduler", "lr_schedulers", "scheduler", "dataloader", "train_state", "rng_state"),
        *("rng", "rng_states", "scaler", "callbacks", "loops", "hyper_parameters"),
    }
)


# Words in the names of averages of the weights.
AVERAGE = re.compile(r"(?:^|[_.-])(?:ema|swa|avg|averaged?|shadow|teacher)(?:$|[_.-])", re.I)


def is_average(name: str) -> bool:
    """Return whether a name says that a table, or a file, holds an average of weights."""
    return AVERAGE.search(name) is not None


def is_other_part(key: str) -> bool:
    """Return whether a key of a checkpoint belongs to a part without weights, by its name."""
    return re.sub(r"_\d+$", "", key.partition(".")[0]) in OTHERS
