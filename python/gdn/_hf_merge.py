# SPDX-License-Identifier: MIT
"""Several projections of one input as one matrix product (gdn.hf.enable with merge_projections)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Merged:
    """Linear layers whose weights lie one behind the other in one allocation.

    The parameters stay what they are, with their values: only their memory moves. Nothing of it is held here, and every
    call looks whether it is still so (a model that was moved, cast or copied has weights of its own).
    """

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        self.names = names
        weights = [module._modules[name].weight for name in names]
        self.sizes = [weight.shape[0] for weight in weights]
        joined = torch.cat([weight.data for weight in weights])
        for weight, part in zip(weights, joined.split(self.sizes), strict=True):
            weight.data = part

    @staticmethod
    def takes(module: nn.Module, names: tuple[str, ...]) -> bool:
        linears = [module._modules.get(name) for name in names]
        if not all(type(part) is nn.Linear and part.bias is None for part in linears):
            return False
        weights = [part.weight for part in linears]
        first = weights[0]
        return all(
            type(w) is nn.Parameter and not w.is_meta and w.is_contiguous()
            and (w.dtype, w.device, w.shape[1]) == (first.dtype, first.device, first.shape[1])
            for w in weights
        )  # fmt: skip

    def split_linear(self, module: nn.Module, x: Tensor) -> tuple[Tensor, ...] | None:
        """The projections of x, as views of one product; None if they have to be taken one by one."""
        parts, address = [module._modules[name] for name in self.names], 0
        first = parts[0]._parameters["weight"]
        for part, rows in zip(parts, self.sizes, strict=True):
            weight = part._parameters["weight"]
            plain = type(part) is nn.Linear and "forward" not in part.__dict__
            if not plain or part._forward_hooks or part._forward_pre_hooks or part._parameters["bias"] is not None:
                return None
            if weight.data_ptr() != (address or weight.data_ptr()) or weight.dtype != first.dtype:
                return None
            address = weight.data_ptr() + rows * weight.shape[1] * weight.element_size()
        rows, columns = sum(self.sizes), first.shape[1]
        if first.untyped_storage().nbytes() < (first.storage_offset() + rows * columns) * first.element_size():
            return None  # neighbours by chance, not of one allocation
        return F.linear(x, first.as_strided((rows, columns), (columns, 1))).split(self.sizes, -1)

    def undo(self, module: nn.Module) -> None:
        """Memory of its own for every weight again."""
        for name in self.names:
            weight = module._modules[name].weight
            if weight.untyped_storage().nbytes() != weight.numel() * weight.element_size():
                weight.data = weight.data.clone()
