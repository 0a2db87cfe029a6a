"""Every metric of every process: its name, kind, unit and help text, in one table.

Names carry the prefix ``baton_`` and their unit. Where dashboards of this field already know a metric
under a ``vllm:`` name, the table says so, and ``Metrics(compat=True)`` exposes it under both.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from common.messages import NodeLoad

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0,
)  # fmt: skip


@dataclass(frozen=True)
class MetricSpec:
    """``compat`` is the name under the ``vllm:`` prefix, if dashboards know one."""

    kind: type[Counter] | type[Gauge] | type[Histogram]
    name: str
    help: str
    labels: tuple[str, ...] = ()
    compat: str | None = None


NODE_METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(
        Gauge, "num_requests_running", "Requests in the running batch.", compat="num_requests_running"
    ),
    MetricSpec(
        Gauge, "num_requests_waiting", "Requests admitted and not yet running.", compat="num_requests_waiting"
    ),
    MetricSpec(Gauge, "num_requests_receiving", "Requests whose KV blocks are arriving."),
    MetricSpec(Gauge, "num_requests_held", "Finished prefills whose blocks wait for their reader."),
    MetricSpec(Gauge, "waiting_tokens", "Tokens still to compute of everything admitted or queued."),
    MetricSpec(Gauge, "kv_cache_blocks_free", "Free KV blocks, in blocks of the first group."),
    MetricSpec(
        Gauge, "kv_cache_usage_perc", "Used share of the KV blocks, 0 to 1.", compat="kv_cache_usage_perc"
    ),
    MetricSpec(
        Counter, "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.",
        compat="prefix_cache_queries",
    ),
    MetricSpec(
        Counter, "prefix_cache_hits", "Prompt tokens found in the prefix cache.", compat="prefix_cache_hits"
    ),
    MetricSpec(
        Counter, "spec_decode_num_drafts", "Steps that verified at least one draft token.",
        compat="spec_decode_num_drafts",
    ),
    MetricSpec(
        Counter, "spec_decode_num_draft_tokens", "Draft tokens verified.",
        compat="spec_decode_num_draft_tokens",
    ),
    MetricSpec(
        Counter, "spec_decode_num_accepted_tokens", "Draft tokens accepted.",
        compat="spec_decode_num_accepted_tokens",
    ),
    MetricSpec(
        Counter, "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted at each position.",
        ("position",), compat="spec_decode_num_accepted_tokens_per_pos",
    ),
    MetricSpec(
        Counter, "spec_decode_num_verified_tokens_per_pos", "Draft tokens verified at each position.",
        ("position",),
    ),
    MetricSpec(Counter, "kv_transfers", "KV transfers that ended.", ("outcome",)),
    MetricSpec(Counter, "kv_transfer_attempts", "Transfers begun: fetches of a decode node, pulls served."),
    MetricSpec(Counter, "kv_transfer_commits", "Transfers that both sides hold to be complete."),
    MetricSpec(Counter, "kv_transfer_failures", "Transfers that failed, by reason.", ("reason",)),
    MetricSpec(Counter, "kv_transfer_retries", "Questions asked again: the prompt was not offered yet."),
    MetricSpec(Counter, "kv_transfer_received_bytes", "KV bytes received and verified, of failed ones too."),
    MetricSpec(Counter, "kv_transfer_sent_bytes", "KV bytes sent to decode nodes."),
    MetricSpec(Counter, "kv_transfer_chunks", "Chunks sent, and received and verified.", ("direction",)),
    MetricSpec(Counter, "kv_transfer_chunks_staged", "Chunks that needed a copy."),
    MetricSpec(
        Counter, "kv_transfer_seconds",
        "Seconds of committed transfers: moving while an announced chunk is on its way, else waiting.",
        ("phase",),
    ),
    MetricSpec(Gauge, "kv_transfer_leases", "Transfers that a prefill node holds blocks for."),
    MetricSpec(Counter, "kv_transfer_leases_expired", "Leases that ended without a sign of life."),
    MetricSpec(Gauge, "kv_transfer_quarantined_blocks", "Blocks out of use: a receive may still write them."),
    MetricSpec(Counter, "kv_transfer_blocks_quarantined", "Blocks that ever went to quarantine."),
    MetricSpec(Counter, "kv_transfer_forced_fences", "Lanes closed because requests on them did not end."),
    MetricSpec(Gauge, "kv_transfer_sessions", "Control connections that stand, each with its data lane."),
    MetricSpec(Counter, "kv_transfer_lanes", "Data lanes opened.", ("transport",)),
    MetricSpec(Counter, "kv_transfer_peers_suspected", "Peers that fell silent for suspect_s."),
    MetricSpec(Counter, "kv_transfer_peers_lost", "Peers given up, or whose connection broke."),
    MetricSpec(Counter, "kv_transfer_unexpected_messages", "Late, duplicate, foreign or garbled messages."),
)  # fmt: skip

ROUTER_METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(Counter, "router_requests", "HTTP requests answered.", ("endpoint", "status")),
    MetricSpec(Gauge, "router_requests_in_flight", "Generation requests being served."),
    MetricSpec(Gauge, "router_nodes", "Live nodes.", ("role",)),
    MetricSpec(Counter, "router_nodes_lost", "Nodes dropped after missed heartbeats or a goodbye."),
    MetricSpec(Counter, "router_decode_retries", "Requests sent to a further decode node.", ("reason",)),
    MetricSpec(Counter, "router_placements", "Requests placed, by how the prompt is computed.", ("prefill",)),
    MetricSpec(Counter, "router_unknown_messages", "Node messages for requests that are over."),
    MetricSpec(Counter, "router_cached_tokens_predicted", "Cached prompt tokens the index predicted on D."),
    MetricSpec(Counter, "router_cached_tokens_delivered", "Cached prompt tokens that D reported."),
    MetricSpec(Gauge, "router_index_blocks", "KV blocks the prefix index holds.", ("node_id",)),
    MetricSpec(Counter, "prompt_tokens", "Prompt tokens of finished requests.", compat="prompt_tokens"),
    MetricSpec(Counter, "generation_tokens", "Tokens generated.", compat="generation_tokens"),
    MetricSpec(
        Histogram, "time_to_first_token_seconds", "Arrival to the first token.",
        compat="time_to_first_token_seconds",
    ),
    MetricSpec(
        Histogram, "inter_token_latency_seconds", "Time between tokens of a sequence, per token.",
        compat="inter_token_latency_seconds",
    ),
    MetricSpec(
        Histogram, "e2e_request_latency_seconds", "Arrival to the last token.",
        compat="e2e_request_latency_seconds",
    ),
)  # fmt: skip


class Metrics:
    """The metrics of one process in a registry of its own.

    ``counter``, ``gauge`` and ``histogram`` look a metric up by its name in the table, without the
    prefix; a name that is not there is a KeyError. Not thread-safe beyond what prometheus_client is.
    """

    def __init__(self, specs: Sequence[MetricSpec], *, model_name: str, compat: bool = False) -> None:
        self.registry = CollectorRegistry()
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}
        self._last_load = NodeLoad()
        self._totals: dict[tuple[str, ...], float] = {}  # (name, *labels) -> what `set_total` was told last
        self.before_render: Callable[[], None] = lambda: None  # brings in figures that are kept elsewhere
        for spec in specs:
            name = "baton_" + spec.name
            if spec.kind is Histogram:
                self._metrics[spec.name] = Histogram(
                    name, spec.help, spec.labels, registry=self.registry, buckets=_LATENCY_BUCKETS_S
                )
            else:
                self._metrics[spec.name] = spec.kind(name, spec.help, spec.labels, registry=self.registry)
        if compat:
            self.registry.register(_CompatNames(specs, self._metrics, model_name))

    def counter(self, name: str) -> Counter:
        metric = self._metrics[name]
        assert isinstance(metric, Counter), f"{name} is no counter"
        return metric

    def gauge(self, name: str) -> Gauge:
        metric = self._metrics[name]
        assert isinstance(metric, Gauge), f"{name} is no gauge"
        return metric

    def histogram(self, name: str) -> Histogram:
        metric = self._metrics[name]
        assert isinstance(metric, Histogram), f"{name} is no histogram"
        return metric

    def set_total(self, name: str, total: float, *labels: str) -> None:
        """Advances a counter to ``total``, counted elsewhere since the start of the process."""
        counter = self.counter(name)
        if labels:
            counter = counter.labels(*labels)
        counter.inc(total - self._totals.get((name, *labels), 0.0))
        self._totals[name, *labels] = total

    def render(self) -> bytes:
        """The text exposition of everything registered."""
        self.before_render()
        return generate_latest(self.registry)

    def observe_load(self, load: NodeLoad) -> None:
        """Sets a node's gauges and advances its counters to the totals of ``load`` (since start)."""
        last, self._last_load = self._last_load, load
        self.gauge("num_requests_running").set(load.num_running)
        self.gauge("num_requests_waiting").set(load.num_waiting)
        self.gauge("num_requests_receiving").set(load.num_receiving)
        self.gauge("num_requests_held").set(load.num_held)
        self.gauge("waiting_tokens").set(load.waiting_tokens)
        self.gauge("kv_cache_blocks_free").set(load.free_blocks)
        used = 1.0 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0
        self.gauge("kv_cache_usage_perc").set(used)
        self.counter("prefix_cache_queries").inc(load.prefix_cache_queries - last.prefix_cache_queries)
        self.counter("prefix_cache_hits").inc(load.prefix_cache_hits - last.prefix_cache_hits)
        self.counter("spec_decode_num_drafts").inc(load.num_drafts - last.num_drafts)
        self.counter("spec_decode_num_draft_tokens").inc(load.num_draft_tokens - last.num_draft_tokens)
        self.counter("spec_decode_num_accepted_tokens").inc(load.num_accepted - last.num_accepted)
        self._advance_positions("accepted", load.accepted_per_pos, last.accepted_per_pos)
        self._advance_positions("verified", load.verified_per_pos, last.verified_per_pos)
        failures = load.num_transfer_failures - last.num_transfer_failures
        transfers = self.counter("kv_transfers")
        transfers.labels("completed").inc(load.num_transfers - last.num_transfers - failures)
        transfers.labels("failed").inc(failures)

    def _advance_positions(self, what: str, now: Sequence[int], before: Sequence[int]) -> None:
        counter = self.counter(f"spec_decode_num_{what}_tokens_per_pos")
        for position, total in enumerate(now):
            counter.labels(str(position)).inc(total - (before[position] if position < len(before) else 0))


class _CompatNames(Collector):
    """Collects chosen metrics a second time, under the names and labels that foreign dashboards query."""

    def __init__(
        self,
        specs: Sequence[MetricSpec],
        metrics: dict[str, Counter | Gauge | Histogram],
        model_name: str,
    ) -> None:
        self._renamed = [(metrics[spec.name], spec) for spec in specs if spec.compat]
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterable[Metric]:
        for metric, spec in self._renamed:
            name = f"vllm:{spec.compat}"
            for family in metric.collect():
                copy = Metric(name, family.documentation, family.type)
                copy.samples = [
                    Sample(name + s.name.removeprefix(family.name), self._labels | s.labels, s.value)
                    for s in family.samples
                ]
                yield copy
