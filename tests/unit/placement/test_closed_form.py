"""The closed formulas, against the published table of predictions and against the cost model."""

from __future__ import annotations

import pytest

from tests.support.closed_form import ClosedForm

pytestmark = pytest.mark.unit

T_X = 60e-6
GB = 1e9

# 8B in bfloat16 has 16 GB of weights in 32 layers, 70B in bfloat16 140 GB in 80, in 4 bits 40 GB. GPU bandwidths are
# effective ones; capacities are what the card's memory leaves for weights.
CASES = {
    "8B bf16, H200 (200)": ClosedForm(
        weight_bytes=16 * GB, num_layers=32, gpu_bandwidth=4000 * GB, cpu_bandwidth=200 * GB
    ),
    "8B bf16, 4090 (370)": ClosedForm(
        weight_bytes=16 * GB, num_layers=32, gpu_bandwidth=900 * GB, cpu_bandwidth=370 * GB
    ),
    "8B bf16, 3060 12 GB (370)": ClosedForm(
        weight_bytes=16 * GB, num_layers=32, gpu_bandwidth=315 * GB, cpu_bandwidth=370 * GB,
        gpu_capacity=9.25 * GB, bus_bandwidth=25 * GB,
    ),
    "70B q4, 4090 (370)": ClosedForm(
        weight_bytes=40 * GB, num_layers=80, gpu_bandwidth=900 * GB, cpu_bandwidth=370 * GB,
        gpu_capacity=21 * GB, bus_bandwidth=25 * GB,
    ),
    "70B bf16, H200 (600)": ClosedForm(
        weight_bytes=140 * GB, num_layers=80, gpu_bandwidth=4000 * GB, cpu_bandwidth=600 * GB,
        gpu_capacity=125 * GB, bus_bandwidth=50 * GB,
    ),
    "70B bf16, H100 (600)": ClosedForm(
        weight_bytes=140 * GB, num_layers=80, gpu_bandwidth=2900 * GB, cpu_bandwidth=600 * GB,
        gpu_capacity=70 * GB, bus_bandwidth=50 * GB,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "gpu", "cpu", "twice", "once", "layer", "stream"),
    [
        ("8B bf16, H200 (200)", "250", "12.5", "131", "175", "250", None),
        ("8B bf16, 4090 (370)", "56", "23", "61", "69", None, None),
        ("8B bf16, 3060 12 GB (370)", None, "23", "37", "40", "21", "3.7"),
        ("70B q4, 4090 (370)", None, "9", "16.4", "17.8", "13.4", "1.3"),
        ("70B bf16, H200 (600)", None, "4.3", "25.0", "28.4", "17.8", "3.3"),
        ("70B bf16, H100 (600)", None, "4.3", "7.9", "8.2", "7.1", "0.7"),
    ],
)
def test_the_table_of_predictions_is_reproduced(
    case: str, gpu: str | None, cpu: str, twice: str, once: str, layer: str | None, stream: str | None
) -> None:
    """Tokens/s of one stream, to the printed digit."""
    form = CASES[case]
    cells = [
        (gpu, form.gpu_only_s()),
        (cpu, form.cpu_only_s()),
        (twice, form.tensor_s(exchanges=2, exchange_s=T_X)),
        (once, form.tensor_s(exchanges=1, exchange_s=T_X)),
        (layer, form.layer_s()),
        (stream, form.streaming_s()),
    ]
    for printed, seconds in cells:
        if printed is not None:
            assert seconds is not None
            decimals = len(printed.partition(".")[2])
            assert f"{1 / seconds:.{decimals}f}" == printed


def test_what_does_not_fit_has_no_gpu_only_time_and_what_fits_is_not_streamed() -> None:
    assert CASES["70B bf16, H100 (600)"].gpu_only_s() is None
    assert CASES["8B bf16, H200 (200)"].streaming_s() is None


def test_with_gloo_like_exchanges_layer_split_is_faster_than_tensor_with_two_exchanges() -> None:
    for case in ("70B q4, 4090 (370)", "70B bf16, H200 (600)", "70B bf16, H100 (600)"):
        form = CASES[case]
        assert form.tensor_s(exchanges=2, exchange_s=300e-6) > form.layer_s(), case


@pytest.mark.parametrize("exchanges", [1, 2])
def test_at_the_break_even_exchange_tensor_takes_as_long_as_gpu_only(exchanges: int) -> None:
    form = CASES["8B bf16, 4090 (370)"]
    exchange_s = form.break_even_exchange_s(exchanges=exchanges)
    assert form.tensor_s(exchanges=exchanges, exchange_s=exchange_s) == pytest.approx(form.gpu_only_s())


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_no_other_share_is_better_than_the_balanced_one(share: float) -> None:
    form = CASES["8B bf16, 4090 (370)"]
    assert form.tensor_s(exchanges=1, exchange_s=T_X, share=share) >= form.tensor_s(exchanges=1, exchange_s=T_X)
