"""Decode prompts with target and draft: `accelerate launch stages/evaluate.py CONFIG.yaml [a.b=value …]`"""

import sys

from pipeline.config.schema import Config
from pipeline.runtime.stage import run_stage


def main(config: Config) -> None:
    """Decode prompts greedily, by target and draft together and by the target alone: acceptance, rates, and whether the answers agree."""
    from pathlib import Path

    from pipeline.runtime.logs import setup_logs
    from pipeline.runtime.ranks import start_ranks, stop_ranks
    from pipeline.train.served import evaluate

    ranks = start_ranks(config.model.target.tp_size, config.trainer.devices, config.trainer.num_nodes)
    try:
        setup_logs(ranks.rank, Path(config.log_dir, "logs"))
        evaluate(config, ranks)
    finally:
        stop_ranks()


if __name__ == "__main__":
    raise SystemExit(run_stage("evaluate", main, sys.argv[1:]))
