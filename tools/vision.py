"""The torchvision that belongs to an environment's torch, which vLLM's and transformers' image processors import.

It is no part of the environments: PyPI's loads beside PyPI's torch, which most have, and not beside a `+cpu` one.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import environments  # type: ignore[import-not-found]


def ensure(vllm: str, speculators: str) -> Path:
    """A folder with torchvision for the environment of this pair, to be put on PYTHONPATH; some 10 MB.

    It is kept beside the environments; the resolver says which release belongs to their torch. Raises what
    `environments.ensure` does.
    """
    python: Path = environments.ensure(vllm, speculators)
    held = json.loads((python.parent.parent / environments.COMPLETE).read_text())
    torch = held["torch"].partition("+")[0]
    folder: Path = environments.root() / f"torchvision-for-torch-{torch}-{environments.PYTHON}"
    with environments.locked(folder):
        if not any(folder.glob("torchvision-*.dist-info")):
            release = belonging(torch, python)
            environments.install(python.parent.parent, "--no-deps", "--target", str(folder), f"torchvision=={release}")
    return folder


def belonging(torch: str, python: Path) -> str:
    """The release of torchvision that requires this release of torch."""
    with tempfile.TemporaryDirectory() as scratch:
        wanted, found = Path(scratch) / "wanted", Path(scratch) / "found"
        wanted.write_text(f"torch=={torch}\ntorchvision\n")
        environments.uv("pip", "compile", "--quiet", "--python", str(python), str(wanted), "-o", str(found))
        (release,) = re.findall(r"^torchvision==(\S+)", found.read_text(), re.MULTILINE)
    return str(release)


if __name__ == "__main__":
    print(ensure(*sys.argv[1:3]))
