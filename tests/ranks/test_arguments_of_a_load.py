"""Wrong arguments of load, plan and materialize: the same error on all ranks, before any work."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import anyrank
from anyrank.testing import run_ranks

WEIGHTS = {"weight": torch.ones(3, 3), "bias": torch.ones(3)}
WRONG: dict[str, tuple[type[Exception], Any, str]] = {
    "missing": (ValueError, "erorr", "missing='erorr' is unknown: give one of error, init, keep"),
    "unexpected": (ValueError, "keep", "unexpected='keep' is unknown"),
    "cast": (ValueError, True, "cast=True is unknown"),
    "strategy": (ValueError, "fastest", "strategy='fastest' is unknown"),
    "rename": (ValueError, [("(", "x")], "rename= takes a dict, pairs of"),
    "buffer_bytes": (ValueError, 0, "buffer_bytes=0: give at least 1"),
    "verify": (TypeError, "full", "verify='full': give True or False"),
}
TYPES: dict[str, Any] = {"buffer_bytes": 1.5, "rename": 7}


def load(**options: Any) -> None:
    anyrank.load(nn.Linear(3, 3), WEIGHTS, **options)


CALLS: list[Any] = [
    lambda source: anyrank.load(nn.Linear(3, 3), source),
    lambda source: anyrank.plan(nn.Linear(3, 3), source),
    anyrank.inspect,
]


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("call", [anyrank.load, anyrank.plan])
def test_a_wrong_value_is_a_value_error(call: Any, name: str) -> None:
    kind, value, text = WRONG[name]
    with pytest.raises(kind) as caught:
        call(nn.Linear(3, 3), WEIGHTS, **{name: value})
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("name", TYPES)
def test_a_value_of_another_type_is_a_type_error(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        load(**{name: TYPES[name]})


def test_a_progress_that_cannot_be_called() -> None:
    with pytest.raises(TypeError, match="progress='bar'"):
        load(progress="bar")


def test_what_is_no_model_and_no_source() -> None:
    with pytest.raises(TypeError, match=r"model= takes a torch.nn.Module, not dict"):
        anyrank.load(WEIGHTS, nn.Linear(3, 3))  # type: ignore[arg-type]
    sources: list[Any] = [7, [7], {7}, b"w.pt", nn.Linear(3, 3), [None]]
    for source in sources:
        kind = type(source[0] if isinstance(source, list) else source).__name__
        for call in CALLS:
            with pytest.raises(TypeError, match=rf"source= takes a path, .* not {kind}"):
                call(source)
    for call in CALLS:
        with pytest.raises(TypeError, match=r"the keys of source= are names, str, not 7"):
            call({7: torch.ones(3)})
    with pytest.raises(TypeError, match=r"source= takes a path, .* not NoneType"):
        anyrank.inspect(None)  # type: ignore[arg-type]


RENAMES: list[tuple[Any, str]] = [
    ({1: "x"}, "rename= takes keys and names as text, not 1: 'x'"),
    ({"x": None}, "rename= takes keys and names as text, not 'x': None"),
    ([("x", 3)], "3 is not text to put in place"),
]


@pytest.mark.parametrize(("rename", "words"), RENAMES)
def test_a_rename_that_is_not_of_texts(rename: Any, words: str, tmp_path: Path) -> None:
    calls: list[Any] = [
        lambda: load(rename=rename),
        lambda: anyrank.plan(nn.Linear(3, 3), WEIGHTS, rename=rename),
        lambda: anyrank.sync(nn.Linear(3, 3), nn.Linear(3, 3), rename=rename),
        lambda: anyrank.convert(WEIGHTS, tmp_path / "out", rename=rename),
        lambda: anyrank.convert(nn.Linear(3, 3), tmp_path / "out", rename=rename),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=re.escape(words)):
            call()


def test_a_layout_function_that_fails_is_named() -> None:
    def layout() -> None: ...

    with pytest.raises(anyrank.LoadError, match=r"layout= failed for weight: TypeError: "):
        load(layout=layout)


@pytest.mark.parametrize("given", [3, None, "x", {}, torch.ones(1), lambda: 3])
def test_what_is_no_module_and_no_path(given: Any) -> None:
    with pytest.raises(TypeError, match=r"module= takes a torch.nn.Module, not "):
        anyrank.freeze(given)
    if given != "x":
        for src in (WEIGHTS, nn.Linear(3, 3)):
            with pytest.raises(TypeError, match=r"dst=.*: give a path or a URL"):
                anyrank.convert(src, given)
        with pytest.raises(TypeError, match=r"device= takes a torch.device or its name, not "):
            anyrank.materialize(nn.Linear(3, 3), device=[given])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"finite=.*: give True or False"):
            anyrank.verify(WEIGHTS, finite=given)
    with pytest.raises(TypeError, match="source=1: give a path or a URL"):
        anyrank.freeze(nn.Linear(3, 3), source=[1])  # type: ignore[list-item]


def test_a_wrong_argument_of_materialize() -> None:
    with anyrank.meta():
        model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="init='zeros' is unknown"):
        anyrank.materialize(model, init="zeros")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device='nowhere'"):
        anyrank.materialize(model, device="nowhere")
    assert model.weight.is_meta


def job_one_wrong(call: str, name: str, value: Any) -> tuple[str, str]:
    function: Any = {"load": anyrank.load, "plan": anyrank.plan}[call]
    options = {name: value} if dist.get_rank() == 1 else {}
    try:
        function(nn.Linear(3, 3), WEIGHTS, **options)
    except (ValueError, TypeError) as error:
        return type(error).__name__, str(error)
    return "none", ""


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [("load", "missing", "erorr"), ("plan", "cast", "all"), ("load", "buffer_bytes", "1 MiB")],
)
def test_one_ranks_wrong_argument_is_the_same_error_on_all(
    call: str, name: str, value: Any
) -> None:
    results = run_ranks(2, job_one_wrong, call, name, value)
    assert results[0] == results[1]
    kind, text = results[0]
    assert kind == ("WrongType" if name == "buffer_bytes" else "WrongValue")
    assert f"[rank 1] {name}={value!r}" in text


def job_one_wrong_source(call: str) -> tuple[str, str]:
    function: Any = {"load": anyrank.load, "plan": anyrank.plan}[call]
    source = 5 if dist.get_rank() == 1 else WEIGHTS
    try:
        function(nn.Linear(3, 3), source)
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


@pytest.mark.parametrize("call", ["load", "plan"])
def test_one_ranks_wrong_source_is_the_same_error_on_all(call: str) -> None:
    text = f"{call}() failed on 1 of 2 ranks, so on all:\n[rank 1] source= takes a path, a list of "
    text += "paths, or a dict of tensors, not int"
    assert run_ranks(2, job_one_wrong_source, call) == [("WrongType", text)] * 2


def job_used_late() -> list[tuple[bool, str, bool]]:
    """What arguments raise whose fault shows after the ranks have met; whether it is an error of
    the first kind, its text, and whether the model is as it was.
    """
    last = dist.get_rank() == dist.get_world_size() - 1
    model = nn.Linear(3, 3)
    before = model.weight.detach().clone()
    found: list[tuple[bool, str, bool]] = []
    calls: list[tuple[type[Exception], Any]] = [
        (TypeError, lambda: anyrank.load(model, WEIGHTS, rename=Renamer(last))),
        (ValueError, lambda: anyrank.load(model, None)),
        (ValueError, lambda: anyrank.load(model, {})),
        (ValueError, lambda: anyrank.sync(None, None)),
        (TypeError, lambda: anyrank.sync(model, dict(WEIGHTS), layout=Layout(last))),
    ]
    for kind, call in calls:
        try:
            call()
        except Exception as error:
            found.append((isinstance(error, kind), str(error), torch.equal(model.weight, before)))
    return found


class Renamer:
    """A rename= that one rank forgets to return from."""

    def __init__(self, is_wrong: bool) -> None:
        self.is_wrong = is_wrong

    def __call__(self, key: str) -> Any:
        return None if self.is_wrong else key

    def __repr__(self) -> str:
        return "Renamer"


class Layout(Renamer):
    """A layout= that one rank gives a wrong answer of."""

    def __call__(self, key: str) -> Any:
        return 3 if self.is_wrong else None


def test_a_fault_that_shows_late_is_the_same_error_on_all_ranks() -> None:
    results = run_ranks(2, job_used_late)
    assert results[0] == results[1]
    assert len(results[0]) == 5
    for is_kind, text, is_unchanged in results[0]:
        assert is_kind, text
        assert is_unchanged
    words = ["gave None", "on every rank", "is empty", "on every rank", "give (mesh, placements)"]
    assert all(word in text for word, (_, text, _) in zip(words, results[0], strict=True))
