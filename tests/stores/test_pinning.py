"""Page-locked memory: exact in size, given back with its last tensor, refused without a trace, ordinary without CUDA."""

from __future__ import annotations

import gc
import mmap
import re
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rowferry.stores import _pinning as pinning
from rowferry.stores._pinning import Registration, lock_read_only, pinned_bytes
from rowferry.stores._views import tensor_over

SIZE = (64 << 20) + 4096  # bytes; what rounds up to a power of two takes twice as much


@pytest.fixture
def resident() -> Callable[[], int]:
    """Bytes of memory that this process has, measured after what is made once has been made."""

    def measure() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    pinned_bytes(SIZE).fill_(1)
    return measure


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 1_000_003])
def test_memory_has_the_size_asked_for_and_holds_zeros(nbytes: int) -> None:
    memory = pinned_bytes(nbytes)
    assert (memory.dtype, memory.shape, memory.device.type) == (torch.uint8, (nbytes,), "cpu")
    assert int(memory.sum()) == 0
    memory.fill_(7)
    assert bool((memory == 7).all())


def test_memory_is_not_rounded_up_and_goes_with_the_last_tensor_over_it(resident: Callable[[], int]) -> None:
    before = resident()
    memory = pinned_bytes(SIZE).fill_(1)
    assert 0.9 * SIZE < resident() - before < 1.1 * SIZE
    part = memory[-8:].view(torch.int64)
    del memory
    assert resident() - before > 0.9 * SIZE
    assert part.tolist() == [0x0101010101010101]
    del part
    assert resident() - before < 0.1 * SIZE


def test_memory_may_die_in_any_thread(resident: Callable[[], int]) -> None:
    before, held = resident(), [pinned_bytes(SIZE).fill_(1)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert resident() - before < 0.5 * SIZE  # other memory of the process may grow meanwhile


def test_a_forked_child_does_not_get_it() -> None:
    memory, flags, here = pinned_bytes(1 << 20), "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if (found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
            here = int(found[1], 16) <= memory.data_ptr() < int(found[2], 16)
        elif here and line.startswith("VmFlags:"):
            flags = line
    assert "dc" in flags.split(), "the kernel's name for MADV_DONTFORK"


def test_a_size_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"-1 bytes .* 0 or more"):
        pinned_bytes(-1)
    with pytest.raises(MemoryError, match=r"1,152,921,504,606,846,976 bytes.*(smaller table|store on disk)"):
        pinned_bytes(1 << 60)


def test_memory_made_in_inference_mode_may_be_written_outside() -> None:
    with torch.inference_mode():
        memory = pinned_bytes(8)
    assert not memory.is_inference()
    memory.add_(1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens where there is no GPU")
def test_without_cuda_memory_is_ordinary() -> None:
    assert not pinned_bytes(4096).is_pinned()
    assert not torch.cuda.is_initialized()


# ---- on a GPU -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_memory_is_really_page_locked_in_parts_and_in_whole() -> None:
    memory = pinned_bytes(SIZE + 3)
    for part in (memory, memory[:1], memory[-1:], memory[1 : 1 + SIZE // 3 * 3].view(3, -1)):
        assert part.is_pinned()
    assert memory.cuda().equal(torch.zeros_like(memory, device="cuda"))


@pytest.mark.gpu
def test_a_refused_lock_leaves_no_lock_and_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "PIECE", 1 << 20)
    memory = torch.from_numpy(np.frombuffer(pinning._map(4 << 20), np.uint8))
    taken = Registration(memory.data_ptr() + (2 << 20), 1 << 20, 1)  # the third piece of the whole
    with pytest.raises(MemoryError, match=r"refused to page-lock 1,048,576 of 4,194,304 bytes.*ulimit -l"):
        Registration(memory.data_ptr(), 4 << 20, 1)
    assert torch.ones(3, device="cuda").sum().item() == 3  # no error is waiting for an innocent call
    torch.cuda.synchronize()
    assert not memory[:8].is_pinned()
    taken.release()
    taken.release()
    whole = Registration(memory.data_ptr(), 4 << 20, 1)
    assert memory.is_pinned()
    whole.release()
    assert not memory.is_pinned()


@pytest.mark.gpu
def test_a_mapping_that_cannot_be_written_is_locked_for_reading(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, 70_000, np.uint8)
    values.tofile(tmp_path / "bytes")
    with open(tmp_path / "bytes", "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
    tensor = tensor_over(np.frombuffer(mapping, np.uint8))
    lock = lock_read_only(tensor.data_ptr(), tensor.nbytes)
    assert tensor.is_pinned()
    assert tensor.cuda().cpu().numpy().tolist() == values.tolist()
    lock.release()
    assert not tensor.is_pinned()
