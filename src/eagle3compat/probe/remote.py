"""Reads parts of a file on a web server, and the whole of it where the server sends no parts."""

from __future__ import annotations

import base64
import errno
import http.client
import io
import os
import ssl
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, BinaryIO

from ..errors import Eagle3CompatError

TAIL = 768 * 1024
"""Bytes of the first request: an archive's directory is at its end, and vLLM 0.33's takes 640 KiB."""
AHEAD = 64 * 1024
"""Bytes that a small read asks for at least."""
GAP = 16 * 1024
"""Bytes between two parts up to which one request for both is the quicker way."""
AT_ONCE = 8
"""Requests at the same time."""
SHOWN = 1024 * 1024
"""Bytes from which on a whole download shows its progress."""
_PIECE = 256 * 1024
_NO_RANGES = (400, 403, 405, 406, 416, 501)
"""Answers to a request for a part after which the whole is asked for."""


class NetworkError(Eagle3CompatError):
    """A server could not be asked, or its answer is incomplete: nothing is known of what was to be read.

    It is no OSError, so that no reader takes it for a file that is not there.
    """

    def __init__(self, url: str, fault: str, remedy: str = "Check the address, the network and proxies; try again.",
                 status: int | None = None) -> None:  # fmt: skip
        self.url, self.fault, self.remedy, self.status = _shown(url), fault, remedy, status
        super().__init__(f"eagle3compat: {self.url} cannot be read: {fault}. {remedy}")


def _shown(url: str) -> str:
    """The address without the password that it may carry."""
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:  # it is no address, which the error is about
        return url.rpartition("@")[2]
    return url.replace(f"{parts.netloc}", parts.netloc.rpartition("@")[2], 1) if "@" in parts.netloc else url


def timeout() -> float:
    """Seconds to wait for an answer: pip's variable, or 15."""
    given = os.environ.get("PIP_DEFAULT_TIMEOUT", "")
    return float(given) if given.replace(".", "", 1).isdecimal() else 15.0


@cache
def trust() -> ssl.SSLContext:
    """The certificates that pip or requests are told to use, or else the system's."""
    named = (os.environ.get(variable, "") for variable in ("PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"))
    return ssl.create_default_context(cafile=next(filter(os.path.isfile, named), None))


def request(url: str, headers: Mapping[str, str]) -> urllib.request.Request:
    """A request without user and password in its address: they go into a header."""
    parts = urllib.parse.urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    made = urllib.request.Request(parts._replace(netloc=host, fragment="").geturl(), headers=dict(headers))
    if at:
        token = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
        made.add_unredirected_header("Authorization", f"Basic {token}")
    return made


@cache
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.HTTPSHandler(context=trust()))


def with_user(final: str, asked: str) -> str:
    """`final` with the user and password of `asked`, if it is on the same server."""
    user, at, host = urllib.parse.urlsplit(asked).netloc.rpartition("@")
    parts = urllib.parse.urlsplit(final)
    return parts._replace(netloc=f"{user}{at}{host}").geturl() if at and parts.netloc == host else final


def open_url(url: str, headers: Mapping[str, str] | None = None) -> Any:
    """The answer, whose body is not read yet. Redirects and the system's proxies are followed. Raises NetworkError."""
    try:
        return _opener().open(request(url, {"User-Agent": "eagle3compat", **(headers or {})}), timeout=timeout())
    except urllib.error.HTTPError as error:
        error.close()
        raise NetworkError(url, f"the server answers {error.code} {error.reason}", status=error.code) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise NetworkError(url, f"{type(error).__name__}: {reason}") from None


def read_url(url: str, headers: Mapping[str, str] | None = None) -> tuple[bytes, Any]:
    """The whole body, and the answer that it came with. Raises NetworkError, also for a body that is cut short."""
    with open_url(url, headers) as answer:
        return _body(answer, url), answer


def _body(answer: Any, url: str, size: int = -1) -> bytes:
    try:
        data: bytes = answer.read() if size < 0 else answer.read(size)
    except http.client.IncompleteRead as error:
        raise NetworkError(url, f"the answer ends after {len(error.partial)} bytes, before its end") from None
    except (OSError, http.client.HTTPException) as error:
        raise NetworkError(url, f"{type(error).__name__}: {error}") from None
    return data


def open_remote(url: str) -> BinaryIO | RangeFile:
    """A seekable file of what is at `url`: read in parts where the server allows it, else downloaded whole."""
    try:
        answer = open_url(url, {"Range": f"bytes=-{TAIL}"})
    except NetworkError as error:
        if error.status not in _NO_RANGES:
            raise
        answer = open_url(url)
    with answer:
        span = _span(answer.headers.get("Content-Range", "")) if answer.status == 206 else None
        if span is None and answer.status == 206:
            raise NetworkError(url, "the server sends a part and does not say which")
        if span is None:
            return _download(answer, url)
        start, size = span
        tail = _body(answer, url)
        if start + len(tail) != size:
            raise NetworkError(url, f"the server sent {len(tail)} bytes of a part that has {size - start}")
        return RangeFile(url, with_user(answer.geturl(), url), size, start, tail)


def _span(header: str) -> tuple[int, int] | None:
    """Where a part begins and how long the whole is, from `bytes 5-9/10`."""
    unit, _, rest = header.partition(" ")
    extent, _, size = rest.partition("/")
    start = extent.partition("-")[0]
    return (int(start), int(size)) if unit == "bytes" and start.isdecimal() and size.isdecimal() else None


def _download(answer: Any, url: str) -> BinaryIO:
    """The whole body in a temporary file, which goes when it is closed."""
    given = answer.headers.get("Content-Length", "")
    size = int(given) if given.isdecimal() else None
    file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115  the caller reads it
    with _progress(size, url) as bar:
        while piece := _body(answer, url, _PIECE):
            file.write(piece)
            if bar is not None:
                bar.advance(bar.task_ids[0], len(piece))
    if size is not None and file.tell() != size:
        raise NetworkError(url, f"the download ends after {file.tell()} of {size} bytes")
    file.seek(0)
    return file


def _progress(size: int | None, url: str) -> AbstractContextManager[Any]:
    if size is not None and size < SHOWN:
        return nullcontext()
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    name = urllib.parse.unquote(urllib.parse.urlsplit(url).path.rpartition("/")[2])
    if not console.is_terminal:
        print(f"eagle3compat: downloading {name}: the server sends no parts of it", file=sys.stderr)
        return nullcontext()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    bar.add_task(name, total=size)
    return bar


class RangeFile(io.RawIOBase):
    """A file on a server, of which only what is read is fetched; every part at most once, over one connection."""

    def __init__(self, url: str, final: str, size: int, start: int, tail: bytes) -> None:
        self.fetched, self.requests = len(tail), 1
        self._url, self._final, self._size = url, final, size
        self._parts = [(start, tail)]
        self._at = 0
        self._connection = _direct(final)

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if at < 0:
            raise OSError(errno.EINVAL, "a position before the beginning")
        self._at = at
        return at

    def read(self, size: int = -1) -> bytes:
        stop = self._size if size is None or size < 0 else min(self._size, self._at + size)
        if stop <= self._at:
            return b""
        self.load(self._at, stop)
        start, part = self._held(self._at, stop) or (self._at, b"")
        data = part[self._at - start : stop - start]
        self._at = stop
        return data

    def load(self, start: int, stop: int) -> None:
        """Fetch these bytes, unless they are here."""
        if self._held(start, stop) is None:
            stop = min(self._size, max(stop, start + AHEAD))
            self._parts.append((start, self._fetch(start, stop)))

    def load_all(self, spans: Iterable[tuple[int, int]]) -> None:
        """Fetch these spans at the same time, neighbours together."""
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(span for span in spans if self._held(*span) is None):
            if joined and start - joined[-1][1] < GAP:
                start, stop = joined[-1][0], max(stop, joined.pop()[1])
            joined.append((start, stop))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            parts = pool.map(self._alone, joined)
            self._parts += zip((start for start, _ in joined), parts, strict=True)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        super().close()

    def _held(self, start: int, stop: int) -> tuple[int, bytes] | None:
        return next((p for p in self._parts if p[0] <= start and stop <= p[0] + len(p[1])), None)

    def _fetch(self, start: int, stop: int) -> bytes:
        headers = _headers(start, stop)
        return self._checked(start, stop, self._kept_alive(headers) or self._anew(headers))

    def _alone(self, span: tuple[int, int]) -> bytes:
        return self._checked(*span, answer=self._anew(_headers(*span)))

    def _checked(self, start: int, stop: int, answer: tuple[int, tuple[int, int] | None, bytes]) -> bytes:
        status, found, data = answer
        self.requests += 1
        self.fetched += len(data)
        if status != 206 or found is None or found[0] != start or len(data) != stop - start:
            raise NetworkError(self._url, f"the server sent {len(data)} bytes (status {status}) for a part "
                               f"of {stop - start}")  # fmt: skip
        return data

    def _kept_alive(self, headers: dict[str, str]) -> tuple[int, tuple[int, int] | None, bytes] | None:
        """Over the open connection; None if there is none, or if it has failed, which is then no longer used."""
        if self._connection is None:
            return None
        asked = request(self._final, headers)
        try:
            self._connection.request("GET", asked.selector, headers=dict(asked.header_items()))
            answer = self._connection.getresponse()
            return answer.status, _span(answer.headers.get("Content-Range", "")), answer.read()
        except (OSError, http.client.HTTPException):  # a server may close it at any time: asked anew, which reports
            self._connection.close()
            self._connection = None
            return None

    def _anew(self, headers: dict[str, str]) -> tuple[int, tuple[int, int] | None, bytes]:
        data, answer = read_url(self._url, headers)
        return answer.status, _span(answer.headers.get("Content-Range", "")), data


def _headers(start: int, stop: int) -> dict[str, str]:
    return {"User-Agent": "eagle3compat", "Range": f"bytes={start}-{stop - 1}"}


def _direct(url: str) -> http.client.HTTPConnection | None:
    """A connection to the server of `url`; None where a proxy stands between, which urllib knows how to ask."""
    parts = urllib.parse.urlsplit(url)
    proxies, host = urllib.request.getproxies(), parts.hostname or ""
    if parts.scheme in proxies and not urllib.request.proxy_bypass(host):
        return None
    if parts.scheme == "https":
        return http.client.HTTPSConnection(host, parts.port, timeout=timeout(), context=trust())
    return http.client.HTTPConnection(host, parts.port, timeout=timeout())
