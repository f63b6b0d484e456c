"""Writes tests/surfaces/server.json: what decides the server path, of each release that is unpacked here.

    python tools/server_record.py FOLDER ...

Each FOLDER is an unpacked wheel of vLLM or of speculators. Facts only; no source text is stored.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3compat.probe.facts import fold
from eagle3compat.probe.versions import key
from eagle3compat.serverpath.facts import client_facts, server_facts

FILE = Path(__file__).parent.parent / "tests" / "surfaces" / "server.json"


def record(folders: Sequence[Path]) -> dict[str, Any]:
    """The contents of the record: the facts of each release, as changes from one to the next."""
    vllm: dict[str, dict[str, Any]] = {}
    speculators: dict[str, dict[str, Any]] = {}
    for folder in folders:
        if (folder / "vllm").is_dir():
            vllm[_version(folder)] = server_facts(folder / "vllm").as_dict()
        else:
            speculators[_version(folder)] = client_facts(folder / "speculators").as_dict()
    found = {}
    for name, releases in (("vllm", vllm), ("speculators", speculators)):
        ordered = {release: releases[release] for release in sorted(releases, key=lambda v: key(v) or ())}
        found[name] = {"releases": list(ordered), "facts": fold(ordered)}
    return found


def _version(folder: Path) -> str:
    """As the metadata beside the package has it: the package's own version file is wrong in speculators 0.5.0."""
    (metadata,) = folder.glob("*.dist-info")
    return metadata.stem.split("-")[1].partition("+")[0]


def main() -> int:
    folders = [Path(word) for word in sys.argv[1:]]
    if not folders:
        print(__doc__, file=sys.stderr)
        return 2
    parts = []
    for name, part in record(folders).items():
        facts = ",\n".join(f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in part["facts"].items())
        parts.append(f' "{name}": {{\n  "releases": {json.dumps(part["releases"])},\n  "facts": {{\n{facts}\n  }}\n }}')
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
