"""Third-party clients against a real server: `make test-clients`.

Each client has its own environment, created on the first run under OCTAVO_CLIENT_ENVIRONMENTS
(default: .venv/clients). Needs a package index, and node and npm for OpenAI's JavaScript client.
Prints a line for each client; the exit status is 1 if one of them failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent))

from octavo.demo import demo_model_path  # noqa: E402
from server.live_server import live_server  # noqa: E402

SECONDS = 600  # time limit of one client's test
LAST_LINES = 25  # of the output of a failed one


@dataclass(frozen=True)
class Client:
    """A client library, and the program that tests it with a URL and the model directory."""

    name: str
    script: str
    requirements: tuple[str, ...]

    @property
    def is_node(self) -> bool:
        return self.script.endswith(".mjs")


CLIENTS = (
    Client("openai (node)", "openai_node.mjs", ("openai@^7.55.0",)),
    Client("openai", "use_openai.py", ("openai>=3.50,<4", "pydantic>=2")),
    Client(
        "langchain-openai", "use_langchain.py", ("langchain-openai>=1.7,<2", "langchain>=1.4,<2")
    ),
    Client("anthropic", "use_anthropic.py", ("anthropic>=2,<3",)),
    # Later versions need a certifi that not every index has.
    Client("litellm", "use_litellm.py", ("litellm>=1.100,<1.107", "mcp>=2")),
    Client("instructor", "use_instructor.py", ("instructor>=1.11",)),
    Client("pydantic-ai", "use_pydantic_ai.py", ("pydantic-ai-slim[openai]>=1",)),
    Client("openai-agents", "use_openai_agents.py", ("openai-agents>=0.4",)),
    Client("llama-index", "use_llama_index.py", ("llama-index-llms-openai-like>=0.8,<0.9",)),
    Client("smolagents", "use_smolagents.py", ("smolagents[openai]>=1.26,<2",)),
    Client("lm-eval", "use_lm_eval.py", ("lm-eval[api]>=0.4.13,<0.5", "transformers>=5")),
    # torch first: guidellm alone would install the build for GPUs if the index has it.
    Client("guidellm", "use_guidellm.py", ("torch==2.13.0", "guidellm>=0.8.1,<0.9")),
)


def prepare(client: Client, environments: Path) -> list[str]:
    """Create the client's environment if necessary; returns the command that runs its program."""
    place = environments / Path(client.script).stem
    done = place / f"installed {' '.join(client.requirements)}".replace("/", "_")
    if client.is_node:
        place.mkdir(parents=True, exist_ok=True)
        # node looks for libraries next to the program.
        program = place / client.script
        program.write_text((HERE / client.script).read_text(encoding="utf-8"), encoding="utf-8")
        if not done.exists():
            install = ["npm", "install", "--silent", "--no-save", "--prefix", str(place)]
            subprocess.run([*install, *client.requirements], check=True)
            done.touch()
        return ["node", str(program)]
    python = place / "bin" / "python"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        for requirement in client.requirements:
            subprocess.run([python, "-m", "pip", "install", "--quiet", requirement], check=True)
        done.touch()
    return [str(python), str(HERE / client.script)]


def main() -> int:
    chosen = sys.argv[1:]
    environments = Path(os.environ.get("OCTAVO_CLIENT_ENVIRONMENTS", ROOT / ".venv" / "clients"))
    model = demo_model_path()
    num_failed = 0
    # In float32: in bfloat16, scores depend on the batch where the CPU has matrix units.
    options = ("--log-level", "warning", "--num-blocks", "1024", "--dtype", "float32")
    with (
        tempfile.TemporaryDirectory() as files,
        live_server(*options, "--files-dir", files) as server,
    ):
        for client in CLIENTS:
            if chosen and client.name not in chosen:
                continue
            try:
                command = prepare(client, environments)
                run = subprocess.run(
                    [*command, server.url, str(model)],
                    capture_output=True,
                    text=True,
                    timeout=SECONDS,
                )
                output, ok = run.stdout + run.stderr, run.returncode == 0
            except (OSError, subprocess.SubprocessError) as error:
                output, ok = str(error), False
            num_failed += not ok
            last = run.stdout.strip().splitlines()[-1:] if ok else []
            print(f"{client.name:<18}{'ok' if ok else 'FAILED':<8}{''.join(last)}", flush=True)
            if not ok:
                print("\n".join(f"    {line}" for line in output.splitlines()[-LAST_LINES:]))
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
