"""Promise 1: every problem with names, shapes, dtypes or files is raised before payload moves."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import anyrank
import anyrank.faults

WEIGHTS = {"0.weight": torch.randn(4, 4), "0.bias": torch.randn(4), "1.weight": torch.randn(2, 4)}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, bias=False))


@pytest.fixture
def no_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    def moved() -> None:
        raise AssertionError("payload was read")

    monkeypatch.setitem(anyrank.faults.armed, "load.read", moved)


PROBLEMS: dict[str, dict[str, Any]] = {
    "missing": {k: v for k, v in WEIGHTS.items() if k != "1.weight"},
    "unexpected": {**WEIGHTS, "2.weight": torch.zeros(1)},
    "shape": {**WEIGHTS, "1.weight": torch.zeros(4, 2)},
    "dtype": {**WEIGHTS, "1.weight": torch.zeros(2, 4, dtype=torch.int64)},
}


@pytest.mark.usefixtures("no_payload")
@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_problem_is_raised_before_the_first_byte(tmp_path: Path, problem: str) -> None:
    save_file(PROBLEMS[problem], tmp_path / "w.safetensors")
    for call in (anyrank.load, anyrank.plan):
        with pytest.raises(anyrank.LoadError, match="does not match the model"):
            call(net(), tmp_path / "w.safetensors")


class Statistics(nn.Module):
    """A linear layer, and a tensor that no rule writes whole."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.kind = kind
        if kind == "on meta":
            self.register_buffer("mean", torch.zeros(3, device="meta"), persistent=False)
        elif kind == "parameter":
            self.mean = nn.Parameter(torch.zeros(3))
        else:
            self.register_buffer("mean", torch.zeros(3))

    def reset_parameters(self) -> None:
        if self.kind == "part":
            self.get_buffer("mean")[:2] = 0
        if self.kind == "failing":
            raise RuntimeError("no statistics yet")


@pytest.mark.parametrize("kind", ["parameter", "buffer", "part", "failing", "on meta"])
def test_a_tensor_that_no_rule_writes_is_refused_before_anything_changes(kind: str) -> None:
    """By load, plan and sync alike, with an exchange of values and without."""
    source = nn.Linear(4, 4).state_dict()
    source = {f"fc.{name}": tensor for name, tensor in source.items()}
    calls: list[Any] = [
        anyrank.plan,
        anyrank.load,
        anyrank.sync,
        lambda model, weights, **options: anyrank.sync(model, weights, atomic=True, **options),
    ]
    for call in calls:
        model = Statistics(kind)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        state = torch.get_rng_state()
        with pytest.raises(anyrank.LoadError, match=r"mean.*") as caught:
            call(model, source, missing="init")
        assert "partly overwritten" not in str(caught.value)
        assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), state)
        with anyrank.meta():
            fresh = Statistics(kind)
        with pytest.raises(anyrank.LoadError):
            call(fresh, source, missing="init")
        assert fresh.fc.weight.is_meta
    if kind != "on meta":
        anyrank.load(Statistics(kind), source, missing="keep")


@pytest.mark.usefixtures("no_payload")
def test_the_check_of_this_file_can_fail(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "w.safetensors")
    with pytest.raises(AssertionError, match="payload was read"):
        anyrank.load(net(), tmp_path / "w.safetensors")


def test_all_problems_are_told_at_once() -> None:
    source = {
        "0.weight": torch.zeros(3, 3),
        "0.bias": torch.zeros(4),
        "1.wieght": torch.zeros(2, 4),
    }
    with pytest.raises(anyrank.LoadError) as caught:
        anyrank.load(net(), source)
    assert str(caught.value) == (
        "the dict (memory) does not match the model:\n"
        "missing from the source (1):\n"
        "  1.weight (near: 1.wieght)\n"
        "  Fix: map the names with rename=..., or pass missing='keep' to keep the model's values, "
        "or missing='init' to initialize them\n"
        "unexpected in the source (1):\n"
        "  1.wieght (near: 1.weight)\n"
        "  Fix: map the names with rename=..., or pass unexpected='ignore'\n"
        "0.weight: the model has shape [4, 4], the source [3, 3] (0.weight)\n"
        "  Fix: build the model with the source's sizes; or, if a vocabulary or head size was "
        "changed on purpose, pass rename={'0.weight': ''} and missing='init'"
    )


@pytest.mark.usefixtures("no_payload")
def test_a_plan_reads_headers_only_and_changes_nothing(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "w.safetensors")
    with anyrank.meta():
        model = net()
    plan = anyrank.plan(model, tmp_path / "w.safetensors")
    assert all(p.is_meta for p in model.parameters())
    assert plan.share_bytes == plan.read_bytes == [28 * 4]
    assert (plan.world_size, plan.strategy) == (1, "own")


def test_the_arguments_of_a_load_fit_a_plan(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "w.pt")
    same: dict[str, Any] = {"missing": "error", "strategy": "own", "progress": False}
    assert anyrank.plan(net(), tmp_path / "w.pt", **same, verify=True).read_bytes == [28 * 4]
    anyrank.load(net(), tmp_path / "w.pt", **same, verify=True)


def test_thousands_of_wrong_names_are_told_at_once_with_hints() -> None:
    model = nn.ModuleList(nn.PReLU() for _ in range(20_000))  # a weight each
    keys = [f"{n}.wieght" if n % 2 else f"y.{n}.q{n}" for n in range(20_000)]
    source = {key: torch.zeros(1) for key in keys}
    start = time.process_time()
    with pytest.raises(anyrank.LoadError, match="does not match") as caught:
        anyrank.load(model, source)
    # 225 s when every name is compared with every other, 1 alone
    assert time.process_time() - start < 5
    assert "1.wieght (near: 1.weight)" in str(caught.value)
    assert "and 19990 more" in str(caught.value)


def test_of_many_shapes_that_do_not_fit_a_few_are_shown() -> None:
    model = nn.ModuleList(nn.PReLU() for _ in range(100))
    with pytest.raises(anyrank.LoadError, match="and 90 more mismatches") as caught:
        anyrank.load(model, {f"{n}.weight": torch.zeros(2) for n in range(100)})
    assert str(caught.value).count("\n") == 12


@pytest.mark.parametrize(
    ("model_prefix", "source_prefix", "rename"),
    [
        ("", "language.", {"language": ""}),
        ("model.", "", [("^", "model.")]),
        ("net.model.", "module.net.", {"module.net": "net.model"}),
        ("blocks.", "layers.", {"layers": "blocks"}),
    ],
)
def test_a_wrong_prefix_is_found_by_counting(
    model_prefix: str, source_prefix: str, rename: Any
) -> None:
    model: nn.Module = nn.ModuleDict(
        {f"{n}": nn.ModuleDict({w: nn.Linear(2, 2) for w in ("up", "down")}) for n in range(3)}
    )
    weights = model.state_dict()
    for name in reversed(model_prefix.split(".")[:-1]):
        model = nn.ModuleDict({name: model})
    source = {source_prefix + key: value for key, value in weights.items()}
    with pytest.raises(anyrank.LoadError, match="12 of them match with rename=") as caught:
        anyrank.load(model, source)
    assert f"match with rename={rename!r}\n" in str(caught.value)
    more = source | {"other": torch.ones(1)}
    with pytest.raises(
        anyrank.LoadError, match=re.escape(f"12 of them match with rename={rename!r}")
    ):
        anyrank.load(model, more, unexpected="ignore")  # which lists no keys
    assert anyrank.load(model, source, rename=rename).tensors == 12


def test_a_prefix_whose_shapes_do_not_fit_is_not_proposed() -> None:
    model = nn.ModuleDict({"pool": nn.Linear(4, 4)})
    with pytest.raises(anyrank.LoadError, match="unexpected") as caught:
        anyrank.load(model, {f"norm.{k}": t for k, t in nn.LayerNorm(4).state_dict().items()})
    assert "match with" not in str(caught.value)


def test_a_prefix_of_another_part_is_not_proposed() -> None:
    whole = nn.ModuleDict({"dense": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})
    model = nn.ModuleDict({"head": nn.ModuleDict({"transform": whole})})
    source = {f"pooler.dense.{k}": t for k, t in nn.Linear(4, 4).state_dict().items()}
    with pytest.raises(anyrank.LoadError, match="unexpected") as caught:
        anyrank.load(model, source)
    assert "match with" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("cls.predictions.transform", "pooler"),  # BERT's head for masked words
        ("classifier", "projection"),
        ("decoder.head", "encoder.head"),
        ("student.0", "heads.0"),
    ],
)
@pytest.mark.parametrize("unexpected", ["error", "ignore"])
def test_another_part_of_the_same_shapes_is_not_proposed(
    key: str, name: str, unexpected: Any
) -> None:
    def below(path: str) -> nn.Module:
        module: nn.Module = nn.ModuleDict({"dense": nn.Linear(4, 4)})
        for part in reversed(path.split(".")):
            module = nn.ModuleDict({part: module})
        return module

    with pytest.raises(anyrank.LoadError, match="missing") as caught:
        anyrank.load(below(name), below(key).state_dict(), unexpected=unexpected)
    assert "match with" not in str(caught.value)


def test_of_two_prefixes_that_fit_alike_both_are_named() -> None:
    weights = nn.Linear(4, 4).state_dict()
    both = {f"{part}.{k}": t for part in ("teacher", "student") for k, t in weights.items()}
    wanted = "2 of them match with rename={'teacher': ''}, or with rename={'student': ''}"
    with pytest.raises(anyrank.LoadError, match="unexpected") as caught:
        anyrank.load(nn.Linear(4, 4), both)
    assert wanted in str(caught.value)
