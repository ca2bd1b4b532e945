"""The `octavo` command: a group of subcommands, and its exit codes.

Importing this module imports neither torch nor tokenizers: a command imports what it needs when it
runs. A user's mistake ends in one line on stderr, never in a traceback.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import click

from octavo import __version__
from octavo.cli.bench import bench
from octavo.cli.chat import chat
from octavo.cli.generate import generate
from octavo.cli.memory import memory
from octavo.cli.models import models
from octavo.cli.reproduce import reproduce
from octavo.cli.run_batch import run_batch
from octavo.cli.serve import serve
from octavo.cli.simulate import calibrate, plan, simulate
from octavo.errors import OctavoError

EXIT_ERROR = 1  # an OctavoError
EXIT_INTERRUPTED = 130  # Ctrl-C; a usage error is click's own 2


class OctavoGroup(click.Group):
    """Turns errors into one line on stderr and an exit code."""

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        kwargs["standalone_mode"] = False
        try:
            status = super().main(*args, **kwargs)
        except OctavoError as error:
            fail(f"error: {error}", EXIT_ERROR)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            fail("interrupted", EXIT_INTERRUPTED)
        sys.exit(status if isinstance(status, int) else 0)


def fail(message: str, exit_code: int) -> NoReturn:
    click.echo(" ".join(message.split()), err=True)
    sys.exit(exit_code)


@click.group(
    cls=OctavoGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="octavo")
def main() -> None:
    """octavo serves large language models with PagedAttention.

    A MODEL is a directory in Hugging Face format, a hub id, or "demo", the small model that comes
    with octavo.
    """


for command in (generate, chat, serve, run_batch, memory, bench, models, reproduce):
    main.add_command(command)
for command in (simulate, plan, calibrate):
    main.add_command(command)

if __name__ == "__main__":
    main()
