"""The pages for browsers: the dashboard at /, the block pool to drive by hand at /pool, the API's
description at /docs.

Each page is one self-contained document: styles and scripts are put into it when it is read, and
nothing is fetched from elsewhere. The content security policy names the scripts by their digests,
so that nothing in a request can run as one.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache, partial
from importlib import resources

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse

from octavo.server.http.bodies import read_body
from octavo.server.http.context import context_of, existing_replica, reply
from octavo.server.http.playpool import Play, play, textbook_case

DASHBOARD = "index.html"  # shows one replica
PAGES = {"/": DASHBOARD, "/pool": "pool.html", "/docs": "docs.html"}
INCLUDE = re.compile(r"<!-- (style|script): ([\w. ]+) -->")


@cache
def page(name: str) -> tuple[str, str]:
    """A page with everything it needs, and its content security policy."""
    folder = resources.files("octavo.server.http") / "static"
    scripts: list[str] = []

    def include(match: re.Match[str]) -> str:
        kind, names = match.groups()
        parts = [(folder / each).read_text(encoding="utf-8") for each in names.split()]
        content = "\n" + "\n".join(parts)
        if kind == "script":
            scripts.append(content)
        return f"<{kind}>{content}</{kind}>"

    html = INCLUDE.sub(include, (folder / name).read_text(encoding="utf-8"))
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src {allowed}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def pages_router() -> APIRouter:
    """The pages, and the pool behind /pool. Authentication is up to the gate."""
    router = APIRouter(include_in_schema=False)

    for path, name in PAGES.items():
        needed = [Depends(existing_replica)] if name == DASHBOARD else []
        router.add_api_route(path, partial(_page, name), dependencies=needed)

    @router.get("/pool/textbook")
    async def textbook() -> Response:
        return reply(textbook_case())

    @router.post("/pool/play")
    async def play_operations(request: Request) -> Response:
        body = await read_body(request, Play, context_of(request).client.offload)
        return reply(play(body.operations))

    return router


async def _page(name: str) -> HTMLResponse:
    html, policy = page(name)
    headers = {
        "content-security-policy": policy,
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }
    return HTMLResponse(html, headers=headers)
