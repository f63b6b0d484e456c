"""Memory that two processes have in common: exact, without a name, all there or refused, and gone when they are."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3compat.capture import segment as module
from eagle3compat.capture.segment import Address, Layout, Segment, Sheet, available_memory

LAYOUT = Layout(("a", "b", "c"), (3, 1, 2), layers=2, hidden_size=5, dtype=torch.bfloat16)
HERE = "memfd:eagle3compat"


@pytest.fixture(autouse=True)
def _clean() -> None:
    """What earlier tests mapped is gone, though it hung in a circle of references."""
    gc.collect()


def maps(pid: int | str = "self") -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def values(request: str, layer: int) -> torch.Tensor:
    rows = dict(zip(LAYOUT.requests, LAYOUT.lengths, strict=True))[request]
    source = torch.Generator().manual_seed(10 * layer + ord(request))
    return torch.randn((rows, LAYOUT.hidden_size), generator=source).to(LAYOUT.dtype)


def write(address: Address, then: Any = None) -> None:
    """In another process: put every row where it belongs."""
    sheet = Sheet(LAYOUT, address.open())
    for request, place in sheet.places.items():
        for layer in range(LAYOUT.layers):
            place[layer].copy_(values(request, layer))
            sheet.landed[layer, sheet.index[request]] = place.shape[1]
    if then is not None:
        then.set()
        signal.pause()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_another_process_writes_and_this_one_reads_the_same_bytes(method: str) -> None:
    segment = Segment(LAYOUT.size)
    process = multiprocessing.get_context(method).Process(target=write, args=(segment.address,))
    process.start()
    process.join()
    sheet = Sheet(LAYOUT, segment.data)
    assert sheet.landed.tolist() == [[3, 1, 2], [3, 1, 2]]
    for request, place in sheet.places.items():
        for layer in range(LAYOUT.layers):
            assert torch.equal(place[layer].view(torch.int16), values(request, layer).view(torch.int16))
            assert place[layer].is_contiguous()


def test_places_are_apart_and_leave_nothing_over() -> None:
    data = torch.zeros(LAYOUT.size, dtype=torch.uint8)
    sheet = Sheet(LAYOUT, data)
    sheet.landed.fill_(-1)
    sheet.revisions.fill_(-1)
    assert data[LAYOUT.header :].sum() == 0
    for number, request in enumerate(LAYOUT.requests, 1):
        assert not sheet.places[request].any()
        sheet.places[request].fill_(number)
    rows = data[LAYOUT.header :].view(LAYOUT.dtype).view(LAYOUT.layers, 6, LAYOUT.hidden_size)
    assert rows[:, :, 0].tolist() == [[1, 1, 1, 2, 3, 3]] * 2


@pytest.mark.parametrize("killed", ["writer", "reader"])
def test_a_killed_process_leaves_nothing(killed: str) -> None:
    """SIGKILL runs no handler: what the kernel does not take back stays. The survivor reads on."""
    context = multiprocessing.get_context("fork")
    written = context.Event()
    if killed == "writer":
        segment = Segment(LAYOUT.size)
        process = context.Process(target=write, args=(segment.address, written))
        process.start()
        assert written.wait(60)
        segment.close_file()
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        assert torch.equal(Sheet(LAYOUT, segment.data).places["c"][1], values("c", 1))
    else:
        ours, theirs = context.Pipe()
        process = context.Process(target=make_and_wait, args=(theirs,))
        process.start()
        address = ours.recv()
        data = address.open()
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        Sheet(LAYOUT, data).places["c"][1] = values("c", 1)
        assert HERE in maps()
        del data
    assert not [name for name in os.listdir("/dev/shm") if "eagle3compat" in name], "memory that others use is theirs"


def make_and_wait(pipe: Any) -> None:
    segment = Segment(LAYOUT.size)
    pipe.send(segment.address)
    signal.pause()
    segment.close_file()


def test_it_is_given_back_with_the_last_reference() -> None:
    segment = Segment(LAYOUT.size)
    files = len(os.listdir("/proc/self/fd"))
    assert HERE in maps()
    segment.close_file()
    segment.close_file()
    assert len(os.listdir("/proc/self/fd")) == files - 1
    del segment
    assert HERE not in maps()


def test_memory_is_there_from_the_start_or_refused() -> None:
    """Writing into a file in memory that is too small ends the process: SIGBUS. So it must fail before."""
    files = sorted(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            Segment(8 * 2**20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(os.listdir("/proc/self/fd")) == files
    segment = Segment(8 * 2**20)
    assert os.stat(segment.address.path).st_blocks * 512 >= segment.address.size
    segment.close_file()


def test_more_than_fits_beside_the_results_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_memory", lambda: 15 * 2**20)
    with pytest.raises(OSError, match="15 MiB of memory are available, and 20 MiB are needed"):
        Segment(8 * 2**20)
    Segment(5 * 2**20).close_file()


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 8000),
        ({"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "1"}, 8000),
        ({"sys/fs/cgroup/memory.max": "4096000", "sys/fs/cgroup/memory.current": "1024000"}, 3000),
        (
            {
                "sys/fs/cgroup/memory.max": "4096000",
                "sys/fs/cgroup/memory.current": "1024000",
                "sys/fs/cgroup/memory.stat": "anon 5\ninactive_file 312000\nactive_file 200000",
            },
            3500,
        ),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/memory.max": "2048000",
                "sys/fs/cgroup/a/memory.current": "1024000",
                "sys/fs/cgroup/a/b/memory.max": "max",
                "sys/fs/cgroup/a/b/memory.current": "0",
            },
            1000,
        ),
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "2048000",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "4096000",
            },
            0,
        ),
    ],
)
def test_what_control_groups_leave_counts(files: dict[str, str], free: int, tmp_path: Path) -> None:
    for name, text in {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:   7812 kB", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_memory(tmp_path) // 1000 == (7812 * 1024 // 1000 if free == 8000 else free * 1024 // 1000)


@pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="needs to mount a small /dev/shm")
def test_a_small_dev_shm_does_no_harm() -> None:
    """As in a container: 64 KB, where 16 MB are wanted. The control: a file there cannot be had."""
    script = (
        "import os; from eagle3compat.capture.segment import Segment\n"
        "file = os.open('/dev/shm/control', os.O_CREAT | os.O_RDWR)\n"
        "try: os.posix_fallocate(file, 0, 16 << 20)\n"
        "except OSError as error: print(error.strerror)\n"
        "segment = Segment(16 << 20); segment.data.fill_(7); print(int(segment.data[-1]))\n"
    )
    mount = f'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec {sys.executable} -c "$SCRIPT"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount], env={**os.environ, "SCRIPT": script}, capture_output=True, text=True
    )
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    assert done.stdout.split("\n")[:2] == ["No space left on device", "7"], done.stderr
