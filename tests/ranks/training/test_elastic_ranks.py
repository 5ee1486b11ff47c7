"""`ElasticLoader` on ranks: gradients, losses and random numbers do not depend on their number."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import RanksFailed, run_ranks
from anyrank.training.data.order import Order

N, SIZE, MICRO = 22, 8, 2  # K = 4, and a last step of 6 samples in 3 microbatches


class Rows(torch.utils.data.Dataset[Any]):
    """Sample i: features, a target, and a number of tokens. Draws nothing."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        g = torch.Generator().manual_seed(i)
        x, y = torch.randn(6, generator=g).double(), torch.randn(3, generator=g).double()
        return x, y, i % 3 + (i != 4)  # some have as few as 0


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(10, 3)
        self.spare = nn.Linear(3, 3)
        self.spare.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(torch.tanh(self.up(x))))


def build(kind: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    net: nn.Module = Mlp(dropout).double()
    if kind == "ddp":
        net = DistributedDataParallel(net)
    elif kind == "static":
        net = DistributedDataParallel(net, static_graph=True)
    elif kind == "compiled":
        net = torch.compile(DistributedDataParallel(net), backend="eager")
    elif kind == "contained":
        net = nn.ModuleDict({"wrapped": DistributedDataParallel(net)})
    elif kind in ("fsdp", "fsdp_mixed"):
        fully_shard(net.up)
        fully_shard(net, reshard_after_forward=kind != "fsdp_mixed")
    elif kind == "fsdp_reduce":  # keeps what it adds up in a place of its own
        fully_shard(net, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    elif kind == "partly":
        fully_shard(net.up)
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "shard"))
        fully_shard(net.up, mesh=mesh)
        fully_shard(net, mesh=mesh)
    elif kind in ("tp", "fsdp_tp"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(net, mesh["tp"], plan, src_data_rank=None)
        if kind == "fsdp_tp":
            fully_shard(net, mesh=mesh["dp"])
        net.data_group = mesh["dp"].get_group()
    return net


def run_model(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net["wrapped"](x) if isinstance(net, nn.ModuleDict) else net(x)


def gradients(net: nn.Module) -> list[torch.Tensor]:
    grads: list[Any] = [p.grad for p in net.parameters() if p.requires_grad]
    return [(g.full_tensor() if hasattr(g, "full_tensor") else g).detach().clone() for g in grads]


def job_train(kind: str, how: str, passes: int = 1) -> list[tuple[float, list[torch.Tensor]]]:
    """Loss and gradients of each step, as the optimizer sees them."""
    net = build(kind)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    group = getattr(net, "data_group", None)
    loader = anyrank.ElasticLoader(
        Rows(), global_batch=SIZE, microbatch=MICRO, seed=3, process_group=group
    )
    rows: list[tuple[float, list[torch.Tensor]]] = []
    for step in (step for _ in range(passes) for step in loader):
        for x, y, tokens in step.microbatches(net):
            errors = (run_model(net, x) - y).square().mean(1)
            if how == "weight":
                total = tokens.sum()
                loss = (errors * tokens).sum() / total.clamp(min=1)
                step.backward(loss, total)
            elif how == "scaler":
                step.backward(scaler.scale(errors.mean()))
            else:
                step.backward(errors.mean())
        loss = step.loss() / (scaler.get_scale() if how == "scaler" else 1)
        if how == "scaler":
            scaler.unscale_(optimizer)
        if how == "clip":
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        rows.append((loss, gradients(net)))
        if how == "scaler":
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    assert [one.verdict for one in loader.receipts] == ["exactly once"] * passes
    return rows


def by_hand(how: str) -> list[tuple[float, list[torch.Tensor]]]:
    """The same run as anybody writes it for one process and whole batches."""
    net = build("plain")
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    data = Rows()
    rows: list[tuple[float, list[torch.Tensor]]] = []
    for ids in Order(N, 3, True).ids(0, 0, N).split(SIZE):
        samples = [data[int(i)] for i in ids]
        x, y = (torch.stack(part) for part in list(zip(*samples, strict=True))[:2])
        tokens = torch.tensor([one[2] for one in samples])
        errors = (net(x) - y).square().mean(1)
        loss = (errors * tokens).sum() / tokens.sum() if how == "weight" else errors.mean()
        loss.backward()
        if how == "clip":
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        rows.append((loss.item(), gradients(net)))
        optimizer.step()
        optimizer.zero_grad()
    return rows


def assert_close(found: Any, expected: Any, rtol: float = 1e-12) -> None:
    assert len(found) == len(expected)
    for (loss, grads), (other_loss, others) in zip(found, expected, strict=True):
        assert loss == pytest.approx(other_loss, rel=rtol)
        for grad, other in zip(grads, others, strict=True):
            torch.testing.assert_close(grad, other, rtol=rtol, atol=rtol / 10)


CASES = [
    (1, "plain"), (2, "plain"), (3, "plain"), (1, "ddp"), (2, "ddp"), (3, "ddp"), (4, "ddp"),
    (2, "static"), (2, "compiled"), (2, "contained"), (1, "fsdp"), (2, "fsdp"), (3, "fsdp"),
    (4, "fsdp"), (2, "fsdp_mixed"), (4, "hsdp"),
]  # fmt: skip


@pytest.mark.parametrize("how", ["samples", "weight", "scaler", "clip"])
@pytest.mark.parametrize(("world", "kind"), CASES)
def test_gradients_are_those_of_the_mean_over_the_global_batch(
    world: int, kind: str, how: str
) -> None:
    expected = by_hand(how)
    for rows in run_ranks(world, job_train, kind, how):
        assert_close(rows, expected)


@pytest.mark.parametrize("kind", ["tp", "fsdp_tp"])
@pytest.mark.parametrize("how", ["samples", "weight", "clip"])
def test_ranks_of_one_data_coordinate_share_their_microbatches(kind: str, how: str) -> None:
    for rows in run_ranks(4, job_train, kind, how):
        assert_close(rows, by_hand(how))


@pytest.mark.parametrize("how", ["samples", "weight"])
def test_parameters_outside_of_the_sharded_units_are_averaged_too(how: str) -> None:
    for rows in run_ranks(3, job_train, "partly", how):
        assert_close(rows, by_hand(how))


def job_exchanges(kind: str) -> list[list[int]]:
    """For each step, how often gradients had been exchanged behind each microbatch."""
    net = build(kind)
    counts = [0]
    if kind == "ddp":

        def hook(_, bucket):  # torch refuses annotations that are strings
            counts[0] += 1
            future = torch.futures.Future[torch.Tensor]()
            future.set_result(bucket.buffer().zero_())  # equal on all ranks, as if exchanged
            return future

        net.register_comm_hook(None, hook)
    loader = anyrank.ElasticLoader(Rows(), global_batch=SIZE, microbatch=MICRO)
    rows: list[list[int]] = []
    for step in loader:
        counts[0] = 0
        rows.append([])
        for x, *_ in step.microbatches(net):
            step.backward(net(x).mean())
            # FSDP2 fills .grad when it has exchanged.
            rows[-1].append(counts[0] if kind == "ddp" else len(found_gradients(net)))
        net.zero_grad()
    return rows


def found_gradients(net: nn.Module) -> list[Any]:
    return [p.grad for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize(("kind", "once"), [("ddp", 1), ("fsdp", 4)])
def test_gradients_are_exchanged_once_in_a_step(kind: str, once: int) -> None:
    for rows in run_ranks(3, job_exchanges, kind):
        # 4 microbatches on 3 ranks, twice; then 3
        assert rows == [[0, once], [0, once], [once]]


def job_left(kind: str, way: str) -> list[tuple[float, list[torch.Tensor]]]:
    """Leave the first step in its first microbatch, behind its backward, and train then."""
    net = build(kind)
    loader = anyrank.ElasticLoader(Rows(), global_batch=SIZE, microbatch=MICRO, seed=3)
    try:
        for step in loader:
            for x, y, _ in step.microbatches(net):
                step.backward(7 * (net(x) - y).square().mean())
                if way == "error":
                    raise KeyError
                break
            break
    except KeyError:
        pass
    net.zero_grad()
    # Flags are as before: this synchronizes.
    (net(torch.full((2, 6), dist.get_rank() + 1.0).double())).mean().backward()
    by_itself = gradients(net)
    net.zero_grad()
    other = build("plain")
    ranks = torch.arange(1.0, dist.get_world_size() + 1).double()
    torch.stack(
        [other(torch.full((2, 6), float(r)).double()).mean() for r in ranks]
    ).mean().backward()
    for grad, expected in zip(by_itself, gradients(other), strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-6, atol=1e-8)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    rows: list[tuple[float, list[torch.Tensor]]] = []
    for step in loader:
        for x, y, _ in step.microbatches(net):
            step.backward((net(x) - y).square().mean())
        rows.append((step.loss(), gradients(net)))
        optimizer.step()
        optimizer.zero_grad()
    return rows


@pytest.mark.parametrize("way", ["break", "error"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp_mixed", "fsdp_reduce"])
def test_a_step_that_was_left_leaves_nothing_behind(kind: str, way: str) -> None:
    for rows in run_ranks(2, job_left, kind, way):
        assert_close(rows, by_hand("samples"), 1e-6 if kind == "fsdp_reduce" else 1e-12)


def job_masks(kind: str) -> list[Any]:
    """Outputs under dropout and losses, in the order of steps and microbatches."""
    torch.manual_seed(0)
    net = build(kind, dropout=0.5)
    torch.manual_seed(dist.get_rank() + 1)
    loader = anyrank.ElasticLoader(Rows(), global_batch=SIZE, microbatch=MICRO, seed=3)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    losses: list[float] = []
    for _ in range(2):
        for step in loader:
            for x, y, _ in step.microbatches(net):
                noisy = x + torch.randn_like(x)
                step.backward((net(noisy) - y).square().mean())
            losses.append(step.loss())
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("world", "kind"), [(2, "ddp"), (3, "ddp"), (3, "fsdp"), (4, "fsdp"), (4, "hsdp"), (3, "plain")]
)
def test_a_run_with_dropout_and_noise_is_the_same_on_any_number_of_ranks(
    world: int, kind: str
) -> None:
    expected = run_ranks(1, job_masks, "plain")[0]
    assert len(set(expected)) == 6
    for losses in run_ranks(world, job_masks, kind):
        assert losses == pytest.approx(expected, rel=1e-10)


def job_refused(what: str) -> None:
    if what == "too many ranks":
        anyrank.ElasticLoader(Rows(), global_batch=4, microbatch=2)
        return
    group = None
    groups = [dist.new_group([rank]) for rank in range(3)]
    net = build("ddp")
    if what == "outside":
        group = groups[(dist.get_rank() + 1) % 3]
    elif what == "smaller wrapper":
        net = DistributedDataParallel(net.module, process_group=groups[dist.get_rank()])
    elif what == "smaller mesh":
        mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=("a", "b"))
        net = fully_shard(net.module, mesh=mesh["b"])
    elif what in ("tp", "fsdp_tp"):
        net = build(what)
    loader = anyrank.ElasticLoader(Rows(), global_batch=8, microbatch=2, process_group=group)
    for step in loader:
        # As somebody would who gives the part instead of the wrapper
        given = net.module if what == "wrapped already" else net
        for x, y, _ in step.microbatches(given):
            step.backward((net(x) - y).square().mean())


REFUSED = {
    "too many ranks": (
        "global_batch 4 / microbatch 2 gives 2 microbatches, too few for 3 data-parallel ranks: "
        "lower microbatch to at most 1, raise global_batch to at least 6, or use at most 2 ranks"
    ),
    "outside": "is not in process_group",
    "smaller wrapper": "averages gradients over 1 rank, but the loader divides the data among 3",
    "smaller mesh": "averages gradients over 1 rank, but the loader divides the data among 3",
    "fsdp_tp": "averages gradients over 2 ranks, but the loader divides the data among 4",
    "tp": "whose ranks need the same data",
    "wrapped already": "Pass the wrapped model",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_train_wrongly_is_refused(what: str) -> None:
    with pytest.raises(RanksFailed, match=REFUSED[what]) as caught:
        run_ranks(4 if "tp" in what else 3, job_refused, what)
    assert "ValueError" in str(caught.value)


def job_equal_data(is_exact: bool, wraps: bool) -> float:
    """Train on dummy data: every microbatch of every rank is the same."""
    net = DistributedDataParallel(nn.Linear(4, 1)) if wraps else nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = anyrank.ElasticLoader(torch.ones(16, 4), global_batch=8, microbatch=2, exact=is_exact)
    for step in loader:
        for x in step.microbatches(net):
            step.backward(net(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return step.number


@pytest.mark.parametrize("wraps", [False, True], ids=["plain", "ddp"])
@pytest.mark.parametrize("is_exact", [False, True], ids=["stock", "exact"])
def test_ranks_may_have_equal_data(is_exact: bool, wraps: bool) -> None:
    assert run_ranks(2, job_equal_data, is_exact, wraps) == [1, 1]


def job_around_the_wrapper(is_given: bool) -> list[float]:
    """Gradients with exact=True, where `microbatches` got the wrapper or what it wraps."""
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Linear(4, 1))
    data = torch.randn(8, 4)
    loader = anyrank.ElasticLoader(data, global_batch=8, microbatch=2, exact=True)
    for step in loader:
        for x in step.microbatches(net if is_given else net.module):
            step.backward(net(x).square().mean())
    return [float(value) for grad in gradients(net) for value in grad.flatten()]


def test_exact_takes_gradients_before_the_wrapper_does() -> None:
    assert run_ranks(2, job_around_the_wrapper, False) == run_ranks(2, job_around_the_wrapper, True)


def job_partial_loss() -> list[float]:
    net = build("ddp")
    loader = anyrank.ElasticLoader(Rows(), global_batch=SIZE, microbatch=MICRO, shuffle=False)
    losses: list[float] = []
    for step in loader:
        for x, *_ in step.microbatches(net):
            step.backward(net(x).sum() * 0 + x.sum())
            losses.append(step.loss())
        break
    return losses


def test_the_loss_so_far_is_that_of_all_ranks() -> None:
    data = Rows()
    sums = [float(sum(data[i][0].sum() for i in (2 * k, 2 * k + 1))) for k in range(4)]
    for losses in run_ranks(2, job_partial_loss):
        assert losses == pytest.approx([(sums[0] + sums[2]) / 2, sum(sums) / 4])


def job_rank_losses(how: str) -> list[tuple[float, float]]:
    """Of each step, the loss, and this rank's part of it."""
    net = build("ddp")
    loader = anyrank.ElasticLoader(Rows(), global_batch=SIZE, microbatch=MICRO, shuffle=False)
    losses: list[tuple[float, float]] = []
    for step in loader:
        for x, *_ in step.microbatches(net):
            with pytest.raises(ValueError, match="after the loop over microbatches"):
                step.rank_loss()
            weights = {"tokens": float(step.k), "nothing": 0.0}
            step.backward(net(x).square().mean(), weights.get(how))
        losses.append((step.loss(), float(step.rank_loss())))
        net.zero_grad()
    return losses


def job_rank_loss_of_copies() -> list[torch.Tensor]:
    """Of the short last step, in which the first of four ranks has copies alone."""
    net = build("ddp")
    loader = anyrank.ElasticLoader(Rows(), global_batch=SIZE, microbatch=MICRO, shuffle=False)
    for step in loader:
        for x, *_ in step.microbatches(net):
            step.backward(net(x).square().mean())
        net.zero_grad()
        losses = [step.rank_loss(), torch.tensor(step.loss(), dtype=torch.float64)]
    return losses


def test_a_rank_with_copies_alone_has_a_loss_of_0() -> None:
    rows = run_ranks(4, job_rank_loss_of_copies)
    parts = [part for part, _ in rows]
    assert {part.dtype for part in parts} == {torch.float64}
    assert float(sum(parts)) / 4 == pytest.approx(float(rows[0][1]), rel=1e-12)
    assert not parts[0]


@pytest.mark.parametrize("how", ["samples", "tokens", "nothing"])
def test_the_mean_of_the_ranks_losses_is_the_loss(how: str) -> None:
    for rows in zip(*run_ranks(3, job_rank_losses, how), strict=True):
        loss = rows[0][0]
        assert (loss == 0) == (how == "nothing")
        assert sum(part for _, part in rows) / 3 == pytest.approx(loss, rel=1e-12)
        assert how == "nothing" or len({part for _, part in rows}) == 3


def job_rarely_used() -> list[torch.Tensor | None]:
    """Gradients where one parameter is used by one microbatch, and one by none."""
    net = nn.ModuleList([nn.Linear(6, 1, bias=False).double() for _ in range(3)])
    loader = anyrank.ElasticLoader(Rows(), global_batch=SIZE, microbatch=MICRO, shuffle=False)
    for step in loader:
        for number, (x, *_) in enumerate(step.microbatches(net)):
            used = net[1] if step.k == 3 else net[0]
            step.backward(used(x).mean())
            assert number < 2
        break
    return [part.weight.grad for part in net]


def test_gradients_that_only_some_ranks_have_are_averaged() -> None:
    data = Rows()
    rows = torch.stack([data[i][0] for i in range(8)])
    for often, once, never in run_ranks(2, job_rarely_used):
        torch.testing.assert_close(often[0], rows[:6].sum(0) / 8)
        torch.testing.assert_close(once[0], rows[6:].sum(0) / 8)
        assert never is None


class BadRow(Rows):
    """A dataset of which one sample cannot be read."""

    def __getitem__(self, i: int) -> Any:
        if i == 11:
            raise KeyError("bad 11")
        return super().__getitem__(i)


def job_bad_row(kind: str, workers: int) -> tuple[str, str, float, list[int]]:
    """What is raised, when, and by whom."""
    net = build(kind)
    loader = anyrank.ElasticLoader(
        BadRow(), global_batch=12, microbatch=2, shuffle=False, num_workers=workers
    )
    start = time.monotonic()
    ks: list[int] = []
    try:
        for step in loader:
            for x, *_ in step.microbatches(net):
                ks.append(step.k)
                step.backward(net(x).mean())
            net.zero_grad()
    except anyrank.AnyrankError as error:
        return type(error).__name__, str(error), time.monotonic() - start, ks
    raise AssertionError("a sample that cannot be read went unnoticed")


@pytest.mark.parametrize(("kind", "workers"), [("ddp", 0), ("fsdp", 0), ("ddp", 1)])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_what_a_dataset_raises_on_one_rank_all_ranks_raise(kind: str, workers: int) -> None:
    # Samples 0 to 11 are of the first step: rank 1 of 2 has 6, 7 and 8, 9 and 10, 11.
    rows = run_ranks(2, job_bad_row, kind, workers)
    assert {row[0] for row in rows} == {"RankError"}
    assert [row[3] for row in rows] == [[0, 1], [3, 4]]
    for _, text, seconds, _ in rows:
        assert "[rank 1]" in text
        assert "[rank 0]" not in text
        assert "KeyError" in text
        assert "raised by dataset[11], epoch 0, microbatch [10, 11]" in text
        assert seconds < 60  # on a busy machine; without an answer it takes half an hour


def job_bad_next(workers: int, folder: str) -> list[Any]:
    """A run whose second step cannot be read: steps begun, what is raised, what is saved."""
    net = build("ddp")
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    loader = anyrank.ElasticLoader(
        BadRow(), global_batch=8, microbatch=2, shuffle=False, num_workers=workers
    )
    state = anyrank.TrainState(net, optimizer, data=loader)
    begun: list[int] = []
    with anyrank.Checkpoints(folder, state) as ckpts:
        try:
            for step in ckpts.steps(epochs=1):
                begun.append(step.number)
                for x, *_ in step.microbatches(net):
                    step.backward(net(x).mean())
                optimizer.step()
                optimizer.zero_grad()
        except anyrank.AnyrankError as error:
            text = str(error)
    return [begun, text, [saved.step for saved in ckpts.saved()], step.number]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_step_counts_though_the_next_one_cannot_be_read(workers: int, tmp_path: Path) -> None:
    # Samples 8 to 11 are rank 0's of the second step: of a worker it takes them as the first ends.
    for begun, text, saved, last in run_ranks(2, job_bad_next, workers, str(tmp_path)):
        assert "[rank 0]" in text
        assert "raised by dataset[11], epoch 0, microbatch [10, 11]" in text
        assert (begun, saved, last) == ([0, 1], [1], 1)


def job_end_before_bad(folder: str) -> list[int]:
    net = build("ddp")
    loader = anyrank.ElasticLoader(
        BadRow(), global_batch=8, microbatch=2, shuffle=False, num_workers=1
    )
    ckpts = anyrank.Checkpoints(folder, anyrank.TrainState(net, data=loader))
    with ckpts:
        for step in ckpts.steps(until=1):
            for x, *_ in step.microbatches(net):
                step.backward(net(x).mean())
    return [saved.step for saved in ckpts.saved()]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_run_that_ends_before_a_bad_sample_ends_well(tmp_path: Path) -> None:
    assert run_ranks(2, job_end_before_bad, str(tmp_path)) == [[1], [1]]


def job_bypass(how: str) -> tuple[int, str]:
    """In which step a model is refused whose forward or backward goes around the wrapper."""
    net = build("contained" if how == "contained" else "ddp")
    loader = anyrank.ElasticLoader(Rows(), global_batch=SIZE, microbatch=MICRO, seed=3)
    step: Any = None
    try:
        for step in loader:
            for x, y, _ in step.microbatches(net):
                if how == "module":
                    out = net.module(x)
                elif how == "contained":
                    out = net["wrapped"].module(x)  # type: ignore[index]
                else:
                    out = net(x)
                loss = (out - y).square().mean()
                if how == "own":
                    loss.backward()
                else:
                    step.backward(loss)
            net.zero_grad()
    except ValueError as error:
        return step.number, str(error)
    return -1, ""


BYPASSED = {
    "module": "did not reduce them. Call the DDP model itself",
    "contained": "did not reduce them. Call the DDP model itself",
    "own": r"loss.backward\(\) was called directly",
}


@pytest.mark.parametrize("how", BYPASSED)
def test_what_bypasses_the_wrapper_or_the_step_is_refused_in_the_first_step(how: str) -> None:
    for number, text in run_ranks(2, job_bypass, how):
        assert number == 0
        assert re.search(BYPASSED[how], text)
    assert run_ranks(2, job_bypass, "right") == [(-1, ""), (-1, "")]


def job_own_weights(kind: str, own: bool) -> list[torch.Tensor]:
    """Gradients of the first step, by a backward of one's own with its own weights."""
    net = build(kind)
    loader = anyrank.ElasticLoader(Rows(), global_batch=SIZE, microbatch=MICRO, seed=3)
    for step in loader:
        for x, y, _ in step.microbatches(net, own_backward=own):
            loss = (net(x) - y).square().mean()
            if own:
                (loss * dist.get_world_size() / 4).backward()
            else:
                step.scale(loss).backward()
        break
    return gradients(net)


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp"])
@pytest.mark.parametrize("own", [True, False])
def test_a_backward_of_ones_own_that_was_asked_for(kind: str, own: bool) -> None:
    (_, expected), *_ = by_hand("samples")
    for found in run_ranks(2, job_own_weights, kind, own):
        for grad, other in zip(found, expected, strict=True):
            torch.testing.assert_close(grad, other)


def job_two_phases(kind: str) -> list[Any]:
    """A discriminator's pass and a generator's over the microbatches of each step."""
    critic, maker = build(kind), build(kind, dropout=0.5)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (critic, maker)]
    loader = anyrank.ElasticLoader(Rows(), global_batch=SIZE, microbatch=MICRO, seed=3)
    losses: list[float] = []
    for step in loader:
        for net, optimizer in zip((critic, maker), optimizers, strict=True):
            for x, y, _ in step.microbatches(net):
                step.backward((net(x + torch.randn_like(x)) - y).square().mean())
            losses.append(step.loss())
            optimizer.step()
            optimizer.zero_grad()
    assert loader.receipts == [(0, N, "exactly once")]
    return losses


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_phases_of_a_step_are_the_same_on_any_number_of_ranks(kind: str) -> None:
    expected = run_ranks(1, job_two_phases, "plain")[0]
    for losses in run_ranks(3, job_two_phases, kind):
        assert losses == pytest.approx(expected, rel=1e-10)


def job_left_in_a_second_pass(leaves: bool) -> list[list[torch.Tensor]]:
    """Gradients of both nets at the end of the first step, whose second pass may be left once."""
    nets = [build("ddp"), build("ddp")]
    loader = anyrank.ElasticLoader(Rows(), global_batch=SIZE, microbatch=MICRO, shuffle=False)
    for attempt in range(1 + leaves):
        is_left = leaves and not attempt
        for step in loader:
            for number, net in enumerate(nets):
                for x, y, _ in step.microbatches(net):
                    step.backward((net(x) - y).square().mean())
                    if is_left and number == 1:
                        break
            break
    return [gradients(net) for net in nets]


def test_a_second_pass_that_was_left_leaves_nothing_behind() -> None:
    left, whole = (run_ranks(2, job_left_in_a_second_pass, how) for how in (True, False))
    for found, expected in zip(left, whole, strict=True):
        for grads, others in zip(found, expected, strict=True):
            assert all(map(torch.equal, grads, others))


def job_bad_next_beside_tensor_parallel(folder: str) -> tuple[int, str]:
    """A run in which one data-parallel group of two cannot read its part of the second step."""
    net = build("tp")
    loader = anyrank.ElasticLoader(
        BadRow(),
        global_batch=8,
        microbatch=2,
        shuffle=False,
        num_workers=1,
        process_group=net.data_group,
    )
    state = anyrank.TrainState(net, data=loader)
    number = -1
    try:
        with anyrank.Checkpoints(folder, state) as ckpts:
            for step in ckpts.steps(epochs=1):
                number = step.number
                for x, *_ in step.microbatches(net):
                    step.backward(net(x).mean())
                net.zero_grad()
    except anyrank.AnyrankError as error:
        return number, str(error)
    raise AssertionError("a sample that cannot be read went unnoticed")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_all_ranks_of_a_run_raise_what_one_data_parallel_group_cannot_fetch(tmp_path: Path) -> None:
    for number, text in run_ranks(4, job_bad_next_beside_tensor_parallel, str(tmp_path)):
        assert number == 1
        assert text.startswith("fetching a batch failed on 2 of 4 ranks, so every rank stops")
