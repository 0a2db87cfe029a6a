"""From the timings of single requests to the table of a load test. Pure functions, seconds in, seconds out.

TTFT: request sent to first token. TPOT: (last - first token) / (tokens - 1). ITL: gap between two chunks of a
stream, each of which may carry several tokens when drafts are accepted. e2e: request sent to last token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cli.acceptance import Acceptance


@dataclass(frozen=True)
class Timing:
    """One request. ``chunk_times_s``: when each chunk with text arrived, on the clock of ``start_s``."""

    start_s: float
    end_s: float
    chunk_times_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    error: str | None = None


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile, linear between the two nearest values; nan of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and quantiles; None (JSON null) where nothing was measured."""
    if not values:
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    return {
        "mean": sum(values) / len(values),
        "p50": quantile(values, 0.5),
        "p90": quantile(values, 0.9),
        "p99": quantile(values, 0.99),
    }


def summarize(timings: Sequence[Timing]) -> dict[str, Any]:
    """The whole result as JSON-ready numbers; times in milliseconds, errors counted and quoted."""
    done = [t for t in timings if t.error is None]
    failed = [t for t in timings if t.error is not None]
    duration_s = max((t.end_s for t in timings), default=0.0) - min((t.start_s for t in timings), default=0.0)
    output_tokens = sum(t.output_tokens for t in done)
    acceptance = sum((t.acceptance for t in done), Acceptance())
    streamed = [t for t in done if t.chunk_times_s]
    several = [t for t in streamed if t.output_tokens > 1]
    gaps = [b - a for t in streamed for a, b in zip(t.chunk_times_s, t.chunk_times_s[1:], strict=False)]
    ms = 1000.0
    return {
        "requests": len(done),
        "failed": len(failed),
        "errors": sorted({t.error for t in failed if t.error})[:5],
        "duration_s": duration_s,
        "prompt_tokens": sum(t.prompt_tokens for t in done),
        "cached_tokens": sum(t.cached_tokens for t in done),
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / duration_s if duration_s else 0.0,
        "requests_per_s": len(done) / duration_s if duration_s else 0.0,
        "ttft_ms": spread([(t.chunk_times_s[0] - t.start_s) * ms for t in streamed]),
        "tpot_ms": spread(
            [(t.chunk_times_s[-1] - t.chunk_times_s[0]) * ms / (t.output_tokens - 1) for t in several]
        ),
        "itl_ms": spread([gap * ms for gap in gaps]),
        "e2e_ms": spread([(t.end_s - t.start_s) * ms for t in done]),
        "tokens_per_s_of_a_request": spread(
            [t.output_tokens / (t.end_s - t.start_s) for t in done if t.end_s > t.start_s]
        ),
        "acceptance": {
            "num_drafts": acceptance.num_drafts,
            "num_draft_tokens": acceptance.num_draft_tokens,
            "num_accepted": acceptance.num_accepted,
            "length": acceptance.length,
            "per_position": list(acceptance.rate_per_pos),
        },
    }


def table(summary: dict[str, Any]) -> str:
    """The same for a person."""
    rows = [
        ("TTFT, ms", "ttft_ms"),
        ("TPOT, ms", "tpot_ms"),
        ("ITL, ms", "itl_ms"),
        ("end to end, ms", "e2e_ms"),
        ("tokens/s of a request", "tokens_per_s_of_a_request"),
    ]
    lines = [f"{'':<24}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}"]
    for label, key in rows:
        cells = ("-" if v is None else f"{v:.1f}" for v in summary[key].values())
        lines.append(f"{label:<24}" + "".join(f"{cell:>10}" for cell in cells))
    accepted = summary["acceptance"]
    per_position = " / ".join(f"{rate:.2f}" for rate in accepted["per_position"]) or "no drafts"
    lines += [
        f"{summary['requests']} requests ({summary['failed']} failed) in {summary['duration_s']:.1f} s: "
        f"{summary['output_tokens_per_s']:.1f} output tokens/s, {summary['requests_per_s']:.2f} requests/s",
        f"prompt tokens {summary['prompt_tokens']} ({summary['cached_tokens']} cached), "
        f"output tokens {summary['output_tokens']}",
        f"acceptance length {accepted['length']:.2f}, per position {per_position}",
    ]
    return "\n".join(lines + [f"error: {message}" for message in summary["errors"]])
