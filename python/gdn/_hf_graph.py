# SPDX-License-Identifier: MIT
"""Decode steps of an enabled model as one CUDA graph (gdn.hf.graph_decode)."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from . import _capi


def _refuse(argument: str, found: str, expected: str) -> None:
    raise _capi.InvalidArgumentError(f"gdn.hf.graph_decode: argument '{argument}': found {found}, expected {expected}")


class GraphDecode:
    """One decode step of a model per call; from the second call on a cache, the replay of a CUDA graph.

    The cache is a ``transformers.StaticCache`` that the model has been prefilled with (its tensors keep their
    addresses). All sequences of the batch have the same length: prompts without padding.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._cache: weakref.ref[Any] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._token: Tensor | None = None
        self._logits: Tensor | None = None
        self._left = 0  # tokens that the cache has room for

    def __call__(self, input_ids: Tensor, past_key_values: Any) -> Tensor:
        """Logits ``[B, 1, vocabulary]`` in the model's dtype after ``input_ids`` ``[B, 1]`` (int64, on its GPU).

        The next call overwrites them. Raises InvalidArgumentError for other input_ids, a cache that is not a prefilled
        StaticCache, or a full one.
        """
        if input_ids.dim() != 2 or input_ids.shape[1] != 1 or not input_ids.is_cuda:
            _refuse("input_ids", f"shape {tuple(input_ids.shape)} on {input_ids.device}", "[B, 1] on a CUDA device")
        with torch.no_grad():
            known = self._cache is not None and self._cache() is past_key_values
            if not known or self._token is None or self._token.shape != input_ids.shape:
                return self._first(input_ids, past_key_values)
            self._room()
            self._token.copy_(input_ids)
            if self._graph is None:
                # The capture runs nothing; the replay below is this call's step.
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph):
                    self._logits = self._step(past_key_values)
            self._graph.replay()
            return self._logits

    def _room(self) -> None:
        if self._left < 1:
            _refuse("past_key_values", "a full StaticCache", "room for one more token")
        self._left -= 1

    def _first(self, input_ids: Tensor, cache: Any) -> Tensor:
        """A step without a graph: what allocates and tunes on first use does it here."""
        attention = self._attention(cache)
        self._graph, self._logits, self._cache = None, None, weakref.ref(cache)
        self._left = attention.keys.shape[2] - int(attention.cumulative_length)
        self._room()
        self._token = input_ids.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            logits = self._step(cache)
        torch.cuda.current_stream().wait_stream(side)
        return logits

    @staticmethod
    def _attention(cache: Any) -> Any:
        """The cache's first layer of keys and values."""
        for layer in getattr(cache, "layers", ()):
            if (
                isinstance(getattr(layer, "cumulative_length", None), Tensor)
                and getattr(layer, "keys", None) is not None
            ):
                return layer
        found = type(cache).__name__
        _refuse("past_key_values", f"{found} without a filled layer of fixed length", "a prefilled StaticCache")

    def _step(self, cache: Any) -> Tensor:
        # Positions and mask come from the length on the device, so that a replay finds them moved on.
        attention, token = self._attention(cache), self._token
        length = attention.cumulative_length
        batch, columns = token.shape[0], attention.keys.shape[2]
        positions = length.view(1, 1).expand(batch, 1)
        mask = (
            (torch.arange(columns, device=token.device) <= length).view(1, 1, 1, columns).expand(batch, 1, 1, columns)
        )
        return self.model(
            input_ids=token,
            position_ids=positions,
            attention_mask={"full_attention": mask, "linear_attention": None},
            past_key_values=cache,
            use_cache=True,
        ).logits
