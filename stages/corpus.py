"""Tokenise a corpus, and look at what that gives. Capture tokenises by itself where it has not been done.

python stages/corpus.py prepare CONFIG [a.b=value …]   tokenise the chats of `data` once, on all cores; the account of all rows
python stages/corpus.py preview CONFIG [--tokens] [--row ROW | NAME:ROW] [--count N] [a.b=value …]   what of some rows is supervised
python stages/corpus.py stats CONFIG [a.b=value …]     lengths, supervised share, usable anchors; and a picture of their histograms
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from functools import partial

from pipeline.config.schema import Config
from pipeline.runtime.stage import run_stage


def prepare(config: Config) -> None:
    """Tokenise the chats of `data` once, on all cores, and print where the samples are and the account of all rows."""
    import json

    from pipeline.corpus.prepare import prepare as prepare_corpus

    corpus = prepare_corpus(config)
    _tell(json.dumps({"path": str(corpus.path), "fingerprint": corpus.fingerprint, **corpus.counts}, indent=2))


def preview(config: Config, options: argparse.Namespace) -> None:
    """Show what is supervised of some rows: [--tokens] token by token, [--row ROW or NAME:ROW] of one row, [--count N] samples."""
    from pipeline.corpus.preview import preview as show

    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    _tell(show(config, options.row, options.count, options.tokens, colour))


def stats(config: Config) -> None:
    """Lengths, supervised share and usable anchors of the prepared corpus, which is made first where it is not there."""
    from pipeline.corpus.prepare import prepare as prepare_corpus
    from pipeline.corpus.stats import HEADER, statistics
    from pipeline.draft.anchors import usable_anchors
    from pipeline.records import TokenSample
    from pipeline.report.plots import plot_histograms
    from pipeline.report.tables import table

    size = config.model.draft.block_size

    def anchors(sample: TokenSample) -> tuple[int, int]:
        full, part = (len(usable_anchors(sample.spans, sample.num_tokens, size, fit)) for fit in ("full", "partial"))
        return full, part

    corpus = prepare_corpus(config)
    found, picture = statistics(corpus, anchors), corpus.path / f"stats-{size}.png"
    plot_histograms(found.panels(), picture, f"{len(corpus)} samples, blocks of {size}")
    _tell(f"{table(HEADER, found.table())}\nanchors a sample and samples without any: whole blocks of {size}, then partial ones\n{picture}")


def _tell(text: str) -> None:
    """Print `text`, whatever the terminal can show and however much of it is wanted, as by `| head`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(text, flush=True)
    except BrokenPipeError:  # Python would complain once more when it closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--tokens", action="store_true")
    parser.add_argument("--row")
    parser.add_argument("--count", type=int, default=3)
    options, rest = parser.parse_known_args(argv) if argv[:1] == ["preview"] else (parser.parse_args([]), argv)
    look = partial(preview, options=options)
    look.__doc__ = preview.__doc__
    return run_stage("corpus", {"prepare": prepare, "preview": look, "stats": stats}, rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
