"""The router's process: HTTP on one side, the control channel and KV events on the other.

`serve` puts the parts together and runs until it is told to stop. Generation is plain ASGI: a body is read
and decoded once, answers are written as they are made, and a client that leaves ends its request on every
node at once. Other routes are ordinary FastAPI ones.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from common.errors import BatonError, InvalidRequest, UnknownModel
from common.log import setup_logging
from common.messages import Register
from common.metrics import ROUTER_METRICS, Metrics
from common.model.registry import resolve_model
from common.service import Service
from common.tokenizer import Tokenizer
from common.version import __version__
from router.chat_messages import checked_messages
from router.config import RouterConfig
from router.event_follower import EventFollower
from router.generation import Door, GenerationEndpoint, read_body
from router.node_hub import NodeHub
from router.openai_responses import error_body, to_json
from router.openai_types import (
    DetokenizeBody,
    TokenizeBody,
    check_token_ids,
    parse_body,
    parse_chat,
    parse_completion,
)
from router.prefix_index import PrefixIndex
from router.prepare import Services, encode
from router.registry import Node, ServedModel, refusal

logger = logging.getLogger(__name__)

DRAIN_POLL_S = 0.02


class Router:
    """Everything of one router process. ``start`` listens, ``run_until_stopped`` serves, ``close`` ends."""

    def __init__(self, config: RouterConfig, tokenizer: Tokenizer, served: ServedModel) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.served = served
        self.created = int(time.time())
        self.metrics = Metrics(ROUTER_METRICS, model_name=served.name, compat=config.listen.metrics_compat)
        self.index = PrefixIndex()
        self.follower = EventFollower(self.index, self.metrics)
        self.hub = NodeHub(
            router_id=secrets.token_hex(8),
            heartbeat_timeout_s=config.timeouts.heartbeat_timeout_s,
            refusal=self._refusal,
            metrics=self.metrics,
            on_join=self._joined,
            on_leave=self._left,
            on_heartbeat=self.follower.heartbeat,
        )
        self.door = Door(
            services=Services(config, tokenizer, self.hub, self.index, self.metrics),
            served_name=served.name,
        )
        self.service = Service(
            name="router",
            host=config.listen.host,
            port=config.listen.port,
            metrics=self.metrics,
            not_ready=self.not_ready,
            drain_timeout_s=config.listen.drain_timeout_s,
            app=make_app(self),
        )
        self.control_port = 0

    async def start(self) -> None:
        """Raises ConfigError when a port is taken."""
        self.control_port = self.hub.start(self.config.listen.host, self.config.listen.control_port)
        await self.service.start()
        logger.info(
            "serving %s; nodes register at tcp://%s:%d",
            self.served.name, self.config.listen.host, self.control_port,
        )  # fmt: skip

    async def run_until_stopped(self) -> None:
        await self.service.run_until_stopped(self._drained)

    async def close(self) -> None:
        await self.service.close()
        await self.hub.close()
        await self.follower.close()

    def not_ready(self) -> list[str]:
        usable = [n for n in self.hub.nodes.values() if n.decodes and not n.draining]
        return [] if usable else ["no decode node is connected"]

    async def _drained(self) -> None:
        self.door.draining = True
        try:
            while self.door.num_in_flight:
                await asyncio.sleep(DRAIN_POLL_S)
        finally:  # cancelled at the deadline: the clients that still wait are told
            self.door.end_all()

    def _refusal(self, register: Register) -> str | None:
        return refusal(register, self.served, self.hub.nodes.values())

    def _joined(self, node: Node) -> None:
        self.follower.join(node)
        self._count_nodes()

    def _left(self, node: Node) -> None:
        self.follower.leave(node)
        self._count_nodes()

    def _count_nodes(self) -> None:
        roles = [node.register.role for node in self.hub.nodes.values()]
        for role in ("prefill", "decode", "both"):
            self.metrics.gauge("router_nodes").labels(role).set(roles.count(role))

    def cluster(self) -> dict[str, Any]:
        """The body of /v1/cluster."""
        now = asyncio.get_running_loop().time()
        nodes: list[dict[str, Any]] = [
            {
                "node_id": node.node_id,
                "role": node.register.role,
                "epoch": node.register.epoch,
                "version": node.register.version,
                "http_url": node.register.http_url,
                "max_model_len": node.register.max_model_len,
                "num_modules": node.register.num_modules,
                "transports": list(node.register.transfer.transports) if node.register.transfer else [],
                "draining": node.draining,
                "heard_s_ago": round(now - node.last_heard_s, 3),
                "requests_of_this_router": len(node.legs),
                "load": msgspec.structs.asdict(node.load),
                "events": self.follower.state(node.node_id),
            }
            for node in sorted(self.hub.nodes.values(), key=lambda n: n.node_id)
        ]
        degraded = [
            f"KV events of node {node['node_id']} are not followed"
            for node in nodes
            if not node["events"]["trusted"]
        ]
        return {
            "router_id": self.hub.router_id,
            "version": __version__,
            "model": self.served.name,
            "requests_in_flight": self.door.num_in_flight,
            "index_blocks": self.index.num_entries,
            "not_ready": self.service.not_ready_reasons(),
            "degraded": degraded,
            "nodes": nodes,
        }

    def model_card(self) -> dict[str, Any]:
        lengths = [n.register.max_model_len for n in self.hub.nodes.values() if n.decodes]
        card: dict[str, Any] = {
            "id": self.served.name,
            "object": "model",
            "created": self.created,
            "owned_by": "baton",
        }
        return card | {"max_model_len": max(lengths)} if lengths else card

    def check_model(self, name: str) -> None:
        if name != self.served.name:
            raise UnknownModel(f"model {name!r} is not served here; this router serves {self.served.name!r}")


def make_app(router: Router) -> FastAPI:
    """All routes but /health, /ready and /metrics, which every process's service has."""
    app = FastAPI(title="Baton", version=__version__, openapi_url=None)
    chat = GenerationEndpoint(router.door, parse_chat, "chat")
    completions = GenerationEndpoint(router.door, parse_completion, "completions")
    app.router.routes += [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
    ]

    def route(path: str, method: str) -> Callable[[Any], Any]:
        return lambda handler: app.add_route(path, handler, methods=[method])

    @route("/v1/models", "GET")
    async def models(request: Request) -> Response:
        return json_response({"object": "list", "data": [router.model_card()]})

    @route("/v1/models/{name:path}", "GET")
    async def model(request: Request) -> Response:
        router.check_model(request.path_params["name"])
        return json_response(router.model_card())

    @route("/v1/cluster", "GET")
    async def cluster(request: Request) -> Response:
        return json_response(router.cluster())

    @route("/tokenize", "POST")
    async def tokenize(request: Request) -> Response:
        body = parse_body(TokenizeBody, await _body(router, request))
        if body.model is not None:
            router.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        if body.messages is not None:
            text = router.tokenizer.apply_chat_template(checked_messages(body.messages))
            tokens = await encode(router.tokenizer, text, add_special_tokens=False)
        else:
            tokens = await encode(router.tokenizer, body.prompt or "")
        return json_response(
            {
                "count": len(tokens),
                "tokens": tokens,
                "max_model_len": router.model_card().get("max_model_len"),
            }
        )

    @route("/detokenize", "POST")
    async def detokenize(request: Request) -> Response:
        body = parse_body(DetokenizeBody, await _body(router, request))
        if body.model is not None:
            router.check_model(body.model)
        check_token_ids(body.tokens, router.tokenizer.vocab_size, "tokens")
        return json_response({"prompt": router.tokenizer.decode(body.tokens, skip_special_tokens=False)})

    @app.exception_handler(BatonError)
    async def baton_error(request: Request, error: BatonError) -> Response:
        return json_response(error_body(error), error.http_status)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        wrong = InvalidRequest(f"{request.method} {request.url.path}: {error.detail}")
        return json_response(error_body(wrong), error.status_code)

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        logger.error("internal error at %s", request.url.path, exc_info=error)
        return json_response(error_body(BatonError("internal error; the router's log has it")), 500)

    return app


async def _body(router: Router, request: Request) -> bytes:
    return await read_body(request.scope, request.receive, router.config.limits.max_body_bytes)


def json_response(body: Any, status: int = 200) -> Response:
    return Response(to_json(body), status, media_type="application/json")


def load_router(config: RouterConfig) -> Router:
    """Resolves the model's files and reads its tokenizer. Raises ModelLoadError."""
    files = resolve_model(config.model.model, modules=config.model.modules or None)
    tokenizer = Tokenizer.from_folder(files.folder)
    served = ServedModel(
        name=config.model.served_model_name or files.name,
        aliases=(files.name, config.model.model),
        tokenizer_digest=tokenizer.digest,
    )
    return Router(config, tokenizer, served)


async def serve(config: RouterConfig) -> None:
    """Runs a router until SIGTERM or SIGINT. Raises ConfigError or ModelLoadError if it cannot start."""
    setup_logging(config.log, process="router")
    router = await asyncio.to_thread(load_router, config)
    try:
        await router.start()
        await router.run_until_stopped()
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await router.close()
