# SPDX-License-Identifier: MIT
"""``gdn verify --model FOLDER``: Transformers' own path against libgdn on a checkpoint.

Three comparisons: every GDN layer on the same input (`layer`) and inside the whole model (`in the model`, where the
differences of the layers before it have accumulated); the logits of every prompt position; greedy tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import model as models
from .console import Console, UsageError, need

_CHUNK = 64  # positions whose logits exist at once: a vocabulary is large
TEXT = Path(__file__).resolve().parent.parent / "data" / "prose.txt"


class _Captured(Exception):
    """Ends a forward once the hidden states before the language head are known: the logits of all positions at once
    would need tokens x vocabulary values."""

    def __init__(self, hidden: Any) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass
class _Seen:
    """What a GDN layer got and gave in Transformers' run."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _forward(model: Any, ids: Any, visit: Callable[..., None]) -> Any:
    """One forward over the prompt; visit(name, args, kwargs, output) after every GDN layer. -> hidden [1, T, D]."""
    import torch

    def capture(module: Any, args: Any) -> None:
        raise _Captured(args[0])

    hooks = [model.get_output_embeddings().register_forward_pre_hook(capture)]
    for name, layer in models.gdn_layers(model):
        hook = lambda m, args, kwargs, out, name=name: visit(name, args, kwargs, _first(out))  # noqa: E731
        hooks.append(layer.register_forward_hook(hook, with_kwargs=True))
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    except _Captured as captured:
        return captured.hidden
    finally:
        for hook in hooks:
            hook.remove()
    raise UsageError("verify: argument '--model': the model never called its language head")


def _rel(found: Any, expected: Any) -> float:
    found, expected = found.double(), expected.double()
    norm, error = expected.norm().item(), (found - expected).norm().item()
    return error / norm if norm else (0.0 if error == 0 else float("inf"))


def _logits_error(model: Any, found: Any, expected: Any) -> tuple[float, float]:
    """(relative L2, largest difference) of the logits of all positions, a few positions at a time."""
    import torch

    head, error, norm, largest = model.get_output_embeddings(), 0.0, 0.0, 0.0
    with torch.no_grad():
        for begin in range(0, expected.shape[1], _CHUNK):
            y = head(expected[:, begin : begin + _CHUNK]).double()
            difference = head(found[:, begin : begin + _CHUNK]).double() - y
            error += difference.square().sum().item()
            norm += y.square().sum().item()
            largest = max(largest, difference.abs().max().item())
    return ((error / norm) ** 0.5 if norm else float("inf")), largest


def check(model: Any, ids: list[int], new_tokens: int, tolerance: float, progress: Any) -> dict[str, Any]:
    """The three comparisons of one model and prompt."""
    import torch

    tensor = torch.tensor([ids], device=model.device)
    seen: dict[str, _Seen] = {}
    accumulated: dict[str, float] = {}

    def remember(name: str, args: Any, kwargs: Any, output: Any) -> None:
        seen[name] = _Seen(args, kwargs, output)
        progress.step(f"Transformers: {name}")

    def compare(name: str, args: Any, kwargs: Any, output: Any) -> None:
        accumulated[name] = _rel(output, seen[name].output)
        progress.step(f"libgdn: {name}")

    hidden = _forward(model, tensor, remember)
    expected = models.generate(model, ids, new_tokens)
    progress.step("greedy tokens, Transformers")

    models.enable(model)
    isolated = {}
    with torch.no_grad():
        for name, layer in models.gdn_layers(model):
            isolated[name] = _rel(_first(layer(*seen[name].args, **seen[name].kwargs)), seen[name].output)
            progress.step(f"one layer: {name}")
    rel_l2, largest = _logits_error(model, _forward(model, tensor, compare), hidden)
    found = models.generate(model, ids, new_tokens)
    progress.step("greedy tokens, libgdn")
    calls = models.require_used(model)

    generation = models.compare_generations(found, expected)
    fp32 = model.dtype == torch.float32
    layers = [{"name": n, "layer": isolated[n], "in_model": accumulated[n]} for n in isolated]
    problems = [
        f"{row['name']}: relative L2 error {max(row['layer'], row['in_model']):.2e}"
        for row in layers
        if not (row["layer"] <= tolerance and row["in_model"] <= tolerance)
    ]
    if not rel_l2 <= tolerance:
        problems.append(f"logits: relative L2 error {rel_l2:.2e}")
    if fp32 and not generation["tokens_equal"]:
        problems.append(f"greedy tokens differ, first at step {generation['first_difference']}")
    return {
        "ok": not problems,
        "problems": problems,
        "dtype": str(model.dtype).removeprefix("torch."),
        "prompt_tokens": len(ids),
        "tolerance": tolerance,
        "layers": layers,
        "logits": {"rel_l2": rel_l2, "max_abs": largest},
        "generation": generation,
        "calls_on_libgdn": calls,
    }


def run(args: argparse.Namespace, console: Console) -> int:
    if args.new_tokens < 1:
        raise UsageError(f"verify: argument '--new-tokens': found {args.new_tokens}, expected 1 or more")
    models.check_folder(args.model)
    need("torch", "--model")
    device, why = models.choose_device(args.device)
    models.exact_products()
    console.line(f"device: {device} ({why})")
    model = models.load_model(args.model, args.dtype, device)
    layers = models.gdn_layers(model)
    if not layers:
        raise UsageError(f"verify: argument '--model': {type(model).__name__} has no Gated DeltaNet layer")
    ids, kind = models.prompt_tokens(args.model, args.text or TEXT, args.tokens, models.vocabulary(model))
    with console.progress(3 * len(layers) + 2, "verify --model") as progress:
        result = check(model, ids, args.new_tokens, args.tol, progress)
    rows = [(row["name"], f"{row['layer']:.2e}", f"{row['in_model']:.2e}") for row in result["layers"]]
    title = f"{type(model).__name__}, {result['dtype']}, {len(ids)} tokens ({kind}): relative L2 error of libgdn"
    console.table(("GDN layer", "layer", "in the model"), rows, title)
    logits, tokens = result["logits"], result["generation"]
    equal = "equal" if tokens["tokens_equal"] else f"first difference at step {tokens['first_difference']}"
    console.line(f"logits: relative L2 {logits['rel_l2']:.2e}, largest difference {logits['max_abs']:.2e}")
    console.line(
        f"{args.new_tokens} greedy tokens: {equal}; smallest margin of a decision {tokens['smallest_margin']:.2e}"
    )
    for problem in result["problems"]:
        console.line(f"FAILED {problem} (tolerance {args.tol:g})")
    if result["ok"]:
        console.line(f"ok: everything within a relative L2 error of {args.tol:g}")
    console.document(result)
    return 0 if result["ok"] else 1
