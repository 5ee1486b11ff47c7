"""Reads the pickles in torch files without running any code that they name.

Globals are looked up in a fixed table and never imported. Tensors become `TensorRef`s, which locate
their bytes; well-known plain classes become empty `Inert` objects; any other name is an error.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import pickletools
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from anyrank.errors import UnsafeFile
from anyrank.sources.torch_zip import STORAGES
from anyrank.tensors.wrapped import stored_class
from anyrank.wording import first_few


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage in the pickle: its key in the file, its dtype and its number of elements."""

    key: str
    dtype: torch.dtype
    offset: int = 0


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor as a strided view of a storage; offset and strides are in elements.

    Attributes:
        views: "conj" and "neg", if these must be applied to the bytes to get the values.
    """

    storage: StorageRef
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    views: tuple[str, ...] = ()


class Inert:
    """Stands for an object that is not needed; accepts and drops its state in the pickle."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...

    def __setitem__(self, key: object, value: object) -> None: ...

    def append(self, item: object) -> None: ...

    def extend(self, items: object) -> None: ...

    def add(self, item: object) -> None: ...

    def update(self, items: object) -> None: ...

    def __hash__(self) -> int:
        return id(self)


class Record(Inert):
    """Stands for an object whose arguments and fields are needed.

    Attributes:
        arguments: arguments of the constructor.
        fields: the fields in its pickle.
    """

    def __new__(cls, *args: Any, **kwargs: object) -> Record:
        record = object.__new__(cls)
        record.arguments, record.fields = args, {}
        return record

    arguments: tuple[Any, ...]
    fields: Any

    def __setstate__(self, state: Any) -> None:
        self.fields = state

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


@dataclass(frozen=True, slots=True)
class Bytesless:
    """A tensor that is not a strided view of bytes; `kind` says what it is, and the way out."""

    kind: str


@dataclass(frozen=True, slots=True)
class DTensorRef:
    """A rank's share of a DTensor: its local tensor, and the pickled spec of the DTensor."""

    local: TensorRef
    spec: Record


# Plain data that training scripts store with weights. It is never constructed, so it is harmless.
INERT_MODULES = (
    "argparse.",
    "pathlib.",
    "datetime.",
    "numpy.",
    "omegaconf.",
    "lightning.",
    "lightning_fabric.",
    "pytorch_lightning.",
    "transformers.",
    "accelerate.",
    "deepspeed.",
    "megatron.",
    "torch.optim.",
    "torch.device",
    "torch.distributed.checkpoint.",
    "collections.",
    "enum.",
    "typing.Any",
    "uuid.UUID",
    "_io.BytesIO",
    "builtins.bytearray",
    "builtins.slice",
    "builtins.range",
    "builtins.xrange",
    "builtins.dict",
    "builtins.list",
    "builtins.int",
    "builtins.float",
    "builtins.str",
    "builtins.bool",
    "builtins.tuple",
    "builtins.object",
    "builtins.Ellipsis",
    "builtins.NotImplemented",
    "torch.serialization._get_layout",
    "torch.torch_version.TorchVersion",
    "torch.Generator",
    "torch.per_",  # quantization schemes
    "torch.nested._internal.",
    "torch._dynamo.decorators._DimRange",
)


# Specs of a DTensor or a ShardedTensor, which are kept as data and never constructed.
RECORD_MODULES = (
    "torch.distributed.tensor.",
    "torch.distributed._tensor.",
    "torch.distributed.device_mesh.",
    "torch.distributed._mesh_layout.",
    "torch.distributed._shard.",
    "torch.distributed.remote_device.",
)


def _rebuild_tensor(storage: Any, offset: int, size: Any, stride: Any, *rest: Any) -> TensorRef:
    dtype = rest[2] if len(rest) > 2 and isinstance(rest[2], torch.dtype) else storage.dtype
    flags: Any = next((item for item in rest[2:] if isinstance(item, dict)), {})
    views = tuple(str(name) for name, is_set in flags.items() if is_set)
    return TensorRef(storage, dtype, int(offset), tuple(size), tuple(stride), views)


def _rebuild_parameter(data: Any, *rest: Any) -> Any:
    return data


def _rebuild_wrapper(*args: Any) -> Any:
    """Return the dtype, shape and strides of a tensor subclass without its own memory."""
    return tuple(args[1:4])


def _rebuild_from_type(function: Callable[..., Any], kind: Any, args: Any, state: Any) -> Any:
    name = str(getattr(kind, "__name__", kind))
    if function is not _rebuild_wrapper:
        problem = stored_class(name, is_one=True)
        return function(*args) if problem is None else Bytesless(problem)
    fields: Any = state[1] if isinstance(state, tuple) and len(cast("Any", state)) == 2 else state
    fields = fields if isinstance(fields, dict) else {}
    if "_spec" in fields and isinstance(fields.get("_local_tensor"), TensorRef):
        return DTensorRef(fields["_local_tensor"], fields["_spec"])
    inner = [value for value in fields.values() if isinstance(value, TensorRef | Bytesless)]
    [values] = inner if len(inner) == 1 else [None]
    is_one = isinstance(values, TensorRef) and (
        (values.dtype, values.shape, values.strides) == _rebuild_wrapper(*args)
    )
    problem = stored_class(name, is_one)
    return values if problem is None else Bytesless(problem)


def _inner_class(owner: Any, name: object) -> type[Inert]:
    """Return a stand-in for an inner class or a member of an enum; nothing is looked up."""
    return type(str(name), (Inert,), {})


def _bytesless(kind: str) -> Callable[..., Bytesless]:
    return lambda *args: Bytesless(kind)


def _encoded(text: Any = "", encoding: str = "latin1", *rest: Any) -> Any:
    """Return bytes, which older pickles encode as text."""
    if isinstance(text, str) and encoding in ("latin1", "latin-1"):
        return text.encode("latin1")
    return text if isinstance(text, bytes) else Inert()


TABLE: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "collections.Counter": Counter,  # the milestones of a MultiStepLR
    "torch.Size": tuple,
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch._utils._rebuild_wrapper_subclass": _rebuild_wrapper,
    "builtins.getattr": _inner_class,
    "torch.nn.parameter.Parameter": Inert,
    "torch.nn.parameter.Buffer": Inert,
    "torch.Tensor": Inert,
    "torch._utils._rebuild_sparse_tensor": _bytesless("sparse tensor: save its .to_dense()"),
    "torch._utils._rebuild_qtensor": _bytesless("quantized tensor: save its .dequantize()"),
    "torch._utils._rebuild_nested_tensor": _bytesless("nested tensor: save its .unbind()"),
    "torch.nested._internal.nested_tensor._rebuild_njt": _bytesless(
        "nested tensor: save its .unbind()"
    ),
    "torch._utils._rebuild_meta_tensor_no_storage": _bytesless("tensor on meta, without values"),
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.complex": complex,
    "builtins.bytes": _encoded,
    "_codecs.encode": _encoded,
    "torch.storage.UntypedStorage": torch.uint8,
    **{f"torch.{name}": dtype for name, dtype in STORAGES.items()},
    **{f"torch.storage.{name}": dtype for name, dtype in STORAGES.items()},
}


# Protocol 2, which torch.save writes, uses the Python 2 names of these types.
PYTHON_2 = {"builtins.long": "builtins.int", "builtins.unicode": "builtins.str"}
OF_PICKLE = "torch.storage._load_from_bytes"  # pickles a storage without torch.save
SAVE_STATE = (
    "If you trust the file, save torch.load(path, weights_only=False){}.state_dict() with "
    "torch.save where its code is installed, and pass the new file."
)


class UnknownName(UnsafeFile):
    """Raised if a pickle names an unknown global.

    Attributes:
        name: the first unknown name.
    """

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


def refusal(
    names: Sequence[str], path: str, *, is_module: bool = False, table: object = None
) -> str:
    """Return the error text for a pickle with unknown globals.

    Args:
        names: the names of the globals.
        path: path of the file.
        is_module: whether it is the pickle of a whole module, whose class is the first name.
        table: the key of a table of tensors in it, or None.
    """
    shown = ", ".join(first_few(list(names), 10))
    if is_module:
        return (
            f"{path}: contains a module of class {names[0]}, not a dict of its tensors. Its pickle "
            f"names {shown}, which could run code; nothing was run. {SAVE_STATE.format('')} (If "
            "the module is in a dict, save [key].state_dict().)"
        )
    where = "" if table is None else f", torch.load(path, weights_only=False)[{table!r}],"
    return (
        f"{path}: its pickle names {shown}, which could run code; nothing was run. "
        f"If you trust the file, re-save its tensors{where} as safetensors, or allow the name with "
        "torch.serialization.add_safe_globals"
    )


class TensorUnpickler(pickle.Unpickler):
    """Unpickles a tree of containers, numbers, strings and tensor references.

    Args:
        file: binary stream at the start of the pickle.
        path: name for error messages.
        extra: additional globals for formats that need them, by full name.
    """

    def __init__(self, file: Any, path: str, extra: Mapping[str, Any] | None = None) -> None:
        super().__init__(file, encoding="utf-8")
        self.path = path
        self.table = {**TABLE, **(extra or {})}

    def tree(self) -> Any:
        """Read the object at the stream's position.

        Raises:
            UnsafeFile: the pickle names an unknown global, or is not a pickle.
        """
        try:
            return self.load()
        except UnsafeFile:
            raise
        except Exception as error:  # a hostile pickle can make the pickle machine raise anything
            raise UnsafeFile(
                f"{self.path}: its pickle cannot be read ({type(error).__name__}: {error})"
            ) from error

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        module_name = "builtins" if module_name == "__builtin__" else module_name  # of Python 2
        name = f"{module_name}.{global_name}"
        name = PYTHON_2.get(name, name)
        if name == OF_PICKLE:
            raise UnsafeFile(
                f"{self.path}: was written with pickle.dump, not torch.save. If you trust the "
                "file, load it with pickle, save it again with torch.save, and pass the new file."
            )
        if name in self.table:
            return self.table[name]
        value = getattr(torch, global_name, None) if module_name == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        if name.startswith(RECORD_MODULES) or name in _trusted_by_user():
            return type(global_name.rsplit(".", 1)[-1], (Record,), {})
        if name.startswith(INERT_MODULES):
            return type(global_name.rsplit(".", 1)[-1], (Inert,), {})
        raise UnknownName(name, refusal([name], self.path))

    def is_known(self, name: str) -> bool:
        """Return whether a global is in the table, or plain data that becomes an empty object."""
        try:
            self.find_class(*name.rsplit(".", 1))
        except UnsafeFile:
            return False
        return True

    def persistent_load(self, pid: Any, /) -> StorageRef:
        kind, dtype, key = pid[0], pid[1], pid[2]
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise UnsafeFile(f"{self.path}: unknown persistent id {str(pid)[:80]}")
        view = pid[5] if len(pid) > 5 else None  # legacy: (view key, offset, size) in elements
        return StorageRef(str(key), dtype, int(view[1]) if view else 0)


# Opcodes for which the unpickler allocates the memory that their number states, before it reads on.
LARGE = (pickle.LONG_BINPUT, pickle.BYTEARRAY8)
NUMBER_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}


def _opcodes() -> tuple[re.Pattern[bytes], dict[bytes, int]]:
    """Return a pattern for runs of fixed-length opcodes, and the size of numbers in other opcodes.

    The number is the length of a payload, or the memo index of an object.
    """
    fixed = [rb"r..\0\0"]  # LONG_BINPUT to an index for which a megabyte is enough
    numbered = {pickle.LONG_BINPUT: 4}
    for opcode in pickletools.opcodes:
        code, nbytes = opcode.code.encode("latin1"), opcode.arg.n if opcode.arg else 0
        if nbytes in NUMBER_BYTES:
            numbered[code] = NUMBER_BYTES[nbytes]
        elif nbytes == pickletools.UP_TO_NEWLINE:
            lines = 2 if opcode.arg and "pair" in opcode.arg.name else 1
            fixed.append(re.escape(code) + rb"[^\n]*\n" * lines)
        elif code not in (pickle.LONG_BINPUT, pickle.STOP):
            fixed.append(re.escape(code) + b".{%d}" % nbytes)
    return re.compile(b"(?:" + b"|".join(fixed) + b")*+", re.DOTALL), numbered


FIXED, NUMBERED = _opcodes()


def check_bounds(data: bytes, path: str) -> None:
    """Raise UnsafeFile for a pickle that would take more memory than its bytes justify.

    Raises:
        UnsafeFile: it stores an object at an index, or has an array, that exceeds its own length.
    """
    position = 0
    while position < len(data) and (match := FIXED.match(data, position)):
        start = match.end() + 1
        opcode = data[start - 1 : start]
        if opcode not in NUMBERED:
            return  # the end; or not an opcode, which the unpickler reports
        stop = start + NUMBERED[opcode]
        number = int.from_bytes(data[start:stop], "little")
        if opcode in LARGE and number > len(data):
            raise UnsafeFile(
                f"{path}: its pickle requests memory for {number} objects or bytes, but has only "
                f"{len(data)} bytes. The file is corrupt; copy it again."
            )
        position = stop + (0 if opcode == pickle.LONG_BINPUT else number)


def load(file: Any, path: str) -> Any:
    """Read the object at the stream's position; see `TensorUnpickler.tree`."""
    return TensorUnpickler(file, path).tree()


def loads(data: bytes, path: str, extra: Mapping[str, Any] | None = None) -> Any:
    """Return the object that these bytes encode."""
    check_bounds(data, path)
    unpickler = TensorUnpickler(io.BytesIO(data), path, extra)
    try:
        return unpickler.tree()
    except UnknownName as error:
        raise explained(error, data, unpickler) from error


def explained(error: UnknownName, data: bytes, unpickler: TensorUnpickler) -> UnsafeFile:
    """Make the error for a pickle, with all of its unknown names and the key of its tensors.

    Args:
        error: the error for the first name.
        data: bytes that start with the pickle.
        unpickler: the unpickler that raised it.
    """
    path = unpickler.path
    names = [name for name in _globals_in(data) if not unpickler.is_known(name)] or [error.name]
    with contextlib.suppress(Exception):  # it may also be corrupt
        tree = _Lenient(io.BytesIO(data), path).load()
        tables = [key for key, value in tree.items() if _has_tensors(value)]
        if tables:
            return UnsafeFile(refusal(names, path, table=tables[0]))
    is_module = b"_modules" in data and b"_parameters" in data
    return UnsafeFile(refusal(names, path, is_module=is_module))


class _Lenient(TensorUnpickler):
    """Accepts unknown names as objects that are not needed, to find the tensors."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            return super().find_class(module_name, global_name)
        except UnsafeFile:
            return Inert

    def persistent_load(self, pid: Any, /) -> Any:
        return Inert if pid[0] == "module" else super().persistent_load(pid)


def _has_tensors(value: Any) -> bool:
    table = cast("dict[Any, Any]", value) if isinstance(value, dict) else {}
    return any(isinstance(inner, TensorRef) for inner in table.values())


def _globals_in(data: bytes) -> list[str]:
    """Return the globals that a pickle names, in order and each once, without looking them up."""
    names: dict[str, None] = {}
    with contextlib.suppress(Exception):  # the caller has already reported the error
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "GLOBAL":
                names[str(argument).replace(" ", ".")] = None
    return list(names)


def _trusted_by_user() -> set[str]:
    names: set[str] = set()
    for entry in torch.serialization.get_safe_globals():
        value, name = entry if isinstance(entry, tuple) else (entry, "")
        path = (getattr(value, part, "") for part in ("__module__", "__qualname__"))
        names.add(name or ".".join(path))
    return names
