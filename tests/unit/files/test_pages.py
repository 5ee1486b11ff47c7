"""Large pages under fresh memory: only where they are free, and never at the cost of a value."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from anyrank.files import pages

MIB = 1 << 20
PAGE = mmap.PAGESIZE


def flags_at(address: int) -> list[str]:
    """Flags of the mapping of this process that an address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(edge, 16) for edge in first.split("-"))
            inside = low <= address < high
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"{address:x} is not mapped")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of a machine with one large page of 2 MiB and one of 4 MiB free."""
    (tmp_path / "size").write_text(str(512 * PAGE))
    text = "Node 0, zone  DMA32  9 9 9 9 9 9 9 9 9 1 0\nNode 1, zone Normal 5 0 0 0 0 0 0 0 0 0 1\n"
    (tmp_path / "free").write_text(text)
    monkeypatch.setattr(pages, "SIZE_FILE", tmp_path / "size")
    monkeypatch.setattr(pages, "FREE_FILE", tmp_path / "free")
    return tmp_path


def test_free_blocks_of_all_zones_count_from_the_size_of_a_large_page_on(machine: Path) -> None:
    assert pages.free_bytes() == (512 + 1024) * PAGE


@pytest.mark.parametrize("text", ["", "Node 0, zone Normal many\n"])
def test_a_file_that_says_nothing_means_none(machine: Path, text: str) -> None:
    (machine / "free").write_text(text)
    assert pages.free_bytes() == 0
    (machine / "free").unlink()
    assert pages.free_bytes() == 0


@pytest.mark.skipif(not pages.SIZE_FILE.exists(), reason="no large pages on this system")
def test_they_are_asked_for_where_twice_the_need_of_all_ranks_is_free(machine: Path) -> None:
    # A mapping of its own: the allocator may hand out memory that had large pages before.
    fresh = mmap.mmap(-1, 3 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(fresh, dtype=torch.float32)
    assert not pages.use_large_pages([tensor], 2)
    assert "hg" not in flags_at(tensor.data_ptr())
    assert not pages.use_large_pages([tensor[:4], torch.empty(10), torch.empty(0)], 2)
    assert pages.use_large_pages([tensor, tensor.view(-1, 2), torch.empty(8, device="meta")], 1)
    assert "hg" in flags_at(tensor.data_ptr() + PAGE)
    tensor.fill_(2.0)
    assert tensor.sum() == 2.0 * tensor.numel()


def test_a_system_without_them_is_left_alone(machine: Path) -> None:
    (machine / "size").unlink()
    assert not pages.use_large_pages([torch.empty(MIB)], 1)
