"""Peer: Hugging Face transformers' `generate`, a left-padded batch, greedy, end tokens ignored.

Reads one JSON request a line on standard input, `{"prompts": [[ids]], "max_new": n}`; answers
`{"elapsed_s": …, "output_tokens": …}`. Its first line tells that it is loaded.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

PAD = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype)).eval()
    print(json.dumps({"load_s": time.perf_counter() - start}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        prompts, max_new = request["prompts"], request["max_new"]
        width = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        config = GenerationConfig(
            max_new_tokens=max_new, min_new_tokens=max_new, do_sample=False, pad_token_id=PAD, eos_token_id=PAD
        )
        start = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(ids, attention_mask=mask, generation_config=config)
        elapsed = time.perf_counter() - start
        print(json.dumps({"elapsed_s": elapsed, "output_tokens": int(output[:, width:].numel())}), flush=True)


if __name__ == "__main__":
    main()
