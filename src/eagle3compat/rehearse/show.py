"""A rehearsal's verdict for people."""

from __future__ import annotations

from collections.abc import Iterator

from ..terminal import console, grid
from ..traps import served_ids
from .estimate import GIB, STOCK_SEQUENCES, Estimate
from .rehearsal import Verdict


def show(verdict: Verdict) -> None:
    """Print it."""
    from rich.table import Table
    from rich.text import Text

    out = console()
    out.print(Text(f"{verdict.model}: {verdict.estimate.architecture}", style="bold"))
    out.print(grid(_facts(verdict.estimate)))
    if verdict.ran:
        from .config import Model

        small = Model(verdict.small)
        title = f"rehearsed on {verdict.device}: {small.layers} layers, hidden size {small.hidden}, random weights"
        table = Table(title=Text(f"\n{title}"), title_justify="left", expand=False)
        for heading in ("step", "", "seconds", "what was seen"):
            table.add_column(heading, overflow="fold")
        for step in verdict.steps:
            done = step["state"] == "done"
            said = step.get("said", "") if done else step["type"]
            mark = Text("ok" if done else "failed", style="green" if done else "red")
            table.add_row(step["step"], mark, f"{step['seconds']:.1f}", Text(said))
        out.print(table)
    if verdict.notes:
        out.print("\nnotes")
        out.print(grid((("-", note) for note in verdict.notes), padding=1))
    for problem in verdict.problems:
        out.print(Text(f"\n{problem.step}: {problem.said}", style="red"))
        if problem.remedy:
            out.print(Text(problem.remedy))
    if verdict.log:
        out.print(Text(f"log: {verdict.log}"))
    if verdict.untried:
        out.print(Text("\ncould not be tried here; of the real run that says nothing", style="yellow"))
        return
    works = "works" if verdict.ran else "nothing in the config speaks against it; not run"
    out.print(Text(f"\n{works if verdict.works else 'would fail'}", style="green" if verdict.works else "red"))


def _facts(numbers: Estimate) -> Iterator[tuple[str, str]]:
    kinds = ", ".join(f"{count} x {kind}" for kind, count in numbers.kinds.items())
    yield "decoder layers", f"{numbers.layers}: {kinds}"
    yield "layer ids", _layer_ids(numbers)
    yield "serve the draft with", f"eagle_aux_hidden_state_layer_ids {served_ids(numbers.layer_ids)}"
    yield "weights", (
        f"{_size(numbers.weights)}, {numbers.parameters / 1e9:.1f} billion parameters (from {numbers.weights_from}); "
        f"{_size(numbers.weights_per_rank)} a rank"
    )
    state = f", and {_size(numbers.state_per_sequence)} a sequence" if numbers.state_per_sequence else ""
    yield "KV cache", (
        f"{numbers.kv_per_token / 1024:.1f} KiB a token{state}; a sequence of {numbers.sequence} tokens takes "
        f"{_size(numbers.kv_one_sequence_per_rank)} a rank, {STOCK_SEQUENCES} take {_size(numbers.kv_batch_per_rank)}"
    )
    yield "host memory", f"{_size(numbers.host_batch)} for a call of {STOCK_SEQUENCES} such sequences"
    yield "disk", f"{_size(numbers.disk_per_1000)} for 1,000 samples of {numbers.sequence} tokens"


def _layer_ids(numbers: Estimate) -> str:
    ids = ", ".join(map(str, numbers.layer_ids))
    if not numbers.missing_layer_ids:
        return f"{ids}: all there"
    return f"{ids}: {', '.join(map(str, numbers.missing_layer_ids))} not there"


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"
