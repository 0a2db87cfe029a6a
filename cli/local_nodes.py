"""Several engines over one set of weights, and nodes around them, for commands that compare engines."""

import dataclasses

from cli.local_config import ClusterConfig
from common.config import EngineOptions, NodeOptions
from common.engine.build import BuiltEngine, assemble, build_engine
from decode_node.config import DecodeConfig, DecodeOptions
from decode_node.node import DecodeNode
from prefill_node.config import PrefillConfig
from prefill_node.node import PrefillNode

LOCAL_DRAIN_TIMEOUT_S = 1.0


class EngineFactory:
    """Loads the model once (or is given one engine over it); ``make`` gives engines with caches of their
    own."""

    def __init__(self, config: ClusterConfig, built: BuiltEngine | None = None) -> None:
        self.config = config
        self._first: BuiltEngine | None = built or build_engine(config.model, config.engine)
        self._loaded = self._first

    def make(self, options: EngineOptions | None = None, *, speculation: bool = True) -> BuiltEngine:
        """An engine, of other ``options`` than the configuration's if given; without ``speculation`` it has
        no modules."""
        loaded, options = self._loaded, options or self.config.engine
        if speculation and self._first is not None and options == self.config.engine:
            first, self._first = self._first, None
            return first
        if not speculation:
            options = dataclasses.replace(options, num_speculative_tokens=0)
        return assemble(
            loaded.trunk,
            loaded.modules if speculation else None,
            loaded.tokenizer,
            loaded.files,
            loaded.fingerprint["trunk_digest"],
            self.config.model,
            options,
        )


def prefill_node(
    config: ClusterConfig, built: BuiltEngine, address: str, name: str, kind: type[PrefillNode] = PrefillNode
) -> PrefillNode:
    return kind(
        PrefillConfig(
            model=config.model,
            engine=config.engine,
            transfer=config.transfer,
            node=_node_options(name, address),
            log=config.log,
        ),
        built,
    )


def decode_node(
    config: ClusterConfig, built: BuiltEngine, address: str, name: str, *, aggregated: bool = False
) -> DecodeNode:
    return DecodeNode(
        DecodeConfig(
            decode=DecodeOptions(aggregated=aggregated),
            model=config.model,
            engine=config.engine,
            transfer=config.transfer,
            node=_node_options(name, address),
            log=config.log,
        ),
        built,
    )


def _node_options(name: str, address: str) -> NodeOptions:
    return NodeOptions(node_id=name, router=address, drain_timeout_s=LOCAL_DRAIN_TIMEOUT_S)
