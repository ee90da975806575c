# SPDX-License-Identifier: MIT
"""The ``gdn`` command.

    gdn info                 CPU, instruction sets, threads, GPUs, build
    gdn plan                 what a call would run, and why not something else
    gdn bench                time of every operator, beside the machine's own limits
    gdn verify               numeric regression check: cases, files of outputs, or a whole model

Exit codes: 0 ok, 1 a check failed, 2 wrong usage or input, 3 not supported here.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from .. import _capi
from .console import CheckError, Console, UnavailableError, UsageError

__all__ = ["FAILED", "OK", "UNSUPPORTED", "USAGE", "main"]

OK, FAILED, USAGE, UNSUPPORTED = range(4)
_COMMANDS = ("info", "plan", "bench", "verify")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gdn",
        description="libgdn: operators for Gated Delta Networks.",
        epilog="exit codes: 0 ok, 1 a check failed, 2 wrong usage or input, 3 not supported here",
    )
    parser.add_argument("--version", action="version", version=f"gdn {_capi.version()}")
    common = argparse.ArgumentParser(add_help=False)
    group = common.add_argument_group("everywhere")
    group.add_argument("--json", action="store_true", help="one JSON document on standard output")
    group.add_argument("--plain", action="store_true", help="plain text even where rich is installed")
    group.add_argument("--threads", type=int, default=0, metavar="N", help="threads of libgdn (0: the default)")
    group.add_argument("--isa", metavar="NAME", help="cap the instruction set: amx, avx512, avx2, neon, baseline")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name in _COMMANDS:
        importlib.import_module(f"{__name__}.{name}").add_parser(commands, common)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = _parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # --help and --version: 0, wrong usage: 2
        return int(stop.code or 0)
    if args.command is None:
        parser.print_help()
        return USAGE
    console = Console(json_output=args.json, plain=args.plain)
    try:
        if args.isa:
            _capi.set_isa(args.isa)
        if args.threads:
            _capi.set_num_threads(args.threads)
        code = args.run(args, console)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `gdn bench | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except UsageError as error:
        console.error(str(error))
        return USAGE
    except _capi.InvalidArgumentError as error:
        console.error(str(error))
        return USAGE
    except (_capi.UnsupportedError, UnavailableError) as error:
        console.error(str(error))
        return UNSUPPORTED
    except CheckError as error:
        console.error(str(error))
        return FAILED
    except KeyboardInterrupt:
        console.error("interrupted")
        return 130
