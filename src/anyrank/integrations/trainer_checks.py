"""Check options of a Trainer whose effect depends on the number of ranks, or that anyrank has."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import transformers
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from transformers.trainer_utils import get_last_checkpoint

import anyrank
from anyrank.integrations.dataloaders import has_shards
from anyrank.integrations.framework_names import check_names

check_names("transformers")  # this module is imported before those that subclass its classes

PART_NAMES = ("model", "optimizer", "scheduler", "scaler", "data", "trainer", "generators")
OF_ARGUMENTS = {"microbatch": "per_device_train_batch_size", "seed": "data_seed or seed"}


def check_trainer(trainer: Any, keep: int, transform: Any, parts: Mapping[str, Any]) -> None:
    """Check that no option would silently go wrong.

    Args:
        trainer: the argument of the user.
        keep: the number of saved steps that are retained.
        transform: transform of the data, or None.
        parts: the user's own parts of the run.

    Raises:
        TypeError: not a Trainer; training data without a length.
        ValueError: an option that is not supported; names it and the way out.
    """
    if not isinstance(trainer, transformers.Trainer):
        raise TypeError(f"trainer=: expected a transformers Trainer, got {type(trainer).__name__}")
    if hasattr(trainer, "elastic"):
        raise ValueError("this trainer is already elastic. Call elastic() only once")
    data = trainer.train_dataset
    is_stream = isinstance(data, IterableDataset) or not hasattr(data, "__len__")
    if data is not None and is_stream and not has_shards(data):
        raise TypeError(
            f"train_dataset is a {type(data).__name__}, a stream, whose order cannot be planned. "
            "Pass a map-style dataset (len() and dataset[i]), or a stream with num_shards and "
            "shard(num_shards=, index=), such as a Hugging Face IterableDataset"
        )
    names_in_use = sorted(set(parts) & set(PART_NAMES))
    for name in OF_ARGUMENTS.keys() & parts.keys():
        raise ValueError(
            f"{name}= comes from TrainingArguments. Set {OF_ARGUMENTS[name]} there instead"
        )
    if names_in_use:
        raise ValueError(f"the run already has a part {names_in_use[0]!r}. Choose a different name")
    problems = [*_of_arguments(trainer.args, keep), *_of_parallelism(trainer)]
    collator = trainer.data_collator
    # With a tokenizer it pads rows, and adds a mask that hides position_ids from the model.
    if isinstance(transform, anyrank.Pack) and getattr(collator, "tokenizer", None) is not None:
        problems.append(
            f"{type(collator).__name__} adds an attention_mask to the rows that Pack fills, with "
            "which the documents of a row see each other. Pass "
            "data_collator=transformers.default_data_collator to the Trainer (without one, it "
            "uses the tokenizer of processing_class=)"
        )
    for problem in problems:
        raise ValueError(problem)


def _of_arguments(args: Any, keep: int) -> Iterator[str]:
    """Yield the problems of the TrainingArguments."""
    if args.gradient_accumulation_steps != 1:
        yield (
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}: must be 1, because "
            "global_batch determines how many microbatches a rank accumulates"
        )
    if args.auto_find_batch_size:
        yield (
            "auto_find_batch_size would change the microbatch, on which random numbers depend. "
            "Remove it, and set per_device_train_batch_size to a size that fits into memory"
        )
    if args.save_total_limit is not None and args.save_total_limit < keep:
        yield (
            f"save_total_limit={args.save_total_limit} is below keep={keep}, the number of saved "
            "steps that the run retains to survive a corrupt one. Remove save_total_limit, or "
            "lower keep= of elastic() (at least 2)"
        )
    if args.save_only_model:
        yield (
            "save_only_model writes no optimizer, but a run always saves it. Remove "
            "save_only_model; for a model that is sharded while it is loaded, set "
            "save_strategy='no' and elastic(every=...)"
        )
    if args.load_best_model_at_end and str(args.eval_strategy.value) == "no":
        yield (
            "load_best_model_at_end needs an evaluation to find the best step. Set eval_strategy "
            "and save_strategy, or remove it"
        )
    if args.ignore_data_skip:
        yield "ignore_data_skip would train samples twice after a resume. Remove it"
    if getattr(args, "enable_jit_checkpoint", False):
        yield "enable_jit_checkpoint saves on SIGTERM, which the run already does. Remove it"
    if args.push_to_hub and args.hub_strategy != "end":
        yield (
            "hub_strategy pushes the Trainer's own checkpoints, which an elastic run does not "
            "write. Set hub_strategy='end'"
        )
    if args.train_sampling_strategy not in ("random", "sequential"):
        yield (
            f"train_sampling_strategy={args.train_sampling_strategy!r} orders the samples per "
            "rank. Use 'random' or 'sequential'"
        )


def _of_parallelism(trainer: Any) -> Iterator[str]:
    """Yield the problems of the Trainer's parallelism."""
    accelerator = trainer.accelerator
    if trainer.args.n_gpu > 1:
        yield (
            "several GPUs in one process (DataParallel) are not supported. Start one process per "
            "GPU with torchrun"
        )
    if accelerator.split_batches:
        yield (
            "split_batches (accelerator_config) divides a batch among the ranks a second time. "
            "Remove it; global_batch is the batch of all ranks together"
        )
    if trainer.is_deepspeed_enabled:
        yield "DeepSpeed is not supported: it owns the optimizer. Use DDP or FSDP2 (fsdp=True)"
    if trainer.is_fsdp_xla_enabled:
        yield "FSDP on XLA is not supported. Use DDP or FSDP2"
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    version = (trainer.args.fsdp_plugin_args or {}).get("fsdp_version", 2)
    if version != 2 or (plugin is not None and plugin.fsdp_version != 2):
        yield "FSDP1 is not supported. Use FSDP2: fsdp_config={'version': 2}"
    sizes = {
        "tensor": trainer.get_tp_size(),
        "context": trainer.get_cp_size(),
        "sequence": trainer.get_sp_size(),
    }
    wide = [name for name, size in sizes.items() if size > 1]
    if wide:
        yield (
            f"{wide[0]} parallelism is not supported by elastic(): several ranks would need the "
            "same samples. Use an ElasticLoader with process_group= in your own training loop"
        )


def check_recompute(model: Any, args: Any) -> None:
    """Check that only one of the Trainer and anyrank does activation checkpointing.

    Raises:
        ValueError: both do.
    """
    names = ("activation_checkpointing", "gradient_checkpointing")  # by version
    if not any(getattr(args, name, False) for name in names):
        return
    for module in model.modules():
        # Patched layers that transformers would recompute too; transformers keeps the function
        # that it received in an attribute.
        forward = vars(module).get("forward") if hasattr(module, "gradient_checkpointing") else None
        if getattr(forward, "kind", "") == "recompute_" or any(
            getattr(kept, "func", None) is anyrank.recompute for kept in vars(module).values()
        ):
            raise ValueError(
                "gradient_checkpointing of TrainingArguments would recompute again what "
                "enable_recompute() already recomputes. Remove it"
            )


def check_other_checkpoints(output_dir: str, folder: str) -> None:
    """Check that the Trainer itself has not saved, if a resume finds an empty run folder.

    Raises:
        ValueError: the output folder contains a checkpoint-N.
    """
    path = get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None
    if path is not None:
        raise ValueError(
            f"{path} is the Trainer's own checkpoint, and {folder} is empty. To start the run from "
            f"it, pass resume_from_checkpoint={path!r}; to start without it, call train()"
        )


def without_sharding(loader: Any) -> Any:
    """Return the Trainer's DataLoader without Accelerate's division of batches among the ranks.

    A DataLoader that a subclass did not prepare is returned unchanged.
    """
    stream: Any = loader.dataset  # inside the datasets that Accelerate wraps around it
    while not has_shards(stream) and isinstance(stream, IterableDataset):
        stream = getattr(stream, "dataset", None)
    batches: Any = getattr(loader, "batch_sampler", None)
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    sampler = getattr(batches, "sampler", None)
    if has_shards(stream):
        return DataLoader(
            stream,
            batch_size=1,  # the loader has its own microbatch
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )
    if sampler is None:
        return loader
    if isinstance(sampler, RandomSampler) and not sampler.replacement:
        sampler = RandomSampler(loader.dataset)  # Accelerate has a subclass with its own seeds
    return DataLoader(
        loader.dataset,
        batch_size=batches.batch_size,
        sampler=sampler,
        drop_last=batches.drop_last,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
