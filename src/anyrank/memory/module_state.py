"""The parameters and buffers of a function's modules, the same when the function runs again.

A recomputed function reads its weights a second time. The tensors that autograd saves are checked
elsewhere; a bias, an embedding or a buffer is not saved, and `torch.func.functional_call` has
restored the module's own weights by then. So the first run records which tensors the modules had,
and the second uses the same: replaced tensors are restored, changed ones are an error. Captured
tensors cannot be restored: a changed one that is read is an error.

A module that fills a buffer once says so in a plain attribute. So where the first run has changed
both, the second one begins with both as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from anyrank.errors import RecomputeError
from anyrank.memory.captured import PLAIN, Captured
from anyrank.memory.captured_watch import CapturedWatch, changed_error, text_of
from anyrank.memory.uncompiled import uncompiled
from anyrank.tensors.sharded_tensor import version_of

# Buffers up to this size are kept by value, so that changes in between (the statistics of a second
# call, DDP's broadcast) do no harm. Larger ones are compared by version.
KEPT_BYTES = 64 << 10


class RecordedTensor:
    """A tensor, its place in its module, and its version."""

    __slots__ = ("copy", "key", "name", "owner", "tensor", "version")

    def __init__(self, owner: dict[str, Any], key: str, name: str, tensor: torch.Tensor) -> None:
        self.owner = owner
        self.key = key
        self.name = name
        self.tensor = tensor
        self.version = version_of(tensor)
        self.copy: torch.Tensor | None = None

    def now(self) -> Any:
        """What is in its place now. A ScriptModule's dicts have no `get`."""
        return self.owner[self.key] if self.key in self.owner else None  # noqa: SIM401


class Attributes:
    """The plain attributes of a module with buffers, as they were before the first run."""

    def __init__(self, own: dict[str, Any], buffers: list[RecordedTensor]) -> None:
        self.own, self.buffers = own, buffers
        self.before = self.now()

    def now(self) -> dict[str, Any]:
        """All of plain types; their values are kept, and not looked into."""
        return {key: value for key, value in self.own.items() if type(value) in PLAIN}

    def put(self, values: dict[str, Any]) -> None:
        """Have these, and no others of plain types."""
        for key in self.now().keys() - values.keys():
            del self.own[key]
        self.own.update(values)


class ModuleState:
    """The tensors that a function captures, from before it runs for the first time.

    Args:
        captured: its modules and other tensors.
        before: the state of an earlier tile of the same call, whose copies are still valid.
    """

    @uncompiled
    def __init__(self, captured: Captured, before: ModuleState | None = None) -> None:
        self.parameters: list[RecordedTensor] = []
        self.buffers: list[RecordedTensor] = []
        known = (
            {} if before is None else {(id(each.owner), each.key): each for each in before.buffers}
        )
        self.attributes: list[Attributes] = []
        for name, module in captured.named:
            prefix = f"{name}." if name else ""
            parameters: dict[str, Any] = vars(module).get("_parameters", {})
            for key, tensor in parameters.items():
                if tensor is not None and not is_lazy(tensor):
                    self.parameters.append(RecordedTensor(parameters, key, prefix + key, tensor))
            buffers: dict[str, Any] = vars(module).get("_buffers", {})
            first = len(self.buffers)
            for key, tensor in buffers.items():
                if tensor is not None and not is_lazy(tensor):
                    each = RecordedTensor(buffers, key, prefix + key, tensor)
                    each.copy = _copy_of(each, module.training, known.get((id(buffers), key)))
                    self.buffers.append(each)
            if own := self.buffers[first:]:
                self.attributes.append(Attributes(vars(module), own))
        self.watch = CapturedWatch(captured)
        self.own_changes: set[int] = set()  # ids of parameters that the first run has changed

    @uncompiled
    def settle(self) -> None:
        """After the first run: drop copies of large buffers that it did not change."""
        self.watch.settle()
        self.own_changes = {id(p) for p in self.parameters if version_of(p.tensor) != p.version}
        self.attributes = [
            each
            for each in self.attributes
            if any(map(_has_changed, each.buffers)) and each.now() != each.before
        ]
        for each in self.buffers:
            if each.tensor.nbytes > KEPT_BYTES and not _has_changed(each):
                each.copy = None

    @contextlib.contextmanager
    def restored(self, label: str) -> Generator[None]:
        """Inside, give the modules the tensors and values of the first run.

        Raises:
            RecomputeError: a tensor was changed in place since, and its former value is lost.
        """
        changed = [each for each in self.parameters if version_of(each.tensor) != each.version]
        changed += [each for each in self.buffers if each.copy is None and _has_changed(each)]
        if changed:
            each = changed[0]
            kind = "parameter" if each in self.parameters else "buffer"
            what = f"{kind} {each.name}, {text_of(each.tensor)}, was changed in place"
            if id(each) in self.own_changes:
                raise RecomputeError(
                    f"{label}: {what} by the function itself, as nn.Embedding(max_norm=) does, and "
                    "the recomputation would begin with what the first run left: leave the module "
                    "that does it out of recompute"
                )
            raise changed_error(label, what)
        undo: list[tuple[RecordedTensor, Any]] = []
        after = [(each, each.now()) for each in self.attributes]
        try:
            for each in self.attributes:
                each.put(each.before)
            for each in self.parameters:
                now = each.now()
                if isinstance(now, torch.Tensor) and is_replaced(each.tensor, now):
                    undo.append((each, now))
                    each.owner[each.key] = each.tensor
            for each in self.buffers:
                now = each.now()
                if now is not None:  # undone in any case: the function may assign to it again
                    undo.append((each, now))
                    # A copy of the copy: this run may change it, as batch norm does without a new
                    # version.
                    each.owner[each.key] = each.tensor if each.copy is None else each.copy.clone()
            with self.watch.refused(label):
                yield
        finally:
            for each, now in undo:
                each.owner[each.key] = now
            for each, values in after:
                each.put(values)


def _has_changed(each: RecordedTensor) -> bool:
    """Whether a tensor was changed or replaced since it was recorded."""
    return version_of(each.tensor) != each.version or each.now() is not each.tensor


def is_replaced(then: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether a parameter was replaced, other than by FSDP2, whose gather changes the layout."""
    return then is not now and layout(then) == layout(now)


def layout(tensor: torch.Tensor) -> Any:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def _copy_of(
    each: RecordedTensor, training: bool, before: RecordedTensor | None
) -> torch.Tensor | None:
    """The value of a buffer that is small, or that the function may change; else None."""
    if before is not None and before.tensor is each.tensor and before.version == each.version:
        return before.copy
    if not training and each.tensor.nbytes > KEPT_BYTES:
        return None
    with torch.no_grad():
        return each.tensor.detach().clone()
