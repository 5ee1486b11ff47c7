"""Names of the parts of a checkpoint that hold weights, and of those that do not."""

from __future__ import annotations

import re

# Names under which training scripts store the weights in a checkpoint of several parts.
NESTED = ("state_dict", "model_state_dict", "model", "module", "net", "params", "weights")
# Names under which scripts and training tools store other parts; several of a kind are numbered.
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
    """Return whether the name of a table or file says that it holds an average of weights."""
    return AVERAGE.search(name) is not None


def is_other_part(key: str) -> bool:
    """Return whether a key of a checkpoint belongs, by its name, to a part without weights."""
    return re.sub(r"_\d+$", "", key.partition(".")[0]) in OTHERS
