"""Asks the live and the source surface the same questions about an installed vLLM, and prints where they differ.

    python check_surfaces.py [PATH ...]

Run it in an environment with vLLM and speculators. Prints JSON; exit status 1 if there is a disagreement.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time

from eagle3compat.contract import Binds, Clause, Exists, Imports, Surface
from eagle3compat.source import SourceSurface
from eagle3compat.surfaces import LiveSurface

PACKAGES = ("vllm", "speculators", "transformers")
CALLER = "speculators.data_generation.vllm_hidden_states_generator"
WORKER = "speculators.data_generation.custom_worker"
CALLED = {
    **{
        name: f"vllm.config:{name}"
        for name in (
            "CacheConfig", "SchedulerConfig", "ModelConfig", "ParallelConfig", "DeviceConfig", "LoadConfig",
            "VllmConfig",
        )
    },
    **{
        name: f"vllm.v1.core.kv_cache_utils:{name}"
        for name in (
            "_get_kv_cache_groups_uniform_spec", "get_kv_cache_config_from_groups", "get_request_block_hasher",
            "init_none_hash", "unify_hybrid_kv_cache_specs",
        )
    },
    "SamplingParams": "vllm.sampling_params:SamplingParams",
    "Scheduler": "vllm.v1.core.sched.scheduler:Scheduler",
    "MultiprocExecutor": "vllm.v1.executor.multiproc_executor:MultiprocExecutor",
    "Request": "vllm.v1.request:Request",
    "StructuredOutputManager": "vllm.v1.structured_output:StructuredOutputManager",
    "get_hash_fn_by_name": "vllm.utils.hashing:get_hash_fn_by_name",
    "never_called": "vllm.v1.request:Request",
}
GROUPS = {
    "vllm.v1.engine.core:EngineCore": (
        "__init__", "step", "step_fn", "step_with_batch_queue", "add_request", "abort_requests", "shutdown",
        "collective_rpc", "preprocess_add_request", "no_such_method",
    ),
    "vllm.engine.arg_utils:EngineArgs": (
        "__init__", "create_engine_config", "create_model_config", "from_cli_args", "add_cli_args", "model",
        "max_model_len", "worker_extension_cls", "no_such_field",
    ),
    "vllm.engine.arg_utils:AsyncEngineArgs": ("__init__", "create_engine_config"),
    "vllm.v1.executor.multiproc_executor:MultiprocExecutor": (
        "__init__", "collective_rpc", "execute_model", "sample_tokens", "determine_available_memory", "shutdown",
        "initialize_from_config", "get_class", "max_concurrent_batches", "supports_pp", "no_such_method",
    ),
    "vllm.v1.executor.abstract:Executor": ("get_class", "collective_rpc", "supports_pp"),
    "vllm.v1.request:Request": ("__init__", "from_engine_core_request", "num_tokens", "is_finished"),
    "vllm.v1.request:RequestStatus": ("FINISHED_ABORTED", "is_finished", "NO_SUCH_STATUS"),
    "vllm.v1.core.sched.scheduler:Scheduler": (
        "__init__", "schedule", "has_requests", "has_unfinished_requests", "add_request", "finish_requests",
        "update_from_output", "no_such_method",
    ),
    "vllm.v1.core.sched.output:SchedulerOutput": ("__init__", "make_empty", "num_scheduled_tokens"),
    "vllm.v1.core.kv_cache_utils": (
        "_get_kv_cache_groups_uniform_spec", "get_kv_cache_config_from_groups", "get_kv_cache_configs",
        "get_request_block_hasher", "init_none_hash", "unify_hybrid_kv_cache_specs", "KVCacheBlock", "logger",
        "no_such_function",
    ),
    "vllm.v1.kv_cache_interface": ("KVCacheConfig", "FullAttentionSpec", "KVCacheGroupSpec", "KVCacheTensor"),
    "vllm.v1.outputs": ("ModelRunnerOutput", "SamplerOutput"),
    "vllm.v1.worker.worker_base": ("WorkerBase", "WorkerWrapperBase"),
    "vllm.v1.worker.gpu_worker": ("Worker",),
    "vllm.v1.worker.gpu_model_runner": ("GPUModelRunner",),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": ("__init__", "execute_model", "load_model"),
    "vllm.v1.structured_output": ("StructuredOutputManager", "no_such_name"),
    "vllm.config": (
        "CacheConfig", "SchedulerConfig", "ModelConfig", "ParallelConfig", "DeviceConfig", "LoadConfig", "VllmConfig",
        "EPLBConfig", "KVTransferConfig", "set_current_vllm_config", "cache", "utils", "NoSuchConfig",
    ),
    "vllm.config:CacheConfig": ("__init__", "block_size", "num_gpu_blocks", "enable_prefix_caching", "no_such"),
    "vllm.config:SchedulerConfig": ("__init__", "max_num_seqs", "is_encoder_decoder", "async_scheduling"),
    "vllm.config:VllmConfig": ("__init__", "model_config", "kv_transfer_config", "with_hf_config"),
    "vllm.config:ModelConfig": ("get_hidden_size", "hf_config", "get_num_layers", "model"),
    "vllm.sampling_params": ("SamplingParams", "RequestOutputKind", "StructuredOutputsParams"),
    "vllm.sampling_params:SamplingParams": ("__init__", "max_tokens", "from_optional", "clone", "no_such"),
    "vllm.sequence": ("IntermediateTensors",),
    "vllm.distributed": ("get_tp_group", "get_pp_group", "parallel_state", "tensor_model_parallel_all_gather"),
    "vllm.model_executor.models.interfaces": ("supports_eagle3", "supports_multimodal"),
    "vllm.utils": ("hashing", "random_uuid", "get_hash_fn_by_name"),
    "vllm.utils.hashing": ("get_hash_fn_by_name", "sha256"),
    "vllm.plugins": ("load_general_plugins",),
    "vllm.envs": ("VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_NO_SUCH_VARIABLE"),
    "vllm.platforms": ("current_platform",),
    "vllm": ("LLM", "SamplingParams", "EngineArgs", "NoSuchName", "__version__", "envs", "config"),
    "vllm:LLM": ("generate", "encode", "llm_engine"),
    "transformers": ("AutoTokenizer", "AutoConfig", "PreTrainedModel"),
    "vllm.no_such_module": ("Name",),
    "vllm.no_such_package.no_such_module": ("Name",),
    "no_such_distribution": ("Name",),
}


def default_paths() -> list[str]:
    paths = []
    for stem, names in GROUPS.items():
        paths += [stem, *(f"{stem}{'.' if ':' in stem else ':'}{name}" for name in names)]
    return paths


def default_clauses() -> list[Clause]:
    clauses: list[Clause] = [Binds(CALLER, name, path) for name, path in CALLED.items()]
    return [*clauses, Imports(CALLER, "vllm"), Imports(WORKER, "vllm"), Imports("vllm.no_such_module", "vllm")]


def answers(surface: Surface, paths: list[str]) -> dict[str, str]:
    """By question; all that can be asked of `paths`, or of the default list, its calls, imports and clauses."""
    said = {}
    for path in paths or default_paths():
        said[f"exists {path}"] = str(surface.exists(path))
        said[f"signature {path}"] = str(surface.signature(path))
        said[f"why not {path}"] = Exists(path).evaluate(surface).found
    if not paths:
        said |= {f"calls {name}": repr(surface.calls(CALLER, name)) for name in CALLED}
        said |= {f"imports {caller}": repr(surface.imports(caller, "vllm")) for caller in (CALLER, WORKER)}
        said |= {f"{clause}": repr(clause.evaluate(surface)) for clause in default_clauses()}
    return said


def main(paths: list[str]) -> int:
    source, live = SourceSurface.installed(*PACKAGES), LiveSurface()
    began = time.perf_counter()
    read = answers(source, paths)
    seconds = time.perf_counter() - began
    assert not any(name == "vllm" or name.startswith("vllm.") for name in sys.modules), "reading source imported vllm"
    with contextlib.redirect_stdout(sys.stderr):  # vLLM logs while it is imported
        seen = answers(live, paths)
    differing = [
        {"question": question, "source": said, "live": seen[question]}
        for question, said in read.items()
        # Source may add that a base class was not read.
        if said != seen[question] and not (question.startswith("why not") and said.startswith(f"{seen[question]} ("))
    ]
    unknown = [question for question, said in read.items() if question.startswith("signature") and said == "None"]
    print(
        json.dumps(
            {
                "questions": len(read),
                "source_seconds": round(seconds, 3),
                "without_signature": unknown,
                "disagreements": differing,
            },
            indent=1,
        )
    )
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
