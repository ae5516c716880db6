"""What this version refuses at start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetero_api.errors import PlanError
from hetero_api.spec import PlacementMode, PlacementShares
from hetero_api.weight_format import StoredWeights, WeightFormat
from hetero_gateway.group.errors import UnsupportedSpecError
from hetero_gateway.group.settings import check_deferral, check_streaming, check_supported, resolve_max_model_len
from hetero_placement.decision import Decision, Option, Streaming
from hetero_placement.shard_plans import deal_within_layers
from tests.unit.group.group_setup import model_config, spec_of

pytestmark = pytest.mark.unit

MODEL = {"uri": "hf://org/model"}
MOE = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
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


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, "the model has no experts"),
        (MOE, "2 of the 2 experts of a token, one of which must not be late; use 1 at most"),
    ],
    ids=["no experts", "all experts"],
)
def test_experts_that_cannot_be_deferred_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UnsupportedSpecError) as caught:
        check_supported(spec_of(*GPU_AND_CPU, engine={"expertDeferral": 2}), model_config(**changes))
    assert [told for told in caught.value.problems if problem in told] == list(caught.value.problems)


def test_a_placement_without_anything_to_defer_is_refused() -> None:
    spec, config = spec_of(*GPU_AND_CPU, engine={"expertDeferral": 1}), model_config(**MOE)
    helped = deal_within_layers(config, cores=[1, 1], shares=PlacementShares(attention=[1, 0], mlp=[0, 1]))
    check_deferral(spec, helped)
    both = deal_within_layers(config, cores=[1, 1], shares=PlacementShares())
    with pytest.raises(
        PlanError, match=r"spec\.engine\.expertDeferral: no rank without KV heads has experts of two layers"
    ):
        check_deferral(spec, both)
    check_deferral(spec_of(*GPU_AND_CPU), both)


def test_streaming_that_is_asked_for_and_cannot_be_had_is_refused_with_the_reason() -> None:
    plan = deal_within_layers(model_config(**MOE), cores=[1, 1], shares=PlacementShares())
    chosen = Option("Tensor", PlacementMode.TENSOR, plan, no_streaming="no CPU rank has experts")
    decision = Decision(plan, (chosen,), chosen, "")
    check_streaming(spec_of(*GPU_AND_CPU), decision)
    check_streaming(spec_of(*GPU_AND_CPU, engine={"expertStreaming": 0}), decision)
    asked = spec_of(*GPU_AND_CPU, engine={"expertStreaming": 99})
    with pytest.raises(PlanError, match=r"spec\.engine\.expertStreaming: 99, but no CPU rank has experts; leave"):
        check_streaming(asked, decision)
    streaming = Streaming(99, 999, 1 << 20, 1.0, 2.0)
    check_streaming(asked, replace(decision, chosen=replace(chosen, streaming=streaming)))
