"""CurrentStep: what differs between steps of one padded size, for calls that are recorded once and made in each."""

from __future__ import annotations

import torch


class CurrentStep:
    """Step with `num_rows` rows, padded to `size`: tensors' first dimension is the padded rows'."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.size = 0

    def begin(self, num_rows: int, *, size: int) -> None:
        """Note the step's rows."""
        self.num_rows, self.size = num_rows, size

    def own_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Those of the step itself: a view."""
        if len(tensor) != self.size:
            raise ValueError(f"a tensor of {len(tensor)} rows is none of a step that is padded to {self.size}")
        return tensor[: self.num_rows]

    def clear_padding(self, tensor: torch.Tensor) -> None:
        """Zero the padding's rows, which nobody fills: what is not finite would reach other rows over the cache."""
        if self.num_rows < self.size:
            tensor[self.num_rows :].zero_()
