"""What tests of products compare results with."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from octavo.ops.epilogue import Epilogue, apply_epilogue


def expected(x: Tensor, weight: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
    """epilogue(x W^T + b), in float64."""
    y = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return apply_epilogue(y, epilogue)


def relative_error(actual: Tensor, wanted: Tensor) -> float:
    """||actual - wanted|| / ||wanted||."""
    return float((actual.double() - wanted.double()).norm() / wanted.double().norm())
