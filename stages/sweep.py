"""Many trainings from one cache. `accelerate launch stages/sweep.py CONFIG.yaml [a.b=value …]`"""

import sys

from pipeline.config.load import load_config
from pipeline.config.schema import Config
from pipeline.runtime.stage import run_stage


def main(config: Config) -> None:
    """Train a draft for every setting of sweep.space, as many side by side from one reading of the cache as fit into memory.

    The same command goes on where a sweep was stopped or killed; started again meanwhile, or with several processes, it shares the work.
    stages/report.py LOG_DIR shows what came out, also before the end.
    """
    from importlib.util import find_spec
    from pathlib import Path

    from pipeline.errors import ConfigError
    from pipeline.runtime.logs import setup_logs
    from pipeline.runtime.ranks import start_alone, stop_ranks
    from pipeline.sweep.run import Launch, sweep

    if find_spec("optuna") is None:
        raise ConfigError("a sweep needs Optuna, which is not installed: pip install optuna (or this package with the extra `sweep`).")
    ranks, rank, processes = start_alone()
    try:
        setup_logs(rank, Path(config.log_dir, "logs"))
        file, *words = sys.argv[1:]  # run_stage has read them already
        sweep(config, Launch(ranks, rank, processes), lambda more: load_config("train", file, [*words, *more]))
    finally:
        stop_ranks()


if __name__ == "__main__":
    raise SystemExit(run_stage("sweep", main, sys.argv[1:]))
