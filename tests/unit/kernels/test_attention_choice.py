"""Which attention a rank gets, and that it says why it has not got a faster one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetero_api.errors import ModelError
from hetero_api.hf_config import read_json
from hetero_api.model_config import ModelConfig
from hetero_api.model_parts import LatentShape
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
    assert chosen(odd) == "paged-torch (head_dim 72 is no multiple of 16 up to 512)"
    with pytest.raises(ModelError, match="head_dim 72 is no multiple"):
        chosen(odd, batch_invariant=True)


def test_latent_attention_has_our_kernels_too(config: ModelConfig) -> None:
    latent = replace(config, latent=LatentShape(512, query_rank=1536, nope_dim=128, rope_dim=64, value_dim=128))
    assert chosen(latent) == "paged-triton"
    with pytest.raises(ModelError, match="torch norms and rotates what latent attention caches"):
        chosen(latent, batch_invariant=True)
    wide = replace(config, latent=LatentShape(1024, query_rank=1536, nope_dim=128, rope_dim=64, value_dim=128))
    assert chosen(wide) == "paged-torch (latent keys of 1024 and 64 elements are no multiples of 16 up to 512)"


def test_layers_of_two_kinds_have_our_kernels_if_both_have() -> None:
    path = Path(__file__).parents[3] / "examples/models/gemma-4-31b.json"
    gemma = ModelConfig.from_hf(read_json(path), source=str(path))
    assert gemma.sliding is not None
    assert gemma.sliding.kv is not None
    assert chosen(gemma) == "paged-triton"
    odd = replace(gemma, head_dim=520)
    assert chosen(odd) == "paged-torch (head_dim 520 is no multiple of 16 up to 512)"


@pytest.mark.parametrize("backend", [PseudoGpu(), TorchReference()], ids=["pseudo GPU", "reference"])
def test_the_reference_computes_by_torchs_operators(config: ModelConfig, backend: DeviceBackend) -> None:
    assert chosen(config, backend) == "paged-torch"
    assert chosen(config, backend, batch_invariant=True) == "paged-torch-invariant"
