"""Servers on loopback for the tests, and the stock clients that fetch from them; ended by process id."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import PROMPTS, REFERENCE, execute, python_of, settings, until

import clients

CLIENTS = ("0.5.0", "0.7.0", "0.9.0")
LAYER_IDS = [2, 3, 5, 6]
BATCH = "shared prefix"
LENGTH = 256
CONVERSATION = [
    {"role": "user", "content": "How many were there today?"},
    {"role": "assistant", "content": "Seventeen, and one that was black."},
]
START_SECONDS = 600
SPECULATIVE = {
    "method": "extract_hidden_states",
    "num_speculative_tokens": 1,
    "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": LAYER_IDS}},
}


def connector(folder: Path) -> dict[str, Any]:
    """What the stock launcher passes."""
    return {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


class Server:
    """A server that is started: its process, its log, and where its files go; its address once it serves."""

    def __init__(self, command: list[str], model: Path, folder: Path, env: dict[str, str], ready: str) -> None:
        """`command` gets what the stock launcher passes, and `ready` is what the log says when it serves."""
        self.files, self.log_file, self._ready = folder / "files", folder / "log", ready
        self.files.mkdir(parents=True, exist_ok=True)
        options = [
            "--speculative_config", json.dumps(SPECULATIVE), "--kv_transfer_config", json.dumps(connector(self.files)),
            "--host", "127.0.0.1", "--max-model-len", str(LENGTH),
            *([] if "--dtype" in command else ["--dtype", "float32"]),
        ]  # fmt: skip
        with self.log_file.open("w") as file:
            # in a session of its own, so that all of its processes can be ended
            self.process = subprocess.Popen(
                [*command, *options], stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )
        self.model = str(model)
        self.url = ""
        self.port: socket.socket | None = None
        """Held for the server until it has taken it; see `held_port`."""

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def wait_until_it_serves(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while self._ready not in self.log:
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the server did not start:\n{self.log[-4000:]}")
            time.sleep(0.5)

    def ask(self, path: str, body: Any) -> tuple[int, Any]:
        """The status and the answer; `body` is JSON, or bytes that are sent as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=300) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def completion(self, prompt: Any, **more: Any) -> tuple[int, Any]:
        return self.ask("/v1/completions", {"prompt": prompt, "max_tokens": 1, "return_token_ids": True, **more})

    def leave(self, count: int, answered: int = 0) -> None:
        """Send `count` requests, and close their connections once so many of them have got an answer."""
        host, port = self.url.removeprefix("http://").split(":")
        body = json.dumps({"prompt": [9] * 200, "max_tokens": 1}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        left = [socket.create_connection((host, int(port))) for _ in range(count)]
        for connection in left:
            connection.sendall(head + body)
        until(lambda: len(select.select(left, [], [], 0)[0]) >= answered)
        for connection in left:
            connection.close()

    def found(self) -> set[str]:
        """What lies in its folder, beside the hidden one in which it writes."""
        return {path.name for path in self.files.iterdir() if not path.name.startswith(".")}

    def children(self) -> dict[int, str]:
        """Its child processes with their command lines."""
        return children_of(self.process.pid)

    def end(self) -> None:
        """Tell it to end; after 20 s, or where it leaves processes behind, all of its session are killed."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with suppress(ProcessLookupError):  # none of its processes is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.port is not None:
            self.port.close()


def held_port() -> socket.socket:
    """A socket on a free port of loopback, for a server that takes it a minute later: until then nobody is given it.

    A server may still take it, as those of vLLM and uvicorn set SO_REUSEADDR too, and this one does not listen.
    """
    held = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        held.setsockopt(socket.SOL_SOCKET, option, 1)
    held.bind(("127.0.0.1", 0))
    return held


def children_of(pid: int) -> dict[int, str]:
    """The child processes of a process, with their command lines; without those that end while one looks."""
    found = {}
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        with suppress(FileNotFoundError, ProcessLookupError):
            found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
    return found


@contextmanager
def started(server: Server) -> Iterator[Server]:
    try:
        server.wait_until_it_serves()
        yield server
    finally:
        server.end()


def serve(python: str, model: Path, folder: Path, *options: str, **env: str) -> Server:
    """`eagle3compat serve`, on a port of its own choice."""
    words = ["serve", str(model), "--port", "0", "--no-enable-chunked-prefill", *options]
    command = [python, "-m", "eagle3compat", *words]

    class Serve(Server):
        def wait_until_it_serves(self) -> None:
            super().wait_until_it_serves()
            self.url = "http://" + self.log.split(" on http://")[1].split(",")[0]

    return Serve(command, model, folder, settings(**env), " on http://")


def fetch(url: str, folder: Path, releases: tuple[str, ...] = CLIENTS) -> dict[str, dict[str, Any]]:
    """What stock clients fetch of the prompts with a shared prefix: a report each, with the folder of its files."""
    folder.mkdir(exist_ok=True)
    job = {"url": url, "prompts": PROMPTS[BATCH], "concurrency": 32, "conversation": CONVERSATION}
    (folder / "job.json").write_text(json.dumps(job))
    script, sites = str(Path(__file__).with_name("serve_client.py")), clients.ensure(CLIENTS)
    reports = {}
    for release in releases:
        place = folder / release
        command = [str(sites / "bin/python"), script, str(sites / release), str(folder / "job.json"), str(place)]
        execute(command, folder / f"{release}.log", settings())
        reports[release] = {**json.loads((place / "report.json").read_text()), "folder": str(place)}
    return reports


def figures(fetched: dict[str, dict[str, Any]], reference: Path, folder: Path, tally: bool = False) -> dict[str, Any]:
    """By client, how far its tensors are from transformers'; with `tally` how many files are what, right or not."""
    plan = {
        "prompts": PROMPTS[BATCH], "reference": str(reference), "layer_ids": LAYER_IDS, "dtype": "float32",
        "folders": {release: report["folder"] for release, report in fetched.items()}, "tally": tally,
        "out": str(folder / "figures.json"),
    }  # fmt: skip
    (folder / "plan.json").write_text(json.dumps(plan))
    script = str(Path(__file__).with_name("serve_compare.py"))
    command = [python_of(*REFERENCE), script, str(folder / "plan.json")]
    execute(command, folder / "compare.log", settings(OMP_NUM_THREADS="1"))
    found: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    return found


def all_right(fetched: dict[str, dict[str, Any]], reference: Path, folder: Path) -> dict[str, Any]:
    """Assert that every tensor of every client is the model's, and that the controls are not; the figures."""
    for release, report in fetched.items():
        assert report["errors"] == {}, release
    by_release = figures(fetched, reference, folder)
    for release, found in by_release.items():
        assert found["wrong"] == [], release
        assert found["tensors"] == len(PROMPTS[BATCH]) * len(LAYER_IDS), release
        assert found["max"] < 1e-5, (release, found)
        assert min(found["wrong_layer"], found["shifted_row"]) > 0.3, (release, found)  # controls
        assert found.get("chat", 0.0) < 1e-5
    return by_release


def note(vllm: str, name: str, value: Any) -> None:
    """Write what was measured into the folder $SERVER_EVIDENCE, if there is one, as `make server-evidence` has it."""
    folder = os.environ.get("SERVER_EVIDENCE")
    if not folder:
        return
    file = Path(folder) / f"{vllm}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:  # the other test process may write into the same
        fcntl.flock(lock, fcntl.LOCK_EX)
        held = json.loads(file.read_text()) if file.exists() else {"vllm": vllm, "prompts": len(PROMPTS[BATCH])}
        file.write_text(json.dumps({**held, name: value}, indent=1, sort_keys=True) + "\n")
