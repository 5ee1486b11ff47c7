"""The transformers Trainer with `elastic`: saved on 3, resumed on 2, then on 4, as on one rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from accelerate.state import AcceleratorState
from examples import trainer_resume
from peft import PeftModel
from torch.utils.data import Dataset, Subset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

import anyrank
from anyrank.integrations.transformers import elastic, enable_recompute
from anyrank.testing import RanksFailed, run_ranks

ROWS, GLOBAL, EPOCH = 46, 12, 4  # samples, of a step; steps of an epoch, the last one short


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows with labels on some of their tokens; remembers which were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        ids = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: 12 if index == 5 else index % 7] = -100
        return {"input_ids": ids, "labels": labels}


class Log(TrainerCallback):
    """What the Trainer logs; stops it at a step, or kills it at a negative one."""

    def __init__(self, stop: int | None) -> None:
        self.lines: list[tuple[Any, ...]] = []
        self.stop = stop

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            lr = logs["learning_rate"]
            line = (state.global_step, logs["epoch"], logs["loss"], lr, logs["grad_norm"])
            self.lines.append(line)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.stop is not None and state.global_step == -self.stop:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.global_step == self.stop:
            control.should_training_stop = True


def model(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_dropout=0.1,
    )
    made: Any = transformers.Qwen2ForCausalLM(config)
    if "lora" in kind:
        from peft import LoraConfig, get_peft_model

        made = get_peft_model(made, LoraConfig(r=2, lora_dropout=0.1, target_modules="all-linear"))
    made = made.to(dtype)
    if "fsdp2" in kind:
        from torch.distributed.fsdp import fully_shard

        for layer in made.model.layers:
            fully_shard(layer)
        fully_shard(made)
    return made


def arguments(out: str, **more: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "max_steps": 9,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "learning_rate": 1e-3,
        "warmup_steps": 2,
        "disable_tqdm": True,
        "seed": 1,
        "optim": "adamw_torch",
        "ddp_backend": "gloo" if "RANK" in os.environ else None,
        "include_num_input_tokens_seen": True,
    }
    return TrainingArguments(out, **(given | more))


def job(
    out: str, kind: str = "ddp", stop: int | None = None, rows: int | None = None, **more: Any
) -> dict[str, Any]:
    """Train on this rank, on the first rows if their number is given. What it logged and read."""
    AcceleratorState._reset_state(True)
    transformers.logging.set_verbosity_error()
    if "gc" in kind:
        more |= {"activation_checkpointing": True}
        more |= {"activation_checkpointing_kwargs": {"use_reentrant": False}}
    data, log = Rows(), Log(stop)
    some: Any = data if rows is None else Subset(data, range(rows))
    trainer = Trainer(model(kind), arguments(out, **more), train_dataset=some, callbacks=[log])
    trainer = elastic(trainer, f"{out}/run", global_batch=GLOBAL, every=2)
    output = trainer.train(resume_from_checkpoint=True)
    report, loader, state = trainer.elastic.report, trainer.elastic.loader, trainer.state
    return {
        "lines": log.lines,
        "read": data.read,
        "step": state.global_step,
        "epoch": state.epoch,
        "tokens": state.num_input_tokens_seen,
        "train_loss": output.training_loss,
        "history": [line.get("loss") for line in state.log_history if "loss" in line],
        "components": None if report is None else report.components,
        "receipts": loader.receipts,
        "samples": loader.samples,
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """An uninterrupted run on one rank, for each kind of model."""
    return cache(lambda kind: run_ranks(1, job, str(tmp_path_factory.mktemp("one")), kind)[0])


def check(lines: list[Any], expected: list[Any]) -> None:
    for line, wanted in zip(lines, expected, strict=True):
        assert line == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("kind", ["ddp", "lora gc", "fsdp2"])
def test_saved_on_3_resumed_on_2_then_on_4_as_on_one_rank(
    tmp_path: Path, kind: str, whole: Callable[[str], dict[str, Any]]
) -> None:
    expected = whole(kind)
    lines: list[Any] = []
    for ranks, stop in ((3, 2), (2, 5), (4, None)):
        results = run_ranks(ranks, job, str(tmp_path), kind, stop=stop)
        assert all(result["lines"] == results[0]["lines"] for result in results)
        lines += results[0]["lines"]
    check(lines, expected["lines"])
    assert [line[0] for line in lines] == list(range(1, 10))
    for name in ("step", "epoch", "receipts", "samples"):
        assert results[0][name] == expected[name], name
    assert expected["tokens"] == 12 * expected["samples"]
    tokens = results[0]["tokens"]  # with microbatches that are run again with weight 0
    assert expected["tokens"] <= tokens < 1.5 * expected["tokens"]
    assert results[0]["history"] == pytest.approx(expected["history"], rel=1e-6)
    assert [epoch for epoch, *_ in expected["receipts"]] == [0, 1]
    assert expected["samples"] == 2 * ROWS + GLOBAL


def test_the_loss_of_steps_that_were_not_logged_is_that_of_all_ranks(tmp_path: Path) -> None:
    more = {"max_steps": 3, "logging_steps": 100}
    alone = run_ranks(1, job, str(tmp_path / "one"), **more)[0]["train_loss"]
    for result in run_ranks(2, job, str(tmp_path / "two"), **more):
        assert result["train_loss"] == pytest.approx(alone, rel=1e-6)


def exact(out: str, kind: str, stop: int | None = None) -> tuple[list[bytes], list[str]]:
    """The bytes of the weights after clipped steps, and the loader's notes."""
    AcceleratorState._reset_state(True)
    transformers.logging.set_verbosity_error()
    net = model(kind, torch.float32)
    kernel = "adamw_torch" if kind == "fsdp2" else "adamw_torch_fused"
    options = arguments(out, max_steps=4, max_grad_norm=0.1, optim=kernel)
    trainer = Trainer(net, options, train_dataset=Rows(), callbacks=[Log(stop)])
    trainer = elastic(trainer, f"{out}/run", global_batch=GLOBAL, exact=True)
    trainer.train(resume_from_checkpoint=True)
    tensors = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in net.parameters()]
    return [tensor.numpy().tobytes() for tensor in tensors], trainer.elastic.loader.notes


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.exact_fsdp)])
def test_exact_runs_have_the_same_bits_on_any_number_of_ranks(tmp_path: Path, kind: str) -> None:
    alone = run_ranks(1, exact, str(tmp_path / "one"), kind)
    for ranks, stop in ((3, 1), (2, 2)):
        run_ranks(ranks, exact, str(tmp_path / "many"), kind, stop)
    assert run_ranks(4, exact, str(tmp_path / "many"), kind) == alone * 4
    assert alone[0][1] == []


def test_killed_in_the_middle_and_resumed(
    tmp_path: Path, whole: Callable[[str], dict[str, Any]]
) -> None:
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_ranks(3, job, str(tmp_path), stop=-5)
    result = run_ranks(2, job, str(tmp_path))[0]
    check(result["lines"], whole("ddp")["lines"][4:])
    again = run_ranks(1, job, str(tmp_path))[0]
    assert (again["lines"], again["step"]) == ([], 9)  # nothing is left to train


def test_a_log_line_after_a_resume_is_of_the_steps_since_then(
    tmp_path: Path, whole: Callable[[str], dict[str, Any]]
) -> None:
    (expected,) = run_ranks(1, job, str(tmp_path / "one"), logging_steps=4)
    run_ranks(2, job, str(tmp_path / "many"), logging_steps=4, stop=3)
    result = run_ranks(1, job, str(tmp_path / "many"), logging_steps=4)[0]
    assert [line[0] for line in result["lines"]] == [4, 8]
    check(result["lines"], [whole("ddp")["lines"][3], expected["lines"][1]])


def trainer(out: Path, kind: type[Trainer] = Trainer, **more: Any) -> Any:
    AcceleratorState._reset_state(True)
    return kind(model("plain"), arguments(str(out), **more), train_dataset=Rows())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"gradient_accumulation_steps": 2},
            "gradient_accumulation_steps=2: must be 1, because global_batch",
        ),
        ({"auto_find_batch_size": True}, "would change the microbatch"),
        ({"save_total_limit": 2}, "save_total_limit=2 is below keep=3"),
        ({"save_only_model": True}, "writes no optimizer"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "no"},
            "load_best_model_at_end needs an evaluation",
        ),
        ({"ignore_data_skip": True}, "would train samples twice"),
        ({"enable_jit_checkpoint": True}, "saves on SIGTERM, which the run already does"),
        ({"train_sampling_strategy": "group_by_length"}, "orders the samples per rank"),
        (
            {"accelerator_config": {"split_batches": True}},
            "divides a batch among the ranks a second",
        ),
    ],
)
def test_an_option_that_cannot_hold_is_refused(
    tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    made = trainer(tmp_path, **options)
    with pytest.raises(ValueError, match=told):
        elastic(made, tmp_path / "run", global_batch=GLOBAL)
    assert type(made) is Trainer


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(Rows()[number] for number in range(4))


def test_a_stream_is_refused(tmp_path: Path) -> None:
    AcceleratorState._reset_state(True)
    given = arguments(str(tmp_path), max_steps=1)
    made = Trainer(model("plain"), given, train_dataset=Stream())
    with pytest.raises(TypeError, match="train_dataset is a Stream, a stream, whose order cannot"):
        elastic(made, tmp_path / "run", global_batch=GLOBAL)


class Documents(torch.utils.data.IterableDataset[dict[str, list[int]]]):
    """A stream in shards, as Hugging Face's."""

    num_shards = 4

    def __init__(self, start: int = 0, stride: int = 1) -> None:
        self.start, self.stride = start, stride

    def shard(self, *, num_shards: int, index: int) -> Documents:
        return Documents(index, num_shards)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        for number in range(self.start, 96, self.stride):
            yield {"input_ids": [1 + (number + place) % 60 for place in range(5)]}


def packed_losses(folder: Path, stop: int) -> list[float]:
    AcceleratorState._reset_state(True)
    made = Trainer(
        model("plain"), arguments(str(folder), max_steps=stop), train_dataset=Documents()
    )
    pack: dict[str, Any] = {"transform": anyrank.Pack(16, eos=0), "window": 10}
    made = elastic(made, folder / "run", global_batch=8, **pack)
    made.train(resume_from_checkpoint=True)
    return [line["loss"] for line in made.state.log_history if "loss" in line]


def test_a_stream_is_packed_and_resumed(tmp_path: Path) -> None:
    whole = packed_losses(tmp_path / "whole", 3)
    assert len(whole) == 3
    packed_losses(tmp_path / "parts", 1)
    assert packed_losses(tmp_path / "parts", 3)[-2:] == pytest.approx(whole[-2:], rel=1e-6)


def packed_keys(folder: Path, **more: Any) -> set[str]:
    """What the model gets of packed rows."""
    AcceleratorState._reset_state(True)
    keys: set[str] = set()

    class Watched(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            keys.update(inputs)
            return super().compute_loss(model, inputs, *args, **options)

    given = arguments(str(folder), max_steps=1)
    made = Watched(model("plain"), given, train_dataset=Documents(), **more)
    elastic(made, folder / "run", global_batch=8, transform=anyrank.Pack(16, eos=0)).train()
    assert made.model.config.use_cache is False
    return keys


def test_packed_rows_get_no_mask(tmp_path: Path) -> None:
    """With a mask, the documents of a row would see each other."""
    words = tokenizers.models.WordLevel({str(n): n for n in range(64)})
    text, zero = tokenizers.Tokenizer(words), {"pad_token": "0"}
    named: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=text, **zero)
    bare = {"input_ids", "labels", "position_ids"}
    assert packed_keys(tmp_path / "a") == bare
    plain = transformers.default_data_collator
    assert packed_keys(tmp_path / "b", processing_class=named, data_collator=plain) == bare
    pads = "DataCollatorWithPadding adds an attention_mask .*=transformers.default_data_collator"
    with pytest.raises(ValueError, match=pads):
        packed_keys(tmp_path / "c", processing_class=named)
    language = transformers.DataCollatorForLanguageModeling(named, mlm=False)
    with pytest.raises(ValueError, match="DataCollatorForLanguageModeling adds an attention_mask"):
        packed_keys(tmp_path / "d", data_collator=language)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    made, run = trainer(tmp_path), tmp_path / "run"
    with pytest.raises(ValueError, match="13 is not a multiple of microbatch 2"):
        elastic(made, run, global_batch=13)
    with pytest.raises(ValueError, match="the run already has a part 'optimizer'"):
        elastic(made, run, global_batch=12, optimizer=None)
    with pytest.raises(TypeError, match="trainer=: expected a transformers Trainer, got "):
        elastic(made.model, run, global_batch=12)
    with pytest.raises(ValueError, match="microbatch= comes from TrainingArguments"):
        elastic(made, run, global_batch=12, microbatch=2)
    found = elastic(made, run, global_batch=12)
    for one in (made, found):
        with pytest.raises(ValueError, match="already elastic"):
            elastic(one, run, global_batch=12)


def test_the_evaluation_after_an_epoch_and_its_plateau_belong_to_the_last_step(
    tmp_path: Path,
) -> None:
    def rates(folder: Path, stop: int | None = None) -> list[float]:
        """The rate of each step; the schedule steps by the evaluation after each epoch."""
        rows = [{"input_ids": torch.arange(6), "labels": torch.arange(6)}] * 6
        more: dict[str, Any] = {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "threshold": 1.0},
            "eval_strategy": "epoch",
            "metric_for_best_model": "eval_loss",
        }
        made = Trainer(
            model("plain", torch.float32),
            arguments(str(folder), **more),
            train_dataset=rows,  # pyright: ignore[reportArgumentType]
            eval_dataset=rows,  # pyright: ignore[reportArgumentType]
        )
        used: list[float] = []

        class Watch(transformers.TrainerCallback):
            def on_pre_optimizer_step(self, *_: Any, **options: Any) -> None:
                used.append(options["optimizer"].param_groups[0]["lr"])

            def on_step_end(self, *_: Any, **__: Any) -> None:
                if len(used) == stop:
                    raise KeyboardInterrupt  # as a kill, it saves nothing

        made.add_callback(Watch())
        trained: Any = elastic(made, folder / "run", global_batch=2, every=3)
        try:
            trained.train(resume_from_checkpoint=True)
        except KeyboardInterrupt:
            assert stop is not None
        return used

    whole = rates(tmp_path / "whole")
    assert len({*whole}) == 3
    first = rates(tmp_path / "run", stop=4)
    assert [*first[:3], *rates(tmp_path / "run")] == whole


def test_the_trainer_that_was_given_is_of_the_run_as_well(tmp_path: Path) -> None:
    given = trainer(tmp_path, OwnLoss, max_steps=2)
    given.model_accepts_loss_kwargs = False
    made = elastic(given, tmp_path / "run", global_batch=GLOBAL)
    assert (type(given), type(made).__name__) == (OwnLoss, "OwnLoss")
    assert isinstance(made, OwnLoss)
    given.train()  # as one that only keeps the trainer that it made
    assert given.state is made.state
    assert (given.state.global_step, made.elastic.loader.samples) == (2, 2 * GLOBAL)
    assert given.evaluate(Subset(Rows(), range(4)))["eval_loss"] > 0


def test_another_resume_beside_the_run_is_refused(tmp_path: Path) -> None:
    plain = trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    plain.train()
    made = elastic(trainer(tmp_path, max_steps=1), tmp_path / "run", global_batch=12)
    with pytest.raises(
        ValueError, match=r"start the run from it, pass resume_from_checkpoint='.*checkpoint-1'"
    ):
        made.train(resume_from_checkpoint=True)
    made.train()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1", "run"]  # no second set of weights
    made = elastic(trainer(tmp_path), tmp_path / "run", global_batch=12)
    with pytest.raises(
        ValueError, match=r"already contains a run\. To resume it, pass resume_from_checkpoint=True"
    ):
        made.train()
    (saved,) = anyrank.Checkpoints(tmp_path / "run", anyrank.TrainState()).saved()
    made.train(resume_from_checkpoint=saved.path)
    assert made.elastic.report.step == 1
    assert made.state.global_step == 9


def test_what_the_trainer_saved_begins_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = trainer(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    plain.add_callback(Log(2))
    plain.train()
    log = Log(None)
    made = elastic(trainer(tmp_path, max_steps=4), tmp_path / "run", global_batch=GLOBAL)
    made.add_callback(log)
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert made.elastic.report.components["model"] == "exact"
    assert [line[0] for line in log.lines] == [3, 4]  # the steps are counted on
    assert [line[3] for line in log.lines] == [1e-3, 5e-4]  # and so is the schedule
    assert (made.state.global_step, made.elastic.loader.samples) == (4, 2 * 2 + 2 * GLOBAL)
    again = elastic(trainer(tmp_path, max_steps=5), tmp_path / "run", global_batch=GLOBAL)
    again.train(resume_from_checkpoint=True)
    assert (again.elastic.report.step, again.state.global_step) == (4, 5)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("anyrank:")]
    reports = (made.elastic.report, again.elastic.report)
    assert lines == [f"anyrank: {report.in_a_line()}" for report in reports]


class Sharded(Trainer):
    """A subclass that divides its data among the ranks by itself."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.DistributedSampler(self.train_dataset, 2, 0)


def test_data_that_is_sharded_already_is_refused(tmp_path: Path) -> None:
    made = elastic(trainer(tmp_path, Sharded), tmp_path / "run", global_batch=12)
    assert type(made).__name__ == "Sharded"
    assert isinstance(made, Sharded)
    with pytest.raises(ValueError, match="a second sharding would lose samples"):
        made.train()


def test_recompute_and_gradient_checkpointing_are_not_mixed(tmp_path: Path) -> None:
    made = elastic(
        trainer(tmp_path, activation_checkpointing=True), tmp_path / "run", global_batch=12
    )
    enable_recompute(made.model)
    with pytest.raises(ValueError, match="would recompute again what enable_recompute"):
        made.train()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda it: setattr(it.args, "fsdp_plugin_args", {"fsdp_version": 1}), "FSDP1 is not"),
        (lambda it: setattr(it, "is_deepspeed_enabled", True), "DeepSpeed is not supported"),
        (lambda it: setattr(it.args, "_n_gpu", 2), "one process per GPU"),
        (lambda it: setattr(it.model, "_tp_size", 2), "tensor parallelism"),
    ],
)
def test_another_parallelism_is_refused(
    tmp_path: Path, change: Callable[[Any], None], told: str
) -> None:
    made = trainer(tmp_path)  # what needs a GPU to be made is marked by hand
    change(made)
    with pytest.raises(ValueError, match=told):
        elastic(made, tmp_path / "run", global_batch=12)


def job_example(*arguments: str) -> dict[int, float]:
    AcceleratorState._reset_state(True)
    history = trainer_resume.main(arguments).state.log_history
    return {line["step"]: line["loss"] for line in history if "loss" in line}


def test_the_example_goes_on_on_another_number_of_ranks(tmp_path: Path) -> None:
    many, one = ["--folder", str(tmp_path / "many")], ["--folder", str(tmp_path / "one")]
    (whole,) = run_ranks(1, job_example, *one)
    run_ranks(3, job_example, *many, "--stop", "5")
    losses = run_ranks(2, job_example, *many, "--adapter", str(tmp_path / "adapter"))[0]
    assert list(losses) == list(range(1, trainer_resume.STEPS + 1))
    assert losses == pytest.approx(whole, rel=1e-6)
    assert losses[trainer_resume.STEPS] < losses[1]
    base = trainer_resume.make_model().unload()
    with torch.no_grad():
        read = PeftModel.from_pretrained(base, tmp_path / "adapter")
        row = trainer_resume.Rows()[0]["input_ids"][None]
        assert read(input_ids=row, labels=row).loss < whole[1]


class OwnLoss(Trainer):
    """A subclass, with a mean over samples instead of tokens."""

    def compute_loss(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
    ) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / len(labels)
        return (loss, outputs) if return_outputs else loss


def job_own(out: str, stop: int | None = None) -> tuple[float, list[tuple[int, int]]]:
    """An average of the weights as a part of the run; a callback's counter after each step."""
    average: Any = None
    stopping, counters = EarlyStoppingCallback(early_stopping_patience=9), []

    class Average(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            average.update_parameters(made.model)
            counters.append((state.global_step, stopping.early_stopping_patience_counter))

    more: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 4}
    more |= {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    more |= {"greater_is_better": True, "save_strategy": "steps", "save_steps": 1}
    AcceleratorState._reset_state(True)
    options, few = arguments(out, **more), Subset(Rows(), range(4))
    made: Any = OwnLoss(model("plain"), options, train_dataset=Rows(), eval_dataset=few)
    made.model_accepts_loss_kwargs = False  # as a model of somebody's own
    for callback in (Log(stop), Average(), stopping):
        made.add_callback(callback)
    average = torch.optim.swa_utils.AveragedModel(made.model, avg_fn=lambda a, b, _: (a + b) / 2)
    elastic(made, f"{out}/run", global_batch=GLOBAL, ema=average)
    made.train(resume_from_checkpoint=True)
    return float(sum(p.double().sum() for p in average.parameters())), counters


def test_an_own_loss_an_average_of_weights_and_a_callback_go_on(tmp_path: Path) -> None:
    (one,) = run_ranks(1, job_own, str(tmp_path / "one"))
    first = run_ranks(3, job_own, str(tmp_path / "many"), 2)[0]
    second = run_ranks(2, job_own, str(tmp_path / "many"))[0]
    assert second[0] == pytest.approx(one[0], 1e-9)
    assert first[1] + second[1] == one[1]
    assert one[1][-1] == (4, 2)


def job_best(out: str, stop: int | None = None, kind: str = "plain", **more: Any) -> dict[str, Any]:
    """Train, evaluate after each second step, and call the largest loss the best."""
    AcceleratorState._reset_state(True)
    transformers.logging.set_verbosity_error()
    seen: dict[int, list[torch.Tensor]] = {}

    class Weights(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen[state.global_step] = [p.detach().clone() for p in made.model.parameters()]

    given = arguments(
        out,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=4,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,
        **{"max_steps": 8, "learning_rate": 1e-2, **more},
    )
    rows: Any = Rows()
    made = Trainer(
        model(kind), given, train_dataset=rows, eval_dataset=rows, callbacks=[Log(stop), Weights()]
    )
    made = elastic(
        made, f"{out}/run", global_batch=GLOBAL, keep=2, base="x" if "lora" in kind else None
    )
    made.train(resume_from_checkpoint=True)
    losses = {one["step"]: one["eval_loss"] for one in made.state.log_history if "eval_loss" in one}
    best = max(losses, key=losses.__getitem__)
    held = [p.detach() for p in made.model.parameters()]
    return {
        "best": (best, made.state.best_global_step, made.state.best_model_checkpoint),
        "is_loaded": best in seen and all(map(torch.equal, held, seen[best])),
        "held": float(sum(p.double().sum() for p in held)),
        "last": float(sum(p.double().sum() for p in seen.get(8, []))),
        "loss": (losses[best], made.evaluate()["eval_loss"]),
        "saved": [
            one.step for one in anyrank.Checkpoints(f"{out}/run", anyrank.TrainState()).saved()
        ],
    }


@pytest.mark.parametrize("kind", ["plain", "lora"])
def test_the_best_model_is_loaded_at_the_end(tmp_path: Path, kind: str) -> None:
    out = str(tmp_path)
    first = run_ranks(2, job_best, out, kind=kind)[0]
    assert first["best"] == (2, 2, f"{out}/run/step-00000002")
    assert first["is_loaded"]
    assert first["loss"][1] == pytest.approx(first["loss"][0], rel=1e-6)
    assert first["saved"] == [8, 4, 2]  # keep=2, and the best
    # The last step was saved with its own weights: the run goes on from them, on another rank.
    (again,) = run_ranks(1, job_best, out, kind=kind, max_steps=9)
    assert again["best"] == first["best"]
    assert again["held"] == pytest.approx(first["held"], rel=1e-12)
    assert again["saved"] == [9, 8, 2]
    (last,) = run_ranks(1, weights_at, out, kind, 8)
    assert last == pytest.approx(first["last"], rel=1e-9)


def weights_at(out: str, kind: str, step: int) -> float:
    """The sum of the weights that a step of the run has."""
    made = model(kind)
    anyrank.load(made, f"{out}/run/step-{step:08d}", missing="keep")
    return float(sum(p.double().sum() for p in made.parameters()))
