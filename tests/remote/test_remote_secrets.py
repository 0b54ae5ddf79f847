"""Nothing that was given as a secret is shown: in no repr, message, traceback, log or output."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import rowferry as rf
from rowferry.cli import app
from rowferry.stores._zarr_create import create_zarr

Publish = Callable[[Path], str]
SECRETS = {
    "access_key_id": "AKIA-of-nobody",
    "secret_access_key": "a-secret-of-forty-characters",
    "session_token": "token/with+signs==",
    "client_options": {"default_headers": {"X-Password": "open sesame"}, "allow_http": True},
}
WORDS = ["AKIA-of-nobody", "a-secret-of-forty-characters", "token/with+signs==", "open sesame", "signature-of-the-url"]


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    np.save(tmp_path / "rows.npy", np.zeros((10, 4), np.float32))
    for name, compressor in (("raw.zarr", None), ("zstd.zarr", "zstd")):
        with create_zarr(tmp_path / name, (10, 4), rf.open_store(tmp_path / "rows.npy").dtype, compressor=compressor):  # type: ignore[arg-type]
            pass
    return [tmp_path / name for name in ("rows.npy", "raw.zarr", "zstd.zarr")]


@pytest.fixture(autouse=True)
def _everything_is_logged(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    caplog.set_level(logging.DEBUG)
    yield
    said = caplog.text + "".join(capfd.readouterr())
    assert [word for word in WORDS if word in said] == []


def require_no_word(text: str) -> None:
    assert [word for word in WORDS if word in text] == []


def everything_about(error: BaseException) -> str:
    """Its own text and, suppressed or not, those of all errors that led to it, with the values that they name."""
    told, seen = [], set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            told += [str(each), repr(each), *traceback.format_exception_only(each)]
            left += [each.__cause__, each.__context__]
    return "\n".join(told)


def test_options_are_in_no_repr_and_in_no_error_of_a_server(paths: list[Path], failing_s3: Publish, proxy: Any) -> None:
    quick = {**SECRETS, "retry_config": {"max_retries": 0}}
    for path in paths:
        url = failing_s3(path)
        with rf.open_store(url, storage_options=quick) as store:
            assert url in repr(store)
            require_no_word(repr(store) + str(store.identity) + store.name)
            for fault in ("refuse", "error", "cut"):
                proxy.faults.extend([fault] * 8)
                with pytest.raises(OSError, match=r"rows|raw|zstd") as failure:
                    store.gather([1])
                require_no_word(everything_about(failure.value))
                proxy.faults.clear()
        proxy.faults.extend(["refuse"] * 8)
        with pytest.raises(PermissionError) as refused:
            rf.open_store(url, storage_options=quick)
        require_no_word(everything_about(refused.value))
        proxy.faults.clear()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"nonsense": "open sesame"}, r"storage_options \['nonsense'\].*is not valid"),
        ({"retry_config": {"max_retries": "open sesame"}}, r"storage_options \['retry_config'\]"),
        ({"client_options": {"timeout": "open sesame"}}, r"storage_options \['client_options'\]"),
        ({"allow_http": "open sesame"}, r"go inside 'client_options'"),
    ],
)
def test_options_that_cannot_be_taken_are_named_without_their_values(
    options: dict[str, Any], reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("x.npy", "x.zarr"):
        with pytest.raises(ValueError, match=reason) as refused:
            rf.open_store(f"s3://bucket/{name}", storage_options=options)
        require_no_word(everything_about(refused.value))
    require_no_word("".join(capfd.readouterr()))


def test_the_signature_of_a_url_is_sent_and_not_shown(paths: list[Path], over_http: Publish, files: Any) -> None:
    for path in paths:
        signed = f"{over_http(path)}?X-Signature=signature-of-the-url"
        with rf.open_store(signed, storage_options={"retry_config": {"max_retries": 0}}) as store:
            assert over_http(path) in repr(store)
            require_no_word(repr(store) + str(store.identity))
            for fault in ("refuse", "error", "reset"):
                files.faults.extend([fault] * 8)
                with pytest.raises(OSError, match=r"rows|raw|zstd") as failure:
                    store.gather([1])
                require_no_word(everything_about(failure.value))
                files.faults.clear()
            assert store.gather([3]).shape == (1, 4)
        with pytest.raises(FileNotFoundError) as missing:
            rf.open_store(signed.replace(".npy", "-.npy").replace(".zarr", "-.zarr"))
        require_no_word(everything_about(missing.value))
    assert all("X-Signature=signature-of-the-url" in target for target in files.targets)


def test_a_name_and_password_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match=r"^https://host/x\.npy was given with a name and password") as refused:
        rf.open_store("https://somebody:open sesame@host/x.npy")
    require_no_word(everything_about(refused.value))


def test_the_command_line_does_not_repeat_a_signature(paths: list[Path], over_http: Publish) -> None:
    for words in (
        ["inspect"],
        ["inspect", "--json"],
        ["stream", "--batch-size", "5"],
        ["stream", "--batch-size", "5", "--json"],
    ):
        result = CliRunner().invoke(app, [*words, f"{over_http(paths[0])}?X-Signature=signature-of-the-url"])
        assert result.exit_code == 0, result.output
        require_no_word(result.output)
