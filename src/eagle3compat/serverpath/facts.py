"""What decides whether a server's answers and files are right, read from the source of vLLM and of the client.

Nothing is imported and no version is looked at: a fact is a mechanism that is in the code or is not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..syntax import Module

METHOD = "extract_hidden_states"
CONNECTOR = "ExampleHiddenStatesConnector"
RENDER = "/v1/chat/completions/render"
_CONNECTOR_FILE = ("distributed", "kv_transfer", "kv_connector", "v1", "example_hidden_states_connector.py")


@dataclass(frozen=True)
class ServerFacts:
    """One vLLM. Where it lacks the method, only `method` means anything."""

    method: bool
    """Its speculative configuration knows the method, and it has the connector that writes the files."""
    last_layer: bool
    """Llama's forward also takes the stream after its last layer, which stock's launcher asks for."""
    partial_models: tuple[str, ...]
    """The model files whose forward takes layers and never the last one."""
    saves_at_end: bool
    """The connector reads a prompt's rows once it is finished, not in each step that computes a part of it."""
    refuses_chunks: bool
    """The configuration refuses the connector where a prompt may be split across steps."""
    step_rows: bool
    """The connector takes rows by what this step computes, so that those of a cached prefix are not among them."""
    own_group: bool
    """The connector finds its rows by the kind of their KV cache group, so that hybrid models have theirs."""
    background_write: bool
    """The file is written by another thread, and the answer does not wait for it."""
    abort_kills: bool
    """A request that ends before it was scheduled raises in the scheduler, and the engine ends."""
    on_cpu: bool
    """The CPU model runner knows the method."""
    render: bool
    """It has the route that renders a chat to token ids, and answers an object."""
    render_gated: bool
    """That route is open only with `--enable-scale-out`."""
    render_truncates: bool
    """A chat request says from which side it is cut."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ClientFacts:
    """One speculators."""

    server_path: bool
    """It extracts through a server."""
    waits: bool
    """It waits for the lock beside a file before it reads the file."""
    renders: bool
    """Its `prepare-data` has chats rendered by the server."""
    truncates: bool
    """It has them cut, and says from which side."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def server_facts(vllm: Path) -> ServerFacts:
    """Of the vLLM whose `__init__.py` is in this folder. Raises SourceNotFoundError for a file that does not parse."""
    connector = _find(vllm.joinpath(*_CONNECTOR_FILE))
    save, finished = _function(connector, "save_kv_layer"), _function(connector, "request_finished")
    return ServerFacts(
        method=bool(save) and METHOD in _strings(_find(vllm / "config" / "speculative.py")),
        last_layer=_takes_last_layer(_find(vllm / "model_executor" / "models" / "llama.py")) is True,
        partial_models=tuple(_partial_models(vllm)),
        saves_at_end=save is not None and not _does_something(save),
        refuses_chunks=_refuses_chunks(_find(vllm / "config" / "vllm.py")),
        step_rows=any(_name(call.func) == "get_forward_context" for call in _calls(save)),
        own_group=any(
            _name(call.func) == "isinstance" and any(_name(n) == "HiddenStateCacheSpec" for n in call.args)
            for call in _calls(connector)
        ),
        background_write=any(_name(call.func) == "submit" for call in _calls(connector)),
        abort_kills=any(
            _name(call.func) == "pop" and len(call.args) == 1 and not call.keywords for call in _calls(finished)
        ),
        on_cpu=METHOD in _strings(_find(vllm / "v1" / "worker" / "cpu_model_runner.py")),
        **_render(vllm / "entrypoints"),
    )


def client_facts(speculators: Path) -> ClientFacts:
    """Of the speculators in this folder. Raises SourceNotFoundError for a file that does not parse."""
    generation = speculators / "data_generation"
    client, render = _find(generation / "vllm_client.py"), _find(generation / "render_client.py")
    chats = _calls(_find(generation / "preprocessing.py"))
    cuts = (call for call in chats if _name(call.func) == "render_conversation")
    return ClientFacts(
        server_path=client is not None,
        waits=any(_name(call.func) == "flock" for call in _calls(client)),
        renders=any(text.endswith(RENDER) for text in _strings(render)),
        truncates=any(keyword.arg == "truncation_side" for call in cuts for keyword in call.keywords),
    )


def _render(entrypoints: Path) -> dict[str, bool]:
    found = {"render": False, "render_gated": False, "render_truncates": False}
    for file in sorted(entrypoints.rglob("*.py")):
        text = file.read_bytes()
        if RENDER.encode() in text:
            for call in (call for call in _calls(_find(file)) if RENDER in _strings_of(call.args)):
                answers = next((k.value for k in call.keywords if k.arg == "response_model"), None)
                found["render"] = found["render"] or (answers is not None and _name(answers) != "list")
        if b"enable_scale_out" in text and b"include_router" in text:
            for function in (n for n in _walk(_find(file)) if isinstance(n, ast.FunctionDef)):
                routes = any(_name(call.func) == "include_router" for call in _calls(function))
                found["render_gated"] |= routes and "enable_scale_out" in {*_strings(function), *_attributes(function)}
    chat = _find(entrypoints / "openai" / "chat_completion" / "protocol.py")
    found["render_truncates"] = any(
        isinstance(node, ast.AnnAssign) and _name(node.target) == "truncation_side" for node in _walk(chat)
    )
    return found


def _refuses_chunks(config: ast.AST | None) -> bool:
    """Whether a test of the connector's name and of chunked prefill leads to a `raise`."""
    return any(
        isinstance(node, ast.If)
        and CONNECTOR in _strings(node.test)
        and "enable_chunked_prefill" in _attributes(node.test)
        and any(isinstance(inner, ast.Raise) for inner in node.body)
        for node in _walk(config)
    )


def _partial_models(vllm: Path) -> Iterator[str]:
    for file in sorted((vllm / "model_executor" / "models").glob("*.py")):
        if b"aux_hidden_states.append" in file.read_bytes() and _takes_last_layer(_find(file)) is False:
            yield file.stem


def _takes_last_layer(model: ast.AST | None) -> bool | None:
    """Whether some forward takes a stream after the last call of a layer; None where none takes any."""
    verdict = None
    for forward in _walk(model):
        if not isinstance(forward, ast.FunctionDef):
            continue
        taken = [call.lineno for call in _calls(forward) if _takes_stream(call)]
        layers = [call.lineno for loop in _walk(forward) if isinstance(loop, ast.For) for call in _layer_calls(loop)]
        if taken and layers:
            verdict = bool(verdict) or max(taken) > max(layers)
    return verdict


def _takes_stream(call: ast.Call) -> bool:
    holder = call.func.value if isinstance(call.func, ast.Attribute) else None
    appended = _name(call.func) == "append" and _name(holder) == "aux_hidden_states"
    return appended or _name(call.func) == "_maybe_add_hidden_state"


def _layer_calls(loop: ast.For) -> Iterator[ast.Call]:
    """The calls in a loop's body of what the loop goes over."""
    targets = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    for call in (call for statement in loop.body for call in _calls(statement)):
        if isinstance(call.func, ast.Name) and call.func.id in targets:
            yield call


def _does_something(function: ast.FunctionDef) -> bool:
    """Whether it is more than a docstring and `pass`."""
    return any(
        not isinstance(node, ast.Pass) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in function.body
    )


def _find(file: Path) -> ast.Module | None:
    """The file's tree; None if there is no such file."""
    return Module(file.stem, file).require_source() if file.is_file() else None


def _function(tree: ast.AST | None, name: str) -> ast.FunctionDef | None:
    return next((node for node in _walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name), None)


def _walk(tree: ast.AST | None) -> Iterator[ast.AST]:
    return ast.walk(tree) if tree is not None else iter(())


def _calls(tree: ast.AST | None) -> Iterator[ast.Call]:
    return (node for node in _walk(tree) if isinstance(node, ast.Call))


def _strings(tree: ast.AST | None) -> set[str]:
    return {node.value for node in _walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _strings_of(nodes: list[ast.expr]) -> set[str]:
    return {text for node in nodes for text in _strings(node)}


def _attributes(tree: ast.AST | None) -> set[str]:
    return {node.attr for node in _walk(tree) if isinstance(node, ast.Attribute)}


def _name(node: ast.AST | None) -> str:
    """The last part of a dotted name; empty for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
