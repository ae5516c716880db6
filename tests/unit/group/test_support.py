"""What this version refuses at start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetero_api.weight_format import StoredWeights, WeightFormat
from hetero_gateway.group.errors import UnsupportedSpecError
from hetero_gateway.group.settings import check_supported, resolve_max_model_len
from tests.unit.group.group_setup import model_config, spec_of

pytestmark = pytest.mark.unit

MODEL = {"uri": "hf://org/model"}
GPU_AND_CPU = ({"name": "gpu", "type": "GPU", "ranks": 1}, {"name": "cpu", "ranks": 1})


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"model": MODEL | {"dtype": "float16"}}, "spec.model.dtype"),
        ({"model": MODEL | {"maxModelLen": 8193}}, "spec.model.maxModelLen"),
        ({"suspend": True}, "spec.suspend"),
        ({"replicas": 0}, "spec.replicas"),
        ({"gateway": {"tlsSecretName": "tls"}}, "spec.gateway.tlsSecretName"),
        ({"gateway": {"authTokenSecretRef": {"name": "auth"}}}, "spec.gateway.authTokenSecretRef"),
    ],
)
def test_a_field_that_cannot_be_served_is_named(spec: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedSpecError) as caught:
        check_supported(spec_of(**spec), model_config())
    assert [problem.partition(": ")[0] for problem in caught.value.problems] == [field]


def test_all_problems_are_told() -> None:
    spec = spec_of(model=MODEL | {"dtype": "float16"}, suspend=True)
    with pytest.raises(UnsupportedSpecError) as caught:
        check_supported(spec, model_config())
    fields = [problem.partition(":")[0] for problem in caught.value.problems]
    assert fields == ["spec.model.dtype", "spec.suspend"]


@pytest.mark.parametrize("model", [{"quantization": "int8"}, {"quantization": "int4", "quantizationGroupSize": 128}])
def test_weights_of_a_plain_checkpoint_may_be_quantised(model: dict[str, Any]) -> None:
    check_supported(spec_of(model=MODEL | model), model_config())


def test_a_quantised_checkpoint_is_served_as_it_is_stored_and_not_quantised_again() -> None:
    stored = replace(model_config(), weights=StoredWeights(layers=WeightFormat(4, 128, has_minimum=True), method="awq"))
    check_supported(spec_of(), stored)
    with pytest.raises(UnsupportedSpecError) as caught:
        check_supported(spec_of(model=MODEL | {"quantization": "int8"}), stored)
    [problem] = caught.value.problems
    assert problem.startswith("spec.model.quantization: int8 is asked for")
    assert "(awq); use none" in problem


@pytest.mark.parametrize("mode", ["Auto", "Tensor", "Layer", "GpuOnly"])
def test_gpu_ranks_are_served_beside_cpu_ranks_in_every_mode(mode: str) -> None:
    check_supported(spec_of(*GPU_AND_CPU, placement={"mode": mode}), model_config())


@pytest.mark.parametrize("mode", ["Auto", "Tensor", "Layer"])
def test_cpu_pools_in_tensor_layer_or_auto_mode_are_served(mode: str) -> None:
    check_supported(spec_of(placement={"mode": mode}), model_config())


def test_auto_is_the_arithmetic_of_those_that_compute_and_the_models_own_length() -> None:
    assert spec_of().dtype_in_force == "float32"
    assert spec_of(*GPU_AND_CPU).dtype_in_force == "bfloat16"
    assert spec_of(*GPU_AND_CPU, model=MODEL | {"dtype": "float32"}).dtype_in_force == "float32"
    assert spec_of(model=MODEL | {"dtype": "bfloat16"}).dtype_in_force == "bfloat16"
    assert resolve_max_model_len(spec_of(), model_config()) == 8192
    assert resolve_max_model_len(spec_of(model=MODEL | {"maxModelLen": 100}), model_config()) == 100
