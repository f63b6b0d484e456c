"""Would stock extraction work on a vLLM that is not installed? Judged from its source, of which little is read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from .. import detect
from . import index, sources
from .remote import NetworkError
from .sources import Source
from .verdict import Fault, Verdict, has_generator, judge

__all__ = ["Fault", "NetworkError", "Verdict", "probe"]

DEFAULT_SPECULATORS = "0.4.0.1"
"""Judged against where none is installed and none is named: the last release with in-process extraction."""


def probe(
    target: str | Source,
    speculators: str | None = None,
    transformers: str | None = None,
    index_url: str | None = None,
) -> Verdict:
    """The verdict on the vLLM that `target` names, for one release of speculators; see `sources.locate` for both.

    The vLLM of an earlier verdict may be passed as it is. `index_url` stands for the indexes that pip is configured to
    use. Raises InputError for what names nothing that can be read, NetworkError for what could not be fetched.
    """
    indexes = [index_url] if index_url else index.configured()
    stock = speculators or _installed() or DEFAULT_SPECULATORS
    with ThreadPoolExecutor(1) as pool:  # each waits for answers most of the time
        other = pool.submit(sources.locate, stock, "speculators", indexes)
        vllm = target if isinstance(target, Source) else sources.locate(target, "vllm", indexes)
        stock_source = other.result()
    if not has_generator(stock_source):
        return judge(vllm, stock_source, None)
    if transformers:
        beside = sources.locate(transformers, "transformers", indexes)
    else:
        beside = sources.transformers(vllm, stock_source, indexes)
    return judge(vllm, stock_source, beside)


def _installed() -> str | None:
    found = detect.package("speculators")
    return found.directory if found else None
