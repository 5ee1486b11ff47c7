"""`Offload` on CPU tensors as a device's would go: real copies through the whole engine."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from tests.offloads import offload_of_cpu
from torch import nn

import anyrank
from anyrank.memory import offload_engine
from anyrank.memory.host_buffers import CopyEngine
from anyrank.memory.offload import get_engine

WIDTH = 16
ROWS = 32
NBYTES = ROWS * WIDTH * 8  # one activation in float64


def make(**options: Any) -> anyrank.Offload:
    return offload_of_cpu(**{"pool_bytes": 100 * NBYTES, "keep_last": 0, **options})


class Block(nn.Module):
    """A layer; other tensors scale its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        for tensor in rest:
            x = x * tensor
        return torch.tanh(self.linear(x)).sin()


class Model(nn.Module):
    """Blocks in a row, each of which also gets what all get."""

    def __init__(self, blocks: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block() for _ in range(blocks)])

    def forward(self, x: torch.Tensor, *shared: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, *shared)
        return x


def double(*shape: int, grad: bool = True) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_(grad)


def grads(model: nn.Module, *args: torch.Tensor) -> list[torch.Tensor]:
    wanted = [*model.parameters(), *(x for x in args if x.requires_grad)]
    return list(torch.autograd.grad(model(*args).sum(), wanted))


def assert_equal(ours: Iterable[torch.Tensor], plain: Iterable[torch.Tensor]) -> None:
    for mine, wanted in zip(ours, plain, strict=True):
        assert torch.equal(mine, wanted)


@pytest.fixture(scope="module", autouse=True)
def first_region() -> None:
    """torch imports modules in a process's first region, and keeps its frames in a cycle."""
    anyrank.recompute(torch.sin, torch.ones(1, requires_grad=True)).backward()


@pytest.fixture(autouse=True)
def no_cycles() -> Iterator[None]:
    """Nothing may need the cycle collector."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each copy back from the host."""
    found: list[int] = []
    to_device = CopyEngine.to_device

    def noted(self: CopyEngine, target: torch.Tensor, *rest: Any) -> Any:
        found.append(target.nbytes)
        return to_device(self, target, *rest)

    monkeypatch.setattr(CopyEngine, "to_device", noted)
    return found


@pytest.mark.parametrize("keep_last", [0, 1, 3, 9])
@pytest.mark.parametrize("pool", [100, 2])
def test_gradients_are_those_without_offload(keep_last: int, pool: int, loads: list[int]) -> None:
    model, x = Model(), double(ROWS, WIDTH)
    plain = grads(model, x)
    offload = make(keep_last=keep_last, pool_bytes=pool * NBYTES)
    anyrank.recompute_(model, "layers.*", offload=offload)
    for _ in range(3):
        assert_equal(grads(model, x), plain)
    sent = max(0, 5 - keep_last)
    moved = min(sent, pool)
    stats = offload.stats()
    assert stats.copied_bytes == sum(loads) == 3 * moved * NBYTES
    assert stats.kept == 3 * (sent - moved)
    assert stats.used_bytes == 0
    assert stats.held_bytes == stats.peak_bytes == moved * NBYTES


class Watched(nn.Module):
    """Notes the storages of what each block is given."""

    def __init__(self, inner: nn.Module, seen: list[weakref.ref[Any]]) -> None:
        super().__init__()
        self.inner = inner
        self.seen = seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(weakref.ref(x.untyped_storage()))
        return self.inner(x)


@pytest.mark.parametrize("keep_last", [0, 1, 2])
def test_after_forward_only_the_last_blocks_inputs_are_on_the_device(keep_last: int) -> None:
    seen: list[weakref.ref[Any]] = []
    model = nn.Sequential(*(Watched(Block(), seen) for _ in range(5)))
    anyrank.recompute_(model, "*", offload=make(keep_last=keep_last))
    loss = model(double(ROWS, WIDTH) * 1).sum()
    alive = [ref() is not None for ref in seen]
    assert alive == [False] * (5 - keep_last) + [True] * keep_last
    loss.backward()
    assert [ref() for ref in seen] == [None] * 10


def test_backward_fetches_in_reverse_one_block_ahead(loads: list[int]) -> None:
    model, x = Model(4), double(ROWS, WIDTH)
    offload = make()
    anyrank.recompute_(model, "layers.*", offload=offload)
    order: list[Any] = []
    for n, layer in enumerate(model.layers):
        layer.linear.register_forward_pre_hook(lambda m, args, n=n: order.append((n, len(loads))))
    loss = model(x).sum()
    order.clear()
    loss.backward()
    assert order == [(3, 2), (2, 3), (1, 4), (0, 4)]


def test_what_all_blocks_share_is_sent_once(loads: list[int]) -> None:
    model = Model()
    x, mask, table = double(ROWS, WIDTH), double(ROWS, WIDTH), double(WIDTH, ROWS)
    args = (x, mask, table.t(), mask.view(ROWS, WIDTH))
    plain = grads(model, *args[:3], args[3].detach())
    offload = make()
    anyrank.recompute_(model, "layers.*", offload=offload)
    assert_equal(grads(model, *args[:3], args[3].detach()), plain)
    assert offload.stats().copied_bytes == 7 * NBYTES  # five activations, the mask, the table
    assert sum(loads) <= 7 * NBYTES


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("small", lambda x: x[:1].clone()),
        ("expanded", lambda x: x[:1].expand(ROWS, WIDTH)),
        ("a small part", lambda x: x.repeat(1, 3)[:, :WIDTH]),
        ("parameter", nn.Parameter),
        ("view of a parameter", lambda x: nn.Parameter(x).view(ROWS, WIDTH)),
        ("sparse", lambda x: x.to_sparse().requires_grad_()),
        ("subclass", lambda x: x.as_subclass(Subclass)),
        ("buffer", nn.Buffer),
        ("meta", lambda x: x.to("meta")),
    ],
)
def test_what_stays(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    offload = make(min_bytes=NBYTES // 2)
    tensor = change(double(ROWS, WIDTH, grad=False))
    module = nn.Module()
    if name == "buffer":
        module.register_buffer("table", tensor)
    module.forward = lambda x: (x + x) * 2  # type: ignore[method-assign]
    before = tensor.sum() if name != "meta" else None
    result = anyrank.recompute(module, tensor, offload=offload)
    assert offload.stats().copied_bytes == 0
    assert result.shape == tensor.shape
    assert before is None or torch.equal(before, tensor.sum())


class Subclass(torch.Tensor):
    """A type that nobody knows."""


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[2:, 1:],
        lambda x: x.view(ROWS // 2, 2, WIDTH).transpose(0, 2),
        lambda x: x.as_strided((ROWS - 1, WIDTH), (WIDTH, 1), WIDTH),
        lambda x: torch.view_as_complex(x.view(ROWS, WIDTH // 2, 2)),
    ],
)
def test_size_stride_and_offset_come_back(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = double(ROWS, WIDTH)
    shapes: list[Any] = []

    def fn(y: torch.Tensor) -> torch.Tensor:
        shapes.append((y.shape, y.stride(), y.storage_offset(), y.dtype))
        return (y * y).abs().sin()

    plain = torch.autograd.grad(fn(view(x * 1)).sum(), x)
    offload = make()
    assert_equal(torch.autograd.grad(anyrank.recompute(fn, view(x * 1), offload=offload).sum(), x),
                 plain)  # fmt: skip
    assert offload.stats().copied_bytes == NBYTES
    assert shapes[0] == shapes[1] == shapes[2]


def test_retained_graphs_and_double_backward_keep_the_host_copy() -> None:
    model, x = Model(3), double(ROWS, WIDTH)
    plain = grads(model, x)
    offload = make()
    anyrank.recompute_(model, "layers.*", offload=offload)
    loss = model(x).sum()
    wanted = [*model.parameters(), x]
    assert_equal(torch.autograd.grad(loss, wanted, retain_graph=True), plain)
    assert offload.stats().used_bytes == 3 * NBYTES
    assert_equal(torch.autograd.grad(loss, wanted), plain)
    del loss
    assert offload.stats().used_bytes == 0
    small = double(1, WIDTH)
    # times one: the check writes into its argument behind autograd's back
    assert torch.autograd.gradgradcheck(lambda x: model(x * 1), [small])


def test_nested_regions_and_tiles_inside() -> None:
    model, x = Model(4), double(1, ROWS, WIDTH)
    halves = nn.Sequential(
        nn.Sequential(model.layers[0], model.layers[1]),
        nn.Sequential(model.layers[2], model.layers[3]),
    )
    plain = grads(halves, x)
    offload = make()
    anyrank.tile_(halves, "*.*", chunk_size=8)
    anyrank.recompute_(halves, "*.*")
    anyrank.recompute_(halves, "*", offload=offload)
    for mine, wanted in zip(grads(halves, x), plain, strict=True):
        torch.testing.assert_close(mine, wanted)
    assert offload.stats().copied_bytes == 2 * NBYTES


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_moves(mode: Callable[[], Any]) -> None:
    model, x = Model(), double(ROWS, WIDTH, grad=False)
    offload = make()
    anyrank.recompute_(model, "layers.*", offload=offload)
    with mode():
        model(x)
    assert offload.stats().copied_bytes == 0


def test_a_cpu_tensor_stays() -> None:
    model, x = Model(), double(ROWS, WIDTH)
    offload = anyrank.Offload(100 * NBYTES, min_bytes=1, keep_last=0)
    anyrank.recompute_(model, "layers.*", offload=offload)
    grads(model, x)
    assert offload.stats().copied_bytes == 0


def test_host_bytes_stay_the_same_over_100_steps_of_changing_length() -> None:
    model = Model(3)
    offload = make(pool_bytes=5 * NBYTES)
    anyrank.recompute_(model, "layers.*", offload=offload)
    held = set()
    for step in range(100):
        grads(model, double(ROWS - step % 7, WIDTH))
        held.add(offload.stats().held_bytes)
        assert offload.stats().used_bytes == 0
    assert max(held) <= 5 * NBYTES
    assert offload.stats().kept == 0


# -- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_last", [0, 1, 3])
def test_a_tensor_that_changes_in_place_is_named(keep_last: int) -> None:
    model, x = Model(3), double(ROWS, WIDTH)
    anyrank.recompute_(model, "layers.*", offload=make(keep_last=keep_last))
    hidden = x * 1
    loss = model(hidden).sum()
    hidden.data.zero_()  # nobody can see this
    hidden.detach().add_(1)
    with pytest.raises(anyrank.RecomputeError, match=r"args\[0\] of layers.0, a float64\[32, 16\]"):
        loss.backward()


def test_a_change_before_the_copy_is_found_when_it_would_be_sent() -> None:
    model, x = Model(3), double(ROWS, WIDTH)
    anyrank.recompute_(model, "layers.*", offload=make(keep_last=1))
    hidden = x * 1
    second = model.layers[0](hidden)
    hidden.detach().add_(1)
    with pytest.raises(anyrank.RecomputeError, match="was changed in place"):
        model.layers[1](second)


def test_a_storage_that_changes_between_two_blocks_is_sent_again() -> None:
    model, x = Model(2), double(ROWS, WIDTH)
    first, second = model.layers
    base = double(ROWS, WIDTH, grad=False)
    wanted = [x, *model.parameters()]
    plain = torch.autograd.grad(second(first(x, base), base + 1).sum(), wanted)
    anyrank.recompute_(model, "layers.*", offload=make())
    hidden = first(x, base.view(ROWS, WIDTH))
    base += 1
    assert_equal(torch.autograd.grad(second(hidden, base).sum(), wanted), plain)


def test_a_new_storage_where_one_was_is_another() -> None:
    offload = make()
    results: list[torch.Tensor] = []
    places: list[int] = []
    sources = [double(ROWS, WIDTH).detach().add(n).requires_grad_() for n in range(40)]
    for source in sources:
        given = source * 2
        places.append(id(given.untyped_storage()))
        results.append(anyrank.recompute(torch.sin, given, offload=offload))
        del given
    assert len(set(places)) < len(places)
    grads = torch.autograd.grad(torch.stack(results).sum(), sources)
    assert_equal(grads, [2 * (source * 2).cos() for source in sources])


def test_an_error_in_a_block_gives_everything_back() -> None:
    model, x = Model(), double(ROWS, WIDTH)
    plain = grads(model, x)
    offload = make()
    anyrank.recompute_(model, "layers.*", offload=offload)
    hook = model.layers[3].register_forward_pre_hook(lambda *_: 1 / 0)
    inner = model.layers[3].linear.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    hook.remove()
    with pytest.raises(ZeroDivisionError):
        model(x)
    inner.remove()
    assert offload.stats().used_bytes == 0
    assert_equal(grads(model, x), plain)


def test_close_frees_what_nobody_needs() -> None:
    model, x = Model(2), double(ROWS, WIDTH)
    offload = make()
    anyrank.recompute_(model, "layers.*", offload=offload)
    loss = model(x).sum()
    with pytest.raises(ValueError, match="a graph still needs 8192 bytes of this offload"):
        offload.close()
    loss.backward()
    offload.close()
    offload.close()
    assert offload.stats().held_bytes == 0
    with pytest.raises(ValueError, match=r"layers\.0: its offload is closed"):
        model(x)


# -- copies that are slow -------------------------------------------------------------------------


class Late:
    """Copies as a slow device makes them: none is done before somebody waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.open: list[Copy] = []

    def to_host(self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Any]) -> Any:
        return Copy(target, source, tuple(after))

    to_device = to_host

    def stream(self) -> Any:
        return "compute"

    def wait(self, event: Any, stream: Any = None) -> None:
        if event is not None:
            event.synchronize()


class Copy:
    """One copy that waits. What it reads must still be there when it runs, or it copies rubbish."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor, after: tuple[Any, ...]) -> None:
        self.target, self.source, self.after = target, weakref.ref(source.untyped_storage()), after
        self.nbytes = source.numel()
        self.done = False
        target.fill_(0xAB)

    def synchronize(self) -> None:
        if self.done:
            return
        for event in self.after:
            event.synchronize()
        storage = self.source()
        if storage is not None:  # else: it was dropped too early, and rubbish stays
            self.target.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
        self.done = True


@pytest.mark.parametrize("keep_last", [0, 1, 2])
def test_slow_copies_are_waited_for(keep_last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_engine, "CopyEngine", Late)
    model, x = Model(), double(ROWS, WIDTH)
    shared = double(ROWS, WIDTH, grad=False)
    plain = grads(model, x, shared)
    anyrank.recompute_(model, "layers.*", offload=make(keep_last=keep_last))
    for _ in range(3):  # buffers are used again while copies of the step before may be open
        assert_equal(grads(model, x, shared), plain)
    loss = model(x, shared).sum()
    del loss  # never reached backward
    assert_equal(grads(model, x, shared), plain)


class Noted:
    """Notes for which copies each copy waits, and which streams wait for which copy."""

    def __init__(self, device: torch.device) -> None:
        self.copies: list[tuple[str, tuple[Any, ...]]] = []
        self.waits: list[tuple[str, Any]] = []

    def stream(self) -> Any:
        return "compute"

    def to_host(self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Any]) -> str:
        return self.copy("out", target, source, after)

    def to_device(self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Any]) -> str:
        return self.copy("back", target, source, after)

    def copy(self, way: str, target: torch.Tensor, source: torch.Tensor, after: Any) -> str:
        target.copy_(source)
        self.copies.append((f"{way} {len(self.copies)}", tuple(after)))
        return self.copies[-1][0]

    def wait(self, event: Any, stream: Any = None) -> None:
        self.waits.append((event, stream))


def test_copies_on_other_streams_wait_for_the_last_that_used_the_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload_engine, "CopyEngine", Noted)
    model, x = Model(1), double(ROWS, WIDTH)
    offload = make()
    anyrank.recompute_(model, "layers.*", offload=offload)
    for _ in range(2):
        grads(model, x * 1)
    (copies,) = get_engine(offload).copy_engines.values()
    assert isinstance(copies, Noted)
    assert copies.copies == [
        ("out 0", ()),
        ("back 1", ("out 0",)),
        ("out 2", ("back 1",)),
        ("back 3", ("out 2",)),
    ]


def test_what_is_copied_back_for_nothing_is_freed_behind_its_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A backward pass that ends before it: nobody has waited for the copy, which goes on while the
    memory is used again.
    """
    monkeypatch.setattr(offload_engine, "CopyEngine", Noted)
    first, second = Model(1), Model(1)
    offload = make()
    anyrank.recompute_(first, "layers.*", offload=offload)
    anyrank.recompute_(second, "layers.*", offload=offload)
    middle = first(double(ROWS, WIDTH) * 1).detach().requires_grad_()
    kept = first(middle * 1)
    second(kept.detach() * 1).sum().backward()
    (copies,) = get_engine(offload).copy_engines.values()
    assert isinstance(copies, Noted)
    ahead = [name for name, _ in copies.copies if name.startswith("back")][-1]
    assert (ahead, None) not in copies.waits
    del kept
    assert copies.waits[-1] == (ahead, "compute")


def test_copies_of_what_holds_it_share_it() -> None:
    offload = anyrank.Offload(1 << 20)
    assert copy.deepcopy({"offload": offload})["offload"] is offload
