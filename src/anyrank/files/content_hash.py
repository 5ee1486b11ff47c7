"""A hash of a tensor's values that is the same on every device and for every memory layout."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from anyrank.files.segments import memory_of

BLOCK_BYTES = 1 << 20


def content_hash(tensor: torch.Tensor) -> str:
    """Return xxh3-128 of the elements in row-major order; those on a device pass through 1 MiB.

    Args:
        tensor: any dtype, any device.

    Returns:
        32 hexadecimal digits.
    """
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return hash_of(())
    return hash_of((flat,) if flat.is_cpu else flat.split(BLOCK_BYTES // flat.itemsize))


def hash_of(parts: Iterable[torch.Tensor]) -> str:
    """Hash tensors one after the other, as `content_hash` does; each must fit into memory twice."""
    import xxhash  # only verification needs it

    digest = xxhash.xxh3_128()
    for part in parts:
        host = part.cpu().contiguous()  # needs a name, because memory_of keeps nothing alive
        digest.update(memory_of(host))
    return digest.hexdigest()
