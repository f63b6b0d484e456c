"""What `eagle3compat serve` refuses before it loads a model: `python serve_refusals.py CASES.json OUT.json`.

CASES holds a command line a name; OUT gets its exit code and what it wrote.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

from eagle3compat.cli import main


def outcome(words: list[str]) -> tuple[object, str]:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            code: object = main(["serve", *words])
        except SystemExit as end:  # as argparse ends
            code = end.code
    return code, said.getvalue()


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps({name: outcome(words) for name, words in cases.items()}))
