"""The small config of each large model: the same architecture, and small. Configs are written from published facts."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from eagle3compat.errors import InputError
from eagle3compat.rehearse.config import Kind, Model
from eagle3compat.rehearse.estimate import _parameters
from eagle3compat.rehearse.shrink import CPU_HEAD_DIMS, shrink

CONFIGS = Path(__file__).parents[1] / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))


def config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return found


def of(**fields: Any) -> dict[str, Any]:
    """A plain config of twelve layers with what is asked."""
    plain = {
        "architectures": ["PlainForCausalLM"], "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16,
        "num_key_value_heads": 4, "intermediate_size": 4096, "vocab_size": 1000,
    }
    return {**plain, **fields}


def keys(part: Any) -> Any:
    """The names in a config, nested, without formats of weights."""
    if isinstance(part, dict):
        return {name: keys(value) for name, value in part.items() if name != "quantization_config"}
    return None


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("name", NAMES)
class TestPublished:
    def test_every_kind_of_layer_is_kept(self, name: str, ranks: int, device: str) -> None:
        small = shrink(config(name), ranks, device)
        assert set(Model(small.config).kinds()) == set(Model(config(name)).kinds())
        assert len(small.layers) <= 12

    def test_it_is_small(self, name: str, ranks: int, device: str) -> None:
        model = Model(shrink(config(name), ranks, device).config)
        vocabulary = 2 * model.hidden * model.get("vocab_size")
        assert sum(_parameters(model).values()) - vocabulary < 100e6

    def test_only_values_change(self, name: str, ranks: int, device: str) -> None:
        before = config(name)
        given = copy.deepcopy(before)
        small = shrink(given, ranks, device).config
        assert given == before
        assert keys(small) == keys(before)
        assert small["architectures"] == before["architectures"]
        for field in ("vocab_size", "rope_theta", "rope_scaling", "sliding_window", "num_experts_per_tok", "dtype"):
            assert Model(small).get(field) == Model(before).get(field)

    def test_sizes_fit_one_another(self, name: str, ranks: int, device: str) -> None:
        real, model = Model(config(name)), Model(shrink(config(name), ranks, device).config)
        assert model.heads % ranks == 0
        assert model.heads % model.kv_heads == 0
        assert model.kv_heads % ranks == 0 or ranks % model.kv_heads == 0
        assert model.mla or model.head_dim == real.head_dim
        assert model.hidden % 32 == 0
        if model.experts:
            assert model.experts >= model.get("num_experts_per_tok")
            assert model.experts % (model.get("n_group") or 1) == 0

    def test_no_weights_are_quantized(self, name: str, ranks: int, device: str) -> None:
        small = shrink(config(name), ranks, device)
        assert "quantization_config" not in json.dumps(small.config)
        assert bool(small.notes) is ("quantization_config" in json.dumps(config(name)))

    def test_layer_ids_keep_their_order_and_the_last(self, name: str, ranks: int, device: str) -> None:
        layers = Model(config(name)).layers
        small = shrink(config(name), ranks, device)
        ids = small.layer_ids([layers - 1, 2, layers // 2, 0])
        assert ids[0] == len(small.layers) - 1
        assert ids[3] == 0
        assert ids[1] <= ids[2] <= ids[0]


class TestKinds:
    @pytest.mark.parametrize(
        ("name", "kinds"),
        [
            ("kimi-k2.5", {Kind("full", "dense"): 1, Kind("full", "moe"): 60}),
            ("deepseek-v3.2", {Kind("full", "dense"): 3, Kind("full", "moe"): 58}),
            ("qwen3-vl-235b-a22b", {Kind("full", "moe"): 94}),
            ("gpt-oss-120b", {Kind("sliding", "moe"): 18, Kind("full", "moe"): 18}),
            ("llama-4-maverick", {Kind("chunked", "dense"): 24, Kind("chunked", "moe"): 12, Kind("full", "moe"): 12}),
            ("nemotron-h-8b", {Kind("mamba", "none"): 24, Kind("none", "dense"): 24, Kind("full", "none"): 4}),
            ("qwen3-next-80b-a3b", {Kind("linear", "moe"): 36, Kind("full", "moe"): 12}),
            ("gemma-3-27b", {Kind("sliding", "dense"): 52, Kind("full", "dense"): 10}),
        ],
    )
    def test_of_published_models(self, name: str, kinds: dict[Kind, int]) -> None:
        found = Model(config(name)).kinds()
        assert {kind: found.count(kind) for kind in set(found)} == kinds

    @pytest.mark.parametrize(
        ("fields", "full"),
        [
            ({"attn_layer_period": 4, "attn_layer_offset": 2}, [2, 6, 10]),
            ({"attn_layer_indices": [3, 9]}, [3, 9]),
            ({"attn_type_list": [0, 0, 1] * 4}, [2, 5, 8, 11]),
            ({"linear_attn_config": {"kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11], "full_attn_layers": [4, 8, 12]}},
             [3, 7, 11]),
            ({"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 2}, [0, 1]),
            ({"sliding_window": 512, "use_sliding_window": False}, list(range(12))),
            ({"sliding_window": 512}, []),
        ],
    )
    def test_full_attention_is_found_and_kept(self, fields: dict[str, Any], full: list[int]) -> None:
        kinds = Model(of(**fields)).kinds()
        assert [index for index, kind in enumerate(kinds) if kind.attention == "full"] == full
        assert set(Model(shrink(of(**fields)).config).kinds()) == set(kinds)

    @pytest.mark.parametrize(
        ("fields", "dense"),
        [
            ({"mlp_only_layers": [0, 5]}, [0, 5]),
            ({"first_k_dense_replace": 2}, [0, 1]),
            ({"moe_layer_freq": [0, 0, *[1] * 10]}, [0, 1]),
            ({"moe_layer_freq": 2}, [1, 3, 5, 7, 9, 11]),
            ({"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 9}, [0, 1, 2]),
            ({"expert_layer_period": 2, "expert_layer_offset": 1}, [0, 2, 4, 6, 8, 10]),
            ({"moe_layer_start_index": 3, "moe_layer_end_index": 11}, [0, 1, 2]),
        ],
    )
    def test_dense_layers_of_a_mixture_are_found_and_kept(self, fields: dict[str, Any], dense: list[int]) -> None:
        config = of(num_experts=32, num_experts_per_tok=2, **fields)
        kinds = Model(config).kinds()
        assert [index for index, kind in enumerate(kinds) if kind.feed_forward == "dense"] == dense
        assert set(Model(shrink(config).config).kinds()) == set(kinds)

    def test_a_kind_that_comes_late_is_pulled_forward(self) -> None:
        types = ["sliding_attention"] * 39 + ["full_attention"]
        small = shrink(of(num_hidden_layers=40, layer_types=types, sliding_window=128))
        assert small.layers == (0, 1, 2, 3, 39)
        assert small.config["layer_types"] == [*["sliding_attention"] * 4, "full_attention"]


class TestFields:
    def test_the_head_size_follows_from_the_hidden_size_where_it_does_in_the_real_model(self) -> None:
        small = shrink(of()).config
        assert "head_dim" not in small
        assert small["hidden_size"] // small["num_attention_heads"] == 64

    def test_a_head_size_that_cpu_kernels_lack_is_replaced_and_said(self) -> None:
        given = of(head_dim=72)
        assert shrink(given, 1, "cuda").config["head_dim"] == 72
        small = shrink(given, 1, "cpu")
        assert small.config["head_dim"] in CPU_HEAD_DIMS
        assert any("heads of 80 in place of 72" in note for note in small.notes)

    def test_what_meets_the_text_model_has_its_width(self) -> None:
        small = shrink(config("kimi-k2.5")).config
        assert small["vision_config"]["text_hidden_size"] == small["text_config"]["hidden_size"]
        assert small["vision_config"]["vt_num_hidden_layers"] == 2
        small = shrink(config("qwen3-vl-235b-a22b")).config
        vision = small["vision_config"]
        assert vision["out_hidden_size"] == small["text_config"]["hidden_size"]
        assert vision["hidden_size"] == 1152
        assert max(vision["deepstack_visual_indexes"]) < vision["depth"]
        assert len(vision["deepstack_visual_indexes"]) == 3

    def test_heads_of_a_state_space_model_follow_its_expansion(self) -> None:
        small = shrink(config("nemotron-h-8b")).config
        assert small["mamba_num_heads"] * small["mamba_head_dim"] == small["expand"] * small["hidden_size"]
        assert small["mamba_num_heads"] % small["n_groups"] == 0

    def test_layers_for_drafting_are_left_out(self) -> None:
        assert shrink(config("deepseek-v3.2")).config["num_nextn_predict_layers"] == 0

    def test_few_layers_stay_as_they_are(self) -> None:
        small = shrink(of(num_hidden_layers=2))
        assert small.layers == (0, 1)
        assert small.layer_ids([0, 1]) == [0, 1]

    @pytest.mark.parametrize("given", [{}, {"text_config": {}}, {"model_type": "clip", "vision_config": {"depth": 2}}])
    def test_what_is_no_language_model_is_refused(self, given: dict[str, Any]) -> None:
        with pytest.raises(InputError, match="number of decoder layers"):
            shrink(given)
