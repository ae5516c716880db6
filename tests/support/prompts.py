"""Twenty real prompts for the equality tests: English, code, Chinese, emoji; from 5 to about 900 tokens."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Final


def _help_topic(name: str, characters: int) -> str:
    """The beginning of one of Python's own help topics: long, real English with code in it."""
    return topics[name][:characters]


PROMPTS: Final[tuple[str, ...]] = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "List three reasons why people keep bees:\n1.",
    "The three laws of thermodynamics are",
    "Q: What is 17 + 25?\nA:",
    "def fibonacci(n: int) -> int:\n    ",
    "import socket\n\ndef open_port(host, port):\n    with socket.socket() as s:\n",
    "SELECT name, COUNT(*) FROM orders GROUP BY name HAVING",
    '#include <stdio.h>\n\nint main(void) {\n    printf("',
    '{"name": "Alice", "age": 31, "languages": ["English", "French"], "address": {',
    "中国的首都是",
    "请用一句话介绍人工智能：人工智能是",
    "春眠不觉晓，处处闻啼鸟。夜来风雨声，",
    "I love pizza 🍕 and sushi 🍣! My favourite emoji are 😀😎🚀 because",
    "🎉🎉🎉 Happy birthday 👩‍👩‍👧‍👦 naïve café Ωmega — “quotes” …",
    "Numbers: 3.14159, 2.71828, 1.41421, 1.61803, and 0.57721 are",
    _help_topic("lambda", 500),
    _help_topic("with", 1400),
    _help_topic("class", 2200),
    _help_topic("assignment", 3900),
)
