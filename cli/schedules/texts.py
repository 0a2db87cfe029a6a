"""What schedules are made of: token texts, and how the trunk alone goes on from them (remembered)."""

import random
from collections.abc import Sequence

from cli.schedules.bare_engine import make_engine
from common.engine.engine import Engine
from common.model.transformer import Transformer
from common.request import Request, SamplingParams

LONGEST = 256


class Texts:
    """Of one trunk. The continuations are those of an engine without speculation; they only say which drafts
    are right, nothing is compared with them."""

    def __init__(self, trunk: Transformer) -> None:
        self._trunk = trunk
        self._vocab_size = trunk.config.vocab_size
        self._known: dict[tuple[int, ...], list[int]] = {}
        self._engine: Engine | None = None

    def beginning(self, number: int, length: int) -> list[int]:
        """The first tokens of random text ``number``."""
        rng = random.Random(number)
        return [rng.randrange(self._vocab_size) for _ in range(length)]

    def after(self, prompt: Sequence[int], count: int) -> list[int]:
        """The trunk's greedy continuation."""
        key = tuple(prompt)
        known = self._known.get(key, [])
        if len(known) < count:
            known = self._known[key] = self._run(key, count)
        return known[:count]

    def _run(self, prompt: tuple[int, ...], count: int) -> list[int]:
        if self._engine is None:
            self._engine, _ = make_engine(self._trunk, block_size=16, num_blocks=65, max_model_len=LONGEST)
        request = Request(
            f"t{len(self._known)}", list(prompt), SamplingParams(max_tokens=count, temperature=0.0)
        )
        self._engine.add(request)
        while self._engine.has_work:
            self._engine.step()
        return request.token_ids[len(prompt) :]
