"""`baton events` against a real publisher on this machine."""

import json

import pytest

from cli.main import main
from cli.ports import free_ports
from common.kv_event_publisher import KVEventPublisher
from common.kv_events import BlockRemoved, BlockStored

STORED = BlockStored(
    block_hashes=[b"\x01" * 32, b"\x02" * 32],
    parent_block_hash=None,
    token_ids=list(range(8)),
    block_size=4,
    lora_id=None,
    medium="CPU",
    lora_name=None,
    lookahead_token_ids=[[4, 5], [8, 9]],
)


@pytest.fixture
def endpoints() -> tuple[str, str]:
    events, replay = free_ports(2)
    return f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}"


@pytest.mark.parametrize("as_json", [False, True])
def test_late_follower_sees_all_batches(
    endpoints: tuple[str, str], as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    publisher = KVEventPublisher(*endpoints, epoch="e1")
    publisher.start()
    try:
        publisher.publish([STORED])
        publisher.publish([BlockRemoved(block_hashes=[b"\x02" * 32], medium="CPU")])
        words = ["events", "--endpoint", endpoints[0], "--replay", endpoints[1], "--count", "3"]
        assert main([*words, "--json"] if as_json else words) == 0
    finally:
        publisher.close()
    out = capsys.readouterr().out
    if as_json:
        updates = [json.loads(line) for line in out.splitlines()]
        events = [event for update in updates for event in update["batch"]["events"]]
        assert [event["type"] for event in events] == ["AllBlocksCleared", "BlockStored", "BlockRemoved"]
        assert events[1]["lookahead_token_ids"] == [[4, 5], [8, 9]]
        assert events[2]["block_hashes"] == events[1]["block_hashes"][1:]
    else:
        assert "all blocks cleared" in out
        assert "[0 1 2 3] + [4 5]" in out
        assert "removed 0202" in out
