"""The dialects, in the order in which a match asks them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from anyrank.files.listing import Listing
from anyrank.models.dialects.dialect import Dialect, with_values
from anyrank.models.dialects.frozen.dialect import FrozenParts
from anyrank.models.dialects.layouts.dialect import GivenLayouts
from anyrank.models.dialects.peft.dialect import Adapters
from anyrank.models.dialects.transformers.conversions import ConvertedNames
from anyrank.models.dialects.transformers.values import QuantizedValues

# Frozen parts come before layouts: the tensors from a part's own source are cut, too. Otherwise the
# order is only that of the problems in an error.
DIALECTS: list[type[Dialect]] = [
    QuantizedValues,
    ConvertedNames,
    FrozenParts,
    GivenLayouts,
    Adapters,
]


def values_without_model(
    listing: Listing, dtypes: Mapping[str, torch.dtype] | None = None
) -> Listing:
    """Return a stored source with weights in place of what libraries store in a different form.

    A source that no dialect can read as weights keeps its `quantization`; see `check_method`.

    Args:
        listing: the source.
        dtypes: name -> dtype in which a tensor is needed; by default all must be floating-point.

    Raises:
        LoadError: a stored form lacks a part, or its parts do not match.
    """
    return with_values(listing, DIALECTS, dtypes or {})
