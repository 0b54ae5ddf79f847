"""What Linux tells about memory: limits on locking, what is available, huge pages. None where it does not tell."""

from __future__ import annotations

import re
import resource
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def locked_memory_limit() -> int | None:
    """The most bytes that this process may lock (RLIMIT_MEMLOCK, ``ulimit -l``); None where it is unlimited."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def available_memory(meminfo: Path = MEMINFO) -> int | None:
    """Bytes that can be allocated without swapping (MemAvailable)."""
    if not meminfo.exists():
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text("ascii"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def huge_pages(setting: Path = HUGE_PAGES) -> str | None:
    """The transparent huge pages setting: ``always``, ``madvise`` (enough for rowferry, which asks) or ``never``."""
    if not setting.exists():
        return None
    found = re.search(r"\[(\w+)\]", setting.read_text("ascii"))
    return found[1] if found else None
