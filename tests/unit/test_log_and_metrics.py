"""Log lines carry the request id; metrics come from one table, under foreign names too where asked."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from common.config import LogOptions
from common.log import bind_request_id, setup_logging
from common.messages import NodeLoad
from common.metrics import NODE_METRICS, ROUTER_METRICS, Metrics


@pytest.fixture
def restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def logged(log_format: str) -> list[str]:
    stream = io.StringIO()
    setup_logging(LogOptions(log_format=log_format), process="router", stream=stream)
    logger = logging.getLogger("a.b")

    async def request(name: str) -> None:
        with bind_request_id(name):
            await asyncio.sleep(0)
            logger.info("served %d", 3, extra={"node": "d1"})

    async def main() -> None:
        await asyncio.gather(request("r1"), request("r2"))
        logger.warning("outside")
        logger.debug("too fine")

    asyncio.run(main())
    return stream.getvalue().splitlines()


@pytest.mark.usefixtures("restore_logging")
def test_text_lines() -> None:
    lines = logged("text")
    assert [line.split(" ", 1)[1] for line in lines] == [
        "INFO router a.b [r1] served 3 node=d1",
        "INFO router a.b [r2] served 3 node=d1",
        "WARNING router a.b outside",
    ]


@pytest.mark.usefixtures("restore_logging")
def test_json_lines() -> None:
    first, _, last = map(json.loads, logged("json"))
    assert (first["request_id"], first["message"], first["node"]) == ("r1", "served 3", "d1")
    assert (last["level"], last["process"], last["logger"]) == ("warning", "router", "a.b")
    assert "request_id" not in last


def test_a_nodes_load_becomes_gauges_and_counters() -> None:
    metrics = Metrics(NODE_METRICS, model_name="m", compat=True)
    metrics.observe_load(
        NodeLoad(num_running=2, free_blocks=30, total_blocks=40, num_drafts=5, accepted_per_pos=(4, 1))
    )
    metrics.observe_load(
        NodeLoad(
            num_running=1, free_blocks=40, total_blocks=40, num_drafts=7, accepted_per_pos=(5, 1, 1),
            num_transfers=3, num_transfer_failures=1,
        )
    )  # fmt: skip
    value = metrics.registry.get_sample_value
    assert value("baton_num_requests_running") == 1
    assert value("baton_kv_cache_usage_perc") == 0
    assert value("baton_spec_decode_num_drafts_total") == 7
    per_position = "spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(f"baton_{per_position}", {"position": str(i)}) for i in range(3)] == [5, 1, 1]
    assert value("baton_kv_transfers_total", {"outcome": "completed"}) == 2
    labels = {"model_name": "m", "engine": "0"}
    assert value("vllm:num_requests_running", labels) == 1
    assert value(f"vllm:{per_position}", labels | {"position": "0"}) == 5


def test_foreign_names_only_where_asked_and_every_name_once() -> None:
    assert b"vllm:" not in Metrics(NODE_METRICS, model_name="m").render()
    metrics = Metrics(ROUTER_METRICS, model_name="m", compat=True)
    metrics.histogram("time_to_first_token_seconds").observe(0.2)
    text = metrics.render().decode()
    assert 'vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 1.0' in text
    names = [spec.name for spec in (*NODE_METRICS, *ROUTER_METRICS)]
    assert len(names) == len(set(names))
    with pytest.raises(KeyError):
        metrics.gauge("no_such_metric")
