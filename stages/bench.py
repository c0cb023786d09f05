"""Measure. Each command prints a table and, as its last line, one JSON object.

  python stages/bench.py cache --cache CACHE [--mb 256]                    size and speed of every codec on the states of a cache
  python stages/bench.py codecs CONFIG [--seeds 5] [a.b=value …]           what int8 and int4 cost drafts that are trained on them
  python stages/bench.py step [--seq 2048 …] [--peer NAME --peer-script FILE]    time and memory of a training step, beside an opponent's
  python stages/bench.py capture CONFIG [--tokens 16384] [a.b=value …]    capture beside forwards of the same batches
  python stages/bench.py loader --cache CACHE [--mb 256]                   random reads beside the codec and beside a file a sample
  python stages/bench.py decode [--seq 1024 …]                             drafting of one block beside its products
  python stages/bench.py gpu [--peak-tflops 989]                           all that needs a GPU, in one run of a few minutes

CONFIG is that of a training run from a raw or lossless cache. Exit code 2: what was asked cannot be done; the message says why.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import PipelineError
from pipeline.runtime.heap import keep_freed_memory
from pipeline.runtime.logs import setup_logs

if TYPE_CHECKING:
    from pipeline.bench.step import StepSettings


def cache(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    from pipeline.bench.cache import as_text, bench_cache

    found = bench_cache(arguments.cache, int(arguments.mb * 1e6))
    return as_text(found), found


def codecs(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    from pipeline.bench.codecs import as_text, bench_codecs
    from pipeline.config.load import load_config
    from pipeline.runtime.ranks import start_ranks, stop_ranks

    config = load_config("train", arguments.config, arguments.overrides)
    ranks = start_ranks(1, None, 1)
    try:
        found = bench_codecs(config, ranks, arguments.seeds)
    finally:
        stop_ranks()
    return as_text(found), found


def step(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    from pipeline.bench.step import Peer, as_text, bench_step

    peer = Peer(arguments.peer, arguments.peer_script, arguments.peer_packages) if arguments.peer else None
    found = bench_step(_settings(arguments), arguments.rounds, peer)
    return as_text(found), found


def capture(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    import torch

    from pipeline.bench.capture import as_text, bench_capture
    from pipeline.config.load import load_config
    from pipeline.runtime.ranks import start_ranks, stop_ranks

    config = load_config("capture", arguments.config, arguments.overrides)
    torch.set_num_threads(arguments.threads)
    ranks = start_ranks(1, None, 1)
    try:
        found = bench_capture(config, ranks, arguments.tokens, arguments.rounds, arguments.clock)
    finally:
        stop_ranks()
    return as_text(found), found


def loader(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    from pipeline.bench.loader import as_text, bench_loader

    found = bench_loader(arguments.cache, int(arguments.mb * 1e6), arguments.threads, arguments.rounds, arguments.clock)
    return as_text(found), found


def decode(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    from pipeline.bench.decode import as_text, bench_decode

    found = bench_decode(_settings(arguments), arguments.committed, arguments.rounds)
    return as_text(found), found


def gpu(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    from pipeline.bench.gpu import QWEN3_8B, CaptureSettings, as_text, bench_gpu

    given = {field.name: getattr(arguments, field.name, None) for field in fields(QWEN3_8B)}
    settings = replace(QWEN3_8B, **{name: value for name, value in given.items() if value is not None})
    capture = CaptureSettings(arguments.target_layers, arguments.batches, arguments.rows, arguments.tokens)
    found = bench_gpu(settings, capture, arguments.rounds, arguments.peak_tflops)
    return as_text(found), found


def _settings(arguments: argparse.Namespace) -> "StepSettings":
    from pipeline.bench.step import StepSettings

    return StepSettings(**{field.name: getattr(arguments, field.name) for field in fields(StepSettings) if hasattr(arguments, field.name)})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("cache")
    command.set_defaults(call=cache)
    command.add_argument("--cache", type=Path, required=True, help="a complete cache, raw or lossless")
    command.add_argument("--mb", type=float, default=256.0, help="most states to measure on, in 10^6 bytes; default: 256")
    command = commands.add_parser("codecs")
    command.set_defaults(call=codecs)
    command.add_argument("config", help="of a training run")
    command.add_argument("overrides", nargs="*", metavar="a.b=value")
    command.add_argument("--seeds", type=_count, default=5, help="drafts a codec; default: 5")
    command = commands.add_parser("step")
    command.set_defaults(call=step)
    _add_shape(command, seq=2048, anchors=256, block=16, layers=3, hidden=576, vocab=49152)
    command.add_argument(
        "--peer",
        choices=("nemo-automodel", "specforge", "fp32"),
        help="what to time in turns with this step; fp32: itself, beside --dtype bf16-mixed",
    )
    command.add_argument("--peer-script", type=Path, help="what times the opponent")
    command.add_argument("--peer-packages", type=Path, help="folder of the opponent's packages, where they are not installed")
    _add_timing(command, 3)
    command = commands.add_parser("capture")
    command.set_defaults(call=capture)
    command.add_argument("config", help="of a capture run; nothing is written to its cache")
    command.add_argument("overrides", nargs="*", metavar="a.b=value")
    command.add_argument("--tokens", type=int, default=16384, help="most tokens to capture, in whole shards; default: 16384")
    _add_timing(command, 5)
    command = commands.add_parser("loader")
    command.set_defaults(call=loader)
    command.add_argument("--cache", type=Path, required=True, help="a complete cache, raw or lossless")
    command.add_argument("--mb", type=float, default=256.0, help="most states to measure on, in 10^6 bytes; default: 256")
    _add_timing(command, 5)
    command = commands.add_parser("decode")
    command.set_defaults(call=decode)
    _add_shape(command, seq=1024, block=16, layers=5, hidden=576, vocab=49152)
    command.add_argument("--committed", type=int, default=4, help="tokens that a step commits; default: 4")
    _add_timing(command, 9)
    _add_gpu(commands.add_parser("gpu"))
    return parser


def _add_gpu(command: argparse.ArgumentParser) -> None:
    command.set_defaults(call=gpu)
    for name in ("seq", "anchors", "block", "layers", "hidden", "vocab", "heads", "kv-heads", "head-dim", "intermediate"):
        command.add_argument(f"--{name}", type=int, help="default: that of a draft for Qwen3-8B")
    command.add_argument("--dtype", choices=("fp32", "bf16-mixed"), default="bf16-mixed")
    command.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    command.add_argument("--peak-tflops", type=float, help="what the device's data sheet gives in that dtype, for the utilisation")
    command.add_argument("--target-layers", type=int, default=36, help="decoder layers of the target that is captured; default: 36")
    command.add_argument("--batches", type=int, default=8, help="of capture; default: 8")
    command.add_argument("--rows", type=int, default=8, help="samples of a batch; default: 8")
    command.add_argument("--tokens", type=int, default=2048, help="tokens of a sample; default: 2048")
    command.add_argument("--rounds", type=_count, default=5, help="repeats; default: 5")


def _add_shape(command: argparse.ArgumentParser, **sizes: int) -> None:
    for name, default in sizes.items():
        command.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    command.add_argument("--dtype", choices=("fp32", "bf16-mixed"), default="fp32")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _add_timing(command: argparse.ArgumentParser, rounds: int) -> None:
    command.add_argument("--threads", type=_count, default=2, help="cores to use; default: 2")
    command.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: processor time, for a machine that does other things"
    )
    command.add_argument("--rounds", type=_count, default=rounds, help=f"repeats; default: {rounds}")


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    setup_logs(0, None)
    keep_freed_memory()  # as the processes do that are measured
    try:
        text, found = arguments.call(arguments)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{text}\n\n{json.dumps(found, sort_keys=True)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
