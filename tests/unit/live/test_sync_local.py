"""What a rank gives itself: whole copies, right for every way in which the two ends may lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import anyrank
from anyrank.testing import run_ranks

SIZE = 640  # squared, 1.6 MiB in float32: more than a message between ranks
Pair = tuple[torch.Tensor, torch.Tensor]  # dst, src


def random(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype)


def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(sizes, dtype=dtype)


def same() -> Pair:
    tensor = random(SIZE, SIZE)
    return tensor, tensor


def two_objects_of_one_memory() -> Pair:
    tensor = random(SIZE, SIZE)
    return tensor, tensor.view(SIZE, SIZE)


PAIRS: dict[str, Callable[[], Pair]] = {
    "alike": lambda: (zeros(SIZE, SIZE), random(SIZE, SIZE)),
    "narrowed": lambda: (zeros(SIZE, SIZE, dtype=torch.bfloat16), random(SIZE, SIZE)),
    "widened": lambda: (zeros(SIZE, SIZE), random(SIZE, SIZE, dtype=torch.float16)),
    "float8": lambda: (
        zeros(SIZE, SIZE, dtype=torch.float8_e4m3fn),
        random(SIZE, SIZE, dtype=torch.float8_e4m3fn).t(),
    ),
    "src transposed": lambda: (zeros(SIZE, SIZE), random(SIZE, SIZE).t()),
    "dst transposed": lambda: (zeros(SIZE, SIZE).t(), random(SIZE, SIZE)),
    "transposed and cast": lambda: (zeros(SIZE, SIZE).t(), random(SIZE, SIZE).bfloat16()),
    "both strided": lambda: (zeros(SIZE, 2 * SIZE)[:, ::2], random(2 * SIZE, SIZE)[::2]),
    "channels last": lambda: (
        zeros(8, 64, 32, 32).to(memory_format=torch.channels_last),
        random(8, 64, 32, 32),
    ),
    "src expanded": lambda: (zeros(SIZE, SIZE), random(SIZE, 1).expand(SIZE, SIZE)),
    "rows of another tensor": lambda: (zeros(2 * SIZE, SIZE)[SIZE:], random(3 * SIZE, SIZE)[:SIZE]),
    "empty": lambda: (zeros(0, SIZE), zeros(0, SIZE)),
    "one value": lambda: (zeros(), random()),
    "itself": same,
    "itself as another object": two_objects_of_one_memory,
}


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("kind", PAIRS)
def test_what_a_rank_gives_itself_has_the_values(kind: str, verify: bool, atomic: bool) -> None:
    dst, src = PAIRS[kind]()
    expected, beside, strides = src.clone().to(dst.dtype), random(SIZE), dst.stride()
    held = {"w": dst, "beside": torch.zeros(SIZE)}
    weights = anyrank.Sync(
        held, {"w": src, "beside": beside}, verify=verify, atomic=atomic, cast="any"
    )
    for _ in range(2):
        report = weights()
        assert held["w"] is dst
        assert dst.stride() == strides
        assert torch.equal(dst.float(), expected.float())
        assert torch.equal(held["beside"], beside)
        assert report.bytes_copied == [dst.numel() * dst.element_size() + SIZE * 4]
        assert report.bytes_sent == [0]
        if src.data_ptr() != dst.data_ptr():
            dst.zero_()  # is filled again
        beside.add_(1)


@pytest.mark.parametrize(
    "view",
    [lambda t: t.t(), lambda t: t.flip(0)[:SIZE], lambda t: t[: SIZE // 2], lambda t: t[1:]],
    ids=["transposed", "copied", "first rows", "shifted rows"],
)
def test_a_dst_in_the_memory_of_src_is_right_or_refused(view: Any) -> None:
    whole = random(SIZE, SIZE)
    before, dst = whole.clone(), view(whole)
    src = whole[: dst.shape[0]] if dst.shape != whole.shape else whole
    wanted = src.clone()
    is_apart = dst.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
    is_itself = (dst.data_ptr(), dst.stride()) == (src.data_ptr(), src.stride())
    if is_apart or is_itself:
        anyrank.sync({"w": dst}, {"w": src}, verify=True)
        assert torch.equal(dst, wanted)
        return
    with pytest.raises(anyrank.LoadError, match="shares memory with w of the source"):
        anyrank.sync({"w": dst}, {"w": src})
    assert torch.equal(whole, before)
    anyrank.sync({"w": dst}, {"w": src}, atomic=True)  # all is read before
    assert torch.equal(dst, wanted)


def test_ties_on_either_side_are_kept() -> None:
    class Tied(nn.Module):
        def __init__(self, *, tie: bool) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(SIZE, SIZE), nn.Linear(SIZE, SIZE, bias=False)
            if tie:
                self.head.weight = self.embed.weight

    torch.manual_seed(0)
    src, tied, untied = Tied(tie=True), Tied(tie=True), Tied(tie=False)
    report = anyrank.sync(tied, src, verify=True)
    assert tied.head.weight is tied.embed.weight
    assert report.bytes_copied == [SIZE * SIZE * 4]
    anyrank.sync(untied, src, verify=True)
    for model in (tied, untied):
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, src.embed.weight), name


class Copies(TorchDispatchMode):
    """Counts copies of one tensor into another."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func is torch.ops.aten.copy_.default
        return func(*args, **kwargs or {})


def test_a_tensor_of_many_mib_is_one_copy() -> None:
    """In pieces of a MiB, each would wait for a device, and a transposed one take six times as
    long.
    """
    pairs = [(zeros(2048, 1024), random(1024, 2048).t()), (zeros(2048, 1024), random(2048, 1024))]
    ends = [{str(n): pair[side] for n, pair in enumerate(pairs)} for side in (0, 1)]
    with Copies() as copies:
        anyrank.sync(*ends)
    assert copies.num == len(pairs)


def test_merged_adapters_stay_in_pieces() -> None:
    """A product as large as the weight would be memory beside the two ends."""
    torch.manual_seed(0)
    src: Any = get_peft_model(
        nn.Sequential(nn.Linear(1024, 2048, bias=False)), LoraConfig(target_modules=["0"])
    )
    nn.init.normal_(src.base_model.model[0].lora_B["default"].weight)
    dst: Any = nn.Sequential(nn.Linear(1024, 2048, bias=False))
    largest: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **kwargs or {})
            if func is torch.ops.aten.clone.default:
                largest.append(out.numel() * out.element_size())
            return out

    with Sizes():
        anyrank.sync(dst, src, merge=True, verify=False)
    assert max(largest) <= 1 << 20
    assert torch.equal(dst[0].weight, src.merge_and_unload()[0].weight)


def job_shares() -> None:
    """FSDP2 on one rank, whose shares are the wholes, into itself, a plain copy, and back."""
    mesh = init_device_mesh("cpu", (1,))
    torch.manual_seed(0)
    src, same_layout, back, plain = (nn.Sequential(nn.Linear(SIZE, SIZE)) for _ in range(4))
    for model in (src, same_layout, back):
        fully_shard(model, mesh=mesh)
    plain.bfloat16()
    for dst, given in ((same_layout, src), (plain, src), (back, plain), (src, src)):
        anyrank.sync(dst, given, verify=True)
    narrow = {name: tensor.bfloat16() for name, tensor in whole(src).items()}
    for model, wanted in (
        (same_layout, whole(src)),
        (plain, narrow),
        (back, {name: tensor.float() for name, tensor in narrow.items()}),
    ):
        for name, tensor in whole(model).items():
            assert torch.equal(tensor, wanted[name]), name


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    held: dict[str, Any] = model.state_dict()
    return {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in held.items()}


def test_shares_of_fsdp2_on_one_rank() -> None:
    run_ranks(1, job_shares)
