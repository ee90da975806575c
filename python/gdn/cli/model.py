# SPDX-License-Identifier: MIT
"""Checkpoints for `gdn verify --model` and the demo: loading, prompts, greedy generation with its times."""

from __future__ import annotations

import json
import resource
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .console import CheckError, UnavailableError, UsageError, need

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
Report = Callable[[str, int, int], None]  # (phase, done, total)


def check_folder(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder, or what is wrong with the folder."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise UsageError(
            f"argument '--model': found no folder {folder}, expected a checkpoint (config.json + safetensors)"
        )
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"argument '--model': cannot read {path} ({error})") from None
    if not isinstance(config, dict) or not config.get("model_type"):
        raise UsageError(f"argument '--model': {path} names no model_type, expected a Transformers config")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise UsageError(f"argument '--model': found no weights in {folder}, expected *.safetensors")
    return config


def load_model(folder: Path, dtype: str = "fp32", device: str = "cpu") -> Any:
    """The checkpoint's text model with its language head, in eval mode; a multimodal checkpoint's text part."""
    config = check_folder(folder)
    torch = need("torch", "--model")
    transformers = need("transformers", "--model")
    from transformers.utils import logging

    logging.set_verbosity_error()  # the fallback notices: PyTorch's path is what is meant here
    logging.disable_progress_bar()
    kind = config.get("architectures") or [""]
    wanted: Any = "auto" if dtype == "auto" else getattr(torch, _DTYPES[dtype])
    loaders = [transformers.AutoModelForCausalLM]
    if kind[0].endswith("ForConditionalGeneration") or "text_config" in config:
        loaders.append(transformers.AutoModelForImageTextToText)
    errors = []
    for loader in loaders:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model, report = loader.from_pretrained(
                    folder, dtype=wanted, local_files_only=True, output_loading_info=True
                )
        except (ValueError, KeyError, OSError, ImportError, RuntimeError) as error:
            errors.append(f"{loader.__name__}: {error}")
            continue
        if report.get("missing_keys"):  # weights that would be random: no check could mean anything
            errors.append(
                f"{loader.__name__}: {len(report['missing_keys'])} weights missing, {min(report['missing_keys'])} first"
            )
            continue
        return model.to(device).eval()
    raise UsageError(f"argument '--model': Transformers cannot load {folder}: " + "; ".join(errors))


def gdn_layers(model: Any) -> list[tuple[str, Any]]:
    """(name, module) of the Gated DeltaNet layers."""
    return [(name, m) for name, m in model.named_modules() if type(m).__name__.endswith("GatedDeltaNet")]


def decoder_layers(model: Any) -> list[Any]:
    """The text model's decoder layers, in order."""
    return [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]


def prompt_tokens(folder: Path, text: Path, limit: int, vocab_size: int) -> tuple[list[int], str]:
    """At most `limit` tokens of a text: the checkpoint's tokenizer where it has one, else one token per byte."""
    try:
        data = text.read_bytes()
    except OSError as error:
        raise UsageError(f"argument '--text': cannot read {text}: {error.strerror}") from None
    if limit < 1:
        raise UsageError(f"argument '--tokens': found {limit}, expected 1 or more")
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        transformers = need("transformers", "--model")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        ids, kind = list(tokenizer(data.decode("utf-8", "replace")).input_ids), "the checkpoint's tokenizer"
    else:
        ids, kind = list(data), "one token per byte"
    if not ids:
        raise UsageError(f"argument '--text': found no token in {text}")
    if max(ids) >= vocab_size:
        raise UsageError(
            f"argument '--text': found token {max(ids)}, expected less than the vocabulary of {vocab_size}"
        )
    return ids[:limit], kind


def vocabulary(model: Any) -> int:
    return model.get_output_embeddings().weight.shape[0]


@dataclass
class Generation:
    """Greedy tokens, the logits that chose them [steps, vocab] fp32, and times in seconds."""

    tokens: list[int] = field(default_factory=list)
    logits: Any = None
    prefill: float = 0.0
    first_token: float = 0.0
    decode: float = 0.0  # of the tokens after the first


def generate(model: Any, ids: list[int], new_tokens: int, report: Report | None = None) -> Generation:
    """`new_tokens` greedy tokens after the prompt `ids`, by the model's own generate()."""
    import torch
    from transformers.generation.streamers import BaseStreamer

    result, layers = Generation(), decoder_layers(model)
    stamps: list[float] = []
    started = 0.0

    class Stamps(BaseStreamer):
        """Time of every token; the prompt comes first."""

        def put(self, value: Any) -> None:
            stamps.append(time.perf_counter())
            if report and len(stamps) > 1:
                report("decode", len(stamps) - 1, new_tokens)

        def end(self) -> None:
            """Nothing to flush."""

    def before_model(module: Any, args: Any, kwargs: Any) -> None:
        nonlocal started
        if not result.prefill:
            started = time.perf_counter()

    def after_model(module: Any, args: Any, output: Any) -> None:
        if not result.prefill:
            _synchronize(model)
            result.prefill = time.perf_counter() - started

    def after_layer(at: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            if report and not result.prefill:
                report("prefill", at + 1, len(layers))

        return hook

    hooks = [model.register_forward_pre_hook(before_model, with_kwargs=True), model.register_forward_hook(after_model)]
    hooks += [layer.register_forward_hook(after_layer(i)) for i, layer in enumerate(layers)]
    settings = model.generation_config
    settings.eos_token_id = None  # every run gives the same number of tokens
    settings.pad_token_id = 0 if settings.pad_token_id is None else settings.pad_token_id
    begin = time.perf_counter()
    try:
        prompt = torch.tensor([ids], device=model.device)
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            temperature=None,
            top_p=None,
            top_k=None,
            use_cache=True,
            return_dict_in_generate=True,
            output_logits=True,
            streamer=Stamps(),
        )
    finally:
        for hook in hooks:
            hook.remove()
    result.tokens = output.sequences[0, len(ids) :].tolist()
    result.logits = torch.stack([step[0] for step in output.logits]).float().cpu().numpy()
    result.first_token = stamps[1] - begin
    result.decode = stamps[-1] - stamps[1]
    return result


def _synchronize(model: Any) -> None:
    if model.device.type == "cuda":
        import torch

        torch.cuda.synchronize(model.device)


def peak_memory() -> int:
    """Peak resident bytes of this process: VmHWM where there is one, since ru_maxrss starts from the parent's."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def compare_generations(found: Generation, expected: Generation) -> dict[str, Any]:
    """Tokens equal, logit differences over the steps with the same history, the smallest margin of a decision."""
    import numpy as np

    steps = 0
    for a, b in zip(found.tokens, expected.tokens, strict=True):
        steps += 1  # the step that first differs still had the same history
        if a != b:
            break
    x, y = found.logits[:steps].astype(np.float64), expected.logits[:steps].astype(np.float64)
    top = np.partition(y, -2, axis=-1)[:, -2:]
    return {
        "tokens_equal": found.tokens == expected.tokens,
        "first_difference": None if found.tokens == expected.tokens else steps - 1,
        "max_logit_difference": float(np.abs(x - y).max()),
        "logits_rel_l2": float(np.linalg.norm(x - y) / np.linalg.norm(y)),
        "largest_logit": float(np.abs(y).max()),
        "smallest_margin": float((top[:, 1] - top[:, 0]).min()),
        "different_tokens": len(set(expected.tokens)),
    }


def choose_device(wanted: str | None = None) -> tuple[str, str]:
    """("cuda:N" or "cpu", why). wanted: cpu, cuda or cuda:N, refused where it cannot be had; None: a GPU where torch
    sees one and this libgdn has the CUDA backend."""
    from .. import _capi
    from .device import parse_device, require

    torch = need("torch", "--model")
    if wanted is not None:
        number = parse_device(wanted)
        if number is None:
            return "cpu", "asked for"
        require(number)
        return f"cuda:{number}", torch.cuda.get_device_name(number)
    gpu, backend = torch.cuda.is_available(), _capi.has_cuda()
    if gpu and backend:
        return "cuda:0", torch.cuda.get_device_name(0)
    if gpu:
        return "cpu", "there is a GPU, but this libgdn was built without its CUDA backend"
    return "cpu", "no CUDA GPU" + ("" if backend else "; this libgdn was built without its CUDA backend")


def exact_products() -> None:
    """fp32 matrix products in fp32: TF32 keeps 10 bits, and comparisons of fp32 paths would only measure that."""
    torch = need("torch", "--model")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def enable(model: Any) -> None:
    """Puts the model on libgdn."""
    try:
        from .. import hf
    except ImportError as error:
        raise UnavailableError(f"--model needs gdn.hf with its PyTorch operators ({error})") from None
    hf.enable(model)


def require_used(model: Any) -> dict[str, int]:
    """Calls that the model made on libgdn; none at all means that the swap did nothing, and the comparison is void."""
    from .. import hf

    counts = hf.stats(model)
    if not counts.get("chunk_forward") and not counts.get("recurrent"):
        raise CheckError(f"gdn.hf.enable took no effect: the model made these calls on libgdn: {counts}")
    return counts
