"""A page of docs/ that is generated: written, or compared with what it should be."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def page_command(page: Path, document: Callable[[], str], made_from: str) -> int:
    """The command line of a page's tool: `[FILE] [--check]`; the exit code."""
    parser = argparse.ArgumentParser(description=f"Write docs/{page.name} from {made_from}.")
    parser.add_argument("file", nargs="?", type=Path, default=page)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the file differs")
    arguments = parser.parse_args()
    wanted = document()
    if not arguments.check:
        arguments.file.write_text(wanted, encoding="utf-8")
        return 0
    if arguments.file.is_file() and arguments.file.read_text(encoding="utf-8") == wanted:
        return 0
    tool = Path(sys.argv[0]).name
    print(f"{arguments.file} is not what {made_from} says: run python tools/{tool}", file=sys.stderr)
    return 1
