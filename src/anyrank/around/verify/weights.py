"""What is read is compared: two names of one tensor with one another, in each load; with
`verify=True` the file with its checksums, replicas with one another, values with NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from anyrank.around.verify.checksums import compared, mismatches
from anyrank.errors import LoadError
from anyrank.files.content_hash import BLOCK_BYTES, content_hash
from anyrank.files.listing import Listing
from anyrank.files.reader import Reader
from anyrank.model.dialects import ModelMatch
from anyrank.model.tensors import ModelTensor, in_state_dict
from anyrank.tensors.box import Box
from anyrank.tensors.layout import Piece
from anyrank.tensors.spec import StoredTensor
from anyrank.wording import join_first
from anyrank.world.ranks import Ranks

SHOWN = 5  # pairs in a message
NO_CHECKSUMS = "the source has no checksums, so a flipped bit in it cannot be noticed"


def verify_source(match: ModelMatch, readers: tuple[int, ...], ranks: Ranks) -> list[str]:
    """Compare a source with its checksums; what was compared, in words. All ranks.

    Args:
        match: what is loaded of it.
        readers: the ranks that read, and share the work.
        ranks: of the call.

    Raises:
        LoadError: as `_check_files`.
    """

    def check() -> list[str]:
        if ranks.rank not in readers:
            return []
        return _check_files(match.listing, readers.index(ranks.rank), len(readers))

    checked = next((words for words in ranks.together("checking the files", check) if words), [])
    return ["replicas", *(checked or [NO_CHECKSUMS])]


def verify_loaded(match: ModelMatch, ranks: Ranks) -> dict[str, int]:
    """Compare the replicas of what was loaded; its NaN and infinities by tensor. All ranks.

    Raises:
        LoadError: replicas differ.
    """
    loaded = in_state_dict(match.tensors)
    compare_replicas(loaded, ranks)
    return count_nonfinite(loaded, ranks)


def _check_files(listing: Listing, number: int, count: int) -> list[str]:
    """Compare this rank's part of the files with the checksums that came with them.

    Args:
        listing: the source.
        number: which of `count` equal parts of the work to do.
        count: how many ranks share the work.

    Returns:
        What was compared, in words.

    Raises:
        LoadError: a checksum differs; names the file, and the record where the format knows it.
    """
    for path, what in mismatches(listing, number, count):
        raise LoadError(f"{path}: {what}")
    return compared(listing)


def compare_ties(match: ModelMatch, readers: Sequence[int], ranks: Ranks) -> None:
    """Compare what the source holds under several names of one tensor of the model. All ranks.

    Args:
        match: what is loaded of the source.
        readers: the ranks that read, and share the work.
        ranks: of the call.

    Raises:
        LoadError: two names hold different values, and the model can keep only one.
    """
    listing = match.listing

    def compare() -> None:
        if ranks.rank not in readers:
            return
        number, count = readers.index(ranks.rank), len(readers)
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
                f"{join_first(pairs, SHOWN)} are one tensor in the model, and hold different "
                "values in the source: build the model without this tie (transformers: "
                "tie_word_embeddings=False), or leave out what is wrong, as by "
                f"rename={dict.fromkeys(dict(different), '')!r}"
            )

    ranks.run("comparing tied tensors", compare)


def _boxes(stored: StoredTensor) -> Iterator[Box]:
    """A tensor in blocks."""
    return Box.whole(stored.shape).cut(BLOCK_BYTES // stored.dtype.itemsize)


def _differ(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether values differ in a bit; NaN equals NaN."""
    dtype = torch.promote_types(tensor.dtype, other.dtype)
    first, second = (t.to(dtype).reshape(-1).view(torch.uint8) for t in (tensor, other))
    return not torch.equal(first, second)


def _content_hashes(tensors: Iterable[torch.Tensor]) -> Iterable[str]:
    """`content_hash` of each."""
    return map(content_hash, tensors)


def compare_replicas(
    targets: list[ModelTensor],
    ranks: Ranks,
    hash_all: Callable[[Iterable[torch.Tensor]], Iterable[str]] = _content_hashes,
) -> int:
    """Compare by hash what several ranks hold alike; the number of tensors compared. All ranks.

    Args:
        targets: some of them on each rank.
        ranks: of the call.
        hash_all: a text for each tensor's values, the same on all ranks.

    Raises:
        LoadError: replicas differ; names the tensors and the ranks.
    """

    def hashes() -> dict[tuple[str, tuple[Piece, ...]], str]:
        shares = [target for target in targets if target.pieces]
        texts = hash_all(target.local() for target in shares)
        return {(t.name, t.pieces): text for t, text in zip(shares, texts, strict=True)}

    answers = ranks.together("hashing the replicas", hashes)
    seen: dict[tuple[str, tuple[Piece, ...]], dict[str, list[int]]] = {}
    for rank, answer in zip(ranks.ranks, answers, strict=True):
        for key, value in answer.items():
            seen.setdefault(key, {}).setdefault(value, []).append(rank)
    different = {key[0]: groups for key, groups in seen.items() if len(groups) > 1}
    if different:
        shown = [
            f"{name}: " + " differs from ".join(f"ranks {members}" for members in groups.values())
            for name, groups in list(different.items())[:10]
        ]
        raise LoadError(
            f"{len(different)} tensors differ between replicas:\n  " + "\n  ".join(shown)
        )
    return sum(1 for groups in seen.values() if sum(map(len, groups.values())) > 1)


def count_nonfinite(targets: list[ModelTensor], ranks: Ranks) -> dict[str, int]:
    """NaN and infinite values by tensor over all ranks, of replicas counted once. All ranks."""

    def count() -> dict[tuple[str, tuple[int, ...]], int]:
        counts: dict[tuple[str, tuple[int, ...]], int] = {}
        for target in targets:
            local = target.local()
            if local.is_floating_point() and local.dtype.itemsize > 1 and local.numel():
                rows = local.reshape(-1).split(BLOCK_BYTES)
                bad = sum(int((~row.isfinite()).sum()) for row in rows)
                if bad:  # ranks whose first elements are the same ones are replicas
                    counts[target.name, target.pieces[0].box.offsets] = bad
        return counts

    by_share: dict[tuple[str, tuple[int, ...]], int] = {}
    for counts in ranks.together("looking for NaN", count):
        by_share |= counts
    total: dict[str, int] = {}
    for (name, _), bad in by_share.items():
        total[name] = total.get(name, 0) + bad
    return total
