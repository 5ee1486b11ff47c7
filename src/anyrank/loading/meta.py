"""`anyrank.meta`: build a model without memory for its parameters."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary


@contextmanager
def meta() -> Generator[None]:
    """Put every parameter that is registered inside on the meta device; buffers stay real.

    Building a model inside needs, for a moment, the memory of its largest parameter. Shapes,
    dtypes, requires_grad, attributes and ties of the parameters are those of a normal build.
    Buffers have their values, because no file may contain them. `load` and `materialize` give the
    parameters memory, before or after the model is wrapped or sharded.

    Example::

        with anyrank.meta():
            model = torch.nn.BatchNorm1d(8)
        assert model.weight.is_meta
        assert not model.running_var.is_meta

    The context affects only the current thread, may be nested, and needs no coordination between
    ranks. A buffer that is computed from a parameter is on meta too: `load` rebuilds it, or names
    it in an error.
    """
    thread = threading.get_ident()
    # Keyed by identity, with weak references: a parameter registered twice stays tied, and none
    # lives longer than in a normal build. Not keyed by id(), which a later parameter may reuse.
    on_meta = WeakTensorKeyDictionary()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> Any:
        if threading.get_ident() != thread or parameter.is_meta or is_lazy(parameter):
            return None  # unchanged; a lazy parameter has no shape and no memory yet
        if parameter not in on_meta:
            on_meta[parameter] = _meta_parameter(parameter)
        return on_meta[parameter]

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        handle.remove()


def _meta_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter on meta with the type, layout and attributes of this one."""
    empty = parameter.detach().to("meta")
    kind = type(parameter)
    # isinstance() accepts any tensor subclass that serves as a parameter, such as a DTensor.
    subclassed = kind is not nn.Parameter and nn.Parameter in kind.__mro__
    on_meta: Any = (
        empty.as_subclass(kind) if subclassed else nn.Parameter(empty, requires_grad=False)
    )
    on_meta.__dict__.update(parameter.__dict__)
    return on_meta.requires_grad_(parameter.requires_grad)
