"""The stock clients of the server path, each release beside the few packages that its client module imports."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import environments  # type: ignore[import-not-found]

BESIDE = ("openai>=2", "httpx")
"""What `vllm_client` and `render_client` import."""


def ensure(releases: Sequence[str]) -> Path:
    """A folder with an environment, and in it, for each release of speculators, a folder of that name; some 30 MB.

    It is kept beside the environments. Raises what `environments.ensure` does.
    """
    folder: Path = environments.root() / f"serve-clients-{environments.PYTHON}"
    with environments.locked(folder):
        installed = "lib/python*/site-packages/{}-*.dist-info"
        if not all(any(folder.glob(installed.format(name))) for name in ("openai", "httpx")):
            shutil.rmtree(folder, ignore_errors=True)  # what was not finished
            environments.uv("venv", "--quiet", "--python", environments.PYTHON, str(folder))
            environments.install(folder, *BESIDE)
        for release in releases:
            if not any((folder / release).glob("speculators-*.dist-info")):
                target = ("--no-deps", "--target", str(folder / release))
                environments.install(folder, *target, f"speculators=={release}")
    return folder
