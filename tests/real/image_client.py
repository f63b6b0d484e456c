"""A stock client that asks for conversations with images: `python image_client.py SITE JOB.json OUT`.

SITE is as serve_client.py has it. JOB has `url`, `conversations`, `concurrency` and, for releases that do not render,
`rendered`: their token ids. OUT gets `hs_N.safetensors` and `report.json`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from serve_client import TIMEOUT, client_of, fetch, stock


async def work(site: Path, job: dict[str, Any], out: Path) -> dict[str, Any]:
    stock_client = stock(site, "vllm_client")
    conversations, rendered = job["conversations"], job.get("rendered")
    if rendered is None:
        render = stock(site, "render_client").render_conversation
        asked = {"add_generation_prompt": False, "timeout": TIMEOUT}
        rendered = [render(job["url"], messages, **asked) for messages in conversations]
    turns = asyncio.Semaphore(job["concurrency"])
    async with client_of(job["url"]) as client:
        model = (await client.models.list()).data[0].id

        async def one(number: int) -> None:
            async with turns:
                item = {"input_ids": rendered[number], "messages": conversations[number]}
                await fetch(client, stock_client, model, item, out / f"hs_{number}.safetensors")

        await one(0)  # by itself: the first batch is the one that proves
        await asyncio.gather(*map(one, range(1, len(conversations))))
    return {"rendered": rendered}


def main() -> None:
    site, job, out = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(asyncio.run(work(site, job, out))))


if __name__ == "__main__":
    main()
