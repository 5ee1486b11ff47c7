"""The names of frameworks that the integrations override or that are private, as they were tested.

A name that another version lacks would be overridden, or set, to no effect. At import each is
looked for; docs/design.md says what they are for.
"""

from __future__ import annotations

import inspect
import re
from importlib.metadata import version

from anyrank.versions import warn_if_untested

TESTED = {
    "accelerate": "1.15",
    "lightning": "2.6",
    "pytorch_lightning": "2.6",
    "transformers": "5.23",
}

_LIGHTNING = {
    "Callback": (
        "setup on_fit_start on_train_start on_train_epoch_end on_train_end on_exception teardown"
    ),
    "LightningModule": "_on_before_batch_transfer clip_gradients",
    "Strategy": "training_step batch_to_device backward",
    "Trainer": "_results",
    "_AutomaticOptimization": "_on_before_zero_grad _optimizer_zero_grad",
    "_FitLoop": "_data_fetcher _data_source _skip_backward",
    "_Loop": "_restarting",
    "_TrainingEpochLoop": "_batches_that_stepped",
}

# Package -> class -> its names.
NAMES: dict[str, dict[str, str]] = {
    "accelerate": {
        "Accelerator": (
            "_custom_objects _optimizers _schedulers accumulate backward clip_grad_norm_ "
            "clip_grad_value_ end_training free_memory load_state prepare prepare_data_loader "
            "prepare_model prepare_optimizer prepare_scheduler save_state skip_first_batches "
            "unscale_gradients"
        )
    },
    "lightning": _LIGHTNING,
    "pytorch_lightning": _LIGHTNING,
    "transformers": {
        "PreTrainedModel": "_set_gradient_checkpointing loss_function",
        "Trainer": (
            "_clip_grad_norm _determine_best_metric _get_num_items_in_batch _init_training_state "
            "_load_best_model _maybe_log_save_evaluate _prepare_for_training _run_epoch "
            "_save_checkpoint _track_num_input_tokens compute_loss floating_point_ops "
            "get_batch_samples get_total_train_batch_size get_train_dataloader num_examples train "
            "training_step"
        ),
    },
}


def check_names(package: str, *owners: type) -> None:
    """Look for the names of a framework's classes; warn of an untested version.

    Args:
        package: of TESTED.
        owners: the classes that the table has for it.

    Raises:
        ImportError: a name is gone; says which.
    """
    warn_if_untested(package, TESTED[package], TESTED[package])
    for owner in owners:
        for name in NAMES[package][owner.__name__].split():
            if not (hasattr(owner, name) or _sets(owner, name)):
                raise ImportError(
                    f"{package} {version(package)}: {owner.__name__} has no {name}, and anyrank "
                    f"relies on it: install {package}=={TESTED[package]}.*, or an anyrank that was "
                    "tested with yours"
                )


def _sets(owner: type, name: str) -> bool:
    """Whether a class's constructor gives its objects an attribute."""
    text = inspect.getsource(owner.__init__)  # type: ignore[misc]
    return re.search(rf"self\.{name}\b.* = ", text) is not None
