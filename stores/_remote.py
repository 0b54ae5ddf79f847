"""Objects behind a URL, read by obstore: byte ranges, many in flight. The only file that imports it.

Guarantees:
- No thread is started and no GIL held while requests are under way: obstore's own runtime makes them, and the calling
  thread hears of those that have come. Some 16 calls of up to 8 requests are under way for one thread's rows, fewer for
  each of several.
- Requests that fail in transit are made again with back-off, by obstore's own rules; ``retry_config`` changes them.
- Nothing that was passed as an option, and no query of a URL, is in a message, a log or a ``repr``.

Assumes:
- Objects that are being read are not replaced. Where one is of which rows were read before, the caller asks ``unchanged``.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from ._byte_ranges import Call, Records, calls_of, copy_records
from ._url import Url

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_Answer = TypeVar("_Answer")

CALLS = 16  # under way for one request for rows; others beside it get a share of so many, and at least 2
TRIES = 4  # where answers are cut off
_SHOWN = ("region", "endpoint", "bucket")  # options whose values may be shown


class Head(NamedTuple):
    """A part of an object, and what the server said of the whole.

    ``version``: another one when the object was replaced, as far as the server tells (entity tag, time, size).
    """

    data: bytes
    size: int
    version: tuple[Any, ...]


@final
class RemoteObjects:
    """The objects in the folder of a URL. Any thread, several at once; not in a forked child.

    Args:
        url: of one of them.
        options: passed on to obstore: its configuration, ``client_options``, ``retry_config``, ``credential_provider``.
        folder: the objects are below ``url`` itself, and not beside it.

    Raises:
        ImportError: obstore is not installed. ValueError: obstore does not take the options.
    """

    def __init__(self, url: Url, options: Mapping[str, Any] | None, *, folder: bool = False) -> None:
        try:
            from obstore import store
        except ImportError as error:
            raise ImportError(
                f"{url.name} is read by obstore, which is not installed: pip install 'rowferry[remote]'"
            ) from error
        self.name = url.name if folder else url.name.rpartition("/")[0]
        given = dict(options or {})
        self._secrets = sorted({url.query, *_strings(given)} - {""}, key=len, reverse=True)
        if url.plain_http:
            given["client_options"] = {"allow_http": True, **(given.get("client_options") or {})}
        refused = ""
        try:
            self.store: ObjectStore = store.from_url(url.whole if folder else url.folder, **given)
        except BaseException as error:
            # The library's own failures at options that it cannot place are no Exception.
            if not isinstance(error, Exception) and not type(error).__module__.startswith("pyo3"):
                raise
            refused = self._masked(error)
        if refused:  # here, where the error does not remember the other
            raise ValueError(
                f"{url.name} cannot be opened with the storage_options {sorted(map(str, given))}: {refused} "
                f"(options of the HTTP client, such as allow_http or timeout, go inside 'client_options')"
            )
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards the next
        self._readers = 0

    # ---- reading ---------------------------------------------------------------------------------------------

    def head(self, key: str, nbytes: int) -> Head:
        """The first ``nbytes`` (at least 1) of an object, or all of a shorter one.

        Raises:
            FileNotFoundError, PermissionError, OSError: as the server says.
        """
        found = self.ends([key], nbytes, at_start=True)[0]
        if found is None:
            raise FileNotFoundError(errno.ENOENT, f"{self.name}/{key} does not exist")
        return found

    def ends(self, keys: Sequence[str], nbytes: int, *, at_start: bool) -> list[Head | None]:
        """The first or last ``nbytes`` of many objects; None for one that does not exist."""
        found: list[Head | None] = [None] * len(keys)

        async def one(place: int) -> None:
            found[place] = await self._told(partial(self._part, keys[place], nbytes, at_start), keys[place])

        self._run(partial(one, place) for place in range(len(keys)))
        return found

    def read(self, keys: Sequence[str], wanted: Sequence[Records]) -> list[NDArray[np.bool_]]:
        """Fetch all ranges of ``wanted`` into their places; whether each range's object exists.

        Args:
            keys: of the objects that ``Records.objects`` counts.
            wanted: see there. What is of objects that do not exist is left as it is.

        Raises:
            OSError: an object is cut off, or could not be read by all the retries. PermissionError: the server says so.
        """
        import obstore

        there = [np.ones(len(each.starts), np.bool_) for each in wanted]

        async def one(place: int, records: Records, call: Call) -> None:
            key = keys[call.object]
            ranges = partial(obstore.get_ranges_async, self.store, key, starts=call.starts, ends=call.stops, coalesce=0)
            got = await self._told(ranges, key)
            if got is None:
                there[place][call.records] = False
                return
            data = b"".join(got)  # takes what has a buffer, too
            if len(data) != call.nbytes:
                raise OSError(errno.EIO, f"{self.name}/{key} is cut off: it ends before byte {call.stops[-1]:,}")
            copy_records(data, call.places, records.out[call.records])

        self._run(
            partial(one, place, records, call)
            for place, each in enumerate(wanted)
            for records in each.narrow()
            for call in calls_of(records)
        )
        return there

    def require_unchanged(self, key: str, version: tuple[Any, ...]) -> None:
        """Raise OSError (ESTALE) when an object is not the one that ``head`` saw, as far as the server tells."""
        if self.head(key, 1).version != version:
            raise OSError(
                errno.ESTALE, f"{self.name}/{key} was replaced since it was opened; rows of both would be mixed. Open it again"
            )

    # ---- helpers ---------------------------------------------------------------------------------------------

    def _run(self, jobs: Iterable[Callable[[], Awaitable[None]]]) -> None:
        self.require_same_process()
        with self._lock:
            self._readers += 1
            most = max(CALLS // self._readers, 2)
        try:
            run_together(jobs, most)
        finally:
            with self._lock:
                self._readers -= 1

    def require_same_process(self) -> None:
        """Raise RuntimeError in a forked child, where obstore's threads do not exist."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{self.name} was opened in process {self._pid} and is used in its forked child {os.getpid()}, where obstore's "
                f"threads do not exist; start workers with 'spawn', or open the store in the child"
            )

    async def _part(self, key: str, nbytes: int, at_start: bool) -> Head:
        import obstore

        part: Any = (0, nbytes) if at_start else {"suffix": nbytes}
        try:
            got = await obstore.get_async(self.store, key, options={"range": part})
        except obstore.exceptions.NotSupportedError:
            if at_start:
                raise
            size = int((await obstore.head_async(self.store, key))["size"])  # Azure counts from the start only
            got = await obstore.get_async(self.store, key, options={"range": (max(size - nbytes, 0), size)})
        meta: Any = got.meta
        data = bytes(await got.bytes_async())
        return Head(data, int(meta["size"]), (meta["e_tag"], meta["last_modified"], meta["size"]))

    async def _told(self, ask: Callable[[], Awaitable[_Answer]], key: str) -> _Answer | None:
        """The answer; None for an object that does not exist. Errors are ``plain`` ones, and know no other."""
        for left in reversed(range(TRIES)):
            try:
                return await ask()
            except FileNotFoundError:
                return None
            except Exception as error:
                if not (left and was_cut(error)):
                    failed = self.plain(error, f"{self.name}/{key}")
                    break
        raise failed

    def plain(self, error: Exception, name: str) -> Exception:
        """An error of obstore, or one that may quote it, as Python's own, without anything secret."""
        import obstore.exceptions as kinds

        text = self._masked(error)
        hidden = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if type(error).__module__ == "builtins" and text == str(error) and hidden is None:
            return error
        if isinstance(error, kinds.PermissionDeniedError | kinds.UnauthenticatedError):
            return PermissionError(errno.EACCES, f"{name} may not be read with the credentials that obstore found: {text}")
        if isinstance(error, kinds.NotSupportedError):
            return OSError(errno.EOPNOTSUPP, f"{name} cannot be read in parts, which its server does not support: {text}")
        if isinstance(error, kinds.BaseError):
            return OSError(errno.EIO, f"{name} could not be read: {text}")
        if isinstance(error, FileNotFoundError):
            return FileNotFoundError(errno.ENOENT, text)
        for kind in (PermissionError, ImportError, IndexError, TypeError, RuntimeError, ValueError):
            if isinstance(error, kind):
                return kind(text)
        return OSError(errno.EIO, f"{name}: {text}")

    def _masked(self, error: BaseException) -> str:
        text = str(error).strip().partition("\n")[0]  # what follows repeats it, and quotes the server
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def was_cut(error: Exception) -> bool:
    """Whether a connection was lost while an answer came in: obstore itself goes on only where the object has a tag."""
    import obstore.exceptions as kinds

    return isinstance(error, kinds.GenericError) and "body error" in str(error)


def run_together(jobs: Iterable[Callable[[], Awaitable[None]]], most: int) -> None:
    """Run ``jobs``, at most ``most`` at a time, in the order given; the first error ends all.

    In an event loop of its own, which nothing else sees. A thread that runs one already lends it to no other: there a
    thread of its own is used for as long as it takes.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        _run_here(jobs, most)
        return
    with ThreadPoolExecutor(1, "rowferry-remote") as pool:
        pool.submit(_run_here, jobs, most).result()


def _run_here(jobs: Iterable[Callable[[], Awaitable[None]]], most: int) -> None:
    waiting = iter(jobs)

    async def work() -> None:
        for job in waiting:
            await job()

    async def all_of_them() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(most):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    loop = asyncio.new_event_loop()  # not asyncio.run, which changes what the thread's event loop is
    try:
        loop.run_until_complete(all_of_them())
    finally:
        left = asyncio.all_tasks(loop)  # after a KeyboardInterrupt
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()


def _strings(options: Mapping[str, Any]) -> Iterator[str]:
    """Every text in options that may be a secret."""
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _strings(value)
        elif isinstance(value, str | bytes) and len(value) > 3 and not any(part in str(key).lower() for part in _SHOWN):
            yield value if isinstance(value, str) else value.decode("latin-1")
