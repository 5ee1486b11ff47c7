"""`anyrank.Offload`: keep arguments of recomputed blocks in host memory until backward."""

from __future__ import annotations

from dataclasses import dataclass

from anyrank.checks import check_int
from anyrank.memory.offload_engine import OffloadEngine

MIB = 1 << 20


@dataclass(frozen=True)
class OffloadStats:
    """Statistics of an `Offload` since it was created, in bytes and counts.

    Attributes:
        held_bytes: host memory that is allocated now, in use or idle.
        used_bytes: the part of it that is in use now.
        peak_bytes: the largest `used_bytes` so far.
        copied_bytes: bytes copied to the host.
        kept: tensors that stayed on the device because the pool was full.

    Example::

        offload = anyrank.Offload(pool_bytes=1 << 30)
        assert offload.stats().used_bytes == 0
    """

    held_bytes: int
    used_bytes: int
    peak_bytes: int
    copied_bytes: int
    kept: int


class Offload:
    """An offload that keeps arguments of recomputed blocks in host memory until backward.

    Use one object for all blocks of a model: `recompute_(model, "layers.*", offload=offload)`. No
    coordination between ranks is needed. A block's tensors are copied while later blocks compute,
    on a separate stream and into pinned buffers that are reused in each step. In backward, the
    arguments of the preceding block are copied back ahead of time. The graph owns all state of a
    step. Without gradients nothing is moved.

    These stay on the device: tensors below `min_bytes`, parameters and buffers, expanded, sparse
    and meta tensors, views of less than half of their storage, tensor subclasses other than DTensor
    (whose local part moves). Several tensors of one storage are copied once.

    Args:
        pool_bytes: limit of this rank's host memory, in bytes; tensors stay on the device if the
            pool is full.
        keep_last: number of blocks at the end of the forward pass that stay on the device, because
            backward starts with them.
        min_bytes: smaller tensors stay on the device.

    Raises:
        ValueError: an invalid size; any use after `close`.
        TypeError: an argument of the wrong type.

    Example::

        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
        offload = anyrank.Offload(pool_bytes=1 << 20, min_bytes=1)
        anyrank.recompute_(model, "*", offload=offload)
        model(torch.randn(8, 64)).sum().backward()
        assert offload.stats().copied_bytes == 0  # on a CPU, where nothing moves
        offload.close()
    """

    def __init__(
        self,
        pool_bytes: int,
        *,
        keep_last: int = 1,
        min_bytes: int = MIB,
    ) -> None:
        check_int("pool_bytes", pool_bytes, 1)
        check_int("keep_last", keep_last, 0)
        check_int("min_bytes", min_bytes, 0)
        self._engine = OffloadEngine(pool_bytes, keep_last, min_bytes)

    def __deepcopy__(self, memo: object) -> Offload:
        """Share the memory with the copy of a model that this offload patches."""
        return self

    def stats(self) -> OffloadStats:
        """Return the statistics so far."""
        engine, pool = self._engine, self._engine.pool
        pool.collect()
        return OffloadStats(
            held_bytes=pool.held_bytes,
            used_bytes=pool.used_bytes,
            peak_bytes=pool.peak_bytes,
            copied_bytes=engine.copied_bytes,
            kept=engine.kept,
        )

    def close(self) -> None:
        """Free the host memory. A second call does nothing.

        Raises:
            ValueError: a graph still needs some of it.
        """
        self._engine.close()


def get_engine(offload: Offload) -> OffloadEngine:
    """Return the engine that moves the tensors, for `recompute`."""
    return offload._engine  # pyright: ignore[reportPrivateUsage]
