"""Send the files of a snapshot from one machine's memory to another's."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anyrank.files.storage import join_path, storing
from anyrank.loading.sharing.passing import exchange
from anyrank.world.ranks import Ranks

BLOCK_BYTES = 32 << 20  # per message


@dataclass(frozen=True)
class FileTransfer:
    """A file to send between two machines, with the global ranks that send and receive it."""

    name: str
    nbytes: int
    sender: int
    receiver: int


def send_files(transfers: Sequence[FileTransfer], folder: str, ranks: Ranks) -> None:
    """Send files of this machine's folder, and receive other machines' files into it. Collective.

    The files are mapped, so bytes go from memory to memory without a copy in between.

    Args:
        transfers: the same list on every rank.
        folder: folder on this machine; made if it does not exist.
        ranks: all ranks in the list, and possibly others.

    Raises:
        CheckpointError: a machine has no room, or lost a file.
    """
    if not transfers:
        return
    own_transfers = [
        transfer for transfer in transfers if ranks.rank in (transfer.sender, transfer.receiver)
    ]
    opened: dict[FileTransfer, mmap.mmap] = {}

    def open_all() -> None:
        with storing(folder):
            for transfer in own_transfers:
                path = join_path(folder, transfer.name)
                if transfer.receiver == ranks.rank:
                    make_folder(folder)
                    _create(path, transfer.nbytes)
                if transfer.nbytes:
                    opened[transfer] = _map_file(path)

    ranks.run("opening the snapshot's files", open_all)
    sent = [(b, t.receiver) for t, m in opened.items() if t.sender == ranks.rank for b in _split(m)]
    received = [
        (b, t.sender) for t, m in opened.items() if t.receiver == ranks.rank for b in _split(m)
    ]
    exchange(ranks, sent, received, "sending the snapshot to other machines")
    # Every rank of the machine reads it.
    ranks.run("sending the snapshot to other machines", lambda: None)


def make_folder(path: str) -> None:
    """Make a folder, but not its parent: if the parent was removed, the run has ended."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)


def _create(path: str, nbytes: int) -> None:
    """Make a file and reserve its memory: a write to a mapping without memory kills the process."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # left by an earlier, interrupted transfer
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        if nbytes:
            os.posix_fallocate(descriptor, 0, nbytes)
    finally:
        os.close(descriptor)


def _map_file(path: str) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def _split(memory: mmap.mmap) -> Sequence[torch.Tensor]:
    """Split a mapped file into blocks of a message's size."""
    return torch.frombuffer(memory, dtype=torch.uint8).split(BLOCK_BYTES)
