"""Gated delta rule of sequences, a token after another (arXiv:2412.06464).

One launch computes the convolution, a program for some channels of a sequence; the other one the rule and what follows
it, a program for a value head, which keeps the head's matrix in registers. All arithmetic is in float32, and a program
does the same for each token: a row's bits do not depend on the batch, nor on where its sequence is cut into launches.
So no launch is compiled for its number of tokens.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

_CHANNELS: Final = 256
"""Most channels of one program."""
_CHANNELS_PER_WARP: Final = 128
"""A thread alone reads and writes a channel's window: where threads had the same one, one might write before another
reads."""
_KEY_EPS: Final = tl.constexpr(1e-6)
"""Added to the squared length of queries and keys."""
_ELEMENTS_PER_WARP: Final = 2048
"""Of a matrix: 64 registers of each thread."""
_MOST_WARPS: Final = 16


class SequenceStates(NamedTuple):
    """States of the sequences of a launch, which have `num_tokens` rows each, one sequence after another."""

    matrices: torch.Tensor
    """float32 [slots, value heads, key_dim, value_dim]."""
    windows: torch.Tensor
    """float32 [slots, taps - 1, channels]: last inputs of the convolution."""
    slots: torch.Tensor
    """int64 [sequences], no two alike."""
    lengths: torch.Tensor
    """int32 [sequences]: tokens, these included; a sequence that has no others begins with empty states."""
    num_tokens: int


@triton.jit
def _silu(x):  # type: ignore[no-untyped-def]
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _input(mixed, window, place, channel, num_earlier, inside, width, channels: tl.constexpr, before: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the convolution's input `place` of a sequence, counted from its first row; less than 0: of the window."""
    place += tl.zeros_like(channel)
    old = tl.load(
        window + (place + before) * channels, mask=inside & (place < 0) & (place + num_earlier >= 0), other=0.0
    )
    new = tl.load(mixed + place * width + channel, mask=inside & (place >= 0), other=0.0)
    return old + new.to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens"])
def _convolve(  # type: ignore[no-untyped-def]
    mixed, convolution, windows, out, slots, lengths, num_tokens, width,
    channels: tl.constexpr, taps: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < channels
    num_earlier = tl.load(lengths + sequence) - num_tokens
    window = windows + tl.load(slots + sequence) * (taps - 1) * channels + channel
    own = mixed + sequence * num_tokens * width
    for token in range(num_tokens):
        total = tl.zeros([block], tl.float32)
        for tap in tl.static_range(taps):
            seen = _input(
                own, window, token + tap - (taps - 1), channel, num_earlier, inside, width, channels, taps - 1
            )
            total += seen * tl.load(convolution + tap * channels + channel, mask=inside, other=0.0)
        tl.store(out + (sequence * num_tokens + token) * channels + channel, _silu(total), mask=inside)
    for kept in tl.static_range(taps - 1):  # from a later row of the window, if not from a token
        seen = _input(
            own, window, num_tokens + kept - (taps - 1), channel, num_earlier, inside, width, channels, taps - 1
        )
        tl.store(window + kept * channels, seen, mask=inside)


@triton.jit
def _unit(x):  # type: ignore[no-untyped-def]
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + _KEY_EPS)


@triton.jit(do_not_specialize=["num_tokens"])
def _rule(  # type: ignore[no-untyped-def]
    mixed, convolved, gates, decays, decay_biases, norm, matrices, out, slots, lengths, num_tokens, eps, scale,
    key_heads: tl.constexpr, group: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    tile_keys: tl.constexpr, tile_values: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys: tl.constexpr = key_heads * key_dim
    heads: tl.constexpr = key_heads * group
    values: tl.constexpr = heads * value_dim
    channels: tl.constexpr = 2 * keys + values
    key, value = tl.arange(0, tile_keys), tl.arange(0, tile_values)
    is_key, is_value = key < key_dim, value < value_dim
    inside = is_key[:, None] & is_value[None, :]
    num_earlier = tl.load(lengths + sequence) - num_tokens
    first = (tl.load(slots + sequence) * heads + head) * key_dim * value_dim
    place = matrices + first + key[:, None] * value_dim + value[None, :]
    has_states = key < num_earlier * tile_keys  # all or none
    matrix = tl.load(place, mask=inside & has_states[:, None], other=0.0)
    at = head // group * key_dim + key
    decay_factor, decay_bias = tl.load(decays + head), tl.load(decay_biases + head)
    weight = tl.load(norm + value, mask=is_value, other=0.0)
    for token in range(num_tokens):
        row = sequence * num_tokens + token
        own = convolved + row * channels
        query = _unit(tl.load(own + at, mask=is_key, other=0.0)) * scale
        unit_key = _unit(tl.load(own + keys + at, mask=is_key, other=0.0))
        wanted = tl.load(own + 2 * keys + head * value_dim + value, mask=is_value, other=0.0)
        opening = 1.0 / (1.0 + tl.exp(-tl.load(gates + row * 2 * heads + head).to(tl.float32)))
        x = tl.load(gates + row * 2 * heads + heads + head).to(tl.float32) + decay_bias
        softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
        matrix = matrix * tl.exp(decay_factor * softplus)
        update = (wanted - tl.sum(matrix * unit_key[:, None], axis=0)) * opening
        matrix = matrix + unit_key[:, None] * update[None, :]
        output = tl.sum(matrix * query[:, None], axis=0)
        normed = output * tl.rsqrt(tl.sum(output * output, axis=0) / value_dim + eps) * weight
        z = tl.load(mixed + row * (channels + values) + channels + head * value_dim + value, mask=is_value, other=0.0)
        tl.store(out + row * values + head * value_dim + value, normed * _silu(z.to(tl.float32)), mask=is_value)
    tl.store(place, matrix, mask=inside)


def convolve(mixed: torch.Tensor, convolution: torch.Tensor, states: SequenceStates) -> torch.Tensor:
    """Return silu of the causal convolution, float32 [rows, channels], and take the windows on.

    `mixed` is contiguous [rows, channels and others], `convolution` float32 [taps, channels], the row's own tap last.
    """
    (rows, width), (taps, channels) = mixed.shape, convolution.shape
    out = torch.empty((rows, channels), dtype=torch.float32, device=mixed.device)
    block = min(_CHANNELS, triton.next_power_of_2(channels))
    grid = len(states.slots), triton.cdiv(channels, block)
    sequences = states.slots, states.lengths, states.num_tokens
    _convolve[grid](
        mixed, convolution, states.windows, out, *sequences, width,
        channels=channels, taps=taps, block=block, num_warps=max(1, block // _CHANNELS_PER_WARP), enable_fp_fusion=True,
    )  # fmt: skip
    return out


def update_states(
    mixed: torch.Tensor,
    convolved: torch.Tensor,
    gates: torch.Tensor,
    states: SequenceStates,
    *,
    decay: torch.Tensor,
    decay_bias: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    key_heads: int,
    out: torch.Tensor,
) -> None:
    """Take the matrices on, and write the heads' outputs, normed and times silu(z), to `out` [rows, values].

    `mixed` is [rows, channels | z], `convolved` float32 [rows, q | k | v], `gates` [rows, b | a] of value heads each;
    weights are float32. All are contiguous.
    """
    _, heads, key_dim, value_dim = states.matrices.shape
    tiles = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    warps = max(1, min(_MOST_WARPS, tiles[0] * tiles[1] // _ELEMENTS_PER_WARP))
    _rule[len(states.slots), heads](
        mixed, convolved, gates, decay, decay_bias, norm, states.matrices, out,
        states.slots, states.lengths, states.num_tokens, eps, key_dim**-0.5,
        key_heads=key_heads, group=heads // key_heads, key_dim=key_dim, value_dim=value_dim,
        tile_keys=tiles[0], tile_values=tiles[1], num_warps=warps, enable_fp_fusion=True,
    )  # fmt: skip
