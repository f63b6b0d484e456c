"""Draws docs/performance.svg from the figures in evidence/benchmarks; `--check` exits 1 where the file differs.

python tools/performance_chart.py [--check]
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "evidence" / "benchmarks"
FILE = ROOT / "docs" / "performance.svg"
WIDTH, PANEL, GAP, TOP, HEIGHT = 1040, 190, 40, 44, 170
INK, OURS, OTHER = "#1f2328", "#1a7f37", "#9aa4b2"

ROW = TOP + HEIGHT + 60
FIGURES = ("growth-qwen3-8b", "extraction-qwen3-8b", "extraction-qwen3-8b-connector", "growth-tiny", "against-0.16.0")
GPU_WAYS = {"with the library": "shared", "vLLM alone, no capture": "llm",
            "vLLM's connector (another day)": "connector", "pickled, as stock moves states": "pickled"}  # fmt: skip
CPU_WAYS = {"with the library": "adapted", "stock": "stock", "transformers": "transformers"}

Series = list[tuple[float, float, float, float]]
"""Points: x, and of a ratio the lower quartile, the median and the upper quartile."""


def ratios(over: Sequence[float], under: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = quantiles([o / u for o, u in zip(over, under, strict=True)])
    return low, middle, high


def axes(growth: dict[str, Any]) -> dict[str, Series]:
    """What grows, with extraction's share of plain prefill's speed at each point."""
    found: dict[str, Series] = {}
    for point in growth["points"]:
        seconds = point["seconds"]
        found.setdefault(point["axis"], []).append((point["at"], *ratios(seconds["plain"], seconds["shared"])))
    return {axis: series for axis, series in found.items() if len(series) > 1}


def document() -> str:
    figures = {name: json.loads((FOLDER / f"{name}.json").read_text("utf-8")) for name in FIGURES}
    return "\n".join(_svg(figures)) + "\n"


def _svg(figures: dict[str, Any]) -> Iterator[str]:
    height = 2 * ROW + 20
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12" role="img">'
    )
    yield "<title>Speed of extraction against plain prefill as work grows, and against others</title>"
    yield f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    shared = "extraction's speed as a share of plain prefill's, as work grows (median and quartiles)"
    gpu, cpu = figures["extraction-qwen3-8b"], figures["against-0.16.0"]
    tokens = gpu["options"]["prompts"] * gpu["options"]["tokens"]
    seconds = {**figures["extraction-qwen3-8b-connector"]["seconds"], **gpu["seconds"]}
    speeds = {name: tokens / median(seconds[way]) for name, way in GPU_WAYS.items()}
    title, under = f"One H200, a model of 8B: {shared}", "prompts of 2,000 tokens"
    yield from _row(0, title, figures["growth-qwen3-8b"], speeds, under)
    speeds = {name: cpu["tokens"] / median(cpu["seconds"][way]) for name, way in CPU_WAYS.items()}
    title, under = f"A CPU, a small model: {shared}", "vLLM 0.16.0, where stock runs"
    yield from _row(ROW, title, figures["growth-tiny"], speeds, under)
    yield "</svg>"


def _row(top: int, title: str, growth: dict[str, Any], speeds: dict[str, float], under: str) -> Iterator[str]:
    left = 44
    yield _text(left, top + 24, title)
    top += TOP
    for axis, series in axes(growth).items():
        yield from _panel(left, top, axis, series)
        left += PANEL + GAP
    yield from _bars(left, top, speeds, under)


def _panel(left: int, top: int, axis: str, series: Series) -> Iterator[str]:
    def y(value: float) -> float:
        return top + HEIGHT - HEIGHT * min(value, 1.25) / 1.25

    logs = [math.log2(x) for x, *_ in series]
    span = max(logs) - min(logs)
    xs = [left + 12 + (PANEL - 24) * (log - min(logs)) / span for log in logs]
    for value in (0.0, 0.5, 1.0):
        yield f'<line x1="{left}" x2="{left + PANEL}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#d0d7de"/>'
        yield _text(left - 6, y(value) + 4, f"{value:g}", "end")
    for x, (_at, low, _middle, high) in zip(xs, series, strict=True):
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y(low):.1f}" y2="{y(high):.1f}" stroke="{OURS}" stroke-width="5" opacity="0.3"/>'  # noqa: E501
    line = " ".join(f"{x:.1f},{y(middle):.1f}" for x, (_at, _low, middle, _high) in zip(xs, series, strict=True))
    yield f'<polyline points="{line}" fill="none" stroke="{OURS}" stroke-width="2"/>'
    for x, (at, _low, middle, _high) in zip(xs, series, strict=True):
        yield f'<circle cx="{x:.1f}" cy="{y(middle):.1f}" r="3" fill="{OURS}"/>'
        yield _text(x, top + HEIGHT + 16, f"{at:g}", "middle")
    yield _text(left + PANEL / 2, top + HEIGHT + 36, axis, "middle")


def _bars(left: int, top: int, speeds: dict[str, float], under: str) -> Iterator[str]:
    wide, high = WIDTH - left - 20, HEIGHT / len(speeds)
    for row, (name, speed) in enumerate(speeds.items()):
        y = top + high * row
        colour = OTHER if row else OURS
        yield _text(left, y + 10, f"{name}: {speed:,.0f} tokens/s")
        yield f'<rect x="{left}" y="{y + 14:.1f}" width="{wide * speed / max(speeds.values()):.1f}" height="{high - 22:.1f}" fill="{colour}"/>'  # noqa: E501
    yield _text(left, top + HEIGHT + 36, under)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{INK}" text-anchor="{anchor}">{text}</text>'


if __name__ == "__main__":
    from pages import page_command  # type: ignore[import-not-found]

    sys.exit(page_command(FILE, document, "evidence/benchmarks"))
