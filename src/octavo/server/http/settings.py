"""How the HTTP API behaves: the names it serves, the keys it asks for, and its limits."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields

from octavo.errors import ConfigError
from octavo.parsing.formats import AUTO, CALL_FORMAT_NAMES, REASONING_NAMES
from octavo.server.http.keys import ApiKeys

MIB = 1 << 20
DAY = 86_400.0  # seconds
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\sA-Z]*")  # as browsers write it
HOST = re.compile(r"[^:/\s\[\]]+|\[[0-9a-f:.]+\]")  # as a Host header has it, without the port


@dataclass(frozen=True, slots=True)
class Listening:
    """Where the server listens, and how long it takes to stop."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """0: any that is free."""
    drain_seconds: float = 30.0
    """After SIGTERM, how long open requests may take to end."""
    ssl_certfile: str | None = None
    """Serve HTTPS, with the certificate in this file."""
    ssl_keyfile: str | None = None
    """The certificate's key."""

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

    max_connections: int = 16_384
    """Connections open at once, if open files allow as many; more are refused with 503."""
    header_seconds: float = 20.0
    """Timeout for a connection's first request, and for the headers of each."""
    body_seconds: float = 30.0
    """Timeout for a body; each 4 KiB of it add a second."""
    keep_alive_seconds: float = 30.0
    """Idle time of a connection between two requests before it is closed."""
    unread_seconds: float = 60.0
    """A client that reads nothing of its reply for this long is disconnected."""

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

    model_names: tuple[str, ...]
    """What clients may call the model; the first is the one reported."""
    api_keys: ApiKeys = field(default_factory=ApiKeys)
    """Empty: no key is needed."""
    admin_keys: ApiKeys = field(default_factory=ApiKeys)
    """What /admin asks for. Empty: one of `api_keys`."""
    max_body_bytes: int = 4 * MIB
    """Largest body."""
    max_prompts: int = 256
    """Most prompts in one request."""
    max_stored_responses: int = 1_000
    """Responses of each tenant kept in memory for previous_response_id; 0: none."""
    files_dir: str | None = None
    """Directory of /v1/files and /v1/batches, which need one; no other server may use it."""
    max_file_bytes: int = 128 * MIB
    """Largest uploaded file."""
    max_files: int = 1_000
    """Most files of a tenant at once, with what its batches have written and will write."""
    ignore_unknown_fields: bool = False
    """Ignore fields that octavo does not know, instead of refusing the request."""
    trust_request_chat_template: bool = False
    """Run chat templates that requests bring along (sandboxed, but they can take long)."""
    tool_call_parser: str = AUTO
    """How the model writes calls of tools; "auto": as its files say."""
    reasoning_parser: str = AUTO
    """How the model marks reasoning; "auto": as its files say."""
    cors_origins: tuple[str, ...] = ()
    """Web pages of these origins may call the server; "*": all."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that requests may call the server by; empty: any."""
    log_requests: bool = False
    """Also log a line per HTTP request of any kind."""
    ping_seconds: float = 15.0
    """Interval of keep-alive comments in event streams; 0: none."""
    max_forkable: int = 256
    """Responses of each tenant that can be forked after their end: those that ended or were forked
    last; and ended forks that can still be joined."""

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ConfigError("served_model_name", "a name is empty")
        for name, known in (
            ("tool_call_parser", CALL_FORMAT_NAMES),
            ("reasoning_parser", REASONING_NAMES),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(name, f"{getattr(self, name)!r} is not one of {', '.join(known)}")
        for name, form, values, expected in (
            ("cors_origin", ORIGIN, self.cors_origins, "an origin such as https://pages.example"),
            (
                "allowed_host",
                HOST,
                self.allowed_hosts,
                "a name without a port, such as pages.example or [::1]",
            ),
        ):
            for value in values:
                if form.fullmatch(value) is None:
                    raise ConfigError(name, f"{value!r} is not {expected}")
        for name in ("max_body_bytes", "max_prompts", "max_file_bytes", "max_files"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"{getattr(self, name)} is less than 1")
        if self.max_forkable < 0:
            raise ConfigError("max_forkable", f"{self.max_forkable} is less than 0")
        if self.max_stored_responses < 0:
            raise ConfigError("max_stored_responses", f"{self.max_stored_responses} is less than 0")
        if not 0 <= self.ping_seconds <= DAY:
            raise ConfigError(
                "ping_seconds", f"{self.ping_seconds} is not between 0 and {DAY} (a day)"
            )
