"""Tokenizers made on the spot: byte-level BPE as in Llama 3 and Qwen, and byte fallback as in Llama 2."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "the quick brown fox jumps over the lazy dog, then stops",
    "你好，世界。你好，朋友。中文和 emoji 🙂🙃🚀",
    "naïve café, größer",
] * 8


def byte_level_tokenizer() -> Tokenizer:
    """Some of its merges join the end of one Chinese character with the beginning of the next."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("né w", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """SentencePiece-like: words with a leading mark for the space, and a token for each byte."""
    words = ["▁the", "▁dog", "▁", "s", "t", "o", "p", "▁stop", "你"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path) -> Path:
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
