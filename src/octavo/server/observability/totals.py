"""Gauges and totals of the engine, read from its client when Prometheus scrapes them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.server.engine_process.client import EngineClient

LABELS = ("model_name",)


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
        yield self._engine_info()
        yield self._device_memory()

    def _gauges(self) -> Iterator[Metric]:
        gauges, info, health = self._client.gauges, self._client.info, self._client.health
        held = info.num_blocks - gauges.num_free_blocks
        for name, text, value in (
            ("num_requests_running", "Requests that run.", gauges.num_running),
            ("num_requests_waiting", "Requests that wait for blocks.", gauges.num_waiting),
            ("num_requests_swapped", "Requests in the swap tier.", gauges.num_swapped),
            ("num_sequences_running", "Samples and beams that run.", gauges.num_running_seqs),
            ("kv_cache_usage_perc", "Share of the blocks held, 0 to 1.", held / info.num_blocks),
            ("kv_blocks_held", "Blocks held by requests and pins.", held),
            (
                "kv_blocks_cached",
                "Free blocks that can be found by prefix.",
                gauges.num_free_cached_blocks,
            ),
            (
                "swap_blocks_held",
                "Blocks held in the swap tier.",
                info.num_swap_blocks - gauges.num_free_swap_blocks,
            ),
            ("num_pinned_prefixes", "Prefixes that are never evicted.", gauges.num_pinned_prefixes),
            ("num_requests_open", "Requests without an end.", health.num_open),
            ("num_ranks", "Devices that share the model.", info.num_ranks),
            ("engine_healthy", "1 if the server can do its work.", int(health.healthy)),
        ):
            family = GaugeMetricFamily(f"octavo_{name}", text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family

    def _counters(self) -> Iterator[Metric]:
        totals = self._client.counters
        for name, text, value in (
            ("prefix_cache_queries", "Tokens asked of the prefix cache.", totals.num_lookup_tokens),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", totals.num_hit_tokens),
            ("generation_tokens", "Tokens generated.", totals.num_output_tokens),
            ("computed_tokens", "Tokens computed, again or not.", totals.num_computed_tokens),
            ("engine_steps", "Steps of the engine.", totals.num_steps),
            ("engine_step_seconds", "Time in which the device worked.", totals.step_seconds),
            ("kv_blocks_copied", "Blocks copied before a write.", totals.num_copied_blocks),
            ("kv_blocks_evicted", "Cached blocks overwritten.", totals.num_evicted_blocks),
            ("kv_blocks_swapped_out", "Blocks swapped out.", totals.num_swapped_out_blocks),
            ("kv_blocks_swapped_in", "Blocks swapped in.", totals.num_swapped_in_blocks),
        ):
            family = CounterMetricFamily(f"octavo_{name}", text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family

    def _engine_info(self) -> Metric:
        info = self._client.info
        names = (
            *("block_size", "num_blocks", "num_swap_blocks", "kv_groups"),
            *("enable_prefix_caching", "policy", "dtype", "device", "max_model_len"),
        )
        family = InfoMetricFamily("octavo_cache_config", "The KV cache.", labels=LABELS)
        family.add_metric(self._labels, {name: str(getattr(info, name)) for name in names})
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
