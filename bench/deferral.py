"""What experts that come a layer late cost: perplexity of a small model, by `spec.engine.expertDeferral`.

    python -m bench.deferral [--steps N] [--windows N]

A Qwen3-MoE of 6 layers with 16 experts each, 4 a token, is trained for some minutes on bytes of Python's standard
library, and asked for files of it that it has not seen. One rank has the attention, another all experts, which is the
placement that deferral is for. A byte is a token, so perplexities are small; the loss is the distance from 0 experts
that come late. Writes bench/results/deferral-DATE.json.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import functional as F

from bench.home import RESULTS
from bench.machine import describe
from bench.report import aligned
from tests.support.rank_shares import Shares
from tests.support.stages import NUM_BLOCKS, Stages

BYTES: Final = 256
EXPERTS: Final = 16
PER_TOKEN: Final = 4
WINDOW: Final = 128
BATCH: Final = 8
TRAINED_BYTES: Final = 4_000_000
SHAPE: Final[dict[str, Any]] = {
    "num_hidden_layers": 6, "hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": 64,
    "num_experts": EXPERTS, "num_experts_per_tok": PER_TOKEN, "norm_topk_prob": True, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": BYTES, "max_position_embeddings": 128 + WINDOW,
    "tie_word_embeddings": True, "initializer_range": 0.05, "bos_token_id": 1, "eos_token_id": 2,
    "output_router_logits": True, "router_aux_loss_coef": 0.01,
}  # fmt: skip
HELPED: Final = Shares(kv_heads=((2, 0),), mlp_columns=((64, 0),), vocab_rows=(BYTES, 0), experts=((0, EXPERTS),))


def library_bytes() -> Iterator[bytes]:
    """Yield the modules of the standard library, by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.glob("*.py")):
        yield path.read_bytes()


def train(directory: Path, *, steps: int) -> bytes:
    """Train a model and save it; return bytes that it was not trained on."""
    from transformers import AutoConfig, AutoModelForCausalLM

    text = b"".join(library_bytes())
    seen, unseen = text[:TRAINED_BYTES], text[TRAINED_BYTES:]
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **SHAPE)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    data = torch.frombuffer(bytearray(seen), dtype=torch.uint8).long()
    for step in range(steps):
        begins = torch.randint(len(data) - WINDOW, (BATCH,))
        batch = torch.stack([data[begin : begin + WINDOW] for begin in begins.tolist()])
        loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", file=sys.stderr, flush=True)
    model.save_pretrained(directory)
    return unseen


def perplexity(directory: Path, windows: Sequence[bytes], *, deferral: int) -> float:
    """Return the perplexity of the windows, of which each byte but the first counts."""
    stages = Stages.load(directory, HELPED, expert_deferral=deferral)
    blocks, total = list(stages.free_blocks), 0.0
    for window in windows:
        stages.free_blocks = list(blocks)
        tokens = list(window)
        logits = stages.logits((stages.start(tokens), len(tokens)))
        total += F.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="sum").item()
    return math.exp(total / sum(len(window) - 1 for window in windows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240, help="of training")
    parser.add_argument("--windows", type=int, default=40, help="of text that was not seen")
    arguments = parser.parse_args()
    assert WINDOW <= 4 * (NUM_BLOCKS - 1), "a window fits in the cache"
    with tempfile.TemporaryDirectory() as folder:
        unseen = train(Path(folder), steps=arguments.steps)
        starts = range(0, len(unseen) - WINDOW, len(unseen) // arguments.windows)
        windows = [unseen[begin : begin + WINDOW] for begin in islice(starts, arguments.windows)]
        found = {number: perplexity(Path(folder), windows, deferral=number) for number in range(PER_TOKEN)}
    rows = [["deferred", "perplexity", "loss"]]
    rows += [[f"{n} of {PER_TOKEN}", f"{value:.4f}", f"{value / found[0] - 1:+.2%}"] for n, value in found.items()]
    print(aligned(rows))
    path = RESULTS / f"deferral-{time.strftime('%Y-%m-%d-%H%M%S')}.json"
    result = describe() | {"steps": arguments.steps, "windows": len(windows), "window": WINDOW, "perplexity": found}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
