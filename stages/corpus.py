"""Tokenise a corpus: `python stages/corpus.py prepare CONFIG [a.b=c …]`. Capture does it by itself where it has not been done."""

import sys

from pipeline.config.schema import Config
from pipeline.runtime.stage import run_stage


def prepare(config: Config) -> None:
    """Tokenise the chats of `data` once, on all cores, and print where the samples are and the account of all rows."""
    import json

    from pipeline.corpus.prepare import prepare as prepare_corpus

    corpus = prepare_corpus(config)
    print(json.dumps({"path": str(corpus.path), "fingerprint": corpus.fingerprint, **corpus.counts}, indent=2))


if __name__ == "__main__":
    sys.exit(run_stage("corpus", {"prepare": prepare}, sys.argv[1:]))
