"""Gauges and totals of the engine, read from its client when Prometheus scrapes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.server.engine_process.client import EngineClient
from octavo.server.engine_process.replica import Replica

LABELS = ("model_name",)


def _num_blocks(replicas: Sequence[Replica]) -> int:
    return sum(replica.info.num_blocks for replica in replicas if replica.info is not None)


def _num_held(replica: Replica) -> int:
    """Blocks that requests and pins hold; none while there is no process."""
    if replica.info is None or not replica.has_engine:
        return 0
    return replica.info.num_blocks - replica.gauges.num_free_blocks


def _num_swap_held(replica: Replica) -> int:
    """The same in the swap tier."""
    if replica.info is None or not replica.has_engine:
        return 0
    return replica.info.num_swap_blocks - replica.gauges.num_free_swap_blocks


def _usage(replica: Replica) -> float:
    return 0.0 if replica.info is None else _num_held(replica) / replica.info.num_blocks


# Name, after octavo_replica_: the help text, and the value.
GAUGES_OF_REPLICAS: tuple[tuple[str, str, Callable[[Replica], float]], ...] = (
    ("serving", "1 if the replica takes requests.", lambda r: int(r.is_serving)),
    ("num_requests_running", "Requests that run.", lambda r: r.gauges.num_running),
    ("num_requests_waiting", "Requests that wait for blocks.", lambda r: r.gauges.num_waiting),
    ("kv_cache_usage_perc", "Share of the blocks held, 0 to 1.", _usage),
    ("load_tokens", "Tokens of its requests, as the router counts them.", lambda r: r.load),
)
COUNTERS_OF_REPLICAS: tuple[tuple[str, str, Callable[[Replica], float]], ...] = (
    ("restarts", "Engine processes after the first.", lambda r: r.num_restarts),
    ("generation_tokens", "Tokens generated.", lambda r: r.counters.num_output_tokens),
    ("prefix_cache_queries", "Tokens asked of its cache.", lambda r: r.counters.num_lookup_tokens),
    ("prefix_cache_hits", "Tokens found there.", lambda r: r.counters.num_hit_tokens),
)


class EngineTotals(Collector):
    """Reads gauges and counters from a client at the moment of a scrape."""

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self._client = client
        self._labels = [model_name]

    def describe(self) -> list[Metric]:
        return []  # so that registering does not collect, before there is an engine

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._of_each_replica()
        yield self._engine_info()
        yield self._device_memory()

    def _gauges(self) -> Iterator[Metric]:
        gauges, health, replicas = self._client.gauges, self._client.health, self._client.replicas
        held = sum(map(_num_held, replicas))
        num_blocks = _num_blocks(replicas)
        num_pins = max(replica.gauges.num_pinned_prefixes for replica in replicas)
        num_serving = sum(replica.is_serving for replica in replicas)
        for name, text, value in (
            ("num_requests_running", "Requests that run.", gauges.num_running),
            ("num_requests_waiting", "Requests that wait for blocks.", gauges.num_waiting),
            ("num_requests_swapped", "Requests in the swap tier.", gauges.num_swapped),
            ("num_sequences_running", "Samples and beams that run.", gauges.num_running_seqs),
            ("kv_cache_usage_perc", "Share of the blocks held, 0 to 1.", held / num_blocks),
            ("kv_blocks_held", "Blocks held by requests and pins.", held),
            (
                "kv_blocks_cached",
                "Free blocks that can be found by prefix.",
                gauges.num_free_cached_blocks,
            ),
            (
                "swap_blocks_held",
                "Blocks held in the swap tier.",
                sum(map(_num_swap_held, replicas)),
            ),
            ("num_pinned_prefixes", "Prefixes that are never evicted.", num_pins),
            ("num_requests_open", "Requests without an end.", health.num_open),
            ("num_ranks", "Devices that share the model.", self._client.info.num_ranks),
            ("num_replicas", "Engines behind the address.", len(replicas)),
            ("num_replicas_serving", "Those that can serve.", num_serving),
            ("engine_healthy", "1 if the server can do its work.", int(health.healthy)),
        ):
            family = GaugeMetricFamily(f"octavo_{name}", text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family

    def _counters(self) -> Iterator[Metric]:
        totals = self._client.counters
        predicted = [
            (
                "engine_step_predicted_seconds",
                "The same as a cost model expects it of this device.",
                totals.predicted_seconds,
            )
        ]
        for name, text, value in (
            ("prefix_cache_queries", "Tokens asked of the prefix cache.", totals.num_lookup_tokens),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", totals.num_hit_tokens),
            ("generation_tokens", "Tokens generated.", totals.num_output_tokens),
            ("computed_tokens", "Tokens computed, again or not.", totals.num_computed_tokens),
            ("engine_steps", "Steps of the engine.", totals.num_steps),
            ("engine_step_seconds", "Time in which the device worked.", totals.step_seconds),
            *(predicted if self._client.info.predicts_steps else ()),
            ("kv_blocks_copied", "Blocks copied before a write.", totals.num_copied_blocks),
            ("kv_blocks_evicted", "Cached blocks overwritten.", totals.num_evicted_blocks),
            ("kv_blocks_swapped_out", "Blocks swapped out.", totals.num_swapped_out_blocks),
            ("kv_blocks_swapped_in", "Blocks swapped in.", totals.num_swapped_in_blocks),
            ("experts_computed", "Experts computed, of all layers.", totals.num_hit_experts),
            (
                "experts_expected",
                "Experts that evenly spread choices would have computed.",
                totals.num_expected_experts,
            ),
        ):
            family = CounterMetricFamily(f"octavo_{name}", text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family

    def _of_each_replica(self) -> Iterator[Metric]:
        """The most important ones, with the label `replica`."""
        labels, replicas = (*LABELS, "replica"), self._client.replicas
        for name, text, of in GAUGES_OF_REPLICAS:
            gauge = GaugeMetricFamily(f"octavo_replica_{name}", text, labels=labels)
            for replica in replicas:
                gauge.add_metric([*self._labels, str(replica.number)], of(replica))
            yield gauge
        for name, text, total in COUNTERS_OF_REPLICAS:
            counter = CounterMetricFamily(f"octavo_replica_{name}", text, labels=labels)
            for replica in replicas:
                counter.add_metric([*self._labels, str(replica.number)], total(replica))
            yield counter

    def _engine_info(self) -> Metric:
        info = self._client.info
        names = (
            *("block_size", "num_blocks", "num_swap_blocks", "kv_groups"),
            *("enable_prefix_caching", "policy", "dtype", "quantization", "weight_copy_bytes"),
            *("kv_cache_dtype", "device", "max_model_len"),
        )
        family = InfoMetricFamily("octavo_cache_config", "The KV cache.", labels=LABELS)
        values = {name: str(getattr(info, name)) for name in names}
        # By this name the Gateway API Inference Extension reads the size of the whole cache.
        values["num_gpu_blocks"] = str(_num_blocks(self._client.replicas))
        family.add_metric(self._labels, values)
        return family

    def _device_memory(self) -> Metric:
        budget = self._client.info.budget
        family = GaugeMetricFamily(
            "octavo_device_memory_bytes",
            "Memory of each device, by what takes it.",
            labels=[*LABELS, "component"],
        )
        for component in ("weights", "activations", "graphs", "kv_cache", "unused"):
            family.add_metric([*self._labels, component], getattr(budget, component))
        return family
