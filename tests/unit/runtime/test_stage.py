"""`run_stage` with real mains, in this process; exit codes of real stages are tested in tests/stages."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config.schema import Config
from pipeline.errors import CacheError
from pipeline.runtime.logs import setup_logs
from pipeline.runtime.stage import run_stage


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    setup_logs(1, None)


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "c.yaml"
    path.write_text("model: {target: {path: t}}\ndata: {train_ds: {input_cfg: [{path: a}]}}\ncapture: {path: c}\n")
    return str(path)


def test_main_gets_the_configuration_and_the_exit_code_is_0(config: str) -> None:
    seen: list[Config] = []
    assert run_stage("capture", seen.append, [config, "name=other"]) == 0
    assert [c.name for c in seen] == ["other"]


def test_commands_are_chosen_by_the_first_argument(config: str) -> None:
    seen: list[str] = []
    commands = {"prepare": lambda c: seen.append("prepare"), "preview": lambda c: seen.append("preview")}
    assert run_stage("corpus", commands, ["preview", config]) == 0
    assert seen == ["preview"]


def test_an_error_of_the_user_is_one_paragraph_and_exit_code_2(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: Config) -> None:
        setup_logs(3, tmp_path)
        raise CacheError("no room; make some")

    assert run_stage("capture", fail, [config]) == 2
    assert capsys.readouterr().err == "error: no room; make some\n"
    monkeypatch.setenv("RANK", "3")
    assert run_stage("capture", fail, [config]) == 2
    assert capsys.readouterr().err == "error on rank 3: no room; make some\n"
    assert (tmp_path / "rank3.log").read_text().count("no room") == 2


def test_a_bug_keeps_its_traceback(config: str, tmp_path: Path) -> None:
    def fail(config: Config) -> None:
        setup_logs(0, tmp_path)
        raise KeyError("bug")

    with pytest.raises(KeyError, match="bug"):
        run_stage("capture", fail, [config])
    assert "KeyError: 'bug'" in (tmp_path / "rank0.log").read_text()


def test_a_faulty_configuration_is_told_by_rank_0_alone(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_stage("capture", print, [config, "nme=x", "data.max_tokens=0"]) == 2
    shown = capsys.readouterr().err
    assert "2 faults" in shown
    assert "did you mean name?" in shown
    monkeypatch.setenv("RANK", "1")
    assert run_stage("capture", print, [config, "nme=x"]) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no configuration file"),
        (["--fast", "c.yaml"], "unknown option --fast"),
        (["a.b=c"], "where the configuration file should be"),
        (["none.yaml"], "no such file"),
    ],
)
def test_arguments_that_make_no_sense(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_stage("capture", print, argv) == 2
    assert message in capsys.readouterr().err
    assert run_stage("capture", {"go": print}, [*argv]) == 2
    assert "expected one of: go" in capsys.readouterr().err


def test_help_says_how_to_call_and_lists_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    def prepare(config: Config) -> None:
        """Tokenise the corpus
        once."""

    assert run_stage("corpus", {"prepare": prepare}, ["--help"]) == 0
    shown = capsys.readouterr().out
    assert "{prepare} CONFIG.yaml [a.b=value …]" in shown
    assert "Tokenise the corpus once." in shown
    assert "  data.max_tokens: int >= 1 = 4096" in shown
