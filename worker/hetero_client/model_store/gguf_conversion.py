"""Program that converts a GGUF file of the Llama family into a Hugging Face directory in bfloat16.

    python -m hetero_client.model_store.gguf_conversion GGUF FOLDER

transformers reads the format. Three things are corrected here: weights stay in their 4-bit blocks unless
dequantisation is asked for; the pre-tokenizer of "smollm" (single digits, then GPT-2's byte level) comes out as another
one, which changes the token ids; and the chat template is left in the GGUF's metadata.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from hetero_api.contract import EXIT_OK, EXIT_USAGE
from hetero_api.model_config import CONFIG_FILE


def convert(gguf: Path, folder: Path) -> None:
    """Write config, tokenizer and weights of `gguf` into `folder`."""
    _convert_tokenizer(gguf).save_pretrained(folder)
    _convert_weights(gguf, folder)
    _drop_quantization(folder / CONFIG_FILE)


def _convert_tokenizer(gguf: Path) -> Any:
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    fields = GGUFReader(str(gguf)).fields
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    if _text(fields, "tokenizer.ggml.pre") == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = _smollm_pre_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template or _text(fields, "tokenizer.chat_template")
    return tokenizer


def _smollm_pre_tokenizer() -> Any:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])


def _convert_weights(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)


def _drop_quantization(path: Path) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _text(fields: Any, name: str) -> str | None:
    return str(fields[name].contents()) if name in fields else None


def main(arguments: list[str]) -> int:
    """Run the program; return its exit status."""
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return EXIT_USAGE
    convert(Path(arguments[0]), Path(arguments[1]))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
