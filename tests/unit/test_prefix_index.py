"""The prefix index: exact about content and lookahead, whole after any sequence of events."""

from hypothesis import given, settings
from hypothesis import strategies as st

from common.block_hash import BlockHasher, event_hash
from common.extra_keys import ExtraKeys
from router.prefix_index import PrefixIndex, block_key

HASHER = BlockHasher(block_size=4, num_lookahead=2)


def keys_of(token_ids: list[int], hasher: BlockHasher = HASHER, extra: ExtraKeys | None = None) -> list[int]:
    hashes: list[bytes] = []
    hasher.extend(hashes, token_ids, extra)
    return [event_hash(digest) for digest in hashes]


def index_of(**nodes: list[int]) -> PrefixIndex:
    index = PrefixIndex()
    for node_id, keys in nodes.items():
        index.add_node(node_id)
        index.set_trusted(node_id, True)
        index.store(node_id, keys)
    return index


PROMPT = list(range(30))
KEYS = keys_of(PROMPT)


def test_each_node_is_matched_to_its_own_depth() -> None:
    index = index_of(all=KEYS, half=KEYS[:3], none=[], late=KEYS[1:])
    assert index.matches(KEYS) == {"all": 7, "half": 3}
    assert index.matches(KEYS[:2]) == {"all": 2, "half": 2}
    assert index.matches([]) == {}


def test_equal_tokens_with_another_lookahead_are_another_block() -> None:
    index = index_of(a=KEYS)
    assert index.matches(keys_of([*PROMPT[:13], 99, *PROMPT[14:]])) == {
        "a": 2
    }  # 12, 13: lookahead of block 2
    assert index.matches(keys_of([*PROMPT[:14], 99, *PROMPT[15:]])) == {"a": 3}


def test_salt_seed_and_lookahead_length_do_not_match_across() -> None:
    index = index_of(a=KEYS)
    for other in (
        keys_of(PROMPT, extra=ExtraKeys(cache_salt="tenant")),
        keys_of(PROMPT, BlockHasher(4, 2, seed="other")),
        keys_of(PROMPT, BlockHasher(4, 0)),
    ):
        assert index.matches(other) == {}


def test_a_block_counts_while_any_group_or_medium_holds_it() -> None:
    index = index_of(a=[])
    index.store("a", KEYS[:1], group=0, medium="GPU")
    index.store("a", KEYS[:1], group=1, medium="GPU")
    index.store("a", KEYS[:1], group=1, medium="GPU")  # a duplicate changes nothing
    index.remove("a", KEYS[:1], group=1, medium="GPU")
    assert index.matches(KEYS) == {"a": 1}
    index.remove("a", KEYS[:1], group=0, medium="CPU")  # was never there
    index.remove("a", KEYS[:1], group=0, medium="GPU")
    assert index.matches(KEYS) == {}
    assert index.num_entries == 0


def test_an_unknown_hash_in_a_removal_does_not_stop_the_rest() -> None:
    index = index_of(a=KEYS)
    index.remove("a", [12345, *KEYS[2:]])
    assert index.matches(KEYS) == {"a": 2}


def test_untrusted_nodes_hold_nothing_and_come_back() -> None:
    index = index_of(a=KEYS, b=KEYS[:2])
    index.set_trusted("a", False)
    assert index.matches(KEYS) == {"b": 2}
    index.set_trusted("a", True)
    assert index.matches(KEYS) == {"a": 7, "b": 2}


def test_a_node_takes_its_entries_along_and_its_bit_is_used_again() -> None:
    index = index_of(a=KEYS, b=KEYS)
    index.remove_node("a")
    index.remove_node("a")
    assert index.matches(KEYS) == {"b": 7}
    index.add_node("c")
    index.set_trusted("c", True)
    assert index.matches(KEYS) == {"b": 7}  # nothing is inherited
    index.remove_node("b")
    assert index.num_entries == 0


def test_digests_and_integers_are_the_same_block() -> None:
    digest = bytes(range(32))
    assert block_key(digest) == event_hash(digest) == block_key(event_hash(digest))


operations = st.lists(
    st.tuples(
        st.sampled_from(["store", "remove", "clear", "leave"]),
        st.sampled_from("ab"),
        st.lists(st.integers(0, 5), max_size=4),
        st.sampled_from([None, 0, 1]),
    ),
    max_size=30,
)


@settings(max_examples=200)
@given(operations, st.lists(st.integers(0, 5), max_size=6, unique=True))
def test_any_events_leave_what_a_naive_model_holds(
    steps: list[tuple[str, str, list[int], int | None]], prompt: list[int]
) -> None:
    index = index_of(a=[], b=[])
    model: dict[str, set[tuple[int, int | None]]] = {"a": set(), "b": set()}
    for action, node, blocks, group in steps:
        match action:
            case "store":
                index.store(node, blocks, group)
                model[node] |= {(block, group) for block in blocks}
            case "remove":
                index.remove(node, blocks, group)
                model[node] -= {(block, group) for block in blocks}
            case "clear":
                index.clear(node)
                model[node] = set()
            case "leave":
                index.add_node(node)
                index.set_trusted(node, True)
                model[node] = set()
    held = {node: {block for block, _ in entries} for node, entries in model.items()}
    depths = {
        node: next((i for i, block in enumerate(prompt) if block not in held[node]), len(prompt))
        for node in "ab"
    }
    assert index.matches(prompt) == {node: depth for node, depth in depths.items() if depth}
    assert {node: index.num_blocks(node) for node in "ab"} == {node: len(held[node]) for node in "ab"}
    assert index.num_entries == len(held["a"] | held["b"])
