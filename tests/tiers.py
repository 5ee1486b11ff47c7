"""Which tests `make test` leaves out: the slow ones of rooms that did not change.

A test file that is in no room's list is in both tiers, so a new one is, until it takes its time.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Room(NamedTuple):
    """What `make test` leaves out of a room.

    Attributes:
        paths: words of paths; a change of a file with one of them is a change of the room.
        smoke: a test file that is always run.
        slow: test files that only run if the room has changed: what takes five seconds or more.
    """

    paths: str
    smoke: str
    slow: str = ""


ROOMS = {
    "transformers": Room("quantized transformers", "unit/models/test_quantized"),
    "layouts": Room("layouts", "ranks/models/test_given_layouts"),
    "averaging": Room("buckets", "ranks/training/test_elastic_ranks"),
    "background": Room("background", "ranks/runs/test_background_save"),
    "base": Room("base box_digest", "unit/runs/test_box_digest"),
    "cli": Room(
        paths="cli examples",
        smoke="cli/test_inspect",
        slow="cli/test_demo cli/test_run cli/test_wheel",
    ),
    "convert": Room("convert", "unit/tools/test_convert"),
    "device": Room(
        paths="device gpu machines",
        smoke="unit/test_promise_3_own_device_only",
        slow="device/test_benchmarks device/test_simulated machines/test_two_machines",
    ),
    "replicas": Room("diverged_replicas replicas", "ranks/runs/test_replicas"),
    "docs": Room(
        paths="docs README CONTRIBUTING examples page_setups public",
        smoke="unit/house/test_docs",
        slow="unit/house/test_typing",
    ),
    "path": Room("path begin", "unit/runs/test_which_step"),
    "exact": Room(
        paths="exact exact_runs",
        smoke="unit/training/test_exact_checks",
        slow="""
            ranks/training/test_exact_models ranks/training/test_exact_optimizers
            ranks/training/test_exact_ranks
            unit/training/test_exact_optimizers
        """,
    ),
    "first_values": Room("first_values", "unit/models/test_meta"),
    "adopt": Room(
        paths="adopt foreign tools",
        smoke="unit/sources/test_foreign",
        slow="""
            integrations/test_from_dcp integrations/test_from_deepspeed
            integrations/test_look_at_tools
        """,
    ),
    "frozen": Room("frozen", "unit/models/test_freeze"),
    "fsdp2": Room("fsdp2 fsdp_groups", "unit/training/test_fsdp_groups"),
    "inspect": Room("inspect", "unit/tools/test_inspect"),
    "integrations": Room(
        paths="integrations examples",
        smoke="unit/integrations/test_integrations",
        slow="""
            integrations/test_accelerate_elastic integrations/test_evaluate
            integrations/test_lightning integrations/test_lightning_elastic
            integrations/test_seed_resume
            integrations/test_torchtitan integrations/test_trainer
        """,
    ),
    "memory": Room(
        paths="memory memory_models examples",
        smoke="unit/memory/test_tile",
        slow="""
            integrations/test_long_sequence integrations/test_memory_transformers
            unit/memory/test_memory_transforms unit/memory/test_tiled_loss
        """,
    ),
    "misfits": Room("misfit_errors near_names", "unit/test_promise_1_plan_first"),
    "own_code": Room("own_code own_code_loading extra_state", "unit/memory/test_module_state"),
    "own_methods": Room("optimizer_own", "unit/runs/test_optimizer_methods"),
    "pace": Room("pace pace_listener", "unit/runs/test_run_log"),
    "peers": Room(
        paths="peers run_memory",
        smoke="crash/test_peers",
        slow="cli/test_run_memory",
    ),
    "peft": Room(
        paths="peft lora_resume",
        smoke="integrations/test_peft_first_values",
        slow="integrations/test_peft_folders integrations/test_peft_resume",
    ),
    "readers": Room("readers", "hostile/test_bad_files"),
    "groups": Room("optimizer_groups", "unit/runs/test_optimizer_state"),
    "remote": Room("object_store", "integrations/test_object_store"),
    "script": Room("settings", "unit/runs/test_script_settings"),
    "sharing": Room("sharing", "unit/loading/test_file_flows"),
    "streams": Room("streams", "unit/training/test_from_shards"),
    "sync": Room("live sync", "unit/live/test_sync_local"),
    "tables": Room("tables", "unit/sources/test_load_tables"),
    "testing": Room(
        paths="testing",
        smoke="unit/world/test_faults",
        slow="crash/test_pool",
    ),
    "verify": Room("verify checksums", "unit/tools/test_verify_and_diff"),
    "watching": Room(
        paths="watching hangs",
        smoke="unit/watching/test_hang_verdicts",
        slow="cli/test_check cli/test_stacks crash/test_watch ranks/watching/test_slow_rank",
    ),
    "weighted": Room("weighted_order", "unit/training/test_weighted"),
    "workers": Room("worker_batches worker_exit", "unit/training/test_elastic"),
}


class FastTier:
    """What `make test` leaves out here and now.

    Attributes:
        header: what it says of that.
    """

    def __init__(self) -> None:
        base, files = changed_files()
        rooms = changed_rooms(files)
        self._files = left_out(rooms)
        self._changed = {file for name in rooms for file in files_of(ROOMS[name])}
        told = ", ".join(sorted(rooms)) or "none"
        self.header = (
            f"fast; {len(self._files)} slow files wait for make test-all. "
            f"Compared with {base}; rooms that differ, and run whole: {told}"
        )

    def leaves_out(self, path: Path) -> bool:
        """Whether this is a test file that is not run."""
        return path.is_relative_to(ROOT) and str(path.relative_to(ROOT)) in self._files

    def leaves_out_slow_of(self, path: Path) -> bool:
        """Whether the tests of a file that are marked as slow are not run."""
        name = str(path.relative_to(ROOT))
        return "test_promise_" not in name and name not in self._changed


def files_of(room: Room) -> list[str]:
    """The paths of a room's test files below the repository, the slow ones first."""
    return [f"tests/{name}.py" for name in (*room.slow.split(), room.smoke)]


def changed_files() -> tuple[str, set[str]]:
    """What they are compared with, and the files that differ from it, by their paths.

    That is where this branch left main; on main itself it is the commit before. Outside of a clone,
    and where git does not have that commit, it is nothing, and no file differs.
    """
    if _git("rev-parse", "--show-cdup", "--is-inside-work-tree") != "true":
        return "nothing, as this is no clone, or git is not there", set()
    name = next((one for one in ("main", "origin/main") if _git("merge-base", "HEAD", one)), "")
    if not name:
        return "nothing, as git knows no branch main here", set()
    base = _git("merge-base", "HEAD", name)
    if base == _git("rev-parse", "HEAD"):
        name, base = "the commit before", _git("rev-parse", "--verify", "HEAD~1")
        if not base:
            return "nothing, as git has no commit before this one", set()
    # A file that was moved differs in both places.
    differ = [_git("diff", "--name-only", "--no-renames", base)]
    differ.append(_git("ls-files", "--others", "--exclude-standard"))
    return name, set("\n".join(differ).splitlines())


def changed_rooms(files: set[str]) -> set[str]:
    """The rooms that one of these files belongs to."""
    # The tests' own folders have files of many rooms.
    own_folders = r"^tests/(cli|integrations|(unit|ranks)(/\w+)?)/"
    paths = {re.sub(own_folders, "", file) for file in files}
    words = {word for path in paths for word in re.split("[/.]", path)}
    return {
        name
        for name, room in ROOMS.items()
        if words & {*room.paths.split()} or files & {*files_of(room)}
    }


def left_out(rooms: set[str]) -> set[str]:
    """The slow test files of all rooms but these."""
    others = [room for name, room in ROOMS.items() if name not in rooms]
    return {file for room in others for file in files_of(room)[:-1]}


def _git(*arguments: str) -> str:
    """What git says; nothing where it fails, or is not there."""
    line = ["git", "-c", "safe.directory=*", *arguments]
    try:
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
