"""Stock clients of a server, unmodified, as stock's own worker uses them: `python serve_client.py SITE JOB.json OUT`.

SITE is a folder into which one release of speculators was installed without its dependencies. The package's own
`__init__` imports models and training; it is left out, and `vllm_client` and `render_client` are imported as they are.

JOB has `url`, `prompts` (token ids), `concurrency` and, for releases that have them, `conversation`. OUT gets
`hs_N.safetensors` and `report.json`.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import openai

TIMEOUT = 600
"""Seconds, which users may set (`--request-timeout`): on a busy machine 0.5.0's own 15 are short for a first batch, and
so are openai's 5 for a connection, and the 10 and 30 that stock's clients give a lock and the render endpoint."""


def stock(site: Path, name: str) -> Any:
    package = ModuleType("speculators")
    package.__path__ = [str(site / "speculators")]
    sys.modules.setdefault("speculators", package)
    return importlib.import_module(f"speculators.data_generation.{name}")


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0, timeout=TIMEOUT)


async def fetch(client: Any, stock_client: Any, model: str, item: dict[str, Any], target: Path) -> None:
    """One sample: ask for it, wait for the lock if there is one, and move the file."""
    takes_items = hasattr(stock_client, "ClientItem")
    asked = item if takes_items else item["input_ids"]
    answer = await stock_client.generate_hidden_states_async(
        client, model, asked, max_retries=0, timeout=TIMEOUT
    )
    path = answer[0] if isinstance(answer, tuple) else answer
    if hasattr(stock_client, "wait_for_lock_async") and Path(path + ".lock").exists():
        await stock_client.wait_for_lock_async(path + ".lock", timeout=TIMEOUT)
    shutil.move(path, target)


async def work(site: Path, job: dict[str, Any], out: Path) -> dict[str, Any]:
    stock_client = stock(site, "vllm_client")
    errors: dict[str, str] = {}
    turns = asyncio.Semaphore(job["concurrency"])
    async with client_of(job["url"]) as client:
        model = (await client.models.list()).data[0].id

        async def one(name: str, item: dict[str, Any]) -> None:
            async with turns:
                try:
                    await fetch(client, stock_client, model, item, out / f"{name}.safetensors")
                except Exception as error:  # noqa: BLE001  what stock would skip is the test's to judge
                    errors[name] = f"{type(error).__name__}: {error}"

        started = time.monotonic()
        await asyncio.gather(*(one(f"hs_{n}", {"input_ids": ids}) for n, ids in enumerate(job["prompts"])))
        report: dict[str, Any] = {"seconds": time.monotonic() - started, "model": model}
        messages = job.get("conversation")
        if messages and (site / "speculators/data_generation/render_client.py").exists():
            render = partial(stock(site, "render_client").render_conversation, timeout=TIMEOUT)
            ids = report["rendered"] = render(job["url"], messages, add_generation_prompt=False)
            more = {"truncate_prompt_tokens": 7, "truncation_side": "right", "add_generation_prompt": True}
            report["cut"] = render(job["url"], messages, **more)
            await one("chat", {"input_ids": ids, "messages": messages})
            await one("plain", {"input_ids": ids})
    return {**report, "errors": errors}


def main() -> None:
    site, job, out = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    out.mkdir(parents=True, exist_ok=True)
    report = asyncio.run(work(site, job, out))
    (out / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
