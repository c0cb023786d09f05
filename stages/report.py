"""One page of a sweep, or of runs: `python stages/report.py RUN… [--out FOLDER] [--measure-target | --target-ms T]`

A folder is LOG_DIR of a sweep (also of one that still runs), or those of several trainings. The page, report.html, needs nothing else; its
pictures also lie beside it as PNG files. Every draft's time for a block is measured here, on this machine; run it where drafts will serve.
Exit code 2: what was asked cannot be done; the message says why.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import ConfigError, PipelineError
from pipeline.runtime.logs import setup_logs


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a sweep, or folders of runs")
    parser.add_argument("--out", type=Path, help="default: the folder `report` in the first RUN")
    parser.add_argument(
        "--target-ms", type=float, help="milliseconds that the target takes for one step of decoding, for the predicted speed-up"
    )
    parser.add_argument(
        "--target-tokens-per-second", type=float, help="of the target's plain forward, for what training online would have cost"
    )
    parser.add_argument("--measure-target", action="store_true", help="load the configuration's target and measure both here")
    arguments = parser.parse_args(argv)
    if arguments.target_ms is not None and arguments.target_ms <= 0:
        parser.error(f"--target-ms {arguments.target_ms:g}: expected a time above 0")
    if arguments.measure_target and arguments.target_ms is not None:
        parser.error("--measure-target and --target-ms: give one")
    if arguments.target_tokens_per_second is not None and arguments.target_ms is None:
        parser.error("--target-tokens-per-second goes with --target-ms")
    setup_logs(0, None)
    try:
        print(_report(arguments))
    except (PipelineError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _report(arguments: argparse.Namespace) -> Path:
    from importlib.util import find_spec

    if find_spec("optuna") is None:
        raise ConfigError("a report needs Optuna, which is not installed: pip install optuna (or this package with the extra `sweep`).")
    from pipeline.report.page import write_report
    from pipeline.report.runs import TargetSpeed
    from pipeline.runtime.ranks import start_alone, stop_ranks
    from pipeline.sweep.gather import gather, target_of

    ranks = start_alone()[0]
    try:
        target = None
        if arguments.measure_target:
            target = target_of(arguments.runs, ranks)
        elif arguments.target_ms is not None:
            step = arguments.target_ms / 1e3
            target = TargetSpeed(
                step, {}, arguments.target_tokens_per_second, f"{arguments.target_ms:g} ms a step, as given, for a block too"
            )
        return write_report(gather(arguments.runs, target, ranks.device), arguments.out or arguments.runs[0] / "report")
    finally:
        stop_ranks()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
