"""Stock extraction on one and on two GPUs, in this environment, beside transformers: evidence as JSON.

    python tools/gpus.py --out DIR [--layers 0,2,4,5] [--ranks 1,2] [--label NAME]

For a GPU host, which needs no network: vLLM, speculators and transformers are those of the running Python. Sessions
run side by side on the GPUs that there are. With --faults, also a GPU that is full, and a forked start after CUDA was
used; with --ends, what is left on the GPUs after Ctrl-C, an exception and a kill, which must be alone; with --images,
conversations with images, from models that tests/real/image_models.py made.
DIR/gpus-LABEL.json holds the outcome; a table is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
REAL = ROOT / "tests/real"
sys.path.insert(0, str(REAL))

from image_families import PICTURED  # type: ignore[import-not-found]  # noqa: E402
from image_prompts import ALIKE, ASKED, CHUNKS, conversation, pictures  # type: ignore[import-not-found]  # noqa: E402

SESSION = REAL / "session.py"
INTERRUPTED = REAL / "interrupted.py"
CLIENT = REAL / "serve_client.py"
UNPACK = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import load_file
folder, prompts = Path(sys.argv[1]), json.loads(sys.argv[2])
found = []
for number, prompt in enumerate(prompts):
    content = load_file(folder / f"hs_{number}.safetensors")
    assert content["token_ids"].tolist() == prompt, f"hs_{number}.safetensors holds other tokens"
    found.append(list(content["hidden_states"].unbind(1)))
torch.save(found, folder / "states.pt")
"""
"""Files of the server's contract as a list of states a prompt."""
FAMILIES = ("llama", "deepseek_v3")
SHARE = 0.06
"""Of a GPU's memory for one session: several share a GPU."""
ENDS = ("interrupt", "exception", "kill")
SERVERS = 4
"""Servers that are asked about images at a time."""
TIMEOUT = 290
RELEASE_SECONDS = 60
console = Console(width=140)


def environment(device: int | None = None) -> dict[str, str]:
    """Nothing is fetched, workers are spawned, and this checkout is on the path; on one GPU, if a number is given."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    env.setdefault("TRITON_F32_DEFAULT", "ieee")  # not TF32, with its 10 bits
    if device is not None:
        env["CUDA_VISIBLE_DEVICES"] = str(device)
    return env


def gpu_memory() -> list[int]:
    """MiB in use on each GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()]


def prompts() -> dict[str, list[list[int]]]:
    rng = random.Random(3)

    def batch(count: int, low: int, high: int) -> list[list[int]]:
        return [[rng.randrange(8, 600) for _ in range(rng.randint(low, high))] for _ in range(count)]

    return {"mixed": batch(12, 1, 90), "over budget": batch(48, 200, 250)}


def load(model: Path, layers: Sequence[int], ranks: int, **more: Any) -> dict[str, Any]:
    return {
        "model_path": str(model), "layer_ids": list(layers), "max_model_len": 256, "gpu_memory_utilization": SHARE,
        "tensor_parallel_size": ranks, **more,
    }


def plan(models: dict[str, Path], layers: Sequence[int], ranks: int, **more: Any) -> list[dict[str, Any]]:
    """Every family in turn: load, attest, extract both batches, shut down."""
    steps: list[dict[str, Any]] = [{"name": "apply", "do": "apply"}, {"name": "imports", "do": "imports"}]
    for family, model in models.items():
        steps.append({"name": f"load {family}", "do": "load", "with": load(model, layers, ranks, **more)})
        for batch, tokens in prompts().items():
            steps.append({"name": f"{family} {batch}", "do": "generate",
                          "with": {"prompts": tokens, "save": f"{family}-{batch}"}})
        steps += [
            {"name": f"attest {family}", "do": "attest"},
            {"name": f"raise {family}", "do": "rpc", "with": {"method": "eagle3compat_collect", "args": [["nobody"]]}},
            {"name": f"close {family}", "do": "close"},
        ]
    return steps


def session(folder: Path, steps: list[dict[str, Any]], device: int | None) -> dict[str, Any]:
    """Run steps in a process of their own; their outcomes by name, with its exit code, None when it took too long."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(steps))
    with (folder / "log").open("w") as log:
        command = [sys.executable, str(SESSION), str(folder / "plan.json"), str(folder)]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment(device))
        try:
            code: int | None = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:  # what was done until then is still told; vLLM's workers end with the driver
            code = None
            process.kill()
            process.wait()
    found: dict[str, Any] = json.loads((folder / "session.json").read_text())
    return {"exit": code, "steps": {name: condensed(outcome) for name, outcome in found.items()}}


def condensed(outcome: dict[str, Any]) -> dict[str, Any]:
    """A step's outcome less what is long and says nothing about right or wrong."""
    if "error" in outcome:
        return {"error": outcome["error"], "message": outcome["message"].splitlines()[0]}
    value = outcome["value"]
    if isinstance(value, list):
        value = [{key: entry for key, entry in worker.items() if key not in ("pid", "adapters")} for worker in value]
    if isinstance(value, dict):
        left_out = ("input_ids", "shapes", "workers", "adapters", "driver_pid")
        value = {key: entry for key, entry in value.items() if key not in left_out}
    return {"value": value}


def make_models(folder: Path) -> dict[str, Path]:
    """The tiny models and, beside each, what transformers computes for both batches in float32 on the CPU.

    Takes minutes; what is in `folder` already is kept, so that it can be made elsewhere.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = {family: folder / family for family in FAMILIES}

    def make(family: str) -> None:
        target = made[family]
        if not target.exists():
            command = [sys.executable, str(ROOT / "src/eagle3compat/yardstick/tiny.py"), family, str(target)]
            subprocess.run(command, check=True, env=environment(), capture_output=True)
        for batch, tokens in prompts().items():
            asked = folder / f"{family}-{batch}.json"
            if asked.with_suffix(".pt").exists():
                continue
            asked.write_text(json.dumps(tokens))
            command = [sys.executable, str(ROOT / "src/eagle3compat/yardstick/reference.py"), str(target), str(asked)]
            subprocess.run([*command, str(asked.with_suffix(".pt")), "--dtype", "float32"], check=True,
                           env=environment(), capture_output=True)

    for family in FAMILIES:
        make(family)
    return made


def compared(got: Path, want: Path, layers: Sequence[int]) -> dict[str, Any]:
    """The largest error over all tensors, and what the controls are off by; see tests/real/compare.py."""
    out = got.with_suffix(".json")
    subprocess.run([sys.executable, str(ROOT / "tests/real/compare.py"), str(got), str(want), json.dumps(list(layers)),
                    str(out)], check=True, env=environment(), capture_output=True)
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def parallel_sizes(work: Path, models: dict[str, Path], layers: Sequence[int], ranks: Sequence[int]) -> dict[str, Any]:
    """Both families at each tensor-parallel size, side by side; errors against transformers."""
    def one(size: int) -> dict[str, Any]:
        folder = work / f"tp{size}"
        found = session(folder, plan(models, layers, size), 0 if size == 1 else None)
        for family in models:
            for batch in prompts():
                got = folder / f"{family}-{batch}.pt"
                if got.exists():
                    want = models[family].parent / f"{family}-{batch}.pt"
                    found[f"{family} {batch}"] = compared(got, want, layers)
        return found

    with ThreadPoolExecutor() as pool:
        return {f"tp{size}": found for size, found in zip(ranks, pool.map(one, ranks), strict=True)}


def forked_after_cuda(work: Path, model: Path, layers: Sequence[int]) -> dict[str, Any]:
    """Workers that are to be forked from a process that has used CUDA."""
    steps: list[dict[str, Any]] = [
        {"name": "apply", "do": "apply"},
        {"name": "use CUDA", "do": "use_accelerator"},
        {"name": "load", "do": "load", "with": load(model, layers, 1, start_method="fork")},
        {"name": "generate", "do": "generate", "with": {"prompts": prompts()["mixed"]}},
        {"name": "close", "do": "close"},
    ]
    return session(work / "fork", steps, 0)


def out_of_memory(work: Path, model: Path, layers: Sequence[int]) -> dict[str, Any]:
    """A GPU whose memory another program takes: while a batch is computed, and before a load."""
    batch = {"prompts": [[9 + (number + place) % 500 for place in range(250)] for number in range(40)]}
    again = {**batch, "save": "again"}
    steps: list[dict[str, Any]] = [
        {"name": "apply", "do": "apply"},
        {"name": "load", "do": "load", "with": load(model, layers, 1)},
        {"name": "fill", "do": "fill_accelerator"},
        {"name": "generate without memory", "do": "generate", "with": batch},
        {"name": "release", "do": "release_accelerator"},
        {"name": "generate again", "do": "generate", "with": again},
        {"name": "close", "do": "close"},
        {"name": "fill once more", "do": "fill_accelerator"},
        {"name": "load without memory", "do": "load", "with": load(model, layers, 1)},
        {"name": "release once more", "do": "release_accelerator"},
        {"name": "load again", "do": "load", "with": load(model, layers, 1)},
        {"name": "generate at last", "do": "generate", "with": batch},
        {"name": "close at last", "do": "close"},
    ]
    return session(work / "memory", steps, 0)


def flat(work: Path, model: Path, layers: Sequence[int]) -> dict[str, Any]:
    """The most bytes that a worker has on its GPU, by the number of sequences in a call."""
    steps: list[dict[str, Any]] = [
        {"name": "apply", "do": "apply"},
        {"name": "load", "do": "load", "with": load(model, layers, 1)},
    ]
    for count in (40, 40, 200, 1000, 5000):
        prompts = [[9 + (number + place) % 500 for place in range(250)] for number in range(count)]
        steps.append({"name": f"{count} sequences", "do": "generate", "with": {"prompts": prompts}})
        steps.append({"name": f"peak of {count}", "do": "accelerator_peak"})
    steps.append({"name": "close", "do": "close"})
    return session(work / "flat", steps, 0)


@contextmanager
def serving(folder: Path, model: Path, layers: Sequence[int], *options: str) -> Iterator[tuple[str, str]]:
    """The address of an `eagle3compat serve` on a GPU, and its log so far. Raises RuntimeError with its log."""
    folder.mkdir(parents=True)
    log = folder / "log"
    ids = ["--target-layer-ids", *(str(layer + 1) for layer in layers)]
    command = [sys.executable, "-m", "eagle3compat", "serve", str(model), *ids, "--host", "127.0.0.1", "--port", "0",
               "--hidden-states-path", str(folder / "files"), "--max-model-len", "256",
               "--gpu-memory-utilization", str(SHARE), *options]  # fmt: skip
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file, env=environment(0))
    try:
        deadline = time.monotonic() + TIMEOUT
        while " on http://" not in log.read_text():
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(log.read_text()[-3000:])
            time.sleep(0.5)
        said = log.read_text()
        yield "http://" + said.split(" on http://")[1].split(",")[0], said
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def served(work: Path, model: Path, layers: Sequence[int], clients: Path) -> dict[str, Any]:
    """`eagle3compat serve` on a GPU, asked by each stock client of a folder: what is off, and whose rows they are."""
    folder, found, batch = work / "served", dict[str, Any](), "over budget"
    try:
        with serving(folder, model, layers) as (url, _log):
            job = {"url": url, "prompts": prompts()[batch], "concurrency": 32}
            (folder / "job.json").write_text(json.dumps(job))
            for site in sorted(clients.iterdir()):
                out = folder / site.name
                words = [sys.executable, str(CLIENT), str(site), str(folder / "job.json"), str(out)]
                done = subprocess.run(words, env=environment(0), capture_output=True, text=True)
                if done.returncode:
                    found[site.name] = {"error": done.stderr[-1000:]}
                    continue
                report = json.loads((out / "report.json").read_text())
                command = [sys.executable, "-c", UNPACK, str(out), json.dumps(job["prompts"])]
                rows = subprocess.run(command, env=environment(0), capture_output=True, text=True)
                want = model.parent / f"{model.name}-{batch}.pt"
                wrong = {"error": rows.stderr[-1000:]} if rows.returncode else compared(out / "states.pt", want, layers)
                found[site.name] = {**wrong, "seconds": report["seconds"], "errors": report["errors"]}
    except RuntimeError as error:  # it did not start: what was found before stays
        return {**found, "error": str(error)}
    return found


def pictured(work: Path, models: Path, layers: Sequence[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Conversations with images from every model of a folder, in bf16 and float32, beside transformers in float32."""
    asked = [
        (path, dtype)
        for path in sorted(path for path in models.iterdir() if path.name in PICTURED)
        for dtype in ("bfloat16", "float32")
        if dtype == "bfloat16" or "cuda" not in PICTURED[path.name].family.no_float32
    ]

    def one(model: Path, dtype: str) -> tuple[str, dict[str, Any]]:
        folder = work / f"images-{model.name}-{dtype}"
        try:
            figures = pictures_of(folder, model, layers, dtype)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:  # the others still count
            figures = {"error": f"{type(error).__name__}: {error} {getattr(error, 'stderr', '')}"[-3000:]}
        console.print(f"images, {model.name} {dtype}: {figures}", markup=False, highlight=False)
        return f"{model.name} {dtype}", figures

    with ThreadPoolExecutor(SERVERS) as pool:
        for job in as_completed([pool.submit(one, *each) for each in asked]):
            yield job.result()


def pictures_of(folder: Path, model: Path, layers: Sequence[int], dtype: str) -> dict[str, Any]:
    """One model's: the largest error, the least of each control, and the model runner. Raises what is caught above."""
    side, together = PICTURED[model.name].side, PICTURED[model.name].together
    options = CHUNKS if not together else ["--max-num-batched-tokens", "256", "--max-num-seqs", "4"]
    options = [*options, "--kv-cache-memory-bytes", str(2**29)]  # no profiling beside others
    for name, value in PICTURED[model.name].family.engine.items():
        part, _, setting = name.partition(".")
        options += [f"--{part.replace('_', '-')}", json.dumps({setting: value})]
    with serving(folder, model, layers, "--dtype", dtype, *options) as (url, log):

        def ask(number: int) -> list[int]:
            body = {"messages": conversation(ASKED[number], side), "max_tokens": 1, "add_generation_prompt": False}
            request = urllib.request.Request(
                f"{url}/v1/chat/completions", json.dumps({**body, "return_token_ids": True}).encode(),
                {"Content-Type": "application/json"},
            )  # fmt: skip
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
                    answer = json.loads(reply.read())
            except urllib.error.HTTPError as error:
                raise RuntimeError(error.read().decode()) from error
            shutil.move(answer["kv_transfer_params"]["hidden_states_path"], folder / f"hs_{number}.safetensors")
            ids: list[int] = answer["prompt_token_ids"]
            return ids

        first = ask(0)  # by itself: the first batch is the one that proves
        with ThreadPoolExecutor(len(ASKED)) as pool:
            token_ids = [first, *pool.map(ask, range(1, len(ASKED)))]
    asked = [
        {"token_ids": ids, "images": pictures(parts, model.name, side, folder)}
        for ids, parts in zip(token_ids, ASKED, strict=True)
    ]
    (folder / "prompts.json").write_text(json.dumps(asked))
    plan = {"token_ids": token_ids, "folders": [str(folder)], "reference": str(folder / "want.pt"), "alike": ALIKE,
            "layer_ids": [layer + 1 for layer in layers], "out": str(folder / "out.json")}  # fmt: skip
    (folder / "plan.json").write_text(json.dumps(plan))
    script = [sys.executable, str(REAL / "image_reference.py"), str(model), str(folder / "prompts.json")]
    for command in (
        [*script, str(folder / "want.pt")],
        [sys.executable, str(REAL / "image_compare.py"), str(folder / "plan.json")],
    ):
        subprocess.run(command, check=True, env=environment(), capture_output=True, text=True)
    figures = json.loads((folder / "out.json").read_text())["files"][str(folder)]
    least = {name: min(figures[name]) for name in ("wrong_layer", "shifted_row", "other_image")}
    runner = log.split(" model runner")[0].split()[-1]
    return {"tensors": figures["tensors"], "max": figures["max"], **least, "runner": runner}


def left_behind(work: Path, model: Path, ranks: int, how: str) -> dict[str, Any]:
    """MiB in use on each GPU before a driver, while it extracts, and after it ended by `how`; workers left alive."""
    folder = work / how
    folder.mkdir(parents=True)
    before, out = gpu_memory(), folder / "found.json"
    with (folder / "log").open("w") as log:
        command = [sys.executable, str(INTERRUPTED), str(model), str(out), str(ranks)]
        driver = subprocess.Popen(command, stdout=log, stderr=log, env=environment(), start_new_session=True)
    deadline = time.monotonic() + TIMEOUT
    while not out.exists() and driver.poll() is None and time.monotonic() < deadline:
        time.sleep(0.5)
    time.sleep(2)
    during = gpu_memory()
    workers = json.loads(out.read_text())["workers"] if out.exists() else []
    if how == "interrupt":
        os.killpg(driver.pid, signal.SIGINT)
    else:
        os.kill(driver.pid, signal.SIGKILL if how == "kill" else signal.SIGUSR1)
    driver.wait(TIMEOUT)
    deadline = time.monotonic() + RELEASE_SECONDS
    while time.monotonic() < deadline and max(a - b for a, b in zip(gpu_memory(), before, strict=True)) > 8:
        time.sleep(0.5)
    alive = [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    said = json.loads(out.read_text()) if out.exists() else {"log": (folder / "log").read_text()[-3000:]}
    return {"before": before, "during": during, "after": gpu_memory(), "alive": alive, "said": said}


def table(found: dict[str, Any]) -> Table:
    versions = found["versions"]
    made = Table(title=f"{found['label']}: vLLM {versions['vllm']}, speculators {versions['speculators']}")
    for heading in ("ranks", "family and batch", "max error", "wrong layer", "shifted row"):
        made.add_column(heading)
    for ranks, outcome in found["sizes"].items():
        for name, figures in outcome.items():
            if name not in ("exit", "steps"):
                made.add_row(ranks, name, *(f"{figures[key]:.3g}" for key in ("max", "wrong_layer", "shifted_row")))
        for name, step in outcome["steps"].items():
            if "error" in step and not name.startswith("raise"):
                made.add_row(ranks, name, step["error"], step["message"][:60], "")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="Stock extraction on one and on two GPUs: evidence as JSON.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, help="models and references: kept, and made where they are missing")
    parser.add_argument("--only-models", action="store_true", help="make them and stop; needs no GPU")
    parser.add_argument("--layers", default="0,2,4,5")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--label", default="here")
    parser.add_argument("--ends", action="store_true", help=f"also what is left on the GPUs after {', '.join(ENDS)}")
    parser.add_argument("--no-sizes", action="store_true", help="leave out the extraction at each size")
    parser.add_argument("--clients", type=Path, help="also serve, to the stock clients in this folder's folders")
    parser.add_argument("--images", type=Path, help="also serve conversations with images, to this folder's models")
    parser.add_argument("--faults", action="store_true", help="also memory as a batch grows, none left, CUDA and fork")
    options = parser.parse_args()
    layers = [int(layer) for layer in options.layers.split(",")]
    ranks = [int(size) for size in options.ranks.split(",")]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        work = Path(scratch)
        models = make_models(options.models or work / "models")
        console.print(f"models and references after {time.monotonic() - started:.0f} s")
        if options.only_models:
            return
        found: dict[str, Any] = {
            "label": options.label,
            "date": time.strftime("%Y-%m-%d"),
            "gpus": subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.count("GPU "),
            "runner": os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "default"),
            "versions": {name: version(name) for name in ("vllm", "speculators", "torch", "transformers")},
            "layers": layers,
            "memory before": gpu_memory(),
            "sizes": {} if options.no_sizes else parallel_sizes(work, models, layers, ranks),
        }
        found["memory after"] = gpu_memory()
        _write(options, found)
        console.print(table(found), f"after {time.monotonic() - started:.0f} s")
        if options.ends:
            for how in ENDS:
                found[how] = left_behind(work, models["llama"], max(ranks), how)
                _write(options, found)
                console.print(how, found[how])
        if options.faults:
            for name, measure in (("flat", flat), ("out of memory", out_of_memory), ("fork", forked_after_cuda)):
                found[name] = measure(work, models["llama"], layers)
                _write(options, found)
                console.print(name, {step: outcome.get("value", outcome.get("message"))
                                     for step, outcome in found[name]["steps"].items()})  # fmt: skip
        if options.clients:
            found["served"] = served(work, models["llama"], layers, options.clients)
            _write(options, found)
            console.print("served", found["served"])
        if options.images:
            found["images"] = {}
            for name, figures in pictured(work, options.images, layers):
                found["images"][name] = figures
                _write(options, found)
        for folder in work.glob("tp*"):
            steps = found["sizes"][folder.name]["steps"]
            if any("error" in step and not name.startswith("raise") for name, step in steps.items()):
                console.print((folder / "log").read_text()[-4000:], markup=False, highlight=False)
    console.print(f"ended after {time.monotonic() - started:.0f} s")


def _write(options: argparse.Namespace, found: dict[str, Any]) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"gpus-{options.label}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
