"""The GGUF conversion program on a tiny model: weights, pre-tokenizer and chat template come out right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from hetero_client.model_store.store import check_model_directory

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(280)]

HIDDEN, MLP, HEADS, KV_HEADS = 64, 64, 4, 2
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
WORDS = [*(chr(c) for c in range(ord("0"), ord("9") + 1)), "a", "b", "Ġ", "12", "Ġa", "<s>", "</s>", "<unk>"]


def write_gguf(path: Path) -> None:
    """A one-layer Llama whose linear weights are in Q4_1 blocks, all 0.5."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    writer.add_token_types([1] * (len(WORDS) - 3) + [3] * 3)
    writer.add_token_merges(["1 2", "Ġ a"])
    writer.add_bos_token_id(WORDS.index("<s>"))
    writer.add_eos_token_id(WORDS.index("</s>"))
    writer.add_unk_token_id(WORDS.index("<unk>"))
    writer.add_chat_template(TEMPLATE)
    ones = np.ones(HIDDEN, dtype=np.float32)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", ones)
    kv = HIDDEN * KV_HEADS // HEADS
    shapes = {
        "token_embd": (len(WORDS), HIDDEN), "blk.0.attn_q": (HIDDEN, HIDDEN), "blk.0.attn_k": (kv, HIDDEN),
        "blk.0.attn_v": (kv, HIDDEN), "blk.0.attn_output": (HIDDEN, HIDDEN), "blk.0.ffn_gate": (MLP, HIDDEN),
        "blk.0.ffn_up": (MLP, HIDDEN), "blk.0.ffn_down": (HIDDEN, MLP),
    }  # fmt: skip
    for name, shape in shapes.items():
        packed = gguf.quants.quantize(np.full(shape, 0.5, dtype=np.float32), gguf.GGMLQuantizationType.Q4_1)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, folder = tmp_path_factory.mktemp("gguf") / "tiny.gguf", tmp_path_factory.mktemp("converted")
    write_gguf(source)
    done = subprocess.run(
        [sys.executable, "-m", "hetero_client.model_store.gguf_conversion", str(source), str(folder)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_directory_can_be_served_and_keeps_the_chat_template(converted: Path) -> None:
    config = check_model_directory(converted)
    assert (config.num_layers, config.num_kv_heads, config.tie_word_embeddings) == (1, KV_HEADS, True)
    assert "quantization_config" not in json.loads((converted / "config.json").read_text())
    assert (converted / "chat_template.jinja").read_text() == TEMPLATE


def test_digits_stand_alone_although_they_could_merge(converted: Path) -> None:
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    assert tokenizer.encode("12 a", add_special_tokens=False).tokens == ["1", "2", "Ġa"]


def test_weights_are_dequantised_to_bfloat16(converted: Path) -> None:
    tensors = load_file(converted / "model.safetensors")
    down = tensors["model.layers.0.mlp.down_proj.weight"]
    assert (down.dtype, down.shape) == (torch.bfloat16, (HIDDEN, MLP))
    assert down.eq(0.5).all()
