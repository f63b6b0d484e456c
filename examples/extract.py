"""Extracts hidden states for EAGLE-3 training: stock speculators, unmodified, on whatever vLLM is installed.

    python examples/extract.py --model MODEL --data conversations.jsonl --output-dir OUT --layer-ids 2 16 29 31

Each line of the data is {"conversations": [{"role": ..., "content": ...}, ...]}. Line N becomes OUT/data_N.pt, with
what stock's own script writes: input_ids `[S]`, hidden_states a list of `[S, hidden_size]`, one a layer, and loss_mask
`[S]`, 1 on what the assistant said. A run that was stopped goes on where it was when it is started again.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import eagle3compat

console = Console(stderr=True, highlight=False)


def main() -> None:
    options = parse()
    settings = {name: getattr(options, name) for name in ("model", "data", "layer_ids", "seq_length")}
    settings["written_by"] = "examples/extract.py"
    record = claimed(options.output_dir, settings)
    with screen_kept(options.log_file):
        console.print("importing speculators and vLLM")
        eagle3compat.apply()
        from speculators.data_generation import VllmHiddenStatesGenerator

        samples = load_samples(options.model, options.data, options.seq_length - 1, options.max_samples)
        files = [options.output_dir / f"data_{number}.pt" for number in range(len(samples))]
        todo = [number for number, file in enumerate(files) if not file.exists()]
        console.print(f"{len(samples)} conversations, {len(samples) - len(todo)} of them extracted already")
        if not todo:
            return
        console.print(f"loading {options.model}")
        generator = VllmHiddenStatesGenerator(
            options.model,
            layer_ids=options.layer_ids,
            max_model_len=options.seq_length,
            tensor_parallel_size=options.tensor_parallel_size,
        )
        record.write_text(json.dumps(settings))
        with progress_bar(len(samples), len(samples) - len(todo)) as advance:
            for start in range(0, len(todo), options.batch_size):
                batch = todo[start : start + options.batch_size]
                results = generator.generate([samples[number]["input_ids"].tolist() for number in batch])
                for number, result in zip(batch, results, strict=True):
                    save(files[number], {**result, "loss_mask": samples[number]["loss_mask"]})
                advance(len(batch), sum(len(result["input_ids"]) for result in results))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Extract hidden states for EAGLE-3 training.")
    parser.add_argument("--model", required=True, help="a folder, or a name on the Hugging Face hub")
    parser.add_argument("--data", required=True, help="a .jsonl file of conversations, or a data set that stock knows")
    parser.add_argument("--output-dir", required=True, type=Path)
    parser.add_argument("--layer-ids", type=int, nargs="+", help="decoder layers from 0; stock's choice if left out")
    parser.add_argument("--batch-size", type=int, default=64, help="conversations in one call")
    parser.add_argument("--seq-length", type=int, default=2048, help="tokens of a sample, and one that vLLM adds")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--max-samples", type=int, help="only the first so many conversations")
    parser.add_argument("--log-file", type=Path, help="where vLLM's output goes; to the screen if left out")
    options = parser.parse_args()
    if options.model.startswith((".", "/", "~")) and not Path(options.model).is_dir():
        parser.error(f"there is no model at {options.model}: no such folder")
    return options


def load_samples(model: str, data: str, limit: int, max_samples: int | None) -> list[dict[str, Any]]:
    """input_ids and loss_mask of each conversation, cut to `limit` tokens, by stock's own preprocessing."""
    from speculators.data_generation.preprocessing import build_eagle3_dataset, load_raw_dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=True)
    raw = load_raw_dataset(data, num_proc=1)
    if max_samples is not None:
        raw = raw.select(range(min(max_samples, len(raw))))
    rows = build_eagle3_dataset(raw, tokenizer, max_length=limit, num_proc=1)
    if len(rows) != len(raw):
        raise RuntimeError(f"only {len(rows)} of {len(raw)} conversations could be tokenized; the warnings say why")
    return [{name: row[name][:limit] for name in ("input_ids", "loss_mask")} for row in rows]


def claimed(folder: Path, settings: dict[str, Any]) -> Path:
    """Make the folder, or find it as the same extraction left it: files of two must not be mixed. Its record's path."""
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "eagle3compat.json"  # `eagle3compat check` and `convert` read the layer ids there
    if record.exists() and json.loads(record.read_text()) != settings:
        raise SystemExit(f"{folder} holds another extraction, {record.read_text()}. Choose another --output-dir.")
    return record


def save(path: Path, content: dict[str, Any]) -> None:
    """The file is there whole or not at all; an unfinished one does not end in "pt", so training does not read it."""
    import torch

    part = path.with_name(path.name + ".part")
    torch.save(content, part)
    part.replace(path)


@contextmanager
def screen_kept(log_file: Path | None) -> Iterator[None]:
    """Within, all output but the console's goes to the file, that of worker processes too."""
    if log_file is not None:
        console.file = os.fdopen(os.dup(2), "w")
        with log_file.open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    try:
        yield
    except Exception as error:
        console.print(f"{type(error).__name__}: {error}", style="red", markup=False, soft_wrap=True)
        raise


@contextmanager
def progress_bar(total: int, done: int) -> Iterator[Callable[[int, int], None]]:
    """Gives a function to call with each batch's samples and tokens. Off a terminal it prints a line now and then."""
    speed = TextColumn("{task.fields[speed]:,.0f} tokens/s")
    columns = (TextColumn("extracting"), BarColumn(), MofNCompleteColumn(), speed, TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, redirect_stdout=False) as bar:
        task = bar.add_task("", total=total, completed=done, speed=0.0)
        started, tokens, said = time.monotonic(), 0, 0.0

        def advance(more_samples: int, more_tokens: int) -> None:
            nonlocal done, tokens, said
            done, tokens, now = done + more_samples, tokens + more_tokens, time.monotonic()
            bar.update(task, completed=done, speed=tokens / (now - started))
            if not console.is_terminal and (now - said > 5 or done == total):
                said = now
                console.print(f"extracting: {done} of {total} samples, {tokens / (now - started):,.0f} tokens/s")

        yield advance


if __name__ == "__main__":
    main()
