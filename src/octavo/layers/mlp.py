"""Feed-forward blocks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from octavo.layers.config import Activation, LayerInputConfig, MLPConfig
from octavo.layers.linear import LinearMethod, make_linear
from octavo.ops.epilogue import Epilogue
from octavo.ops.linear import LinearInput

PLAIN_EPILOGUES: dict[Activation, Epilogue] = {
    "relu": Epilogue.RELU,
    "gelu": Epilogue.GELU,
    "gelu_tanh": Epilogue.GELU_TANH,
    "silu": Epilogue.SILU,
}
GATED_EPILOGUES: dict[Activation, Epilogue] = {
    "silu": Epilogue.SILU_MUL,
    "gelu_tanh": Epilogue.GELU_TANH_MUL,
    "clamped_swiglu": Epilogue.CLAMPED_SWIGLU,
}


class DenseMLP(nn.Module):
    """Owns two projections with an activation between them; `up` of a gated one is merged."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        epilogues = GATED_EPILOGUES if config.kind == "gated" else PLAIN_EPILOGUES
        self.up = make_linear(config.up)
        self.epilogue = epilogues[config.activation]
        self.down = make_linear(config.down)

    @property
    def entry(self) -> LinearMethod:
        """See InputReader.entry."""
        return self.up

    @property
    def projections(self) -> Sequence[LinearMethod]:
        """What all tokens are multiplied by, one after the other."""
        return self.up, self.down

    def forward(self, hidden: LinearInput) -> Tensor:
        """[num_tokens, hidden_size] -> the same, or partial sums (LinearMethod.forward_partial)."""
        return self.down.project_partial(self.up.project_for(self.down, hidden, self.epilogue))


class LayerInput(nn.Module):
    """Owns the projections by which a layer takes in a token's vector for it."""

    def __init__(self, config: LayerInputConfig) -> None:
        super().__init__()
        self.gate = make_linear(config.gate)
        self._activation = config.activation
        self.output = make_linear(config.output)

    def forward(self, hidden: Tensor, vectors: Tensor) -> Tensor:
        """hidden [num_tokens, hidden_size], vectors [num_tokens, size] -> like hidden, or partial
        sums (LinearMethod.forward_partial)."""
        if hidden.device.type == "cuda":
            from octavo.ops.cuda.activation import apply_gate_to

            epilogue = GATED_EPILOGUES[self._activation]
            gated = apply_gate_to(self.gate.forward(hidden), vectors, epilogue)
        else:
            gated = self.gate.forward(hidden, PLAIN_EPILOGUES[self._activation]).mul_(vectors)
        return self.output.forward_partial(gated)
