"""Hand-overs of a schedule: what the two nodes do, with the blocks copied from pool to pool instead of sent.

D reserves, P computes up to the cut; after each of P's steps the blocks that became final are copied to their
places in D's pool; with the last ones comes the carry row. As on the nodes, both engines work meanwhile.
"""

from collections import Counter
from dataclasses import dataclass

from cli.schedules.draw import HandOver
from cli.schedules.engine import ScheduleEngine
from common.engine.batch import RequestUpdate, StepOutput
from common.engine.first_token import first_token_of
from common.errors import CapacityError
from common.kv_cache.offered_blocks import final_blocks
from common.request import FinishReason, Request
from router.policy import cut_of


@dataclass
class _Transfer:
    """``offered``: positions whose blocks were copied. P knows the request by the same id."""

    request_id: str
    cut: int
    plan: HandOver
    offered: int = 0


class Transfers:
    """All hand-overs from ``prefill`` to ``decode``."""

    def __init__(
        self, prefill: ScheduleEngine, decode: ScheduleEngine, num_modules: int, counts: Counter[str]
    ) -> None:
        self.prefill = prefill
        self._decode = decode
        self._num_modules = num_modules
        self._counts = counts
        self._transfers: dict[str, _Transfer] = {}  # by request id
        self._sizes = [group.block_size for group in prefill.storage.layout.groups]

    def begin(self, request: Request, plan: HandOver) -> bool:
        """Reserves on D and starts P. False: no remote prefill, or D has no room; nothing happened."""
        cut = request.num_tokens if plan.carry else cut_of(request.num_tokens, self._num_modules)
        if cut is None:
            return False
        try:
            self._decode.engine.reserve(request, cut)
        except CapacityError:
            self._counts["reservations refused"] += 1
            return False
        remote = Request(
            request.request_id,
            list(request.token_ids),
            request.sampling,
            stop_at=cut,
            hold_blocks=True,
            priority=request.priority,
            arrival_time_s=request.arrival_time_s,
        )
        self.prefill.engine.add(remote)
        self._transfers[remote.request_id] = _Transfer(request.request_id, cut, plan)
        return True

    def stepped(self, output: StepOutput) -> None:
        """After a step of P: what became final goes over."""
        for update in output.updates:
            transfer = self._transfers.get(update.request_id)
            if transfer is not None:
                self._move(transfer, update)

    def abort(self, request_id: str) -> None:
        """D's request ends: so does the prefill for it, whether it computes or is held."""
        if self._transfers.pop(request_id, None) is not None:
            self.prefill.engine.abort(request_id)

    def _move(self, transfer: _Transfer, update: RequestUpdate) -> None:
        is_last = update.finish_reason is not None
        if is_last and update.finish_reason is not FinishReason.CUT:
            self._answered(transfer)
            return
        end = update.num_computed if is_last else update.final_upto
        broken_at = transfer.plan.broken_at
        if broken_at is not None and end >= broken_at:
            self._counts["broken transfers"] += 1
            self._decode.engine.kv_failed(transfer.request_id, transfer.offered)
            self.abort(transfer.request_id)
            return
        tables = self.prefill.engine.tables(update.request_id)
        offered = final_blocks(tables, self._sizes, transfer.offered, end, partial=is_last)
        wanted = self._decode.engine.wanted(transfer.request_id, transfer.cut)
        source, destination = self.prefill.storage, self._decode.storage
        for g, places in wanted.items():
            for i, block in places.items():
                if i in offered[g]:
                    destination.block_bytes(g)[block] = source.block_bytes(g)[offered[g][i]]
        transfer.offered = end
        if is_last:
            self._arrive(transfer, update)

    def _arrive(self, transfer: _Transfer, update: RequestUpdate) -> None:
        first = first_token_of(update)
        carry = self.prefill.engine.runner.carry_rows(update.request_id, None if first else 1)
        if carry is not None and transfer.plan.row_lost:
            self._counts["hand-overs, row lost"] += 1
            carry = None
        self._counts["hand-overs by carry" if first else "hand-overs by back-off"] += 1
        del self._transfers[update.request_id]
        self.prefill.engine.release(update.request_id)
        self._decode.engine.kv_arrived(transfer.request_id, transfer.cut, carry, first)

    def _answered(self, transfer: _Transfer) -> None:
        """The answer ended with token L, on P: nothing is left for D."""
        self._counts["answers ended on P"] += 1
        self.abort(transfer.request_id)
        self._decode.engine.abort(transfer.request_id)
