"""Lanes over UCX: two-sided tagged rendezvous through the low-level objects of the ``ucxx`` binding.

Two threads belong to the transport: UCX's progress thread (sleeps in epoll, so an idle node costs nothing)
and a notifier that hands completions to the event loop. Endpoints are made from worker addresses that the
control connection exchanged, so there is no UCX listener and no second port. Only this file touches the
binding.

What was measured, and is relied on: cancelling whoever awaits a receive does not stop the bytes, neither does
the endpoint's asynchronous ``close()`` (and it can crash on a dead endpoint); ``close_blocking()`` with error
handling on *is* a fence once every request reports completed, with a dead or a stopped peer too.
Remote memory access is left out of the context: over TCP its emulation checks neither keys nor bounds.
"""

import asyncio
import contextlib
import importlib
import logging
import threading
from typing import Any

import numpy as np

from kv_transfer import ucx_environment
from kv_transfer.transport import Lane, Request, TransportError, TransportUnavailable

logger = logging.getLogger(__name__)

_EPOLL_TIMEOUT_MS = 200  # safety net should a wake-up get lost; 5 wake-ups a second when idle
_NOTIFIER_PERIOD_NS = 1_000_000_000
_POLL_S = 0.005
_CLOSE_PERIOD_NS = 1_000_000_000


class UcxRequest(Request):
    """Keeps the binding's request, and the array it points at, alive until it is terminal: dropping the last
    reference would cancel it, and nobody would know when."""

    def __init__(self, raw: Any, array: Any) -> None:
        super().__init__()
        self.raw: Any = raw
        self._array: Any = array
        raw.future.add_done_callback(self._on_future)

    def _on_future(self, future: "asyncio.Future[None]") -> None:
        error = None if future.cancelled() else future.exception()
        if future.cancelled():
            error = TransportError("the UCX request was cancelled")
        self.settle(error)

    def settle(self, error: BaseException | None) -> None:
        self._array = None
        self.complete(None if error is None else TransportError(f"UCX: {error}"))


class UcxLane:
    """One endpoint. Requests live in ``_pending`` until terminal."""

    transport = "ucx"

    def __init__(self, owner: "UcxTransport", endpoint: Any) -> None:
        self._owner = owner
        self._endpoint = endpoint
        self._closing = False
        self._pending: set[UcxRequest] = set()

    @property
    def closed(self) -> bool:
        return self._closing

    def post_send(self, tag: int, view: memoryview) -> Request:
        return self._post(self._endpoint.tag_send, tag, view)

    def post_recv(self, tag: int, view: memoryview) -> Request:
        return self._post(self._endpoint.tag_recv, tag, view)

    def _post(self, call: Any, tag: int, view: memoryview) -> Request:
        if self._closing or not self._endpoint.alive:
            failed = Request()
            failed.complete(TransportError("UCX lane is closed"))
            return failed
        binding = self._owner.binding
        # asarray makes no copy; an empty message still needs an address, which numpy gives
        array = binding.Array(np.frombuffer(view, np.uint8) if len(view) else np.empty(0, np.uint8))
        try:
            request = UcxRequest(call(array, binding.Tag(tag)), array)
        except binding.errors as error:
            failed = Request()
            failed.complete(TransportError(f"UCX refused a request: {error}"))
            return failed
        self._pending.add(request)
        request.add_done_callback(lambda r: self._pending.discard(request))
        return request

    async def fence(self, timeout_s: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        if not self._closing:
            self._closing = True
            # blocks until the progress thread has closed the endpoint: never on the event loop
            await loop.run_in_executor(None, self._close_endpoint)
        while self._pending:
            # ask the requests themselves: the future of one that UCX failed may come later
            for request in [r for r in self._pending if r.raw.completed]:
                request.settle(TransportError("closed by force"))
            if not self._pending:
                break
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    def _close_endpoint(self) -> None:
        with contextlib.suppress(*self._owner.binding.errors):
            self._endpoint.close_blocking(period=_CLOSE_PERIOD_NS, max_attempts=3)


class _Binding:
    """The few names used of the binding; importing it loads the UCX library."""

    def __init__(self) -> None:
        ucx_environment.apply()
        importlib.import_module("ucxx")
        api = importlib.import_module("ucxx._lib.libucxx")
        self.api: Any = api
        self.Array: Any = importlib.import_module("ucxx._lib.arr").Array
        self.Tag: Any = api.UCXXTag
        self.WaitState: Any = api.PythonRequestNotifierWaitState
        self.errors: tuple[type[BaseException], ...] = (api.UCXError, RuntimeError, MemoryError)


class UcxTransport:
    """A UCX context and worker of its own, with their two threads."""

    name = "ucx"
    binding: _Binding

    def __init__(self) -> None:
        self._worker: Any = None
        self._lanes: list[UcxLane] = []
        self._stop = threading.Event()
        self._notifier: threading.Thread | None = None

    async def start(self, host: str | None) -> None:
        loop = asyncio.get_running_loop()
        try:
            self.binding = await loop.run_in_executor(None, _Binding)
            api = self.binding.api
            features = (api.Feature.TAG, api.Feature.AM, api.Feature.WAKEUP)
            context = api.UCXContext({}, features)
            worker = api.UCXWorker(context, enable_delayed_submission=True, enable_python_future=True)
            worker.init_blocking_progress_mode()
            worker.start_progress_thread(polling_mode=False, epoll_timeout=_EPOLL_TIMEOUT_MS)
        except ImportError as error:
            raise TransportUnavailable(
                f"the UCX binding cannot be imported ({error}); install the [ucx] extra"
            ) from error
        except Exception as error:  # the library is there but does not run on this host
            raise TransportUnavailable(f"UCX does not start on this host: {error}") from error
        self._worker = worker
        self._address: bytes = worker.address.tobytes()
        self._notifier = threading.Thread(target=self._notify, args=(loop,), name="ucx-notifier", daemon=True)
        self._notifier.start()

    @property
    def address(self) -> bytes:
        return self._address

    async def connect(self, host: str, address: bytes, token: bytes) -> Lane:
        return self._make_lane(address)

    async def accept(self, address: bytes, token: bytes, timeout_s: float) -> Lane:
        return self._make_lane(address)

    def _make_lane(self, address: bytes) -> UcxLane:
        api = self.binding.api
        try:
            peer = api.UCXAddress.create_from_buffer(address)
            endpoint = self._worker.create_endpoint_from_worker_address(peer, True)
        except self.binding.errors as error:
            raise TransportError(f"UCX cannot reach the peer: {error}") from error
        lane = UcxLane(self, endpoint)
        self._lanes = [one for one in self._lanes if not one.closed]
        self._lanes.append(lane)
        return lane

    async def close(self) -> None:
        if self._worker is None:
            return
        await asyncio.gather(*(lane.fence(5.0) for lane in self._lanes))
        self._lanes.clear()
        loop = asyncio.get_running_loop()
        self._stop.set()
        self._worker.stop_request_notifier_thread()
        notifier = self._notifier
        assert notifier is not None
        while notifier.is_alive():  # it may need this loop to go on, so the loop must not block in join()
            await asyncio.sleep(_POLL_S)
        await loop.run_in_executor(None, self._worker.stop_progress_thread)
        self._worker = None

    def _notify(self, loop: asyncio.AbstractEventLoop) -> None:
        """Thread: waits for completed requests and lets the loop set their futures."""
        worker, states = self._worker, self.binding.WaitState
        asyncio.set_event_loop(loop)  # the binding makes its futures on the thread's loop
        delivered = threading.Event()

        def deliver() -> None:
            worker.run_request_notifier()
            delivered.set()

        try:
            while not self._stop.is_set():
                worker.populate_python_futures_pool()
                state = worker.wait_request_notifier(period_ns=_NOTIFIER_PERIOD_NS)
                if state == states.Shutdown:
                    break
                if state == states.Timeout:
                    continue
                delivered.clear()
                loop.call_soon_threadsafe(deliver)
                # one delivery at a time; it is bounded so that a busy loop cannot hold up the shutdown
                delivered.wait(0.1)
        except RuntimeError:  # the loop was closed without close() of ours
            logger.debug("UCX notifier ends with its loop")
        finally:
            worker.clear_python_futures_pool()
