"""A user's program that uses every public name. It is type-checked, and never run."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset

import anyrank


class Rows(Dataset[torch.Tensor]):
    """Some data."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def load(path: str) -> nn.Module:
    """Weights, in every way."""
    with anyrank.meta():
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    plan: anyrank.LoadPlan = anyrank.plan(model, path)
    print(plan.strategy, max(plan.peak_bytes))
    report: anyrank.LoadReport = anyrank.load(
        model, path, missing="init", unexpected="ignore", rename={"net": ""}, verify=True
    )
    missing, unexpected = report
    print(len(missing), len(unexpected), report.to_json())
    anyrank.materialize(model, device="cpu", init="auto")
    with anyrank.cpu_only():
        frozen = anyrank.freeze(nn.Linear(4, 4), source=path)
    model.append(frozen)
    synced: anyrank.SyncReport = anyrank.sync(model, model, rename={"net": ""}, missing="keep")
    print(synced.bytes_sent, synced.to_json())
    weights = anyrank.Sync(model, model, atomic=True)
    print(weights().tensors, weights.version)
    anyrank.load(model, path, process_group=anyrank.ALONE)
    findings = anyrank.check(model, torch.optim.AdamW(model.parameters()), global_batch=96)
    print([(found.rule, found.what, found.where, found.why, found.fix) for found in findings])
    print(findings, findings.to_json())
    watching = anyrank.watch("60s", exit=True, report="hang.json")
    watching.close()
    print(anyrank.inspect(path).to_json())
    print(anyrank.convert(path, "weights", dtype=torch.bfloat16, shard_bytes=1 << 30).files)
    print(anyrank.verify("weights", finite=True).findings, anyrank.diff(path, "weights").values)
    return model


def fit(model: nn.Module, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Less memory."""
    offload = anyrank.Offload(pool_bytes=1 << 20, keep_last=1)
    handles = [
        anyrank.tile_(model, "layers.*.mlp", chunk_size=16),
        anyrank.recompute_(model, "layers.*", offload=offload),
    ]
    stats: anyrank.OffloadStats = offload.stats()
    print(stats.peak_bytes, [handle.names for handle in handles])
    hidden = anyrank.recompute(nn.Linear(4, 4), hidden)
    hidden = anyrank.tile(nn.Linear(4, 4), chunk_size=16, in_dims=0, out_dims=0)(hidden)
    offload.close()
    return anyrank.tiled_loss(nn.Linear(4, 50), hidden, labels, chunk_size=32)


def train(model: nn.Module, folder: str) -> str:
    """A whole run."""
    optimizer = torch.optim.AdamW(model.parameters())
    loader = anyrank.ElasticLoader(Rows(), global_batch=12, microbatch=2, seed=0)
    state = anyrank.TrainState(model, optimizer, data=loader, seed=0)
    with anyrank.Checkpoints(folder, state, every="10min", keep=3, background=True) as ckpts:
        report: anyrank.ResumeReport | None = ckpts.resume("auto")
        for step in ckpts.steps(until=100):
            for batch in step.microbatches(model):
                step.backward(model(batch).mean())
            print(step.loss(), step.rank_loss().item())
            optimizer.step()
            optimizer.zero_grad()
        print([saved.step for saved in ckpts.saved()], ckpts.latest())
    return str(report)


def other_data(shards: list[list[int]]) -> list[int]:
    """Data in shards."""
    loader = anyrank.ElasticLoader.from_shards(
        shards, read=iter, lengths=[2, 2], global_batch=2, microbatch=1
    )
    packed = anyrank.ElasticLoader.from_shards(
        shards, read=iter, transform=anyrank.Pack(8), global_batch=2, microbatch=1
    )
    buckets = anyrank.Buckets(lambda row: row["size"], patience=8)
    print(anyrank.row_counts([]), packed.epoch, buckets.feed({"size": 1}), anyrank.CUT)
    return [step.samples for step in loader]


def main() -> None:
    """Errors, from the special to the general."""
    try:
        print(train(load("weights.pt"), "runs/a"), anyrank.__version__)
    except anyrank.CorruptCheckpoint as error:
        print(error.causes)
    except anyrank.CheckpointError:
        print("not written, or not resumed")
    except (anyrank.LoadError, anyrank.UnsafeFile):
        print("not loaded")
    except (anyrank.RankError, anyrank.RecomputeError):
        print("a rank, or a backward pass")
    except anyrank.AnyrankError as error:
        print(error)
