"""What to do so that stock extracts again what is faulty or missing, and nothing else.

Stock's in-process script (`scripts/data_generation_offline.py`, 0.3.0 to 0.4.0.1) goes on at the largest index in the
names of its output folder, plus one: it fills no gap, and a broken file counts as done. The sample of file N is row
N - start_idx of the data set, which is shuffled with its seed before `--max-samples` takes the first rows of it. So an
empty file named for the index before a gap, in a folder of its own, and `--max-samples` for the index after it make the
unchanged script extract exactly that gap. The server path's script extracts whatever has no file.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path

from ..errors import InputError
from .faults import ranges, written
from .files import IN_PROCESS, Folder

RUNS_SHOWN = 5
SCRIPT = "data_generation_offline.py YOUR_ARGUMENTS"


def resumes_at(folder: Folder, without: Iterable[int] = ()) -> int:
    """The index at which stock's in-process script would go on, if the files `without` were not there.

    It takes any name that starts with `data_`, ends with `.pt` and has what `int()` reads between them.
    """
    own = (path.name for path in folder.strays if path.parent == folder.path)
    odd = (re.fullmatch(r"data_(-?\d+)\.pt", name) for name in own)
    return max({int(match.group(1)) for match in odd if match} | (set(folder.files) - set(without)), default=-1) + 1


def advice(folder: Folder, redo: list[int], moved: Path | None) -> list[str]:
    """Lines for a person, commands among them. `moved` is where the faulty files have been moved to."""
    if not redo:
        return []
    lines = [f"To redo, {len(redo)}: {written(redo)}"]
    present = [index for index in redo if index in folder.files]
    if moved is not None:
        lines.append(f"{len(present)} faulty files were moved to {moved}.")
    elif present:
        lines.append("First move the faulty files aside with `--move-bad DIR`: nothing here deletes or overwrites one.")
    if folder.layout is IN_PROCESS and folder.records.written_by:
        stays = "" if moved is not None or not present else ", once the faulty files are moved aside"
        driver = folder.records.written_by
        return [*lines, f"{driver} extracts every index that has no file: run it again as before{stays}."]
    if folder.layout is not IN_PROCESS:
        stays = "" if moved is not None or not present else ", once the faulty files are moved aside"
        return [*lines, f"Stock's script extracts every index that has no file: run it again as before{stays}."]
    return lines + _in_process(folder, redo, moved)


def _in_process(folder: Folder, redo: list[int], moved: Path | None) -> list[str]:
    resume, clear = resumes_at(folder), resumes_at(folder, redo)
    now, then = (clear, clear) if moved is not None else (resume, clear)
    lines = [f"Stock's script goes on at index {now}, whatever is missing or broken before."]
    tail = [index for index in redo if index >= then]
    gaps = [index for index in redo if index < then]
    if tail and now != then:
        lines.append(f"With the faulty files moved aside it would go on at {then}, and redo {written(tail)}.")
    elif tail:
        lines.append(f"Run again as before, it extracts {written(tail)}.")
    if not gaps:
        return lines
    runs = ranges(gaps)
    lines.append(
        f"It would not redo {written(gaps)}. In a folder of its own it does, one run for each gap ({len(runs)}):"
    )
    for low, high in runs[:RUNS_SHOWN]:
        lines += ["", *commands(folder, low, high)]
    if len(runs) > RUNS_SHOWN:
        lines += ["", f"... and so on for {written(gaps[gaps.index(runs[RUNS_SHOWN][0]) :])}."]
    if len(runs) > 1:
        again = max(folder.files) + 1 - gaps[0]
        first = folder.layout.file(gaps[0])
        lines += ["", "Or in one run, which loads the model once:"]
        lines.append(f"move everything from {first} on aside and run it as before: {again} samples for {len(redo)}.")
    return [
        *lines,
        "",
        "If it says that all samples are processed already, raise --max-samples: preprocessing drops conversations.",
        "Then check the folder again.",
    ]


def commands(folder: Folder, low: int, high: int) -> list[str]:
    """Shell lines that make stock's unchanged script write the files `low` to `high`, both included."""
    scratch = folder.path.resolve().with_name(f"{folder.path.resolve().name}.redo-{low}-{high}")
    words, first = _recorded(folder)
    place, files = shlex.quote(str(scratch)), shlex.quote(str(folder.path.resolve()))
    marker = f"{place}/{folder.layout.file(low - 1)}"
    script = f"{words} --output-dir {place} --max-samples {high + 1 - first}"
    start = [f"mkdir -p {place}"] + ([f": > {marker}"] if low else [])
    end = ([f"rm {marker}"] if low else []) + [f"mv -n {place}/data_*.pt {files}/"]
    return [*start, f"eagle3compat run {script}", *end]


def _recorded(folder: Folder) -> tuple[str, int]:
    """The script with the arguments of the run that wrote the folder, and its `--start-idx`."""
    if folder.records.command is None:
        return SCRIPT, 0
    kept, first, words = [], 0, iter(folder.records.command.split())
    for word in words:
        name, _, value = word.partition("=")
        if name in ("--output-dir", "--max-samples", "--start-idx"):
            value = value or next(words, "")
            if name == "--start-idx":
                first = int(value) if re.fullmatch(r"-?[0-9]{1,15}", value) else 0
                kept += [name, value]
        else:
            kept.append(shlex.quote(word))
    return " ".join(kept), first


def move_aside(folder: Folder, indices: Iterable[int], target: Path) -> list[Path]:
    """Move these files to `target`; where they are now. Raises InputError, before anything is moved."""
    source, place = folder.path.resolve(), target.resolve()
    if place == source or source in place.parents:
        raise InputError(f"{target} lies in {folder.path}, where training would read it. Choose another folder.")
    moves = [(folder.files[index], place / folder.files[index].name) for index in indices if index in folder.files]
    taken = [new for _, new in moves if os.path.lexists(new)]
    if taken:
        raise InputError(f"{taken[0]} is there already. Choose another folder than {target}.")
    place.mkdir(parents=True, exist_ok=True)
    for old, new in moves:
        shutil.move(old, new)
    return [new for _, new in moves]
