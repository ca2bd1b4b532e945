"""The `octavo` command: a group of subcommands, and its exit codes.

Neither importing this module nor `octavo --help` imports a command. A user's mistake ends in one
line on stderr, never in a traceback.
"""

from __future__ import annotations

import errno
import sys
from collections import UserDict
from importlib import import_module
from typing import Any, NoReturn

import click

from octavo import __version__
from octavo.cli import stdout
from octavo.errors import OctavoError

# Name -> the module in octavo.cli, and what `octavo --help` says.
COMMANDS = {
    "bench": ("bench", "Measure throughput, latency and memory waste."),
    "calibrate": ("simulate", "Fit the simulation's cost model to measured steps."),
    "chat": ("chat", "Talk with a model in the terminal."),
    "generate": ("generate", "Continue prompts."),
    "memory": ("memory", "Print how a model's memory would be divided."),
    "models": ("models", "List the model families and the options that octavo knows."),
    "plan": ("simulate", "Find the fewest GPUs that serve a rate within a target."),
    "reproduce": ("reproduce", "Draw the paper's figures."),
    "run-batch": ("run_batch", "Answer a file of requests in OpenAI's batch format."),
    "serve": ("serve", "Serve a model over HTTP, as OpenAI's API."),
    "simulate": ("simulate", "Run the real scheduler and KV cache manager on a virtual clock."),
}
EXIT_ERROR = 1  # an OctavoError
EXIT_INTERRUPTED = 130  # Ctrl-C; a usage error is click's own 2


class Commands(UserDict[str, Any]):
    """`COMMANDS` as click takes them; each is imported when it is used."""

    def __getitem__(self, name: str) -> click.Command:
        module, _ = self.data[name]
        command: click.Command = getattr(
            import_module(f"octavo.cli.{module}"), name.replace("-", "_")
        )
        return command


class OctavoGroup(click.Group):
    """Turns errors into one line on stderr and an exit code."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        kwargs["standalone_mode"] = False
        try:
            status = super().main(*args, **kwargs)
            stdout.flush()
        except OctavoError as error:
            fail(f"error: {error}", EXIT_ERROR)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            fail("interrupted", EXIT_INTERRUPTED)
        except OSError as error:
            if error.errno not in stdout.UNWRITABLE:
                raise
            stdout.leave()
            if error.errno == errno.EPIPE:  # its reader has gone; click does the same
                sys.exit(EXIT_ERROR)
            fail(f"error: the output cannot be written ({error.strerror})", EXIT_ERROR)
        sys.exit(status if isinstance(status, int) else 0)


def fail(message: str, exit_code: int) -> NoReturn:
    line = " ".join(message.split())
    # Names come from the files of models, and could be sequences that terminals obey.
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in line)
    click.echo(shown, err=True)
    sys.exit(exit_code)


@click.group(
    cls=OctavoGroup,
    commands=Commands(COMMANDS),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="octavo")
def main() -> None:
    """octavo serves large language models with PagedAttention.

    A MODEL is a directory in Hugging Face format, a GGUF file, a hub id, or "demo", the small
    model that comes with octavo.
    """


if __name__ == "__main__":
    main()
