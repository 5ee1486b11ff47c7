"""Loads one step beside plain state dicts: the right values, or a refusal that names the tensor."""

from __future__ import annotations

import logging
import ntpath
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Shard

import anyrank

# -- views and memory that plain bytes do not describe --------------------------------------------


def holder(tensor: torch.Tensor, kind: str = "buffer") -> nn.Module:
    module = nn.Module()
    if kind == "buffer":
        module.register_buffer("p", tensor)
    else:
        module.p = nn.Parameter(tensor)
    return module


@pytest.mark.parametrize("view", ["conj", "neg"])
def test_a_lazy_view_in_a_file_is_refused_by_name(tmp_path: Path, view: str) -> None:
    z = torch.randn(3, dtype=torch.complex64).conj()
    torch.save({"p": z if view == "conj" else z.imag}, tmp_path / "w.pt")
    model = holder(torch.zeros(3, dtype=z.dtype if view == "conj" else torch.float32))
    with pytest.raises(anyrank.LoadError, match=f"p: was saved as a {view} view"):
        anyrank.load(model, tmp_path / "w.pt")


def inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


@pytest.mark.parametrize(
    ("tensor", "match"),
    [
        (torch.zeros(3, dtype=torch.complex64).conj(), "p: is a conj or neg view"),
        (torch.zeros(3, dtype=torch.complex64).conj().imag, "p: is a conj or neg view"),
        (torch.zeros(1).expand(3), "p: is an expanded tensor"),
        (inference_tensor(), "p: is an inference tensor"),
    ],
)
def test_a_buffer_that_cannot_take_bytes_is_refused_before_anything_moves(
    tensor: torch.Tensor, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(anyrank.faults.armed, "load.read", lambda: pytest.fail("payload was read"))
    with pytest.raises(anyrank.LoadError, match=match):
        anyrank.load(holder(tensor), {"p": torch.ones(3, dtype=tensor.dtype)})


def test_a_lazy_module_is_refused_by_name() -> None:
    with pytest.raises(anyrank.LoadError, match=r"1\.weight: is a lazy parameter"):
        anyrank.load(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), {"x": torch.ones(1)})


def test_fsdp1_is_refused_by_name() -> None:
    model = nn.Module()
    model.inner = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(model.inner)
    with pytest.raises(anyrank.LoadError, match=r"inner: is wrapped by .*\(FSDP1\).*fully_shard"):
        anyrank.load(model, {"x": torch.ones(1)})


QUANTISED: dict[str, Any] = {
    "torch.sparse_coo tensor": lambda: torch.eye(2).to_sparse(),
    "quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore:torch.*quantiz")
@pytest.mark.parametrize("kind", QUANTISED)
def test_tensors_without_plain_bytes_are_refused_by_name(kind: str) -> None:
    model = nn.Module()
    model.register_buffer("x", QUANTISED[kind]())
    with pytest.raises(anyrank.LoadError, match=f"x: is a {kind}"):
        anyrank.load(model, {"x": torch.ones(2, 2)}, cast="any")
    with pytest.raises(anyrank.LoadError, match=r"x: is .*, whose bytes are not its values"):
        anyrank.load(nn.Module(), {"x": QUANTISED[kind]()})


@pytest.mark.parametrize("missing", ["error", "init", "keep"])
def test_a_value_under_a_name_of_the_model_that_is_no_tensor_is_not_missing(missing: Any) -> None:
    state: dict[str, Any] = nn.Linear(2, 2).state_dict()
    state["bias"] = state["bias"].numpy()
    with pytest.raises(
        anyrank.LoadError,
        match=r"bias: is an array, not a tensor .convert it with torch.as_tensor.* not read",
    ):
        anyrank.load(nn.Linear(2, 2), state, missing=missing)
    anyrank.load(nn.Linear(2, 2, bias=False), state, missing=missing)  # which has no such name
    state["bias"] = None  # as of a layer without one
    if missing != "error":
        anyrank.load(nn.Linear(2, 2), state, missing=missing)


@pytest.mark.parametrize("cast", ["float", "any"])
def test_two_numbers_in_a_byte_become_no_other_dtype(cast: Any, tmp_path: Path) -> None:
    four = torch.arange(8, dtype=torch.uint8).view(4, 2).view(torch.float4_e2m1fn_x2)
    state = {"weight": four}
    save_file(state, tmp_path / "w.safetensors")
    for source in (state, tmp_path / "w.safetensors"):
        with pytest.raises(
            anyrank.LoadError, match=r"weight: .*two values into a byte .*Dequantize"
        ):
            anyrank.load(nn.Linear(2, 4, bias=False), source, cast=cast)
    with pytest.raises(anyrank.LoadError, match="two values into a byte"):
        anyrank.sync(nn.Linear(2, 4, bias=False), state, cast=cast)
    with pytest.raises(
        anyrank.LoadError, match=r"two values per byte, and cannot be cast\. Remove dtype="
    ):
        anyrank.convert(tmp_path / "w.safetensors", tmp_path / "out", dtype="bfloat16")
    anyrank.convert(tmp_path / "w.safetensors", tmp_path / "out")
    packed = nn.Module()
    packed.register_buffer("weight", torch.zeros_like(four.view(torch.uint8)).view(four.dtype))
    anyrank.load(packed, tmp_path / "out")
    assert torch.equal(packed.get_buffer("weight").view(torch.uint8), four.view(torch.uint8))


@pytest.mark.filterwarnings("ignore:torch.*quantiz")
def test_packed_weights_of_a_quantised_module_are_refused_by_name() -> None:
    plain = nn.Sequential(nn.Linear(2, 2))
    model = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear})
    with pytest.raises(anyrank.LoadError, match=r"0: is a torch\.ao\..*Linear, whose weights are"):
        anyrank.load(model, plain.state_dict(), unexpected="ignore")


# -- what load_state_dict would have run ----------------------------------------------------------


class Doubling(nn.Linear):
    """Its old checkpoints held half of the weight."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_load_state_dict_pre_hook(self.convert)

    @staticmethod
    def convert(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"] * 2


class Corrected(nn.Linear):
    """Its weight is changed once it is loaded."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_load_state_dict_post_hook(self.correct)

    @staticmethod
    def correct(module: nn.Linear, keys: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(3)


class Versioned(nn.Linear):
    """Converts the first version only; a state dict knows the version that wrote it."""

    _version = 2

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, *rest: Any
    ) -> None:
        if metadata.get("version") in (None, 1):
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"] + 1
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


class Counting(nn.Linear):
    count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("kind", ["dict", "pt", "safetensors"])
@pytest.mark.parametrize("leaf", [Doubling, Corrected, Versioned])
def test_bytes_are_loaded_as_they_are_and_the_modules_with_own_code_are_named(
    tmp_path: Path, leaf: Any, kind: str, on_meta: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 3), nn.Sequential(leaf(3, 3), nn.Linear(3, 3)))

    source: Any = build().state_dict()
    values = {name: tensor.clone() for name, tensor in source.items()}
    if kind == "pt":
        torch.save(source, tmp_path / "w.pt")
    elif kind == "safetensors":
        save_file(source, tmp_path / "w.safetensors")
    with torch.device("meta" if on_meta else "cpu"):
        model = build()
    with caplog.at_level(logging.WARNING, "anyrank.load"):
        report = anyrank.load(model, source if kind == "dict" else tmp_path / f"w.{kind}")
    assert report.own_code == []
    assert list(report.own_code_not_run) == ["1.0"]
    assert "1.0 overrides load_state_dict, and this code was not run" in caplog.text
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, values[name])


class Halved(nn.Linear):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        raise AssertionError("it is named, and not run")


def test_a_models_own_load_state_dict_is_named() -> None:
    state = nn.Linear(2, 2).state_dict()
    for model in (Halved(2, 2), torch.compile(Halved(2, 2), backend="eager")):
        report = anyrank.load(model, state)  # type: ignore[arg-type]
        assert list(report.own_code_not_run) == ["the model"]
        assert torch.equal(model.weight, state["weight"])  # type: ignore[union-attr, arg-type]
    child = nn.Sequential(Halved(2, 2))  # which torch does not call
    report = anyrank.load(child, {f"0.{key}": t for key, t in state.items()})
    assert report.own_code_not_run == {}
    assert torch.equal(child[0].weight, state["weight"])


@pytest.mark.parametrize("in_file", [False, True])
def test_extra_state_is_given_to_its_module(tmp_path: Path, in_file: bool) -> None:
    saved, model = (nn.Sequential(nn.Linear(2, 2), Counting(2, 2)) for _ in range(2))
    saved[1].count = 7  # type: ignore[assignment]
    source: Any = saved.state_dict()
    if in_file:
        torch.save(source, tmp_path / "w.pt")
        source = tmp_path / "w.pt"
    report = anyrank.load(model, source)
    assert model[1].count == 7
    assert report.own_code == ["1._extra_state"]


class Holding(nn.Linear):
    """Its extra state is whatever it was given."""

    held: Any = None

    def get_extra_state(self) -> Any:
        return self.held

    def set_extra_state(self, state: Any) -> None:
        self.held = state


EXTRAS: dict[str, Any] = {
    "tensor": torch.arange(4),
    "view": torch.arange(12.0).reshape(3, 4).t(),
    "empty": torch.zeros(0),
    "bytes": b"\x00z\xff",
    "no bytes": b"",
    "bytes inside": {"b": b"zz", "n": (1, None)},
    "set": {1, 2},
    "dtype": torch.float16,
}


@pytest.mark.parametrize("kind", ["dict", "zip", "legacy"])
@pytest.mark.parametrize("name", EXTRAS)
def test_extra_state_that_is_a_tensor_or_bytes_is_given(
    tmp_path: Path, name: str, kind: str
) -> None:
    saved, model = (nn.Sequential(nn.Linear(2, 2), Holding(2, 2)) for _ in range(2))
    saved[1].held = EXTRAS[name]
    source: Any = saved.state_dict()
    if kind != "dict":
        zipped = kind == "zip"
        torch.save(source, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
        source = tmp_path / "w.pt"
    report = anyrank.load(model, source)
    held: Any = model[1].held
    assert type(held) is type(EXTRAS[name])
    same = torch.equal if isinstance(held, torch.Tensor) else lambda a, b: a == b
    assert same(held, EXTRAS[name])
    assert report.own_code == ["1._extra_state"]
    assert not report.unexpected
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if isinstance(held, torch.Tensor):  # which no module of this model takes
        with pytest.raises(anyrank.LoadError, match=r"unexpected.*\n  1\._extra_state"):
            anyrank.load(plain, source)


def test_extra_state_that_is_no_plain_data_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved, model = Counting(2, 2), Counting(2, 2)
    saved.count = {"tensor": torch.ones(1)}  # type: ignore[assignment]
    torch.save(saved.state_dict(), tmp_path / "w.pt")
    with caplog.at_level(logging.WARNING, "anyrank.load"):
        report = anyrank.load(model, tmp_path / "w.pt")
    assert list(report.own_code_not_run) == ["_extra_state"]
    assert "_extra_state is not plain data" in caplog.text
    assert model.count == 0


# -- files that hold more than one table ----------------------------------------------------------


class Transposed(nn.Linear):
    """Has another form in its state_dict() than in the model."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"].t()

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
        super()._load_from_state_dict(state, prefix, *rest)


def test_what_a_run_holds_goes_through_no_code_of_modules(tmp_path: Path) -> None:
    first, second = nn.Sequential(Transposed(3, 3)), nn.Sequential(Transposed(3, 3))
    with anyrank.Checkpoints(tmp_path / "run", anyrank.TrainState(first)) as ckpts:
        ckpts.save()
    anyrank.load(second, tmp_path / "run")
    assert torch.equal(first[0].weight, second[0].weight)
    with pytest.raises(
        anyrank.LoadError, match=r"0\.weight: custom code of its module changes it in"
    ):
        anyrank.convert(first, tmp_path / "out")
    torch.save(first.state_dict(), tmp_path / "first.pt")
    assert list(anyrank.load(second, tmp_path / "first.pt").own_code_not_run) == ["0"]


def test_extra_state_that_its_module_refuses_comes_after_the_weights() -> None:
    class Picky(nn.Linear):
        def get_extra_state(self) -> int:
            return 1

        def set_extra_state(self, state: int) -> None:
            raise ValueError("not this one")

    source = Picky(2, 2)
    with anyrank.meta():
        model = Picky(2, 2)
    with pytest.raises(anyrank.LoadError, match=r"not this one\n  The model has its new values"):
        anyrank.load(model, source.state_dict())
    assert torch.equal(model.weight, source.weight)


def test_extra_state_that_no_source_has_is_named(tmp_path: Path) -> None:
    class Counts(nn.Linear):
        def get_extra_state(self) -> int:
            return 1

        def set_extra_state(self, state: int) -> None: ...

    report = anyrank.convert(nn.Sequential(Counts(2, 2)), tmp_path / "out")
    assert report.skipped == ["0._extra_state: extra state of a module, which is not a tensor"]
    report = anyrank.load(nn.Sequential(Counts(2, 2)), tmp_path / "out")
    assert report.own_code_not_run == {
        "0._extra_state": "is not in the source, so the module keeps its own"
    }


def test_memory_that_meta_would_part_is_refused_and_strides_stay(tmp_path: Path) -> None:
    def build(how: str) -> nn.Module:
        net: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Conv2d(3, 3, 3))
        if how == "tied data":
            net[1].weight.data = net[0].weight.data
        if how == "parts":
            both = torch.ones(8, 4)
            net[0].weight, net[1].weight = (nn.Parameter(part) for part in both.chunk(2))
        return net.to(memory_format=torch.channels_last)

    torch.save(build("plain").state_dict(), tmp_path / "w.pt")
    for how in ("plain", "parts"):
        with anyrank.meta():
            net: Any = build(how)
        strides = net[2].weight.stride()
        anyrank.load(net, tmp_path / "w.pt")
        assert net[2].weight.stride() == strides == (27, 1, 9, 3)
    with anyrank.meta():
        net = build("tied data")
    for call in (lambda: anyrank.load(net, tmp_path / "w.pt"), lambda: anyrank.materialize(net)):
        with pytest.raises(anyrank.LoadError, match=r"0\.weight and 1\.weight share memory"):
            call()


def test_the_table_that_was_not_chosen_is_in_the_report(tmp_path: Path) -> None:
    state = nn.Linear(2, 2).state_dict()
    torch.save({"model": state, "model_ema": state, "step": 3}, tmp_path / "w.pt")
    skipped = anyrank.load(nn.Linear(2, 2), tmp_path / "w.pt").skipped
    assert [line.partition(":")[0] for line in skipped] == ["model_ema", "step"]


@pytest.mark.parametrize("name", ["model", "net"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_of_an_app_state_are_found(tmp_path: Path, name: str) -> None:
    """As torch's recipe for DCP and torchtitan write them: one Stateful that holds all."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    kept = {"app": {name: weights, "optimizer": moments, "step": 3}}
    dcp.save(kept, checkpoint_id=tmp_path / "w")
    other = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    report = anyrank.load(other, tmp_path / "w")
    for key, tensor in other.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[key]), key
    assert any("app.optimizer" in line for line in report.skipped)
    anyrank.convert(tmp_path / "w", tmp_path / "out", model=other)
    assert anyrank.diff(model.state_dict(), tmp_path / "out")


def test_weights_below_two_names_are_not_chosen_between(tmp_path: Path) -> None:
    state = nn.Linear(2, 2).state_dict()
    given = {f"{name}.model.{key}": t for name in ("a", "b") for key, t in state.items()}
    with pytest.raises(anyrank.LoadError, match=r"a\.model\.weight"):
        anyrank.load(nn.Linear(2, 2), given)


def test_weights_beside_a_stray_tensor_are_found(tmp_path: Path) -> None:
    """As Sana's training script writes them: the generator's state is a tensor."""
    state = nn.Linear(2, 2).state_dict()
    kept = {"state_dict": state, "state_dict_ema": state, "generator": torch.get_rng_state()}
    torch.save(kept, tmp_path / "w.pth")
    model = nn.Linear(2, 2)
    report = anyrank.load(model, tmp_path / "w.pth")
    assert torch.equal(model.weight, state["weight"])
    assert [line.partition(":")[0] for line in report.skipped] == ["state_dict_ema", "generator"]
    with pytest.raises(anyrank.LoadError, match="state_dict_ema: not among the weights"):
        anyrank.load(nn.Linear(3, 3), tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"source\['state_dict'\]"):
        anyrank.load(nn.Linear(2, 2), kept)


BESIDE: dict[str, Any] = {
    "a set": lambda: {1, "x"},
    "a frozenset": lambda: frozenset([1]),
    "a complex number": lambda: 1j,
    "a bytearray": lambda: bytearray(b"x"),
    "bytes": lambda: b"x",
    "a range": lambda: range(3),
}
BYTELESS: dict[str, Any] = {
    "a sparse tensor": lambda: torch.eye(2).to_sparse(),
    "a sparse tensor: ": lambda: torch.eye(2).to_sparse_csr(),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "a nested tensor: ": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "a quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "a quantized tensor: ": lambda: torch.quantize_per_channel(
        torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8
    ),
    "a tensor on meta": lambda: torch.ones(2, device="meta"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kind", BESIDE | BYTELESS)
def test_what_stands_beside_the_weights_is_passed_over_by_name(
    tmp_path: Path, kind: str, zipped: bool
) -> None:
    state = nn.Linear(2, 2).state_dict()
    beside = (BESIDE | BYTELESS)[kind]()
    path = tmp_path / "w.pt"
    for kept, words in (
        ({**state, "x": beside}, "not a tensor"),
        ({"state_dict": dict(state), "x": beside}, "not among the weights"),
    ):
        try:
            torch.save(kept, path, _use_new_zipfile_serialization=zipped)
        except Exception as error:
            pytest.skip(f"torch does not save it: {error!r:.80}")
        report = anyrank.load(nn.Linear(2, 2), path)
        assert [
            line
            for line in report.skipped
            if line.startswith(f"x: {kind if kind in BYTELESS else words}")
        ]
    if kind in BYTELESS:
        torch.save({**state, "weight": beside}, path)
        with pytest.raises(anyrank.LoadError, match=rf"(?s)missing.*weight: {kind.strip()}"):
            anyrank.load(nn.Linear(2, 2), path)
        torch.save({"weight": beside}, path)
        with pytest.raises(
            anyrank.LoadError, match=rf"has no dense tensors; weight is {kind.strip(': ')}"
        ):
            anyrank.load(nn.Linear(2, 2), path)


def test_names_that_the_user_allows_may_be_of_any_kind(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2), "x": ntpath.join}, tmp_path / "w.pt")
    allowed = [(ntpath.join, "ntpath.join"), torch.sparse_coo]
    with torch.serialization.safe_globals(allowed):
        assert anyrank.inspect(tmp_path / "w.pt").tensors
    with pytest.raises(anyrank.UnsafeFile, match=r"ntpath\.join"):
        anyrank.inspect(tmp_path / "w.pt")


def test_a_graph_from_before_a_load_is_not_run_backwards(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    torch.save(model.state_dict(), tmp_path / "w.pt")
    loss = model(torch.ones(1, 2)).sum()
    anyrank.load(model, tmp_path / "w.pt")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def released() -> torch.Tensor:
    """A tensor whose memory is given back, as colocated trainers do: to touch it is a SIGSEGV."""
    tensor = torch.ones(1 << 20)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("end", ["model", "dict", "dst", "src", "part"])
def test_released_memory_is_an_error_before_it_is_touched(end: str) -> None:
    tensor = {"w": released()}
    model = nn.Module()
    model.w = nn.Parameter(released())
    whole = {"w": torch.ones(1 << 20)}
    calls = {
        "model": lambda: anyrank.load(model, whole),
        "dict": lambda: anyrank.load(model, tensor),
        "dst": lambda: anyrank.sync(tensor, whole),
        "src": lambda: anyrank.sync(whole, tensor),
        "part": lambda: anyrank.load(model, whole, layout={"w": ([0], [Shard(0)])}),
    }
    with pytest.raises(anyrank.LoadError, match="w: its storage was freed"):
        calls[end]()


@pytest.mark.parametrize("half", [None, ModuleType("half imported")], ids=["blocked", "half"])
def test_a_load_needs_no_transformers_that_is_blocked_or_half_imported(
    half: ModuleType | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", half)  # by another thread
    model = nn.Linear(2, 2)
    anyrank.load(model, {"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    assert torch.equal(model.weight, torch.ones(2, 2))
