"""`baton up --handoff carry` as a client sees it: the same answers, and an account that counts once."""

from collections.abc import Iterator

import pytest

from tests.live import BLOCK_SIZE, LONG, Live, check_usage, num_tokens, of_baton, serving


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving(tmp_path_factory.mktemp("carry"), "--handoff=carry") as started:
        yield started


def test_handed_over_and_computed_on_d_alone_say_the_same(live: Live) -> None:
    """The second time nearly everything is cached on D, so it computes the rest itself."""
    length = num_tokens(live, prompt=LONG)
    for fields in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 5, "presence_penalty": 0.5}):
        extra = {"cache_salt": str(fields)}
        handed_over = live.stream(LONG, max_tokens=24, logprobs=2, extra=extra, **fields)
        assert of_baton(handed_over.usage)["transferred_tokens"] == length
        again = live.stream(LONG, max_tokens=24, logprobs=2, extra=extra, **fields)
        assert of_baton(again.usage)["transferred_tokens"] == 0
        assert handed_over.same_as(again)
        assert len(handed_over.tokens) == len(handed_over.offsets) == 24
        check_usage(handed_over.usage, length, 24)
        assert of_baton(handed_over.usage)["num_drafts"] > 0
    assert live.wait_idle()["decode-0"]["num_transfer_failures"] == 0


def test_one_token_comes_from_p_alone(live: Live) -> None:
    length = num_tokens(live, prompt=LONG)
    expected = live.stream(LONG, max_tokens=2, logprobs=1, extra={"cache_salt": "two"})
    told = live.stream(LONG, max_tokens=1, logprobs=1, extra={"cache_salt": "one"})
    assert told.finish_reason == "length"
    assert told.tokens == expected.tokens[:1]
    check_usage(told.usage, length, 1)
    assert of_baton(told.usage)["transferred_tokens"] == 0
    assert live.wait_idle()["decode-0"]["num_transfer_failures"] == 0


def test_several_sequences_use_the_back_off(live: Live) -> None:
    length = num_tokens(live, prompt=LONG)
    answer = live.complete(LONG, n=2, temperature=0.9, seed=1, max_tokens=8, extra={"cache_salt": "n"})
    assert len(answer.choices) == 2
    check_usage(answer.usage, length, 16)
    assert length - BLOCK_SIZE < of_baton(answer.usage)["transferred_tokens"] < length
