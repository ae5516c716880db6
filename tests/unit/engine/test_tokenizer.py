"""Text, chats and broken model directories."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Encoding, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from hetero_api.errors import ModelError
from hetero_gateway.engine.errors import InvalidRequest
from hetero_gateway.engine.text.byte_level import byte_level_alphabet
from hetero_gateway.engine.text.chat_template import ChatTemplate
from hetero_gateway.engine.text.tokenizer import TextTokenizer
from hetero_gateway.engine.text.windows import ids_by_windows
from tests.unit.engine.tiny_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer, save

pytestmark = pytest.mark.unit

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n    {% if message['role'] == 'tool' %}"
    "{{ raise_exception('no tools') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}{% endfor %}\n"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHAT = [{"role": "user", "content": "the 你好 & <dog>"}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(byte_level_tokenizer(), tmp_path)


def write_config(directory: Path, **fields: object) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(fields), encoding="utf-8")


def rendered(directory: Path, chat: list[dict[str, str]] = CHAT) -> str:
    """What the template made of the chat, special tokens included."""
    ids = TextTokenizer.from_directory(directory).encode_chat(chat)
    return str(byte_level_tokenizer().decode(ids, skip_special_tokens=False))


def test_text_gets_the_special_tokens_of_the_tokenizer(model: Path) -> None:
    tokenizer = TextTokenizer.from_directory(model)
    ids = tokenizer.encode("the 你好 🙂")
    assert ids[0] == 0
    assert tokenizer.decode(ids) == "the 你好 🙂"
    assert tokenizer.vocab_size == byte_level_tokenizer().get_vocab_size()


def test_chat_opens_the_assistants_turn_and_has_one_bos(model: Path) -> None:
    write_config(model, chat_template=TEMPLATE, bos_token={"content": "<s>"}, eos_token="</s>")
    assert rendered(model) == "<s>[user]the 你好 & <dog>[assistant]"
    assert TextTokenizer.from_directory(model).encode_chat(CHAT).count(0) == 1


def test_template_file_goes_before_tokenizer_config(model: Path) -> None:
    write_config(model, chat_template="wrong", bos_token="<s>")
    (model / "chat_template.jinja").write_text("{{ bos_token }}right", encoding="utf-8")
    assert rendered(model) == "<s>right"


def test_a_processors_template_serves_where_the_tokenizer_has_none(model: Path) -> None:
    (model / "chat_template.json").write_text('{"chat_template": "of a processor"}', encoding="utf-8")
    write_config(model, chat_template="right")
    assert rendered(model) == "right"
    write_config(model)
    assert rendered(model) == "of a processor"


def test_default_of_several_named_templates_is_used(model: Path) -> None:
    templates = [{"name": "tool_use", "template": "wrong"}, {"name": "default", "template": "right"}]
    write_config(model, chat_template=templates)
    assert rendered(model) == "right"


@pytest.mark.parametrize("is_file", [False, True])
def test_a_template_for_tools_is_used_where_there_are_tools(model: Path, *, is_file: bool) -> None:
    """Each is rendered as it would be alone, blanks and line ends included."""
    default = "\n  {% if true %}\n[{{ messages[0].role }}]\n  {% endif %}\n\n"
    tool_use = "  {%- macro of(tool) %}<{{ tool.name }}>{% endmacro %}\n\n {{ of(tools[0]) }}\n  "
    if is_file:
        (model / "chat_template.jinja").write_text(default)
        (model / "additional_chat_templates").mkdir()
        (model / "additional_chat_templates/tool_use.jinja").write_text(tool_use)
    else:
        named = {"tool_use": tool_use, "default": default}
        write_config(model, chat_template=[{"name": name, "template": text} for name, text in named.items()])
    tokenizer = TextTokenizer.from_directory(model)
    for text, tools in ((default, None), (default, []), (tool_use, [{"name": "weather"}])):
        alone = ChatTemplate(text, special_tokens={}, source="alone").render(CHAT, tools=tools)
        assert tokenizer.decode(tokenizer.encode_chat(CHAT, tools=tools)) == alone
    assert tool_use[:-2] in tokenizer.chat_template, "formats of answers are found in both"


IM_END = {
    "content": "<|im_end|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
    "special": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("vocabulary", "added", "config"),
    [
        ("<|im_end|>", None, {"eos_token": "<|im_end|>"}),
        ("<|im_end|>", None, {"added_tokens_decoder": {"256": IM_END}}),
        ("<|im_end|>", None, {"added_tokens_decoder": {"256": IM_END | {"special": False}}}),
        ("<|im_end|>", False, {"added_tokens_decoder": {"256": IM_END}}),
        ("<|im_end|>", False, {"eos_token": "<|im_end|>"}),
        ("<|im_end|>", False, {"additional_special_tokens": ["<|im_end|>"]}),
        ("other", None, {"added_tokens_decoder": {"257": IM_END}, "eos_token": "<|im_end|>"}),
        ("other", None, {}),
    ],
)
def test_tokens_that_tokenizer_config_alone_lists_are_those_of_transformers(
    tmp_path: Path, vocabulary: str, added: bool | None, config: dict[str, Any]
) -> None:
    """`vocabulary`: its last token. `added`: whether tokenizer.json adds it as special; None: it adds none."""
    tokenizer = Tokenizer(
        models.BPE(vocab={each: i for i, each in enumerate([*byte_level_alphabet(), vocabulary])}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if added is not None:
        tokenizer.add_tokens([AddedToken("<|im_end|>", special=added, normalized=False)])
    save(tokenizer, tmp_path)
    write_config(tmp_path, tokenizer_class="PreTrainedTokenizerFast", **config)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    reference, found = AutoTokenizer.from_pretrained(str(tmp_path)), TextTokenizer.from_directory(tmp_path)
    ids = reference("a<|im_end|>").input_ids
    assert found.encode("a<|im_end|>") == ids
    assert found.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_named_tokens_without_an_id_stay_text(model: Path) -> None:
    """An id behind the vocabulary would be none of the model's."""
    write_config(model, pad_token="[PAD]", added_tokens_decoder={"5000": IM_END})
    plain = TextTokenizer.from_directory(model)
    assert max(plain.encode("[PAD]<|im_end|>")) < plain.vocab_size == byte_level_tokenizer().get_vocab_size()


def test_special_tokens_map_fills_what_tokenizer_config_lacks(model: Path) -> None:
    write_config(model, chat_template="{{ bos_token }}{{ eos_token }}", eos_token="</s>")
    (model / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "wrong"}', encoding="utf-8")
    assert rendered(model) == "<s></s>"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "2"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% if tools %}wrong{% else %}right{% endif %}", "right"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
    ],
)
def test_templates_find_what_transformers_gives_them(model: Path, template: str, text: str) -> None:
    write_config(model, chat_template=template)
    assert rendered(model) == text


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns._a = 1 %}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ 1 | dictsort }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_template_that_refuses_or_tries_to_break_out_is_an_invalid_request(model: Path, template: str) -> None:
    write_config(model, chat_template=template)
    with pytest.raises(InvalidRequest, match=r"chat\.messages: the model's chat template refuses them"):
        TextTokenizer.from_directory(model).encode_chat(CHAT)


def test_model_without_chat_template_says_so(model: Path) -> None:
    tokenizer = TextTokenizer.from_directory(model)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.encode_chat(CHAT)


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=40)
    loaded = TextTokenizer.from_directory(save(tokenizer, tmp_path))
    assert loaded.decode(loaded.encode("the quick brown fox")) == "the quick brown fox"


def test_decoder_of_the_file_chooses_how_text_is_made(tmp_path: Path) -> None:
    loaded = TextTokenizer.from_directory(save(byte_fallback_tokenizer(), tmp_path))
    detokenizer = loaded.detokenizer()
    ids = loaded.encode(" stop 🙂")
    text = "".join([*(detokenizer.push([token_id]) for token_id in ids), detokenizer.finish()])
    assert text == loaded.decode(ids) == "stop 🙂"


def test_the_bytes_of_tokens_are_those_of_the_text(tmp_path: Path) -> None:
    for make in (byte_level_tokenizer, byte_fallback_tokenizer):
        loaded = TextTokenizer.from_directory(save(make(), tmp_path))
        ids = [token_id for token_id in loaded.encode(" stop 🙂 你") if loaded.decode([token_id]) or token_id > 2]
        assert b"".join(map(loaded.token_bytes, ids)).decode().strip() == "stop 🙂 你"
        assert loaded.token_bytes(100_000) == b""
    special = byte_level_tokenizer()
    assert TextTokenizer(special, byte_level=True, chat_template=None).token_bytes(1) == b"</s>"


def test_a_template_is_shown_tools_and_what_messages_hold_besides(tmp_path: Path) -> None:
    save(byte_level_tokenizer(), tmp_path)
    template = (
        "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for call in m.tool_calls or [] %}={{ call.function.arguments | tojson }}{% endfor %}"
        "{% if m.tool_call_id %}@{{ m.tool_call_id }}{% endif %};{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    loaded = TextTokenizer.from_directory(tmp_path)
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    ids = loaded.encode_chat(messages, tools=[{"type": "function", "function": {"name": "f"}}])
    assert loaded.decode(ids) == '<f>assistant:={"a": 1};tool:2@c1;'
    assert loaded.decode(loaded.encode_chat(messages[1:])) == "tool:2@c1;"


def test_a_large_vocabulary_is_read_by_the_library_alone(tmp_path: Path) -> None:
    vocabulary = {f"token-{i}": i for i in range(50_000)}
    save(Tokenizer(models.BPE(vocab=vocabulary, merges=[])), tmp_path)
    tracemalloc.start()
    try:
        loaded = TextTokenizer.from_directory(tmp_path)
        _, peak_bytes = tracemalloc.get_traced_memory()  # Python's: the file's text and what is made of it would count
    finally:
        tracemalloc.stop()
    assert loaded.vocab_size == len(vocabulary)
    assert peak_bytes < (tmp_path / "tokenizer.json").stat().st_size / 2


def test_missing_tokenizer_names_the_file_and_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: no such file; .*fast tokenizer.*save_pretrained"):
        TextTokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("name", "contents", "problem"),
    [
        ("tokenizer.json", b'{"version": "1.0", "mo', r"tokenizer\.json: cannot be read as JSON, perhaps an"),
        ("tokenizer.json", b"{}", r"tokenizer\.json: is no tokenizer"),
        ("tokenizer.json", b"\xff\xfe", r"tokenizer\.json: cannot be read"),
        (
            "tokenizer_config.json",
            b'{"added_tokens_decoder": {"1": "\\ud800"}}',
            r"added_tokens_decoder and .* list tokens",
        ),
        ("tokenizer_config.json", b'{"eos_token": "\\ud800"}', r"added_tokens_decoder and .* list tokens"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"1": {}}}', r"added_tokens_decoder and .* list tokens"),
        ("tokenizer_config.json", b"[]", r"tokenizer_config\.json: must hold a JSON object"),
        ("tokenizer_config.json", b'{"chat_template": 1}', r"tokenizer_config\.json: chat_template must be text"),
        (
            "tokenizer_config.json",
            b'{"chat_template": [{"name": "default", "template": ""}, {"name": "tool_use", "template": 1}]}',
            r"tokenizer_config\.json: chat_template must be text or a list of named templates",
        ),
        ("chat_template.jinja", b"{% if %}", r"chat_template\.jinja: the chat template is no valid Jinja, line 1"),
    ],
)
def test_damaged_file_is_named(model: Path, name: str, contents: bytes, problem: str) -> None:
    (model / name).write_bytes(contents)
    with pytest.raises(ModelError, match=problem):
        TextTokenizer.from_directory(model)


def wordpiece_tokenizer() -> Tokenizer:
    """A word that it does not know is one token, however long."""
    return Tokenizer(models.WordLevel(vocab={"[UNK]": 0, "the": 1}, unk_token="[UNK]"))


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
@pytest.mark.parametrize("text", ["the quick 你好 🙂 ", "<think>the dog</think>", "x" * 9])
def test_a_long_text_has_the_tokens_of_the_librarys_encode(
    tmp_path: Path, make: Callable[[], Tokenizer], text: str
) -> None:
    tokenizer, library = TextTokenizer.from_directory(save(make(), tmp_path)), make()
    long = text * (10_000 // len(text))
    assert tokenizer.encode(long) == library.encode(long).ids
    assert tokenizer.decode(tokenizer.encode(long)) == library.decode(library.encode(long).ids)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TextTokenizer.from_directory(model)
    longest = max(len(token) for token in byte_level_tokenizer().get_vocab())
    monkeypatch.setattr(tokenizer, "_tokenizer", None)  # Nobody asks it.
    words = (
        f"has {9 * longest + 1} bytes; tokens of this model have at most {longest}, .* length of 10 allows 9 of them"
    )
    with pytest.raises(InvalidRequest, match=words):
        tokenizer.encode("x" * (9 * longest + 1), max_model_len=10)
    with pytest.raises(InvalidRequest, match=f"has {9 * longest + 2} bytes"):
        tokenizer.encode("é" * ((9 * longest) // 2 + 1), max_model_len=10)


def test_a_text_of_the_longest_tokens_is_not_refused(model: Path) -> None:
    vocabulary = byte_level_tokenizer().get_vocab()
    text = byte_level_tokenizer().decode([vocabulary[max(vocabulary, key=len)]]) * 7
    assert len(TextTokenizer.from_directory(model).encode(text, max_model_len=9)) <= 8
    with pytest.raises(InvalidRequest, match="has 8 tokens; with at least one to generate the model's length of 8"):
        TextTokenizer.from_directory(model).encode(text, max_model_len=8)


def test_an_unknown_word_may_be_longer_than_all_tokens(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.from_directory(save(wordpiece_tokenizer(), tmp_path))
    assert tokenizer.encode("x" * 100_000, max_model_len=2) == [0]


REAL = (
    "The quick brown fox — naïve café, größer; 你好，世界。  \n\n\tdef f(x): return x ** 2  # 12345 <think> <s>\n"
    "🙂🙃🚀 e\u0301"
)


def _long_text(seed: int) -> str:
    """Words, runs of one character, and characters by chance: some 300,000."""
    chance = random.Random(seed)
    parts: list[str] = []
    while sum(map(len, parts)) < 300_000:
        match chance.randrange(5):
            case 0:
                parts.append(REAL * chance.randrange(1, 40))
            case 1:
                parts.append(chance.choice(" \nax你🙂") * chance.randrange(1, 3000))
            case 2:
                parts.append("".join(chr(chance.randrange(32, 0x3000)) for _ in range(chance.randrange(2000))))
            case 3:
                parts.append(" ".join(chance.choices(REAL.split(), k=chance.randrange(2000))))
            case _:
                parts.append("".join(chance.choices("the dog 你好", k=chance.randrange(3000))))
    return "".join(parts)


def _metaspace_tokenizer() -> Tokenizer:
    """As Llama 2's is published: the first word gets a mark, too, and the text two special tokens."""
    tokenizer = byte_fallback_tokenizer()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = [("<s>", 1), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    return tokenizer


def _regex_tokenizer() -> Tokenizer:
    """As GPT-2's: words, numbers and white space are told apart, and offsets leave out the space before a word."""
    tokenizer = byte_level_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    "make", [byte_level_tokenizer, byte_fallback_tokenizer, _metaspace_tokenizer, _regex_tokenizer]
)
def test_a_long_text_has_the_tokens_of_the_library(tmp_path: Path, make: Callable[[], Tokenizer], seed: int) -> None:
    text, whole = _long_text(seed), make()
    expected = whole.encode_batch_fast([text])[0].ids
    assert TextTokenizer.from_directory(save(whole, tmp_path)).encode(text) == expected
    by_windows = ids_by_windows(lambda part: whole.encode_batch([part], add_special_tokens=False)[0], text, most=None)
    assert by_windows is not None


def test_a_long_text_of_the_demo_s_model(smollm2: Path) -> None:
    text = _long_text(4)
    whole = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    ids = ids_by_windows(lambda part: whole.encode_batch([part], add_special_tokens=False)[0], text, most=None)
    assert ids == whole.encode_batch_fast([text], add_special_tokens=False)[0].ids


def test_a_text_without_places_to_agree_about_is_encoded_whole(tmp_path: Path) -> None:
    """One unknown token of 300,000 characters."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    text = "a " + 300_000 * "b" + " a"
    assert ids_by_windows(tokenizer.encode, text, most=None) is None
    assert TextTokenizer.from_directory(save(tokenizer, tmp_path)).encode(text) == [1, 0, 1]


def test_a_text_with_too_many_tokens_is_not_encoded_to_its_end(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    tokenizer = TextTokenizer.from_directory(model)
    encode_part = tokenizer._encode_part

    def counted(part: str) -> Encoding:
        encoded.append(len(part))
        return encode_part(part)

    monkeypatch.setattr(tokenizer, "_encode_part", counted)
    text = "the dog " * 70_000
    with pytest.raises(InvalidRequest, match=r"prompt.*at least \d+ tokens"):
        tokenizer.encode(text, max_model_len=10_000)
    assert sum(encoded) < len(text) / 3


@pytest.mark.parametrize("most", [None, 10])
def test_half_a_surrogate_pair_is_no_text(model: Path, most: int | None) -> None:
    with pytest.raises(InvalidRequest, match="cannot encode"):
        TextTokenizer.from_directory(model).encode("look \ud83d", max_model_len=most)
