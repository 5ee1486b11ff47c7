"""The verdict on a finished epoch of streams, in words: its receipt."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from anyrank.errors import CheckpointError
from anyrank.training.streams.deal import Deal
from anyrank.training.streams.sources import Streams
from anyrank.wording import count

log = logging.getLogger("anyrank.data")


def check_units(deal: Deal) -> None:
    """Check that every token of a finished epoch was returned; not those of a mixture.

    Raises:
        CheckpointError: the transform has lost tokens, or added some.
    """
    total, *others = deal.totals
    if total.units_fed != total.units_given and not others:
        raise CheckpointError(
            f"ElasticLoader: in epoch {deal.epoch} {total.units_fed:,} tokens were read, but "
            f"{total.units_given:,} returned, because the transform returned different rows when "
            "they were fed again. Resume an earlier checkpoint, with the original shards."
        )


def describe(streams: Streams, deal: Deal, changed: Sequence[str]) -> str:
    """Return the text of an epoch's receipt.

    It says "exactly once" if the number of rows is known without reading; otherwise it is about the
    rows that `read` has returned.

    Args:
        streams: streams that were read.
        deal: deal at the end of the epoch.
        changed: descriptions of rows that had changed when they were read again.
    """
    totals = deal.totals
    texts = [_describe_source(streams, deal, source) for source in range(len(totals))]
    text = "; ".join(texts)
    if len(texts) > 1:
        text = f"mixed: {text}"
    if num_given := sum(total.units_given for total in totals):
        text += f", {num_given:,} tokens"
    if dropped := sum(total.dropped for total in totals):
        text += f", {dropped:,} dropped"
    if changed:
        rows = sum(total.rows for total in totals)
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        text = (
            f"unverified: {rows:,} rows were read, and some had changed when they were reread "
            f"({changed[0]}{more})"
        )
    return text


def _describe_source(streams: Streams, deal: Deal, source: int) -> str:
    total, size = deal.totals[source], deal.sizes[source]
    name, known = streams.names[source], streams.sources[source].num_rows
    of_source = f" of {name}" if streams.mix else ""
    rows, shards = count(total.rows, "row"), count(size, "shard")
    if not deal.has_ended[source]:
        return f"{rows}{of_source}, incomplete epoch"
    if 0 < deal.read[source].rows < total.rows:  # it was dealt again
        return f"{rows}{of_source}, each of them once or more"
    if known is None:
        return f"each row{of_source} read was used once: {rows} in {shards}"
    if known == total.rows:
        return f"exactly once: {total.rows:,} of {count(known, 'row')}{of_source}"
    kind, why = "not all", "does read() or the dataset skip rows"
    if total.rows > known:
        kind, why = "too many", "is the length of the dataset wrong, or does it repeat rows"
    text = f"{kind} rows{of_source}: {total.rows:,} of {known:,} were read"
    log.warning("epoch %d: %s?", deal.epoch, f"{text}; {why}")
    return text
