"""Every test ends without a thread of ours. A test that hangs is killed by pytest-timeout, which prints all stacks."""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.metadata
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

# The contract suite and its oracle live in the package; their asserts should explain themselves as a test's do.
pytest.register_assert_rewrite("rowferry.stores.testing._suite", "rowferry.stores.testing._suite_reading")

JOIN_SECONDS = 5.0


def our_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("rowferry-")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Threads that were told to end get a moment to do so; one that stays fails the test that left it."""
    yield
    if our_threads():
        gc.collect()  # a failed test's traceback may hold an iterator
    deadline = time.monotonic() + JOIN_SECONDS
    for thread in our_threads():
        thread.join(max(deadline - time.monotonic(), 0.0))
    assert [thread.name for thread in our_threads()] == []


@pytest.fixture(scope="session")
def compile_cuda() -> Callable[..., str]:
    """``compile_cuda(source, architecture, *options)``: NVRTC's log, empty when it has nothing to say. Needs no GPU.

    The test fails with that log when the source does not compile.
    """
    nvrtc = ctypes.CDLL(_nvrtc_path())

    def compile_(source: str, architecture: str, *options: str) -> str:
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None) == 0
        given = [f"--gpu-architecture={architecture}".encode(), *(option.encode() for option in options)]
        result = nvrtc.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        text = log.value.decode().strip()
        assert result == 0, text
        return text

    return compile_


@pytest.fixture(scope="session")
def kernels_on_host(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Callable[..., None]]]:
    """``kernels_on_host(source, names)``: CUDA kernels compiled for the CPU, each ``launch(blocks, *arguments)``.

    They run on host memory in a few small blocks, whatever ``blocks`` says: see ``cuda_on_host.h``. Needs a C++ compiler.
    """
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler (c++) to run CUDA sources on the host with")
    header = Path(__file__).with_name("cuda_on_host.h")

    @functools.cache
    def build(source: str, names: tuple[str, ...]) -> ctypes.CDLL:
        folder = tmp_path_factory.mktemp("kernels")
        launchers = "".join(f"LAUNCHER({name})\n" for name in names)
        (folder / "kernels.cpp").write_text(f'#include "{header}"\n{source}\n{launchers}')
        flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread"]
        command = [compiler, *flags, str(folder / "kernels.cpp"), "-o", str(folder / "kernels.so")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(folder / "kernels.so"))

    def launch(function: Any, blocks: int, *arguments: int) -> None:
        assert blocks >= 1
        function(3, 4, (ctypes.c_int64 * len(arguments))(*arguments))

    def kernels(source: str, names: Iterable[str]) -> dict[str, Callable[..., None]]:
        library = build(source, tuple(names))
        return {name: functools.partial(launch, getattr(library, f"run_{name}")) for name in names}

    return kernels


def _nvrtc_path() -> str:
    """The compiler of the wheel for CUDA 12, or of the one for CUDA 13 that torch may have brought."""
    for wheel in ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc"):
        try:
            files = importlib.metadata.files(wheel) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.match("libnvrtc.so.*"):
                return str(file.locate())
    raise AssertionError("NVRTC is not installed; pip install 'rowferry[dev]'")
