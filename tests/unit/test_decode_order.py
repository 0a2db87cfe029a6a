"""What a decode node sends for a request comes in order: its acceptance before any token, however fast."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.local_config import ClusterConfig, DefaultModelOptions
from cli.local_nodes import decode_node
from common.config import EngineOptions
from common.engine.batch import RequestSummary, RequestUpdate, StepOutput
from common.engine.build import build_engine
from common.messages import Accepted, DecodeRequest, Finished, NodeMessage, TokenChunk
from common.request import FinishReason, Request, SamplingParams
from decode_node.admission import Applicant, Entered
from decode_node.node import DecodeNode, _Decode
from tests.hybrids import save_hybrid

SUMMARY = RequestSummary(3, 2, 0, 0, 0, 0, (), ())


@pytest.fixture
def node(tmp_path: Path) -> Iterator[DecodeNode]:
    save_hybrid(tmp_path, (None,))
    config = ClusterConfig(
        model=DefaultModelOptions(model=str(tmp_path), dtype="float32"),
        engine=EngineOptions(block_size=4, num_blocks=10),
    )
    made = decode_node(config, build_engine(config.model, config.engine), "tcp://127.0.0.1:1", "d")
    yield made
    made.runtime.publisher.close()


@pytest.mark.parametrize("ended", [False, True])
def test_tokens_of_a_step_that_was_faster_than_the_acceptance_wait_for_it(
    node: DecodeNode, ended: bool
) -> None:
    sent: list[NodeMessage] = []
    node.runtime.send = lambda router_id, message: sent.append(message)  # type: ignore[method-assign]
    message = DecodeRequest("r", [1, 2, 3], SamplingParams(max_tokens=2))
    request = Request("r", [1, 2, 3], message.sampling)
    node._decodes["r"] = _Decode("router", "r", 1)
    reason, summary = (FinishReason.LENGTH, SUMMARY) if ended else (None, None)
    node._on_step(StepOutput((RequestUpdate("r", (7,), finish_reason=reason, summary=summary),)), None)
    assert sent == []
    node._settled(Applicant("router", message, request, 0.0), Entered(0, {}))
    assert sent[:2] == [Accepted("r", 0), TokenChunk("r", (7,))]
    if ended:
        assert isinstance(sent[2], Finished)
        assert "r" not in node._decodes
        return
    node._on_step(StepOutput((RequestUpdate("r", (8,), 1),)), None)
    assert sent[2:] == [TokenChunk("r", (8,), offset=1)]
