"""Promise 9 with exact=True: weights and optimizer state have the same bits on any rank count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks.exact_runs import KINDS, digests_on, run, sha256, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import run_ranks
from anyrank.training.exact import groups as exact_groups

ROWS, BATCH, MICRO = 13, 12, 2  # K = 6, and a last step of one sample


class Tokens(torch.utils.data.Dataset[Any]):
    """Sample i: nine tokens of an alphabet of 37."""

    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int) -> torch.Tensor:
        g = torch.Generator().manual_seed(i)
        return torch.randint(0, 37, (9,), generator=g)


class Model(nn.Module):
    """Odd sizes, dropout, a tie, a frozen part, an unused part, and fewer rows than ranks."""

    def __init__(self, rare: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 24)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(24, 3, 41, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(1)
        )
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1, 24))
        self.unused = nn.Linear(5, 5) if rare else None
        self.rare = nn.Linear(24, 24) if rare else None  # used by some microbatches only
        self.head = nn.Linear(24, 37, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if self.rare is not None and tokens[0, 0] % 2:
            x = x + self.rare(x)
        return self.head((x + self.frozen(x)) * self.scale)


POLICIES = {
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16_reduce": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    # FSDP2's default is the compute dtype until torch 2.14, and then the parameter's.
    "bf16_default": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
}


def wrap(net: Any, kind: str) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(net, bucket_cap_mb=1)
    if kind != "plain":
        options: dict[str, Any] = {"mp_policy": POLICIES.get(kind, MixedPrecisionPolicy())}
        size = torch.distributed.get_world_size()
        if kind == "hsdp" and size == 4:
            options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "shard"))
        for block in net.blocks:
            fully_shard(block, **options)
        fully_shard(net, **options)
    return net


def token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    logits = logits[:, :-1].flatten(0, 1).float()
    return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def job_train(kind: str, exact: bool = True, rich: bool = False) -> str:
    """Train an epoch; `rich` has weights of microbatches, clipping, a scheduler and an average."""
    torch.manual_seed(0)
    net = wrap(Model(rare=exact), kind)
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    average = [whole(p).clone() for p in trained]
    loader = anyrank.ElasticLoader(
        Tokens(), global_batch=BATCH, microbatch=MICRO, seed=5, exact=exact
    )
    norms: list[torch.Tensor] = []
    for step in loader:
        for batch in step.microbatches(net):
            weight = float(batch.sum()) if rich else None
            step.backward(token_loss(net(batch), batch), weight)
        if rich:
            norms.append(step.clip_grad_norm_(0.5))
        optimizer.step()
        optimizer.zero_grad(set_to_none=not rich)
        if rich:
            scheduler.step()
            for mean, p in zip(average, trained, strict=True):
                mean.lerp_(whole(p), 0.1)
    assert loader.step == 2
    return sha256(net, optimizer, *norms, *average)


def job_kinds() -> dict[str, str]:
    # On other numbers of ranks than 4, hsdp is fsdp.
    kinds = (*KINDS, "hsdp") if torch.distributed.get_world_size() == 4 else KINDS
    found = {f"rich {kind}": job_train(kind, rich=True) for kind in kinds}
    return found | {kind: job_train(kind) for kind in (*kinds, *POLICIES)}


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    """The digests of one process."""
    return run_ranks(1, job_kinds)[0]


@pytest.mark.exact_fsdp
def test_promise_9_the_same_bits_with_and_without_wrappers(alone: dict[str, str]) -> None:
    assert len({alone[kind] for kind in KINDS}) == 1
    assert len({alone[f"rich {kind}"] for kind in KINDS}) == 1
    assert alone["bf16_default"] in (alone["bf16"], alone["bf16_reduce"])
    assert len(set(alone.values())) == 4


@pytest.mark.exact_fsdp
@pytest.mark.parametrize("size", [2, 3, 4])
def test_promise_9_the_same_bits_on_any_number_of_ranks(size: int, alone: dict[str, str]) -> None:
    hybrid = {"hsdp": alone["fsdp"], "rich hsdp": alone["rich fsdp"]} if size == 4 else {}
    for found in run_ranks(size, job_kinds):
        assert found == alone | hybrid


@pytest.mark.exact_fsdp
def test_the_stock_reduction_gives_other_bits(alone: dict[str, str]) -> None:
    """The digest can tell: without exact=True it differs on three ranks."""
    assert alone["plain"] != run_ranks(3, job_train, "ddp", False)[0]


def job_validated(kind: str) -> str:
    """Run the wrapped model with gradients between the steps, and on the first rank alone once."""
    torch.manual_seed(0)
    net = wrap(Model(rare=False), kind)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    loader = anyrank.ElasticLoader(
        Tokens(), global_batch=BATCH, microbatch=MICRO, seed=5, exact=True
    )
    rows = torch.stack([Tokens()[i] for i in range(4)])
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    for step in loader:
        if kind == "ddp" and step.number == 1 and is_first:
            token_loss(net(rows), rows).item()
        for batch in step.microbatches(net):
            step.backward(token_loss(net(batch), batch))
        token_loss(net(rows), rows).item()
        step.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        token_loss(net(rows), rows).item()
    return sha256(net, optimizer)


def job_adversaries(kind: str) -> str:
    """A generator and a discriminator, which is frozen in the generator's pass."""
    torch.manual_seed(0)
    nets: list[Any] = []
    for sizes in ((4, 8, 6), (6, 8, 1)):
        layers = nn.Linear(*sizes[:2]), nn.ReLU(), nn.Linear(*sizes[1:])
        net: nn.Module = nn.Sequential(*layers)
        if kind == "fsdp":
            fully_shard(net)
        nets.append(DistributedDataParallel(net) if kind == "ddp" else net)
    make, judge = nets
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    rows = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
    loader = anyrank.ElasticLoader(rows, global_batch=10, microbatch=2, exact=True)
    softplus = nn.functional.softplus
    for step in loader:
        for batch in step.microbatches(judge):
            fake = make(torch.randn(len(batch), 4)).detach()
            step.backward(softplus(-judge(batch)).mean() + softplus(judge(fake)).mean())
        optimizers[1].step()
        optimizers[1].zero_grad()
        judge.requires_grad_(False)
        for batch in step.microbatches(nn.ModuleList(nets)):
            step.backward(softplus(-judge(make(torch.randn(len(batch), 4)))).mean())
        judge.requires_grad_(True)
        optimizers[0].step()
        optimizers[0].zero_grad()
    assert loader.step == 2
    return sha256(make, optimizers[0], *(whole(p) for p in judge.parameters()))


def job_left_unsynced(kind: str) -> str:
    """FSDP2 units that were left without gradient exchange, and must be left so again."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    if kind == "fsdp":
        fully_shard(net[0]).set_requires_gradient_sync(False)
        fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rows = torch.randn(24, 4)
    loader = anyrank.ElasticLoader(rows, global_batch=12, microbatch=2, exact=True)
    for step in loader:
        net[2].bias.requires_grad_(step.number > 0)
        for batch in step.microbatches(net):
            step.backward(net(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    if kind == "fsdp":
        net(rows).sum().backward()
        assert net[0].weight.grad is None
        assert net[2].weight.grad is not None
    return sha256(net, optimizer)


def job_habits() -> dict[str, str]:
    jobs = (job_validated, job_adversaries, job_left_unsynced)
    return {f"{job.__name__} {kind}": job(kind) for job in jobs for kind in KINDS}


@pytest.mark.exact_fsdp
def test_what_runs_outside_of_a_pass_does_not_change_its_bits() -> None:
    alone = run_ranks(1, job_habits)[0]
    assert len(set(alone.values())) == 3, alone
    assert run_ranks(3, job_habits) == [alone] * 3


def job_buckets() -> dict[str, str]:
    """Buckets of few parameters, some of which few microbatches use."""
    found: dict[str, str] = {}
    size, exact_groups.BUCKET_BYTES = exact_groups.BUCKET_BYTES, 1 << 10
    try:
        for kind in KINDS:
            for case in ("all", "rare"):
                found[f"{kind} {case}"] = train_buckets(kind, case)
    finally:
        exact_groups.BUCKET_BYTES = size
    return found


def train_buckets(kind: str, case: str) -> str:
    torch.manual_seed(0)
    net = wrap(Model(rare=case == "rare"), kind)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    rows = Tokens(ROWS + BATCH)
    loader = anyrank.ElasticLoader(rows, global_batch=BATCH, microbatch=MICRO, seed=5, exact=True)
    for _ in range(2):
        digest = run(
            net, optimizer, loader, lambda net, batch: (token_loss(net(batch), batch), 1.0)
        )
    return digest


@pytest.mark.exact_fsdp
def test_many_buckets_have_the_same_bits_as_on_one_rank() -> None:
    alone = run_ranks(1, job_buckets)[0]
    assert len(set(alone.values())) == 2
    assert run_ranks(4, job_buckets) == [alone] * 4


class Mixed(nn.Module):
    """Two units of FSDP2 without a common root, and a part that is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 7), nn.Linear(4, 7)
        self.head = nn.Linear(7, 1)
        self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.last(x)
        return self.head(torch.tanh(hidden if self.skips else hidden + self.first(x)))


def job_mixed(num_workers: int, skips: bool = False) -> str:
    """Such a model, and one under DDP, in the same loop; `skips`: pairs of microbatches do."""
    torch.manual_seed(0)
    net, other = Mixed(), nn.Linear(1, 1)
    for unit in (net.first, net.last):
        fully_shard(unit)
    wrapped = DistributedDataParallel(other)
    optimizer = torch.optim.SGD([*net.parameters(), *other.parameters()], lr=0.01, momentum=0.9)
    # A copy would skip with its original, and not with its round.
    rows = torch.randn(40 if skips else 37, 4, generator=torch.Generator().manual_seed(1))
    loader = anyrank.ElasticLoader(
        rows, global_batch=20, microbatch=2, exact=True, num_workers=num_workers
    )
    for step in loader:
        for batch in step.microbatches(net):
            net.skips = skips and step.k // 2 % 2 == 1
            step.backward(net(batch).square().mean(), float(len(batch)))
        for batch in step.microbatches(wrapped):
            with torch.no_grad():
                out = net(batch)
            step.backward(wrapped(out).square().mean())
        step.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return sha256(net, optimizer, *(whole(p) for p in other.parameters()))


def job_turns() -> dict[str, str]:
    return {f"{workers} workers": job_mixed(workers) for workers in (0, 2)}


@pytest.mark.exact_fsdp
def test_promise_9_the_same_bits_of_units_without_a_common_root() -> None:
    digests_on((2, 3, 4), job_turns)


@pytest.mark.exact_fsdp
def test_a_unit_that_whole_rounds_skip() -> None:
    """On two ranks a round is a pair of microbatches."""
    alone = run_ranks(1, job_mixed, 0, True, timeout=100)[0]
    assert run_ranks(2, job_mixed, 0, True, timeout=100) == [alone] * 2
    assert alone != run_ranks(1, job_mixed, 0, timeout=100)[0]


def job_refused() -> list[str]:
    """What is refused before the first backward, on all ranks."""
    torch.manual_seed(0)
    rows = torch.randn(8, 4)
    found: list[str] = []

    def attempt(model: nn.Module, times: int = 1, **options: Any) -> None:
        loader = anyrank.ElasticLoader(rows, global_batch=8, microbatch=2, exact=True, **options)
        try:
            for step in loader:
                for batch in step.microbatches(model):
                    for _ in range(times):
                        step.backward(model(batch).square().mean())
        except (ValueError, anyrank.AnyrankError) as error:
            found.append(f"{type(error).__name__}: {error}")

    attempt(DistributedDataParallel(nn.Linear(4, 1), static_graph=True))
    hooked = DistributedDataParallel(nn.Linear(4, 1))
    hooked.register_comm_hook(None, lambda state, bucket: None)  # type: ignore[arg-type]
    attempt(hooked)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel = parallelize_module(nn.Linear(4, 2), mesh["tp"], ColwiseParallel())
    attempt(tensor_parallel, process_group=mesh["dp"].get_group())
    replicated = fully_shard(
        nn.Linear(4, 1), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("rep", "shard"))
    )
    attempt(replicated)
    attempt(fully_shard(nn.Linear(4, 1)), times=2)
    if torch.distributed.get_rank():  # on one rank alone
        torch.set_num_threads(torch.get_num_threads() + 1)
    attempt(nn.Linear(4, 1))
    return found


@pytest.mark.exact_fsdp
def test_what_cannot_be_exact_is_refused_on_all_ranks() -> None:
    first, second = run_ranks(2, job_refused)
    for found in (first, second):
        texts = (
            "static_graph=True",
            "communication hook",
            "Tensor parallelism reduces",
            "is only replicated over",
            "more than once in a microbatch",
            "threads= differs between ranks",
        )
        assert len(found) == len(texts)
        assert all(text in one for text, one in zip(texts, found, strict=True)), found


def job_resumed(folder: str, kind: str, until: int, leave_at: int | None = None) -> str | None:
    """Go on with a run; `leave_at` ends the process's work in the middle of that step."""
    torch.manual_seed(0)
    net = wrap(Model(rare=False), kind)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-3)
    loader = anyrank.ElasticLoader(
        Tokens(), global_batch=BATCH, microbatch=MICRO, seed=5, exact=True
    )
    state = anyrank.TrainState(model=net, optimizer=optimizer, data=loader)
    with anyrank.Checkpoints(folder, state, every=1) as ckpts:
        ckpts.resume("auto")
        for step in ckpts.steps(until=until):
            for batch in step.microbatches(net):
                step.backward(token_loss(net(batch), batch), float(batch.sum()))
                if step.number == leave_at:
                    return None
            step.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
    return sha256(net, optimizer)


@pytest.mark.exact_fsdp
def test_a_run_moved_between_rank_counts_and_wrappers_has_the_same_bits(tmp_path: Path) -> None:
    whole = run_ranks(1, job_resumed, str(tmp_path / "whole"), "plain", 7)[0]
    moved = str(tmp_path / "moved")
    for size, kind, until, leave_at in ((4, "fsdp", 2, 1), (3, "ddp", 4, 3), (2, "fsdp", 6, None)):
        run_ranks(size, job_resumed, moved, kind, until, leave_at)
    assert run_ranks(4, job_resumed, moved, "hsdp", 7) == [whole] * 4
    found = anyrank.diff(tmp_path / "whole", moved)
    assert found, found
    assert len(found.steps_equal) >= 2
