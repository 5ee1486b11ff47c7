"""The commands and flags there are, and what holds for all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import click
import pytest
from click.testing import CliRunner, Result

import anyrank as package
from anyrank.cli import main

# A change here is a change of the interface: decide on it, then edit the table.
INTERFACE = {
    "": {"--version", "-h", "--help"},
    "inspect": {"PATH", "--all", "--quiet", "--json", "--plot", "-h", "--help"},
    "verify": {"PATH", "--finite", "--json", "-h", "--help"},
    "diff": {"A", "B", "--ignore", "--json", "-h", "--help"},
    "convert": {"SOURCES", "DESTINATION", "--to", "--dtype", "--rename", "--shard-bytes"}
    | {"--overwrite", "--json", "-h", "--help"},
    "plan": {
        *("PATH", "--ranks", "--mesh", "--dtype", "--json"),
        *("-h", "--help"),
    },
    "check": {"SCRIPT", "ARGUMENTS", "-m", "--ranks", "--json", "-h", "--help"},
    "stacks": {"PID", "--json", "-h", "--help"},
    "run": {"SCRIPT", "ARGUMENTS", "-m", "--ranks", "--then", "--json", "-h", "--help"}
    | {"--watch", "--exit", "--report"}
    | {"--nnodes", "--node-rank", "--master-addr", "--master-port"}
    | {"--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"},
    "demo": {"--json", "-h", "--help"},
}


def list_flags(command: click.Command, ctx: click.Context) -> set[str]:
    """Every spelling of every option, and the arguments in capitals."""
    arguments = {p.name.upper() for p in command.params if isinstance(p, click.Argument) and p.name}
    options = {o for p in command.params if isinstance(p, click.Option) for o in p.opts}
    return arguments | options | set(ctx.help_option_names)


def test_commands_and_flags_are_those_of_the_table() -> None:
    with main.make_context("anyrank", [], resilient_parsing=True) as ctx:
        found = {"": list_flags(main, ctx)}
        for name in main.list_commands(ctx):
            command = main.get_command(ctx, name)
            assert command is not None
            found[name] = list_flags(command, click.Context(command, parent=ctx))
    assert found == INTERFACE


@pytest.mark.parametrize("name", [name for name in INTERFACE if name])
def test_every_command_has_json_and_help(name: str, snapshot: Callable[[str, str], Result]) -> None:
    assert "--json" in INTERFACE[name]
    assert snapshot(f"help_{name}", f"{name} --help").exit_code == 0


def test_help_lists_the_commands(snapshot: Callable[[str, str], Result]) -> None:
    assert snapshot("help", "--help").exit_code == 0


def test_version_is_the_packages(anyrank: Callable[[str], Result]) -> None:
    assert anyrank("--version").stdout == f"anyrank {package.__version__}\n"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("usage_no_such_command", "inspekt x"),
        ("usage_no_path", "inspect"),
        ("usage_no_such_flag", "plan x --rank 8 --jsn"),
    ],
)
def test_wrong_usage_is_exit_2(
    name: str, line: str, snapshot: Callable[[str, str], Result]
) -> None:
    assert snapshot(name, line).exit_code == 2


@pytest.mark.parametrize("line", ["--help", "inspect --help", "plan --help", "demo --help"])
def test_help_loads_neither_torch_nor_rich(line: str) -> None:
    heavy = ["torch", "numpy", "rich", "transformers", "safetensors", "fsspec"]
    code = (
        "import sys\nfrom anyrank.cli import main\n"
        f"try: main({line.split()})\nexcept SystemExit: pass\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


def test_the_installed_command_is_this_one() -> None:
    command = os.path.join(os.path.dirname(sys.executable), "anyrank")
    run = subprocess.run(
        [command, "inspect", "no/such/file"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("Error: no/such/file: does not exist")
    assert "Traceback (most" not in run.stderr


def test_python_runs_the_package_as_the_command() -> None:
    command = [sys.executable, "-m", "anyrank", "--version"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert package.__version__ in run.stdout


def test_a_missing_package_of_a_storage_is_named_and_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    for line in ("inspect gs://bucket/run", "verify gs://bucket/run", "diff gs://b/a gs://b/b"):
        result = CliRunner().invoke(main, line.split())
        assert (result.exit_code, "gcsfs" in result.output) == (2, True)
