"""Conversations with images: what is taken, what vLLM is asked, and what is refused. vLLM is a stand-in."""

from __future__ import annotations

import re
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from eagle3compat.capture.attention import one_way_backends
from eagle3compat.errors import InputError
from eagle3compat.serve.chat import Prompt, Tokens, asks_for_images, has_image, with_reasoning
from eagle3compat.serve.images import Images
from eagle3compat.serve.together import fault_of_images

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
WORDS = {"type": "text", "text": "a"}
BAD = {"role": "user", "content": "bad"}


def test_messages_are_of_text_and_images() -> None:
    assert not has_image({"role": "user", "content": "a"}, 0)
    assert not has_image({"role": "user", "content": [WORDS]}, 0)
    assert has_image({"role": "user", "content": [WORDS, PICTURE]}, 0)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user", "content": [{"type": "audio_url"}]}, "message 2 holds a part of type 'audio_url'; this"),
        ({"role": "user", "content": [PICTURE, {"type": "video_url"}]}, "message 2 holds a part of type 'video_url'"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "of type 'text' whose text is no string"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "a part of type 'image_url' without image_url.url"),
        ({"role": "user", "content": [{**PICTURE, "image_url": {"url": 5}}]}, "without image_url.url"),
        ({"role": "user", "content": [{**PICTURE, "image_url": {"url": ""}}]}, "without image_url.url"),
        ({"role": "user", "content": ["a"]}, "message 2 holds a part of type 'str'"),
        ({"role": "user", "content": {"a": 1}}, "the content of message 2 is {'a': 1}, not text or a list of parts"),
        ({"role": "user", "content": 5}, "the content of message 2 is 5, not text or a list of parts"),
        ("hello", "message 2 is no object with a role"),
    ],
)
def test_other_messages_are_refused_by_name(message: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        has_image(message, 2)


def characters(text: str) -> list[int]:
    return [*map(ord, text)]


class FakeImages:
    """Renders a conversation to its text, and keeps what it was asked; text alone if it `renders`."""

    def __init__(self, renders: bool = True) -> None:
        self.renders = renders
        self.asked: list[Any] = []

    def of_chat(
        self, messages: Any, options: Any, request: str, tokens_of: Any, pictured: bool = True
    ) -> Prompt | None:
        self.asked = [dict(options), request]
        if not pictured:
            return Prompt(tokens_of("vLLM's")) if self.renders else None
        return Prompt(tokens_of(messages[0]["content"][0]["text"]), ("an image",))


def test_conversations_with_images_are_vllms_to_render(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokens, "_tokenizer", lambda self: lambda text, **more: {"input_ids": characters(text)})
    images = FakeImages()
    tokens = Tokens(SimpleNamespace(is_multimodal_model=True), images)
    body = {"messages": [{"role": "user", "content": [WORDS, PICTURE]}], "chat_template_kwargs": {"thinking": False}}
    assert tokens.of_chat(body, "chatcmpl-1") == Prompt([97], ("an image",))
    assert images.asked == [{"add_generation_prompt": True, "thinking": False, "tools": None}, "chatcmpl-1"]


@pytest.mark.parametrize(
    ("multimodal", "renders", "rendered"),
    [(True, True, "vLLM's"), (True, False, "<a>"), (False, True, "<a>")],
)
def test_text_is_rendered_as_beside_an_image(
    multimodal: bool, renders: bool, rendered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokens, "_tokenizer", lambda self: Template(parts=True))
    tokens = Tokens(SimpleNamespace(is_multimodal_model=multimodal), FakeImages(renders))
    assert tokens.of_chat({"messages": [{"role": "user", "content": "a"}]}) == Prompt(characters(rendered))


@pytest.mark.parametrize(
    ("body", "asks"),
    [
        ({"messages": [{"role": "user", "content": [WORDS, PICTURE]}]}, True),
        ({"messages": [{"role": "user", "content": [WORDS]}, {"role": "user", "content": "image_url"}]}, False),
        ({"messages": "image_url"}, False),
        ({"messages": [5, {"content": 5}, {"content": [5, None]}]}, False),
        ({}, False),
    ],
)
def test_who_asks_for_images_is_told_whatever_else_is_sent(body: Any, asks: bool) -> None:
    assert asks_for_images(body) is asks


class Template:
    """A tokenizer whose chat template takes parts, or text alone, as most do that are for text."""

    def __init__(self, parts: bool) -> None:
        self.parts = parts

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        (message,) = messages
        if isinstance(message["content"], str) or not self.parts:
            return f"<{message['content']}>"
        return "<" + "".join(part["text"] for part in message["content"]) + ">"

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": characters(text)}


@pytest.mark.parametrize(("parts", "rendered"), [(True, "<ab>"), (False, "<a\nb>")])
def test_parts_of_text_are_rendered_as_the_template_takes_them(
    parts: bool, rendered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokens, "_tokenizer", lambda self: Template(parts))
    tokens = Tokens(SimpleNamespace(is_multimodal_model=False))
    body = {"messages": [{"role": "user", "content": [WORDS, {"type": "text", "text": "b"}]}]}
    assert tokens.of_chat(body) == Prompt(characters(rendered))


ASKED = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"add_generation_prompt": "no"}, "add_generation_prompt is 'no', neither true nor false"),
        ({"chat_template_kwargs": {"continue_final_message": 1}}, "continue_final_message is 1, neither"),
        (
            {"add_generation_prompt": True, "chat_template_kwargs": {"add_generation_prompt": False}},
            "add_generation_prompt is True in the request and False in its chat_template_kwargs",
        ),
    ],
)
def test_options_that_could_be_taken_in_two_ways_are_refused(fields: dict[str, Any], says: str) -> None:
    images = FakeImages()
    with pytest.raises(InputError, match=says):
        Tokens(SimpleNamespace(is_multimodal_model=True), images).of_chat({"messages": ASKED, **fields})


@pytest.mark.parametrize(("fields", "found"), [({}, [1]), ({"tools": [2]}, [2])])
def test_tools_are_taken_from_either_place(
    fields: dict[str, Any], found: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokens, "_tokenizer", lambda self: lambda text, **more: {"input_ids": characters(text)})
    images = FakeImages()
    tokens = Tokens(SimpleNamespace(is_multimodal_model=True), images)
    tokens.of_chat({"messages": ASKED, "chat_template_kwargs": {"tools": [1]}, **fields})
    assert images.asked[0]["tools"] == found


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_has_both_of_its_names(name: str) -> None:
    message = {"role": "assistant", "content": "a", name: "b"}
    assert with_reasoning(message) == {
        "role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": "b"
    }  # fmt: skip
    assert with_reasoning(ASKED[0]) == ASKED[0]


def test_a_model_of_text_takes_no_image() -> None:
    tokens = Tokens(SimpleNamespace(is_multimodal_model=False, model="m"), FakeImages())
    with pytest.raises(InputError, match="message 1 holds a part of type 'image_url', and vLLM runs m for text only"):
        tokens.of_chat({"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [PICTURE]}]})


def feature(offset: int, length: int) -> Any:
    return SimpleNamespace(mm_position=SimpleNamespace(offset=offset, length=length))


def test_a_prompt_says_where_its_images_are() -> None:
    assert Prompt([1] * 9, (feature(2, 3), feature(6, 1))).spans == ((2, 5), (6, 7))


class Older:
    """vLLM's Request before it took features."""

    def __init__(self, request_id: str) -> None: ...


class Request(Older):
    def __init__(self, request_id: str, mm_features: Any) -> None: ...


class Tokenizer:
    """Of transformers."""


class FakeVllm:
    """What is needed of vLLM for images, as modules."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, takes_features: bool = True, renders: bool = True, own: bool = False
    ) -> None:
        self.asked: list[Any] = []
        self.entered, self.go = threading.Event(), threading.Event()
        self.go.set()
        tokenizer = object() if own else Tokenizer()
        known = {"render_messages": self.render_messages, "get_tokenizer": lambda: tokenizer}
        renderer = SimpleNamespace(**known) if renders else None
        self.module(monkeypatch, "transformers", PreTrainedTokenizerBase=Tokenizer)
        made = SimpleNamespace(renderer=renderer, process_inputs=self.process_inputs)
        self.module(monkeypatch, "vllm", SamplingParams=lambda **fields: fields)
        self.module(monkeypatch, "vllm.renderers")
        self.module(monkeypatch, "vllm.renderers.params", ChatParams=dict)
        for name in ("vllm.v1", "vllm.v1.engine"):
            self.module(monkeypatch, name)
        self.module(monkeypatch, "vllm.v1.engine.input_processor", InputProcessor=lambda config: made)
        self.module(monkeypatch, "vllm.v1.request", Request=Request if takes_features else Older)

    @staticmethod
    def module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
        found = ModuleType(name)
        found.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, found)

    def render_messages(self, messages: Any, params: Any) -> Any:
        self.asked.append(params)
        if messages == [BAD]:
            raise RuntimeError("no such file")
        if params["chat_template_kwargs"]["tokenize"]:
            return None, {"prompt_token_ids": [7, 8], "multi_modal_data": {"image": [1]}}
        return None, {"prompt": "ab", "multi_modal_data": {"image": [1]}}

    def process_inputs(self, request: str, prompt: Any, params: Any, supported_tasks: Any) -> Any:
        self.entered.set()
        assert self.go.wait(120)
        self.asked += [request, prompt, supported_tasks]
        return SimpleNamespace(prompt_token_ids=(1, 2, 2), mm_features=[feature(1, 2)])


def test_images_are_processed_by_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = FakeVllm(monkeypatch)
    prompt = Images(None).of_chat([], {"tools": None}, "name", characters)
    assert prompt is not None
    assert (prompt.tokens, prompt.spans) == ([1, 2, 2], ((1, 3),))
    rendered = {"prompt_token_ids": [97, 98], "multi_modal_data": {"image": [1]}}
    assert vllm.asked == [
        {"chat_template_kwargs": {"tools": None, "tokenize": False}}, "name", rendered, ("generate",)
    ]  # fmt: skip


def test_text_is_rendered_by_vllm_and_not_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = FakeVllm(monkeypatch)
    assert Images(None).of_chat([], {}, "name", characters, pictured=False) == Prompt([97, 98])
    assert vllm.asked == [{"chat_template_kwargs": {"tokenize": False}}]
    with pytest.raises(InputError, match="these messages cannot be rendered: RuntimeError: no such file"):
        Images(None).of_chat([BAD], {}, "name", characters, pictured=False)
    FakeVllm(monkeypatch, renders=False)
    assert Images(None).of_chat([], {}, "name", characters, pictured=False) is None


def test_a_tokenizer_of_vllms_own_makes_tokens_as_it_renders(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeVllm(monkeypatch, own=True)
    assert Images(None).of_chat([], {}, "name", characters, pictured=False) == Prompt([7, 8])


def test_text_does_not_wait_for_images(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm, images = FakeVllm(monkeypatch), Images(None)
    vllm.go.clear()
    processing = threading.Thread(target=lambda: images.of_chat([], {}, "name", characters))
    processing.start()
    assert vllm.entered.wait(120)
    assert images.of_chat([], {}, "name", characters, pictured=False) == Prompt([97, 98])
    assert processing.is_alive()
    vllm.go.set()
    processing.join()


def test_what_vllm_refuses_is_the_requests_error(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeVllm(monkeypatch)
    with pytest.raises(InputError, match="these messages with images cannot be taken: RuntimeError: no such file"):
        Images(None).of_chat([BAD], {}, "name", characters)


@pytest.mark.parametrize(
    ("without", "says"),
    [
        ({"takes_features": False}, "Request of this vLLM takes no mm_features"),
        ({"renders": False}, "the input processor of this vLLM has no renderer"),
        ({}, "this vLLM does not have what images need .*input_processor"),
    ],
)
def test_a_vllm_without_what_images_need_is_named(
    without: dict[str, bool], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeVllm(monkeypatch, **without)
    if not without:
        monkeypatch.setitem(sys.modules, "vllm.v1.engine.input_processor", None)
    with pytest.raises(InputError, match=f"{says}.*Leave images out, or serve with a vLLM that has it"):
        Images(None).of_chat([], {}, "name", characters)


class TwoWay:
    """An attention backend; `supports_mm_prefix` is vLLM's word for tokens of an image that attend to each other."""

    @staticmethod
    def get_name() -> str:
        return "TRITON_ATTN"

    @staticmethod
    def supports_mm_prefix() -> bool:
        return True


class OneWay(TwoWay):
    get_name = staticmethod(lambda: "CPU_ATTN")
    supports_mm_prefix = staticmethod(lambda: False)


class Unsaid:
    """A backend of before vLLM asked that."""

    get_name = staticmethod(lambda: "OLD_ATTN")


@pytest.mark.parametrize(
    ("wanted", "backends", "found"),
    [
        (True, [TwoWay, TwoWay], []),
        (True, [TwoWay, OneWay, OneWay], ["CPU_ATTN"]),
        (True, [Unsaid], ["OLD_ATTN"]),
        (True, [], ["unknown"]),
        (False, [OneWay], []),
    ],
)
def test_backends_that_compute_images_otherwise_than_the_model(
    wanted: bool, backends: list[Any], found: list[str]
) -> None:
    layers: dict[str, Any] = {str(n): SimpleNamespace(get_attn_backend=lambda b=b: b) for n, b in enumerate(backends)}
    context = SimpleNamespace(static_forward_context={**layers, "experts": object()})
    config = SimpleNamespace(compilation_config=context)
    runner = SimpleNamespace(model_config=SimpleNamespace(is_mm_prefix_lm=wanted), vllm_config=config)
    assert one_way_backends(runner) == found


def config_of(together: bool, **scheduler: Any) -> Any:
    model = SimpleNamespace(model="m", hf_config=SimpleNamespace(model_type="gemma3"), is_mm_prefix_lm=together)
    return SimpleNamespace(model_config=model, scheduler_config=SimpleNamespace(**scheduler))


@pytest.mark.parametrize(
    ("one_way", "scheduler", "says"),
    [
        (["CPU_ATTN"], {}, r"in m \(gemma3\), and vLLM's attention backend here \(CPU_ATTN\) has each.*a GPU"),
        ([], {"disable_chunked_mm_input": False}, "and a step may hold a part.*with --disable-chunked-mm-input"),
        ([], {}, "and a step may hold a part"),
        ([], {"disable_chunked_mm_input": True, "long_prefill_token_threshold": 20}, "steps of 20.*Leave that option"),
    ],
)
def test_images_that_would_be_computed_otherwise_than_the_model(
    one_way: list[str], scheduler: dict[str, Any], says: str
) -> None:
    assert re.search(says, fault_of_images(config_of(True, **scheduler), one_way))
    assert fault_of_images(config_of(False, **scheduler), []) == ""


def test_images_whole_in_a_step_are_as_the_model_has_them() -> None:
    config = config_of(True, disable_chunked_mm_input=True, long_prefill_token_threshold=0)
    assert fault_of_images(config, []) == ""
