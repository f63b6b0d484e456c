"""The command `eagle3compat`.

Exit codes: 0 healthy, 1 incompatible or drifted, or files with faults, 2 usage or network. None of vllm, torch,
transformers and speculators is imported by `doctor`, `plan`, `explain` or `probe`; each command imports only what it
needs.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
from collections.abc import Sequence

from .dataset import command as dataset
from .errors import Eagle3CompatError, InputError
from .matrix import command as matrix

HEALTHY, UNHEALTHY, USAGE, STOPPED = 0, 1, 2, 130
RUN_USAGE = "eagle3compat run SCRIPT [ARG ...]\n       eagle3compat run -m MODULE [ARG ...]"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of one command."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["run"] and words[1:2] not in (["-h"], ["--help"]):
        return _run(words[1:])  # what follows is the program's own; argparse would look for options in it
    if words[:1] == ["serve"]:
        return _serve(words[1:])  # vLLM's own options, of which only vLLM knows
    parsed = _parser().parse_args(words)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be text
    if "dataset" in parsed:
        return dataset.run(parsed)
    if parsed.command in ("matrix", "rehearse"):
        from .steps import stoppable

        try:
            with stoppable():
                return matrix.run(parsed) if parsed.command == "matrix" else _rehearse(parsed)
        except KeyboardInterrupt:
            print("eagle3compat: stopped, with all that it had started.", file=sys.stderr)
            return STOPPED
    gc.disable()  # one short look at syntax trees, none of which becomes garbage: it takes half the time without
    try:
        if parsed.command == "explain":
            return _explain(parsed.adapter)
        if parsed.command == "probe":
            return _probe(parsed)
        return _doctor(parsed) if parsed.command == "doctor" else _plan(parsed.json)
    except InputError as error:  # an environment variable of this library that says something unknown
        print(error, file=sys.stderr)
        return USAGE
    finally:
        gc.enable()


def _parser() -> argparse.ArgumentParser:
    from . import __version__

    parser = argparse.ArgumentParser(
        prog="eagle3compat",
        description="Runs stock speculators hidden-state extraction on the installed vLLM, and checks what it returns.",
        epilog="Exit codes: 0 healthy, 1 incompatible or drifted, or files with faults, 2 usage or network.",
    )
    parser.add_argument("--version", action="version", version=f"eagle3compat {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    doctor = commands.add_parser("doctor", help="what is installed, what would be adapted and why; for an issue")
    plan = commands.add_parser("plan", help="what would be adapted and why")
    for command in (doctor, plan):
        command.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.add_argument("--deep", action="store_true", help="import vLLM too, in a process of its own, and look there")
    doctor.add_argument("--layer-ids", nargs="+", metavar="ID", help="say how a draft trained on these is served")
    doctor.add_argument("--server-python", default="", metavar="PATH", help="the python of the server's environment")
    doctor.add_argument("--hidden-states-path", default="", metavar="DIR", help="the folder that the server writes to")
    explain = commands.add_parser("explain", help="everything known of one adapter")
    explain.add_argument("adapter", metavar="ADAPTER", help="an adapter's id; `plan` lists them")
    _add_rehearse(commands)
    probe = commands.add_parser("probe", help="would a vLLM work that is not installed? read, not installed")
    probe.add_argument("target", metavar="TARGET", help="a version, `latest`, a wheel, a URL of either, a folder")
    probe.add_argument("--speculators", metavar="TARGET", help="the same for speculators; default: the installed one")
    probe.add_argument("--transformers", metavar="TARGET", help="the same for transformers; default: what fits both")
    probe.add_argument("--index-url", metavar="URL", help="the package index; default: pip's")
    probe.add_argument("--json", action="store_true", help="print one JSON object")
    dataset.add_parsers(commands)
    matrix.add_parser(commands)
    commands.add_parser("serve", help="answer speculators 0.5 to 0.9 as a vLLM server does")
    commands.add_parser("run", help="run a stock script, unmodified, adapted in every process", usage=RUN_USAGE)
    return parser


def _add_rehearse(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    rehearse = commands.add_parser("rehearse", help="the whole extraction on a small model of the same architecture")
    rehearse.add_argument("--model", required=True, help="a model folder, or an id on the hub; weights are not needed")
    rehearse.add_argument("--layer-ids", nargs="+", metavar="ID", help="as for the real run; stock's own by default")
    rehearse.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    rehearse.add_argument("--device", choices=("cpu", "cuda"), default="", help="by default what this machine has")
    rehearse.add_argument("--max-model-len", type=int, default=2048, metavar="N", help="tokens of the longest sample")
    rehearse.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS")
    rehearse.add_argument("--estimate", action="store_true", help="only say what the real model needs; run nothing")
    rehearse.add_argument("--json", action="store_true", help="print one JSON object")


def _rehearse(parsed: argparse.Namespace) -> int:
    from .doctor import absent
    from .rehearse.rehearsal import Options, rehearse
    from .rehearse.show import show
    from .terminal import print_json, progress

    missing = [] if parsed.estimate else absent()
    if missing:
        print("\n".join(missing), file=sys.stderr)
        return UNHEALTHY
    try:
        options = Options(
            parsed.model, _layer_ids(parsed.layer_ids), parsed.tensor_parallel_size,
            parsed.device, parsed.max_model_len, parsed.timeout, not parsed.estimate,
        )
        with progress("rehearsing") as say:
            verdict = rehearse(options, say)
    except InputError as error:
        print(error, file=sys.stderr)
        return USAGE
    if parsed.json:
        print_json(verdict.as_dict())
    else:
        show(verdict)
    return HEALTHY if verdict.works else USAGE if verdict.untried else UNHEALTHY


def _doctor(parsed: argparse.Namespace) -> int:
    from .doctor import examine
    from .screen import show
    from .terminal import print_json, progress

    layer_ids = _layer_ids(parsed.layer_ids) or ()
    if min(layer_ids, default=0) < 0:
        raise InputError(f"layer id {min(layer_ids)} is negative. Layer ids count decoder layers from 0.")
    with progress("doctor") as say:
        checkup = examine(parsed.deep, layer_ids, parsed.server_python, parsed.hidden_states_path, say)
    if parsed.json:
        print_json(checkup.as_dict())
    else:
        show(checkup)
    return HEALTHY if checkup.healthy else UNHEALTHY


def _layer_ids(text: Sequence[str] | None) -> list[int] | None:
    """Layer ids as a command line has them: `2 30 58` or `2,30,58`. Raises InputError."""
    words = [word for part in text or () for word in part.replace(",", " ").split()]
    for word in words:
        if not re.fullmatch(r"-?[0-9]{1,9}", word):
            raise InputError(f"layer id {word[:60]!r} is not an integer. Layer ids count decoder layers from 0.")
    return None if text is None else [int(word) for word in words]


def _plan(as_json: bool) -> int:
    from . import plan
    from .doctor import absent
    from .report import Report
    from .terminal import console, print_json

    problems = absent()
    report = Report(" ".join(problems), ()) if problems else plan()
    healthy = report.healthy and not problems
    if as_json:
        print_json({**report.as_dict(), "healthy": healthy})
    elif problems:
        print("\n".join(problems), file=sys.stderr)
    else:
        console().print(report.table())
    return HEALTHY if healthy else UNHEALTHY


def _explain(name: str) -> int:
    from .adapters import ADAPTERS
    from .explain import explain

    adapter = next((adapter for adapter in ADAPTERS if adapter.id == name), None)
    if adapter is None:
        ids = ", ".join(adapter.id for adapter in ADAPTERS)
        print(f"eagle3compat: there is no adapter '{name}'. The adapters are: {ids}.", file=sys.stderr)
        return USAGE
    explain(adapter)
    return HEALTHY


def _probe(parsed: argparse.Namespace) -> int:
    from .probe import NetworkError, probe
    from .terminal import print_json

    try:
        verdict = probe(parsed.target, parsed.speculators, parsed.transformers, parsed.index_url)
    except NetworkError as error:
        print(error, file=sys.stderr)
        return USAGE
    if parsed.json:
        print_json(verdict.as_dict())
    else:
        from .probe.show import show

        show(verdict)
    return HEALTHY if verdict.healthy else UNHEALTHY


def _serve(words: list[str]) -> int:
    from . import detect

    if {"-h", "--help"} & set(words):
        from .serve.arguments import own_help

        print(own_help(), end="")
        return HEALTHY
    if detect.package("vllm") is None:
        print("vLLM is not installed here, and the model runs in it. Install vLLM first.", file=sys.stderr)
        return UNHEALTHY
    from .serve.command import run

    return run(words)


def _run(words: list[str]) -> int:
    named = words[1:2] if words[:1] == ["-m"] else words[:1]
    if not named or not named[0].strip() or (words[0].startswith("-") and words[0] != "-m"):
        print(f"usage: {RUN_USAGE}", file=sys.stderr)
        return USAGE
    from .runner import ProgramNotFoundError, run

    try:
        return run(words)
    except ProgramNotFoundError as error:
        print(f"eagle3compat: {error}", file=sys.stderr)
        return USAGE
    except InputError as error:
        print(error, file=sys.stderr)
        return USAGE
    except Eagle3CompatError as error:  # of apply(): the pair cannot be bridged; the program's own are shown by run()
        print(error, file=sys.stderr)
        return UNHEALTHY
