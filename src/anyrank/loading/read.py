"""A source in files or in a dict from which each rank reads its own bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeAlias

import torch

from anyrank.errors import LoadError
from anyrank.files.content_hash import content_hash
from anyrank.files.listing import TensorFill
from anyrank.files.pages import use_large_pages
from anyrank.files.progress import progress_for
from anyrank.files.reader import Job, Reader
from anyrank.loading.agreed_plan import AgreedPlan
from anyrank.loading.fill import Moved, Side
from anyrank.models.dtensors import as_sharded
from anyrank.models.memory_meter import Meter
from anyrank.models.overlaps import SourceMemory, check_overlaps
from anyrank.models.share import ModelShare
from anyrank.tensors.reads import plan_reads
from anyrank.world.device import read_threads
from anyrank.world.ranks import Ranks

OVERWRITTEN = (
    "Tensors that were not on the meta device are partly overwritten; load the model again before "
    "you use it"
)

ProgressTo: TypeAlias = "bool | Callable[[int, int], None] | None"


def read_own(wanted: Sequence[TensorFill], reader: Reader, ranks: Ranks) -> None:
    """Fill this rank's shares from the open files. Does not communicate.

    Ranks start at different files, so that they do not all wait for the same file.

    Raises:
        LoadError: this rank failed to read.
    """
    use_large_pages((entry.local for entry in wanted), ranks.ranks_on_node)
    jobs = [
        Job(read, read.view_of(entry.local))
        for entry in wanted
        for read in plan_reads(entry.stored, entry.target.pieces)
    ]
    reader.run(jobs, ranks.index * len(reader.listing.files) // ranks.size)
    reader.check_unchanged()


class OwnBytes(Side):
    """A source in files or in a dict from which each rank reads its own bytes.

    Args:
        plan: the plan on which all ranks agreed.
        ranks: the ranks of the call.
        meter: the meter of the load.
        progress: as for `load`.
    """

    preparing = "opening the files"
    moving = "reading the weights"

    def __init__(self, plan: AgreedPlan, ranks: Ranks, meter: Meter, progress: ProgressTo) -> None:
        self.plan, self.match = plan, plan.match
        self.ranks = ranks
        self.meter = meter
        self.stack = ExitStack()
        self.share: ModelShare
        self.wanted: list[TensorFill] = []
        self.to_compare: dict[int, torch.Tensor] = {}  # the source's values of frozen parts
        nbytes = sum(
            self.match.tensors[index].local_numel * stored.dtype.itemsize
            for index, stored in self.match.stored.items()
        )
        bar = self.stack.enter_context(progress_for(progress, ranks.index == 0, nbytes))

        def count(nbytes: int) -> None:
            bar.add(nbytes)
            meter.sample()

        self.reader = self.stack.enter_context(
            Reader(
                self.match.listing,
                buffer_bytes=plan.buffer_bytes,
                threads=read_threads(ranks.ranks_on_node),
                progress=count,
            )
        )

    def prepare(self, share: ModelShare) -> None:
        """Open the files, which must be unchanged, and allocate memory.

        Raises:
            LoadError: a file changed; or tensors of the model share memory with one another or
                with a source in memory.
        """
        self.share = share
        self.open_files()
        sources: dict[int, SourceMemory] = {}
        for number, info in enumerate(self.match.listing.files):
            if info.tensor is not None:
                tensor = as_sharded(info.path, info.tensor)
                sources[number] = SourceMemory(tensor, tensor.local(), info.tensor.stride())
        check_overlaps(self.match.tensors, self.match.stored, share.real(), sources)
        share.allocate()
        for index in self.match.compared:
            self.to_compare[index] = share.memory_for(index)
        self.wanted = self._wanted()

    def open_files(self) -> None:
        """Open the files that hold wanted tensors.

        Raises:
            LoadError: a file changed.
        """
        self.reader.open({chunk.file for _, stored in self.match.wanted for chunk in stored.chunks})

    def move(self) -> None:
        """Read the shares, and compare frozen parts.

        Raises:
            LoadError: this rank failed to read; or a frozen part has different values.
        """
        self.fill_shares()
        self._compare_frozen()
        self.meter.sample()

    def fill_shares(self) -> None:
        """Fill the wanted tensors from open files.

        Raises:
            LoadError: this rank failed to read.
        """
        read_own(self.wanted, self.reader, self.ranks)

    def _wanted(self) -> list[TensorFill]:
        match = self.match
        rows = [(i, stored, self.share.local(i)) for i, stored in match.stored.items()]
        rows += [(i, stored, self.to_compare[i]) for i, stored in match.compared.items()]
        return [TensorFill(match.tensors[i], s, local, match.listing, i) for i, s, local in rows]

    def _compare_frozen(self) -> None:
        """Check that the source and the frozen parts have the same values.

        Raises:
            LoadError: the values differ; the part is unchanged.
        """
        for index, stored_value in self.to_compare.items():
            target = self.match.tensors[index]
            if content_hash(stored_value) != content_hash(self.share.local(index)):
                raise LoadError(
                    f"{target.name}: is frozen, but the source has different values. Freeze the "
                    "part with the weights that belong to this source, or remove them from the "
                    "source"
                )
        self.to_compare.clear()

    def finish(self) -> None:
        """Read extra state. Collective."""
        own_code, reader = self.match.own_code, self.plan.reading.reading_ranks[0]
        own_code.read_extras(self.match.listing, self.ranks, reader)

    def moved(self) -> Moved:
        """Return the bytes moved so far."""
        return Moved(self.reader.bytes_read)

    def damage_note(self) -> str:
        """Return the sentence that an error adds about the model."""
        return OVERWRITTEN if self.plan.in_place else ""

    def close(self) -> None:
        """Close the files, and end the progress bar."""
        self.stack.close()
