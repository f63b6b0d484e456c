"""A worker extension that says what of this library is in its process. It imports nothing of it."""

from __future__ import annotations

import sys
from typing import Any


class Witness:
    """Mixed into a vLLM worker by name; answers over the server's development endpoint."""

    def witness(self) -> dict[str, Any]:
        return {
            "loaded": sorted(name for name in sys.modules if name.startswith("eagle3compat")),
            "finders": [type(finder).__name__ for finder in sys.meta_path if not isinstance(finder, type)],
            "bases": [base.__name__ for base in type(self).__mro__],
        }
