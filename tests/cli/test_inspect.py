"""`anyrank inspect`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from safetensors.torch import save_file

LAYERS = 3


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A small language model's folder, with a duplicate that is skipped."""
    tensors = {
        "model.embed_tokens.weight": torch.zeros(64, 16, dtype=torch.bfloat16),
        "model.norm.weight": torch.zeros(16),
        "lm_head.weight": torch.zeros(64, 16, dtype=torch.bfloat16),
        "steps": torch.zeros((), dtype=torch.int64),
    }
    for layer in range(LAYERS):
        width = 48 if layer else 64
        up = torch.zeros(width, 16, dtype=torch.bfloat16)
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"] = up
        tensors[f"model.layers.{layer}.norm.weight"] = torch.zeros(16)
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "pytorch_model.bin").write_bytes(b"")
    return folder


@pytest.mark.usefixtures("weights")
def test_the_rows_have_shapes_dtypes_sizes_and_collapsed_layers(
    snapshot: Callable[[str, str], Result],
) -> None:
    assert snapshot("inspect", "inspect weights").exit_code == 0


@pytest.mark.usefixtures("weights")
def test_all_has_one_row_a_tensor(snapshot: Callable[[str, str], Result]) -> None:
    assert snapshot("inspect_all", "inspect weights --all").exit_code == 0


@pytest.mark.usefixtures("weights")
def test_quiet_prints_names_only(snapshot: Callable[[str, str], Result]) -> None:
    assert snapshot("inspect_quiet", "inspect weights --quiet").exit_code == 0


@pytest.mark.usefixtures("weights")
def test_json_is_the_inspection(snapshot: Callable[[str, str], Result]) -> None:
    said = json.loads(snapshot("inspect_json", "inspect weights/model.safetensors --json").stdout)
    assert len(said["tensors"]) == 4 + 2 * LAYERS


@pytest.mark.usefixtures("weights")
def test_what_is_printed_does_not_depend_on_the_terminal(
    anyrank: Callable[[str], Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = anyrank("inspect weights").stdout
    monkeypatch.setenv("COLUMNS", "20")
    assert anyrank("inspect weights").stdout == wide


@pytest.mark.usefixtures("weights")
def test_the_title_is_bold_where_that_is_wanted(
    anyrank: Callable[[str], Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    bold = "\x1b[1m"
    assert "\x1b" not in anyrank("inspect weights").stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert bold in anyrank("inspect weights").stdout
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.delenv("FORCE_COLOR")
    assert bold not in anyrank("inspect weights").stdout


def test_markup_and_terminal_codes_in_a_file_are_text(
    anyrank: Callable[[str], Result], tmp_path: Path
) -> None:
    tensors = {"[red]a[/red].\x1b[2Jb": torch.zeros(1), "[/].c": torch.zeros(1)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"[bold]k": "[link=x]v"})
    result = anyrank("inspect x.safetensors")
    assert result.exit_code == 0
    assert "[red]a[/red].\\x1b[2Jb" in result.stdout
    assert "[bold]k: [link=x]v" in result.stdout
    assert "\x1b" not in anyrank("inspect x.safetensors --quiet").stdout


def test_markup_in_a_path_is_text(anyrank: Callable[[str], Result], tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "[i]x[b].safetensors")
    assert "[i]x[b].safetensors: safe" in anyrank("inspect [i]x[b].safetensors").stdout


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("inspect_missing", None),
        ("inspect_truncated", b"\xff\x00\x00\x00\x00\x00\x00\x00{}"),
        ("inspect_not_json", b"\x02\x00\x00\x00\x00\x00\x00\x00[["),
    ],
)
def test_a_bad_file_is_one_message_and_exit_1(
    name: str,
    content: bytes | None,
    snapshot: Callable[[str, str], Result],
    anyrank: Callable[[str], Result],
    tmp_path: Path,
) -> None:
    if content is not None:
        (tmp_path / "x.safetensors").write_bytes(content)
    assert snapshot(name, "inspect x.safetensors").exit_code == 1
    assert anyrank("inspect x.safetensors --json").stdout == ""


@pytest.mark.parametrize("line", ["inspect ''", "verify ''", "diff '' ''"])
def test_an_empty_path_as_of_an_unset_variable_is_one_message(
    anyrank: Callable[[str], Result], line: str
) -> None:
    result = anyrank(line)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: source= is an empty path; pass a path")


def test_an_incomplete_download_names_the_missing_shard(
    snapshot: Callable[[str, str], Result], tmp_path: Path
) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert snapshot("inspect_incomplete", "inspect .").exit_code == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux's own file")
def test_a_full_disk_is_one_line(weights: Path) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        line = [
            sys.executable,
            "-c",
            "from anyrank.cli import main; main()",
            "inspect",
            str(weights),
        ]
        ended = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("Error: cannot write the output: ")
    assert ended.stderr.count("\n") == 1
