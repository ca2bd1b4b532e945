"""How the HTTP API behaves: the names it serves, the keys it asks for, and its limits."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from octavo.errors import ConfigError
from octavo.server.http.keys import ApiKeys

MIB = 1 << 20
DAY = 86_400.0  # seconds
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True)
class Listening:
    """Where the server listens, and how long it takes to stop."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    drain_seconds: float = 30.0  # for open requests, after SIGTERM
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ConfigError("port", f"{self.port} is not between 0 and {(1 << 16) - 1}")
        if not self.drain_seconds >= 0:
            raise ConfigError("drain_seconds", f"{self.drain_seconds} is not 0 or more")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile", "it needs ssl_certfile")


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on connections and on how slow a client may be. Times in seconds."""

    max_connections: int = 16_384  # at once; fewer if the limit of open files is lower
    header_seconds: float = 20.0  # for the headers of a request, and for a connection's first one
    body_seconds: float = 30.0  # for a body; more, the more of it has come
    keep_alive_seconds: float = 30.0  # for a connection between two requests
    unread_seconds: float = 60.0  # without the client's taking anything of what is sent to it

    def __post_init__(self) -> None:
        if self.max_connections < 1:
            raise ConfigError("max_connections", f"{self.max_connections} is less than 1")
        for each in fields(self)[1:]:
            value = getattr(self, each.name)
            if not 0 < value <= DAY:
                raise ConfigError(each.name, f"{value} is not above 0 and at most {DAY} (a day)")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Options of the API, apart from those of the engine behind it."""

    model_names: tuple[str, ...]  # what clients may call the model; the first is the one reported
    api_keys: ApiKeys = field(default_factory=ApiKeys)  # empty: no key is needed
    max_body_bytes: int = 4 * MIB
    max_prompts: int = 256  # in one request
    ignore_unknown_fields: bool = False
    trust_request_chat_template: bool = False
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # names that requests may call the server by; empty: any
    log_requests: bool = False
    ping_seconds: float = 15.0  # between keep-alive comments in event streams; 0: none

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ConfigError("served_model_name", "a name is empty")
        for name in ("max_body_bytes", "max_prompts"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"{getattr(self, name)} is less than 1")
        if not 0 <= self.ping_seconds <= DAY:
            raise ConfigError(
                "ping_seconds", f"{self.ping_seconds} is not between 0 and {DAY} (a day)"
            )
