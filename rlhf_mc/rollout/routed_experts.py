"""The experts that vLLM's routers choose, recorded on a CPU for router replay. On GPUs vLLM keeps
such a record itself (enable_return_routed_experts), which its CPU runner does not have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from rlhf_mc.architectures.spec import ModelShape


class RoutedExperts:
    """The choices of one engine's routers, by request."""

    def __init__(self, shape: ModelShape) -> None:
        self._layers = shape.expert_layers
        self._dtype = np.uint8 if shape.choice_bytes == shape.experts_per_token else np.uint16
        self._step: dict[int, torch.Tensor] = {}
        """By layer, the choices of the last step: [tokens, k]."""
        self._parts: dict[int, list[tuple[int, np.ndarray]]] = defaultdict(list)
        """By request, of each step: the position of its first token, and its choices [tokens,
        layers, k]."""

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Take the choices of a layer's router for the tokens of a step. vLLM calls it in the
        forward pass."""
        self._step[layer_id] = topk_ids

    def record(self, requests: np.ndarray, positions: np.ndarray, offsets: np.ndarray) -> None:
        """Record the choices of a step. requests [R]: request numbers; positions [R]: of the first
        token of each request in its sequence; offsets [R + 1]: first row of each request."""
        rows = (
            torch.stack([self._step[layer] for layer in self._layers], 1)
            .numpy()
            .astype(self._dtype)
        )
        bounds = offsets.tolist()
        for request, position, first, end in zip(
            requests.tolist(), positions.tolist(), bounds, bounds[1:], strict=False
        ):
            self._parts[request].append((position, rows[first:end]))

    def take(self, request: int, num_tokens: int) -> np.ndarray:
        """Return the choices for the first num_tokens tokens of a request, [tokens, layers, k], and
        forget them. Those of a request that vLLM has computed again, since it lacked memory, are
        the last ones."""
        parts = self._parts.pop(request)
        choices = np.zeros((num_tokens, *parts[0][1].shape[1:]), self._dtype)
        is_known = np.zeros(num_tokens, np.bool_)
        for position, rows in parts:
            choices[position : position + len(rows)] = rows[: num_tokens - position]
            is_known[position : position + len(rows)] = True
        assert is_known.all(), (
            f"{int((~is_known).sum())} of {num_tokens} tokens of request {request} are not recorded"
        )
        return choices

    def forget(self, requests: Sequence[int]) -> None:
        """Forget the choices for requests that are aborted."""
        for request in requests:
            self._parts.pop(request, None)
