"""Tokenizer folders, chat templates and what they refuse, streams of text."""

import json
from pathlib import Path

import pytest

from common.errors import InvalidRequest, ModelLoadError
from common.tokenizer import Tokenizer
from tests.builders_tokenizer import byte_level_tokenizer, piece_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
BYTES_ONLY = 259  # 256 bytes and 3 special tokens: no merges, a token is a byte
HELLO = [{"role": "user", "content": "hello"}]


def with_template(template: str) -> Tokenizer:
    return Tokenizer(byte_level_tokenizer(), chat_template=template, named_tokens={"eos_token": "<|end|>"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": {"content": "<|end|>"}, "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 0]}))
    return tmp_path


def test_folder_gives_template_special_tokens_and_ends(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_ids == (7, 0)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.token_id("<|end|>") == 0
    assert tokenizer.encode("hello")[-1] < tokenizer.vocab_size
    text = tokenizer.apply_chat_template(HELLO)
    assert text == "<|user|>\nhello\n<|assistant|>\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids[0] == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == "\nhello\n\n"


def test_digest_follows_the_vocabulary_and_the_template(folder: Path) -> None:
    first = Tokenizer.from_folder(folder).digest
    assert Tokenizer.from_folder(folder).digest == first
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    second = Tokenizer.from_folder(folder)
    assert second.apply_chat_template(HELLO) == "hello"  # the file wins over tokenizer_config.json
    byte_level_tokenizer(300).save(str(folder / "tokenizer.json"))
    assert len({first, second.digest, Tokenizer.from_folder(folder).digest}) == 3


def test_missing_and_broken_tokenizers_are_told(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_folder(folder)


def test_template_helpers_that_published_templates_use() -> None:
    tokenizer = with_template(
        "{%- for m in messages -%}{%- if loop.index > 1 -%}{%- break -%}{%- endif -%}"
        "{{ m | tojson }}{{ eos_token }}{% generation %}{{ strftime_now('%Y') | length }}{% endgeneration %}"
        "{%- endfor -%}{{ tools }}"
    )
    content = [{"role": "user", "content": "<é>"}, {"role": "user", "content": "second"}]
    assert tokenizer.apply_chat_template(content, tools="T") == '{"role": "user", "content": "<é>"}<|end|>4T'


def test_generation_prompt_can_be_left_out() -> None:
    assert (
        with_template(TEMPLATE).apply_chat_template(HELLO, add_generation_prompt=False) == "<|user|>\nhello\n"
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5]['content'] }}", "refuses these messages"),
        ("{{ 'x' + 5 }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),  # the sandbox: nothing may be changed
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
    ],
)
def test_template_refusals_are_the_clients_error(template: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        with_template(template).apply_chat_template(HELLO)
    assert caught.value.http_status == 400


def test_model_without_template_says_what_to_use() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer())
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match=r"no chat template; use /v1/completions"):
        tokenizer.apply_chat_template(HELLO)


def test_template_that_does_not_compile_is_the_models_error() -> None:
    with pytest.raises(ModelLoadError, match="cannot be compiled"):
        with_template("{% for %}").apply_chat_template(HELLO)


def test_stream_never_cuts_a_character() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(BYTES_ONLY))
    stream = tokenizer.detokenizer()
    ids = tokenizer.encode("a😀é")
    assert [stream.push([i]) for i in ids] == ["a", "", "", "", "😀", "", "é"]
    assert stream.flush() == ""


def test_unfinished_character_at_the_end_comes_out_as_replacement() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(BYTES_ONLY))
    stream = tokenizer.detokenizer()
    assert stream.push(tokenizer.encode("a😀")[:-1]) == "a"
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"
    assert stream.push(tokenizer.encode("b")) == "b"  # usable again


def test_special_tokens_are_skipped_or_spelled() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer())
    ids = tokenizer.encode("a<|end|>b")
    assert tokenizer.detokenizer().push(ids) == "ab"
    assert tokenizer.detokenizer(skip_special_tokens=False).push(ids) == "a<|end|>b"


def test_token_bytes_and_ids_outside_the_vocabulary() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(BYTES_ONLY))
    assert b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode("né")) == "né".encode()
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.detokenizer().push([10**6, -1]) == ""


def test_pieces_with_byte_fallback_stream_too() -> None:
    tokenizer = Tokenizer(piece_tokenizer())
    ids = tokenizer.encode("the an é then")
    stream = tokenizer.detokenizer()
    pieces = [stream.push([i]) for i in ids]
    assert pieces[0] == "the"
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids) == "the an é then"
