"""All observers of a server: metrics, dashboard, debug endpoint, log."""

from __future__ import annotations

from fastapi import APIRouter

from octavo.server.engine_process.client import EngineClient
from octavo.server.engine_process.listening import Listener
from octavo.server.http.pages import pages_router
from octavo.server.observability.debug import Lookups, debug_router
from octavo.server.observability.feed import Feeds, feed_router
from octavo.server.observability.logs import RequestLog
from octavo.server.observability.metrics import Metrics, metrics_router


class Observation:
    """Owns the observers of one engine's client.

    >>> observation = Observation("demo")
    >>> client = EngineClient(config, listeners=observation.listeners)
    >>> for router in observation.routers(client):
    ...     app.include_router(router)
    """

    def __init__(self, model_name: str) -> None:
        self.metrics = Metrics(model_name)
        self.lookups = Lookups()
        self.listeners: list[Listener] = [self.metrics, self.lookups, RequestLog()]

    def routers(self, client: EngineClient) -> list[APIRouter]:
        """The endpoints, for an app whose gate checks API keys. Call this once per client."""
        self.metrics.watch(client)
        return [
            metrics_router(self.metrics),
            pages_router(),
            feed_router(Feeds(client, self.metrics)),
            debug_router(client, self.lookups),
        ]
