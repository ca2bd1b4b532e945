"""Table 1: model sizes, server configurations, and the KV slots that they leave."""

from __future__ import annotations

from pathlib import Path

from octavo.config import GIB
from octavo.simulation.drawing import BLUE, canvas
from octavo_paper.drawing import bars
from octavo_paper.jobs import Job, Results
from octavo_paper.paper_values import TABLE_1
from octavo_paper.report import Report, Row, Table, Target
from octavo_paper.scale import Scale
from octavo_paper.servers import BLOCK_SIZE, SERVERS

NAME = "table1"
TITLE = "Table 1: model sizes and server configurations"
GB = 10**9


def jobs(scale: Scale) -> list[Job]:
    return []


def make(results: Results, scale: Scale, folder: Path) -> Report:
    slots, memory, parameters = [], [], []
    for model, paper in TABLE_1.items():
        server = SERVERS[model]
        budget = server.budget()
        # What the model may use: all devices, without the null block.
        kv_cache = server.num_gpus * budget.num_blocks * budget.block_bytes
        num_slots = budget.num_blocks * BLOCK_SIZE / 1000
        slots.append(Row(model, num_slots, paper["kv_slots"], Target(1, "percent")))
        memory.append(Row(model, kv_cache / GIB, paper["kv_cache"]))
        weights = server.num_gpus * budget.weights
        parameters.append(Row(model, weights / GB, paper["parameters"]))
    with canvas(folder, NAME) as (_, [axes]):
        bars(
            axes,
            list(TABLE_1),
            {"octavo": [row.ours or 0.0 for row in slots]},
            {"octavo": BLUE},
            {"octavo": [row.paper for row in slots]},
        )
        axes.set_ylabel("KV slots, thousands of tokens")
        axes.set_title("KV slots; dotted: the paper")
    return Report(
        NAME,
        TITLE,
        "Counted: octavo's memory budget, from each model's shapes and the memory that CUDA "
        "reports for the cards.",
        [
            Table("KV slots, thousands of tokens", slots),
            Table("Memory for the KV cache, GiB (the paper prints GB)", memory, 1),
            Table("Parameters, GB", parameters, 1),
        ],
        [NAME],
        [
            "As in the authors' artifact, 95% of a device (39.39 and 79.15 GiB) may be used, and "
            "weights, the logits of a step of 2,560 tokens (held twice) and 1 GiB of workspace "
            "are paid first.",
        ],
    )
