"""Small packages that stand for vLLM, speculators and transformers, and a server that sends their wheels.

The vLLM has what the clauses of the adapters name and what the library's own code uses, and nothing else: a clause that
is added is met here as well.
"""

from __future__ import annotations

import io
import json
import re
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from eagle3compat.adapter import GENERATOR, WORKER
from eagle3compat.adapters import ADAPTERS
from eagle3compat.contract import Accepts, Clause
from eagle3compat.probe.ahead import paths
from eagle3compat.probe.archive import Tree
from eagle3compat.probe.types import TypedSurface
from eagle3compat.probe.uses import uses
from eagle3compat.probe.verdict import FOLDER, own_modules

STOCK = """
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus
from vllm.v1.core.sched.scheduler import Scheduler


class VllmHiddenStatesGenerator:
    def __init__(self, model_path, layer_ids=None):
        self.scheduler = Scheduler(vllm_config=None)

    def generate(self, token_ids):
        request = Request(request_id="0", prompt_token_ids=token_ids, eos_token_id=2,
                          sampling_params=SamplingParams(max_tokens=1, temperature=0.0))
        self.scheduler.add_request(request)
        self.scheduler.finish_requests(["0"], RequestStatus.FINISHED_ABORTED)
"""
VLLM = {
    "vllm/sampling_params.py": "class SamplingParams:\n    def __init__(self, max_tokens=16, temperature=1.0): ...\n",
    "vllm/v1/core/sched/scheduler.py": "class Scheduler:\n    def __init__(self, vllm_config): ...\n"
    "    def add_request(self, request): ...\n    def finish_requests(self, request_ids, status): ...\n",
}

SECONDS = "120"
"""How long an answer of the server may take, as PIP_DEFAULT_TIMEOUT says it: the machine may stand still."""


def vllm(without: Sequence[str] = (), **files: str) -> dict[str, str]:
    """The files of a vLLM, without the paths named; `files` are added, with `__` for a slash, or replace."""
    parts = {path: names for path, names in _needed().items() if path not in without}
    written = {**_package("vllm", parts), **VLLM}
    request = written["vllm/v1/request.py"]
    written["vllm/v1/request.py"] = f"{request}\nclass RequestStatus:\n    FINISHED_ABORTED = 1\n"
    return {**written, **{f"{name.replace('__', '/')}.py": text for name, text in files.items()}}


@cache
def _needed() -> dict[str, set[str]]:
    """What clauses name, and what the library's own code is then found to lack."""
    asked = _asked()
    for _ in range(8):
        files = _package("vllm", asked)
        tree = Tree("vllm", files, lambda name, files=files: files[name].encode())  # type: ignore[misc]
        surface = TypedSurface({"vllm": tree.root / "vllm", "eagle3compat": FOLDER})
        lacking = {u.path for u in uses(surface, list(own_modules()), "vllm") if u.fault}
        if lacking <= asked.keys():
            break
        asked.update({path: set() for path in lacking - asked.keys()})
    return asked


def speculators(generator: str = STOCK) -> dict[str, str]:
    """The files of a speculators with this generator."""
    module, worker = (f"{name.replace('.', '/')}.py" for name in (GENERATOR, WORKER))
    return {
        "speculators/__init__.py": "", "speculators/data_generation/__init__.py": "", worker: "", module: generator,
    }  # fmt: skip


def transformers() -> dict[str, str]:
    return _package("transformers", _asked())


def _asked() -> dict[str, set[str]]:
    """Every path that a clause names, with the arguments that it must take."""
    asked: dict[str, set[str]] = {}
    for clause in (c for adapter in ADAPTERS for c in (*adapter.stock_needs, *adapter.relies_on)):
        for path in paths(clause):
            asked.setdefault(path.removesuffix(".__init__"), set()).update(_names(clause))
    return asked


def _names(clause: Clause) -> tuple[str, ...]:
    return clause.names if isinstance(clause, Accepts) else ()


def _package(top: str, asked: Mapping[str, set[str]]) -> dict[str, str]:
    """Files in which each path is a class, a method or a function that takes its arguments by keyword."""
    modules: dict[str, dict[str, dict[str, set[str]]]] = {}
    for path, names in asked.items():
        module, _, rest = path.partition(":")
        name, _, member = rest.partition(".")
        if module.split(".")[0] == top:
            named = modules.setdefault(module, {})
            if name:
                named.setdefault(name, {}).setdefault(member, set()).update(names)
    files = {f"{top}/__init__.py": ""}
    for module, names_of in modules.items():
        packages = module.split(".")
        is_package = any(other.startswith(f"{module}.") for other in modules)
        for depth in range(1, len(packages) + is_package):
            files.setdefault(f"{'/'.join(packages[:depth])}/__init__.py", "")
        file = f"{'/'.join(packages)}/__init__.py" if is_package or len(packages) == 1 else f"{'/'.join(packages)}.py"
        files[file] = "\n".join(_definition(name, members) for name, members in names_of.items())
    return files


def _definition(name: str, members: Mapping[str, set[str]]) -> str:
    if not re.match(r"_*[A-Z]", name):
        return f"def {name}({_parameters(members.get('', set()))}): ...\n"
    lines = [f"class {name}:"]
    for member in sorted({"": set(), **members}):
        method = member or "__init__"
        lines.append(f"    def {method}(self, {_parameters(members.get(member, set()))}): ...")
    return "\n".join(lines) + "\n"


def _parameters(names: set[str]) -> str:
    """By keyword, and whatever else is passed."""
    return ", ".join(["*positional", *(f"{name}=None" for name in sorted(names)), "**more"])


def wheel(files: Mapping[str, str], name: str = "vllm", version: str = "9.1.0", requires: Sequence[str] = ()) -> bytes:
    """A wheel with these files, and with a large one that nobody needs."""
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {required}" for required in requires]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{name}/kernels.so", bytes(2_000_000), zipfile.ZIP_STORED)
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n")
    return buffer.getvalue()


def unpack(folder: Path, files: Mapping[str, str]) -> Path:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


class Server(ThreadingHTTPServer):
    """Sends `files` by path.

    `mode` is "ranges", or what becomes of a request for a part: "ignored" and "refused"; from the second one on
    "shorter", "damaged" and "broken"; "closing" ends the connection after each; "cut" sends the whole without its end.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, files: Mapping[str, bytes], mode: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.mode, self.password = dict(files), mode, ""
        self.asked: list[tuple[str, str | None, int]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def sent(self) -> int:
        return sum(size for _, _, size in self.asked)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        path, ranged = self.path, self.headers.get("Range")
        body = self.server.files.get(path)
        if self.server.password and self.headers.get("Authorization") != f"Basic {self.server.password}":
            self._send(401, b"who is it?")
        elif body is None:
            self._send(404, b"not here")
        elif path.endswith("/"):
            kind = "application/vnd.pypi.simple.v1+json" if body[:1] == b"{" else "text/html"
            self._send(200, body, {"Content-Type": kind})
        elif ranged is None or self.server.mode in ("ignored", "cut"):
            self._send(200, body, cut=self.server.mode == "cut")
        elif self.server.mode == "refused":
            self._send(416, b"no parts")
        else:
            self._part(body, ranged)

    def do_HEAD(self) -> None:
        body = self.server.files.get(self.path)
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()

    def _part(self, body: bytes, ranged: str) -> None:
        first, _, last = ranged.removeprefix("bytes=").partition("-")
        start = int(first) if first else max(0, len(body) - int(last))
        stop = int(last) + 1 if first and last else len(body)
        part = body[start:stop]
        later = len(self.server.asked) > 0
        if self.server.mode == "shorter" and later:
            part = part[: len(part) // 2]
        if self.server.mode == "damaged" and later:
            part = bytes(len(part))
        header = {"Content-Range": f"bytes {start}-{stop - 1}/{len(body)}"}
        self._send(206, part, header, cut=self.server.mode == "broken" and later)
        if self.server.mode == "closing":
            self.close_connection = True

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None, cut: bool = False) -> None:
        self.server.asked.append((self.path, self.headers.get("Range"), len(body)))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(files: Mapping[str, bytes], mode: str = "ranges") -> Iterator[Server]:
    server = Server(files, mode)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def page(*names: str, html: bool = False, yanked: Sequence[str] = ()) -> bytes:
    """A page of an index with these files, which are at `/files/NAME`."""
    if html:
        marks = {name: ' data-yanked="broken"' if name in yanked else "" for name in names}
        links = (f'<a href="../../files/{name}#sha256=0"{marks[name]}>{name}</a>' for name in names)
        return f"<!DOCTYPE html><html><body>{' '.join(links)}</body></html>".encode()
    files = [{"filename": n, "url": f"../../files/{n}", "yanked": n in yanked, "hashes": {}} for n in names]
    return json.dumps({"meta": {"api-version": "1.0"}, "name": "vllm", "files": files}).encode()
