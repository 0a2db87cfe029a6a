"""One-line breaks of kv_transfer, each of which random histories must find.

`python -m tests.virtual.mutants NAME` runs histories on the broken code until one shows a problem.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

MAX_HISTORIES = 1000


@dataclass(frozen=True)
class Edit:
    module: str
    old: str  # stands once in the module
    new: str


@dataclass(frozen=True)
class Mutant:
    profile: str  # of the histories
    edits: tuple[Edit, ...]


# Timers of a loop come before the messages that wait for it, so the lease's own timer would hide the break.
_LATE_TIMER = Edit(
    "kv_transfer.sender",
    "        self._timers[offer.transfer_id] = self._loop.call_at(offer.deadline, ",
    "        self._timers[offer.transfer_id] = self._loop.call_at(offer.deadline + 6.0, ",
)


MUTANTS = {
    "free_without_fence": Mutant(
        "lanes",
        (
            Edit(
                "kv_transfer.fetching",
                "        if session is None:\n            return {}\n",
                "        return {}\n",
            ),
        ),
    ),
    "free_while_a_send_reads": Mutant(
        "everything",
        (
            Edit(
                "kv_transfer.sender",
                "        if serve is None or serve.num_reading == 0:\n",
                "        if True:\n",
            ),
        ),
    ),
    "no_lease_check_per_chunk": Mutant(
        "pauses",
        (
            _LATE_TIMER,
            Edit(
                "kv_transfer.serving",
                "        if self.generation == self.offer.generation and self._now() < "
                "self.offer.deadline:\n",
                "        if True:\n",
            ),
        ),
    ),
    "commit_without_root": Mutant(
        "lanes",
        (
            Edit(
                "kv_transfer.fetching",
                "        if root.finish(finish.carry, finish.extra) != finish.root:\n",
                "        if False:\n",
            ),
        ),
    ),
    "no_chunk_digest": Mutant(
        "lanes",
        (
            Edit(
                "kv_transfer.fetching",
                "        if digest and self._receiver.config.checksum and chunk_digest(view) != digest:\n",
                "        if False:\n",
            ),
        ),
    ),
    "commit_before_all_chunks": Mutant(
        "calm",
        (
            Edit(
                "kv_transfer.fetching",
                "        if finish is None or self.num_done < len(self.chunks) or self._outcome.done():\n",
                "        if finish is None or self._outcome.done():\n",
            ),
        ),
    ),
    "attempts_share_a_number": Mutant(
        "calm",
        (
            Edit(
                "kv_transfer.receiver",
                "        self._last_attempt += 1\n",
                "        self._last_attempt = 1\n",
            ),
        ),
    ),
    "attempt_ignored": Mutant(
        "cuts",
        (
            Edit(
                "kv_transfer.receiver_session",
                "                fetch_ = self.fetches.get((message.transfer_id, message.attempt))\n",
                "                fetch_ = next((f for k, f in self.fetches.items() if k[0] == "
                "message.transfer_id), None)\n",
            ),
        ),
    ),
    "chunk_taken_before_it_landed": Mutant(
        "calm",
        (
            Edit(
                "kv_transfer.fetching",
                "        if seq not in self._landed or seq not in self._digests",
                "        if seq not in self._digests",
            ),
        ),
    ),
    "progress_past_a_hole": Mutant(
        "calm",
        (
            Edit(
                "kv_transfer.fetching",
                "            if self._front[g] < len(chunks):\n",
                "            if g == group and self._front[g] < len(chunks):\n",
            ),
        ),
    ),
    "quarantine_ends_at_once": Mutant(
        "lanes",
        (
            Edit(
                "kv_transfer.fetching",
                "        for seq in [seq for seq in self._stuck if seq not in self._requests]:\n",
                "        for seq in list(self._stuck):\n",
            ),
        ),
    ),
    "quarantine_never_ends": Mutant(
        "lanes",
        (
            Edit(
                "kv_transfer.fetching",
                "        if self.machine.state is ReceiverState.QUARANTINED:\n            "
                "self._release_quiet()\n",
                "",
            ),
        ),
    ),
    "leases_never_end": Mutant(
        "calm",
        (
            Edit(
                "kv_transfer.sender",
                '            self.stop(offer, SenderEvent.EXPIRE, "lease_expired")\n',
                "            pass\n",
            ),
        ),
    ),
    "no_deadline_of_a_fetch": Mutant(
        "calm",
        (
            Edit(
                "kv_transfer.receiver",
                "                async with asyncio.timeout(self.config.fetch_timeout_s):\n",
                "                async with asyncio.timeout(None):\n",
            ),
        ),
    ),
    "block_of_another_position": Mutant(
        "calm",
        (
            Edit(
                "kv_transfer.serving",
                "        ids = {p: held.get(p, -1) for p in self.positions_of(chunk, pair)}\n",
                "        ids = {p: held.get(max(p - 1, 0), -1) for p in self.positions_of(chunk, pair)}\n",
            ),
        ),
    ),
}


class _Loader(importlib.abc.SourceLoader):
    def __init__(self, edits: Sequence[Edit], path: str) -> None:
        self._edits = edits
        self._path = path

    def get_filename(self, fullname: str) -> str:
        return self._path

    def get_data(self, path: str) -> bytes:
        if not path.endswith(".py"):
            raise OSError("no cached code of a mutant")
        text = Path(path).read_text()
        for edit in self._edits:
            if text.count(edit.old) != 1:
                raise LookupError(f"{path} does not hold, once: {edit.old}")
            text = text.replace(edit.old, edit.new)
        return text.encode()


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, edits: Sequence[Edit]) -> None:
        self._edits = edits

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        edits = [edit for edit in self._edits if edit.module == fullname]
        if not edits:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert found is not None
        assert found.origin is not None
        loader = _Loader(edits, found.origin)
        return importlib.util.spec_from_file_location(fullname, found.origin, loader=loader)


def main(name: str) -> int:
    mutant = MUTANTS[name]
    sys.meta_path.insert(0, _Finder(mutant.edits))
    from tests.virtual.history import run_history

    for seed in range(MAX_HISTORIES):
        history = run_history(seed, mutant.profile)
        if history.world.problems:
            print(f"{name} is found by history {seed}: {history.world.problems[0]}")
            return 0
    print(f"{name} survives {MAX_HISTORIES} histories")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
