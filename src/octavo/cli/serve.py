"""`octavo serve`: the HTTP server."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import click

from octavo.cli import stdout
from octavo.cli.options import engine_options, field_options, field_texts
from octavo.config import make_config
from octavo.errors import ConfigError
from octavo.server.engine_process.placement import Replication
from octavo.server.engine_process.supervision import Supervision
from octavo.server.http.keys import ApiKeys, read_key_file
from octavo.server.http.settings import LOOPBACK, ConnectionLimits, Listening, ServerSettings
from octavo.server.observability.logs import set_up_logs
from octavo.server.run import host_in_urls, is_loopback, run_server

logger = logging.getLogger(__name__)

OWN_OPTIONS = {"model_names", "api_keys", "admin_keys", "cors_origins", "allowed_hosts"}
SETTINGS_HELP = {
    name: text for name, text in field_texts(ServerSettings).items() if name not in OWN_OPTIONS
}
SUPERVISION_HELP = {
    name: text
    for name, text in field_texts(Supervision).items()
    if name in ("max_waiting", "stall_seconds", "hang_seconds")
}


@click.command()
@click.argument("model", default="demo")
@field_options("listening", (Listening,), field_texts(Listening))
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
    "--admin-key",
    envvar="OCTAVO_ADMIN_KEY",
    metavar="KEY",
    help="The key that /admin (drain, rolling restart) asks for.  [default: any of the API keys]",
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
@field_options("settings", (ServerSettings,), SETTINGS_HELP)
@field_options("connections", (ConnectionLimits,), field_texts(ConnectionLimits))
@field_options("replication", (Replication,), field_texts(Replication))
@field_options("supervision", (Supervision,), SUPERVISION_HELP)
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
@engine_options()
def serve(
    model: str,
    model_names: tuple[str, ...],
    api_keys: tuple[str, ...],
    api_key_file: Path | None,
    admin_key: str | None,
    cors_origins: tuple[str, ...],
    allowed_hosts: tuple[str, ...],
    log_format: Any,
    log_level: str,
    engine: dict[str, Any],
    supervision: dict[str, Any],
    replication: dict[str, Any],
    settings: dict[str, Any],
    listening: dict[str, Any],
    connections: dict[str, Any],
) -> None:
    """Serve MODEL (demo, if none is given) over HTTP, as OpenAI's API.

    One line on stdout says when and where. SIGTERM, SIGHUP or Ctrl-C lets open requests end first.
    """
    keys = [*api_keys, *(read_key_file(api_key_file) if api_key_file else ())]
    for variable, given in (("OCTAVO_API_KEY", keys), ("OCTAVO_ADMIN_KEY", admin_key)):
        if not given and variable in os.environ:  # the server would be open to all
            raise ConfigError(variable, "it is set, but holds no key; give one, or unset it")
    address = Listening(**listening)
    if not keys and is_loopback(address.host):
        allowed_hosts = tuple(
            dict.fromkeys((*LOOPBACK, host_in_urls(address.host), *allowed_hosts))
        )
    server_settings = ServerSettings(
        model_names or (model,),
        api_keys=ApiKeys(keys),
        admin_keys=ApiKeys([] if admin_key is None else [admin_key], "admin_key"),
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
        Replication(**replication),
        say,
    )


def say(text: str) -> None:
    """Write a line to stdout; to the log if that cannot be written, which is no reason not to
    serve."""
    try:
        click.echo(text)
    except OSError as error:
        stdout.leave()
        logger.warning("stdout cannot be written (%s): %s", error.strerror, text)
