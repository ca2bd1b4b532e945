"""`octavo serve`: the HTTP server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from octavo.cli.options import engine_options, option_of, size

listening_option = option_of("listening")
settings_option = option_of("settings")
supervision_option = option_of("supervision")
connections_option = option_of("connections")


@click.command()
@click.argument("model", default="demo")
@listening_option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@listening_option("--port", type=int, help="0: any that is free.  [default: 8000]")
@click.option(
    "--served-model-name",
    "model_names",
    multiple=True,
    help="What clients call the model; may be given several times.  [default: MODEL]",
)
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar="OCTAVO_API_KEY",
    metavar="KEY[:SALT]",
    help="A key that clients must show; may be given several times (in the environment variable "
    "OCTAVO_API_KEY: with spaces between). Keys with different SALTs share no cached prefixes.",
)
@click.option(
    "--api-key-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A file with such keys, one per line.",
)
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    help="Let web pages of this origin call the server; * allows all.  [default: none]",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    help="A name that requests may call the server by; may be given several times.  [default: any, "
    "but without API keys on this machine alone only localhost]",
)
@settings_option("--max-body", "max_body_bytes", type=size, help="Largest body.  [default: 4 MiB]")
@settings_option("--max-prompts", type=int, help="Most prompts in one request.  [default: 256]")
@settings_option(
    "--ignore-unknown-fields",
    is_flag=True,
    default=None,
    help="Ignore fields that octavo does not know, instead of refusing the request.",
)
@settings_option(
    "--trust-request-chat-template",
    is_flag=True,
    default=None,
    help="Run chat templates that requests bring along (sandboxed, but they can take long).",
)
@supervision_option(
    "--max-waiting",
    type=int,
    help="Requests that may wait to run; more are refused with 429.  [default: 1024]",
)
@supervision_option(
    "--stall-seconds",
    type=float,
    help="After this long without a step while requests wait, /health answers 503.  [default: 30]",
)
@supervision_option(
    "--hang-seconds", type=float, help="After this long, the engine is replaced.  [default: 300]"
)
@listening_option(
    "--drain-seconds",
    type=float,
    help="After SIGTERM, how long open requests may take to end.  [default: 30]",
)
@connections_option(
    "--max-connections",
    type=int,
    help="Open at once; more are refused with 503.  [default: 16384, or what open files allow]",
)
@connections_option(
    "--header-seconds",
    type=float,
    help="Timeout for a connection's first request, and for the headers of each.  [default: 20]",
)
@connections_option(
    "--body-seconds",
    type=float,
    help="Timeout for a body; each 4 KiB of it add a second.  [default: 30]",
)
@connections_option(
    "--keep-alive-seconds",
    type=float,
    help="Idle time of a connection between two requests before it is closed.  [default: 30]",
)
@connections_option(
    "--unread-seconds",
    type=float,
    help="A client that reads nothing of its reply for this long is disconnected.  [default: 60]",
)
@settings_option(
    "--ping-seconds",
    type=float,
    help="Interval of keep-alive comments in event streams; 0: none.  [default: 15]",
)
@listening_option("--ssl-certfile", type=click.Path(dir_okay=False), help="Serve HTTPS.")
@listening_option("--ssl-keyfile", type=click.Path(dir_okay=False), help="The certificate's key.")
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="info logs a line per finished request. No line has prompts, outputs or keys.",
)
@settings_option(
    "--log-requests",
    is_flag=True,
    default=None,
    help="Also log a line per HTTP request of any kind.",
)
@engine_options()
def serve(
    model: str,
    model_names: tuple[str, ...],
    api_keys: tuple[str, ...],
    api_key_file: Path | None,
    cors_origins: tuple[str, ...],
    allowed_hosts: tuple[str, ...],
    log_format: Any,
    log_level: str,
    engine: dict[str, Any],
    supervision: dict[str, Any],
    settings: dict[str, Any],
    listening: dict[str, Any],
    connections: dict[str, Any],
) -> None:
    """Serve MODEL (demo, if none is given) over HTTP, as OpenAI's API.

    One line on stdout says when and where. SIGTERM, SIGHUP or Ctrl-C lets open requests end first.
    """
    import logging

    from octavo.config import make_config
    from octavo.server.engine_process.supervisor import Supervision
    from octavo.server.http.keys import ApiKeys, read_key_file
    from octavo.server.http.settings import LOOPBACK, ConnectionLimits, Listening, ServerSettings
    from octavo.server.observability.logs import set_up_logs
    from octavo.server.run import is_loopback, run_server

    keys = [*api_keys, *(read_key_file(api_key_file) if api_key_file else ())]
    address = Listening(**listening)
    if not keys and is_loopback(address.host):
        allowed_hosts = tuple(dict.fromkeys((*LOOPBACK, address.host, *allowed_hosts)))
    server_settings = ServerSettings(
        model_names or (model,),
        api_keys=ApiKeys(keys),
        cors_origins=cors_origins,
        allowed_hosts=tuple(host.lower() for host in allowed_hosts),
        **settings,
    )
    set_up_logs(log_format, getattr(logging, log_level.upper()))
    run_server(
        make_config(model, **engine),
        Supervision(**supervision),
        server_settings,
        address,
        ConnectionLimits(**connections),
        click.echo,
    )
