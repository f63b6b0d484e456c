"""vLLM's own server and connector, real, with stock clients: what goes wrong by itself, and is right once adapted.

Each vLLM is started as the stock launcher starts it, on a CPU with what `cpu_server` bridges, once without the library
and once with it. The first are controls: what they must get wrong is what the library is there for.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import REFERENCE, python_of, settings, until
from cpu.cpu_server import metadata
from servers import (
    BATCH,
    LENGTH,
    START_SECONDS,
    Server,
    all_right,
    children_of,
    fetch,
    figures,
    held_port,
    note,
    serve,
    started,
)  # fmt: skip

from eagle3compat.serverpath.answers import is_whole

pytestmark = pytest.mark.real

SPECULATORS = "0.4.0.1"
BLOCKS = ["--enforce-eager", "--block-size", "32"]
"""The shared prefix of 35 tokens then fills a block, which prefix caching works by."""
OPTIONS = {
    "0.19.1": [*BLOCKS, "--max-num-batched-tokens", "290", "--no-async-scheduling"],
    "0.22.1": [*BLOCKS, "--no-enable-chunked-prefill"],
    "0.26.0": [*BLOCKS, "--max-num-seqs", "2"],
    "0.32.0": BLOCKS,
}
"""By vLLM. Prompts are split within 290 tokens; requests wait behind two; what the launcher of 0.6 and 0.7 passes."""
SAID = {
    "0.19.1": ["chunked prefill off", "connector replaced"],
    "0.22.1": ["prefix caching off", "answers held"],
    "0.26.0": ["connector replaced", "answers held"],
    "0.32.0": ["render endpoint opened", "answers held"],
}
VLLMS = [pytest.param(vllm, marks=pytest.mark.xdist_group(f"server-{vllm}")) for vllm in OPTIONS]


WITHOUT = "0.16.0"
"""A vLLM that does not have the method."""


def stock(vllm: str, model: Path, folder: Path, **env: str) -> Server:
    """vLLM's server, as the stock launcher starts it."""
    held = held_port()
    port = held.getsockname()[1]
    beside = [Path(__file__).with_name("cpu"), metadata(folder / "metadata", vllm)]
    command = [
        python_of(*(REFERENCE if vllm == WITHOUT else (vllm, SPECULATORS))), "-m",
        "vllm.entrypoints.cli.main", "serve", str(model), "--port", str(port), *OPTIONS.get(vllm, []),
    ]  # fmt: skip
    # connections that idle for as long as these clients keep theirs are closed on both sides at once, and requests lost
    more = {"PYTHONPATH": os.pathsep.join(map(str, beside)), "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600"}
    ready = "Application startup complete" if vllm in OPTIONS else " on http://"
    server = Server(command, model, folder, settings(**more, **env), ready)
    server.url, server.port = f"http://127.0.0.1:{port}", held
    return server


@pytest.fixture(scope="module", params=VLLMS)
def vllm(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def adapted(vllm: str, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp(f"adapted-{vllm}")
    with started(stock(vllm, models["llama"], folder, EAGLE3COMPAT="strict")) as running:
        yield running


def leave_until_it_ends(server: Server) -> None:
    """Clients go away once some have their answers: the others' requests the engine has, and has not begun with."""
    for answered in (1, 2, 4, 8, 16, 32):
        with suppress(OSError):  # it has ended
            server.leave(60, answered)
        with suppress(subprocess.TimeoutExpired):
            server.process.wait(60)
            return
    pytest.fail(f"the server did not end:\n{server.log[-4000:]}")


def test_a_control_without_the_library_gets_wrong_what_it_is_known_for(
    vllm: str, models: dict[str, Path], references: Callable[[str, str], Path], tmp_path: Path
) -> None:
    # Where files are written beside the answer, that it comes before them must not rest on who is let run first: copies
    # to the host take a while. Evidence is of vLLM as it is.
    slow = {} if "SERVER_EVIDENCE" in os.environ else {"CPU_SERVER_COPY_SECONDS": "0.2"}
    with started(stock(vllm, models["llama"], tmp_path, **(slow if vllm in ("0.26.0", "0.32.0") else {}))) as server:
        assert "eagle3compat:" not in server.log
        release = "0.7.0" if vllm in ("0.19.1", "0.22.1") else "0.5.0"
        found = figures(fetch(server.url, tmp_path / "fetched", (release,)), references("llama", BATCH), tmp_path, True)
        control = {"client": release, "options": OPTIONS[vllm], **found[release]}
        note(vllm, "control", control)
        if vllm == "0.22.1":  # prefix caching: rows of others, and fewer than tokens
            assert found[release]["wrong"] > 20, found
            assert found[release]["right"] < 50, found
        elif vllm == "0.19.1":  # split prompts end in stale rows, which no client sees
            assert found[release]["wrong"] > 0, found
            assert found[release]["right"] + found[release]["wrong"] == 300, found
        else:  # the answer comes before the file
            assert found[release]["missing"] > 0, found
        if vllm == "0.26.0":
            leave_until_it_ends(server)
            assert "KeyError: 'cmpl-" in server.log
            note(vllm, "control", {**control, "ended by": "clients that went away"})
        if vllm == "0.32.0":
            messages = {"messages": [{"role": "user", "content": "How many?"}]}
            assert server.ask("/v1/chat/completions/render", messages)[0] == 403
            note(vllm, "control", {**control, "render": 403})


def test_every_tensor_that_stock_clients_fetch_from_an_adapted_server_is_the_models(
    vllm: str, adapted: Server, references: Callable[[str, str], Path], tmp_path: Path
) -> None:
    for said in SAID[vllm]:
        assert adapted.log.count(f"eagle3compat: {said}") == 1, adapted.log[-4000:]
    fetched = fetch(adapted.url, tmp_path / "fetched")
    found = all_right(fetched, references("llama", BATCH), tmp_path)
    note(vllm, "adapted", {"options": OPTIONS[vllm], "changed": SAID[vllm], "clients": found})


def test_serve_answers_them_on_the_same_vllm(
    vllm: str, models: dict[str, Path], references: Callable[[str, str], Path], tmp_path: Path
) -> None:
    if vllm == "0.32.0":
        return  # with more, in test_serve.py
    with started(serve(python_of(vllm, SPECULATORS), models["llama"], tmp_path)) as server:
        found = all_right(fetch(server.url, tmp_path / "fetched"), references("llama", BATCH), tmp_path)
    note(vllm, "serve", {"clients": found})


@pytest.mark.xdist_group(f"server-{WITHOUT}")
def test_a_vllm_without_the_method_does_not_start_and_this_librarys_server_takes_over(
    models: dict[str, Path], references: Callable[[str, str], Path], tmp_path: Path
) -> None:
    (tmp_path / "control").mkdir()
    control = stock(WITHOUT, models["llama"], tmp_path / "control")
    try:
        assert control.process.wait(START_SECONDS) != 0
        assert "SpeculativeConfig" in control.log
    finally:
        control.end()
    with started(stock(WITHOUT, models["llama"], tmp_path, EAGLE3COMPAT="strict")) as server:
        assert server.log.count("`eagle3compat serve` takes over") == 1
        found = all_right(fetch(server.url, tmp_path / "fetched"), references("llama", BATCH), tmp_path)
    note(WITHOUT, "control", {"does not start": True})
    note(WITHOUT, "adapted", {"changed": ["takes over"], "clients": found})


def test_a_prompt_over_the_limit_is_refused_and_the_next_served(adapted: Server) -> None:
    before = adapted.found()
    status, answer = adapted.completion([9] * (LENGTH + 1))
    assert status == 400
    assert str(LENGTH) in json.dumps(answer)
    assert adapted.found() == before
    assert adapted.completion([9] * (LENGTH - 1))[0] == 200


def test_clients_that_go_away_do_no_harm(adapted: Server) -> None:
    adapted.leave(60, answered=1)
    status, answer = adapted.completion([9] * 200)
    assert status == 200
    assert is_whole(answer["kv_transfer_params"]["hidden_states_path"])

    def broken() -> list[Path]:
        return [path for path in adapted.files.glob("*.safetensors") if not is_whole(str(path))]

    assert until(lambda: not broken()), broken()  # what was begun is written to its end


def writer(server: Server) -> int:
    """The process that writes the files: the last of the chain API server, engine, worker."""
    pid = server.process.pid
    while True:
        below = [child for child, words in children_of(pid).items() if "resource_tracker" not in words]
        if not below:
            return pid
        pid = below[0]


def test_a_full_disk_is_an_error_and_no_file(adapted: Server) -> None:
    before, pid = adapted.found(), writer(adapted)
    old = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, old[1]))  # the states take 420,000 bytes
    try:
        status, answer = adapted.completion([9] * 200)
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, old)
    assert status == 500, answer
    assert {name for name in adapted.found() - before if name.endswith(".safetensors")} == set()
    assert adapted.completion([9] * 200)[0] == 200


def test_a_worker_that_is_killed_leaves_nothing_that_looks_whole_and_is_not(adapted: Server) -> None:
    """The last test of a server."""
    answered: list[str] = []

    def ask() -> None:
        for _ in range(40):
            try:
                status, answer = adapted.completion([9] * 200)
            except OSError:  # the server has ended
                return
            if status == 200:
                answered.append(answer["kv_transfer_params"]["hidden_states_path"])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    while len(answered) < 5 and any(thread.is_alive() for thread in threads):
        time.sleep(0.01)
    os.kill(writer(adapted), signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert answered
    assert [path for path in answered if not is_whole(path)] == []
    adapted.process.wait(300)
