"""The dialects, in the order in which a match asks them."""

from __future__ import annotations

from anyrank.models.dialects.dialect import Dialect
from anyrank.models.dialects.frozen.dialect import FrozenParts
from anyrank.models.dialects.layouts.dialect import GivenLayouts
from anyrank.models.dialects.peft.dialect import Adapters
from anyrank.models.dialects.transformers.conversions import ConvertedNames
from anyrank.models.dialects.transformers.values import QuantizedValues

# Values come before names, because a conversion fuses whole weights. Adapters come last, because
# their check depends on what fills their base.
DIALECTS: list[type[Dialect]] = [
    QuantizedValues,
    ConvertedNames,
    FrozenParts,
    GivenLayouts,
    Adapters,
]
