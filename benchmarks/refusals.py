"""How soon a run that cannot work is refused: seconds from the call of the constructor to its error, kind by kind.

    python benchmarks/refusals.py                # in an environment with vLLM 0.32.0 and speculators 0.4.0.1
    python benchmarks/refusals.py --here         # in this interpreter, which has vLLM and speculators
    python benchmarks/refusals.py --here --missing   # only what the figures leave out, on a machine that can show it
    python benchmarks/refusals.py --page [--check]   # write the table of docs/before-the-load.md, or compare it

Every kind has a process of its own, so that none finds imports or caches that another has made: `imports` is what comes
before the call. The model is the published config of Qwen3-235B-A22B, with a file of weights of its size, of which
only the header is there. An error that is not the expected one, and a worker that was started, end the benchmark.
Figures go to evidence/benchmarks/refusals.json. A kind that this machine cannot show is left out, with the reason.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "evidence" / "benchmarks" / "refusals.json"
PAGE = ROOT / "docs" / "before-the-load.md"
BEGIN, END = "<!-- refusals: written by benchmarks/refusals.py -->\n", "<!-- end of refusals -->\n"
PAIR = ("0.32.0", "0.4.0.1")
CONFIG = ROOT / "tests" / "configs" / "qwen3-235b-a22b.json"
GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
GIB = 2**30
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

Change = Callable[[Path], Any]


@dataclass(frozen=True)
class Kind:
    """A run that cannot work: what is wrong, what the error says, and how it comes about."""

    what: str
    says: str
    change: Change = lambda folder: None
    arguments: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    meddle: Callable[[], Any] = lambda: None
    """In the process itself, before the call."""
    prefix: tuple[str, ...] = ()
    """Of the command line."""
    accelerators: bool = False
    late: bool = False
    """Known when vLLM has built its configuration, for which it looks at the model's class in a process of its own, and
    keeps what it found: measured where nothing is kept, and again."""


def cut(name: str) -> Change:
    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return change


def written(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content, encoding="utf-8")


def configured(**changes: Any) -> Change:
    """The config with these fields; None leaves one out."""
    def change(folder: Path) -> None:
        config = {**json.loads((folder / "config.json").read_text("utf-8")), **changes}
        config = {name: value for name, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")

    return change


def without(*names: str) -> Change:
    return lambda folder: [(folder / name).unlink() for name in names]


def weights(folder: Path, gib: float, **shapes: list[int]) -> None:
    """A sparse file of weights of this size with a header that is right: nothing of it is written to the disk."""
    end = int(gib * GIB)
    header = {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, end]} for name, shape in shapes.items()}
    text = json.dumps(header or {"all": {"dtype": "BF16", "shape": [end // 2], "data_offsets": [0, end]}}).encode()
    with (folder / WEIGHTS).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def remove_symbol() -> None:
    """As a vLLM would be that has renamed what an adapter relies on."""
    from vllm.v1.engine.core import EngineCore

    del EngineCore.add_request


def replace_name() -> None:
    """As another patcher would that comes after apply()."""
    import importlib

    importlib.import_module(GENERATOR).MultiprocExecutor = object


SMALL_SHM = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh")
"""A mount of this process's own; needs root."""

KINDS = (
    Kind("an adapter that has drifted: a method that is gone", "cannot bridge this pair", meddle=remove_symbol),
    Kind("another patcher that took an adapter's place", "was replaced by another patcher", meddle=replace_name),
    Kind("no such folder", "no such folder", arguments={"model_path": "/nowhere/model"}),
    Kind("layer ids that are no integers", "is not an integer", arguments={"layer_ids": ["2"]}),
    Kind("a length of one token", "max_model_len is 1", arguments={"max_model_len": 1}),
    Kind("`config.json` cut short", "config.json is cut short", cut("config.json")),
    Kind("a config without `architectures`", "names no architectures", configured(architectures=None)),
    Kind("`tokenizer.json` cut short", "tokenizer.json is cut short", cut("tokenizer.json")),
    Kind("an index of weights that is cut short", "is cut short", written(INDEX, '{"weight_map": {')),
    Kind("weights that the index names and that are not there", "files that",
         written(INDEX, '{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')),
    Kind("weights shorter than their header says", "is damaged",
         lambda folder: os.truncate(folder / WEIGHTS, 400 * GIB)),
    Kind("a git-lfs pointer in place of weights", "is a git-lfs pointer",
         written(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:0\n")),
    Kind("a vocabulary larger than the embeddings", "have 151000 rows",
         lambda folder: weights(folder, 438, **{"model.embed_tokens.weight": [151000, 4096]})),
    Kind("layer ids that the model does not have", "out of bounds", arguments={"layer_ids": [2, 94]}),
    Kind("a folder without a tokenizer", "holds no tokenizer", without("tokenizer.json", "tokenizer_config.json")),
    Kind("a tokenizer that does not load", "does not load", written("tokenizer.json", "{}")),
    Kind("no weights at all", "holds no weights", without(WEIGHTS)),
    Kind("a tensor-parallel size that does not divide the heads", "divisible by tensor parallel size",
         arguments={"tensor_parallel_size": 3}, late=True),
    Kind("a model that generates no text", "generates no text", configured(
        architectures=["BertModel"], model_type="bert", num_hidden_layers=4, intermediate_size=64, hidden_act="gelu",
        max_position_embeddings=4096, rope_scaling=None, num_key_value_heads=None, head_dim=None),
         arguments={"layer_ids": [0, 3]}, late=True),
    Kind("a KV cache that holds no sequence", "of KV cache on each rank", arguments={"max_model_len": 40960},
         variables={"VLLM_CPU_KVCACHE_SPACE": "1"}, late=True),
    Kind("a `/dev/shm` in which workers would end with a bus error", "/dev/shm has", prefix=SMALL_SHM,
         late=True),
    Kind("more ranks than visible devices", "devices are visible", arguments={"tensor_parallel_size": 2},
         variables={"CUDA_VISIBLE_DEVICES": "0"}, accelerators=True, late=True),
    Kind("weights that do not fit on a device", "on each rank, and a device has", accelerators=True, late=True),
)


def tokenizer(folder: Path) -> None:
    sys.path.insert(0, str(ROOT / "src/eagle3compat/yardstick"))
    import tiny  # type: ignore[import-not-found]

    folder.mkdir()
    tiny._write_tokenizer(folder)


def one(number: int, folder: Path) -> dict[str, Any]:
    """In a process of its own: the call, and what came of it."""
    import importlib
    import multiprocessing.process

    import eagle3compat

    kind, started = KINDS[number], []
    start = multiprocessing.process.BaseProcess.start
    multiprocessing.process.BaseProcess.start = lambda process: started.append(start(process))
    began = time.perf_counter()
    if kind.meddle is remove_symbol:
        remove_symbol()
    eagle3compat.apply()
    generator = importlib.import_module(GENERATOR).VllmHiddenStatesGenerator
    if kind.meddle is replace_name:
        replace_name()
    called = time.perf_counter()
    arguments = {"model_path": str(folder), "layer_ids": [2, 46, 90, 93], **kind.arguments}
    try:
        generator(**arguments)
    except Exception as error:  # noqa: BLE001  which error it is is what is looked at
        ended = time.perf_counter()
        said, name = str(error), type(error).__name__
    else:
        ended, said, name = time.perf_counter(), "it was made", ""
    return {
        "error": name, "said": said, "imports": round(called - began, 1), "seconds": round(ended - called, 3),
        "workers": len(started),
    }


def measure(python: str, earlier: dict[str, Any] | None) -> dict[str, Any]:
    """Every kind that this machine can show, or of them those that `earlier` figures leave out, added to these.

    Raises SystemExit for an error that is not the expected one.
    """
    found: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    facts = json.loads(_run([python, __file__, "--facts"], {}).stdout.splitlines()[-1])
    with tempfile.TemporaryDirectory(prefix="refusals-") as place:
        _run([python, __file__, "--tokenizer", f"{place}/tokenizer"], {})
        for number, kind in enumerate(KINDS):
            if earlier is None or kind.what in earlier["left_out"]:
                _one(python, Path(place), number, facts, found, left_out)
    if earlier is not None:
        here = all(facts[name] == earlier[name] for name in ("packages", "accelerators"))
        found = found if here else [{**kind, "on": facts} for kind in found]
        return {**earlier, "kinds": [*earlier["kinds"], *found], "left_out": left_out}
    return {**facts, "date": datetime.date.today().isoformat(), "kinds": found, "left_out": left_out}


def _one(
    python: str, place: Path, number: int, facts: dict[str, Any], found: list[dict[str, Any]], left_out: dict[str, str]
) -> None:
    kind, folder = KINDS[number], place / "model"
    if kind.accelerators and not facts["accelerators"]:
        left_out[kind.what] = "this machine has no accelerator"
        return
    if kind.prefix and _run([*kind.prefix, "true"], {}).returncode:
        left_out[kind.what] = "this user may not mount"
        return
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(place / "tokenizer", folder)
    shutil.copyfile(CONFIG, folder / "config.json")
    weights(folder, 438)
    kind.change(folder)
    command = [*kind.prefix, python, __file__, "--one", str(number), str(folder)]
    kept = {"VLLM_CACHE_ROOT": str(place / f"cache-{number}")} if kind.late else {}
    rounds = [_figures(kind, command, kept) for _ in range(2 if kind.late else 1)]
    figures = {"what": kind.what, "error": rounds[0]["error"], "imports": rounds[0]["imports"]}
    found.append({**figures, "seconds": [each["seconds"] for each in rounds]})
    print(f"{kind.what}: {figures['error']} after {found[-1]['seconds']} s", flush=True)


def _figures(kind: Kind, command: list[str], variables: dict[str, str]) -> dict[str, Any]:
    done = _run(command, {**kind.variables, **variables})
    if done.returncode:
        raise SystemExit(f"{kind.what}: {done.stderr[-3000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if kind.says not in figures["said"] or figures["workers"]:
        raise SystemExit(f"{kind.what}: that is not what was expected: {figures}")
    return figures


def _run(command: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    usual = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "8", "VLLM_NO_USAGE_STATS": "1"}
    usual["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(command, env={**os.environ, **usual, **variables}, capture_output=True, text=True)


def facts() -> dict[str, Any]:
    """What the figures are for."""
    from eagle3compat import detect
    from eagle3compat.hardware import accelerators

    names = ("vllm", "speculators", "torch", "transformers")
    packages = {name: package.version for name in names if (package := detect.package(name))}
    return {"packages": packages, "accelerators": len(accelerators()), "cores": len(os.sched_getaffinity(0))}


def block(figures: dict[str, Any]) -> str:
    """The table of the page."""
    lines = ["| what | error | from the call to the error |", "|---|---|---|"]
    for kind in figures["kinds"]:
        other, where = kind.get("on"), ""
        if other:
            count = other["accelerators"]
            where = f" (vLLM {other['packages']['vllm']}, {count} GPU{'s' if count > 1 else ''})"
        seconds = ", then ".join(f"{each:.2f} s" for each in kind["seconds"])
        lines.append(f"| {kind['what']}{where} | `{kind['error']}` | {seconds} |")
    lines += [f"| {what} | | not measured: {why} |" for what, why in figures["left_out"].items()]
    imports = sorted(kind["imports"] for kind in figures["kinds"])
    versions, cores = figures["packages"], figures["cores"]
    lines += [
        "",
        f"Measured on {figures['date']} on vLLM {versions['vllm']} with speculators {versions['speculators']}, each in "
        f"a process of its own, on {cores} cores that had other work, with the config of Qwen3-235B-A22B. The imports "
        f"before the call took {imports[0]:.0f} to {imports[-1]:.0f} s. Where there are two figures vLLM builds its "
        "configuration first, for which it imports the model's class in a process of its own, and keeps what it found "
        "for the next time. In none of them was a worker started. `python benchmarks/refusals.py` measures it again.",
    ]
    return BEGIN + "\n" + "\n".join(lines) + "\n\n" + END


def page(check: bool) -> int:
    text = PAGE.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = before + block(json.loads(FIGURES.read_text("utf-8"))) + after
    if not check:
        PAGE.write_text(wanted, encoding="utf-8")
        return 0
    if wanted == text:
        return 0
    print(f"{PAGE} is not what {FIGURES} says: run python benchmarks/refusals.py --page", file=sys.stderr)
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description="How soon a run that cannot work is refused.")
    parser.add_argument("--here", action="store_true", help="in this interpreter, which has vLLM and speculators")
    parser.add_argument("--missing", action="store_true", help="only what the figures leave out, added to them")
    parser.add_argument("--page", action="store_true", help="write the table of the page from the figures")
    parser.add_argument("--check", action="store_true", help="with --page: write nothing; exit 1 where it differs")
    parser.add_argument("--facts", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.page:
        return page(options.check)
    if options.tokenizer:
        tokenizer(options.tokenizer)
        return 0
    if options.facts or options.one:
        found = facts() if options.facts else one(int(options.one[0]), Path(options.one[1]))
        print(json.dumps(found))
        return 0
    from workload import interpreter

    earlier = json.loads(FIGURES.read_text("utf-8")) if options.missing else None
    figures = measure(interpreter(PAIR, options.here), earlier)
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return page(check=False)


if __name__ == "__main__":
    sys.exit(main())
