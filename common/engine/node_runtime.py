"""What a prefill and a decode node have in common: engine thread, KV events, control channel, HTTP service.

    build the engine -> publish events -> listen -> register with the routers -> serve -> drain -> close

A node adds its own handling of messages and of step outputs; the engine's results reach it on the event
loop, in order.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

from common.config import EngineOptions, LogOptions, ModelOptions, NodeOptions
from common.control_client import ControlClient, Handler
from common.engine.batch import StepOutput
from common.engine.build import BuiltEngine, build_engine
from common.engine.engine import Engine
from common.engine.loop import EngineLoop
from common.errors import EngineStopped, IncompatiblePeer, NodeFailed
from common.kv_event_publisher import KVEventPublisher
from common.log import setup_logging
from common.messages import Heartbeat, NodeLoad, NodeMessage, Register, TransferAddress
from common.metrics import NODE_METRICS, Metrics
from common.service import Service
from common.version import __version__

logger = logging.getLogger(__name__)

T = TypeVar("T")
ENGINE_CALL_TIMEOUT_S = 60.0  # a call waits for the step in hand, never for more
IDLE_POLL_S = 0.02


class NodeRuntime:
    """``on_step`` runs on the event loop for every step with news; ``collect`` runs on the engine's thread
    right after the step and returns what ``on_step`` needs besides (block tables change later)."""

    def __init__(
        self,
        role: str,
        model: ModelOptions,
        engine: EngineOptions,
        node: NodeOptions,
        log: LogOptions,
        built: BuiltEngine | None = None,
    ) -> None:
        """``built``: an engine made elsewhere (several nodes in one process share the weights)."""
        self.role = role
        self.options = node
        self.node_id = node.node_id or f"{role}-{secrets.token_hex(3)}"
        if built is None:
            setup_logging(log, process=self.node_id)
        self.epoch = secrets.token_hex(8)
        self.draining = False
        self.built = built or build_engine(model, engine, progress=logger.info)
        self.served_name = model.served_model_name or self.built.files.name
        self.metrics = Metrics(NODE_METRICS, model_name=self.served_name)
        self.publisher = KVEventPublisher(
            f"tcp://{node.host}:{node.events_port}", f"tcp://{node.host}:{node.replay_port}", epoch=self.epoch
        )
        self.transfer_load: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0)
        self.control: ControlClient | None = None
        self._load = NodeLoad()
        self._failure: BaseException | None = None

    async def serve(
        self,
        handler: Handler,
        on_router_lost: Callable[[str], None],
        collect: Callable[[Engine, StepOutput], T],
        on_step: Callable[[StepOutput, T], None],
        is_idle: Callable[[], bool],
        transfer: TransferAddress | None = None,
    ) -> None:
        """Runs the node until a signal; raises what ended it otherwise."""
        event_loop = asyncio.get_running_loop()

        def after_step(output: StepOutput, events: object) -> None:
            self.publisher.publish(events)  # type: ignore[arg-type]
            extra = collect(self.built.engine, output)
            event_loop.call_soon_threadsafe(on_step, output, extra)

        def failed(error: BaseException) -> None:
            self._failure = error
            logger.error("the engine failed: %s", error, exc_info=error)
            event_loop.call_soon_threadsafe(self.service.stop)

        self.loop = EngineLoop(self.built.engine, after_step, failed)
        self.service = Service(
            name=self.node_id,
            host=self.options.host,
            port=self.options.port,
            metrics=self.metrics,
            not_ready=self._not_ready,
            drain_timeout_s=self.options.drain_timeout_s,
        )
        await self.service.start()
        self.publisher.start()
        self.loop.start()
        self.control = ControlClient(
            self.options.router,
            register=self._register(transfer),
            heartbeat=self._heartbeat,
            handler=handler,
            on_router_lost=on_router_lost,
        )
        self.control.start()
        refusal = asyncio.create_task(self._stop_when_refused(self.control))
        try:
            await self.service.run_until_stopped(lambda: self._drain(is_idle))
        finally:
            refusal.cancel()
            await self.control.close()
            await asyncio.to_thread(self.loop.stop)
            await asyncio.to_thread(self.publisher.close)
        if isinstance(self._failure, IncompatiblePeer):
            raise self._failure
        if self._failure is not None:
            raise NodeFailed(f"{self.node_id} stopped: {self._failure}") from self._failure

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Runs ``function(engine)`` on the engine's thread between two steps."""
        async with asyncio.timeout(ENGINE_CALL_TIMEOUT_S):
            return await asyncio.wrap_future(self.loop.call(function))

    async def tell(self, function: Callable[[Engine], None]) -> None:
        """`call` for what must happen: neither a long step nor the end of whoever waits withdraws it.

        The loop answers every call, at the latest when it stops; what it held ended with it then.
        """
        with contextlib.suppress(EngineStopped):
            await asyncio.shield(asyncio.wrap_future(self.loop.call(function)))

    def send(self, router_id: str, message: NodeMessage) -> None:
        if self.control is not None:
            self.control.send(router_id, message)

    def drain(self) -> None:
        """Take no new work; the process goes on until it is stopped."""
        self.draining = True

    async def _drain(self, is_idle: Callable[[], bool]) -> None:
        self.drain()
        while not is_idle() and self._failure is None:
            await asyncio.sleep(IDLE_POLL_S)

    async def _stop_when_refused(self, control: ControlClient) -> None:
        reason = await control.wait_refused()
        self._failure = IncompatiblePeer(f"the router refused this node: {reason}")
        self.service.stop()

    def _not_ready(self) -> list[str]:
        registered = self.control is not None and self.control.router_ids
        return [] if registered else ["not registered with a router"]

    def _heartbeat(self) -> Heartbeat:
        # For the next one: the engine's state is its thread's own.
        self.loop.call(self._measure).add_done_callback(_log_unless_stopped)
        self.metrics.observe_load(self._load)
        return Heartbeat(self.node_id, self.epoch, self.publisher.last_seq, self._load, self.draining)

    def _measure(self, engine: Engine) -> None:
        scheduler, spec = engine.scheduler, engine.stats
        num_transfers, num_failures, num_bytes = self.transfer_load()
        total = min(pool.num_blocks - 1 for pool in scheduler.kv.pools)
        states = scheduler.requests.count_by_state()
        self._load = NodeLoad(
            num_running=states.get("running", 0) + states.get("ready", 0),
            num_waiting=states.get("waiting", 0),
            num_receiving=states.get("receiving_kv", 0),
            num_held=states.get("held", 0),
            waiting_tokens=scheduler.requests.num_tokens_to_compute,
            free_blocks=int(scheduler.kv.free_share() * total),
            total_blocks=total,
            prefix_cache_queries=scheduler.kv.stats.queries,
            prefix_cache_hits=scheduler.kv.stats.hits,
            num_drafts=spec.num_drafts,
            num_draft_tokens=spec.num_draft_tokens,
            num_accepted=spec.num_accepted,
            accepted_per_pos=tuple(spec.accepted_per_pos),
            verified_per_pos=tuple(spec.verified_per_pos),
            kv_bytes_received=num_bytes,
            num_transfers=num_transfers,
            num_transfer_failures=num_failures,
        )

    def _register(self, transfer: TransferAddress | None) -> Register:
        built, hasher = self.built, self.built.engine.scheduler.kv.hasher
        return Register(
            node_id=self.node_id,
            epoch=self.epoch,
            role=self.role,
            version=__version__,
            model=self.served_name,
            fingerprint=built.fingerprint,
            block_size=hasher.block_size,
            num_lookahead=hasher.num_lookahead,
            hash_algorithm=hasher.algorithm,
            hash_seed=hasher.seed,
            num_modules=built.num_modules,
            vocab_size=built.trunk.config.vocab_size,
            max_model_len=built.max_model_len,
            total_blocks=min(pool.num_blocks - 1 for pool in built.engine.scheduler.kv.pools),
            events_endpoint=self.publisher.endpoint,
            replay_endpoint=self.publisher.replay_endpoint,
            http_url=self.service.url,
            tokenizer_digest=built.tokenizer.digest,
            transfer=transfer,
        )


def _log_unless_stopped(measured: "Future[None]") -> None:
    error = measured.exception()
    if error is not None and not isinstance(error, EngineStopped):
        logger.error("the engine's figures cannot be had; heartbeats repeat old ones", exc_info=error)


def fire_and_log(task_name: str, work: Awaitable[None], tasks: set[asyncio.Task[None]]) -> asyncio.Task[None]:
    """Starts ``work`` as a task that is kept until it ends; an error in it is logged, not lost."""

    async def run() -> None:
        try:
            await work
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("%s failed", task_name)

    task = asyncio.create_task(run(), name=task_name)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task
