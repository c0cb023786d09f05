"""`stages/corpus.py prepare` as a user runs it: several processes, killed at any moment, run again."""

import functools
import json
import os
import random
import subprocess
import sys
import time
from ast import literal_eval
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pipeline.corpus.prepared import PreparedCorpus
from tests.support.launch import REPOSITORY, kill_group, run, start
from tests.support.tiny import chats, write_chats, write_jsonl

pytestmark = pytest.mark.slow


def command(tmp_path: Path, target: Path, path: Path, prepared: str, num_proc: int) -> list[str]:
    config = tmp_path / f"{prepared}.yaml"
    config.write_text(
        f"model: {{target: {{path: {target}}}}}\n"
        f"data: {{prepared_dir: {tmp_path / prepared}, num_proc: {num_proc}, train_ds: {{input_cfg: [{{path: {path}}}]}}}}\n"
    )
    return ["prepare", str(config), "data.validation_ds.fraction=0.2"]


def files_of(folder: Path) -> dict[str, bytes]:
    """All files below `folder` but the lock."""
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"
    }


def wait_until(condition: Callable[[], object], process: "subprocess.Popen[bytes]", seconds: float = 60) -> bool:
    """Whether `condition` came true before `process` ended."""
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            return False
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)
    return True


@pytest.fixture(scope="module")
def many_chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six parts, with bad rows and ids that occur twice among them."""
    rows = [{**row, "id": f"chat {i % 5000}"} if i % 3 else row for i, row in enumerate(chats(600) * 10)]
    rows[700:5000:700] = [{"messages": []}] * 7
    return write_jsonl(tmp_path_factory.mktemp("many") / "chats.jsonl", rows)


@pytest.fixture(scope="module")
def reference(tiny_target: Path, many_chats: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process writes without being disturbed."""
    folder = tmp_path_factory.mktemp("reference")
    run("stages/corpus.py", *command(folder, tiny_target, many_chats, "p", 1))
    return files_of(folder / "p")


def test_two_processes_write_what_one_does(tiny_target: Path, many_chats: Path, reference: dict[str, bytes], tmp_path: Path) -> None:
    finished = run("stages/corpus.py", *command(tmp_path, tiny_target, many_chats, "p", 2))
    assert files_of(tmp_path / "p") == reference
    account = json.loads(finished.text[finished.text.index("{\n") :])
    assert account["rows"] == 6000 == account["kept"] + sum(account["dropped"].values())
    assert account["dropped"]["empty conversation"] == 7
    assert "rows left out" in finished.text


def test_killed_at_any_moment_and_run_again_it_ends_with_the_same_bytes(
    tiny_target: Path, many_chats: Path, reference: dict[str, bytes], tmp_path: Path
) -> None:
    arguments = command(tmp_path, tiny_target, many_chats, "p", 2)
    whole = [sys.executable, str(REPOSITORY / "stages/corpus.py"), *arguments]
    rng = random.Random(0)

    def parts() -> list[Path]:
        return sorted(tmp_path.glob("p/*/parts/[0-9]*.arrow"))

    for kill in range(4):
        log = tmp_path / f"{kill}.log"
        process = start(whole, log)
        try:
            before = {path: path.stat().st_mtime_ns for path in parts()}
            # The last kill falls on what comes after the parts, where the files that readers see are written.
            wanted = 6 if kill == 3 else min(6, len(before) + 2)
            running = wait_until(functools.partial(lambda n: len(parts()) >= n, wanted), process)
            time.sleep(rng.random() * 0.2)
            workers = psutil.Process(process.pid).children(recursive=True) if running else []
            process.kill()
            # Workers end with the parent that was killed; nothing else tells them to.
            assert not psutil.wait_procs(workers, timeout=20)[1]
        finally:
            kill_group(process)
        assert all(path.stat().st_mtime_ns == stamp for path, stamp in before.items() if path.exists()), "a finished part was done again"
    finished = run("stages/corpus.py", *arguments)
    assert files_of(tmp_path / "p") == reference
    assert "Traceback" not in finished.text


def test_a_worker_that_is_killed_is_an_error_that_can_be_mended(tiny_target: Path, many_chats: Path, tmp_path: Path) -> None:
    arguments = command(tmp_path, tiny_target, many_chats, "p", 2)
    process = start([sys.executable, str(REPOSITORY / "stages/corpus.py"), *arguments], tmp_path / "log")
    try:
        assert wait_until(lambda: list(tmp_path.glob("p/*/parts/[0-9]*.arrow")), process)
        workers = [p for p in psutil.Process(process.pid).children() if "spawn_main" in " ".join(p.cmdline())]
        workers[0].kill()
        assert process.wait(timeout=60) == 2
    finally:
        kill_group(process)
    text = (tmp_path / "log").read_text()
    assert "lower data.num_proc" in text
    assert "Traceback" not in text
    assert "tokenised by an earlier run" in run("stages/corpus.py", *arguments).text


def test_errors_are_one_paragraph_and_exit_code_2(tiny_target: Path, tmp_path: Path) -> None:
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"messages": []}, 5])
    finished = run("stages/corpus.py", *command(tmp_path, tiny_target, bad, "p", 2), check=False)
    assert finished.codes == (2,)
    assert "none of 2 rows" in finished.text
    assert "Traceback" not in finished.text


def test_a_small_corpus_needs_no_torch_where_it_is_tokenised(tiny_target: Path, tmp_path: Path) -> None:
    write_chats(tmp_path / "x.jsonl", 1)
    code = "import sys; import pipeline.corpus.parts; sys.exit('torch' in sys.modules)"
    finished = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=60, check=False)
    assert finished.returncode == 0


def test_preview_shows_what_is_supervised(tiny_target: Path, tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "chats.jsonl",
        [
            {"messages": [{"role": "user", "content": "q1"}, {"role": "assistant", "content": "one two \x1b[31m"}]},
            {"messages": []},
            {"messages": [{"role": "user", "content": "q2"}, {"role": "assistant", "content": "three four"}]},
        ],
    )
    arguments = ["preview", *command(tmp_path, tiny_target, path, "p", 1)[1:]]
    text = run("stages/corpus.py", *arguments).text
    assert "── chats.jsonl row 0, " in text
    assert "<|im_start|>assistant\n⟦one two \\x1b[31m<|im_end|>⟧\n" in text
    assert "── chats.jsonl row 1: left out, empty conversation" in text
    assert "⟦three four<|im_end|>⟧" in text
    assert not list(tmp_path.glob("p/*")), "a look writes nothing"
    one = run("stages/corpus.py", *arguments, "--row", "chats.jsonl:2", "--tokens").text
    assert "row 0" not in one
    marked = [line.split("*", 1)[1].strip() for line in one.splitlines() if " * " in line]
    assert "".join(literal_eval(piece) for piece in marked) == "three four<|im_end|>"
    finished = run("stages/corpus.py", *arguments, "--row", "7", check=False)
    assert finished.codes == (2,)
    assert "has 3 rows, counted from 0; there is no row 7" in finished.text


def test_preview_on_any_terminal(tiny_target: Path, tmp_path: Path) -> None:
    path = write_chats(tmp_path / "x.jsonl", 60)
    arguments = ["preview", *command(tmp_path, tiny_target, path, "p", 1)[1:], "--tokens", "--count", "60"]
    assert r"\u2500\u2500 x.jsonl row 0" in run("stages/corpus.py", *arguments, env={"PYTHONIOENCODING": "ascii"}).text
    whole = [sys.executable, str(REPOSITORY / "stages/corpus.py"), *arguments]
    with subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # as `| head` does
        assert (process.stderr.read(), process.wait()) == ("", 0)
    for no_colour in ("1", ""):
        short = write_jsonl(
            tmp_path / "short.jsonl", [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "one"}]}]
        )
        one = [*whole[:2], "preview", *command(tmp_path, tiny_target, short, "q", 1)[1:]]
        reader, terminal = os.openpty()
        subprocess.run(one, stdout=terminal, check=True, env={**os.environ, "NO_COLOR": no_colour, "TERM": "xterm"})
        assert (b"\x1b[1;32m" in os.read(reader, 1 << 12)) == (no_colour == "")
        os.close(terminal)
        os.close(reader)


def test_stats_count_what_training_can_use(tiny_target: Path, tmp_path: Path) -> None:
    path = write_chats(tmp_path / "x.jsonl", 60)
    arguments = command(tmp_path, tiny_target, path, "p", 1)
    text = run("stages/corpus.py", "stats", *arguments[1:], "model.draft.block_size=8").text
    (folder,) = tmp_path.glob("p/*")
    assert (folder / "stats-8.png").read_bytes().startswith(b"\x89PNG")
    corpus = PreparedCorpus.open(folder)
    samples = [corpus.sample(i) for i in range(len(corpus))]
    # Every supervised token that has a supervised one among the next seven, and eight tokens from itself on, or two.
    counts = {
        last: [
            sum(bool(m[i] and m[i + 1 : i + 8].any()) for i in range(max(0, len(m) - last + 1)))
            for m in (sample.loss_mask for sample in samples)
        ]
        for last in (8, 2)
    }
    row = next(line.split() for line in text.splitlines() if line.startswith("all "))
    none = [f"{sum(n == 0 for n in counts[last]) / 60:.1%}" for last in (8, 2)]
    mean = [f"{round(sum(counts[last]) / 60, 1):.3f}" for last in (8, 2)]
    assert row[1:3] == ["60", str(corpus.num_tokens.sum())]
    assert row[5] == str(corpus.num_tokens.max())
    assert row[6] == f"{sum(s.num_supervised for s in samples) / corpus.num_tokens.sum():.1%}"
    assert row[7:] == [mean[0], none[0], mean[1], none[1]]
