import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.runtime.logs import Progress, log_to_file, setup_logs


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    setup_logs(1, None)  # a rank without console and file: no handler is left


def test_rank_0_speaks_and_every_rank_has_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("pipeline.somewhere")
    setup_logs(0, None)
    setup_logs(0, tmp_path / "logs")
    log.info("from zero")
    log_to_file("only in the file")
    setup_logs(1, tmp_path / "logs")
    log.info("from one")
    shown = capsys.readouterr().err
    assert shown.count("from zero") == 1
    assert "from one" not in shown
    assert "only in the file" not in shown
    zero, one = ((tmp_path / "logs" / f"rank{rank}.log").read_text() for rank in (0, 1))
    assert "I r0 pipeline.somewhere: from zero" in zero
    assert "only in the file" in zero
    assert "I r1 pipeline.somewhere: from one" in one
    assert "from zero" not in one


def test_plain_lines_come_every_ten_seconds_and_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Progress(10_000, "tokens", "capture", True, done=4_000, clock=clock) as progress:
        for _ in range(25):
            clock.now += 1
            progress.advance(100)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "capture  50% 5k/10k tokens, 100 tokens/s, 0:50 left",
        "capture  60% 6k/10k tokens, 100 tokens/s, 0:40 left",
        "capture  65% 6.5k/10k tokens, 100 tokens/s, 0:35 left",
    ]


def test_a_bar_is_redrawn_below_log_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, screen = Clock(), Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    setup_logs(0, None)
    with Progress(4, "steps", "train", True, clock=clock) as progress:
        clock.now += 60
        progress.advance(1, note="loss 2.5")
        logging.getLogger("pipeline.x").info("a line")
        clock.now += 180
        progress.advance(3)
    text = screen.getvalue()
    assert "[#####...............] train  25% 1/4 steps, 0.0167 steps/s, 3:00 left, loss 2.5" in text
    assert "\r\x1b[K2" in text  # the bar is erased before the line, which begins with the year
    assert text.endswith("train 100% 4/4 steps, 0.0167 steps/s, 4:00 in all, loss 2.5\n")


def test_nothing_is_shown_when_disabled_and_an_error_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(2, "steps", "train", False) as progress:
        progress.advance(2)
    assert capsys.readouterr().err == ""
    with pytest.raises(RuntimeError), Progress(2, "steps", "train", True, clock=Clock()):
        raise RuntimeError
    assert capsys.readouterr().err == "train   0% 0/2 steps (stopped)\n"


def test_a_folder_that_cannot_be_made_is_the_user_s_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"file.*exp_manager\.explicit_log_dir"):
        setup_logs(0, tmp_path / "file" / "logs")
