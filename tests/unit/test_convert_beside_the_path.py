"""`convert` one step beside the documented path: nothing is lost, and nothing wrong is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import anyrank

# -- what is replaced -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["notes.txt", "train.py", "optimizer.pt", "README.md", "x.bin", "deep/x", "x.json"]
)
@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_overwrite_never_deletes_what_is_no_weights(tmp_path: Path, to: str, name: str) -> None:
    out = tmp_path / "out"
    anyrank.convert({"a": torch.ones(2)}, out, to=to)  # type: ignore[arg-type]
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("work of months")
    with pytest.raises(ValueError, match=f"would delete {name.partition('/')[0]}"):
        anyrank.convert({"b": torch.ones(2)}, out, overwrite=True)
    assert (out / name).read_text() == "work of months"
    assert os.listdir(tmp_path) == ["out"]


def test_overwrite_replaces_what_an_earlier_conversion_copied(tmp_path: Path) -> None:
    src, out = tmp_path / "src", tmp_path / "out"
    src.mkdir()
    save_file({"w": torch.ones(2)}, src / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "README.md", "modeling_x.py", "LICENSE"):
        (src / name).write_text("{}")
    anyrank.convert(src, out)
    anyrank.convert(src, out, overwrite=True)
    (out / "README.md").write_text("edited")
    with pytest.raises(ValueError, match=r"would delete README\.md"):
        anyrank.convert(src, out, overwrite=True)
    assert (out / "README.md").read_text() == "edited"


@pytest.mark.parametrize("name", ["out", "w.safetensors"])
def test_a_link_is_kept_and_what_it_points_to_replaced(tmp_path: Path, name: str) -> None:
    real, link = tmp_path / "real" / name, tmp_path / name
    anyrank.convert({"a": torch.ones(2)}, real)
    link.symlink_to(real)
    anyrank.convert({"b": torch.ones(2)}, link, overwrite=True)
    assert link.is_symlink()
    file = link / "model.safetensors" if link.is_dir() else link
    assert load_file(file).keys() == {"b"}
    assert sorted(os.listdir(tmp_path)) == sorted([name, "real"])
    assert os.listdir(tmp_path / "real") == [name]
