import pytest

from pipeline.runtime.launcher import launch_arguments


@pytest.mark.parametrize(
    "command",
    [
        ["python3", "/env/bin/accelerate", "launch", "--cpu", "x.py"],
        ["accelerate", "launch", "--cpu", "x.py"],
        ["python", "/env/bin/accelerate-launch", "--cpu", "x.py"],
        ["python", "-m", "accelerate.commands.launch", "--cpu", "x.py"],
        ["python", "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "x.py"],
    ],
)
def test_spellings_of_accelerate_launch(command: list[str]) -> None:
    assert launch_arguments(command) == ["--cpu", "x.py"]


@pytest.mark.parametrize("command", [[], ["python", "x.py", "launch"], ["accelerate", "config"], ["bash", "-c", "accelerate launch x.py"]])
def test_other_commands(command: list[str]) -> None:
    assert launch_arguments(command) is None
