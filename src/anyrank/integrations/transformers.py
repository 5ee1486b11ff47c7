"""anyrank inside the transformers Trainer, and its memory tools in transformers models.

Tested with transformers 5.23.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import anyrank
from anyrank.integrations.run import RunOptions
from anyrank.integrations.trainer_checks import check_trainer
from anyrank.integrations.trainer_loop import ElasticRun, ElasticTrainer, Training
from anyrank.integrations.transformers_memory import enable_recompute, tile_mlps, tiled_loss

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["ElasticRun", "elastic", "enable_recompute", "tile_mlps", "tiled_loss"]

T = TypeVar("T", bound="Trainer")


def elastic(
    trainer: T,
    folder: str | os.PathLike[str],
    *,
    global_batch: int,
    base: str | os.PathLike[str] | Sequence[str] | None = None,
    **options: Any,
) -> T:
    """Make a Trainer's run independent of the number of ranks, and save it in its own folder.

    Collective: every rank must call it, before `train()`. The returned trainer is of a subclass
    with the same name, so that any subclass of Trainer keeps its own methods. It takes over
    `trainer`: both objects share their attributes, and calling `train()` on either trains the run.

    In place of the Trainer's `checkpoint-N`, the run is saved in `folder`. The page on transformers
    in the documentation says what is saved, and how losses are weighted.

    `train(resume_from_checkpoint=True)` continues the newest step, and starts a new run in an empty
    folder. The path of a saved step continues that step. The path of a checkpoint that the Trainer
    or another tool saved starts the run from it. `train()` starts only new runs.

    Args:
        trainer: made as usual, with gradient_accumulation_steps=1.
        folder: path or URL of the run, as in `Checkpoints`.
        global_batch: samples of an optimizer step, a multiple of per_device_train_batch_size.
        base: where the frozen weights under adapters come from; the run is saved without them, see
            `TrainState`.
        options: options of the run, such as `every="10min"`, which
            `anyrank.integrations.run.RunOptions` lists (microbatch and seed come from
            TrainingArguments). All other names are additional parts of the run, as in
            `TrainState`: `ema=averaged_model`. `every` saves in addition to save_strategy and
            save_steps; `keep` must not exceed save_total_limit.

    Returns:
        The elastic trainer. Its attribute `elastic`, an `ElasticRun`, has the run's loader,
        checkpoints and resume report.

    Raises:
        TypeError: not a Trainer; training data without a length; sizes that are not ints.
        ValueError: a Trainer option whose effect depends on the number of ranks, or that anyrank
            already provides; the message names it and the way out.

    Example::

        from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

        sizes = dict(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
        model = BertForMaskedLM(BertConfig(intermediate_size=8, **sizes))
        rows = [{"input_ids": [1, n % 8], "labels": [1, n % 8]} for n in range(8)]
        args = TrainingArguments("out", use_cpu=True, per_device_train_batch_size=2, max_steps=2)
        trainer = Trainer(model, args, train_dataset=rows)
        trainer = anyrank.integrations.transformers.elastic(trainer, "runs/a", global_batch=4)
        trainer.train(resume_from_checkpoint=True)
        assert trainer.elastic.loader.samples == 8
    """
    names = RunOptions.__annotations__.keys() - {"microbatch", "seed"}
    parts = {name: value for name, value in options.items() if name not in names}
    options = {name: value for name, value in options.items() if name in names}
    check_trainer(trainer, options.get("keep", 3), options.get("transform"), parts)
    args = trainer.args
    keep_every: Any = options.get("keep_every")
    # Raises for wrong sizes and ranks.
    anyrank.ElasticLoader(
        range(1), global_batch=global_batch, microbatch=args.per_device_train_batch_size
    )
    training = Training(global_batch, {"base": base, **parts})

    def stays(step: int) -> bool:
        if callable(keep_every):
            return step in training.best or bool(keep_every(step))
        return step in training.best or (keep_every is not None and step % keep_every == 0)

    if args.load_best_model_at_end:
        options["keep_every"] = stays
    elastic_trainer: Any = object.__new__(_elastic_class(type(trainer)))
    elastic_trainer.__dict__ = vars(trainer)  # shared with everything that holds `trainer`
    elastic_trainer.elastic = ElasticRun(
        folder,
        elastic_trainer._elastic_state,
        global_batch=global_batch,
        say=trainer.accelerator.print,
        microbatch=args.per_device_train_batch_size,
        seed=args.seed if args.data_seed is None else args.data_seed,
        **options,
    )
    elastic_trainer._elastic = training
    # Bound to the elastic trainer, for calls on `trainer` too.
    elastic_trainer.train = elastic_trainer.train
    return elastic_trainer


@cache
def _elastic_class(plain: type[Trainer]) -> type[Trainer]:
    """Return the elastic subclass, of the same name, of a class of trainers."""
    body = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(plain.__name__, (ElasticTrainer, plain), body)
