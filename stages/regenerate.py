"""The target's own answers to the prompts of a corpus: what a draft should be trained on.

accelerate launch stages/regenerate.py CONFIG.yaml [a.b=value …]      the target in these processes (regenerate.backend=local)
python stages/regenerate.py CONFIG.yaml [a.b=value …]                 by chat-completions servers (regenerate.backend=server)
"""

import sys
from pathlib import Path

from pipeline.config.schema import Config
from pipeline.errors import PeerFailedError
from pipeline.runtime.logs import log_to_file, setup_logs
from pipeline.runtime.stage import run_stage


def main(config: Config) -> None:
    """Let the target answer the chats of data.train_ds, turn by turn, into regenerate.output. Run it again to go on.

    Exit code 143 after SIGTERM: every answer that is journaled stays.
    """
    if config.regenerate.backend == "server":
        from pipeline.regenerate.server import regenerate_by_servers

        setup_logs(0, Path(config.log_dir) / "logs")
        regenerate_by_servers(config)
        return
    from pipeline.regenerate.local import regenerate_locally
    from pipeline.runtime.ranks import start_ranks, stop_ranks

    ranks = start_ranks(config.model.target.tp_size, config.trainer.devices, config.trainer.num_nodes)
    try:
        setup_logs(ranks.rank, Path(config.log_dir) / "logs")
        regenerate_locally(config, ranks)
    except PeerFailedError as error:
        log_to_file(str(error))
        raise SystemExit(2) from None  # the rank that failed says why; one paragraph is enough
    finally:
        stop_ranks()


if __name__ == "__main__":
    sys.exit(run_stage("regenerate", main, sys.argv[1:]))
