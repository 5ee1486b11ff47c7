"""One rank of the demo's first half: `torchrun -m anyrank.cli.demo_worker WEIGHTS SCRATCH`.

Each part runs in its own process, forked after the imports: memory that malloc kept from an earlier
part would hide the needs of a later part. Rank 0 writes each part's results to SCRATCH/PART.json.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoTokenizer, BertConfig, BertModel

import anyrank
from anyrank.model.memory_meter import PeakMemory

SENTENCES = (
    "Every rank reads its own share.",
    "The model's weights are cut along their first dimension.",
    "A cat sat on the mat, and looked at the rain.",
    "Der Zug nach Bern hat Versp\u00e4tung.",
    "def load(model, source): return report",
)


@dataclass(frozen=True)
class Job:
    """The arguments of every rank.

    Attributes:
        weights: folder of the model.
        scratch: folder of the results; its `weights.pt` has the same tensors, saved by torch.
    """

    weights: str
    scratch: str

    def write(self, part: str, results: dict[str, Any]) -> None:
        """Write a part's results for the command, on rank 0. All ranks may call."""
        if dist.get_rank() == 0:
            path = os.path.join(self.scratch, f"{part}.json")
            with open(path, "w", encoding="utf-8") as file:
                json.dump(results, file)


def by_rank(memory: PeakMemory) -> dict[str, Any]:
    """The peaks of all ranks, and the slowest rank's seconds. All ranks call."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (memory.peak_bytes, memory.seconds))
    peaks, seconds = zip(*every, strict=True)
    return {"peak_bytes": peaks, "seconds": max(seconds)}


# -- the parts ------------------------------------------------------------------------------------


def naive(job: Job) -> None:
    """As many scripts do: every rank builds the model and loads the whole file. The reference."""
    config = BertConfig.from_pretrained(job.weights)
    with PeakMemory() as memory:
        model = BertModel(config)
        state = torch.load(os.path.join(job.scratch, "weights.pt"), weights_only=True)
        model.load_state_dict(state, strict=False)  # the file has an extra key, position_ids
    job.write("naive", by_rank(memory))
    if dist.get_rank() == 0:
        reference = BertModel.from_pretrained(job.weights)
        torch.save(embed(reference, job), os.path.join(job.scratch, "reference.pt"))


def ddp(job: Job) -> None:
    """The whole model on every rank: built on meta, loaded, wrapped."""
    config = BertConfig.from_pretrained(job.weights)
    with PeakMemory() as memory:
        with anyrank.meta():
            model = BertModel(config)
        report = anyrank.load(model, job.weights)
    _report_load("ddp", job, DistributedDataParallel(model), memory, report)


def fsdp2(job: Job) -> None:
    """A share of the model on every rank: built on meta, sharded, loaded."""
    config = BertConfig.from_pretrained(job.weights)
    with PeakMemory() as memory:
        with anyrank.meta():
            model = BertModel(config)
        for layer in model.encoder.layer:
            fully_shard(layer)
        fully_shard(model)
        report = anyrank.load(model, job.weights)
    _report_load("fsdp2", job, model, memory, report)


PARTS: tuple[Callable[[Job], None], ...] = (naive, ddp, fsdp2)


def _report_load(
    part: str, job: Job, model: nn.Module, memory: PeakMemory, report: anyrank.LoadReport
) -> None:
    """Write peaks, report, and the difference from the reference's embeddings. All ranks."""
    results = by_rank(memory)
    reference = torch.load(os.path.join(job.scratch, "reference.pt"), weights_only=True)
    difference = (embed(model, job) - reference).abs().max()
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    job.write(part, results | {"difference": difference.item(), "report": asdict(report)})


@torch.no_grad()
def embed(model: nn.Module, job: Job) -> torch.Tensor:
    """Sentence embeddings, float32 [sentences, 384]: the mean over each sentence's tokens."""
    tokenizer = AutoTokenizer.from_pretrained(job.weights)
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    states = model.eval()(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return (states * mask).sum(dim=1) / mask.sum(dim=1)


# -- the process ----------------------------------------------------------------------------------


def _run_part(part: Callable[[Job], None], job: Job) -> None:
    """Connect to the other ranks' processes of this part, and run it."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = f"file://{os.path.abspath(job.scratch)}/{part.__name__}.store"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    gc.collect()  # what is freed within a part would hide what it takes
    part(job)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Run the parts in sequence; the first failure ends the rank."""
    weights, scratch = sys.argv[1:]
    job = Job(weights, scratch)
    for part in PARTS:
        process = multiprocessing.get_context("fork").Process(target=_run_part, args=(part, job))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{part.__name__} ended with exit code {process.exitcode}")


if __name__ == "__main__":
    main()
