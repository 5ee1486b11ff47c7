"""What cannot have the same bits on any number of ranks is refused, or noted, before it matters."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import nn

import anyrank
from anyrank.training.exact.checks import check_model
from anyrank.world.ranks import one_process


class Counts(nn.Module):
    """Counts its calls, and keeps a table that it computes again each time."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.counts = counts
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("table", torch.ones(3))
        self.register_buffer("cache", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.calls += 1
        self.table = torch.ones(3)
        self.cache = torch.ones(len(x))
        return self.linear(x)


def loader_of(exact: bool = True, **options: Any) -> anyrank.ElasticLoader:
    return anyrank.ElasticLoader(
        torch.randn(16, 4), global_batch=8, microbatch=4, exact=exact, **options
    )


def train(model: nn.Module, loader: anyrank.ElasticLoader, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, step in enumerate(loader, 1):
        for batch in step.microbatches(model):
            step.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        loader.commit()
        if number == steps:
            break


@pytest.fixture
def threads() -> Generator[None, None, None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)]
)
def test_running_statistics_are_refused(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 4), norm)
    with pytest.raises(ValueError, match=r"exact=True: 1 is a .*Norm1d in train mode.*GroupNorm"):
        train(model, loader_of())
    train(model.eval(), loader_of())


def test_a_batch_norm_without_running_statistics_is_not() -> None:
    train(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)), loader_of())


def test_sync_batch_norm_is_refused() -> None:
    model = nn.SyncBatchNorm(4)
    with pytest.raises(ValueError, match="SyncBatchNorm in train mode"):
        check_model(nn.ModuleDict({"norm": model}), one_process())
    check_model(model.eval(), one_process())


def test_a_buffer_that_the_forward_changes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"changed \['calls'\] on each rank"):
        train(Counts(True), loader_of())
    train(Counts(False), loader_of())  # a cache, or the same value again


def test_a_large_buffer_is_sampled_in_later_steps() -> None:
    model = Counts(False)
    model.register_buffer("calls", torch.zeros(300, 100).t())
    for step in (loader := loader_of()):
        model.counts = step.number > 0
        batches = iter(step.microbatches(model))
        for _ in range(2):
            step.backward(model(next(batches)).square().mean())
        if model.counts:
            with pytest.raises(ValueError, match=r"changed \['calls'\] on each rank"):
                next(batches)
            break
        list(batches)
    assert loader.step == 1


def test_several_gradients_of_a_parameter_in_a_microbatch_are_refused() -> None:
    model = nn.Linear(4, 1)
    for step in loader_of():
        batches = iter(step.microbatches(model))
        for number in range(2):
            batch = next(batches)
            for _ in range(1 + number):
                step.backward(model(batch).square().mean())
        with pytest.raises(ValueError, match=r"\['bias', 'weight'\] got gradients more than once"):
            next(batches)
        break


def test_spectral_norm_is_refused() -> None:
    torch.manual_seed(0)
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"microbatches\(\) changed .*_u"):
        train(model, loader_of())


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    loader = anyrank.ElasticLoader(
        torch.arange(5).repeat(4), global_batch=10, microbatch=5, exact=True
    )
    with pytest.raises(ValueError, match=r"gradient of weight is torch.sparse_coo.*sparse=False"):
        train(model, loader)


def test_own_backward_is_refused() -> None:
    model = nn.Linear(4, 1)
    for step in loader_of():
        batches = iter(step.microbatches(model, own_backward=True))
        with pytest.raises(ValueError, match="own_backward=True weights losses by a rank's"):
            next(batches)
        break


def test_a_plain_backward_is_refused() -> None:
    model = nn.Linear(4, 1)
    for step in loader_of():
        batches = iter(step.microbatches(model))
        for _ in range(2):
            model(next(batches)).mean().backward()
        with pytest.raises(ValueError, match=r"loss.backward\(\) was called directly"):
            next(batches)
        break


@pytest.mark.usefixtures("threads")
def test_another_number_of_threads_is_refused() -> None:
    loader = loader_of()
    train(nn.Linear(4, 1), loader, 1)
    state = loader.state_dict()
    assert set(state["exact"]) == {"threads", "device", "cpu", "torch", "anyrank", "wrapper"}
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    again = loader_of()
    with pytest.raises(anyrank.CheckpointError, match=rf"set_num_threads\({before}\)"):
        again.load_state_dict(state)
    with pytest.raises(ValueError, match=rf"set_num_threads\({before}\)"):
        train(nn.Linear(4, 1), loader, 1)
    torch.set_num_threads(before)
    again.load_state_dict(state)
    assert again.notes == []
    train(nn.Linear(4, 1), again, 1)
    assert again.notes == []


@pytest.mark.usefixtures("threads")
def test_another_number_of_threads_in_mid_run_is_refused() -> None:
    model, steps = nn.Linear(4, 1), iter(loader_of())
    before = torch.get_num_threads()
    step = next(steps)
    for batch in step.microbatches(model):
        step.backward(model(batch).square().mean())
    torch.set_num_threads(before + 1)
    batches = iter(next(steps).microbatches(model))
    with pytest.raises(ValueError, match=rf"set_num_threads\({before}\)"):
        next(batches)


def test_gradients_have_the_dtype_that_their_parameter_asks_for() -> None:
    model = nn.Linear(4, 1, dtype=torch.bfloat16)
    model.weight.grad_dtype = torch.float32
    for step in loader_of():
        for batch in step.microbatches(model):
            step.backward(model(batch.bfloat16()).square().mean())
        assert model.weight.grad is not None
        assert model.bias.grad is not None
        assert (model.weight.grad.dtype, model.bias.grad.dtype) == (torch.float32, torch.bfloat16)
        model.zero_grad()


@pytest.mark.parametrize("name", ["device", "cpu", "torch", "anyrank", "wrapper"])
def test_what_differs_from_the_run_is_noted(name: str, caplog: pytest.LogCaptureFixture) -> None:
    loader = loader_of()
    train(nn.Linear(4, 1), loader, 1)
    state = loader.state_dict()
    state["exact"][name] = "something else"
    again = loader_of()
    again.load_state_dict(state)
    train(nn.Linear(4, 1), again, 1)
    (note,) = again.notes
    assert "was something else and is" in note
    assert note in caplog.text


def test_a_compiled_model_is_noted_once(caplog: pytest.LogCaptureFixture) -> None:
    loader, model = loader_of(), torch.compile(nn.Linear(4, 1), backend="eager")
    assert isinstance(model, nn.Module)
    for _ in range(2):
        train(model, loader)
    (note,) = loader.notes
    assert "the same on any number of ranks only while the wrapper stays" in note
    assert "mode='max-autotune', which selects kernels by timing" in note
    assert caplog.text.count(note) == 1


@pytest.fixture
def deterministic() -> Generator[None, None, None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_kernels_of_a_device_have_to_be_deterministic() -> None:
    """On meta, which is no CPU: nothing is computed."""
    model = nn.Linear(4, 1, device="meta")
    match = r"torch\.use_deterministic_algorithms\(True\), without warn_only"
    for options in ({"mode": False}, {"mode": True, "warn_only": True}):
        torch.use_deterministic_algorithms(**options)
        with pytest.raises(ValueError, match=match):
            check_model(model, one_process())
    torch.use_deterministic_algorithms(True)
    check_model(model, one_process())


def test_exact_that_begins_or_ends_in_mid_run_is_noted() -> None:
    stock, exact = loader_of(False), loader_of()
    train(nn.Linear(4, 1), stock, 1)
    train(nn.Linear(4, 1), exact, 1)
    begins, ends = loader_of(), loader_of(False)
    begins.load_state_dict(stock.state_dict())
    assert begins.notes == [
        "exact=True starts at step 1; earlier steps were summed in another order"
    ]
    ends.load_state_dict(exact.state_dict())
    assert ends.notes == ["exact=True ends at step 1; from here on, results depend on the ranks"]
    assert "exact" not in stock.state_dict()


def test_gradients_from_before_the_pass_are_kept_and_added_to() -> None:
    model = nn.Linear(4, 1)
    grads: list[torch.Tensor] = []
    for _ in range(2):
        model.weight.grad = torch.full_like(model.weight, float(len(grads)))
        held = model.weight.grad
        for step in loader_of():
            for batch in step.microbatches(model):
                step.backward(model(batch).sum() * 0 + 1)
            break
        assert model.weight.grad is held  # who refers to it, as a CUDA graph does, sees the sum
        grads.append(held.clone())
    torch.testing.assert_close(grads[1], grads[0] + 1)


def test_a_pass_that_is_left_drops_its_terms() -> None:
    model = nn.Linear(4, 1)
    before = torch.ones_like(model.weight)
    model.weight.grad = before
    for step in loader_of():
        for batch in step.microbatches(model):
            step.backward(model(batch).square().mean())
            break
        break
    assert model.weight.grad is before
    assert torch.equal(before, torch.ones_like(before))
    assert model.bias.grad is None
