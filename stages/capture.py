"""Stage one: hidden states of a frozen target, captured into a cache.

accelerate launch stages/capture.py CONFIG.yaml [a.b=value …]
accelerate launch stages/capture.py CONFIG.yaml --plan            what that will take: bytes, hours, files; captures nothing
"""

import sys
from pathlib import Path

from pipeline.config.schema import Config
from pipeline.errors import PeerFailedError
from pipeline.runtime.logs import log_to_file, setup_logs
from pipeline.runtime.stage import run_stage


def main(config: Config) -> None:
    """Capture the corpus of data.* with the target of model.target into the cache capture.path. Run it again to go on. With --plan:
    only say what that will take, in bytes, files and hours.

    Exit code 143 after SIGTERM: what is committed stays, the shard in progress is given up.
    """
    from pipeline.capture.run import capture
    from pipeline.runtime.ranks import start_ranks, stop_ranks

    ranks = start_ranks(config.model.target.tp_size, config.trainer.devices, config.trainer.num_nodes)
    try:
        setup_logs(ranks.rank, Path(config.log_dir) / "logs")
        capture(config, ranks)
    except PeerFailedError as error:
        log_to_file(str(error))
        raise SystemExit(2) from None  # the rank that failed says why; one paragraph is enough
    finally:
        stop_ranks()


def plan(config: Config) -> None:
    """Print what the capture will take: tokens, bytes by codec, files, hours on the ranks that run, and when it pays. Captures nothing."""
    from pipeline.capture.plan import as_text
    from pipeline.capture.plan import plan as predict
    from pipeline.runtime.ranks import start_ranks, stop_ranks

    ranks = start_ranks(config.model.target.tp_size, config.trainer.devices, config.trainer.num_nodes)
    try:
        predicted = predict(config, ranks)
        if predicted is not None:
            print(as_text(predicted))
    except PeerFailedError as error:
        log_to_file(str(error))
        raise SystemExit(2) from None
    finally:
        stop_ranks()


if __name__ == "__main__":
    sys.exit(run_stage("capture", main, sys.argv[1:], options={"--plan": plan}))
