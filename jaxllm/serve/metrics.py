"""Prometheus metrics, under vLLM's names with the prefix jaxllm."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from jaxllm.engine.request_times import Observer
from jaxllm.outputs import EngineStats

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
INTER_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
LATENCY_BUCKETS = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0),
)
TOKEN_BUCKETS = tuple(float(2**i) for i in range(18))


class _EngineCollector:
    """Gauges and counters that the engine keeps, as of the last snapshot."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.stats = EngineStats()
        self.up = 0.0

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        live = stats.num_blocks - stats.num_free_blocks
        usage = live / stats.num_blocks if stats.num_blocks else 0.0
        empty = stats.num_free_blocks - stats.num_cached_blocks
        gauges = (
            ("engine_up", "1 while the engine takes requests", self.up),
            ("num_requests_running", "Sequences in the running batch", stats.num_running),
            ("num_requests_waiting", "Sequences waiting for a place", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of cache blocks held by requests, 0 to 1", usage),
            ("kv_blocks_live", "Cache blocks held by requests", live),
            ("kv_blocks_cached", "Unheld cache blocks that can be hit", stats.num_cached_blocks),
            ("kv_blocks_free", "Cache blocks that hold nothing", empty),
            ("kv_blocks_total", "All cache blocks", stats.num_blocks),
        )  # fmt: skip
        counters = (
            ("num_preemptions", "Requests put back and computed again", stats.num_preemptions),
            ("prompt_tokens", "Prompt tokens computed", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated", stats.generation_tokens),
            ("prefix_cache_queries", "Tokens looked up for a prefix", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Tokens found as a prefix", stats.prefix_cache_hits),
            ("engine_steps", "Steps of the engine", stats.num_steps),
        )  # fmt: skip
        for family, rows in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, text, value in rows:
                metric = family("jaxllm:" + name, text, labels=["model_name"])
                metric.add_metric([self.model_name], value)
                yield metric


class Metrics(Observer):
    """All metrics of one server; hears of the requests' latencies from AsyncEngine."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._engine = _EngineCollector(model_name)
        self.registry.register(self._engine)  # pyright: ignore[reportArgumentType]
        self._first_token = self._histogram(
            model_name, "time_to_first_token_seconds", "Arrival to first token", TTFT_BUCKETS
        )
        self._inter_token = self._histogram(
            model_name, "inter_token_latency_seconds", "Between two tokens", INTER_TOKEN_BUCKETS
        )
        self._latency = self._histogram(
            model_name, "e2e_request_latency_seconds", "Arrival to end", LATENCY_BUCKETS
        )
        self._prompt = self._histogram(
            model_name, "request_prompt_tokens", "Prompt tokens of a sequence", TOKEN_BUCKETS
        )
        self._generation = self._histogram(
            model_name, "request_generation_tokens", "Tokens of a sequence", TOKEN_BUCKETS
        )
        self._success = Counter(
            "jaxllm:request_success",
            "Sequences that ended by themselves",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._aborted = Counter(
            "jaxllm:request_aborted",
            "Sequences aborted: the client left, or the server stopped",
            ["model_name"],
            registry=self.registry,
        ).labels(model_name)
        self._model_name = model_name

    def _histogram(
        self, model_name: str, name: str, text: str, buckets: tuple[float, ...]
    ) -> Histogram:
        histogram = Histogram(
            "jaxllm:" + name, text, ["model_name"], buckets=buckets, registry=self.registry
        )
        return histogram.labels(model_name)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def inter_token(self, seconds: float) -> None:
        self._inter_token.observe(seconds)

    def finished(
        self, reason: str, seconds: float, prompt_tokens: int, generation_tokens: int
    ) -> None:
        self._success.labels(self._model_name, reason).inc()
        self._latency.observe(seconds)
        self._prompt.observe(prompt_tokens)
        self._generation.observe(generation_tokens)

    def aborted(self) -> None:
        self._aborted.inc()

    def render(self, stats: EngineStats, *, up: bool) -> bytes:
        """The text of /metrics, with the engine's figures as of `stats`."""
        self._engine.stats = stats
        self._engine.up = float(up)
        return generate_latest(self.registry)
