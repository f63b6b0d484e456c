"""What a large model needs, from its config, against published figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3compat.errors import InputError
from eagle3compat.rehearse.estimate import GIB, estimate

CONFIGS = Path(__file__).parents[1] / "configs"


def config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("kimi-k2.5", 1027), ("deepseek-v3.2", 671), ("qwen3-235b-a22b", 235), ("qwen3-vl-235b-a22b", 235),
        ("gpt-oss-120b", 116.8), ("llama-4-maverick", 401), ("glm-4.5", 355), ("minimax-m2", 229),
        ("nemotron-h-8b", 8.1), ("qwen3-next-80b-a3b", 80), ("gemma-3-27b", 27.0),
    ],
)
def test_parameters_are_those_that_the_publisher_counts(name: str, billions: float) -> None:
    assert estimate(config(name)).parameters == pytest.approx(billions * 1e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("kimi-k2.5", 595), ("gpt-oss-120b", 65), ("minimax-m2", 230), ("qwen3-235b-a22b", 470), ("deepseek-v3.2", 675)],
)
def test_weights_are_as_large_as_the_published_checkpoint(name: str, gigabytes: float) -> None:
    assert estimate(config(name)).weights == pytest.approx(gigabytes * 1e9, rel=0.02)


def test_the_index_of_the_weights_is_believed_before_the_config() -> None:
    found = estimate(config("kimi-k2.5"), tensor_parallel_size=8, index={"metadata": {"total_size": 800}})
    assert (found.weights, found.weights_per_rank, found.weights_from) == (800, 100, "the index of its weights")


class TestKVCache:
    def test_mla_keeps_one_latent_a_layer_whatever_the_ranks(self) -> None:
        alone, shared = (estimate(config("kimi-k2.5"), tensor_parallel_size=ranks) for ranks in (1, 8))
        assert alone.kv_per_token == 61 * (512 + 64) * 2 == 70272
        assert shared.kv_per_rank_token == alone.kv_per_rank_token

    def test_sparse_attention_keeps_an_index_beside_it(self) -> None:
        assert estimate(config("deepseek-v3.2")).kv_per_token == 61 * ((512 + 64) * 2 + 132)

    def test_grouped_queries_share_heads_and_ranks_share_them_out(self) -> None:
        found = estimate(config("qwen3-235b-a22b"), tensor_parallel_size=2)
        assert found.kv_per_token == 94 * 2 * 4 * 128 * 2
        assert found.kv_per_rank_token == found.kv_per_token // 2

    def test_more_ranks_than_heads_keep_one_each(self) -> None:
        assert estimate(config("qwen3-235b-a22b"), tensor_parallel_size=8).kv_per_rank_token == 94 * 2 * 128 * 2

    def test_a_window_holds_no_more_than_it_is_wide(self) -> None:
        found = estimate(config("gpt-oss-120b"), sequence=1000)
        layer = 2 * 8 * 64 * 2
        assert found.kv_one_sequence_per_rank == 18 * layer * 1000 + 18 * layer * 128

    def test_linear_attention_keeps_a_state_whatever_the_length(self) -> None:
        short, long = (estimate(config("qwen3-next-80b-a3b"), sequence=n) for n in (1000, 2000))
        assert short.kv_per_token == 12 * 2 * 2 * 256 * 2
        assert short.state_per_sequence == long.state_per_sequence
        assert short.state_per_sequence == 36 * (32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2)
        assert long.kv_one_sequence_per_rank - short.kv_one_sequence_per_rank == 1000 * short.kv_per_token


class TestStates:
    def test_disk_is_rows_times_layers_times_width(self) -> None:
        found = estimate(config("kimi-k2.5"), [2, 30, 58, 60], sequence=2048)
        assert found.disk_per_1000 == 1000 * 2048 * (4 * 7168 * 2 + 16)
        assert 109 * GIB < found.disk_per_1000 < 110 * GIB

    def test_a_layer_asked_twice_is_captured_once_and_written_twice(self) -> None:
        once, twice = (estimate(config("kimi-k2.5"), ids) for ids in ([2], [2, 2]))
        assert twice.host_batch == once.host_batch
        assert twice.disk_per_1000 > 1.9 * once.disk_per_1000


class TestProblems:
    def test_layer_ids_are_stock_s_own_by_default(self) -> None:
        assert estimate(config("kimi-k2.5")).layer_ids == (2, 30, 58, 60)

    @pytest.mark.parametrize("ids", [[61], [2, 61, -1]])
    def test_layer_ids_that_do_not_exist_are_named(self, ids: list[int]) -> None:
        found = estimate(config("kimi-k2.5"), ids)
        assert found.missing_layer_ids == tuple(layer for layer in ids if layer != 2)
        assert "0 to 60" in found.problems[0]

    def test_heads_that_ranks_cannot_share_are_named_with_what_fits(self) -> None:
        found = estimate(config("llama-4-maverick"), tensor_parallel_size=16)
        assert "40 attention heads cannot be shared by 16" in found.problems[0]
        assert "8, 10, 20" in found.problems[0]

    def test_a_last_id_that_is_not_the_last_layer_is_noted(self) -> None:
        assert any("model's last layer is 60" in note for note in estimate(config("kimi-k2.5"), [2, 30, 58]).notes)
        assert not any("last layer" in note for note in estimate(config("kimi-k2.5"), [2, 30, 60]).notes)

    def test_nothing_is_wrong_with_what_fits(self) -> None:
        assert estimate(config("kimi-k2.5"), [0, 60], 8).problems == ()


def shape(**changes: Any) -> dict[str, Any]:
    small = {"num_hidden_layers": 4, "hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 3,
             "intermediate_size": 768, "vocab_size": 640, "max_position_embeddings": 4096}  # fmt: skip
    return {"architectures": ["LlamaForCausalLM"], **small, **changes}


@pytest.mark.parametrize(
    ("changes", "ranks", "said"),
    [
        ({}, 2, "3 key-value heads cannot be shared by 2 tensor-parallel ranks. Sizes that fit: 1, 3, 6"),
        ({}, 6, ""), ({"num_key_value_heads": 1}, 6, ""),
        ({"num_key_value_heads": 4}, 1, "6 attention heads cannot share 4 key-value heads"),
        ({"intermediate_size": 257, "num_key_value_heads": 6}, 2, "feed-forward layers 257 wide cannot be shared by 2"),
        ({"intermediate_size": 257, "num_experts": 8, "moe_intermediate_size": 64, "num_key_value_heads": 6}, 2, ""),
        ({"max_position_embeddings": 1024}, 1, "max_model_len 2048 is more than the model's 1024 positions"),
        ({"max_position_embeddings": 1024, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 1, ""),
        ({"max_position_embeddings": 1024, "rope_parameters": {"rope_type": "default"}}, 1, "1024 positions"),
        ({"num_hidden_layers": 2}, 1, "stock's default layer ids fit no model of 2 decoder layers"),
    ],
)  # fmt: skip
def test_what_vllm_would_refuse_is_said(changes: dict[str, Any], ranks: int, said: str) -> None:
    problems = estimate(shape(**changes), tensor_parallel_size=ranks).problems
    assert all(said in problem for problem in problems) if said else not problems, problems
    assert bool(problems) == bool(said)


@pytest.mark.parametrize(
    "changes", [{"hidden_size": "128"}, {"vocab_size": 0}, {"num_attention_heads": -2}, {"num_hidden_layers": 10**7}]
)
def test_a_size_that_no_model_has_is_refused(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(InputError, match=f"^eagle3compat: {name} of its config is"):
        estimate(shape(**changes))


@pytest.mark.parametrize("metadata", [{"total_size": "abc"}, {"total_size": 1e400}, {"total_size": -5}, "x", None])
def test_an_index_that_says_no_size_is_passed_over(metadata: Any) -> None:
    assert estimate(shape(), index={"metadata": metadata}).weights_from == "the shapes in its config"
