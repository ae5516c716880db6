"""Which attention a rank gets, and that it says why it has not got a faster one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero_api.errors import ModelError
from hetero_api.model_config import ModelConfig
from hetero_worker.backends.base import DeviceBackend
from hetero_worker.backends.cuda.backend import CudaBackend
from hetero_worker.backends.cuda.driver import CudaDriver
from hetero_worker.backends.torch_reference import TorchReference
from tests.support.pseudo_gpu import PseudoGpu
from tests.support.random_model import save_random_llama

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig.from_directory(save_random_llama(tmp_path_factory.mktemp("model")))


class Driver(CudaDriver):
    """A device whose facts are known without it."""

    @property
    def num_multiprocessors(self) -> int:
        return 132


GPU = CudaBackend(0, pool="test", driver=Driver(0))


@pytest.fixture(autouse=True)
def _working_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaBackend, "_triton_problem", None)


def chosen(config: ModelConfig, backend: DeviceBackend = GPU, *, batch_invariant: bool = False) -> str:
    return backend.attention(config, batch_invariant=batch_invariant).name


def test_a_cuda_device_gets_our_kernels(config: ModelConfig) -> None:
    assert chosen(config) == "paged-triton"
    assert chosen(config, batch_invariant=True) == "paged-triton-invariant"


def test_without_triton_it_gets_plain_operators_and_says_so(
    monkeypatch: pytest.MonkeyPatch, config: ModelConfig
) -> None:
    monkeypatch.setattr(CudaBackend, "_triton_problem", "triton is not installed")
    assert chosen(config) == "paged-torch (triton is not installed)"
    with pytest.raises(ModelError, match=r"triton is not installed; install .* or turn engine.batchInvariant off"):
        chosen(config, batch_invariant=True)


def test_a_model_whose_shapes_the_kernels_lack_gets_plain_operators(config: ModelConfig) -> None:
    odd = replace(config, head_dim=72)
    assert chosen(odd) == "paged-torch (head_dim 72 is no multiple of 16 up to 256)"
    with pytest.raises(ModelError, match="head_dim 72 is no multiple"):
        chosen(odd, batch_invariant=True)


@pytest.mark.parametrize("backend", [PseudoGpu(), TorchReference()], ids=["pseudo GPU", "reference"])
def test_the_reference_computes_by_torchs_operators(config: ModelConfig, backend: DeviceBackend) -> None:
    assert chosen(config, backend) == "paged-torch"
    assert chosen(config, backend, batch_invariant=True) == "paged-torch-invariant"
