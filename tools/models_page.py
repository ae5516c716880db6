"""Writes docs/models.md: every architecture that is served, what is special about it, and how it is tested.

Architectures come from the contract; which of a test's cases are of an architecture, from the tests' own lists.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hetero_api.architectures import ARCHITECTURES, REFUSED_ARCHITECTURES, Architecture
from hetero_api.wrappers import WRAPPERS
from tests.distributed.test_hetero_group import EVERY_PATH_VARIANT, MIXED_VARIANTS
from tests.distributed.test_model_families import CASES as OF_CPU_GROUPS
from tests.support.tiny_checkpoints import VARIANTS
from tests.unit.worker_model.test_decoder_reference import (
    CURRENT,
    EVERY_LAYOUT,
    MORE_CURRENT,
    MORE_IN_EVERY_LAYOUT,
    MORE_ODD_HEADS,
    ODD_HEADS,
)
from tests.unit.worker_model.test_model_paths import MORE_VARIANTS as MORE_PATH_VARIANTS
from tests.unit.worker_model.test_model_paths import VARIANTS as PATH_VARIANTS
from tests.unit.worker_model.test_native_forward import CASES, MORE_CASES

PAGE: Final = Path("docs/models.md")
_FAMILIES: Final = {
    "LlamaForCausalLM": "Llama 2, 3, 3.1, 3.2; SmolLM2",
    "MistralForCausalLM": "Mistral 7B, Nemo, Small (text)",
    "MixtralForCausalLM": "Mixtral 8x7B, 8x22B",
    "Qwen2ForCausalLM": "Qwen2, Qwen2.5",
    "Qwen3ForCausalLM": "Qwen3",
    "Qwen3MoeForCausalLM": "Qwen3-30B-A3B, 235B-A22B, Coder",
    "Gemma2ForCausalLM": "Gemma 2",
    "Gemma3ForCausalLM": "Gemma 3 (text)",
    "Gemma4ForCausalLM": "Gemma 4 31B, 26B-A4B, E4B, E2B (text)",
    "SmolLM3ForCausalLM": "SmolLM3",
    "Glm4ForCausalLM": "GLM-4-0414",
    "Glm4MoeForCausalLM": "GLM-4.5, 4.6, 4.7, Air",
    "Glm4MoeLiteForCausalLM": "GLM-4.7-Flash",
    "MiniMaxM2ForCausalLM": "MiniMax-M2",
    "DeepseekV3ForCausalLM": "DeepSeek-V3, R1, V3.1; Kimi-K2",
    "Qwen3NextForCausalLM": "Qwen3-Next 80B-A3B",
    "Qwen3_5ForCausalLM": "Qwen3.5 (text): 2B to 27B",
    "Qwen3_5MoeForCausalLM": "Qwen3.5 (text): 35B-A3B, 122B-A10B, 397B-A17B",
    "GptOssForCausalLM": "GPT-OSS 20B, 120B",
}
_TESTS: Final = {
    "every layout": (*EVERY_LAYOUT, *MORE_IN_EVERY_LAYOUT),
    "odd heads": (*ODD_HEADS, *MORE_ODD_HEADS),
    "torch, GPU with CPU, invariant": (*CURRENT, *MORE_CURRENT),
    "chunks, prefixes, stages": (*PATH_VARIANTS, *MORE_PATH_VARIANTS),
    "recorded": tuple(variant for variant, *_ in (*CASES, *MORE_CASES)),
    "mixed group": (*MIXED_VARIANTS, EVERY_PATH_VARIANT),
    "preempted, healed, woken": tuple(variant for variant, _ in OF_CPU_GROUPS),
}
_INTRO: Final = """\
<!-- Generated from the contract and the tests by `make docs`. Do not edit. -->
# Models

A model is served if `architectures` in its config.json names one of these. Everything else is refused by name.

**Tests.** All architectures are compared with transformers' own class: random weights, float32, logits within 10⁻⁴ in
prefill and decode, on one rank and on ranks with 5:2:1:0 of the heads. Numbers count the configurations that a test
tries. What is tested beside:

- *every layout*: ranks without heads, without experts, first ranks idle, helpers of two holders, layers of stages
- *odd heads*: groups of five query heads and of one, and 3 KV heads, dealt 2:1:0 and 1:1
- *torch, GPU with CPU, invariant*: torch's operators in place of native kernels, a GPU that is played by the host
  beside a CPU rank, and batch-invariant mode
- *chunks, prefixes, stages*: prefill in chunks of any size, prefix hits, mixed batches, recomputed sequences, pipelines
- *recorded*: recorded decode steps equal those that are computed operator by operator, bit by bit
- *mixed group*: real processes of a GPU rank, played by the host, and CPU ranks: text, a prefix hit, sleep, and a CPU
  rank that is killed while it streams
- *preempted, healed, woken*: real processes of two uneven CPU ranks, and of two stages: more sequences than the cache
  holds, a rank that is killed while it streams, sleep that drops weights, and another cache

"""
_NOTES: Final = """
**Kernels.** CPU ranks compute all of these with native kernels, and record steps that only decode. On GPUs attention is
a Triton kernel.

**Latent attention** (DeepSeek-V3) caches one vector a token and layer, 576 elements for DeepSeek-V3, on each rank that
holds heads. CPU ranks compute with it as it is, in prefill too: a row's bits must not depend on the rows beside it.
GPUs do so for rows that decode; for longer spans of prompts they make each head's keys and values of it again where
that takes fewer products, unless `engine.batchInvariant` is on.

**KV heads of two kinds** (Gemma 4) are dealt in units that all layers have: their largest common divisor, 4 for 31B
and 2 for 26B-A4B. A layer with more KV heads has several in each unit.

**Layers that read earlier layers' keys and values** (Gemma 4 E4B, E2B) cache nothing, and are counted so. Each rank has
the same KV heads of such a layer and of the one that it reads. In Layer mode one rank holds all of them: the last 20 of
E4B's 42 layers, the last 22 of E2B's 35.

**Embeddings of each layer** (Gemma 4 E4B, E2B) are dealt by rows of the vocabulary, as the usual embedding is: 5.6 GB
of E4B in 16 bits. Ranks with heads sum them once a step, and have all of what makes them a part of the stream.

**Gated delta rule** (Qwen3-Next, Qwen3.5): most layers keep states of each sequence in place of keys and values, 75 MB
for Qwen3-Next. Ranks hold them for as many sequences as `maxNumSeqs` says, which is counted in their memory, and have
the heads that are dealt in proportion to KV heads. An eighth of the memory that is left for the KV cache is for
snapshots of states, and a prefix hit rounds down to one. Where tokens are proposed, some snapshots are for the states
behind these, and text is the same. A native kernel computes the rule on CPU ranks, token by token
in prefill, too: a row's bits do not depend on the batch or on chunks. On GPUs Triton kernels compute decode rows, and
torch prompts in chunks; steps are not replayed from graphs.

**Multi-token-prediction heads** (DeepSeek-V3, GLM-4.5 to 4.7, GLM-4.7-Flash, Qwen3-Next, Qwen3.5) are not a part of the
model: they are read where `spec.engine.speculative` asks for MTP, or for Auto, and propose tokens
([using.md](using.md#proposed-tokens)).

**Experts that all tokens share** are dealt in proportion to KV heads; routed experts are dealt whole.

"""
_WRAPPERS: Final = """
**Models of text and other media** are served as text: their `text_config` is the configuration, and weights of other
parts are not read. `hetero status` says which parts these are, with their number of tensors and bytes.

"""
_REFUSED: Final = """
**Refused by name**, with the reason:

"""


def generate_models_page(root: Path) -> list[Path]:
    """Write the page under `root`; returns what was written, relative to `root`."""
    (root / PAGE).parent.mkdir(parents=True, exist_ok=True)
    text = {name: [kind for kind in kinds.values() if kind in ARCHITECTURES] for name, kinds in WRAPPERS.items()}
    wrappers = "".join(f"- `{name}`: as `{'`, `'.join(kinds)}`\n" for name, kinds in text.items() if kinds)
    refused = "".join(f"- `{name}`: {reason}\n" for name, reason in REFUSED_ARCHITECTURES.items())
    page = _INTRO + _table() + _NOTES.rstrip() + "\n" + _WRAPPERS + wrappers + _REFUSED + refused
    (root / PAGE).write_text(page, encoding="utf-8")
    return [PAGE]


def _table() -> str:
    heads = ("Architecture", "Models", "Parts", "configurations", *_TESTS)
    rows = [heads, tuple("---" for _ in heads), *map(_row, ARCHITECTURES)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(name: str) -> tuple[str, ...]:
    variants = [variant for variant, (kind, _) in VARIANTS.items() if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] == name]
    tested = (str(len(set(variants) & set(cases)) or "") for cases in _TESTS.values())
    return f"`{name}`", _FAMILIES[name], ", ".join(_parts(ARCHITECTURES[name])), str(len(variants)), *tested


def _parts(traits: Architecture) -> Collection[str]:
    """Return what an architecture has that Llama has not."""
    experts = traits.experts
    parts = {
        "latent attention": traits.is_latent,
        "prediction heads": traits.heads is not None,
        "gated delta rule": traits.delta is not None,
        "gated attention": traits.is_gated,
        "sinks": traits.has_sinks,
        "windows": traits.sliding.value != "none" and traits.use_sliding_window,
        "layers without rotation": traits.no_rope_layer_interval is not None,
        "partial rotation": traits.partial_rotary_factor < 1,
        "norms of query and key heads": traits.qk_norm == "head",
        "norms over all heads": traits.qk_norm == "all heads",
        "KV heads of two kinds": traits.global_head_dim is not None,
        "norms of values": traits.value_norm,
        "norms of sums": bool(traits.norms.sums),
        "soft caps": traits.final_logit_softcapping is not None,
        "embeddings of each layer": bool(traits.defaults.get("hidden_size_per_layer_input")),
        "experts": experts is not None,
        "shared experts": experts is not None and (experts.has_shared or bool(experts.shared_intermediate_size)),
        "sigmoid routing": experts is not None and experts.routing.score == "sigmoid",
    }
    return [part for part, has in parts.items() if has]
