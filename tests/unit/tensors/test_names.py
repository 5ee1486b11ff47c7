"""Which key of a source fills which tensor, by names alone."""

from __future__ import annotations

import pytest

from anyrank.errors import LoadError
from anyrank.tensors.names import TensorNames, match_keys

COPY = "modules_to_save.default"
WANTED: list[TensorNames] = [
    (("base_model.model.1.original_module.bias", "1.bias"),),
    ((f"base_model.model.1.{COPY}.bias", f"1.{COPY}.bias", "1.modules_to_save.bias", "1.bias"),),
]


def test_a_trained_copys_bias_that_peft_saves_under_both_of_its_names() -> None:
    short, long = (f"base_model.model.1.{name}bias" for name in ("", "modules_to_save."))
    base = "base_model.model.1.original_module.bias"
    for keys, first in ([base, short, long], short), ([long, base, short], long):
        matched = match_keys(WANTED, keys, lambda key: key)
        assert matched.keys == {0: base, 1: first}
        # The second one is compared with the first.
        assert matched.duplicates == {({short, long} - {first}).pop(): first}
        assert not matched.unexpected
        assert not matched.missing


def test_two_keys_for_one_tensor_are_an_error() -> None:
    keys = ["1.bias", "module.1.bias"]
    with pytest.raises(LoadError, match=r"1\.bias and module\.1\.bias of the source both mean"):
        match_keys([(("1.bias",),)], keys, lambda key: key)
