"""`make demo`: stock speculators extracts where it dies by itself, and every tensor is compared with transformers.

Makes an environment with vLLM and speculators, two tiny models, and runs examples/extract.py in it, first without this
library and then with it. Exits 1 if anything is off, and says what.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import environments  # type: ignore[import-not-found]  # noqa: E402

VLLM, SPECULATORS = "0.16.0", "0.3.0"
OUT = ROOT / "out" / "demo"
DATA = ROOT / "examples" / "conversations.jsonl"
EXAMPLE = ROOT / "examples" / "extract.py"
LAYERS = (0, 2, 4, 5)
"""Of six, the last among them: its stream is taken before the final norm."""
SEQ_LENGTH = 1024
REFERENCE_DTYPE = "float32"
CONTROL = 0.3
"""What another layer or row is off by at the least."""
TIMEOUT = 1800


@dataclass(frozen=True)
class Model:
    """A model of the demo; `tolerance` is the largest error of a tensor as a part of its largest value."""

    title: str
    family: str
    tolerance: float

    @property
    def folder(self) -> Path:
        return OUT / self.family

    @property
    def states(self) -> Path:
        return OUT / f"{self.family}-states"


# vLLM computes in float16, whose unit roundoff is 0.0005, and six layers of rounding come to some thousandths. Not in
# bf16: vLLM 0.16's CPU build has no bf16 attention for processors with AMX.
MODELS = (Model("Llama", "llama", 0.02), Model("DeepSeek-V3", "deepseek_v3", 0.02))

console = Console(highlight=False)
if not console.is_terminal:
    console = Console(highlight=False, width=120)


class DemoError(Exception):
    """Something is off; the message says what."""


def main() -> int:
    started = time.monotonic()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    try:
        python = environment()
        make_models(python)
        show_stock(python)
        figures = [extract_and_compare(python, model) for model in MODELS]
    except (DemoError, environments.UvNotFoundError, environments.CommandFailedError) as error:
        say(f"FAILED: {error}", "red")
        return 1
    console.print(table(figures))
    say(f"The demo took {time.monotonic() - started:.0f} s. Files and logs are in {OUT.relative_to(ROOT)}.")
    faults = [fault for model, found in zip(MODELS, figures, strict=True) for fault in faults_of(model, found)]
    for fault in faults:
        say(f"FAILED: {fault}", "red")
    if faults:
        return 1
    samples, largest = sum(found["samples"] for found in figures), max(found["error"] for found in figures)
    print(f"OK: {samples} samples, {len(LAYERS)} layers, max relative error {largest:.2g}", flush=True)
    return 0


def environment() -> Path:
    say(f"\n1. An environment with vLLM {VLLM} and speculators {SPECULATORS}", "bold")
    home = environments.location(VLLM, SPECULATORS)
    if not (home / environments.COMPLETE).is_file():
        say("It is not there yet. Building it takes some minutes and several GB, once.")
    with working("making the environment"):
        python: Path = environments.ensure(VLLM, SPECULATORS)
    return python


def make_models(python: Path) -> None:
    say("\n2. Tiny models with random weights", "bold")
    for model in MODELS:
        with working(f"making {model.title}"):
            command = ("src/eagle3compat/yardstick/tiny.py", model.family, str(model.folder), "--dtype", "float16")
            run(python, *command, log=OUT / f"make-{model.family}.log")


def show_stock(python: Path) -> None:
    """Run the example less its lines that name this library."""
    say("\n3. Stock speculators by itself", "bold")
    script = OUT / "extract_without_eagle3compat.py"
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines(keepends=True)
    stock = (line for line in lines if line.strip() not in ("import eagle3compat", "eagle3compat.apply()"))
    script.write_text("".join(stock), encoding="utf-8")
    log = OUT / "stock.log"
    with working(f"running {script.relative_to(ROOT)}"):
        status = execute(python, script, MODELS[0], OUT / "stock-states", log, screen=subprocess.DEVNULL)
    text = log.read_text(encoding="utf-8", errors="replace")
    died = last_error(text)
    if not status or died is None:
        raise DemoError(f"stock was to die with an exception, and ended with {status}; see {log.relative_to(ROOT)}")
    say("It dies:")
    for line in died:
        say(f"   {line}", "yellow")


def extract_and_compare(python: Path, model: Model) -> dict[str, Any]:
    say(f"\n{4 + MODELS.index(model)}. {model.title}: the same code with the library", "bold")
    log = OUT / f"{model.family}.log"
    say(f"vLLM's own output goes to {log.relative_to(ROOT)}.")
    started = time.monotonic()
    if execute(python, EXAMPLE, model, model.states, log, screen=None):
        raise DemoError(f"extraction from {model.title} failed. The end of {log}:\n{tail(log)}")
    seconds = time.monotonic() - started
    result = OUT / f"{model.family}.json"
    with working("computing the same in transformers and comparing every tensor"):
        compare_with_transformers(python, model, result)
    found: dict[str, Any] = {"seconds": seconds, **json.loads(result.read_text())}
    if found["faults"]:
        raise DemoError(f"{model.title}:\n" + "\n".join(found["faults"]))
    return found


def compare_with_transformers(python: Path, model: Model, result: Path) -> None:
    """The independent path, in a process of its own without vLLM, speculators or this library."""
    layers = [str(layer) for layer in LAYERS]
    more = ["--limit", str(SEQ_LENGTH - 1), "--dtype", REFERENCE_DTYPE, "--out", str(result)]
    arguments = [str(model.folder), str(DATA), str(model.states), *layers, *more]
    run(python, "tools/demo_check.py", *arguments, log=OUT / f"check-{model.family}.log")


def faults_of(model: Model, found: dict[str, Any]) -> Iterator[str]:
    expected = found["samples"] * len(LAYERS)
    if found["tensors"] != expected:
        yield f"{model.title}: {found['tensors']} tensors were compared where {expected} are"
    if not found["error"] <= model.tolerance:
        yield f"{model.title}: a tensor is off by {found['error']:.2g}, more than {model.tolerance}"
    for control in ("wrong_layer", "shifted_row"):
        if not found[control] > CONTROL:
            name = control.replace("_", " ")
            yield f"{model.title}: the control '{name}' is only {found[control]:.2g} off: the comparison shows nothing"


def table(figures: Sequence[dict[str, Any]]) -> Table:
    """One row a model; narrow enough for a terminal of 80 columns."""
    title = f"speculators {SPECULATORS} on vLLM {VLLM}, against transformers in {REFERENCE_DTYPE}"
    tolerated = ", ".join(f"{model.tolerance} for {model.title}" for model in MODELS)
    caption = f"of a tensor's largest value; tolerated {tolerated}; the last two are controls, which must be far off"
    made = Table(title=title, caption=caption, box=box.SIMPLE, padding=(0, 1, 0, 0))
    made.add_column("model", no_wrap=True)
    for heading in ("samples", "tokens", "layers", "seconds", "max relative error", "wrong layer", "shifted row"):
        made.add_column(heading, justify="right")
    for model, found in zip(MODELS, figures, strict=True):
        counts = (found["samples"], found["tokens"], len(LAYERS), round(found["seconds"]))
        errors = (f"{found[name]:.3f}" for name in ("error", "wrong_layer", "shifted_row"))
        made.add_row(model.title, *map(str, counts), *errors)
    return made


def execute(python: Path, script: Path, model: Model, states: Path, log: Path, screen: int | None) -> int:
    """Run the example; its exit status. Its progress goes to `screen`, by default this process's."""
    command = [str(python), str(script), "--model", str(model.folder), "--data", str(DATA), "--output-dir", str(states)]
    command += ["--layer-ids", *map(str, LAYERS), "--batch-size", "4", "--seq-length", str(SEQ_LENGTH)]
    command += ["--log-file", str(log)]
    try:
        return subprocess.run(command, stderr=screen, env=settings(), timeout=TIMEOUT).returncode
    except subprocess.TimeoutExpired:
        raise DemoError(f"{script.name} was still running after {TIMEOUT} s; see {log}") from None


def run(python: Path, script: str, *arguments: str, log: Path) -> None:
    with log.open("w") as file:
        command = [str(python), str(ROOT / script), *arguments]
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=settings(), timeout=TIMEOUT)
    if done.returncode:
        raise DemoError(f"{script} ended with {done.returncode}. The end of {log}:\n{tail(log)}")


def settings() -> dict[str, str]:
    """The environment of what runs: nothing is fetched, little memory is taken, vLLM's MLA is not for CPUs."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM", "EAGLE3COMPAT", "PYTHON"))}
    own = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(OUT / "huggingface"), "PYTHONUNBUFFERED": "1"}
    return env | own | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_MLA_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}


def last_error(log: str) -> list[str] | None:
    """The last exception of a log, on two lines: where in speculators it came up, and what it says."""
    raised = list(re.finditer(r"^[\w.]*(?:Error|Exception)\b.*(?:\n(?!Traceback).+){0,2}", log, re.MULTILINE))
    if not raised:
        return None
    frames = re.findall(r'File "[^"]*/(speculators/[^"]+)", line (\d+), in (\w+)\n\s*(.+)', log[: raised[-1].start()])
    where = "{}, line {}, in {}: {}".format(*frames[-1]) if frames else "outside speculators"
    return [f"in {where}", " ".join(raised[-1].group().partition(" [type=")[0].split())]


def tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def say(text: str, style: str = "") -> None:
    console.print(text, style=style, markup=False, soft_wrap=True)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Say what goes on, that it still does, and how long it took."""
    started, free, ended = time.monotonic(), shutil.disk_usage(ROOT).free, threading.Event()

    def so_far() -> str:
        written = (free - shutil.disk_usage(ROOT).free) / 1e9
        return f"{what}: {time.monotonic() - started:.0f} s" + (f", {written:.1f} GB written" if written > 0.1 else "")

    def report() -> None:
        while not ended.wait(0.5 if console.is_terminal else 20):
            if console.is_terminal:
                status.update(so_far())
            else:
                say(f"   {so_far()}")

    with console.status(what) as status:
        ticker = threading.Thread(target=report, daemon=True)
        ticker.start()
        try:
            yield
        finally:
            ended.set()
            ticker.join()
    say(so_far())


if __name__ == "__main__":
    sys.exit(main())
