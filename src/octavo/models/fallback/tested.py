"""Which model types were served through transformers with its own tokens, and which are refused.

`tested.json` is what the sweep of tests/fallback last found out; docs/models.md has it as a table.
Imports no torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

RECORD = Path(__file__).with_name("tested.json")


@dataclass(frozen=True, slots=True)
class Tested:
    """The record of a sweep."""

    transformers: str  # the version
    served: dict[str, str]  # the class of each type
    refused: dict[str, str]  # why

    def tables(self) -> str:
        """Both as Markdown."""
        served = [f"| {name} | {architecture} |" for name, architecture in self.served.items()]
        refused = [f"| {name} | {reason} |" for name, reason in self.refused.items()]
        return "\n".join(
            [
                f"With transformers {self.transformers}, {len(served)} model types are served:",
                "",
                "| model_type | class |",
                "|---|---|",
                *served,
                "",
                f"and {len(refused)} are refused:",
                "",
                "| model_type | why |",
                "|---|---|",
                *refused,
            ]
        )


def read_tested() -> Tested:
    """The record that comes with octavo."""
    return Tested(**json.loads(RECORD.read_text(encoding="utf-8")))
