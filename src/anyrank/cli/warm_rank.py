"""A rank of a warm start: `python -m anyrank.cli.warm_rank SCRIPT ARGUMENTS`.

It imports what any such script does, waits for its turn, and then is `python SCRIPT ARGUMENTS`.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

from anyrank.cli.launcher import SIGNALLED, end_with
from anyrank.settings import WARM_GATE

# None of them starts a thread, or makes a context on a device.
IMPORTED = ("torch", "torch.distributed.fsdp", "anyrank.resume.checkpoints", "anyrank.steps.loader")


def main(script: str) -> None:
    """Import, wait, and run the script."""
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    _wait_for_turn(os.environ.pop(WARM_GATE))
    del sys.argv[0]
    path = os.path.abspath(script)
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = SourceFileLoader("__main__", path)
    module.__dict__.update(
        __builtins__=sys.modules["builtins"], __annotations__={}, __cached__=None
    )
    sys.modules["__main__"] = module
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)  # noqa: S102 - the user's own script


def _wait_for_turn(gate: str) -> None:
    """Import, and wait until the gate is opened; the process ends if that never happens."""
    if not end_with(os.getppid()):
        sys.exit(SIGNALLED + signal.SIGTERM)
    quiet = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if quiet:  # Ctrl-C reaches all processes of a terminal
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for name in IMPORTED:
        importlib.import_module(name)
    _make_optimizer()
    try:
        os.close(os.open(gate, os.O_RDONLY | os.O_CLOEXEC))
    except FileNotFoundError:
        sys.exit(SIGNALLED + signal.SIGTERM)  # the run has ended
    if quiet:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    end_with(None)


def _make_optimizer() -> None:
    """Make torch import its compiler, as the first optimizer of a process does: 211 modules."""
    import torch

    before = {*os.environ}
    torch.optim.SGD([torch.zeros(1)])
    for name in os.environ.keys() - before:
        del os.environ[name]  # COMPILER_CACHE, which the script does not see before its optimizer


if __name__ == "__main__":
    main(sys.argv[1])
