"""The two layouts of extracted hidden states on disk.

In-process extraction (speculators 0.3 and 0.4, `scripts/data_generation_offline.py`) writes `data_N.pt`, a dict of
`input_ids` `[S]`, `hidden_states` (a list of `[S, H]`, one a layer) and `loss_mask` `[S]`. Server extraction (0.5 and
later) writes `hs_N.safetensors` with `token_ids` `[S]` and `hidden_states` `[S, L, H]`, as float8 also
`hidden_states_scales` `[S, 1, 1]`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..errors import InputError
from ..header import HeaderError, read_header
from . import records
from .records import Records


@dataclass(frozen=True)
class Layout:
    """What one layout calls things.

    `ids` is the key of the token ids, `needed` are the keys that a file must have, and `shift` is what an in-process
    layer id is raised by to be one of this layout: server id i is transformers' `hidden_states[i]`.
    """

    id: str
    prefix: str
    suffix: str
    ids: str
    needed: tuple[str, ...]
    shift: int
    place: str
    """How the states of a layer are had from a file, where its id is not known."""

    def file(self, index: int) -> str:
        return f"{self.prefix}{index}{self.suffix}"

    def index(self, name: str) -> int | None:
        """The number in a file's name; None for what is no sample of this layout."""
        match = re.fullmatch(re.escape(self.prefix) + r"(0|[1-9][0-9]{0,17})" + re.escape(self.suffix), name)
        return int(match.group(1)) if match else None

    def layers(self, count: int, layer_ids: Sequence[int] | None) -> list[str]:
        """What the layers of a file are called: by id, where there is one for each."""
        if layer_ids is not None and len(layer_ids) == count:
            return [f"layer {layer}" for layer in layer_ids]
        return [self.place.format(number) for number in range(count)]


IN_PROCESS = Layout(
    "in-process", "data_", ".pt", "input_ids", ("input_ids", "hidden_states", "loss_mask"), 0, "hidden_states[{}]"
)
SERVER = Layout(
    "server", "hs_", ".safetensors", "token_ids", ("token_ids", "hidden_states"), 1, "hidden_states[:, {}]"
)
LAYOUTS = {layout.id: layout for layout in (IN_PROCESS, SERVER)}


@dataclass(frozen=True)
class Folder:
    """What lies in a folder of one layout: samples by index, and what else is of a run."""

    path: Path
    layout: Layout
    files: dict[int, Path]
    leftovers: tuple[Path, ...]
    strays: tuple[Path, ...]
    records: Records

    @cached_property
    def layer_ids(self) -> list[int] | None:
        """The layer ids of the files in their own convention, where that is written down."""
        if self.records.layer_ids is None and self.layout is SERVER:
            return _ids_in_header(next(iter(self.files.values())))
        return self.records.layer_ids


def open_folder(path: Path, layout: str | None = None) -> Folder:
    """Look at the names in a folder; nothing is read but the configuration. Raises InputError."""
    if not path.is_dir():
        raise InputError(f"{path} is no folder. Name the folder that holds data_N.pt or hs_N.safetensors files.")
    found = {kind.id: _samples(path, kind) for kind in LAYOUTS.values()}
    if not any(found.values()) and (path / "hidden_states").is_dir():
        path = path / "hidden_states"  # of a folder that speculators' prepare-data wrote
        found = {kind.id: _samples(path, kind) for kind in LAYOUTS.values()}
    holding = [name for name, files in found.items() if files]
    if layout is None and len(holding) > 1:
        raise InputError(f"{path} holds files of both layouts. Choose one with --layout in-process or --layout server.")
    chosen = layout or (holding[0] if holding else "")
    if not chosen or not found[chosen]:
        others = len(list(path.glob("*.safetensors")))
        missing = f"{path} holds no data_N.pt and no hs_N.safetensors"
        if others:
            raise InputError(
                f"{missing}, but {others} .safetensors of other names, as a server has until its client moves them to "
                "hs_N. Name the folder that the client writes to."
            )
        raise InputError(f"{missing}. Check the path.")
    kind = LAYOUTS[chosen]
    files = found[chosen]
    leftovers, strays = _others(path, kind, set(files.values()))
    return Folder(path, kind, files, leftovers, strays, records.read(path, kind is IN_PROCESS))


def _ids_in_header(path: Path) -> list[int] | None:
    """Layer ids that `convert` wrote into a file; None where there are none, or the file is not sound."""
    try:
        said = json.loads(read_header(path)["__metadata__"]["layer_ids"])
    except (OSError, HeaderError, LookupError, TypeError, ValueError, RecursionError):
        return None  # what is wrong with the file is found when it is read
    return said if records.is_layer_ids(said) else None


def _samples(path: Path, layout: Layout) -> dict[int, Path]:
    try:
        numbered = [(layout.index(entry.name), entry) for entry in path.iterdir()]
    except OSError as error:
        raise InputError(f"{path} cannot be listed: {error.strerror}. Make it readable (chmod u+rx).") from None
    return dict(sorted((index, entry) for index, entry in numbered if index is not None))


def _others(path: Path, layout: Layout, samples: set[Path]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Leftovers of interrupted runs, and what stock's in-process trainer would take for a sample.

    That trainer (`speculators/train/data.py`, 0.3.0 to 0.4.0.1) reads every file below the folder whose name ends in
    "pt", whatever it is.
    """
    part = re.compile(r".*\.(lock|tmp|part|partial)|.*\.safetensors\..+|.*\.pt\..+|(cmpl|chatcmpl)-.*\.safetensors")
    leftovers = tuple(sorted(entry for entry in path.iterdir() if part.fullmatch(entry.name)))
    if layout is SERVER:
        return leftovers, ()
    endings = (entry for entry in path.rglob("*") if entry.name.endswith("pt") and entry.is_file())
    return leftovers, tuple(sorted(set(endings) - samples - set(leftovers)))


def size_of(path: Path) -> int:
    """Bytes of a file; 0 where there is none behind the name, as behind a dangling link."""
    try:
        return path.stat().st_size
    except OSError:  # opening it says what is wrong
        return 0
