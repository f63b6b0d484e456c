"""`eagle3compat serve` answers the stock clients of speculators 0.5 to 0.9, unmodified, and every tensor is right."""

from __future__ import annotations

import json
import os
import resource
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import REFERENCE, alive, execute, python_of, settings, until
from servers import (
    BATCH,
    CONVERSATION,
    LENGTH,
    SPECULATIVE,
    Server,
    all_right,
    connector,
    fetch,
    note,
    serve,
    started,
)  # fmt: skip

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("serve")]

PAIRS = [("0.16.0", "0.3.0"), ("0.32.0", "0.4.0.1")]


def health(server: Server) -> int:
    """The status of its answer."""
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=300) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def server(
    request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with started(serve(python_of(*request.param), models["llama"], tmp_path_factory.mktemp("serve"))) as running:
        yield running


@pytest.fixture(scope="module")
def fetched(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each client fetched: its report, with the folder of its files."""
    return fetch(server.url, tmp_path_factory.mktemp("fetched"))


METHOD = "--speculative-config"
MOONCAKE = {**connector(Path("/tmp")), "kv_connector": "MooncakeHiddenStatesConnector"}
REFUSED: dict[str, tuple[list[str], str]] = {
    "option": (["--nonsense", "1"], "unrecognized arguments: --nonsense 1"),
    "server option": (["--api-key", "x"], "unrecognized arguments: --api-key x"),
    "method": ([METHOD, json.dumps({"method": "ngram"})], "the method of --speculative-config is 'ngram'"),
    "no ids": ([METHOD, json.dumps({"method": "extract_hidden_states"})], "is None, not a list of layer ids"),
    "field": ([METHOD, json.dumps({**SPECULATIVE, "x": 1})], "x in --speculative-config would be ignored"),
    "both": ([METHOD, json.dumps(SPECULATIVE), "--target-layer-ids", "2"], "Leave one out"),
    "connector": (["--kv-transfer-config", json.dumps(MOONCAKE)], "the connector is 'MooncakeHiddenStatesConnector'"),
    "backend": (["--hidden-states-backend", "fp8"], "--hidden-states-backend is 'fp8'; this server writes files"),
    "engines": (["--data-parallel-size", "2"], "--data-parallel-size is 2: this server has one engine"),
    "layer": (["--target-layer-ids", "7"], "layer id 7 is out of range: the model has 6 layers"),
}


def test_what_would_be_ignored_or_cannot_be_served_is_refused_by_name(models: dict[str, Path], tmp_path: Path) -> None:
    files = ["--hidden-states-path", str(tmp_path / "files"), "--port", "0", "--dtype", "float32"]
    cases = {name: [str(models["llama"]), *words, *files] for name, (words, _said) in REFUSED.items()}
    cases["connector"] = [str(models["llama"]), *REFUSED["connector"][0]]
    cases["model"] = [str(tmp_path / "nothing"), *files]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    script, out = str(Path(__file__).with_name("serve_refusals.py")), tmp_path / "out.json"
    execute([python_of(*REFERENCE), script, str(tmp_path / "cases.json"), str(out)], tmp_path / "log", settings())
    outcomes = json.loads(out.read_text())
    for name, words in {**{name: said for name, (_words, said) in REFUSED.items()}, "model": "no such folder"}.items():
        code, said = outcomes[name]
        assert code == 2, (name, said[-1000:])
        assert words in said, (name, said[-1000:])
    assert not list((tmp_path / "files").iterdir())


def test_every_tensor_that_stock_clients_fetch_is_the_models(
    request: pytest.FixtureRequest, fetched: dict[str, dict[str, Any]], references: Callable[[str, str], Path],
    tmp_path: Path,
) -> None:  # fmt: skip
    found = all_right(fetched, references("llama", BATCH), tmp_path)
    note(request.node.callspec.params["server"][0], "serve", {"clients": found})


def test_conversations_are_rendered_and_cut_as_asked(server: Server, fetched: dict[str, dict[str, Any]]) -> None:
    report = fetched["0.9.0"]
    assert len(report["rendered"]) > 20
    assert report["cut"] == report["rendered"][:7]
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in CONVERSATION]
    body = {"messages": parts, "add_generation_prompt": False, "truncate_prompt_tokens": 7}
    status, answer = server.ask("/v1/chat/completions/render", body)
    assert (status, answer["token_ids"]) == (200, report["rendered"][-7:])
    # a training window as long as the model's is rendered, as vLLM does, though one token less is computed
    body["truncate_prompt_tokens"] = LENGTH
    assert server.ask("/v1/chat/completions/render", body)[0] == 200
    body["truncate_prompt_tokens"] = LENGTH + 1
    assert server.ask("/v1/chat/completions/render", body)[0] == 400


def test_text_is_tokenized(server: Server) -> None:
    status, answer = server.completion("In the morning the harbour is quiet.")
    assert status == 200
    ids = answer["choices"][0]["prompt_token_ids"]
    again = server.completion(ids, model=server.model)[1]
    assert again["choices"][0]["prompt_token_ids"] == ids


BAD: dict[str, tuple[str, Any, int, str]] = {
    "empty": ("completions", {"prompt": []}, 400, "prompt 0 is empty"),
    "too long": ("completions", {"prompt": [9] * LENGTH}, 400, "the prompt has 256 tokens, and the longest that fits"),
    "token": ("completions", {"prompt": [9, 640]}, 400, "token id 640, outside the model's vocabulary [0, 639]"),
    "no token": ("completions", {"prompt": [9, 1.5]}, 400, "1.5, which is not a token id"),
    "several": ("completions", {"prompt": [[9], [10]]}, 400, "Send one prompt a request"),
    "no prompt": ("completions", {}, 400, "prompt is not one list of token ids"),
    "not JSON": ("completions", b"{", 400, "is not JSON"),
    "deep": ("completions", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "is not JSON, or too deep"),
    "model": ("completions", {"prompt": [9], "model": "other"}, 404, "there is no model 'other' here"),
    "generates": ("completions", {"prompt": [9], "max_tokens": 16}, 400, "max_tokens is 16"),
    "field": ("completions", {"prompt": [9], "nonsense": 1}, 400, "the field 'nonsense' is not known here"),
    "no messages": ("chat/completions", {"messages": []}, 400, "messages is empty"),
    "image": (
        "chat/completions/render",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}, 400,
        "message 0 holds a part of type 'image_url', and vLLM runs",
    ),
    "sound": (
        "chat/completions", {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, 400,
        "message 0 holds a part of type 'input_audio'; this server takes text and images",
    ),
    "endpoint": ("embeddings", {}, 404, "there is no endpoint /v1/embeddings here"),
}  # fmt: skip


def test_bad_input_is_named_and_the_next_request_served(server: Server) -> None:
    before = server.found()
    for name, (path, body, status, words) in BAD.items():
        found, answer = server.ask(f"/v1/{path}", body)
        assert (found, answer["error"]["code"]) == (status, status), (name, answer)
        assert words in answer["error"]["message"], (name, answer)
    assert server.found() == before
    assert server.completion([9] * (LENGTH - 1))[0] == 200


def test_a_file_that_cannot_be_written_whole_is_not_there(server: Server) -> None:
    before = server.found()
    old = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (100_000, old[1]))  # the states take 420,000 bytes
    try:
        status, answer = server.completion([9] * 200)
    finally:
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, old)
    assert status == 500
    for words in (f"{server.files}/cmpl-", "could not be written", "File too large"):
        assert words in answer["error"]["message"]
    assert server.found() == before
    assert server.completion([9] * 200)[0] == 200


def test_clients_that_go_away_leave_nothing_behind(server: Server) -> None:
    before = server.found()
    server.leave(20)
    status, answer = server.completion([9, 10, 11])
    assert status == 200
    path = Path(answer["kv_transfer_params"]["hidden_states_path"])
    wanted = before | {path.name, f"{path.name}.lock"}
    assert until(lambda: server.found() == wanted), server.found() ^ wanted


def test_it_ends_whole(server: Server, request: pytest.FixtureRequest) -> None:
    """On one vLLM because it is told to, on the other because a worker was killed."""
    children = server.children()
    told = request.node.callspec.params["server"] == PAIRS[0]
    if told:
        server.process.send_signal(signal.SIGTERM)
    else:
        workers = [pid for pid, command in children.items() if command and "resource_tracker" not in command]
        os.kill(workers[0], signal.SIGKILL)
        assert until(lambda: health(server) == 503), children
        status, answer = server.completion([9, 10, 11])
        assert (status, "ended with exit code -9" in answer["error"]["message"]) == (500, True), answer
    assert server.process.wait(300) == (0 if told else 1), server.log[-3000:]
    # multiprocessing's tracker of resources still has to see that its parent is gone
    assert until(lambda: not any(map(alive, children))), [pid for pid in children if alive(pid)]
    assert [path for path in server.files.iterdir() if path.name.startswith(".")] == []
    assert told == ("Traceback" not in server.log and "can no longer be used" not in server.log)
