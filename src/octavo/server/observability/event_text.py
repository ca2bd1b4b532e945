"""Texts of the engine's events, for the dashboard and the log."""

from __future__ import annotations

from octavo.engine.events import Admitted, Copied, Event, Evicted, Forked, Preempted, Swapped

SHOWN_BLOCKS = 6  # listed per line; if there are more, only their number is given

# Why a lookup in the prefix cache ended; see `octavo.engine.events.Admitted`.
LOOKUP_ENDS = {
    "complete": "the whole prompt is cached, but for the token that must be computed",
    "unknown": "the next block has not been computed before",
    "evicted": "the next block was cached once, and has been overwritten",
    "differs": "the next block is cached for other tokens, or fewer; the equal ones were copied",
    "window": "the next block is cached, but blocks that a sliding window needs are gone",
    "read": "log-probabilities of the prompt, or an embedding, need what follows computed",
    "avoided": "what was found before may have made the request fail, so all is computed",
    "off": "prefix caching is off",
}


def describe(event: Event) -> tuple[str, str, str]:
    """(kind, title, text); the kind is a word for programs."""
    match event:
        case Admitted():
            again = ", again" if event.num_preemptions else ""
            return (
                "admit",
                "admitted" + again,
                f"{event.request_id}: {event.num_hit_tokens} of {event.num_tokens} tokens from "
                f"the cache; {LOOKUP_ENDS.get(event.lookup_end, event.lookup_end)}",
            )
        case Preempted():
            return "preempt", "preempted", f"{event.request_id} by {_preemption(event)}"
        case Copied():
            return "copy", "copied", f"before a write: {_pairs(event.blocks)}"
        case Evicted():
            return "evict", "evicted", f"cached {_blocks(event.block_ids)}"
        case Swapped():
            return "swap", f"swapped {event.direction}", _pairs(event.blocks)
        case Forked():
            count = len(event.pairs)
            return "fork", "forked", f"{count} sequence{'s' * (count != 1)}; all blocks shared"


def _preemption(event: Preempted) -> str:
    what = (
        f"{event.num_blocks} blocks moved"
        if event.mode == "swap"
        else f"{event.num_tokens} tokens to compute again"
    )
    return f"{event.mode}: {what}, {1e3 * event.cost_seconds:.1f} ms to come back"


def _blocks(block_ids: list[int]) -> str:
    if len(block_ids) == 1:
        return f"block {block_ids[0]}"
    if len(block_ids) > SHOWN_BLOCKS:
        return f"{len(block_ids)} blocks"
    return "blocks " + ", ".join(map(str, block_ids))


def _pairs(pairs: list[tuple[int, int]]) -> str:
    if len(pairs) > SHOWN_BLOCKS:
        return f"{len(pairs)} blocks"
    return ", ".join(f"{source} → {target}" for source, target in pairs)
