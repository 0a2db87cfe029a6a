"""An engine for prompts with images on the fake runner, which has an encoder without a model.

The runner keeps what it was told to encode and to drop, and before every step checks that each token that
the step reads, lookahead included, and that lies in an image has that image's output.
"""

from collections.abc import Sequence
from dataclasses import replace

from common.engine.batch import RunnerOutput, ScheduledBatch, ScheduledRequest
from common.engine.engine import Engine
from common.engine.scheduler import Scheduler
from common.engine.stopping import StopChecker
from common.extra_keys import ExtraKeys, MultimodalItem
from common.request import Request
from tests.fakes import DraftRule, FakeRunner, fake_request, make_fake_engine, right


class EncodingRunner(FakeRunner):
    """``encoded``: what it holds now; ``images``: each request's, as the client sent them."""

    max_encoder_tokens = encoder_cache_tokens = 0

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.encoded: set[tuple[str, MultimodalItem]] = set()
        self.images: dict[str, tuple[MultimodalItem, ...]] = {}

    def run(self, batch: ScheduledBatch) -> RunnerOutput:
        for request_id, span in batch.freed_encodings:
            self.encoded.remove((request_id, span))
        assert not {r for r, _ in self.encoded} & set(batch.forgotten), "outputs outlive their request"
        new = [(e.request_id, span) for e in batch.entries for span in e.encode]
        assert not self.encoded & set(new), "encoded twice"
        assert sum(span.length for _, span in new) <= self.max_encoder_tokens
        self.encoded |= set(new)
        assert sum(span.length for _, span in self.encoded) <= self.encoder_cache_tokens
        for entry in batch.entries:
            self._check_images(entry)
        return super().run(batch)

    def _check_images(self, entry: ScheduledRequest) -> None:
        """The trunk reads tokens start .. end-1, module m of row p token p+m+1, from row F on."""
        n = self.num_modules
        first_row = self._first_row(entry.start, len(entry.known) - 1)
        first, last = min(entry.start, first_row + 1), entry.end - 1 + n
        for span in self.images.get(entry.request_id.split("#")[0], ()):
            if span.offset <= last and span.end > first:
                assert (entry.request_id, span) in self.encoded, f"{entry} reads {span} before it is encoded"


def make_image_engine(
    num_modules: int,
    *,
    max_encoder_tokens: int,
    encoder_cache_tokens: int,
    draft_rule: DraftRule = right,
    **options: int | bool,
) -> tuple[Engine, EncodingRunner]:
    """``options`` as of `make_fake_engine`."""
    engine, plain = make_fake_engine(num_modules, **options)  # type: ignore[arg-type]
    runner = EncodingRunner(plain.layout, num_modules, draft_rule)
    runner.kv = engine.scheduler.kv
    runner.max_encoder_tokens, runner.encoder_cache_tokens = max_encoder_tokens, encoder_cache_tokens
    config = replace(
        engine.scheduler.config,
        max_encoder_tokens=max_encoder_tokens,
        encoder_cache_tokens=encoder_cache_tokens,
    )
    return Engine(Scheduler(config, engine.scheduler.kv, StopChecker), runner), runner


def image_request(
    runner: EncodingRunner,
    tokens: Sequence[int],
    spans: Sequence[MultimodalItem],
    **options: float | str | None,
) -> Request:
    """``options`` as of `fake_request`, but for max_tokens, which is 6 unless told."""
    max_tokens = int(options.pop("max_tokens", None) or 6)
    request = fake_request(tokens, max_tokens, **options)  # type: ignore[arg-type]
    request.extra_keys = ExtraKeys(multimodal=tuple(spans)) if spans else None
    runner.images[request.request_id] = () if request.extra_keys is None else request.extra_keys.multimodal
    return request
