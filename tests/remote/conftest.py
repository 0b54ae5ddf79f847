"""Servers on the loopback: one of files with byte ranges, a real S3 (moto's), and a proxy in front of either that fails.

Each test ends without a thread of its servers; the S3 is one for the session.
"""

from __future__ import annotations

import http.client
import http.server
import logging
import os
import re
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import unquote, urlsplit

import pytest
from moto.server import ThreadedMotoServer
from obstore import put
from obstore.store import S3Store

SECRET_KEY = "wJalrXUtnFEMI-the-secret-of-the-test"
REGION = "us-east-1"

Fault = Literal["error", "refuse", "cut", "reset", "slow", "interrupt"]
Publish = Callable[[Path], str]
"""``publish(path)`` has a file, or a folder with all that is in it, behind a URL, which is returned."""


class Served(Protocol):
    """A server that tells what it was asked for.

    Attributes:
        url: its own, without a path.
        ranges: the byte range of each GET, as ``(path, first, last)``; -1 where there was none.
        targets: of each GET as it came: path and query.
        faults: what happens to the next requests, in turn.
        together: GETs of more than an object's first byte wait until so many are under way at once.
        whole: files come whole, whatever part was asked for.
    """

    url: str
    ranges: list[tuple[str, int, int]]
    targets: list[str]
    faults: deque[Fault]
    together: threading.Barrier | None
    whole: bool

    def close(self) -> None: ...


class _Server(http.server.ThreadingHTTPServer):
    """Threads end with their request, since no connection is kept; ``server_close`` waits for them."""

    daemon_threads = False
    request_queue_size = 256
    ranges: list[tuple[str, int, int]]
    targets: list[str]
    faults: deque[Fault]
    together: threading.Barrier | None
    whole = False

    def __init__(self, handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.closing = threading.Event()
        self.ranges, self.faults, self.together, self.targets = [], deque(), None, []
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self.closing.set()
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away before its answer is none of the test's business."""


class _Handler(http.server.BaseHTTPRequestHandler):
    """Notes the request, and fails it where that is its turn."""

    server: _Server
    files: Path  # of the file server
    upstream: str = ""  # of the proxy

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        found = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        first, last = (int(each) if each else -1 for each in found.groups()) if found else (-1, -1)
        self.server.targets.append(self.path)
        self.server.ranges.append((unquote(urlsplit(self.path).path), first, last))
        if self.server.together is not None and last:
            self.server.together.wait(timeout=20)
        fault = self.server.faults.popleft() if self.server.faults else None
        if fault == "reset":
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if fault == "interrupt":  # Ctrl+C comes while there is no answer
            os.kill(os.getpid(), signal.SIGINT)
            self.server.closing.wait(timeout=60)
        if fault in ("error", "refuse"):
            self._answer(503 if fault == "error" else 403, {}, b"<Error>told to</Error>", None)
            return
        self._answer(*self._found(first, last, found is not None), fault)

    def _answer(self, status: int, headers: dict[str, str], body: bytes, fault: Fault | None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault == "slow":
            for start in range(0, len(body), -(-len(body) // 8) or 1):
                self.wfile.write(body[start : start + (-(-len(body) // 8) or 1)])
                threading.Event().wait(0.02)
        elif fault == "cut":
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
        else:
            self.wfile.write(body)

    def _found(self, first: int, last: int, ranged: bool) -> tuple[int, dict[str, str], bytes]:
        if self.upstream:
            return self._asked()
        path = self.files / unquote(urlsplit(self.path).path).lstrip("/")
        if not path.is_file():
            return 404, {}, b"nothing here"
        data, modified = path.read_bytes(), self.date_time_string(int(path.stat().st_mtime))
        headers = {"Last-Modified": modified}
        if not ranged or self.server.whole:
            return 200, headers, data
        start = first if first >= 0 else max(len(data) - last, 0)
        stop = min(last + 1, len(data)) if first >= 0 and last >= 0 else len(data)
        if start >= stop:
            return 416, {"Content-Range": f"bytes */{len(data)}"}, b""
        return 206, {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}, data[start:stop]

    def _asked(self) -> tuple[int, dict[str, str], bytes]:
        """What the server behind the proxy says."""
        connection = http.client.HTTPConnection(self.upstream)
        try:
            connection.request(self.command, self.path, headers=dict(self.headers.items()))
            answer = connection.getresponse()
            kept = {
                name: value for name, value in answer.getheaders() if name.lower() in ("etag", "last-modified", "content-range")
            }
            return answer.status, kept, answer.read()
        finally:
            connection.close()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Served]:
    """Serves ``tmp_path`` over HTTP, by byte ranges where asked."""
    server = _Server(type("Files", (_Handler,), {"files": tmp_path}))
    yield server
    server.close()


@pytest.fixture
def over_http(files: Served, tmp_path: Path) -> Publish:
    """Publishes what is in ``tmp_path``."""
    return lambda path: f"{files.url}/{path.relative_to(tmp_path)}"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Host and port of a real S3."""
    log = logging.getLogger("werkzeug")
    before = log.level
    log.setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield "{}:{}".format(*server.get_host_and_port())
    server.stop()
    log.setLevel(before)


@pytest.fixture
def proxy(s3_server: str) -> Iterator[Served]:
    """In front of the S3: fails as it is told, else hands on."""
    server = _Server(type("Proxy", (_Handler,), {"upstream": s3_server}))
    yield server
    server.close()


@pytest.fixture
def over_s3(s3_server: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Publish:
    """Uploads to a bucket of the test's own. Credentials and the endpoint are in the environment, as users have them."""
    bucket = f"rows-{abs(hash(request.node.nodeid)):x}"
    connection = http.client.HTTPConnection(s3_server)
    connection.request("PUT", f"/{bucket}")
    assert connection.getresponse().status == 200
    connection.close()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "AKIATEST",
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": REGION,
        "AWS_ENDPOINT_URL": f"http://{s3_server}",
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    store = S3Store(bucket)
    folders: dict[Path, str] = {}

    def publish(path: Path) -> str:
        prefix = folders.setdefault(path.parent, f"folder {len(folders)}")
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                put(store, f"{prefix}/{file.relative_to(path.parent)}", file.read_bytes())
        return f"s3://{bucket}/{prefix}/{path.name}"

    return publish


@pytest.fixture
def failing_s3(over_s3: Publish, proxy: Served, monkeypatch: pytest.MonkeyPatch) -> Publish:
    """As ``over_s3``, but read by way of ``proxy``."""

    def publish(path: Path) -> str:
        url = over_s3(path)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        return url

    return publish


def pytest_configure() -> None:
    os.environ.setdefault("RUST_BACKTRACE", "0")
