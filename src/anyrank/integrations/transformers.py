"""anyrank inside the transformers Trainer, and its memory tools in transformers models.

Tested with transformers 5.23.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

from transformers import Trainer

import anyrank
from anyrank.integrations.trainer_checks import check_trainer
from anyrank.integrations.trainer_loop import ElasticTrainer
from anyrank.integrations.trainer_run import Asked, ElasticRun, Training
from anyrank.integrations.transformers_loss import tiled_loss
from anyrank.integrations.transformers_memory import enable_recompute, tile_mlps
from anyrank.versions import warn_if_untested

__all__ = ["ElasticRun", "elastic", "enable_recompute", "tile_mlps", "tiled_loss"]

T = TypeVar("T", bound=Trainer)

warn_if_untested("transformers", "5.23", "5.23")


def elastic(
    trainer: T,
    folder: str | os.PathLike[str],
    *,
    global_batch: int,
    exact: bool = False,
    every: int | str | None = None,
    keep: int = 3,
    keep_every: int | None = None,
    background: bool = False,
    verify: bool = True,
    on_commit: Callable[[Any], object] | None = None,
    base: str | os.PathLike[str] | Sequence[str] | None = None,
    **parts: Any,
) -> T:
    """Make a Trainer's run independent of the number of ranks, and saved in a folder of its own.

    Call it on every rank, before `train()`. The trainer's class becomes a subclass of the same
    name, so that any subclass of Trainer keeps its own methods. One step is `global_batch` samples
    on any number of ranks, in microbatches of `per_device_train_batch_size`; losses are weighted by
    their tokens where the Trainer counts tokens, else by samples. Where the Trainer would write
    `checkpoint-N` the run is saved in `folder`, with model, optimizer, scheduler, scaler, position
    in the data, random streams, and the Trainer's own counts, logs and callbacks' states.

    `train(resume_from_checkpoint=True)` continues the newest step, and starts anew in an empty
    folder; the path of a saved step continues that one. `train()` only starts new runs.

    Args:
        trainer: made as usual, with gradient_accumulation_steps=1.
        folder: of the run, as in `Checkpoints`; also a URL.
        global_batch: samples of an optimizer step, a multiple of per_device_train_batch_size.
        exact: the same bits on any number of ranks, as `ElasticLoader(exact=True)` gives them.
        every: also save every so many steps (500) or after a time ("10min"); besides what
            save_strategy and save_steps ask for.
        keep: how many of the newest steps stay, at least 2. No more than save_total_limit.
        keep_every: steps that are multiples of it stay for good.
        background: hold the training only for a copy.
        verify: what a resume compares, as in `Checkpoints`.
        on_commit: called on the first rank with each `SaveRecord`.
        base: where the frozen weights under adapters come from; the run is saved without them, see
            `TrainState`.
        parts: further parts of the run, as in `TrainState`: `ema=averaged_model`.

    Returns:
        The same trainer. Its attribute `elastic`, an `ElasticRun`, has the run's loader,
        checkpoints and resume report.

    Raises:
        TypeError: no Trainer; training data without a length; sizes that are not ints.
        ValueError: an option of the Trainer that cannot hold on any number of ranks, or would do
            the same a second time; names it, and what to do.

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
    options: dict[str, Any] = {
        "every": every,
        "keep": keep,
        "keep_every": keep_every,
        "background": background,
        "verify": verify,
        "on_commit": on_commit,
    }
    check_trainer(trainer, keep, parts)
    microbatch = trainer.args.per_device_train_batch_size
    # Both raise what is wrong with the sizes, the ranks and the options.
    anyrank.ElasticSampler(1, global_batch=global_batch, microbatch=microbatch)
    anyrank.Checkpoints(folder, anyrank.TrainState(), **options)
    asked = Asked(global_batch, exact, options, {"base": base, **parts})

    def stays(step: int) -> bool:
        return step in asked.best or (keep_every is not None and step % keep_every == 0)

    if trainer.args.load_best_model_at_end:
        options["keep_every"] = stays
    trainer.__class__ = _elastic_class(type(trainer))  # pyright: ignore[reportAttributeAccessIssue]
    run = ElasticRun(os.fspath(folder))
    vars(trainer).update(elastic=run, _elastic_asked=asked, _elastic_training=Training(None))
    return trainer


@cache
def _elastic_class(plain: type[Trainer]) -> type[Trainer]:
    """The subclass for a class of trainers, of the same name."""
    body = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(plain.__name__, (ElasticTrainer, plain), body)
