"""torch's paged kernel is called with what it asks for: checked by a double of it, for there is none without a GPU."""

from __future__ import annotations

import inspect

import pytest
import torch

from hetero_worker.attention.base import AttentionRule
from hetero_worker.attention.varlen import VarlenAttend, VarlenAttention, varlen_attend, varlen_refusal
from hetero_worker.platforms.base import HOST
from tests.support.paged_cases import PagedCase

pytestmark = pytest.mark.unit


class _PlainVarlen:
    """What torch documents of varlen_attn, sequence by sequence, in float64."""

    def __init__(self) -> None:
        self.splits: list[int | None] = []

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: torch.Tensor,
        block_table: torch.Tensor,
        num_splits: int | None,
    ) -> torch.Tensor:
        assert enable_gqa
        assert cu_seq_k is None
        assert {tensor.dtype for tensor in (cu_seq_q, seqused_k, block_table)} == {torch.int32}
        assert len(cu_seq_q) - 1 == len(seqused_k) == len(block_table)
        assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(seqused_k.max()))
        self.splits.append(num_splits)
        out = torch.empty_like(query)
        for i, length in enumerate(seqused_k.tolist()):
            rows = slice(int(cu_seq_q[i]), int(cu_seq_q[i + 1]))
            blocks = block_table[i, : -(-length // key.shape[1])]
            keys, values = (pool[blocks].flatten(0, 1)[:length].double() for pool in (key, value))
            out[rows] = _attend(query[rows].double(), keys, values, scale, window_size).to(query.dtype)
        return out


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: tuple[int, int]
) -> torch.Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    own = torch.arange(len(key) - len(query), len(key))[:, None]
    tokens = torch.arange(len(key))[None, :]
    left, right = window
    is_seen = tokens <= own + right
    if left >= 0:
        is_seen &= tokens >= own - left
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~is_seen, float("-inf")).softmax(-1), value)


@pytest.mark.parametrize("window", [None, 1, 6])
def test_a_step_is_one_call_a_layer(window: int | None) -> None:
    case, kernel = PagedCase(decode=[11, 2], spans=[(0, 9), (8, 5)]), _PlainVarlen()
    rule = AttentionRule(0.25, window=window)
    step = VarlenAttention(HOST, kernel).begin(case.batch)
    for _ in range(2):
        out = step.attend(case.query, case.key, case.value, case.cache, rule)
        assert torch.allclose(out.double(), case.expected(rule), atol=2e-6)
    assert kernel.splits == [None, None]


def test_batch_invariant_steps_are_not_split() -> None:
    case, kernel = PagedCase(decode=[11, 2]), _PlainVarlen()
    step = VarlenAttention(HOST, kernel, batch_invariant=True).begin(case.batch)
    step.attend(case.query, case.key, case.value, case.cache, AttentionRule(0.25))
    assert kernel.splits == [1]


def test_a_soft_cap_is_refused() -> None:
    case = PagedCase(decode=[3])
    step = VarlenAttention(HOST, _PlainVarlen()).begin(case.batch)
    with pytest.raises(ValueError, match="caps no scores"):
        step.attend(case.query, case.key, case.value, case.cache, AttentionRule(0.25, soft_cap=2.0))


def test_what_torch_cannot_do_is_told_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, rules = torch.device("cuda"), [AttentionRule(0.25, window=4)]
    refusals = [
        varlen_refusal(HOST, torch.bfloat16, rules),
        varlen_refusal(cuda, torch.float32, rules),
        varlen_refusal(cuda, torch.bfloat16, [*rules, AttentionRule(0.25, soft_cap=30.0)]),
    ]
    assert refusals == [
        "varlen_attn has no paged kernel on cpu",
        "varlen_attn does not compute in torch.float32",
        "varlen_attn caps no scores",
    ]
    monkeypatch.setattr("hetero_worker.attention.varlen.varlen_attend", lambda: None)
    assert "takes no block tables" in str(varlen_refusal(cuda, torch.bfloat16, rules))


def test_torchs_kernel_is_found_where_it_takes_block_tables() -> None:
    from torch.nn.attention.varlen import varlen_attn

    takes_them = {"block_table", "seqused_k"} <= set(inspect.signature(varlen_attn).parameters)
    found: VarlenAttend | None = varlen_attend()
    assert (found is not None) == takes_them
