# SPDX-License-Identifier: MIT
"""One path of the demo in a process of its own: loads the checkpoint, generates, writes tokens, logits, times, memory.

Progress goes to standard output as lines of JSON, which run.py turns into a display.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from gdn.cli import model as models
from gdn.cli.console import CheckError, UnavailableError, UsageError


def say(phase: str, done: int = 0, total: int = 0) -> None:
    """One progress line."""
    print(json.dumps({"phase": phase, "done": done, "total": total}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", choices=("transformers", "libgdn"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    say("load")
    import numpy as np
    import torch

    import gdn

    device, why = models.choose_device(args.device)
    models.exact_products()
    begin = time.perf_counter()
    model = models.load_model(args.model, args.dtype, device)
    load = time.perf_counter() - begin
    if not models.gdn_layers(model):
        raise UsageError(f"argument '--model': {type(model).__name__} has no Gated DeltaNet layer")
    ids, kind = models.prompt_tokens(args.model, args.text, args.tokens, models.vocabulary(model))
    if args.path == "libgdn":
        models.enable(model)  # gdn.hf.enable(model): the one line
    result = models.generate(model, ids, args.new_tokens, say)
    calls = models.require_used(model) if args.path == "libgdn" else {}
    info = {
        "prompt_tokens": len(ids),
        "tokenizer": kind,
        "dtype": str(model.dtype).removeprefix("torch."),
        "model": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "device": f"{device} ({why})",
        "gpu": None if device == "cpu" else why,
        "threads": torch.get_num_threads(),
        "libgdn_threads": gdn.get_num_threads(),
        "isa": gdn.get_isa(),
        "load": load,
        "prefill": result.prefill,
        "first_token": result.first_token,
        "decode": result.decode,
        "calls": calls,
        "peak_memory": models.peak_memory() if device == "cpu" else torch.cuda.max_memory_allocated(device),
    }
    np.savez(args.out, tokens=np.array(result.tokens, np.int64), logits=result.logits, info=np.array(json.dumps(info)))
    say("done")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CheckError as error:
        print(f"demo: {error}", file=sys.stderr)
        sys.exit(1)
    except UsageError as error:
        print(f"demo: {error}", file=sys.stderr)
        sys.exit(2)
    except UnavailableError as error:
        print(f"demo: {error}", file=sys.stderr)
        sys.exit(3)
