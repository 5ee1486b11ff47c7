"""The core, what stands around it, and how large each may be.

The core is what a plain load and a plain run have in memory. What is around it is loaded by who
asks for it. What outgrows its budget is a decision, and it is made in this file.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.tiers import ROOMS

SRC = Path(__file__).parents[2] / "src" / "anyrank"

# Lines of each room, with comments and empty ones.
BUDGETS = {
    "around/averaging": 100,
    "around/background": 212,
    "around/base": 220,
    "around/conversion": 1803,
    "around/diverged": 92,
    "around/elsewhere": 140,
    "around/exact": 1680,
    "around/first_values": 460,
    "around/foreign": 2150,
    "around/frozen": 700,
    "around/fsdp2": 100,
    "around/hugging": 1127,
    "around/inspection": 1460,
    "around/layouts": 415,
    "around/misfits": 265,
    "around/own_code": 215,
    "around/own_methods": 70,
    "around/pace": 270,
    "around/peers": 490,
    "around/peft": 520,
    "around/readers": 1985,
    "around/regrouped": 130,
    "around/remote": 190,
    "around/script": 915,
    "around/sharing": 1485,
    "around/streams": 2812,
    "around/sync": 2875,
    "around/tables": 510,
    "around/verify": 325,
    "around/weighted": 140,
    "around/workers": 224,
    "cli": 1342,
    "data": 592,
    "files": 1970,
    "filling": 1460,
    "formats": 912,
    "integrations": 3505,
    "memory": 3335,
    "model": 1991,
    "random_state": 503,
    "resume": 2302,
    "saving": 1125,
    "state": 2095,
    "steps": 2412,
    "tensors": 1235,
    "testing": 1373,
    "watching": 3415,
    "world": 1636,
    "": 700,
}
# Lines of all modules that a plain load and a plain run have loaded together.
CORE_LINES = 18_200
# Beside the core, as the rooms of src/anyrank/around are around it.
BESIDE = {"memory", "integrations", "watching", "cli", "testing"}

PLAIN_RUN = """
import sys, torch, anyrank

class Own(torch.optim.SGD):
    def state_dict(self):
        return super().state_dict()

class Extra(torch.nn.Module):
    def get_extra_state(self):
        return 1

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if {shards}:
    shards = torch.randn(4, 2, 4)
    sizes = dict(collate_fn=torch.tensor, global_batch=4, microbatch=2)
    loader = anyrank.ElasticLoader.from_shards(shards.tolist(), iter, **sizes)
else:
    loader = anyrank.ElasticLoader(torch.randn(8, 4), global_batch=4, microbatch=2{loader})
state = anyrank.TrainState(model, optimizer, data=loader{state})
with anyrank.Checkpoints(sys.argv[1], state{run}) as ckpts:
    ckpts.resume({which})
    for step in loader:
        for batch in step.microbatches(model):
            step.backward(model(batch).square().mean())
        step.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        ckpts.step_done()
    ckpts.save()
    assert {shards} or state.step == 2 * state.epoch
print(*sorted(name for name in sys.modules if name.startswith("anyrank.")))
"""
# What a run may ask for, and a plain one does not.
NOTHING: dict[str, object] = {"loader": "", "state": "", "run": "", "which": "", "shards": False}
PLAIN_LOAD = """
import sys, torch, anyrank
from safetensors.torch import save_file

saved, model = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
save_file(saved.state_dict(), sys.argv[1] + ".safetensors")
anyrank.load(model, sys.argv[1] + ".safetensors")
assert torch.equal(model.weight, saved.weight)
"""
# Each load in a process of its own, forked from one that has imported the packages alone.
EACH_LOAD = """
import os, sys, torch, anyrank
import torch.distributed as dist
from safetensors.torch import save, save_file

folder, *calls = sys.argv[1:]
for number, call in enumerate(calls):
    if os.fork():
        assert os.wait()[1] == 0, call
        continue
    path = f"{folder}/{number}"
    saved, model = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    save_file(saved.state_dict(), path + ".safetensors")
    exec(call)
    assert torch.equal(model.weight, saved.weight)
    print(*sorted(name for name in sys.modules if name.startswith("anyrank.")), flush=True)
    os._exit(0)
"""
TWO_RANKS = """
rank = 0 if os.fork() else 1
dist.init_process_group("gloo", init_method=f"file://{path}.ranks", rank=rank, world_size=2)
anyrank.load(model, path + ".safetensors", %s)
if rank: os._exit(0)
os.wait()"""
# Calls of a load, and the rooms around the core that each has asked for.
LOADS = {
    "a file": ("anyrank.load(model, path + '.safetensors')", set[str]()),
    "two ranks": (TWO_RANKS % "strategy='auto'", set[str]()),
    "on meta": (
        """
with anyrank.meta():
    model = torch.nn.Linear(4, 1)
anyrank.load(model, path + ".safetensors")""",
        set[str](),
    ),
    "a dict": ("anyrank.load(model, saved.state_dict())", {"readers"}),
    "a pickle": (
        "torch.save(saved.state_dict(), path + '.pt'); anyrank.load(model, path + '.pt')",
        {"readers"},
    ),
    "a folder": (
        """
os.mkdir(path)
save_file(saved.state_dict(), path + "/model.safetensors")
anyrank.load(model, path)""",
        {"readers"},
    ),
    "a run": (
        """
anyrank.Checkpoints(path, anyrank.TrainState(saved)).save()
anyrank.load(model, path)""",
        {"readers"},
    ),
    "a URL": (
        """
import fsspec
with fsspec.open("memory://a.safetensors", "wb") as file:
    file.write(save(saved.state_dict()))
anyrank.load(model, "memory://a.safetensors")""",
        {"remote"},
    ),
    "first values": (
        """
with anyrank.meta():
    model = torch.nn.Linear(4, 1)
anyrank.load(model, dict(weight=saved.weight), missing="init")""",
        {"first_values", "readers"},
    ),
    "renamed": ("anyrank.load(model, path + '.safetensors', rename=[('^', '')])", {"tables"}),
    "a misfit": (
        """
try:
    anyrank.load(torch.nn.Linear(4, 2), path + ".safetensors")
except anyrank.LoadError:
    anyrank.load(model, path + ".safetensors")""",
        {"misfits"},
    ),
    "code of its own": (
        """
model.register_load_state_dict_post_hook(lambda *args: None)
anyrank.load(model, path + ".safetensors")""",
        {"own_code"},
    ),
    "verify": ("anyrank.load(model, path + '.safetensors', verify=True)", {"verify"}),
    "stripe": (TWO_RANKS % "strategy='stripe'", {"sharing"}),
    "a frozen part": (
        "anyrank.freeze(model); anyrank.load(model, path + '.safetensors')",
        {"frozen", "readers"},  # whose files are joined with the model's
    ),
    "a layout": (
        """
from torch.distributed.tensor import Replicate
anyrank.load(model, path + ".safetensors", layout=dict(weight=([0], [Replicate()])))""",
        {"layouts"},
    ),
    "small numbers": (
        """
torch.nn.init.ones_(saved.weight)
small = dict(weight=saved.weight.to(torch.float8_e4m3fn), weight_scale_inv=torch.ones(1, 1))
save_file(saved.state_dict() | small, path + ".safetensors")
anyrank.load(model, path + ".safetensors")""",
        {"hugging", "tables"},
    ),
    "with transformers": (
        """
import types
library = sys.modules["transformers.modeling_utils"] = types.ModuleType("transformers")
library.PreTrainedModel = torch.nn.Identity
anyrank.load(model, path + ".safetensors")""",
        {"hugging"},
    ),
    "with peft": (
        "sys.modules['peft'] = sys; anyrank.load(model, path + '.safetensors')",
        {"peft"},
    ),
    "a sync": ("anyrank.sync(model, saved)", {"sync", "sharing"}),
    "sharded tensors": (
        """
from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh, state = DeviceMesh("cpu", [0]), saved.state_dict()
anyrank.load(model, {key: distribute_tensor(t, mesh, [Replicate()]) for key, t in state.items()})
""",
        {"sync", "sharing"},
    ),
}


def sizes_of(folder: Path) -> dict[str, int]:
    """The lines of each room; those of modules beside the rooms by an empty name."""
    sizes = {"": 0}
    for path in folder.rglob("*.py"):
        *folders, _ = path.relative_to(folder).parts
        room = "/".join(folders[: 2 if folders[:1] == ["around"] else 1])
        room = "" if room == "around" else room
        sizes[room] = sizes.get(room, 0) + len(path.read_bytes().splitlines())
    return sizes


def over_budget(sizes: Mapping[str, int]) -> list[str]:
    """Rooms that are larger than they may be, or that have no budget."""
    return [room for room, size in sizes.items() if size > BUDGETS.get(room, 0)]


def test_each_room_around_the_core_has_a_test_that_is_always_run() -> None:
    rooms = {path.parent.name for path in SRC.glob("around/*/__init__.py")} | BESIDE
    assert rooms - ROOMS.keys() == set(), "name a file for it in ROOMS of tests/tiers.py"


def test_rooms_keep_to_their_budgets() -> None:
    sizes = sizes_of(SRC)
    assert over_budget(sizes) == []
    assert sizes.keys() == BUDGETS.keys()


def test_a_room_that_outgrows_its_budget_is_found(tmp_path: Path) -> None:
    for name, lines in (("saving/a.py", 500), ("around/exact/b.py", 9000), ("new/c.py", 1)):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text("x\n" * lines, encoding="utf-8")
    assert set(over_budget(sizes_of(tmp_path))) == {"around/exact", "new"}


def printed_by(program: str, *arguments: object) -> list[str]:
    """The lines that a program has printed."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def loaded_by(program: str, folder: Path) -> list[str]:
    """The modules of anyrank that a program has loaded at its end."""
    return printed_by(program, folder)[-1].split()


def rooms_around(modules: list[str]) -> set[str]:
    """The rooms around the core that modules are of; they are of none beside it."""
    loaded = [name.split(".") for name in modules]
    assert {name[1] for name in loaded} & BESIDE == set()
    return {name[2] for name in loaded if name[1] == "around" and name[2:]}


def lines_of(modules: list[str]) -> int:
    """The lines of modules, with comments and empty ones."""
    paths = [SRC.parent / name.replace(".", "/") for name in modules]
    files = [path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in paths]
    return sum(len(path.read_bytes().splitlines()) for path in files)


def test_the_core_keeps_to_its_budget(tmp_path: Path) -> None:
    program = PLAIN_LOAD + PLAIN_RUN.format(**NOTHING)
    core = loaded_by(program, tmp_path / "run")
    assert {"anyrank.model.match", "anyrank.steps.step"} <= {*core}
    assert lines_of(core) <= CORE_LINES


@pytest.mark.parametrize(
    ("asked", "rooms"),
    [
        ({}, set[str]()),
        ({"loader": ", exact=True"}, {"averaging", "exact", "fsdp2"}),
        ({"loader": ", weights=[1.0] * 8"}, {"weighted"}),
        ({"loader": ", num_workers=1"}, {"workers"}),
        ({"shards": True}, {"streams"}),
        ({"state": ", base='base.pt'"}, {"base"}),
        ({"state": ", other=Own(model.parameters())"}, {"own_methods"}),
        ({"state": ", other=Extra()"}, {"own_code"}),
        ({"run": ", peers=True"}, {"peers"}),
        ({"run": ", background=True"}, {"background"}),
    ],
)
def test_a_run_loads_nothing_around_the_core_that_it_did_not_ask_for(
    asked: dict[str, object], rooms: set[str], tmp_path: Path
) -> None:
    program = PLAIN_RUN.format(**NOTHING | asked)
    assert rooms_around(loaded_by(program, tmp_path / "run")) == rooms


def test_what_a_resume_opens_is_opened_where_something_is_saved(tmp_path: Path) -> None:
    loaded_by(PLAIN_RUN.format(**NOTHING), tmp_path / "first")
    again = PLAIN_RUN.format(**NOTHING)
    assert rooms_around(loaded_by(again, tmp_path / "first")) == set()
    other = again.replace("lr=0.1", "lr=0.2")
    assert rooms_around(loaded_by(other, tmp_path / "first")) == {"script"}
    begins = PLAIN_RUN.format(**NOTHING | {"which": f"{str(tmp_path / 'first')!r}"})
    assert rooms_around(loaded_by(begins, tmp_path / "other")) == {"elsewhere"}


def test_a_folder_with_other_content_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    rooms = rooms_around(loaded_by(PLAIN_RUN.format(**NOTHING), tmp_path))
    assert rooms == {"foreign", "readers"}


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each of `LOADS` has loaded."""
    folder = tmp_path_factory.mktemp("loads")
    lines = printed_by(EACH_LOAD, folder, *(call for call, _ in LOADS.values()))
    return {name: line.split() for name, line in zip(LOADS, lines, strict=True)}


@pytest.mark.parametrize("name", LOADS)
def test_a_load_opens_the_doors_that_it_asks_for(name: str, loads: dict[str, list[str]]) -> None:
    assert rooms_around(loads[name]) == LOADS[name][1]
