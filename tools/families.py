"""`make families`: every model family that this machine can run, extracted and compared layer by layer.

    python tools/families.py [FAMILY ...] [--device cpu|cuda] [--python PYTHON] [--jobs N] [--out DIR] [--again]
                             [--anyway] [--pair VLLM SPECULATORS]

Each family runs in processes of its own: one makes a tiny model and its streams in transformers, one runs the stock
generator with this library, and one compares; where transformers has no such model, vLLM's own forward is tapped. A
family that fails is recorded and the next one goes on. Evidence is one line of JSON a family in DIR/VLLM-DEVICE.jsonl,
written as soon as there is one, so a run that was stopped goes on where it was, and tries what failed once more.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import queue
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]

from families.table import FAMILIES, NO_VISION, Family  # type: ignore[import-not-found]  # noqa: E402
from processes import Afresh, Forked, brief, last_words  # type: ignore[import-not-found]  # noqa: E402

GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
PAIR = ("0.32.0", "0.4.0.1")
LENGTHS = (1, 5, 37, 90, 150, 300)
BUDGET = 128
"""Tokens that vLLM computes in a step: the two longest prompts are taken in chunks."""
LIMITS = {("float32", "cpu"): 1e-4, ("float32", "cuda"): 1e-3, ("bfloat16", "cpu"): 0.1, ("bfloat16", "cuda"): 0.1}
"""Of a layer's largest value. In float32 kernels differ by the order of their sums: a few 1e-6 a layer; linear
attention and mixtures add chunked scans and sums over experts, and tensor cores may round factors to 10 bits. In bf16
each of six layers rounds to 8 bits (0.4 %), beside a reference in float32. A neighbouring layer or row is off by more
than CONTROL in either."""
CONTROL = 0.2
OUTCOMES = ("different", "equal", "refused", "failed", "timeout", "not run")
"""Of a dtype; of those that a family has, the first is the family's."""
LOG_END = 3000
GRACE = 40.0
"""Seconds for comparing what there is, after the time is up."""
COMPILED = Path(tempfile.gettempdir()) / f"families-compiled-{os.getuid()}"


class Runner:
    """Runs families with one Python, and keeps what came out."""

    def __init__(
        self,
        python: str,
        device: str,
        out: Path,
        scratch: Path,
        dtypes: list[str],
        anyway: bool = False,
        ranks: int = 1,
        vision: str = "",
    ) -> None:
        """`vision` is a folder with torchvision, without which some families do not run."""
        self.vision = vision
        self.python, self.device, self.out, self.scratch = python, device, out, scratch
        self.dtypes, self.anyway, self.ranks = dtypes, anyway, ranks
        self.gpus = gpus(python) if device == "cuda" else 0
        self.slots: queue.Queue[int] = queue.Queue()
        self.lock = threading.Lock()
        rng = random.Random(7)
        self.prompts = scratch / "prompts.json"
        scratch.mkdir(parents=True, exist_ok=True)
        self.light: Afresh | Forked = Afresh(python)
        self.heavy: Afresh | Forked = self.light
        if device == "cpu":  # imports are most of the time there, and nothing is lost by a fork
            log, env = scratch / "server.txt", self.environment(0)
            self.light = Forked(python, ["torch", "transformers"], env, log)
            self.heavy = Forked(python, ["eagle3compat", "vllm.v1.engine.core", GENERATOR], env, log)
        self.prompts.write_text(json.dumps([[rng.randrange(8, 600) for _ in range(length)] for length in LENGTHS]))

    def run(self, family: Family, timeout: float, end: float) -> dict[str, Any] | None:
        """One family from model to verdict, in `timeout` seconds and before `end`; None if that is past already."""
        slot, started = self.slots.get(), time.monotonic()
        if started > end:
            self.slots.put(slot)
            return None
        folder = self.scratch / family.name
        record: dict[str, Any] = {
            "family": family.name, "title": family.title, "architecture": family.architecture, "device": self.device,
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(), "model_impl": family.model_impl,
            "ranks": self.ranks,
        }  # fmt: skip
        try:
            self._run(family, folder, record, slot, min(started + timeout, end))
        except subprocess.TimeoutExpired:
            record.update(outcome="timeout", why=f"not done after {time.monotonic() - started:.0f} s")
        except Exception as error:  # noqa: BLE001  one family must not end the others
            record.update(outcome="failed", why=f"{type(error).__name__}: {error}")
        finally:
            self.slots.put(slot)
        if record["outcome"] == "timeout":
            record["log"] = self.log_of(family)[-LOG_END:]
        record["seconds"] = round(time.monotonic() - started, 1)
        return record

    def _run(self, family: Family, folder: Path, record: dict[str, Any], slot: int, deadline: float) -> None:
        seen = self.vision and family.without is NO_VISION
        if self.device in family.without and not (self.anyway or seen):
            record.update(outcome="not run", why=family.without[self.device])
            return
        self.execute("reference", family, folder, slot, deadline, family.name, str(self.scratch), str(self.prompts))
        reference = json.loads((folder / "reference.json").read_text())
        record.update(versions=reference.pop("versions"), reference=reference)
        (folder / "plan.json").write_text(json.dumps(self.plan(family, folder)))
        script = str(ROOT / "tests/real/session.py")
        began = time.monotonic()
        try:
            code = self.execute(script, family, folder, slot, deadline, str(folder / "plan.json"), str(folder))
            end = {"error": "EndedError", "message": f"the session ended with exit code {code} before it"}
        except subprocess.TimeoutExpired:  # what was extracted by then counts
            if not (folder / "session.json").exists():
                raise
            said = f"the session was stopped before it, when the {deadline - began:.0f} s that it had were over"
            end = {"error": "timeout", "message": said}
        deadline = max(deadline, time.monotonic() + GRACE)
        outcomes = json.loads((folder / "session.json").read_text())
        outcomes = {**dict.fromkeys(("imports", *(f"load {d}" for d in self.dtypes), *self.dtypes), end), **outcomes}
        judged: dict[str, dict[str, Any]] = {}
        for dtype in sorted(self.dtypes, key=lambda name: name != "float32"):  # it says whether transformers agrees
            if dtype in self.dtypes_of(family):
                trusted = all("from_transformers" not in verdict for verdict in judged.values())
                judged[dtype] = self.verdict(family, folder, slot, deadline, outcomes, dtype, trusted)
            else:
                judged[dtype] = {"outcome": "not run", "why": f"{dtype}: {family.no_float32[self.device]}"}
        record["dtypes"] = {dtype: judged[dtype] for dtype in self.dtypes}
        verdicts = [judged[dtype] for dtype in self.dtypes]
        found = {verdict["outcome"] for verdict in verdicts}
        record["outcome"] = next(name for name in OUTCOMES if name in found)
        record["why"] = "; ".join(verdict["why"] for verdict in verdicts if verdict["why"])

    def dtypes_of(self, family: Family) -> list[str]:
        """The dtypes in which this family runs on this device."""
        without = self.device in family.no_float32 and not self.anyway
        return [dtype for dtype in self.dtypes if not (without and dtype == "float32")]

    def plan(self, family: Family, folder: Path) -> list[dict[str, Any]]:
        steps: list[dict[str, Any]] = [{"name": "apply", "do": "apply"}, {"name": "imports", "do": "imports"}]
        layers = json.loads((folder / "model/config.json").read_text())
        count = layers.get("text_config", layers).get("num_hidden_layers", 6)
        engine = family.engine if self.device == "cuda" else {}
        for dtype in self.dtypes_of(family):
            load = {
                "model_path": str(folder / "model"), "layer_ids": list(range(count)), "max_model_len": 512,
                "dtype": dtype, "edit": {"scheduler_config.max_num_batched_tokens": BUDGET, **engine},
                "gpu_memory_utilization": 0.06, "model_impl": family.model_impl, "tensor_parallel_size": self.ranks,
                # vLLM's CPU build does not start in a fork of a process that has numba, as image processors do
                "start_method": "fork" if self.device == "cpu" and family.text is None else "",
            }  # fmt: skip
            prompts = json.loads(self.prompts.read_text())
            steps += [
                {"name": f"load {dtype}", "do": "load", "with": load},
                {"name": dtype, "do": "generate", "with": {"prompts": prompts, "save": dtype}},
                *({"name": f"image {dtype}", "do": "generate", "with": {"prompts": [p]}} for p in family.image),
                {"name": f"attest {dtype}", "do": "attest"},
                {"name": f"close {dtype}", "do": "close"},
            ]
        return steps

    def verdict(
        self,
        family: Family,
        folder: Path,
        slot: int,
        deadline: float,
        outcomes: dict[str, Any],
        dtype: str,
        trusted: bool = True,
    ) -> dict[str, Any]:
        """How one dtype came out; without trust in transformers, against vLLM's own forward."""
        for step in ("imports", f"load {dtype}", dtype):
            if "error" in outcomes[step]:
                error = outcomes[step]
                refused = error["error"] == "UnprovenCaptureError" or "UnprovenCaptureError" in error["message"]
                outcome = "refused" if refused else "timeout" if error["error"] == "timeout" else "failed"
                return {"outcome": outcome, "why": f"{step}: {error['error']}: {brief(error['message'])}"}
        attested = outcomes.get(f"attest {dtype}", {}).get("value", [{}])[0]
        found = {key: attested.get(key) for key in ("model", "base", "kinds", "reading", "runner", "tokens_checked")}
        figures = {}
        if (folder / "want.pt").exists():
            figures["transformers"] = self.compared(family, folder, slot, deadline, dtype, "want")
        limit = max(family.limit, LIMITS[dtype, self.device])
        doubted = bool(figures) and (not trusted or apart(figures["transformers"], limit))
        if not figures or (doubted and not family.many_streams):
            arguments = (family.name, str(folder), str(self.prompts), dtype)
            self.execute("tap", family, folder, slot, deadline, *arguments)
            figures["vLLM's own forward"] = self.compared(family, folder, slot, deadline, dtype, f"tap-{dtype}")
        against, best = list(figures.items())[-1]
        why = f"{dtype}: off by {best['worst']:.2g} from {against}" if apart(best, limit) else ""
        found.update(outcome="different" if why else "equal", why=why, against=against, **best)
        if family.image:
            image = outcomes.get(f"image {dtype}", {"error": "", "message": "the session ended before it"})
            found["image"] = f"{image['error']}: {brief(image['message'])}" if "error" in image else "taken for a word"
        if len(figures) > 1:
            found["from_transformers"] = figures["transformers"]["worst"]
        return found

    def compared(
        self, family: Family, folder: Path, slot: int, deadline: float, dtype: str, want: str
    ) -> dict[str, Any]:
        paths = [str(folder / name) for name in (f"{dtype}.pt", f"{want}.pt", f"figures-{dtype}-{want}.json")]
        self.execute("compare", family, folder, slot, deadline, *paths)
        figures: dict[str, Any] = json.loads(Path(paths[-1]).read_text())
        return figures

    def execute(self, script: str, family: Family, folder: Path, slot: int, deadline: float, *arguments: str) -> int:
        """Run one of the scripts beside the table (or a path) to its end; its output goes to the family's log.

        Only that of a session may end with another exit code than 0, which is returned.
        """
        path = Path(script) if script.endswith(".py") else ROOT / "tests/families" / f"{script}.py"
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "log.txt"
        with log.open("a") as file:
            file.write(f"\n## {family.name}: {path.name}\n")
        processes = self.light if path.name in ("reference.py", "compare.py") else self.heavy
        env = self.environment(slot)
        if self.device == "cuda" and self.ranks > 1 and path.name == "session.py":
            env["CUDA_VISIBLE_DEVICES"] = ",".join(str((slot + rank) % self.gpus) for rank in range(self.ranks))
        code: int = processes.run(path, arguments, log, env, deadline)
        if code and path.name != "session.py":
            raise RuntimeError(f"{path.name} ended with {code}: {last_words(self.log_of(family))}")
        return code

    def environment(self, slot: int) -> dict[str, str]:
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling vLLM anew in each process is most of an import
        env["PYTHONPYCACHEPREFIX"] = os.environ.get("PYTHONPYCACHEPREFIX", str(COMPILED))
        paths = [str(ROOT / "src"), str(ROOT / "tests"), self.vision, os.environ.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        if self.device == "cpu":
            env.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_MLA_DISABLE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
        else:
            env.update(CUDA_VISIBLE_DEVICES=str(slot % self.gpus), OMP_NUM_THREADS="2")
            env.setdefault("TRITON_F32_DEFAULT", "ieee")  # not TF32, with its 10 bits
            env.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
            env.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        return env

    def log_of(self, family: Family) -> str:
        path = self.scratch / family.name / "log.txt"
        return path.read_text(errors="replace") if path.exists() else ""


def apart(figures: dict[str, Any], limit: float) -> bool:
    """Whether streams differ from a reference, or the reference cannot tell."""
    return bool(figures["worst"] > limit or min(figures["wrong_layer"], figures["wrong_row"]) < CONTROL)


def gpus(python: str) -> int:
    """How many GPUs there are, at least 1; asked in a process of its own."""
    command = [python, "-c", "import torch; print(torch.cuda.device_count())"]
    return max(1, int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]))


def records(path: Path) -> dict[str, dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["family"]: record for record in map(json.loads, lines)}


def evidence(vllm: str, device: str, ranks: int) -> str:
    """Name of the file with the records of one vLLM on one kind of device at one tensor-parallel size."""
    return f"{vllm}-{device}{'' if ranks == 1 else f'-tp{ranks}'}.jsonl"


def keep(out: Path, record: dict[str, Any], device: str) -> None:
    """Put one family's record in the place of an earlier one."""
    path = out / evidence(record.get("versions", {}).get("vllm", "unknown"), device, record["ranks"])
    found = {**records(path), record["family"]: record}
    out.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(without_places(json.dumps(found[name])) + "\n" for name in sorted(found)))
    fresh.replace(path)


def without_places(text: str) -> str:
    """`text` with the paths in it from the package or the checkout on: where these lie says nothing."""
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    for path in sorted(filter(None, paths), key=len, reverse=True):
        text = text.replace(f"{path}/", "")
    return re.sub(r"/[\w./+-]*/(?:site|dist)-packages/", "", text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Extract from tiny models of every family, and compare.")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}; all by default")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--python", default="", help="of an environment with vLLM; made for the CPU, here for CUDA")
    parser.add_argument(
        "--pair", nargs=2, metavar=("VLLM", "SPECULATORS"), help="whose CPU environment is used, with torchvision"
    )
    parser.add_argument("--jobs", type=int, default=1, help="families at a time")
    parser.add_argument("--out", type=Path, default=ROOT / "evidence" / "families")
    parser.add_argument("--scratch", type=Path, default=None, help="where models are made; a folder that is deleted")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a family")
    parser.add_argument("--budget", type=float, default=24 * 3600, help="seconds for all; what is not begun is left")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel size of the extraction; references: 1")
    parser.add_argument("--logs", action="store_true", help="also write DIR/logs.txt")
    parser.add_argument("--again", action="store_true", help="also what is in the evidence already")
    parser.add_argument("--anyway", action="store_true", help="also what the table says does not run there")
    options = parser.parse_args()
    unknown = sorted(set(options.families) - set(FAMILIES))
    if unknown:
        parser.error(f"unknown families {unknown}: choose from {sorted(FAMILIES)}")
    with tempfile.TemporaryDirectory(prefix="families-") as scratch:
        sys.exit(run(options, options.scratch or Path(scratch)))


def run(options: argparse.Namespace, scratch: Path) -> int:
    console = Console(stderr=True, soft_wrap=True)
    python = options.python or (sys.executable if options.device == "cuda" else cpu_python(*options.pair or PAIR))
    vision = str(vision_of(*options.pair)) if options.pair else ""
    dtypes = options.dtypes.split(",")
    runner = Runner(python, options.device, options.out, scratch, dtypes, options.anyway, options.ranks, vision)
    vllm = subprocess.run(
        [python, "-c", "import importlib.metadata as m; print({d.name: d.version for d in m.distributions()"
         " if d.name in ('vllm', 'vllm-cpu')}.popitem()[1])"], capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    known = {} if options.again else records(options.out / evidence(vllm, options.device, options.ranks))
    done = {name for name, record in known.items() if record["outcome"] not in ("failed", "timeout")}
    wanted = [FAMILIES[name] for name in options.families or FAMILIES if name not in done]
    console.print(f"{len(wanted)} families on vLLM {vllm} ({options.device}), {options.jobs} at a time")
    for slot in range(options.jobs):
        runner.slots.put(slot)
    bad, end = 0, time.monotonic() + options.budget
    with ThreadPoolExecutor(options.jobs) as pool:
        running = {pool.submit(runner.run, family, options.timeout, end): family for family in wanted}
        for number, job in enumerate(as_completed(running), 1):
            record = job.result()
            if record is None:
                continue
            record.setdefault("versions", {}).setdefault("vllm", vllm)
            keep(options.out, record, options.device)
            if options.logs:
                with (options.out / "logs.txt").open("a") as log:
                    log.write(runner.log_of(running[job])[-40000:])
            bad += record["outcome"] not in ("equal", "not run")
            worst = ", ".join(f"{d} {v['worst']:.1g}" for d, v in record.get("dtypes", {}).items() if "worst" in v)
            console.print(f"[{number}/{len(wanted)}] {record['family']}: {record['outcome']} ({worst or '-'}) in "
                          f"{record['seconds']} s{': ' + record['why'][:300] if record.get('why') else ''}",
                          markup=False)  # fmt: skip
    runner.light.close()
    runner.heavy.close()
    return int(bad > 0)


def cpu_python(vllm: str, speculators: str) -> str:
    import environments  # type: ignore[import-not-found]

    return str(environments.ensure(vllm, speculators))


def vision_of(vllm: str, speculators: str) -> Path:
    import vision  # type: ignore[import-not-found]

    folder: Path = vision.ensure(vllm, speculators)
    return folder


if __name__ == "__main__":
    main()
