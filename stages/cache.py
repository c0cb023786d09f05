"""Look at a cache, mend it, and make it larger, smaller or another one.

  python stages/cache.py info CACHE [--json]            what it holds, how large it is; also of a cache that is still open
  python stages/cache.py verify CACHE [--full]          sizes, or every checksum; exit code 1 and a line a fault if there are any
  python stages/cache.py diff A B                       fields, shards and files that differ; exit code 1 if there are any
  python stages/cache.py subset CACHE OUT [choices]     some of its layers, splits or samples as a cache of their own
  python stages/cache.py remask CONFIG [a.b=value …]    the masks and splits of CONFIG, without the target
  accelerate launch stages/cache.py repair CONFIG [a.b=value …]    capture faulty shards again
  accelerate launch stages/cache.py append CONFIG [a.b=value …]    add the rows, layers or final hidden state that CONFIG has besides

CONFIG is that of the capture, with `capture.path` the cache. Exit code 2: what was asked cannot be done; the message says why.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.config.schema import Config
from pipeline.errors import PeerFailedError, PipelineError
from pipeline.runtime.logs import log_to_file, setup_logs
from pipeline.runtime.stage import run_stage

FAULTY = DIFFERENT = 1


def info(arguments: argparse.Namespace) -> int:
    import json

    from pipeline.cache.info import as_text
    from pipeline.cache.info import info as describe

    found = describe(arguments.cache)
    print(json.dumps(found, indent=2, sort_keys=True) if arguments.json else as_text(found))
    return 0


def verify(arguments: argparse.Namespace) -> int:
    from pipeline.cache.info import info as describe
    from pipeline.cache.verify import verify_with_progress

    faults = verify_with_progress(arguments.cache, arguments.full, arguments.threads)
    print("\n".join(map(str, faults)) or f"no fault found{'' if arguments.full else ' in sizes; --full compares checksums'}")
    if not faults and (found := describe(arguments.cache))["state"] != "complete":
        print("the cache is not complete: {present} of {expected} shards are captured".format(**found["shards"]))
    return FAULTY if faults else 0


def diff(arguments: argparse.Namespace) -> int:
    from pipeline.cache.diff import diff as differences

    lines = differences(arguments.a, arguments.b)
    print("\n".join(lines) or "the two caches hold the same")
    return DIFFERENT if lines else 0


def subset(arguments: argparse.Namespace) -> int:
    from pipeline.cache.info import as_text
    from pipeline.cache.info import info as describe
    from pipeline.cache.subset import Choice
    from pipeline.cache.subset import subset as choose

    choose(arguments.cache, arguments.out, Choice(arguments.layers, arguments.final, arguments.splits, arguments.samples))
    print(as_text(describe(arguments.out)))
    return 0


def repair(config: Config) -> None:
    """Compare every checksum of the cache and capture again what is faulty."""
    _on_ranks(config, "repair")


def append(config: Config) -> None:
    """Add to a complete cache the rows, layers or final hidden state that CONFIG has besides what is there; run it again to go on."""
    _on_ranks(config, "append")


def remask(config: Config) -> None:
    """Give the samples of a cache the loss masks and splits of CONFIG; neither target nor hidden states are touched."""
    from pipeline.capture.remask import remask as give_masks

    give_masks(config)


def _on_ranks(config: Config, what: str) -> None:
    from pipeline.capture import append, repair
    from pipeline.runtime.ranks import start_ranks, stop_ranks

    ranks = start_ranks(config.model.target.tp_size, config.trainer.devices, config.trainer.num_nodes)
    try:
        setup_logs(ranks.rank, Path(config.log_dir) / "logs")
        append.append(config, ranks) if what == "append" else repair.repair(config, ranks)
    except PeerFailedError as error:
        log_to_file(str(error))
        raise SystemExit(2) from None  # the rank that failed says why; one paragraph is enough
    finally:
        stop_ranks()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.strip("[]").split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for call, folders in ((info, ("cache",)), (verify, ("cache",)), (diff, ("a", "b")), (subset, ("cache", "out"))):
        command = commands.add_parser(call.__name__)
        command.set_defaults(call=call)
        for folder in folders:
            command.add_argument(folder, type=Path, metavar=folder.upper())
        if call is info:
            command.add_argument("--json", action="store_true", help="one JSON object; sizes in bytes")
        if call is verify:
            command.add_argument("--full", action="store_true", help="read every byte and compare checksums")
            command.add_argument("--threads", type=int, help="default: one a core")
        if call is subset:
            command.add_argument("--layers", type=_numbers, help="such as 1,9,17; default: all")
            command.add_argument(
                "--final", action=argparse.BooleanOptionalAction, help="keep the final hidden state; default: if it is there"
            )
            command.add_argument("--splits", type=_names, help="such as train,heldout; default: all")
            command.add_argument("--samples", type=int, help="how many, chosen by a hash of their ids; default: all")
    return parser


def main(argv: Sequence[str]) -> int:
    by_config = {call.__name__: call for call in (repair, append, remask)}
    if argv and argv[0] in by_config:
        return run_stage("capture", by_config, argv)
    arguments = _parser().parse_args(argv)
    setup_logs(0, None)
    try:
        return int(arguments.call(arguments))
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
