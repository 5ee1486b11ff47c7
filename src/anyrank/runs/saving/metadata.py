"""The `.metadata` of a step, which torch.distributed.checkpoint reads: made once per plan.

anyrank does not read it, so it is made after the commit, and a step is complete without it. It
depends on the plan, from which every rank knows the others' writes, so no rank is asked. Steps of
one plan have the same bytes, and a later step copies them from the newest one that has them.
"""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from anyrank import faults
from anyrank.errors import AnyrankError, CorruptCheckpoint
from anyrank.files.manifest import Manifest, data_name
from anyrank.files.storage import join_path
from anyrank.runs.saving.run_folder import RunFolder
from anyrank.sources.dcp_output import DcpPiece, DcpTensor, pickle_metadata
from anyrank.sources.dcp_seal import check_seal, plan_of, write_sealed
from anyrank.sources.rank_index import Placed, RankIndex, read_indexes
from anyrank.sources.run_step import METADATA
from anyrank.sources.step_index import StepIndex
from anyrank.sources.torch_zip import place_zip, wrapped_bytes
from anyrank.tensors.box import Box
from anyrank.tensors.writes import WritePlan, cut_pieces

log = logging.getLogger("anyrank.saving")

LOOKED_AT = 3  # newest steps to search for one that has the same bytes
REST_SEC = 0.002  # in the background, after each part, which takes about a millisecond


def write_metadata(
    folder: RunFolder,
    name: str,
    plan: WritePlan,
    index: StepIndex,
    manifest: Manifest,
    owners: Mapping[int, bytes],
    rests: bool,
) -> None:
    """Write the `.metadata` of a committed step. On one rank; a failure is a warning.

    Args:
        folder: folder of the run.
        name: name of the step's folder.
        plan: plan of what all ranks write.
        index, manifest: index and manifest of the step.
        owners: rank -> digest of the tensors that only it has, for ranks that have some.
        rests: whether to release the interpreter to other threads in between.
    """
    path = join_path(folder.join(name), METADATA)
    digest = _digest(plan, index, owners)

    def rest() -> None:
        if rests:
            time.sleep(REST_SEC)

    try:
        faults.point("save.metadata")
        if (same := _find_same(folder, name, digest, rest)) is not None:
            folder.store.copy(same, path)
            return
        indexes = read_indexes(folder.store, folder.join(name), manifest.ranks, index, {0, *owners})
        parts = pickle_metadata(*_describe(plan, index, indexes))
        if not folder.store.renames:
            write_sealed(folder.store, path, parts, digest, rest)
            return
        temporary = f"{path}.tmp-{uuid.uuid4().hex[:8]}"  # readers see all of it, or nothing
        write_sealed(folder.store, temporary, parts, digest, rest)
        folder.store.rename(temporary, path)
    except (OSError, AnyrankError) as error:
        log.warning(
            "%s: has no %s, which only torch.distributed.checkpoint reads: %s",
            folder.user_path(name),
            METADATA,
            error,
        )


def _digest(plan: WritePlan, index: StepIndex, owners: Mapping[int, bytes]) -> bytes:
    """Return a digest of everything that a `.metadata` depends on."""
    digest = hashlib.blake2b(index.to_bytes(), digest_size=16)
    digest.update(bytes(tensor.may_differ for tensor in plan.tensors))
    digest.update(repr([plan.size, sorted(owners.items())]).encode())
    return digest.digest()


def _find_same(folder: RunFolder, name: str, digest: bytes, rest: Callable[[], None]) -> str | None:
    """Find an intact `.metadata` of the same plan among the newest other steps."""
    others = [step.name for step in folder.whole_steps() if step.name != name]
    for other in others[:LOOKED_AT]:
        path = join_path(folder.join(other), METADATA)
        if plan_of(folder.store, path) == digest:
            try:
                check_seal(folder.store, path, rest)
            except CorruptCheckpoint as error:
                log.warning("%s", error)
                continue
            return path
    return None


def _describe(
    plan: WritePlan, index: StepIndex, indexes: Mapping[int, RankIndex]
) -> tuple[list[DcpTensor], Iterator[tuple[str, Iterator[DcpPiece]]]]:
    """Describe the tensors of a step, and the pieces that each rank has written.

    Args:
        plan: plan of what the ranks hold together.
        index: index of the step.
        indexes: indexes of the ranks that have written other tensors too, and of the first rank,
            which has written those that are identical on every rank.
    """
    names: dict[str, list[str]] = {}
    for alias, name in index.aliases.items():
        names.setdefault(name, []).append(alias)
    tensors: list[DcpTensor] = []
    for number, tensor in enumerate(index.tensors):
        if number < len(plan.tensors):
            boxes, kind = partial(_boxes, plan, number), _kind(plan, number)
        else:
            boxes, kind = partial(_placed_boxes, indexes[0].placed[number]), number
        called = [tensor.name, *names.get(tensor.name, ())]
        tensors.append(DcpTensor(called, tensor.shape, tensor.dtype, boxes, kind))
    numbers: dict[str, int] = {}
    for rank, rank_index in indexes.items():
        for name, tensor in rank_index.own_tensors.items():
            numbers[name] = len(tensors)
            boxes = partial(_placed_boxes, tensor.placed)
            tensors.append(DcpTensor([name], tensor.shape, tensor.dtype, boxes, (rank, name)))
    files = (
        (data_name(rank), _written(tensors, numbers, indexes[rank]))
        if rank in indexes
        else (data_name(rank), _planned(plan, tensors, rank))
        for rank in range(plan.size)
    )
    return tensors, files


def _kind(plan: WritePlan, number: int) -> object:
    """Return a value that is the same for tensors of one shape that are split in the same way."""
    tensor = plan.tensors[number]
    return id(tensor.spread), tensor.itemsize


def _boxes(plan: WritePlan, number: int) -> Iterator[Box]:
    """Yield all pieces of a tensor."""
    tensor = plan.tensors[number]
    if 0 in tensor.shape:
        yield Box.whole(tensor.shape)
        return
    for spot in tensor.spread.members:
        for piece in cut_pieces(tensor.shape, tensor.itemsize, tensor.spread, spot):
            yield piece.box


def _placed_boxes(placed: Sequence[Placed]) -> Iterator[Box]:
    return (box for box, _ in placed)


def _planned(plan: WritePlan, tensors: Sequence[DcpTensor], rank: int) -> Iterator[DcpPiece]:
    """Yield the pieces that a rank has written by the plan."""
    start = 0
    for number, piece in plan.writes_of(rank):
        span = place_zip(piece.box.sizes, tensors[number].dtype, start)
        yield DcpPiece(number, piece.box, span.start, span.length)
        start = span.next


def _written(
    tensors: Sequence[DcpTensor], numbers: Mapping[str, int], index: RankIndex
) -> Iterator[DcpPiece]:
    """Yield the pieces that a rank has written by its index."""
    own_placed = {numbers[name]: tensor.placed for name, tensor in index.own_tensors.items()}
    for number, placed in (*index.placed.items(), *own_placed.items()):
        for box, offset in placed:
            before, length = wrapped_bytes(box.sizes, tensors[number].dtype)
            yield DcpPiece(number, box, offset - before, length)
