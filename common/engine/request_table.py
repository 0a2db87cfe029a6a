"""Every request of a scheduler, by id and by state: the one place where a request changes its state."""

import bisect
from collections import Counter
from collections.abc import Iterator, Mapping

from common.request import Request, RequestState


class RequestTable(Mapping[str, Request]):
    """Requests by id, oldest first; each is also in the queue of its state, in the order in which it came.

    Waiting ones are ordered by priority and arrival. A finished request leaves the table.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, Request] = {}
        self._queues: dict[RequestState, list[Request]] = {
            state: [] for state in RequestState if state is not RequestState.FINISHED
        }

    def __getitem__(self, request_id: str) -> Request:
        return self._by_id[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def move(self, request: Request, state: RequestState) -> None:
        """Puts a request, known or new, last in the queue of ``state``; FINISHED takes it out for good."""
        if request.request_id in self._by_id:
            self._queues[request.state].remove(request)
        else:
            self._by_id[request.request_id] = request
        request.state = state
        if state is RequestState.FINISHED:
            del self._by_id[request.request_id]
        elif state is RequestState.WAITING:
            bisect.insort(self.waiting, request, key=lambda r: (r.priority, r.arrival_time_s))
        else:
            self._queues[state].append(request)

    @property
    def waiting(self) -> list[Request]:
        return self._queues[RequestState.WAITING]

    @property
    def ready(self) -> list[Request]:
        """Hand-overs that arrived."""
        return self._queues[RequestState.READY]

    @property
    def running(self) -> list[Request]:
        return self._queues[RequestState.RUNNING]

    @property
    def num_seated(self) -> int:
        return len(self.running) + len(self.ready)

    @property
    def num_receiving(self) -> int:
        return len(self._queues[RequestState.RECEIVING_KV])

    @property
    def num_with_blocks(self) -> int:
        """Requests that own blocks: all that do not wait."""
        return len(self) - len(self.waiting)

    @property
    def num_tokens_to_compute(self) -> int:
        """Of everything admitted or queued, decodes counting one."""
        return sum(max(0, r.end - r.num_computed) for r in self.values())

    def count_by_state(self) -> Counter[str]:
        return Counter(request.state.value for request in self.values())

    def check_invariants(self) -> None:
        """Each request is once in the queue of its state and in no other; one that waits owns no blocks."""
        for state, queue in self._queues.items():
            assert all(r.state is state for r in queue), f"{state} queue holds {queue}"
        queued = [r.request_id for queue in self._queues.values() for r in queue]
        assert sorted(queued) == sorted(self._by_id), "a request is in no queue, or twice"
        for request in self.waiting:
            assert not any(request.tables), f"{request!r} waits and owns blocks"
