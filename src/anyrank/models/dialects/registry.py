"""The dialects, in the order in which a match asks them."""

from __future__ import annotations

from anyrank.models.dialects.dialect import Dialect
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
