"""`anyrank check`: a script runs up to its first optimizer step, and is checked there.

Most scripts run on forks of the pool's ranks; those that end in another way, on real ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from click.testing import Result
from tests.scripts import fork_ranks

from anyrank.cli import torchrun
from anyrank.watching import first_step

SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank() if "--own-seeds" in sys.argv else 0)
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
if "--ddp" in sys.argv:
    model = DistributedDataParallel(model)
halves = [nn.Linear(4, 4).weight] if "--stale" in sys.argv else [*model.parameters()]
optimizers = [torch.optim.SGD(halves[::2], lr=0.1), torch.optim.AdamW(halves[1::2] or halves)]
for _ in range(3):
    model(torch.randn(8, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
open("ended", "w")
"""


@pytest.fixture
def forked(
    anyrank: Callable[[str], Result], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Result]:
    """The command, whose ranks are forks of the pool's."""

    def run(command: Sequence[str], log: str, environ: Mapping[str, str], late: str) -> int:
        each, *flags = command[command.index("--standalone") + 1 :]
        assert flags[:2] == ["-m", first_step.__name__]
        num_ranks = int(each.removeprefix("--nproc-per-node="))
        env = {"OMP_NUM_THREADS": environ["OMP_NUM_THREADS"]}
        return max(fork_ranks(num_ranks, log, first_step.main, *flags[2:], env=env))

    monkeypatch.setattr(torchrun, "run_to_end", run)
    return anyrank


@pytest.mark.slow
def test_a_right_script_has_no_findings_and_does_not_train(
    anyrank: Callable[[str], Result],
) -> None:
    Path("train.py").write_text(SCRIPT)
    result = anyrank("check train.py -- --ddp")
    assert (result.stdout, result.exit_code) == ("check: 0 findings on 2 ranks\n", 0)
    assert not Path("ended").exists()


ELASTIC = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import anyrank

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = anyrank.ElasticLoader(torch.randn(16, 4), global_batch=8, microbatch=2)
for step in loader:
    for batch in step.microbatches(model):
        step.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_streams_of_an_elastic_loader_are_not_equal(forked: Callable[[str], Result]) -> None:
    Path("train.py").write_text(ELASTIC)
    result = forked("check train.py")
    assert (result.stdout, result.exit_code) == ("check: 0 findings on 2 ranks\n", 0)


UNEQUAL = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

class Codes(nn.Module):
    def __init__(self):
        super().__init__()
        self.book = nn.Parameter(torch.zeros(4), requires_grad=False)
    def forward(self, x):
        self.book += x.shape[0]
        return x + self.book

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), Codes(), nn.Dropout(0.1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(2 + dist.get_rank(), 4)).sum().backward()
optimizer.step()
"""


def test_batches_of_unequal_sizes_hide_and_invent_nothing(
    forked: Callable[[str], Result],
) -> None:
    """Dropout and noise have drawn otherwise often, and a forward has written to its own table."""
    Path("train.py").write_text(UNEQUAL)
    result = forked("check --json train.py")
    assert result.exit_code == 1, result.stderr
    (finding,) = json.loads(result.stdout)["findings"]
    assert (finding["rule"], finding["where"]) == ("random", "2, ranks 0, 1")


@pytest.mark.slow
def test_findings_are_exit_1(anyrank: Callable[[str], Result]) -> None:
    Path("package").mkdir()
    Path("package/train.py").write_text(SCRIPT)
    result = anyrank("check --ranks 3 --json -m package.train --own-seeds")
    assert result.exit_code == 1, result.stderr
    told = json.loads(result.stdout)
    assert told["ranks"] == 3
    (finding,) = told["findings"]
    assert finding["rule"] == "replicas"
    assert finding["where"].startswith(
        "0.weight, 0.bias, 2.weight, 2.bias; rank 0 differs from rank 1"
    )


def test_an_optimizer_of_nothing_is_found_at_the_next_forward(
    forked: Callable[[str], Result],
) -> None:
    Path("train.py").write_text(SCRIPT)
    result = forked("check train.py --stale")
    assert result.exit_code == 1, result.stderr
    assert "lacks 6 trainable parameters, and holds 1 of the same shapes" in result.stdout
    assert not Path("ended").exists()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("raise RuntimeError('no data')", "RuntimeError: no data"),
        (
            "print('nothing to do')",
            "train.py ended before its first optimizer step, so nothing was",
        ),
        ("", "Pass the training script with its usual arguments. It printed nothing"),
        (
            "import os; os._exit(3)",
            "train.py failed with exit code 3 before its first optimizer step",
        ),
    ],
)
def test_a_script_without_a_step_is_one_message(
    forked: Callable[[str], Result], script: str, said: str
) -> None:
    Path("train.py").write_text(script)
    result = forked("check --ranks 1 train.py")
    assert (result.exit_code, result.stdout) == (1, "")
    assert said in result.stderr


def test_a_missing_script_is_wrong_usage(anyrank: Callable[[str], Result]) -> None:
    result = anyrank("check nothing.py")
    assert result.exit_code == 2
    assert "File 'nothing.py' does not exist" in result.stderr


ACCELERATE = """
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
set_seed(42)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
loader = DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    accelerator.backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
"""
TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, vocab_size=32)
model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes))
rows = [dict.fromkeys(("input_ids", "labels"), torch.arange(8)) for _ in range(32)]
options = dict(max_steps=4, use_cpu=True, report_to=[], gradient_checkpointing=True)
Trainer(model, TrainingArguments("out", **options), train_dataset=rows).train()
"""
LIGHTNING = """
import lightning, torch
from torch import nn
from torch.utils.data import DataLoader

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    def training_step(self, batch, index):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

lightning.seed_everything(0)
options = dict(accelerator="cpu", devices=2, strategy="ddp", logger=False)
trainer = lightning.Trainer(max_steps=4, enable_checkpointing=False, **options)
trainer.fit(Module(), DataLoader(torch.randn(64, 4), batch_size=4, shuffle=True))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "script"),
    [("accelerate", ACCELERATE), ("transformers", TRAINER), ("lightning", LIGHTNING)],
)
def test_a_frameworks_script_has_no_findings(
    forked: Callable[[str], Result], framework: str, script: str
) -> None:
    pytest.importorskip(framework)
    Path("train.py").write_text(script)
    result = forked("check train.py")
    assert result.stdout == "check: 0 findings on 2 ranks\n", result.stdout + result.stderr
    assert result.exit_code == 0
