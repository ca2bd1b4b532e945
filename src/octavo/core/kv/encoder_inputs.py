"""Finding the encoder's K and V by the input that they were computed from."""

from __future__ import annotations

from octavo.core.prefix_node import PrefixNode, same_prefix


class EncoderInputs:
    """Owns the index from encoder inputs to blocks. It holds no reference to any block.

    Every token of an input attends to all others, so only a whole input is worth finding: once one
    of its blocks is overwritten, the others are forgotten. If an input was computed twice, the
    blocks of the first time are indexed, and the others are not.
    """

    def __init__(self) -> None:
        self._inputs: dict[bytes, tuple[PrefixNode, list[list[int]]]] = {}
        self._nodes: dict[int, PrefixNode] = {}  # by block id

    def __len__(self) -> int:
        return len(self._inputs)

    def find(self, node: PrefixNode) -> list[list[int]] | None:
        """The blocks that hold this input, by cross-attention group, if it is cached."""
        entry = self._inputs.get(node.key)
        return None if entry is None or not same_prefix(entry[0], node) else entry[1]

    def add(self, node: PrefixNode, block_ids: list[list[int]]) -> bool:
        """Add an input whose KV has been computed.

        False if it is in the index already, or another input with the same key is.
        """
        if node.key in self._inputs:
            return False
        self._inputs[node.key] = (node, [list(ids) for ids in block_ids])
        self._nodes.update((block_id, node) for ids in block_ids for block_id in ids)
        return True

    def owner(self, block_id: int) -> PrefixNode | None:
        """The input that a block belongs to, if it is indexed."""
        return self._nodes.get(block_id)

    def forget(self, node: PrefixNode) -> list[int]:
        """Remove an input from the index. Returns its blocks; none if it is not indexed."""
        found = self.find(node)
        if found is None:
            return []
        del self._inputs[node.key]
        block_ids = [block_id for ids in found for block_id in ids]
        for block_id in block_ids:
            del self._nodes[block_id]
        return block_ids

    def clear(self) -> None:
        """Forget all inputs."""
        self._inputs.clear()
        self._nodes.clear()

    def block_ids(self) -> set[int]:
        """The blocks of all inputs; for inspection."""
        return set(self._nodes)
