"""The HTTP application: all endpoints on one engine client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware

from octavo import __version__
from octavo.server.engine_process.client import EngineClient
from octavo.server.http.answers import format_of
from octavo.server.http.batches import Batches
from octavo.server.http.context import Context, Storage
from octavo.server.http.endpoints import ROUTERS, STORAGE_ROUTERS
from octavo.server.http.errors import add_error_handlers
from octavo.server.http.file_store import FileStore, Shelf
from octavo.server.http.gate import Gate
from octavo.server.http.response_store import ResponseStore
from octavo.server.http.schema import describe
from octavo.server.http.settings import ServerSettings
from octavo.server.http.token_texts import TokenTexts


def create_app(
    client: EngineClient, settings: ServerSettings, routers: Sequence[APIRouter] = ()
) -> FastAPI:
    """All endpoints, behind the gate that checks keys and limits.

    `routers` are further endpoints: metrics, pages, or some from outside the package. Endpoints
    find the client and the settings by `octavo.server.http.context.context_of(request)`. Raises
    ConfigError if `files_dir` cannot be used.
    """
    app = FastAPI(
        title="octavo",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
    )
    storage = None
    if settings.files_dir is not None:
        directory = Path(settings.files_dir)
        files = FileStore(directory, Shelf(settings.max_file_bytes, settings.max_files))
        storage = Storage(files, Batches(files, directory, settings.max_body_bytes))
        routers = [*STORAGE_ROUTERS, *routers]
    answer_format = format_of(
        client.tokenizer, settings.tool_call_parser, settings.reasoning_parser
    )
    app.state.context = Context(
        client,
        settings,
        TokenTexts(client.tokenizer),
        answer_format=answer_format,
        stored_responses=ResponseStore(settings.max_stored_responses),
        storage=storage,
    )
    routers = [*ROUTERS, *routers]
    add_error_handlers(app, routers)
    for router in routers:
        app.include_router(router)
        _answer_head(app, router)
    app.add_middleware(Gate, settings=settings)
    if settings.cors_origins:
        # Outside the gate: a browser's preflight request brings no key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # OpenAI's client in a browser sends a dozen of its own
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    description: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not description:
            description.update(describe(app, settings.model_names[0], bool(settings.api_keys)))
        return description

    app.openapi = openapi  # type: ignore[method-assign]
    return app


def _answer_head(app: FastAPI, router: APIRouter) -> None:
    """Answer HEAD wherever GET is answered; uvicorn leaves the reply's body out."""
    for route in router.routes:
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)
