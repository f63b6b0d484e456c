"""vLLM's engine with this library's capture, without a stock generator in front of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..adapters.request import request
from ..adapters.results import check_prompts, token_lists
from ..engine.core import Engine
from ..engine.landed import Landed
from ..engine.media import IN_SERVER, check_media
from ..engine.transport import Transport, chosen
from ..errors import InputError, ResultError
from .together import fault_of_images

KV_SHARE = 0.5
"""Share of the memory that may be used, once the weights are loaded, for the KV cache: the rest is for activations."""


class Extractor:
    """Computes prompts and returns their states. `layer_ids` are the server's: `i` is layer `i - 1` from 0.

    Raises what Engine does.
    """

    def __init__(self, vllm_config: Any, layer_ids: Sequence[int]) -> None:
        choice = chosen()
        self.model_config = vllm_config.model_config
        self.layer_ids = tuple(layer_ids)
        self.step_tokens = int(vllm_config.scheduler_config.max_num_batched_tokens)
        self.engine = Engine(vllm_config, vllm_config.cache_config.gpu_memory_utilization * KV_SHARE)
        try:
            self.engine.call("_setup_hidden_states_capture", [layer - 1 for layer in layer_ids])
            self.transport = Transport(self.engine, choice)
            one_way = {name for names in self.engine.call("eagle3compat_one_way") for name in names}
            self.no_images = fault_of_images(vllm_config, sorted(one_way))
            self.runner = str(self.engine.call("eagle3compat_attest")[0]["runner"])
        except BaseException:
            self.engine.shutdown()
            raise

    @property
    def dead(self) -> str:
        """Why nothing can be computed any more, or nothing."""
        return self.engine.dead

    @property
    def limit(self) -> int:
        """Tokens of the longest prompt: vLLM keeps one place for the token that it generates."""
        return int(self.model_config.max_model_len) - 1

    def checked(self, prompt: Any, limit: int, images: Sequence[tuple[int, int]] = ()) -> list[int]:
        """A prompt's token ids, `limit` at most, with images from and to these places.

        Raises InputError for what cannot be computed.
        """
        (tokens,) = token_lists([prompt])
        check_prompts([tokens], self.model_config.get_vocab_size())
        check_media([tokens], self.model_config, images, IN_SERVER)
        if images and self.no_images:
            raise InputError(self.no_images)
        if len(tokens) > limit:
            raise InputError(
                f"the prompt has {len(tokens)} tokens, and the longest that fits has {limit} (max_model_len is "
                f"{self.limit + 1}). Shorten it, or start the server with a larger --max-model-len."
            )
        return tokens

    def extract(
        self, prompts: Mapping[str, Sequence[int]], features: Mapping[str, Sequence[Any]]
    ) -> dict[str, dict[str, Any] | ResultError]:
        """For each prompt (name to token ids) the tensors of its file, or why its states are none.

        `features` holds vLLM's features of the images of those that have some, as they follow in the prompt.
        `hidden_states` is `[T, layers, hidden_size]` in the model's dtype, layers in the order of `layer_ids`.
        Raises what Engine.run does; nothing of the call is returned then.
        """
        from vllm import SamplingParams

        one = SamplingParams(max_tokens=1, temperature=0.0)
        requests = {
            name: request(
                request_id=name, prompt_token_ids=list(tokens), sampling_params=one, pooling_params=None,
                eos_token_id=None, arrival_time=time.time(),
                **({"mm_features": list(features[name])} if name in features else {}),
            )
            for name, tokens in prompts.items()
        }
        leads = {name: min(image.mm_position.offset for image in images) for name, images in features.items()}
        self.transport.begin(prompts, len(self.layer_ids), leads)
        try:
            self.engine.run(requests)
        except BaseException:
            self.transport.abandon()
            raise
        collected = self.transport.collect(prompts)
        return {name: self._result(tokens, collected[name]) for name, tokens in prompts.items()}

    def _result(self, tokens: Sequence[int], states: Sequence[Any]) -> dict[str, Any] | ResultError:
        import torch

        from ..engine.landing import fault_of

        wanted = (len(tokens), self.model_config.get_hidden_size())
        tensors = []
        for layer, state in zip(self.layer_ids, states, strict=True):
            tensor = state.tensor if isinstance(state, Landed) else state
            fault = state.fault if isinstance(state, Landed) else fault_of(state)
            if tuple(tensor.shape) != wanted:
                fault = f"is {list(tensor.shape)}, not {list(wanted)}"
            if fault:
                advice = "The model overflows on this prompt: try another --dtype. " if "finite" in fault else ""
                return ResultError(None, f"layer {layer} {fault}", f"{advice}No file was written.")
            tensors.append(tensor)
        return {"hidden_states": torch.stack(tensors, dim=1), "token_ids": torch.tensor(tokens, dtype=torch.long)}

    def shutdown(self) -> None:
        """End the workers and give back the shared memory."""
        self.engine.shutdown()
        self.transport.close()
