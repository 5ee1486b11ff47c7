"""LoRA under FSDP2 in a loop of one's own: `examples/lora_resume.py`, killed and on other ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from examples import lora_resume
from peft import PeftModel

import anyrank
from anyrank.testing import Fault, RanksFailed, run_ranks


def train(*arguments: str) -> dict[int, float]:
    return lora_resume.main(arguments)


def test_a_run_that_is_killed_goes_on_on_2_then_on_4_ranks_as_on_one(tmp_path: Path) -> None:
    many, one = ["--folder", str(tmp_path / "many")], ["--folder", str(tmp_path / "one")]
    (whole,) = run_ranks(1, train, *one)
    assert list(whole) == list(range(1, lora_resume.STEPS + 1))
    assert whole[lora_resume.STEPS] < whole[1]
    kill = Fault(0, "save.commit", "kill", 2)  # of step 8
    with pytest.raises(RanksFailed, match="rank 0 died"):
        run_ranks(3, train, *many, faults=[kill], grace=2)
    second = run_ranks(2, train, *many, "--stop", "7")[0]
    assert list(second) == [5, 6, 7]
    adapter = tmp_path / "adapter"
    third = run_ranks(4, train, *many, "--adapter", str(adapter))[0]
    assert second | third == pytest.approx({n: whole[n] for n in range(5, 13)}, rel=1e-6)

    names = [tensor.name for tensor in anyrank.inspect(tmp_path / "many").tensors]
    assert names
    assert all(".lora_" in name for name in names)
    base = lora_resume.make_model().get_submodule("base_model").unload()  # pyright: ignore
    tokens = lora_resume.rows()[:8]
    with torch.no_grad():
        read = PeftModel.from_pretrained(base, adapter)
        assert read(input_ids=tokens, labels=tokens).loss < whole[1]
