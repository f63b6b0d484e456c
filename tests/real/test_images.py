"""Conversations with images through `eagle3compat serve`: every tensor is what enters the model's next layer.

By unmodified stock clients, on tiny models with random weights and pictures of random pixels, beside prompts of text in
the same steps, and in steps so small that images are split. transformers, in float32, is the reference.
"""

from __future__ import annotations

import json
import select
import socket
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import execute, once, python_of, settings
from image_families import PICTURED
from image_prompts import ALIKE, ASKED, CHUNKS, conversation, image, pictures, text
from servers import LAYER_IDS, Server, serve, started

import clients
import vision

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("images")]

MAKER = ("0.26.0", "0.4.0.1")
"""Whose transformers makes the models and the references."""
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "kimi_k25", "gemma3")
CASES = [("qwen2_5_vl", *MAKER), ("qwen3_vl", *MAKER), ("qwen3_vl", "0.16.0", "0.3.0")]
RELEASES = ("0.9.0", "0.7.0")


@pytest.fixture(scope="module")
def models(shared: Path) -> Path:
    def make(target: Path) -> None:
        script = str(Path(__file__).with_name("image_models.py"))
        path = settings(PYTHONPATH=str(vision.ensure(*MAKER)))
        execute([python_of(*MAKER), script, str(target), *FAMILIES], shared / "image-models.log", path)

    return once(shared, "image-models", make)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    found: tuple[str, str, str] = request.param
    return found


@pytest.fixture(scope="module")
def server(case: tuple[str, str, str], models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    family, *pair = case
    # an address that does not answer is waited for until long after the test
    env = {"PYTHONPATH": str(vision.ensure(*pair)), "VLLM_IMAGE_FETCH_TIMEOUT": "3600"}
    with started(serve(python_of(*pair), models / family, tmp_path_factory.mktemp("images"), *CHUNKS, **env)) as made:
        yield made


@pytest.fixture(scope="module")
def fetched(case: tuple[str, str, str], server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return fetch(server, case[0], tmp_path_factory.mktemp("fetched"), RELEASES)


def fetch(server: Server, family: str, folder: Path, releases: tuple[str, ...]) -> dict[str, Any]:
    """What stock clients fetched: the folder of each, and the token ids of the conversations."""
    script, sites, side = str(Path(__file__).with_name("image_client.py")), clients.ensure(RELEASES), side_of(family)
    job: dict[str, Any] = {
        "url": server.url, "concurrency": 6, "conversations": [conversation(parts, side) for parts in ASKED],
    }  # fmt: skip
    folders = []
    for release in releases:  # the first renders, and says what the other is to expect
        (folder / "job.json").write_text(json.dumps(job))
        folders.append(str(folder / release))
        command = [str(sites / "bin/python"), script, str(sites / release), str(folder / "job.json"), folders[-1]]
        execute(command, folder / f"{release}.log", settings())
        job["rendered"] = json.loads((folder / release / "report.json").read_text())["rendered"]
    return {"folders": folders, "token_ids": job["rendered"]}


def side_of(family: str) -> int:
    return PICTURED[family].side


@pytest.fixture
def references(models: Path, shared: Path) -> Callable[[str, list[list[int]]], Path]:
    def of(family: str, token_ids: list[list[int]]) -> Path:
        def make(target: Path) -> None:
            prompts, side = [], side_of(family)
            for ids, parts in zip(token_ids, ASKED, strict=True):
                prompts.append({"token_ids": ids, "images": pictures(parts, family, side, shared)})
            plan, script = shared / f"{family}-prompts.json", str(Path(__file__).with_name("image_reference.py"))
            plan.write_text(json.dumps(prompts))
            env = settings(PYTHONPATH=str(vision.ensure(*MAKER)), OMP_NUM_THREADS="1")
            command = [python_of(*MAKER), script, str(models / family), str(plan), str(target)]
            execute(command, shared / f"reference-{family}.log", env)

        return once(shared, f"images-{family}-{zlib.crc32(json.dumps(token_ids).encode())}.pt", make)

    return of


def compared(family: str, fetched: dict[str, Any], references: Any, folder: Path) -> dict[str, Any]:
    """How far what was fetched is from transformers, once that is known to be little, and the controls much."""
    plan = {**fetched, "reference": str(references(family, fetched["token_ids"])), "layer_ids": LAYER_IDS}
    (folder / "plan.json").write_text(json.dumps({**plan, "alike": ALIKE, "out": str(folder / "out.json")}))
    script = str(Path(__file__).with_name("image_compare.py"))
    execute([python_of(*MAKER), script, str(folder / "plan.json")], folder / "log", settings(OMP_NUM_THREADS="1"))
    figures: dict[str, Any] = json.loads((folder / "out.json").read_text())
    assert len(figures["files"]) == len(fetched["folders"])
    for name, found in figures["files"].items():
        assert found["tensors"] == len(ASKED) * len(LAYER_IDS), name
        assert found["max"] < 1e-5, (name, found)
        controls = found["wrong_layer"] + found["shifted_row"] + found["other_image"]
        assert min(controls) > 0.2, (name, found)
    return figures


def test_every_tensor_is_what_enters_the_next_layer(
    case: tuple[str, str, str], fetched: dict[str, Any], references: Any, tmp_path: Path
) -> None:
    figures = compared(case[0], fetched, references, tmp_path)
    for folder, found in figures["files"].items():
        # deepstack adds to the stream between layers: what leaves layer 2 is not it, where there is an image
        with_image = [any(isinstance(part, tuple) for part in parts) for parts in ASKED]
        added = [off > 0.2 for off in found["leaving"]["2"]]
        assert added == [case[0] == "qwen3_vl" and one for one in with_image], (folder, found["leaving"])
    assert figures["reported_from_leaving"] < 1e-6  # transformers' output_hidden_states is what leaves a layer


@contextmanager
def waiting_for_an_address(server: Server) -> Iterator[list[socket.socket]]:
    """Within, the server waits for four images from where nobody answers: the connections of who asked for them."""
    with socket.create_server(("127.0.0.1", 0)) as silent, ExitStack() as ending:
        picture = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{silent.getsockname()[1]}/x.png"}}
        asked = {"messages": [{"role": "user", "content": [picture]}], "max_tokens": 1}
        body = json.dumps(asked).encode()
        host, port = server.url.removeprefix("http://").split(":")
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        asking = [ending.enter_context(socket.create_connection((host, int(port)))) for _ in range(4)]
        for connection in asking:
            connection.sendall(head + body)
        silent.settimeout(300)
        ending.enter_context(silent.accept()[0])
        yield asking


def test_an_address_that_does_not_answer_holds_up_nobody_else(server: Server, case: tuple[str, str, str]) -> None:
    with waiting_for_an_address(server) as asking:
        for parts in ([text("To make bread")], [(3, 2, 1)]):
            messages = conversation(parts, side_of(case[0]))
            status, answer = server.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
            assert status == 200, answer
        assert select.select(asking, [], [], 0)[0] == [], "one that waits for its address was answered before"


def test_parts_of_text_are_the_same_tokens_beside_an_image(server: Server, case: tuple[str, str, str]) -> None:
    def rendered(*parts: Any) -> list[int]:
        messages = conversation([*parts], side_of(case[0]))
        status, answer = server.ask("/v1/chat/completions/render", {"messages": messages})
        assert status == 200, answer
        ids: list[int] = answer["token_ids"]
        return ids

    words = [text("To make bread"), text("you need flour.")]
    alone, pictured = rendered(*words), rendered(*words, (2, 2, 1))
    assert pictured[: len(alone)] != pictured
    place = next(place for place, ids in enumerate(zip(alone, pictured, strict=False)) if ids[0] != ids[1])
    assert pictured[place + 1] == pictured[place + 4] == 640  # what differs first is the image, after its start
    assert alone[place:] == pictured[place + 6 :]


def test_reasoning_is_rendered_by_either_name(server: Server) -> None:
    """vLLM's renderer takes one name, and stock's clients send the other."""
    question = {"role": "user", "content": "How many?"}

    def rendered(**answer: str) -> list[int]:
        messages = [question, {"role": "assistant", **answer}]
        status, answered = server.ask("/v1/chat/completions/render", {"messages": messages})
        assert status == 200, answered
        ids: list[int] = answered["token_ids"]
        return ids

    wanted = rendered(content="(the tide is out)Seventeen.")
    assert rendered(content="Seventeen.", reasoning_content="the tide is out") == wanted
    assert rendered(content="Seventeen.", reasoning="the tide is out") == wanted
    assert rendered(content="Seventeen.") != wanted


def refused(server: Server, content: Any, **more: Any) -> str:
    messages = [{"role": "user", "content": content}]
    status, answer = server.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 1, **more})
    assert status == 400, answer
    return str(answer["error"]["message"])


def test_what_cannot_be_taken_is_named_and_the_next_request_served(server: Server, case: tuple[str, str, str]) -> None:
    before, side = server.found(), side_of(case[0])
    picture = image((4, 6, 1), side)
    assert "message 0 holds a part of type 'video_url'" in refused(server, [{"type": "video_url", "video_url": {}}])
    assert "these messages with images cannot be taken" in refused(
        server, [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    )
    assert "allowed-local-media-path" in refused(
        server, [{"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}]
    )
    assert "is not cut" in refused(server, [picture, text("So many?")], truncate_prompt_tokens=20)
    refused(server, [image((7, 7, 1), side)] * 6)  # 294 tokens, and 255 fit
    stray = refused(server, [picture, text("a <|image_pad|> in the text")])
    assert "image" in stray
    status, answer = server.completion([5, 642, *[640] * 24, 643, 7])
    assert (status, "which is image_token_id in the config" in answer["error"]["message"]) == (400, True)
    assert server.found() == before
    status, answer = server.ask("/v1/chat/completions", {"messages": conversation([(3, 2, 1)], side), "max_tokens": 1})
    assert (status, answer["usage"]["prompt_tokens"] > 6) == (200, True)


def test_a_server_that_waits_for_an_address_ends_when_told(server: Server) -> None:
    """The last test of a server."""
    with waiting_for_an_address(server):
        server.process.terminate()
        assert server.process.wait(300) == 0, server.log[-4000:]


def test_where_positions_are_places_in_the_prompt_as_well(models: Path, references: Any, tmp_path: Path) -> None:
    """Kimi-K2.5: DeepSeek-V3, whose rotary positions count an image's tokens like words."""
    path = {"PYTHONPATH": str(vision.ensure(*MAKER))}
    with started(serve(python_of(*MAKER), models / "kimi_k25", tmp_path, *CHUNKS, **path)) as server:
        fetched = fetch(server, "kimi_k25", tmp_path, RELEASES[:1])
    compared("kimi_k25", fetched, references, tmp_path)


def test_images_that_vllm_computes_otherwise_than_the_model_are_refused(models: Path, tmp_path: Path) -> None:
    """Gemma 3's image tokens attend to each other, and in vLLM's attention for CPUs to those before them alone."""
    path, options = {"PYTHONPATH": str(vision.ensure(*MAKER))}, [*CHUNKS, "--skip-mm-profiling"]
    with started(serve(python_of(*MAKER), models / "gemma3", tmp_path, *options, **path)) as server:
        said = refused(server, [image((2, 2, 1), side_of("gemma3")), text("So many?")])
        assert "(gemma3), and vLLM's attention backend here (CPU_ATTN) has each attend to those before it alone" in said
        assert server.found() == set()
        status, answer = server.ask("/v1/chat/completions", {"messages": conversation(ASKED[0], 1), "max_tokens": 1})
        assert status == 200, answer
