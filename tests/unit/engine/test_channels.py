"""Answers in the Harmony format: reasoning and text, token by token and all at once, with broken forms, too."""

from __future__ import annotations

import re

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hetero_gateway.engine.text.detokenizer import IncrementalDetokenizer
from hetero_gateway.engine.text.tokenizer import TextTokenizer

pytestmark = pytest.mark.unit

MARKS = ("start", "channel", "message", "end", "return", "call", "constrain")
PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
ANALYSIS = "<|channel|>analysis<|message|>The user greets. 你好<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Hello! 🙂<|return|>"
CALL = '<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": 1}<|call|>'


def harmony_tokenizer(*, marks: tuple[str, ...] = MARKS) -> Tokenizer:
    """A token a byte, and the marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<|{mark}|>", special=True) for mark in marks])
    return tokenizer


TOKENIZER = TextTokenizer(harmony_tokenizer(), byte_level=True, chat_template=None)


def detokenizer(prompt: str = PROMPT, *stop: str) -> IncrementalDetokenizer:
    return TOKENIZER.detokenizer(stop, TOKENIZER.encode(prompt))


def split(answer: str, *, prompt: str = PROMPT, at_once: bool = False) -> tuple[str, str]:
    """Reasoning and text."""
    ids = TOKENIZER.encode(answer)
    made = detokenizer(prompt)
    text = made.push(ids) if at_once else "".join(made.push([each]) for each in ids)
    text += made.finish()
    return made.take_reasoning(), text


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (ANALYSIS + FINAL, ("The user greets. 你好", "Hello! 🙂")),
        ("<|channel|>final<|message|>Hello!<|return|>", ("", "Hello!")),
        (ANALYSIS + CALL, ("The user greets. 你好", CALL.removesuffix("<|call|>"))),
        (
            ' to=functions.look<|channel|>commentary json<|message|>{"at": 1}<|call|>',
            ("", '<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{"at": 1}'),
        ),
        (
            ANALYSIS + "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>" + FINAL,
            ("The user greets. 你好", "I look.Hello! 🙂"),
        ),
        (
            ANALYSIS + "<|start|>assistant<|channel|>analysis<|message|> Twice.<|end|>" + FINAL,
            ("The user greets. 你好 Twice.", "Hello! 🙂"),
        ),
        ("<|message|>no channel<|end|>", ("", "no channel")),
        ("an answer without any form", ("", "an answer without any form")),
        (ANALYSIS.removesuffix("<|end|>"), ("The user greets. 你好", "")),
        ("<|channel|>ana", ("", "")),
        (ANALYSIS + "<|start|>assis", ("The user greets. 你好", "")),
        ("", ("", "")),
    ],
)
def test_bodies_of_the_analysis_are_reasoning_and_others_text(
    answer: str, expected: tuple[str, str], at_once: bool
) -> None:
    assert split(answer, at_once=at_once) == expected


def test_a_header_that_the_prompt_has_begun_goes_on() -> None:
    assert split("sis<|message|>Hm<|end|>", prompt=f"{PROMPT}<|channel|>analy") == ("Hm", "")


@pytest.mark.parametrize("prompt", ["Hi", f"{PROMPT}<|channel|>final<|message|>", "<|start|>user<|message|>Hi<|end|>"])
def test_other_prompts_leave_the_answer_as_it_is(prompt: str) -> None:
    expected = re.sub(r"<\|\w+\|>", "", ANALYSIS + FINAL)
    assert split(ANALYSIS + FINAL, prompt=prompt) == ("", expected)


def test_stop_strings_are_looked_for_in_the_text_only() -> None:
    made = detokenizer(PROMPT, "final", "greets", "lo!")
    text = "".join(made.push([each]) for each in TOKENIZER.encode(ANALYSIS + FINAL))
    assert made.matched_stop == "lo!"
    assert text + made.finish() == "Hel"
    assert made.take_reasoning() == "The user greets. 你好"


def test_reasoning_is_told_once() -> None:
    made = detokenizer()
    made.push(TOKENIZER.encode("<|channel|>analysis<|message|>One"))
    assert made.take_reasoning() == "One"
    made.push(TOKENIZER.encode(", two"))
    assert made.take_reasoning() == ", two"
    assert made.take_reasoning() == ""


def test_a_vocabulary_that_lacks_a_mark_has_no_channels() -> None:
    other = TextTokenizer(harmony_tokenizer(marks=MARKS[:2]), byte_level=True, chat_template=None)
    made = other.detokenizer((), other.encode("<|start|>assistant"))
    assert made.push(other.encode("<|channel|>analysis")) == "analysis"
    assert made.take_reasoning() == ""


@pytest.mark.parametrize("at_once", [False, True])
def test_special_tokens_that_are_shown_are_part_of_the_text(at_once: bool) -> None:
    ids = TOKENIZER.encode("a<|call|>你<|end|>b")
    (shown,) = TOKENIZER.encode("<|call|>")
    made = TOKENIZER.detokenizer(("b",), (), {shown})
    text = made.push(ids) if at_once else "".join(made.push([each]) for each in ids)
    assert text + made.finish() == "a<|call|>你"
    assert made.matched_stop == "b"
    assert TOKENIZER.special_id("<|call|>") == shown
    assert TOKENIZER.special_id("a") is None
