"""Which attention a rank gets, and that it says why it has not got a faster one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hetero_api.errors import ModelError
from hetero_api.model_config import ModelConfig
from hetero_worker.attention import selection, triton_paged
from hetero_worker.attention.selection import ChosenAttention, DeviceAttention, choose_attention
from hetero_worker.backends.base import Platform
from hetero_worker.backends.cpu import CpuPlatform
from hetero_worker.kernels.availability import triton_problem
from tests.support.pseudo_gpu import PseudoGpuPlatform
from tests.support.random_model import save_random_llama

pytestmark = pytest.mark.unit


class _CudaDevice(PseudoGpuPlatform):
    """As far as names go."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig.from_directory(save_random_llama(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def _working_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "triton_problem", lambda device: None)
    monkeypatch.setattr(triton_paged, "_programs_of", lambda device: 528)


def chosen(
    config: ModelConfig,
    platform: Platform | None = None,
    *,
    wanted: DeviceAttention | None = None,
    batch_invariant: bool = False,
) -> ChosenAttention:
    platform = platform or _CudaDevice()
    return choose_attention(platform, config, wanted=wanted, batch_invariant=batch_invariant)


def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "triton_problem", lambda device: "triton is not installed")


def test_a_cuda_device_gets_our_kernels(config: ModelConfig) -> None:
    assert str(chosen(config)) == "paged-triton"
    assert str(chosen(config, batch_invariant=True)) == "paged-triton-invariant"
    assert str(chosen(config, wanted=DeviceAttention.TRITON)) == "paged-triton"


def test_without_triton_it_gets_plain_operators_and_says_so(
    monkeypatch: pytest.MonkeyPatch, config: ModelConfig
) -> None:
    without_triton(monkeypatch)
    assert str(chosen(config)) == "paged-torch (triton is not installed)"


def test_a_model_whose_shapes_the_kernels_lack_gets_plain_operators(config: ModelConfig) -> None:
    odd = replace(config, head_dim=72)
    assert str(chosen(odd)) == "paged-torch (head_dim 72 is no multiple of 16 up to 256)"


def test_plain_operators_can_be_asked_for(config: ModelConfig) -> None:
    assert str(chosen(config, wanted=DeviceAttention.PLAIN)) == "paged-torch (plain operators are asked for)"


def test_what_is_asked_for_and_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, config: ModelConfig) -> None:
    without_triton(monkeypatch)
    with pytest.raises(ModelError, match=r"is asked for \(engine.batchInvariant\), but triton is not installed"):
        chosen(config, batch_invariant=True)
    with pytest.raises(ModelError, match="by our kernels is asked for, but triton is not installed"):
        chosen(config, wanted=DeviceAttention.TRITON)


def test_a_pseudo_gpu_gets_plain_operators(monkeypatch: pytest.MonkeyPatch, config: ModelConfig) -> None:
    monkeypatch.setattr(selection, "triton_problem", triton_problem)
    assert str(chosen(config, PseudoGpuPlatform())) == "paged-torch"
    assert str(chosen(config, PseudoGpuPlatform(), batch_invariant=True)) == "paged-torch-invariant"
    with pytest.raises(ModelError, match=r"is asked for \(engine.batchInvariant\), but no kernels for cpu"):
        chosen(config, PseudoGpuPlatform(), wanted=DeviceAttention.TRITON, batch_invariant=True)


def test_host_cores_have_their_own(config: ModelConfig) -> None:
    host = CpuPlatform(memory_bytes=1 << 30)
    assert str(chosen(config, host)) == "paged-torch"
    assert str(chosen(config, host, batch_invariant=True)) == "paged-torch-invariant"
    with pytest.raises(ModelError, match="attention by triton is asked for on host cores"):
        chosen(config, host, wanted=DeviceAttention.TRITON)
