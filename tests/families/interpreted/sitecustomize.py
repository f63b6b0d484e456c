"""Lets vLLM's CPU class of DeepSeek-V4 run where it does not by itself; for `tools/families.py deepseek_v4 --anyway`.

It wants triton-cpu, which the package index does not have, for the metadata of a step: Triton's own interpreter takes
its place. And in 0.30.0 to 0.32.0 its metadata lack an entry (`KeyError: 'c1a'`), of which no CPU kernel makes use.

    PYTHONPATH=tests/families/interpreted VLLM_USE_V2_MODEL_RUNNER=0 \\
        python tools/families.py deepseek_v4 --anyway --dtypes bfloat16 --out /tmp/families
"""

from __future__ import annotations

import collections
import os
from types import ModuleType

os.environ.setdefault("TRITON_INTERPRET", "1")

try:
    import triton.backends  # type: ignore[import-not-found]
    import wrapt  # type: ignore[import-not-found]
except ImportError:  # another Python on the same path, which runs no vLLM
    pass
else:

    class Driver:
        """What vLLM asks of a backend, for the interpreter."""

        @staticmethod
        def is_active() -> bool:
            return True

    triton.backends.backends.setdefault("cpu", type("Backend", (), {"driver": Driver, "compiler": None})())

    @wrapt.when_imported("vllm.models.deepseek_v4.cpu.cpu_mla")
    def add_entry(module: ModuleType) -> None:
        kind = module.DeepseekV4CPUSparseSWAMetadataBuilder
        kind.build_tile_scheduler = lambda self, tokens: collections.defaultdict(lambda: None)
