"""Compare loaded values: two names of one tensor in each load; more with `verify=True`.

`verify=True` compares the file with its checksums, replicas with one another, and looks for NaN.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from anyrank.errors import LoadError
from anyrank.files.content_hash import BLOCK_BYTES, content_hash
from anyrank.files.listing import Listing
from anyrank.files.reader import Reader
from anyrank.loading.checksums import compared, mismatches
from anyrank.models.alike import differing_replicas
from anyrank.models.dialects.dialect import ModelMatch
from anyrank.models.tensors import ModelTensor
from anyrank.tensors.box import Box
from anyrank.tensors.sharded_tensor import Coordinates, Members, ShardedTensor, replicas, shared
from anyrank.tensors.spec import StoredTensor
from anyrank.wording import count, join_first
from anyrank.world.first_ranks import name_ranks
from anyrank.world.ranks import Ranks

SHOWN = 5  # pairs in a message
NO_CHECKSUMS = "the source has no checksums, so corruption cannot be detected"


def verify_source(match: ModelMatch, reading_ranks: tuple[int, ...], ranks: Ranks) -> list[str]:
    """Compare a source with its checksums; return texts that say what was compared. Collective.

    Args:
        match: the match, which has the source's listing.
        reading_ranks: the ranks that read, and share the work.
        ranks: the ranks of the call.

    Raises:
        LoadError: as for `_check_files`.
    """

    def check() -> list[str]:
        if ranks.rank not in reading_ranks:
            return []
        return _check_files(match.listing, reading_ranks.index(ranks.rank), len(reading_ranks))

    _, checked = ranks.run_and_reduce(
        "checking the files", lambda: (None, check()), lambda words, others: words or others
    )
    return ["replicas", *(checked or [NO_CHECKSUMS])]


def verify_loaded(
    match: ModelMatch, coordinates: Mapping[int, Coordinates], ranks: Ranks
) -> dict[str, int]:
    """Compare replicas of loaded tensors; return the NaN and infinities per tensor. Collective.

    Args:
        match: the match that was loaded.
        coordinates: coordinates of every rank, by global rank.
        ranks: the ranks of the call.

    Raises:
        LoadError: replicas differ.
    """
    known = shared(match.tensors, coordinates)
    compare_replicas((pair for pair in known if pair[0].kind != "derived"), ranks)
    # Each element is counted on only one rank, because replicas are equal.
    own_tensors = [
        tensor
        for index, tensor in enumerate(match.tensors)
        for members in replicas(index, tensor, coordinates).values()
        if tensor.kind != "derived" and members[0] == ranks.rank
    ]
    return count_nonfinite(own_tensors, ranks)


def _check_files(listing: Listing, number: int, count: int) -> list[str]:
    """Compare this rank's part of the files with the checksums that came with them.

    Args:
        listing: the source.
        number: which of `count` equal parts of the work to do.
        count: how many ranks share the work.

    Returns:
        Texts that say what was compared.

    Raises:
        LoadError: a checksum differs; names the file, and the record if the format knows it.
    """
    for path, what in mismatches(listing, number, count):
        raise LoadError(f"{path}: {what}")
    return compared(listing)


def compare_ties(match: ModelMatch, reading_ranks: Sequence[int], ranks: Ranks) -> None:
    """Compare the source's values under several names of one tensor of the model. Collective.

    Args:
        match: the match, which has the names.
        reading_ranks: the ranks that read, and share the work.
        ranks: the ranks of the call.

    Raises:
        LoadError: two names hold different values, and the model can keep only one.
    """
    listing = match.listing

    def compare() -> None:
        if ranks.rank not in reading_ranks:
            return
        number, count = reading_ranks.index(ranks.rank), len(reading_ranks)
        with Reader(listing, buffer_bytes=BLOCK_BYTES) as reader:

            def values(name: str, box: Box) -> torch.Tensor:
                return reader.read(listing.tensors[name], box)

            different = [
                (key, first)
                for key, first in match.stored_twice.items()
                for box in [*_boxes(listing.tensors[first])][number::count]
                if _differ(values(key, box), values(first, box))
            ]
        if different:
            pairs = [f"{key} and {first}" for key, first in dict(different).items()]
            raise LoadError(
                f"{join_first(pairs, SHOWN)} are tied in the model, but differ in the source. "
                "Build the model without the tie (transformers: tie_word_embeddings=False), or "
                f"drop the wrong one with rename={dict.fromkeys(dict(different), '')!r}"
            )

    ranks.run("comparing tied tensors", compare)


def _boxes(stored: StoredTensor) -> Iterator[Box]:
    """Return the boxes of a tensor's blocks."""
    return Box.whole(stored.shape).cut(BLOCK_BYTES // stored.dtype.itemsize)


def _differ(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if the values differ in a bit; NaN equals NaN."""
    dtype = torch.promote_types(tensor.dtype, other.dtype)
    first, second = (t.to(dtype).reshape(-1).view(torch.uint8) for t in (tensor, other))
    return not torch.equal(first, second)


def content_hashes(tensors: Iterable[ShardedTensor]) -> Iterable[str]:
    """`content_hash` of this rank's part of each tensor."""
    return (content_hash(tensor.local()) for tensor in tensors)


def compare_replicas(
    shared: Iterable[tuple[ShardedTensor, Members]],
    ranks: Ranks,
    digest_all: Callable[[Iterable[ShardedTensor]], Iterable[str]] = content_hashes,
) -> None:
    """Compare the copies on several ranks; arguments as for `differing_replicas`. Collective.

    Raises:
        LoadError: replicas differ; names the tensors and the ranks.
    """
    different = differing_replicas(shared, ranks, digest_all)
    if different:
        shown = [
            f"{name}: different values on " + " and on ".join(map(name_ranks, by_text.values()))
            for name, by_text in [*different.items()][:10]
        ]
        raise LoadError(
            f"{count(len(different), 'tensor differs', 'tensors differ')} between replicas:\n  "
            + "\n  ".join(shown)
        )


def count_nonfinite(targets: list[ModelTensor], ranks: Ranks) -> dict[str, int]:
    """Return the number of NaN and infinite values per tensor. Collective."""

    def count_here() -> Counter[str]:
        counts: Counter[str] = Counter()
        for target in targets:
            local = target.local()
            if local.is_floating_point() and local.dtype.itemsize > 1 and local.numel():
                rows = local.reshape(-1).split(BLOCK_BYTES)
                bad = sum(int((~row.isfinite()).sum()) for row in rows)
                if bad:
                    counts[target.name] = bad
        return counts

    _, counts = ranks.run_and_reduce("looking for NaN", lambda: (None, count_here()), operator.add)
    return dict(counts)
