"""The entry point of the group `vllm.general_plugins`.

vLLM calls it in every process that it starts in this environment, other people's servers among them. So it returns at
once unless the environment variable EAGLE3COMPAT asks for more, and it never raises: vLLM does not guard the call
(vllm/plugins/__init__.py, `load_general_plugins`). In-process extraction does not depend on it: workers are adapted
through the worker extension that the configuration names. The server path does: a server is adapted from here.
"""

from __future__ import annotations

import os

ASKED = ("strict", "warn")


def register() -> None:
    """Apply the adapters in this process if EAGLE3COMPAT is `strict` or `warn` and nothing has applied them yet.

    A vLLM server that is asked for hidden states is adapted as well.

    What cannot be bridged is logged; the generator's constructor still refuses it where EAGLE3COMPAT is `strict`.
    """
    if os.environ.get("EAGLE3COMPAT", "").strip().lower() not in ASKED:
        return
    try:
        from eagle3compat import apply, status
        from eagle3compat.serverpath.adapt import watch

        watch()

        if not status().outcomes:  # to apply with other settings than the user's own call would undo that call
            apply(strict=False)
    except Exception as error:  # noqa: BLE001  raising here would end a vLLM process that may do something else
        import logging

        logging.getLogger("eagle3compat").warning("eagle3compat: not applied by the plugin: %s", error)
