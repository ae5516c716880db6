"""Widths of weights: their bytes, their groups, and what quantisation a checkpoint allows."""

from __future__ import annotations

import pytest

from hetero_api.errors import ModelError
from hetero_api.model_config import ModelConfig
from hetero_api.packed_weights import PackedWeights
from hetero_api.weight_format import FP8, INT8, StoredWeights, WeightFormat, group_within, int4
from tests.unit.api.test_model_config import BASE

pytestmark = pytest.mark.unit

PACKED = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize(
    ("weights", "inputs", "expected"),
    [
        (INT8, 576, 576 + 9 * 2),
        (WeightFormat(8), 576, 576 + 2),
        (INT8, 0, 0),
        (WeightFormat(8, 32), 576, 576 + 18 * 2),
        (WeightFormat(4, 32), 576, 288 + 18 * 2),
        (int4(32), 576, 288 + 18 * 4),
        (int4(128), 576, 320 + 5 * 4),
        (WeightFormat(4), 41, 21 + 2),
    ],
)
def test_a_row_takes_its_values_in_whole_groups_and_their_scales(
    weights: WeightFormat, inputs: int, expected: int
) -> None:
    assert weights.row_bytes(inputs) == expected
    assert weights.matrix_bytes(7, inputs) == 7 * expected


def test_groups_end_where_inputs_are_dealt() -> None:
    assert [group_within(128, unit) for unit in (0, 64, 192, 80)] == [128, 64, 64, 16]
    assert [group_within(0, unit) for unit in (0, 64)] == [0, 0]
    assert int4(64).within(48) == int4(16)


def test_formats_are_joined_in_the_narrowest_that_holds_both() -> None:
    assert int4(32).joined(WeightFormat(8, 16)) == WeightFormat(8, 16, has_minimum=True)
    assert WeightFormat(4, 32).joined(INT8) == WeightFormat(8, 32)
    assert INT8.joined(INT8) == INT8
    narrow, wide = WeightFormat(4, 16, is_float=True), WeightFormat(8, 128, is_float=True)
    assert narrow.joined(WeightFormat(4, 32, is_float=True)) == narrow
    assert narrow.joined(int4(32)) == WeightFormat(8, 16, has_minimum=True)
    assert wide.joined(FP8) == wide
    assert not wide.joins(narrow)
    with pytest.raises(
        ValueError, match="no format holds both 8-bit floats in groups of 128 and 8 bits in groups of 64"
    ):
        wide.joined(INT8)


def test_a_cut_through_a_group_makes_groups_smaller_and_the_end_of_a_row_does_not() -> None:
    weights = int4(32)
    assert weights.cut(0, 64, 576) == weights.cut(544, 576, 576) == weights
    assert weights.cut(64, 570, 570) == weights
    assert weights.cut(48, 96, 576).group == 16
    assert weights.cut(0, 17, 576).group == 1
    assert WeightFormat(8).cut(3, 7, 576) == WeightFormat(8)


def test_int4_keeps_the_vocabulary_in_eight_bits() -> None:
    stored = StoredWeights(floats="bfloat16")
    assert stored.quantized("none") == stored
    assert stored.quantized("int8") == StoredWeights(INT8, INT8, "bfloat16")
    assert stored.quantized("int4") == StoredWeights(int4(32), INT8, "bfloat16")
    assert stored.quantized("int4", 128).layers == int4(128)
    with pytest.raises(ModelError, match="'fp8' is not known; known: none, int8, int4"):
        stored.quantized("fp8")


def test_a_checkpoint_says_in_its_config_what_its_weights_are() -> None:
    plain = ModelConfig.from_hf(BASE | {"torch_dtype": "bfloat16"})
    assert plain.weights == StoredWeights(floats="bfloat16")
    packed = ModelConfig.from_hf(BASE | {"dtype": "float16", "quantization_config": PACKED})
    assert packed.weights == StoredWeights(int4(128), floats="float16", method="awq")
    assert packed.weights.at_load == StoredWeights()
    assert plain.quantized("int8").weights.at_load == plain.quantized("int8").weights
    assert packed.quantized("none") == packed
    with pytest.raises(ModelError, match=r"quantised already \(awq\); use none"):
        packed.quantized("int4")


def test_where_some_layers_are_left_out_none_counts_as_narrow() -> None:
    """What is said of a model's weights is a bound."""
    for names, expected in (
        (["lm_head"], int4(128)),
        (["lm_head", "re:.*mlp.gate$"], int4(128)),
        (["model.layers.0.self_attn.q_proj"], None),
    ):
        config = BASE | {"quantization_config": PACKED | {"modules_to_not_convert": names}}
        assert ModelConfig.from_hf(config).weights.layers == expected


WIDE = {
    "num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "channel"
}  # fmt: skip
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WIDE}},
}


@pytest.mark.parametrize(
    ("ignore", "layers", "experts"),
    [
        (["lm_head", "model.layers.0.mlp.gate", "re:.*mlp\\.gate$"], FP8, None),
        (["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"], None, FP8),
        (["model.layers.1.self_attn.q_proj"], None, FP8),
        (["model.layers.99.self_attn.q_proj"], FP8, None),
        (["re:.*mlp.experts.*"], None, None),
    ],
)
def test_layers_and_experts_that_are_left_out_are_floats(
    ignore: list[str], layers: WeightFormat | None, experts: WeightFormat | None
) -> None:
    packed = PackedWeights.of_config({"quantization_config": COMPRESSED | {"ignore": ignore}}, source="config.json")
    assert packed is not None
    stored = packed.stored(num_layers=3, floats="bfloat16", has_experts=True)
    assert (stored.layers, stored.experts) == (layers, experts)
    assert stored.is_wide
