"""TRL's SFTTrainer with `elastic`; tried with TRL 1.16, where it is installed."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.test_trainer import Log, arguments, model

import anyrank
from anyrank.testing import run_ranks

pytest.importorskip("trl", reason="TRL is not here: its SFTTrainer was not tried")

ROWS, GLOBAL, STEPS = 46, 12, 6


def job_sft(out: str, stop: int | None = None, kind: str = "ddp") -> tuple[list[Any], Any]:
    """Train on this rank. Returns what it logged, and the resume report."""
    import transformers
    from accelerate.state import AcceleratorState
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    from anyrank.integrations.transformers import elastic

    trl: Any = import_module("trl")
    AcceleratorState._reset_state(True)
    transformers.logging.set_verbosity_error()
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(64)}, unk_token="w0"))  # noqa: S106
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="w1",  # noqa: S106
        eos_token="w2",  # noqa: S106
    )
    rows: list[dict[str, Any]] = []
    for index in range(ROWS):
        numbers = torch.Generator().manual_seed(index)
        ids = torch.randint(3, 64, (6 + index % 7,), generator=numbers).tolist()
        rows.append({"input_ids": ids, "completion_mask": [0] * 2 + [1] * (len(ids) - 2)})
    plain = arguments(out).to_dict()
    same = ("per_device_train_batch_size", "save_strategy", "logging_steps", "use_cpu", "seed")
    same += ("learning_rate", "warmup_steps", "disable_tqdm", "optim", "ddp_backend")
    config = trl.SFTConfig(
        out, **{name: plain[name] for name in same}, max_steps=STEPS, report_to=[], bf16=False,
        gradient_checkpointing=False, dataset_num_proc=None, max_length=32,
    )  # fmt: skip
    log = Log(stop)
    trainer = trl.SFTTrainer(
        model(kind),
        config,
        train_dataset=import_module("datasets").Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[log],
    )
    trainer = elastic(trainer, f"{out}/run", global_batch=GLOBAL)
    trainer.train(resume_from_checkpoint=True)
    assert isinstance(trainer, trl.SFTTrainer)
    return log.lines, trainer.elastic.report


@pytest.mark.parametrize("kind", ["ddp", "lora"])
def test_saved_on_3_resumed_on_2_as_on_one_rank(tmp_path: Path, kind: str) -> None:
    ((whole, _),) = run_ranks(1, job_sft, str(tmp_path / "one"), None, kind)
    lines: list[Any] = []
    for ranks, stop in ((3, 3), (2, None)):
        results = run_ranks(ranks, job_sft, str(tmp_path / "many"), stop, kind)
        lines += results[0][0]
    assert [line[0] for line in lines] == [line[0] for line in whole] == [1, 2, 3, 4, 5, 6]
    for ours, theirs in zip(lines, whole, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert isinstance(results[0][1], anyrank.ResumeReport)
