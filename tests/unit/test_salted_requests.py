"""A cache salt parts tenants: no hit across salts, and no event that tells one what another has cached."""

import pytest

from common.block_hash import BlockHasher, event_hash
from common.extra_keys import ExtraKeys, MultimodalItem, PromptEmbeddings, from_event_form
from common.kv_cache.manager import KVCacheManager
from common.kv_event_printer import format_event
from common.kv_events import BlockHash, BlockStored, KVEventBatch, decode_batch, encode_batch
from common.kv_snapshot import BlockMirror
from common.request import Request
from router.prefix_index import PrefixIndex
from tests.fakes import fake_request, make_kv

K, SIZE = 2, 4
PROMPT = [70_001 + i for i in range(26)]  # ids that nothing else in a message equals
FULL = 24  # 26 tokens less K of lookahead
SALT = "a tenant's secret"
SALTED = ExtraKeys(
    lora_name="adapter",
    cache_salt=SALT,
    multimodal=(MultimodalItem("digest of an image", 5, 3),),
    prompt_embeddings=PromptEmbeddings(b"e" * 40, row_bytes=4),
)


def manager(tell_salted_tokens: bool = False) -> KVCacheManager:
    return KVCacheManager(
        make_kv(K, block_size=SIZE).layout, [65], BlockHasher(SIZE, K), tell_salted_tokens=tell_salted_tokens
    )


def request(extra: ExtraKeys | None) -> Request:
    made = fake_request(PROMPT)
    made.extra_keys, made.lora_name = extra, extra.lora_name if extra else None
    return made


def cache(kv: KVCacheManager, extra: ExtraKeys | None) -> list[BlockStored]:
    """Computes the prompt; what is told of it, as a subscriber reads it."""
    writer = request(extra)
    assert kv.allocate(writer, len(PROMPT))
    writer.num_computed = len(PROMPT)
    kv.register_final(writer, FULL)
    kv.free(writer)
    payload = encode_batch(KVEventBatch(ts=1.0, events=kv.events.take()))
    return [event for event in decode_batch(payload).events if isinstance(event, BlockStored)]


def hashes_told(events: list[BlockStored]) -> list[BlockHash]:
    return [block_hash for event in events for block_hash in event.block_hashes]


TENANTS = (
    None,
    ExtraKeys(cache_salt="a"),
    ExtraKeys(cache_salt="b"),
    ExtraKeys(cache_salt="a", lora_name="a"),
    ExtraKeys(lora_name="a"),
    ExtraKeys(cache_salt="a", multimodal=(MultimodalItem("i", 1, 2),)),
    ExtraKeys(cache_salt="a", multimodal=(MultimodalItem("i", 2, 2),)),
    ExtraKeys(cache_salt="a", prompt_embeddings=PromptEmbeddings(b"x" * 8, 4)),
)


def test_no_hit_and_no_equal_hash_across_salts_and_other_keys() -> None:
    """Each has the whole prompt cached, with the others' there too, and nobody finds another's."""
    kv = manager()
    told: set[BlockHash] = set()
    for i, extra in enumerate(TENANTS):
        assert kv.match(request(extra)) == 0
        new = hashes_told(cache(kv, extra))
        assert len(new) == FULL // SIZE
        assert not told & set(new)
        told |= set(new)
        assert [kv.match(request(e)) for e in TENANTS[: i + 1]] == [FULL] * (i + 1)


def test_an_image_in_the_lookahead_alone_parts_a_block() -> None:
    """Block 0 holds tokens 0 to 3; its draft KV was computed from tokens 4 and 5 as well."""
    kv = manager()
    cache(kv, ExtraKeys(multimodal=(MultimodalItem("one", 5, 1),)))
    assert kv.match(request(ExtraKeys(multimodal=(MultimodalItem("one", 5, 1),)))) == FULL
    assert kv.match(request(ExtraKeys(multimodal=(MultimodalItem("two", 5, 1),)))) == 0
    assert kv.match(request(ExtraKeys(multimodal=(MultimodalItem("one", 6, 1),)))) == 0
    cache(kv, ExtraKeys(multimodal=(MultimodalItem("one", 6, 1),)))
    assert kv.match(request(ExtraKeys(multimodal=(MultimodalItem("two", 6, 1),)))) == 4  # block 0 sees to 5


def test_events_of_a_salted_request_tell_hashes_and_structure_only() -> None:
    kv = manager()
    writer = request(SALTED)
    kv.hash_known(writer)
    (event,) = cache(kv, SALTED)
    assert event.block_hashes == [event_hash(digest) for digest in writer.block_hashes]
    assert event.token_ids == [0] * FULL
    assert event.lookahead_token_ids is None
    assert (event.block_size, event.lora_name, event.parent_block_hash) == (SIZE, "adapter", None)
    assert event.extra_keys == [[""]] * (FULL // SIZE)
    payload = encode_batch(KVEventBatch(ts=1.0, events=[event]))
    secrets = [SALT.encode(), b"digest of an image", *(t.to_bytes(4, "big") for t in PROMPT)]
    assert not any(secret in payload for secret in secrets)
    mirror = BlockMirror()  # what a snapshot is made of
    mirror.apply(event)
    assert {tuple(block.token_ids) for block in mirror.blocks()} == {(0,) * SIZE}
    with pytest.raises(ValueError, match="withheld"):
        from_event_form(event.extra_keys[0])
    assert next(iter(format_event(event))).endswith(" after - [withheld: salted] on GPU")


def test_a_request_without_a_salt_is_told_in_full() -> None:
    (event,) = cache(manager(), ExtraKeys(lora_name="adapter"))
    assert event.token_ids == PROMPT[:FULL]
    assert event.extra_keys == [["adapter"]] * (FULL // SIZE)
    assert event.lookahead_token_ids is not None


def test_with_the_option_every_hash_can_be_made_from_its_event() -> None:
    kv = manager(tell_salted_tokens=True)
    (event,) = cache(kv, SALTED)
    assert event.extra_keys is not None
    assert event.lookahead_token_ids is not None
    assert event.extra_keys[0] is not None
    assert SALT in event.extra_keys[0]
    parent: bytes | None = None
    for i, told in enumerate(event.block_hashes):
        tokens = event.token_ids[i * SIZE : (i + 1) * SIZE]
        keys = from_event_form(event.extra_keys[i], event.lora_name)
        parent = kv.hasher.hash_block(parent, tokens, event.lookahead_token_ids[i], keys)
        assert told == event_hash(parent)


def test_the_routers_index_finds_salted_blocks_by_hashing_the_prompt_itself() -> None:
    index = PrefixIndex()
    index.add_node("d")
    index.set_trusted("d", True)
    salted = ExtraKeys(cache_salt=SALT)
    index.store("d", hashes_told(cache(manager(), salted)))
    for extra, found in ((salted, {"d": FULL // SIZE}), (None, {}), (ExtraKeys(cache_salt="other"), {})):
        hashes: list[bytes] = []
        BlockHasher(SIZE, K).extend(hashes, PROMPT, extra)
        assert index.matches([event_hash(digest) for digest in hashes]) == found
