"""`eagle3compat check` and `eagle3compat convert`. Exit codes: 0 clean, 1 faults, 2 usage."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..errors import InputError

CLEAN, FAULTY, USAGE = 0, 1, 2


def add_parsers(commands: Any) -> None:
    """Add both to the parsers of the command line; each leaves in `dataset` what runs it."""
    check = commands.add_parser("check", help="files of hidden states that were written: what is wrong, what to redo")
    check.add_argument("directory", type=Path, metavar="DIR", help="holds data_N.pt or hs_N.safetensors")
    check.add_argument("--layout", choices=("in-process", "server"), help="where a folder holds files of both")
    check.add_argument("--layer-ids", type=int, nargs="+", metavar="ID", help="of the files; data_config.json has them")
    check.add_argument("--count", type=natural, help="how many samples there should be; data_config.json has it")
    check.add_argument("--model", help="recompute a sample of the files with this model, and compare")
    check.add_argument("--sample", type=natural, default=8, metavar="N", help="how many files to recompute (8)")
    check.add_argument("--seed", type=int, default=0, help="of the choice of these files (0)")
    check.add_argument("--tensor-parallel-size", type=natural, default=1, metavar="N", help="of the model (1)")
    check.add_argument("--move-bad", type=Path, metavar="DIR", help="move the files that are to be redone there")
    check.add_argument("--examples", type=natural, default=5, metavar="N", help="shown of each kind of fault (5)")
    check.add_argument("--json", action="store_true", help="print one JSON object, with every fault")
    check.set_defaults(dataset=_check)


def natural(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def run(parsed: argparse.Namespace) -> int:
    """The exit code of the command."""
    try:
        code: int = parsed.dataset(parsed)
    except InputError as error:
        print(error, file=sys.stderr)
        return USAGE
    return code


def need(*modules: str) -> None:
    """Raise InputError where this environment lacks what the files are read with."""
    from importlib.util import find_spec

    for module in modules:
        if find_spec(module) is None:
            raise InputError(f"{module} is not installed here. Run this in the environment that has your speculators.")


def _check(options: argparse.Namespace) -> int:
    from .files import SERVER, open_folder

    folder = open_folder(options.directory, options.layout)
    need("torch", *(["safetensors"] if folder.layout is SERVER else []))
    from ..terminal import print_json
    from .check import check
    from .redo import move_aside
    from .show import as_dict, progress, show

    layer_ids = options.layer_ids if options.layer_ids is not None else folder.layer_ids
    with progress("reading", sum(path.stat().st_size for path in folder.files.values())) as advance:
        findings = check(folder, layer_ids, options.count, advance)
    if options.move_bad is not None:
        move_aside(folder, findings.redo, options.move_bad)
    if options.json:
        print_json(as_dict(findings, options.move_bad))
    else:
        show(findings, options.examples, options.move_bad)
    return FAULTY if findings.faults else CLEAN
