"""A vLLM server in an environment that has this library, and was not asked to adapt, is as if it were not there."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import python_of, settings
from servers import held_port

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("server")]

# In float16: the CPU build of 0.16 has no bf16 attention for processors with AMX.
PAIR = ("0.16.0", "0.3.0")
START_SECONDS = 600


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as reply:
        return json.loads(reply.read())


@pytest.fixture(scope="module")
def server(shared: Path, models: dict[str, Path]) -> Iterator[str]:
    """The address of a server on the Llama model, ended by its process id."""
    held = held_port()
    port = held.getsockname()[1]
    command = [
        python_of(*PAIR), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(models["llama"]), "--host", "127.0.0.1", "--port", str(port),
        "--max-model-len", "256", "--enforce-eager", "--dtype", "float16", "--worker-extension-cls", "witness.Witness",
    ]  # fmt: skip
    env = settings(VLLM_SERVER_DEV_MODE="1", PYTHONPATH=str(Path(__file__).parent))
    log = shared / "server.log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while not answers(address):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the server did not start:\n{log.read_text()[-4000:]}")
            time.sleep(1)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
        held.close()


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=60) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def test_a_server_that_nobody_asked_to_adapt_is_untouched(server: str, models: dict[str, Path]) -> None:
    prompt = {"model": str(models["llama"]), "prompt": [9, 10, 11], "max_tokens": 4, "temperature": 0}
    assert post(f"{server}/v1/completions", prompt)["usage"]["completion_tokens"] == 4
    (seen,) = post(f"{server}/collective_rpc", {"method": "witness"})["results"]
    assert set(seen["loaded"]) == {"eagle3compat", "eagle3compat.errors", "eagle3compat.plugin"}
    assert "StockFinder" not in seen["finders"]
    assert "HiddenStatesWorkerExtension" not in seen["bases"]
