"""URLs of stores: what is taken, how it is split, and what of it may be shown. Pure: no I/O."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any, Literal, final
from urllib.parse import unquote, urlsplit, urlunsplit

from ._safetensors_header import INDEX_SUFFIX

SCHEMES = ("s3", "http", "https", "gs", "az")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(path: Any) -> bool:
    """Whether ``path`` is a URL and no local path."""
    return isinstance(path, str) and _URL.match(path) is not None


@final
@dataclass(frozen=True)
class Url:
    """A URL that ``open_store`` takes.

    Attributes:
        name: the URL without its query, which may be a signature. What errors, logs and ``repr`` show.
        folder: all of the URL up to its last part, query included.
        key: the last part, decoded.
        query: the part after ``?``; a secret.
    """

    name: str
    folder: str = field(repr=False)
    key: str
    query: str = field(repr=False)

    @property
    def whole(self) -> str:
        """All of it: a secret where it has a query."""
        return self.name + (f"?{self.query}" if self.query else "")

    @property
    def plain_http(self) -> bool:
        return self.name.lower().startswith("http://")


def parse_url(text: str | os.PathLike[str]) -> Url:
    """Split a URL.

    Raises:
        ValueError: another scheme, no host or bucket, no path, or a name and password in it.
    """
    parts = urlsplit(str(text))
    scheme = parts.scheme.lower()
    host = parts.netloc.rpartition("@")[2]
    name = f"{scheme}://{host}{parts.path.rstrip('/')}"
    if scheme not in SCHEMES:
        raise ValueError(
            f"{name} has the scheme {scheme}://; known are {', '.join(f'{each}://' for each in SCHEMES)}, and local paths"
        )
    if "@" in parts.netloc:
        raise ValueError(
            f"{name} was given with a name and password, which a URL shows to everybody; pass them by storage_options="
            f"{{'client_options': {{'default_headers': {{'Authorization': ...}}}}}}"
        )
    folder, _, key = parts.path.rstrip("/").rpartition("/")
    if not host or not key:
        raise ValueError(f"{name} names no object; a URL is like s3://bucket/folder/rows.npy or https://host/folder/rows.zarr")
    if parts.fragment:
        raise ValueError(f"{name} was given with a fragment (#...), which names nothing here; write # in a name as %23")
    return Url(name, urlunsplit((scheme, parts.netloc, folder, parts.query, "")), unquote(key), parts.query)


def refuse_to_write_url(path: Any, mode: str = "r+") -> None:
    """Raise where a URL is to be written."""
    if is_url(path) and mode != "r":
        name = parse_url(path).name
        raise PermissionError(f"{name} is a URL, which can only be read; write to a local path and copy it there")


def kind_of_url(url: Url) -> Literal["npy", "zarr", "safetensors"]:
    """Of what is at a URL, by its suffix.

    Raises:
        ValueError: no suffix that is known.
    """
    suffix = os.path.splitext(url.key)[1].lower()
    if suffix == ".npy":
        return "npy"
    if suffix == ".zarr":
        return "zarr"
    if suffix == ".safetensors" or url.key.lower().endswith(INDEX_SUFFIX):
        return "safetensors"
    told = f"the suffix {suffix}" if suffix else "no suffix"
    raise ValueError(f"{url.name} has {told}, which is of no known kind; by URL known are .npy, .zarr and .safetensors")
