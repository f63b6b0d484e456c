"""`import speculators` fails on transformers 5, in pydantic or for a name that transformers no longer has."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ..adapter import PACKAGE, Adapter
from ..contract import AnyOf, Exists, Imports, Not
from ..ledger import Ledger
from .absent import supplied

CONFIGURATION = "transformers.configuration_utils"
IMPORTED = tuple(
    f"{PACKAGE}.{name}"
    for name in (
        "config", "model", "models.base_components", "models.eagle", "models.eagle3.attention", "models.eagle3.config",
        "models.eagle3.core", "models.eagle3.model_definitions", "models.independent", "utils.util",
    )
)
"""What `import speculators` imports and what imports transformers; not every release has each."""


class SpeculatorsImport(Adapter):
    """During the import, supplies what transformers 5 lacks, at run time or altogether.

    speculators makes pydantic models of transformers' configuration classes, and pydantic evaluates their annotations
    in the module that defines them. In transformers 5 those annotations name torch, which is imported there only under
    TYPE_CHECKING. And importing speculators imports its draft models, which take names from transformers that later
    releases drop; extraction uses none of them.
    """

    id = "speculators_import"
    seam = "imports"
    target = PACKAGE
    breaks = (
        "`import speculators` raises `PydanticUndefinedAnnotation: name 'torch' is not defined` with transformers 5, "
        "which vLLM requires from 0.24 on; `No module named 'transformers.modeling_attn_mask_utils'` with "
        "transformers 5.24"
    )
    stock_needs = (
        Exists(CONFIGURATION),
        AnyOf((Exists(f"{CONFIGURATION}:torch"), Not(Exists(f"{CONFIGURATION}:PretrainedConfig.dtype")))),
        *(AnyOf((Not(Exists(module)), Imports(module, "transformers"))) for module in IMPORTED),
    )
    relies_on = (Exists(CONFIGURATION),)
    where = "driver and worker"
    upstream = "https://github.com/vllm-project/speculators/issues/370"
    remove_when = "speculators 0.3 and 0.4 are no longer used with transformers 5"

    @contextmanager
    def during_import(self) -> Iterator[None]:
        module = importlib.import_module(CONFIGURATION)
        ledger = Ledger()
        try:
            for name, value in type_checking_names(module):
                if not hasattr(module, name):
                    ledger.rebind(self.id, module, name, value)
            with supplied(self.id, IMPORTED, "transformers"):
                yield
        finally:
            ledger.restore()

    def install(self, module: ModuleType, ledger: Ledger) -> None:
        """Nothing to keep: the names are needed only while the package is imported."""


def type_checking_names(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The names, with their values, that `module` imports under `if TYPE_CHECKING:` and that can be imported."""
    if module.__file__ is None:
        return
    with open(module.__file__, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    for block in tree.body:
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test):
            for node in block.body:
                try:
                    yield from _imported(node, module.__package__ or "")
                except (ImportError, AttributeError):  # optional and not installed: pydantic says if it matters
                    continue


def _imported(node: ast.stmt, package: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.asname is None:
                importlib.import_module(alias.name)
                yield alias.name.split(".")[0], importlib.import_module(alias.name.split(".")[0])
            else:
                yield alias.asname, importlib.import_module(alias.name)
    elif isinstance(node, ast.ImportFrom):
        source = importlib.import_module("." * node.level + (node.module or ""), package)
        for alias in node.names:
            yield alias.asname or alias.name, getattr(source, alias.name)
