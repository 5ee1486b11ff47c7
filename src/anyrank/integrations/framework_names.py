"""The private or overridden names of frameworks that the integrations use, in tested versions.

Such a name may have a different meaning in a different version. At import, each is compared with
this table; docs/dev/private-names.md says what they are for.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import version

from anyrank.versions import TESTED, warn_if_untested

_HOOK = "self, trainer, pl_module"
_LIGHTNING: dict[str, dict[str, str | None]] = {
    "Callback": {
        "setup": f"{_HOOK}, stage",
        "on_fit_start": _HOOK,
        "on_train_start": _HOOK,
        "on_train_epoch_end": _HOOK,
        "on_train_end": _HOOK,
        "on_exception": f"{_HOOK}, exception",
        "teardown": f"{_HOOK}, stage",
    },
    "LightningModule": {
        "_on_before_batch_transfer": "self, batch, dataloader_idx",
        "clip_gradients": "self, optimizer, gradient_clip_val, gradient_clip_algorithm",
    },
    "strategies.Strategy": {
        "training_step": "self, *args, **kwargs",
        "batch_to_device": "self, batch, device, dataloader_idx",
        "backward": "self, closure_loss, optimizer, *args, **kwargs",
    },
    "Trainer": {"_results": None},
    "loops.optimization.automatic._AutomaticOptimization": {
        "_on_before_zero_grad": "self, optimizer",
        "_optimizer_zero_grad": "self, batch_idx, optimizer",
    },
    "loops._FitLoop": {"_data_fetcher": None, "_data_source": None, "_skip_backward": None},
    "loops._Loop": {"_restarting": None},
    "loops._TrainingEpochLoop": {"_batches_that_stepped": None},
    "trainer.connectors.data_connector._DataLoaderSource": {"dataloader": "self"},
}

# Package -> class, as in its package -> name -> its parameters; None if it is an attribute.
NAMES: dict[str, dict[str, dict[str, str | None]]] = {
    "accelerate": {
        "Accelerator": {
            "_custom_objects": None,
            "_optimizers": None,
            "_schedulers": None,
            "accumulate": "self, *models",
            "backward": "self, loss, **kwargs",
            "clip_grad_norm_": "self, parameters, max_norm, norm_type",
            "clip_grad_value_": "self, parameters, clip_value",
            "end_training": "self",
            "free_memory": "self, *objects",
            "load_state": "self, input_dir, load_kwargs, **load_model_func_kwargs",
            "prepare": "self, *args, device_placement",
            "prepare_data_loader": "self, data_loader, device_placement, slice_fn_for_dispatch",
            "prepare_model": "self, model, device_placement, evaluation_mode",
            "prepare_optimizer": "self, optimizer, device_placement",
            "prepare_scheduler": "self, scheduler",
            "save_state": "self, output_dir, safe_serialization, **save_model_func_kwargs",
            "skip_first_batches": "self, dataloader, num_batches",
            "unscale_gradients": "self, optimizer",
        },
        "scheduler.AcceleratedScheduler": {
            "split_batches": None,
            "step": "self, *args, **kwargs",
        },
    },
    "lightning": _LIGHTNING,
    "pytorch_lightning": _LIGHTNING,
    "transformers": {
        "PreTrainedModel": {
            "_set_gradient_checkpointing": (
                "self, enable, gradient_checkpointing_func, every_n_layers"
            ),
            "loss_function": None,
        },
        "trainer_callback.ExportableState": {},
        "Trainer": {
            "_clip_grad_norm": "self, model",
            "_determine_best_metric": "self, metrics, trial",
            "_get_num_items_in_batch": "self, batch_samples, device",
            "_init_training_state": (
                "self, max_steps, num_update_steps_per_epoch, num_train_epochs, "
                "resume_from_checkpoint, trial"
            ),
            "_load_best_model": "self",
            "_maybe_log_save_evaluate": (
                "self, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, "
                "learning_rate"
            ),
            "_prepare_for_training": "self, max_steps, train_dataloader, resume_from_checkpoint",
            "_run_epoch": (
                "self, model, epoch, train_dataloader, steps_in_epoch, num_update_steps_per_epoch, "
                "trial, ignore_keys_for_eval, start_time, resume_from_checkpoint, epochs_trained, "
                "steps_trained_in_current_epoch"
            ),
            "_save_checkpoint": "self, model, trial",
            "_track_num_input_tokens": "self, inputs",
            "compute_loss": "self, model, inputs, return_outputs, num_items_in_batch",
            "floating_point_ops": "self, inputs",
            "get_batch_samples": "self, epoch_iterator, num_batches, device",
            "get_total_train_batch_size": "self, args",
            "get_train_dataloader": "self",
            "num_examples": "self, dataloader",
            "train": "self, resume_from_checkpoint, trial, ignore_keys_for_eval",
            "training_step": "self, model, inputs, num_items_in_batch",
        },
    },
}


def check_names(package: str, root: str = "") -> None:
    """Compare a framework's classes with the table; warn if the version is untested.

    Args:
        package: a key of NAMES.
        root: the module to which the table's classes are relative; default: the package's.

    Raises:
        ImportError: a name no longer exists, or has different parameters; the message names it.
    """
    warn_if_untested(package)
    for path, names in NAMES[package].items():
        for problem in _differences(f"{root or package}.{path}", names):
            raise ImportError(
                f"{package} {version(package)} does not match what anyrank needs: {problem}. "
                f"Install {package}=={TESTED[package]}.*, or an anyrank version that supports "
                f"{version(package)}"
            )


def _differences(path: str, names: Mapping[str, str | None]) -> Iterator[str]:
    """Describe how a class differs from the table."""
    module, _, class_name = path.rpartition(".")
    try:
        owner = getattr(import_module(module), class_name)
    except (AttributeError, ModuleNotFoundError):
        yield f"{path} does not exist"
        return
    for name, tested in names.items():
        method = getattr(owner, name, None)
        if tested is None:
            constructor = inspect.getsource(owner.__init__)
            is_set = re.search(rf"self\.{name}\b.* = ", constructor)
            if not (is_set or hasattr(owner, name)):
                yield f"{owner.__name__} has no {name}"
        elif not callable(method):
            yield f"{owner.__name__} has no method {name}({tested})"
        elif parameters(method) != tested:
            yield (
                f"{owner.__name__}.{name} has the parameters ({parameters(method)}), not ({tested})"
            )


def parameters(function: object) -> str:
    """Return the names of a function's parameters, with the stars of `*args` and `**kwargs`."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    signature = inspect.signature(function)  # type: ignore[arg-type]
    return ", ".join(stars.get(p.kind, "") + p.name for p in signature.parameters.values())
