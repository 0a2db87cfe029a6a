"""The workload and the table of `benchmarks.prefix_cache`, and a small run of it on a real model."""

from functools import cache

import pytest

from benchmarks.conversations import PER_TOPIC, SYSTEM, conversations, prompt_of
from benchmarks.prefix_cache import (
    DROPPED,
    KEPT,
    LOOKAHEAD,
    OFF,
    Plan,
    make_arms,
    measure,
    parted,
    result_of,
    table,
    written,
)
from cli.local_config import ClusterConfig
from common.config import build
from common.errors import BatonError, ConfigError
from common.tokenizer import Tokenizer
from tests.builders import REPOSITORY
from tests.builders_tokenizer import byte_level_tokenizer

BLOCK_SIZE = 16


@cache
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(REPOSITORY / "common/model/shipped/baton-tiny")


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_conversations_depend_on_the_seed_alone_and_share_what_they_say() -> None:
    talks = conversations(3, 4, seed=1)
    assert talks == conversations(3, 4, seed=1) != conversations(3, 4, seed=2)
    assert [talk.topic for talk in talks] == [t for t in range(3) for _ in range(PER_TOPIC)]
    assert all(len(talk.user_turns) == 4 for talk in talks)
    for topic in range(3):
        first, second, third = (talk.user_turns for talk in talks if talk.topic == topic)
        assert first[0] == second[0] != third[0]
        assert first[1] != second[1]
        assert first[0].split("\n\n")[0] == third[0].split("\n\n")[0]


def test_conversations_part_at_many_places_within_a_block() -> None:
    tokenizer = tiny_tokenizer()
    talks = conversations(12, 1, seed=0)
    prompts = [prompt_of(tokenizer, talk, []) for talk in talks]
    places = {shared(prompts[i], prompts[i + 2]) % BLOCK_SIZE for i in range(0, len(talks), PER_TOPIC)}
    assert len(places) > 6
    assert places & set(range(4))  # within N tokens of a block's end: where draft KV can be another's


def test_a_turn_goes_on_from_the_turn_before() -> None:
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    chat = Tokenizer(byte_level_tokenizer(), chat_template=template)
    (talk, *_) = conversations(1, 3, seed=0)
    before, after = prompt_of(chat, talk, ["Yes."]), prompt_of(chat, talk, ["Yes.", "No."])
    assert after[: len(before)] == before
    said = chat.decode(after, skip_special_tokens=False)
    first, second, third = talk.user_turns
    assert said == (
        f"<|system|>{SYSTEM}<|end|><|user|>{first}<|end|><|assistant|>Yes.<|end|><|user|>{second}<|end|>"
        f"<|assistant|>No.<|end|><|user|>{third}<|end|><|assistant|>"
    )
    text = Tokenizer(byte_level_tokenizer())
    assert text.decode(prompt_of(text, talk, ["Yes."])) == f"{SYSTEM}\n\n{first}\n\nYes.\n\n{second}\n\n"


def test_a_small_run() -> None:
    config = build(ClusterConfig, {"model": "baton-tiny", "dtype": "float32", "kv_cache_mib": 64}, environ={})
    plan = Plan(num_topics=1, num_turns=1, output_len=6, seed=0)
    arms = make_arms(config)
    near_ties = measure(arms, plan)
    result = result_of(config, plan, arms, near_ties)
    hits = [result["arms"][name]["cached_tokens"] for name in (OFF, DROPPED, LOOKAHEAD, KEPT)]
    # The second of three prompts is the first again, the third shares less: each hit loses one block.
    assert hits[0] == 0
    assert hits[2] - hits[1] == 2 * BLOCK_SIZE
    assert hits[3] >= hits[2] > 0
    assert result["requests"] == 3
    assert {arm["prompt_tokens"] for arm in result["arms"].values()} == {result["arms"][OFF]["prompt_tokens"]}
    assert result["arms"][OFF]["draft_kv_max_diff"] < 1e-4
    assert result["arms"][LOOKAHEAD]["draft_kv_max_diff"] < 1e-4
    assert result["accepts_as_without_cache"][LOOKAHEAD]
    rows = table(result).splitlines()
    assert [row.split(" | ")[0] for row in rows[2:6]] == [f"| {n}" for n in (OFF, DROPPED, LOOKAHEAD, KEPT)]
    # An answer that differs where the logits are apart ends the run.
    prompt = [5, 6, 7]
    assert not parted(arms[0].built, prompt, (1, 2), (1, 2), LOOKAHEAD)
    with pytest.raises(
        BatonError, match=r"lookahead hashes: another answer .* output token 1 of a prompt of 3"
    ):
        parted(arms[0].built, prompt, (1, 2), (1, 3), LOOKAHEAD)


def test_the_table_replaces_what_was_between_its_models_markers() -> None:
    document = (
        "a\n<!-- prefix-cache x: begin -->\nold\n<!-- prefix-cache x: end -->\nb\n"
        "<!-- prefix-cache y: begin -->\nkept\n<!-- prefix-cache y: end -->\n"
    )
    new = written(document, "x", "new")
    assert new == document.replace("old", "\nnew\n")
    assert written(new, "x", "new") == new
    with pytest.raises(ConfigError, match="prefix-cache z: begin"):
        written(document, "z", "new")
