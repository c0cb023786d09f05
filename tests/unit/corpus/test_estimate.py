from pathlib import Path

import pytest

from pipeline.corpus import estimate as module
from pipeline.corpus.estimate import estimate
from pipeline.corpus.prepare import prepare
from pipeline.errors import CorpusError
from tests.support.tiny import write_chats, write_jsonl
from tests.unit.capture.conftest import capture_config


def test_small_corpora_are_counted_and_large_ones_estimated(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = capture_config(tiny_target, tmp_path)
    write_chats(tmp_path / "chats.jsonl", 1100)
    exact = estimate(config)
    assert (exact.exact, exact.scale, exact.rows, exact.rows_read) == (True, 1.0, 1100, 1100)
    assert sum(sample.num_tokens for sample in exact.samples) < 1.2 * module.PROBE_TOKENS
    assert not (tmp_path / "prepared").exists()
    monkeypatch.setattr(module, "SAMPLE_ROWS", 400)
    guessed = estimate(config)
    assert not guessed.exact
    assert guessed.rows_read < 600
    assert guessed.total_tokens == pytest.approx(exact.total_tokens, rel=0.05)
    assert guessed.total_samples == pytest.approx(exact.total_samples, rel=0.05)
    corpus = prepare(config)
    opened = estimate(config)
    assert opened.num_tokens.tolist() == corpus.num_tokens.tolist() == exact.num_tokens.tolist()


def test_a_corpus_without_a_usable_row(tiny_target: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "chats.jsonl", [{"messages": []}] * 3)
    with pytest.raises(CorpusError, match="none of 3 rows"):
        estimate(capture_config(tiny_target, tmp_path))
