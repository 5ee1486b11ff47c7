"""A wrong argument is a ValueError or a TypeError at the call, and its message names it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anyrank
from anyrank.checks import (
    check_bool,
    check_choice,
    check_function,
    check_int,
    check_model,
    check_names,
    check_path,
)

WEIGHTS = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
HIDDEN, LABELS = torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)
OURS = Path(anyrank.__file__).parent
STATE = anyrank.TrainState(nn.Linear(2, 2))


class Lazy:
    """Stands for a fresh model, or a new place, of each call."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


MODEL = Lazy(lambda: nn.Linear(2, 2))
BLOCKS = Lazy(lambda: nn.Sequential(nn.Linear(2, 2)))
LOADER = {"global_batch": 4, "microbatch": 2}
Case = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], dict[str, list[Any]]]


def identity(x: Any) -> Any:
    return x


def nothing(x: Any) -> None:
    return None


def resume(**given: Any) -> Any:
    return anyrank.Checkpoints("run", STATE).resume(**given)


def steps(**given: Any) -> Any:
    data = anyrank.ElasticLoader(torch.zeros(8, 2), **LOADER)
    state = anyrank.TrainState(nn.Linear(2, 2), data=data)
    return anyrank.Checkpoints("run", state).steps(**given)


class Parts:
    """A dataset that is cut into shards."""

    num_shards = 2

    def shard(self, *, num_shards: int, index: int) -> list[int]:
        return [index, num_shards]


def watch(**given: Any) -> Any:
    anyrank.watch(**given).close()


# A call with right arguments, and wrong values of each argument.
SOURCES = [3, b"w.pt", "", [], [3], [""], {3: torch.ones(1)}]
FILLS: dict[str, list[Any]] = {
    "missing": ["erorr", None, 3],
    "unexpected": ["keep", True],
    "cast": ["x", None],
    "rename": [3, nothing, {"a": 3}, [("(", "")], [("a", r"\1")], [3]],
    "layout": [3, {"weight": 3}],
    "verify": ["full", 1, None],
    "process_group": [3, "all"],
}
LOADS = FILLS | {
    "strategy": ["x", None],
    "buffer_bytes": [0, -1, "1", 1.5, True],
    "source": [None, {}, {"weight": 3}, {"model": WEIGHTS}, *SOURCES],
    "model": [None, 3, {}, nn.Linear],
}
DATA: dict[str, list[Any]] = {
    "global_batch": [0, -4, "4", 4.0, True, None],
    "microbatch": [0, -1, "2", 2.0, False],
    "seed": ["x", 1.0, None, True],
    "shuffle": [3, "yes", None],
    "tail": ["x", None, 3],
    "process_group": [3, "all"],
}
LOADERS = DATA | {
    "num_workers": [-1, "2", 1.5, True],
    "collate_fn": [3, "stack"],
    "key": [3, True],
    "exact": [1, "yes", None],
}
REGIONS: dict[str, list[Any]] = {
    "offload": [3, True, "x"],
    "context_fn": [3],
    "generators": [3, [3], torch.Generator()],
}
TILES: dict[str, list[Any]] = {
    "chunk_size": [0, -1, "x", 2.5, True, None],
    "grad_dtype": ["float", torch.int64, 3],
}
CALLS: dict[str, Case] = {
    "load": (
        anyrank.load,
        (),
        {"model": MODEL, "source": WEIGHTS},
        LOADS | {"progress": [3, "bar"]},
    ),
    "plan": (
        anyrank.plan,
        (),
        {"model": MODEL, "source": WEIGHTS},
        LOADS,
    ),
    "sync": (
        anyrank.sync,
        (),
        {"dst": MODEL, "src": MODEL},
        FILLS
        | {
            "dst": [None, {}, 3, "w.pt", {"w": 3}, {3: torch.ones(1)}],
            "src": [None, {}, 3, "w.pt", {"w": 3}],
            "merge": [1, None],
            "atomic": [3, None],
        },
    ),
    "convert": (
        anyrank.convert,
        (),
        {"src": WEIGHTS, "dst": "out"},
        {
            "src": [None, {}, {"weight": 3}, *SOURCES],
            "dst": [3, None, "", b"out"],
            "to": ["x", None, 3],
            "dtype": ["x", 3],
            "rename": FILLS["rename"],
            "shard_bytes": [0, -1, "1", True],
            "model": [3, {}],
            "overwrite": ["yes", None],
            "layout": [3],
        },
    ),
    "inspect": (anyrank.inspect, (), {"source": WEIGHTS}, {"source": [None, {}, *SOURCES]}),
    "verify": (
        anyrank.verify,
        (),
        {"source": WEIGHTS},
        {"source": [None, {}, *SOURCES], "finite": [1, None]},
    ),
    "diff": (
        anyrank.diff,
        (),
        {"a": WEIGHTS, "b": WEIGHTS},
        {"a": [None, {}, *SOURCES], "b": [None, {}, *SOURCES]},
    ),
    "materialize": (
        anyrank.materialize,
        (),
        {"model": MODEL},
        {
            "model": [3, None, {}],
            "device": ["x", 1.5, True],
            "init": ["x", None, 3],
            "process_group": [3],
        },
    ),
    "freeze": (
        anyrank.freeze,
        (),
        {"module": MODEL},
        {"module": [3, None, nn.Linear], "source": [3, "", [], [3], {}]},
    ),
    "Checkpoints": (
        anyrank.Checkpoints,
        (),
        {"path": "run", "state": STATE},
        {
            "path": [3, "", None, b"run"],
            "state": [None, {}, MODEL],
            "keep": ["3", True, 1, 0, -1, 2.5, None],
            "every": [1.5, True, "soon", 0, -1, []],
            "background": [1, "yes", None],
            "verify": ["full", None, 1],
            "keep_every": ["3", 0, -1, True, 1.5],
            "on_commit": [3, "f"],
            "peers": ["x", 1.5, -1],
            "replicas_every": ["100", 1.5, 0, -1, True],
            "process_group": [3],
        },
    ),
    "resume": (
        resume,
        (),
        {},
        {
            "which": [True, 1.0, -1, "", None],
            "skip": ["model", 3, [3], None],
            "fresh": ["w", 3, [3]],
            "rename": [3, {}],
        },
    ),
    "steps": (
        steps,
        (),
        {},
        {"until": [-1, "3", 3.0, True], "epochs": [-1, "3", True]},
    ),
    "TrainState": (
        anyrank.TrainState,
        (),
        {"model": MODEL},
        {
            "model": [3, "x", torch.zeros(1)],
            "optimizer": [3, MODEL, "adam"],
            "scheduler": [3],
            "scaler": [3],
            "data": [3, [1, 2]],
            "seed": ["x", 1.0, None, True],
            "generators": [3, [torch.Generator()], {"a": 3}, {3: torch.Generator()}, []],
            "first_rank": [3, "data", [3], ["x"], None],
            "base": [3, "", [], [3]],
            "layout": [3],
            "metrics": [3, []],
            "random": [MODEL],  # the name of another part
        },
    ),
    "ElasticLoader": (
        anyrank.ElasticLoader,
        (),
        {"dataset": torch.zeros(8, 2), **LOADER},
        LOADERS
        | {
            "dataset": [3, None, [], iter([1])],
            "weights": [3, "x", [1.0], [-1.0] * 8, [None] * 8],
            "on_batch_change": ["x", 3],
            "prefetch_factor": [0, "2", True],
            "pin_memory": [1, "yes"],
            "persistent_workers": [1, "yes"],
        },
    ),
    "from_shards": (
        anyrank.ElasticLoader.from_shards,
        (),
        {"shards": ["a", "b"], "read": iter, "lengths": [4, 4], **LOADER},
        LOADERS
        | {
            "shards": [3, "ab", None, ["a"]],
            "read": [3, None],
            "lengths": [3, [4], [4, "4"], [4, -4], [True, 4]],
            "transform": [3, nothing],
            "window": [0, "4", True],
        },
    ),
    "Pack": (
        anyrank.Pack,
        (),
        {"length": 8},
        {
            "length": [0, "8", True, None],
            "key": [3, None],
            "eos": ["0", True],
            "labels": [3],
            "split": [1, "no", False],
            "pad": ["0", True],
        },
    ),
    "from_iterable": (
        anyrank.ElasticLoader.from_iterable,
        (),
        {"dataset": Parts(), **LOADER},
        {"dataset": [3, None, ["a"]], "transform": [3, nothing], "window": [0, "4", True]},
    ),
    "row_counts": (
        anyrank.row_counts,
        (),
        {"paths": []},
        {"paths": [3, "ab", None, ["a.csv"]], "kept_in": [3]},
    ),
    "Buckets": (
        anyrank.Buckets,
        (),
        {"key": "size"},
        {"key": [3, None], "patience": [0, "9", True, None]},
    ),
    "watch": (
        watch,
        (),
        {},
        {
            "after": ["", "0s", "-1s", "soon", "60 days", -3, 0, None, True],
            "exit": [1],
            "report": [3, ".", "none/report"],
        },
    ),
    "check": (
        anyrank.check,
        (),
        {"model": MODEL},
        {"model": ["model"], "optimizer": ["adam"], "accumulation": [0]},
    ),
    "recompute": (
        anyrank.recompute,
        (identity, torch.ones(2)),
        {},
        REGIONS
        | {
            "use_reentrant": [False],
            "preserve_rng_state": [False],
            "determinism_check": [False],
        },
    ),
    "recompute_": (
        anyrank.recompute_,
        (),
        {"model": BLOCKS, "pattern": "*"},
        REGIONS | {"model": [3, None, [nn.Linear(1, 1)]], "pattern": [3, "x", None, ["*"]]},
    ),
    "Offload": (
        anyrank.Offload,
        (),
        {"pool_bytes": 1},
        {
            "pool_bytes": [0, -1, "x", 1.5, True, None],
            "keep_last": [-1, "1", True],
            "min_bytes": [-1, "1", 0.5],
        },
    ),
    "tile": (
        anyrank.tile,
        (),
        {"fn": nn.Linear(2, 2)},
        TILES
        | {"fn": [3, None, "x"], "in_dims": ["x", True, [0], 1.0], "out_dims": ["x", True, 1.0]},
    ),
    "tile_": (
        anyrank.tile_,
        (),
        {"model": BLOCKS, "pattern": "*"},
        TILES
        | {
            "model": [3, None],
            "pattern": [3, "x", None],
            "dim": ["x", True, None, 1.0],
            "in_dims": ["x", [0], {"rows": 0}],
            "out_dims": ["x", {"x": "a"}],
        },
    ),
    "tiled_loss": (
        anyrank.tiled_loss,
        (),
        {"fn": nn.Linear(2, 2), "hidden": HIDDEN, "labels": LABELS},
        {
            "fn": [3, None],
            "hidden": [3, None, [[0.0]], torch.zeros(3, 2)],
            "labels": [3, None, [0], torch.zeros(3)],
            "chunk_size": TILES["chunk_size"],
            "reduction": ["x", None],
            "ignore_index": ["x", 1.5, None],
            "count": ["x", -1, True],
            "label_smoothing": ["x", -1, 2, None],
            "grad_dtype": TILES["grad_dtype"],
        },
    ),
}
WRONG = [(call, name, value) for call in CALLS for name, v in CALLS[call][3].items() for value in v]
# The argument is one of a pair that has to match, or the message names what it holds.
OTHER_WORDS = {
    "source": "source|dict",
    "src": "src|source|dict",
    "a": "source|dict",
    "b": "source|dict",
    "dst": "dst|destination",
    "which": "which=",
    "dataset": "dataset|has no len",
    "dataset_or_length": "dataset|has no len",
    "pattern": "pattern|matches no module",
    "dim": "dim|in_dims",
}


def made(value: Any) -> Any:
    return value.make() if isinstance(value, Lazy) else value


def short(value: object) -> str:
    return re.sub(r" at 0x.*| object.*", "", str(value))[:20]


@pytest.mark.parametrize(("call", "name", "value"), WRONG, ids=short)
def test_a_wrong_argument_is_named_at_the_call(
    call: str, name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    function, args, right, _ = CALLS[call]
    given = {key: made(each) for key, each in {**right, name: value}.items()}
    blocks = given.get("model")
    with pytest.raises((TypeError, ValueError)) as caught:
        function(*args, **given)
    words = OTHER_WORDS.get(name, re.escape(name))
    assert re.search(rf"\b({words})", str(caught.value)), caught.value
    raised_in = Path(str(caught.traceback[-1].path))
    assert raised_in.is_relative_to(OURS), raised_in  # not an operation's own error
    assert list(tmp_path.iterdir()) == []
    if isinstance(blocks, nn.Sequential):
        assert "forward" not in vars(blocks[0])  # no block is changed


@pytest.mark.parametrize("call", CALLS)
def test_the_right_arguments_are_taken(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    function, args, right, _ = CALLS[call]
    given = {key: made(each) for key, each in right.items()}
    more = {"steps": {"until": 0}, "share": {"number": 0}}
    if call != "share":  # which needs an iteration first
        partial(function, *args)(**given, **more.get(call, {}))


def test_a_sync_without_either_end_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="src= is None, or has no tensors, on every rank"):
        anyrank.sync(None, None)


@pytest.mark.parametrize(
    "call",
    [
        lambda path: anyrank.Checkpoints(path, STATE),
        lambda path: anyrank.load(nn.Linear(2, 2), path),
        lambda path: anyrank.verify(path),
        lambda path: anyrank.convert(WEIGHTS, path),
    ],
)
def test_a_home_folder_that_no_shell_has_expanded_is_refused(call: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match=r"~/a: only a shell expands '~'; pass os\.path\."):
        call("~/a")


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (lambda: check_int("keep", 1, 2), "keep=1: must be at least 2"),
        (lambda: check_int("seed", 9, maximum=8), "seed=9: must be at most 8"),
        (lambda: check_int("seed", 8.0), "seed=8.0: expected an int, got float"),
        (lambda: check_bool(exact=1), "exact=1: expected True or False, got int"),
        (lambda: check_function("fn", None), "fn=None: expected a function, got NoneType"),
        (
            lambda: check_choice("missing", "foo", ("error", "init", "keep")),
            "missing='foo': must be 'error', 'init' or 'keep'",
        ),
        (lambda: check_choice("init", 3, ("auto",)), "init=3: must be 'auto'"),
        (lambda: check_names("skip", "data"), "skip='data': expected a list of names, got str"),
        (lambda: check_names("skip", [3]), "skip=[3]: expected a list of names, got int in it"),
        (lambda: check_path("dst", ""), "dst='': must be a non-empty path or URL"),
        (lambda: check_model({}), "model=: expected a torch.nn.Module, got dict"),
    ],
)
def test_every_check_says_what_is_wrong_with_the_value(
    check: Callable[[], object], text: str
) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        check()
    assert str(caught.value) == text
