"""A source in files that some ranks read in blocks, and pass on to the ranks that want them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from anyrank import faults
from anyrank.files.pages import use_large_pages
from anyrank.files.reader import Job, Reader
from anyrank.loading.agreed_plan import AgreedPlan
from anyrank.loading.fill import Moved
from anyrank.loading.read import OwnBytes, ProgressTo
from anyrank.loading.sharing.flows import FileFlows, Flow
from anyrank.loading.sharing.messages import Block
from anyrank.loading.sharing.move import Mover
from anyrank.loading.sharing.places import LocalMemory
from anyrank.loading.sharing.transfers import Transfer
from anyrank.models.memory_meter import Meter
from anyrank.models.share import ModelShare
from anyrank.tensors.box import Box
from anyrank.world.ranks import Ranks

MIN_WINDOW_BYTES = 256 << 10


class FileMemory(LocalMemory):
    """The blocks that this rank has read from the files in a round, and the memory that it fills.

    Args:
        reader: reader of this rank's files; they are open.
        targets: position in the wanted list -> this rank's memory.
    """

    def __init__(self, reader: Reader, targets: Mapping[int, torch.Tensor]) -> None:
        super().__init__({}, targets)
        self.reader = reader
        self.blocks: dict[tuple[int, int], torch.Tensor] = {}

    def begin(self, flows: Sequence[Flow]) -> None:
        """Read the blocks that this rank sends in a round.

        Raises:
            LoadError: this rank failed to read.
        """
        faults.point("load.exchange")
        self.settle()  # a device may still read the blocks of the previous round
        jobs: list[Job] = []
        self.blocks.clear()
        for flow in flows:
            for number_of_block, read in flow.reads.items():
                memory = torch.empty(read.box.sizes, dtype=flow.stored_dtype, device="cpu")
                self.blocks[flow.index, number_of_block] = memory
                jobs.append(Job(read, memory))
        self.reader.run(jobs)

    def source_view(self, flow: Flow, transfer: Transfer, box: Box) -> torch.Tensor:
        """Return the elements of a box in the block that this rank has read."""
        block = self.blocks[flow.index, transfer.box_number]
        inside = box.relative_to(transfer.box.offsets).shifted(transfer.source)
        return block[inside.slices()]

    def source_of(self, block: Block) -> torch.Tensor:
        """Return the `source_view` of a block. Not cached: its memory lasts for one round."""
        return self.source_view(block.flow, block.transfer, block.box)

    def is_computed(self, flow: Flow, transfer: Transfer) -> bool:
        """Return False: `source_view` computes nothing, because the values are read first."""
        return False


class SharedBlocks(OwnBytes):
    """A source in files: one rank reads each block, and other ranks receive it.

    Args:
        plan, ranks, meter, progress: as for `OwnBytes`.
        flows: the exchange between ranks.
    """

    mover: Mover

    def __init__(
        self,
        plan: AgreedPlan,
        flows: FileFlows,
        ranks: Ranks,
        meter: Meter,
        progress: ProgressTo,
    ) -> None:
        super().__init__(plan, ranks, meter, progress)
        self.flows = flows

    def prepare(self, share: ModelShare) -> None:
        """Prepare like `OwnBytes`, and allocate the window."""
        super().prepare(share)
        memory = FileMemory(self.reader, dict(enumerate(fill.local for fill in self.wanted)))
        window = max(MIN_WINDOW_BYTES, self.plan.buffer_bytes // 2)  # the other half is for blocks
        rounds = self.flows.rounds(self.ranks.rank)
        self.mover = Mover(rounds, memory, self.ranks, window, self.meter.sample)

    def open_files(self) -> None:
        """Open the files on the ranks that read them; other ranks may not see them."""
        if self.ranks.rank in self.plan.reading.reading_ranks:
            super().open_files()

    def fill_shares(self) -> None:
        """Read blocks, and pass them on.

        Raises:
            Interrupted: another rank failed.
            LoadError: this rank failed to read.
        """
        use_large_pages((fill.local for fill in self.wanted), self.ranks.ranks_on_node)
        self.mover.run()
        self.reader.check_unchanged()

    def moved(self) -> Moved:
        """Return the bytes moved so far."""
        return Moved(self.reader.bytes_read, self.mover.sent)
