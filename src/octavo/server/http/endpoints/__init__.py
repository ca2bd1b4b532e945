"""The API's endpoints, a module each. A new one is a module here and a line in `ROUTERS`; from
outside the package, a router for `create_app(..., routers=[...])`."""

from __future__ import annotations

from fastapi import APIRouter

from octavo.server.http.endpoints import (
    admin,
    batches,
    chat,
    completions,
    embeddings,
    files,
    forks,
    invocations,
    messages,
    models,
    prefixes,
    responses,
    score,
    tokens,
)

ROUTERS: tuple[APIRouter, ...] = (
    completions.router,
    chat.router,
    responses.router,
    messages.router,
    embeddings.router,
    score.router,
    tokens.router,
    forks.router,
    prefixes.router,
    models.router,
    invocations.router,
    admin.router,
)
# Only where the server has a directory for files.
STORAGE_ROUTERS: tuple[APIRouter, ...] = (files.router, batches.router)
