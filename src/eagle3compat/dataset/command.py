"""`eagle3compat check` and `eagle3compat convert`. Exit codes: 0 clean, 1 faults, 2 usage."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import Eagle3CompatError, InputError
from .sample import UnreadableError

if TYPE_CHECKING:
    from .check import Findings
    from .files import Folder
    from .recompute import Plan

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
    convert = commands.add_parser("convert", help="data_N.pt files as hs_N.safetensors, or the other way round")
    convert.add_argument("source", type=Path, metavar="SRC", help="holds the files; it is checked first, and kept")
    convert.add_argument("target", type=Path, metavar="DST", help="a new folder, or one that a stopped run left")
    convert.add_argument("--to", choices=("server", "in-process"), required=True, help="the layout to write")
    convert.add_argument("--layer-ids", type=int, nargs="+", metavar="ID", help="of SRC; data_config.json has them")
    convert.add_argument("--num-hidden-layers", type=natural, metavar="N", help="of the model, to check the ids by")
    convert.add_argument("--loss-masks", type=Path, metavar="DIR", help="prepare-data's folder, for --to in-process")
    convert.add_argument("--skip-faulty", action="store_true", help="leave out what `check` calls faulty")
    convert.set_defaults(dataset=_convert)


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
    except Eagle3CompatError as error:  # of an extraction that was to be compared
        print(error, file=sys.stderr)
        return FAULTY
    except UnreadableError as error:
        print(f"eagle3compat: {error.path}: {error}. It was sound before; run this again.", file=sys.stderr)
        return FAULTY
    except OSError as error:  # a full disk, or a folder that may not be read or written
        print(f"eagle3compat: {error}. What was written is whole; run it again to go on.", file=sys.stderr)
        return FAULTY
    return code


def need(*modules: str) -> None:
    """Raise InputError where this environment lacks what the files are read with."""
    from ..detect import package

    for module in modules:
        if package(module) is None:
            raise InputError(f"{module} is not installed here. Run this in the environment that has your speculators.")


def _check(options: argparse.Namespace) -> int:
    from .files import SERVER, open_folder, size_of

    folder = open_folder(options.directory, options.layout)
    need("torch", *(["safetensors"] if folder.layout is SERVER else []))
    from ..terminal import print_json
    from .check import check
    from .redo import move_aside
    from .show import as_dict, progress, show

    layer_ids = _layer_ids(options.layer_ids, folder)
    plan = None if options.model is None else _plan(options, folder, layer_ids)
    with progress("reading", sum(map(size_of, folder.files.values()))) as advance:
        findings = check(folder, layer_ids, options.count, advance)
    if plan is not None:
        _recompute(findings, plan, options.sample, options.seed)
    if options.move_bad is not None:
        move_aside(folder, findings.redo, options.move_bad)
    if options.json:
        print_json(as_dict(findings, options.move_bad))
    else:
        show(findings, options.examples, options.move_bad)
    if findings.faults:
        return FAULTY
    return CLEAN if plan is None or findings.recomputed else USAGE  # what was asked for, --model, was not done


def _layer_ids(asked: list[int] | None, folder: Folder) -> list[int] | None:
    """Those of the files, from the command line or what lies beside them; these must not contradict each other."""
    known = folder.layer_ids
    if None not in (asked, known) and asked != known:
        raise InputError(f"--layer-ids says {asked}, and beside the files it says {known}. Leave --layer-ids out.")
    return known if asked is None else asked


def unknown(folder: Folder) -> str:
    """Why the layer ids of a folder are not known, in words."""
    said = "; ".join(f"{fault.file}: {fault.detail.rstrip('.')}" for fault in folder.records.faults)
    return f"not known ({said})" if said else "written nowhere"


def _plan(options: argparse.Namespace, folder: Folder, layer_ids: list[int] | None) -> Plan:
    if layer_ids is None:
        raise InputError(f"which layers the files hold is {unknown(folder)}. Name them with --layer-ids.")
    need("vllm", "speculators", "transformers")
    from .. import detect
    from .recompute import plan

    speculators = detect.package("speculators")
    if speculators is None or not detect.in_process_extraction(speculators):
        raise InputError("this speculators has no in-process generator. Recompute where speculators 0.3 or 0.4 is.")
    return plan(folder, layer_ids, options.model, options.tensor_parallel_size)


def _recompute(findings: Findings, plan: Plan, count: int, seed: int) -> None:
    from .recompute import choose, recompute
    from .show import progress

    indices = choose(findings, count, seed)
    if not indices:
        findings.notes.append("No file is sound enough to be recomputed.")
        return
    with progress("recomputing", len(indices), unit="files") as advance:
        recompute(findings, indices, plan, advance)


def _convert(options: argparse.Namespace) -> int:
    from .files import IN_PROCESS, LAYOUTS, SERVER, open_folder, size_of

    to = LAYOUTS[options.to]
    source = open_folder(options.source, (SERVER if to is IN_PROCESS else IN_PROCESS).id)
    if options.target.resolve() in (options.source.resolve(), source.path.resolve()):
        raise InputError(f"{options.target} is the source. Choose another folder.")
    need("torch", "safetensors", "datasets")
    layer_ids = _layer_ids(options.layer_ids, source)
    if layer_ids is None:
        raise InputError(f"which layers {source.path} holds is {unknown(source)}. Name them with --layer-ids.")
    from .check import check
    from .convert import check_masks, convert, converted_ids, loss_masks, start, write_rows
    from .show import progress, show

    converted_ids(layer_ids, source.layout, to, options.num_hidden_layers)
    total = sum(map(size_of, source.files.values()))
    with progress("checking", total) as advance:
        findings = check(source, layer_ids, advance=advance)
    if findings.unusable and not options.skip_faulty:
        show(findings, examples=5, moved=None)
        print("Nothing was converted. Mend these, or leave them out with --skip-faulty.", file=sys.stderr)
        return FAULTY
    left_out = set(findings.unusable) & set(source.files)
    indices = [index for index in source.files if index not in left_out]
    masks = None if options.loss_masks is None else loss_masks(options.loss_masks)
    if masks is not None:
        check_masks(masks, indices)
    folder = options.target / "hidden_states" if to is SERVER else options.target
    record = start(source, folder, to, layer_ids, options.num_hidden_layers)
    with progress("converting", sum(source.files[index].stat().st_size for index in indices)) as advance:
        written = convert(source, folder, record, indices, masks, advance)
    print(
        f"{folder}: {written} files written, {len(indices) - written} were there, {len(left_out)} left out; "
        f"layer ids {record['layer_ids']}, which are {list(layer_ids)} in the {source.layout.id} layout"
    )
    if to is SERVER and findings.unusable:
        print("With samples missing no data set was written; train with that of prepare-data.")
    elif to is SERVER:
        write_rows(source, options.target, indices)
        print(f"{options.target}: the data set for training, a row for each file")
    return FAULTY if findings.unusable else CLEAN
