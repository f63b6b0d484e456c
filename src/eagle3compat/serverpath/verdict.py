"""Whether stock's client and a vLLM server together give right files, with which settings, and else what to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from .facts import ClientFacts, ServerFacts

NO_LIBRARY = "no library: vLLM 0.31 or later with speculators 0.6 or later"
ADAPTED = "EAGLE3COMPAT=strict in the server's environment, where this library is installed"
"""What makes the plugin do what a finding asks for."""
SERVE = "`eagle3compat serve`, which answers the same requests from this library's own capture"


class Effect(str, Enum):
    """What a finding amounts to, the worst first."""

    REFUSED = "refused"
    SETTING = "setting"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One mechanism that decides something; `setting` is what to pass, empty where nothing helps or is needed."""

    id: str
    effect: Effect
    what: str
    setting: str = ""
    remedy: str = ""
    adapted: bool = False
    """Whether this library does it, in a server that has it and was asked (`adapt`)."""


@dataclass(frozen=True)
class ServerVerdict:
    """What `doctor` says about one client and one server."""

    client: str
    server: str
    client_facts: ClientFacts
    server_facts: ServerFacts
    findings: tuple[Finding, ...]

    @property
    def effect(self) -> str:
        """`right`, `right with settings`, or `refused`."""
        effects = {finding.effect for finding in self.findings}
        if Effect.REFUSED in effects:
            return "refused"
        return "right with settings" if Effect.SETTING in effects else "right"

    @property
    def refused(self) -> bool:
        return self.effect == "refused"

    @property
    def settings(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(finding.setting for finding in self.findings if finding.setting))

    @property
    def remedy(self) -> str:
        """The shortest way to right files; empty where the pair has it already."""
        remedies = [finding.remedy for finding in self.findings if finding.effect is Effect.REFUSED]
        if remedies:
            return SERVE if SERVE in remedies else remedies[0]
        return f"pass {', '.join(self.settings)}" if self.settings else ""

    def as_dict(self) -> dict[str, Any]:
        """Plain data, fit for JSON."""
        return {
            "verdict": self.effect,
            "client": self.client,
            "server": self.server,
            "settings": list(self.settings),
            "remedy": self.remedy,
            "findings": [{**asdict(finding), "effect": finding.effect.value} for finding in self.findings],
            "facts": {"client": self.client_facts.as_dict(), "server": self.server_facts.as_dict()},
        }


def judge(
    client: str, client_facts: ClientFacts, server: str, server_facts: ServerFacts, cpu_build: bool = False
) -> ServerVerdict:
    """The verdict on a client and a server; `client` and `server` are how they are called."""
    findings = sorted(_findings(client_facts, server_facts, cpu_build), key=lambda f: list(Effect).index(f.effect))
    return ServerVerdict(client, server, client_facts, server_facts, tuple(findings))


def _findings(client: ClientFacts, server: ServerFacts, cpu_build: bool) -> Iterator[Finding]:
    elsewhere = SERVE if cpu_build else f"{SERVE}; or {NO_LIBRARY}"
    if not server.method:
        what = "this vLLM has no method `extract_hidden_states`: its server does not start"
        yield Finding("no method", Effect.REFUSED, what, remedy=elsewhere, adapted=True)
        return
    if not server.last_layer:
        what = (
            "this vLLM never takes the last layer's states, which stock's launcher asks for: "
            "the engine dies on the first request"
        )
        yield Finding("last layer", Effect.REFUSED, what, remedy=elsewhere)
        return
    if cpu_build and not server.on_cpu:
        yield Finding("cpu", Effect.REFUSED, "this vLLM's CPU build cannot run the method", remedy=SERVE)
    yield from _rows(server)
    if server.background_write and not client.waits:
        yield Finding(
            "race", Effect.REFUSED,
            "the answer comes before the file is whole, and this client does not wait for the file's lock: "
            "samples are lost",
            remedy=f"speculators 0.6 or later, whose client waits; or {ADAPTED}",
            adapted=True,
        )
    if server.abort_kills:
        yield Finding(
            "abort", Effect.SETTING,
            "a request that is given up before it was scheduled ends the engine: none may time out in the queue",
            setting="client: a larger --request-timeout, or a smaller --concurrency",
            adapted=True,
        )
    if client.renders:
        yield from _render(client, server)
    yield from _models(server)


def _rows(server: ServerFacts) -> Iterator[Finding]:
    """Whose rows are in the files."""
    if server.refuses_chunks:
        yield Finding(
            "start", Effect.SETTING, "the server does not start where a prompt may be split across steps",
            setting="server: --no-enable-chunked-prefill", adapted=True,
        )
    elif not server.saves_at_end:
        yield Finding(
            "chunks", Effect.SETTING, "a prompt that is split across steps may end in stale or zero rows, unseen",
            setting="server: --no-enable-chunked-prefill", adapted=True,
        )
    if server.step_rows:
        yield Finding(
            "prefix caching", Effect.SETTING,
            "rows are taken by what a step computes, so a prompt that shares a prefix with an earlier one, and those "
            "beside it, get others' rows, unseen; files made so must be made again",
            setting="server: --no-enable-prefix-caching", adapted=True,
        )


def _render(client: ClientFacts, server: ServerFacts) -> Iterator[Finding]:
    """What `prepare-data` meets; a data set that is prepared already does not need it."""
    if not server.render:
        yield Finding("render", Effect.NOTE, "`prepare-data` needs a render endpoint, which this vLLM lacks")
    elif server.render_gated:
        yield Finding(
            "render", Effect.SETTING, "`prepare-data` gets 403 from the render endpoint, which is closed by default",
            setting="server: --enable-scale-out (for `prepare-data`)", adapted=True,
        )
    if server.render and client.truncates and not server.render_truncates:
        yield Finding(
            "truncation", Effect.NOTE,
            "`prepare-data` has long turns cut on the right, and this vLLM cuts them on the left: turns that do not "
            "fit --seq-length are dropped",
        )


def _models(server: ServerFacts) -> Iterator[Finding]:
    """What depends on the model."""
    if server.partial_models:
        yield Finding(
            "models", Effect.NOTE, f"the last layer's states are never taken from: {', '.join(server.partial_models)}",
            remedy=SERVE,
        )
    if server.own_group:
        yield Finding("mla", Effect.NOTE, "the connector refuses models with MLA at the start", remedy=SERVE)
    else:
        what = "hybrid models (Mamba, linear attention) get zeros or others' rows, unseen"
        yield Finding("hybrid", Effect.NOTE, what, remedy=SERVE)

