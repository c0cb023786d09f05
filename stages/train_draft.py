"""Stage two: train a draft. `accelerate launch stages/train_draft.py CONFIG.yaml [a.b=value …]`"""

import sys

from pipeline.config.schema import Config
from pipeline.runtime.stage import run_stage

STOPPED_BY_SIGTERM = 143


def main(config: Config) -> None:
    """Train the draft from the cache (or online, with the live target) and export it; goes on from the newest checkpoint of the run.

    Exit code 143 after SIGTERM, with a checkpoint written: the same command then goes on.
    """
    from pathlib import Path

    from pipeline.runtime.logs import setup_logs
    from pipeline.runtime.ranks import start_ranks, stop_ranks
    from pipeline.train.loop import train

    # The target is divided only where it is loaded; from a cache, every rank is a data-parallel one.
    tp_size = config.model.target.tp_size if config.data.mode != "offline" else 1
    ranks = start_ranks(tp_size, config.trainer.devices, config.trainer.num_nodes, config.trainer.timeout_seconds)
    try:
        setup_logs(ranks.rank, Path(config.log_dir, "logs"))
        finished = train(config, ranks)
    finally:
        stop_ranks()
    if not finished:
        raise SystemExit(STOPPED_BY_SIGTERM)


if __name__ == "__main__":
    raise SystemExit(run_stage("train", main, sys.argv[1:]))
