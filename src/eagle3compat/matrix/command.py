"""`eagle3compat matrix record | build | check`. Exit codes: 0 all is well, 1 it is not, 2 usage."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from ..errors import Eagle3CompatError, InputError

FOLDER, FILE = Path("evidence/matrix"), Path("compat_matrix.yaml")
WELL, NOT_WELL, USAGE = 0, 1, 2


def add_parser(commands: Any) -> None:
    matrix = commands.add_parser("matrix", help="what was measured, pair by pair: record, build, check")
    actions = matrix.add_subparsers(dest="action", metavar="ACTION", required=True)
    record = actions.add_parser("record", help="extract in this environment, compare, and write the evidence")
    record.add_argument("--model", action="append", metavar="MODEL", dest="models",
                        help="llama, qwen3, deepseek_v3 (tiny ones, made here) or a folder; again for more; llama")
    record.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    record.add_argument("--start-method", choices=("fork", "spawn"), default="", help="of workers; default: vLLM's")
    record.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    record.add_argument("--scratch", type=Path, metavar="DIR", help="keeps models and references for the next time")
    record.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS")
    build = actions.add_parser("build", help=f"write {FILE} from the evidence")
    check = actions.add_parser("check", help=f"exit 1 where {FILE} and the evidence disagree")
    for action in (record, build, check):
        action.add_argument("--evidence", type=Path, default=FOLDER, metavar="DIR", help=f"default: {FOLDER}")
    for action in (build, check):
        action.add_argument("--file", type=Path, default=FILE, help=f"default: {FILE}")


def run(options: argparse.Namespace) -> int:
    """The exit code of the command."""
    try:
        if options.action == "record":
            return _record(options)
        return _build(options) if options.action == "build" else _check(options)
    except InputError as error:
        print(error, file=sys.stderr)
        return USAGE
    except OSError as error:  # a folder or file that cannot be read or written
        print(f"eagle3compat: {error}", file=sys.stderr)
        return USAGE
    except Eagle3CompatError as error:  # a cell that could not be measured at all
        print(error, file=sys.stderr)
        return NOT_WELL


def _record(options: argparse.Namespace) -> int:
    from ..terminal import progress
    from . import evidence
    from .record import Options, record

    asked = Options(
        list(dict.fromkeys(options.models or ["llama"])), options.evidence, options.tensor_parallel_size,
        options.start_method, options.dtype, options.scratch, options.timeout,
    )
    with progress("recording") as say:
        files = record(asked, say)
    levels = []
    for file in files:
        piece = json.loads(file.read_text(encoding="utf-8"))
        levels.append(piece["level"])
        figures = ", ".join(f"{name.replace('_', ' ')} {value:.2g}" for name, value in piece["controls"].items())
        shown = f"{piece['tensors']} tensors, off by {evidence.worst(piece):.1e} at the most; controls: {figures}"
        print(f"{file}: {piece['level']}, {piece['result']}" + (f" ({shown})" if piece["errors"] else ""))
    return WELL if set(levels) == {"parity"} else NOT_WELL


def _build(options: argparse.Namespace) -> int:
    from . import book, evidence

    pieces = evidence.read(options.evidence)
    faults = [fault for piece in pieces.items() for fault in evidence.faults(*piece)]
    if not pieces:
        faults = [f"eagle3compat: there is no evidence in {options.evidence}. Record some, or name its folder."]
    if faults:
        print("\n".join(faults), file=sys.stderr)
        return NOT_WELL
    options.file.write_text(book.text(pieces, _named(options)), encoding="utf-8")
    print(f"{options.file}: {len(book.cells(pieces))} pairs from {len(pieces)} pieces of evidence")
    return WELL


def _named(options: argparse.Namespace) -> str:
    """The folder of evidence as the file names it: seen from where the file lies, however it was given here."""
    return Path(os.path.relpath(options.evidence.resolve(), options.file.resolve().parent)).as_posix()


def _check(options: argparse.Namespace) -> int:
    from . import book, evidence

    faults = book.faults(options.file, options.evidence, _named(options))
    if faults:
        print("\n".join(faults), file=sys.stderr)
        return NOT_WELL
    pieces = evidence.read(options.evidence)
    print(f"{options.file} agrees with {len(pieces)} pieces of evidence for {len(book.cells(pieces))} pairs")
    return WELL
