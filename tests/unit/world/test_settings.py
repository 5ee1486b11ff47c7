"""ANYRANK_* variables: what is not a positive number within the bounds is refused by name."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import anyrank
from anyrank import settings

WRONG = ["", "0", "000", "-1", "8 MiB", "1.5", "x", "\u00b2"]
LARGE = ["99999999999999999999", "9" * 30, "9" * 5000]


@pytest.mark.parametrize("knob", settings.KNOBS, ids=lambda knob: knob.name)
def test_a_knob_refuses_what_is_out_of_its_bounds(
    knob: settings.Knob, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 1 <= knob.get() == knob.default <= knob.most
    for text in WRONG:
        monkeypatch.setenv(knob.name, text)
        expected = f"{knob.name}={text!r}: must be a positive integer"
        with pytest.raises(anyrank.AnyrankError, match=re.escape(expected)):
            knob.get()
    for text in [*LARGE, str(knob.most + 1)]:
        monkeypatch.setenv(knob.name, text)
        bounds = (
            rf"{knob.name}=\d+: must be between 1 and {knob.most}\. Unset it to use the default"
        )
        with pytest.raises(anyrank.AnyrankError, match=bounds) as caught:
            knob.get()
        assert len(str(caught.value)) < 200
    for number in (1, knob.default, knob.most):
        monkeypatch.setenv(knob.name, f" 0{number} ")
        assert knob.get() == number


def test_a_load_names_the_knob(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"weight": torch.ones(3, 3), "bias": torch.ones(3)}
    model = nn.Linear(3, 3)
    monkeypatch.setenv("ANYRANK_BUFFER_BYTES", "9" * 30)
    with pytest.raises(anyrank.AnyrankError, match=r"^ANYRANK_BUFFER_BYTES=9+: must be between 1"):
        anyrank.load(model, weights)
    with pytest.raises(ValueError, match=r"buffer_bytes=9+: must be at most \d+"):
        anyrank.load(model, weights, buffer_bytes=int("9" * 30))
