"""Compiles the simulated device against the torch that is installed, once for each of the two."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

SOURCE = Path(__file__).parent / "sim" / "sim.cpp"
CACHE = Path(__file__).parents[2] / "build" / "sim"
TORCH = "2.13."  # whose C++ interface for backends the source is written against
LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")


def why_not() -> str:
    """What keeps the device from being built here; empty where nothing does."""
    if not torch.__version__.startswith(TORCH):
        return f"it is written for torch {TORCH}x, and this is {torch.__version__}"
    if shutil.which("g++") is None:
        return "there is no g++"
    return ""


def build() -> Path:
    """The extension module's file, compiled (about half a minute) where the cache lacks it."""
    root = Path(torch.__path__[0])
    flags = ["-O1", "-g0", "-std=c++20", "-fPIC", "-shared", "-w", "-DTORCH_EXTENSION_NAME=_C"]
    flags += ["-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]
    folders = [root / "include", root / "include/torch/csrc/api/include"]
    flags += [f"-I{path}" for path in (*folders, sysconfig.get_paths()["include"])]
    told = [SOURCE.read_bytes(), " ".join(flags).encode(), torch.__version__.encode()]
    key = hashlib.sha256(b"\0".join(told)).hexdigest()[:16]
    made = CACHE / key / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        part = made.with_suffix(f".{os.getpid()}")
        linked = [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", *(f"-l{x}" for x in LIBRARIES)]
        command = ["g++", *flags, str(SOURCE), "-o", str(part), *linked]
        run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if run.returncode:
            raise RuntimeError(f"{SOURCE.name} does not compile:\n{run.stderr[-4000:]}")
        part.replace(made)  # at once, as another process may build the same
    return made
