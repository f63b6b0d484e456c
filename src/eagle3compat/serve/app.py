"""The endpoints that speculators' clients use, with vLLM's fields (vLLM 0.32), on the framework that vLLM brings."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..errors import InputError
from .batches import Batches, Job, StoppingError
from .chat import Prompt, Tokens, asks_for_images, cut
from .extractor import Extractor
from .files import discard
from .images import Images

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "user", "stop", "stop_token_ids", "ignore_eos", "min_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "skip_special_tokens",
)  # fmt: skip
"""Fields that change what is generated, of which there is nothing here, and not what the prompt's states are."""
COMMON = ("model", "return_token_ids", "truncate_prompt_tokens", "truncation_side", "add_special_tokens")
RENDERED = (
    "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs",
    "documents",
)  # fmt: skip
FIXED: Mapping[str, tuple[Any, ...]] = {
    "max_tokens": (1, None), "max_completion_tokens": (1, None), "n": (1, None), "stream": (False, None),
    "echo": (False, None), "best_of": (1, None), "logprobs": (False, None), "prompt_logprobs": (None,),
    "kv_transfer_params": ({}, None), "suffix": (None,), "prompt_embeds": (None,),
}  # fmt: skip
"""Fields that would ask for more than states, and the values of them that do not."""


FETCHES = 16
"""Conversations with images that are fetched at a time."""
T = TypeVar("T")


class NoModelError(Exception):
    """The request names a model that is not served here."""


class ClientGoneError(Exception):
    """The client has closed the connection."""


class Service:
    """Answers requests, over `batches`."""

    def __init__(self, extractor: Extractor, batches: Batches, names: tuple[str, ...]) -> None:
        self._extractor, self._batches, self._names = extractor, batches, names
        self._tokens = Tokens(extractor.model_config, Images(extractor.engine.vllm_config))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="eagle3compat-tokenizer")
        self._fetching = asyncio.Semaphore(FETCHES)

    def app(self) -> Starlette:
        posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/v1/completions": self._completion,
            "/v1/chat/completions": self._chat,
            "/v1/chat/completions/render": self._render,
        }
        routes = [Route(path, answered(endpoint), methods=["POST"]) for path, endpoint in posts.items()]
        routes += [Route("/health", self._health), Route("/v1/models", self._models)]
        return Starlette(routes=routes, exception_handlers={404: _not_here, 405: _not_here})

    async def _health(self, _request: Request) -> Response:
        return Response(status_code=503 if self._extractor.dead else 200)

    async def _models(self, _request: Request) -> Response:
        root, length = str(self._extractor.model_config.model), int(self._extractor.model_config.max_model_len)
        rows = [
            {"id": name, "object": "model", "created": int(time.time()), "owned_by": "eagle3compat", "root": root,
             "parent": None, "max_model_len": length}
            for name in self._names
        ]  # fmt: skip
        return JSONResponse({"object": "list", "data": rows})

    async def _completion(self, request: Request) -> Response:
        body = await self._body(request, ("prompt",))
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (list, str)):
            (prompt,) = prompt
        if isinstance(prompt, str):
            prompt = await self._in_thread(self._tokens.of_text, prompt, bool(body.get("add_special_tokens", True)))
        elif not isinstance(prompt, list) or any(isinstance(part, (list, str)) for part in prompt):
            raise InputError("prompt is not one list of token ids, nor one text. Send one prompt a request.")
        tokens = self._checked(Prompt(prompt), body, self._extractor.limit)
        name = named("cmpl")
        path = await self._computed(request, Job(name, tokens))
        choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None}
        if body.get("return_token_ids"):
            choice.update(prompt_token_ids=tokens, token_ids=[])
        return self._answer(name, "text_completion", choice, tokens, path)

    async def _chat(self, request: Request) -> Response:
        body = await self._body(request, RENDERED)
        name = named("chatcmpl")
        prompt = await self._of_chat(request, body, name)
        tokens = self._checked(prompt, body, self._extractor.limit)
        path = await self._computed(request, Job(name, tokens, prompt.features))
        message = {"role": "assistant", "content": ""}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length", "stop_reason": None}
        ids = {"prompt_token_ids": tokens} if body.get("return_token_ids") else {}
        return self._answer(name, "chat.completion", choice, tokens, path, **ids)

    async def _render(self, request: Request) -> Response:
        body = await self._body(request, RENDERED)
        name = named("chatcmpl")
        prompt = await self._of_chat(request, body, name)
        tokens = self._checked(prompt, body, self._extractor.limit + 1)
        return JSONResponse({"request_id": name, "model": self._names[0], "token_ids": tokens})

    async def _body(self, request: Request, fields: tuple[str, ...]) -> dict[str, Any]:
        """The request's object. Raises InputError for a field that would be ignored, NoModelError."""
        try:
            body = json.loads(await request.body())
        except (ValueError, RecursionError) as error:
            raise InputError(f"the body of the request is not JSON, or too deep: {error}") from error
        if not isinstance(body, dict):
            raise InputError("the body of the request is not a JSON object.")
        if body.get("model", self._names[0]) not in (*self._names, None):
            raise NoModelError(f"there is no model {body['model']!r} here. Served: {', '.join(self._names)}.")
        for name, value in body.items():
            if name in FIXED:
                if value not in FIXED[name]:
                    allowed = " or ".join("none" if v is None else json.dumps(v) for v in FIXED[name])
                    raise InputError(
                        f"{name} is {json.dumps(value)[:80]}; this server extracts hidden states and generates "
                        f"nothing. Send {allowed}."
                    )
            elif name not in (*COMMON, *SAMPLING, *fields):
                raise InputError(f"the field {name!r} is not known here, and would be ignored. Leave it out.")
        return body

    def _checked(self, prompt: Prompt, body: Mapping[str, Any], limit: int) -> list[int]:
        tokens = cut(prompt.tokens, body, limit)
        if prompt.features and len(tokens) != len(prompt.tokens):
            raise InputError(
                f"the prompt has {len(prompt.tokens)} tokens with its images, and truncate_prompt_tokens leaves "
                f"{len(tokens)}. A conversation with an image is not cut: shorten it, or leave the sample out."
            )
        return self._extractor.checked(tokens, limit, prompt.spans)

    async def _of_chat(self, request: Request, body: Mapping[str, Any], name: str) -> Prompt:
        """The prompt of a conversation. One with images waits for their addresses, and holds up no other."""
        if not asks_for_images(body):
            prompt: Prompt = await self._in_thread(self._tokens.of_chat, body, name)
            return prompt

        async def fetched() -> Prompt:
            async with self._fetching:
                return await asyncio.wrap_future(in_daemon(self._tokens.of_chat, body, name))

        return await unless_gone(request, asyncio.ensure_future(fetched()))

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _computed(self, request: Request, job: Job) -> Path:
        """The request's file once that is whole. A client that goes away leaves no file behind."""
        self._batches.submit(job)
        try:
            return await unless_gone(request, asyncio.wrap_future(job.path))
        except (ClientGoneError, asyncio.CancelledError):
            job.path.add_done_callback(forget)
            raise

    def _answer(
        self, name: str, kind: str, choice: dict[str, Any], tokens: list[int], path: Path, **more: Any
    ) -> Response:
        usage = {"prompt_tokens": len(tokens), "completion_tokens": 0, "total_tokens": len(tokens)}
        return JSONResponse({
            "id": name, "object": kind, "created": int(time.time()), "model": self._names[0], "choices": [choice],
            "usage": usage, "kv_transfer_params": {"hidden_states_path": str(path)}, **more,
        })  # fmt: skip


def named(kind: str) -> str:
    """A request's id, of which there is no other."""
    return f"{kind}-{uuid.uuid4().hex}"


def forget(path: Future[Path]) -> None:
    """Remove the file of a request whose client is gone."""
    if not path.cancelled() and path.exception() is None:
        discard(path.result())


async def unless_gone(request: Request, waiting: asyncio.Future[T]) -> T:
    """What is waited for. Raises ClientGoneError, and cancels it, once the client has closed the connection."""
    leaving = asyncio.ensure_future(disconnected(request))
    either: set[asyncio.Future[Any]] = {waiting, leaving}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise ClientGoneError
        return waiting.result()
    finally:
        leaving.cancel()
        waiting.cancel()


def in_daemon(function: Callable[..., T], *arguments: Any) -> Future[T]:
    """Run it in a thread that does not keep the process from ending: an address may not answer for minutes."""
    future: Future[T] = Future()

    def work() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function(*arguments)
        except BaseException as error:  # noqa: BLE001  it is whoever waits for it that is told
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, name="eagle3compat-images", daemon=True).start()
    return future


async def disconnected(request: Request) -> None:
    """Return once the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        continue


def answered(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint, its exceptions as OpenAI's error objects."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except InputError as error:
            return failed(400, "BadRequestError", error)
        except NoModelError as error:
            return failed(404, "NotFoundError", error)
        except StoppingError as error:
            return failed(503, "ServiceUnavailableError", error)
        except asyncio.CancelledError:  # uvicorn ends what takes longer than its grace, and would say nothing
            return failed(503, "ServiceUnavailableError", StoppingError())
        except ClientGoneError:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:  # noqa: BLE001  the client is told, and the next request is served
            return failed(500, "InternalServerError", error)

    return answer


def failed(code: int, kind: str, error: Exception) -> Response:
    message = (str(error) or type(error).__name__).encode(errors="backslashreplace").decode()
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, status_code=code)


async def _not_here(request: Request, error: Any) -> Response:
    if error.status_code == 405:
        said = f"{request.url.path} does not take {request.method}."
        return failed(405, "MethodNotAllowedError", Exception(said))
    return failed(404, "NotFoundError", Exception(f"there is no endpoint {request.url.path} here."))
