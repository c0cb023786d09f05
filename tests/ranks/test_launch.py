"""Real launches of a small script: what runs, and what is refused before anything is written (TRAPS, launching)."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import accelerate_launch, environment, free_port, run, run_ranks, spawn_ranks

SCRIPT = '''
import sys
from pathlib import Path


def main(config):
    """Write a file a rank."""
    import torch
    import torch.distributed as dist
    from accelerate import Accelerator
    from pipeline.runtime.ranks import start_ranks, stop_ranks

    ranks = start_ranks(config.model.target.tp_size, config.trainer.devices, config.trainer.num_nodes)
    total = torch.tensor(float(ranks.rank + 1))
    if ranks.world_size > 1:
        dist.all_reduce(total)
    accelerator = Accelerator()
    assert (accelerator.num_processes, accelerator.process_index) == (ranks.world_size, ranks.rank)
    tp_ranks = [ranks.rank] if ranks.tp_group is None else dist.get_process_group_ranks(ranks.tp_group)
    words = (ranks.world_size, ranks.dp_rank, ranks.tp_rank, total.item(), tp_ranks, ranks.device)
    Path(config.capture.path, f"rank{ranks.rank}").write_text(repr(words))
    stop_ranks()


if __name__ == "__main__":
    from pipeline.runtime.stage import run_stage

    sys.exit(run_stage("capture", main, sys.argv[1:]))
'''


@pytest.fixture
def script(tmp_path: Path) -> tuple[str, str, Path]:
    """The script, its configuration, and the folder that its ranks write into."""
    folder = tmp_path / "written"
    folder.mkdir()
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "config.yaml").write_text(
        f"model: {{target: {{path: t}}}}\ndata: {{train_ds: {{input_cfg: [{{path: a}}]}}}}\ncapture: {{path: '{folder}'}}\n"
    )
    return str(tmp_path / "script.py"), str(tmp_path / "config.yaml"), folder


def written(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


TWO = {"rank0": "(2, 0, 0, 3.0, [0], device(type='cpu'))", "rank1": "(2, 1, 0, 3.0, [1], device(type='cpu'))"}


def test_a_plain_python_process(script: tuple[str, str, Path]) -> None:
    path, config, folder = script
    done = run(path, config, "trainer.devices=1")
    assert written(folder) == {"rank0": "(1, 0, 0, 1.0, [0], device(type='cpu'))"}
    assert "world size 1" in done.text


def test_two_cpu_ranks_by_accelerate(script: tuple[str, str, Path]) -> None:
    path, config, folder = script
    done = accelerate_launch(path, config, "trainer.devices=2")
    assert written(folder) == TWO
    assert "world size 2 (dp 2 x tp 1) on cpu over gloo" in done.text


@pytest.mark.slow
@pytest.mark.parametrize("told", [True, False])
def test_two_cpu_ranks_by_torchrun(script: tuple[str, str, Path], told: bool, tmp_path: Path) -> None:
    path, config, folder = script
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    env = environment({"ACCELERATE_USE_CPU": "true"} if told else {})
    subprocess.run([*launcher, path, config], env=env, timeout=120, check=True, capture_output=True)
    assert written(folder) == TWO


@pytest.mark.slow
def test_four_ranks_as_dp_2_by_tp_2(script: tuple[str, str, Path]) -> None:
    path, config, folder = script
    run_ranks(path, config, "model.target.tp_size=2", num_ranks=4)
    cpu = "device(type='cpu')"
    assert written(folder) == {
        "rank0": f"(4, 0, 0, 10.0, [0, 1], {cpu})",
        "rank1": f"(4, 0, 1, 10.0, [0, 1], {cpu})",
        "rank2": f"(4, 1, 0, 10.0, [2, 3], {cpu})",
        "rank3": f"(4, 1, 1, 10.0, [2, 3], {cpu})",
    }


def test_cpu_flag_that_starts_one_process_of_two_is_refused(script: tuple[str, str, Path]) -> None:
    path, config, folder = script
    done = accelerate_launch(path, config, options=("--cpu", "--num_processes", "2"), check=False)
    assert not done.ok
    assert "accelerate launch was asked for 2 processes (--num_processes), but 1 run" in done.text
    assert "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes" in done.text
    assert written(folder) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("MULTI_GPU", "WORLD_SIZE is 2, but accelerate sees a world of 1"),
        ("MULTI_CPU", "accelerate launch was asked for 2 processes (num_processes of "),
    ],
)
def test_configurations_that_give_ranks_unknown_to_one_another_are_refused(
    script: tuple[str, str, Path], tmp_path: Path, kind: str, message: str
) -> None:
    path, config, folder = script
    settings = tmp_path / "accelerate.yaml"
    settings.write_text(
        "compute_environment: LOCAL_MACHINE\n"
        f"distributed_type: {kind}\nuse_cpu: true\nnum_processes: 2\nnum_machines: 1\nmachine_rank: 0\nmixed_precision: 'no'\n"
    )
    done = accelerate_launch(path, config, options=("--config_file", str(settings)), check=False)
    assert not done.ok
    assert message in done.text
    assert written(folder) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.devices=3", "asks for 3 processes, but 2 run"),
        ("model.target.tp_size=3", "tp_size=3 does not divide the world size 2"),
    ],
)
def test_settings_that_two_ranks_do_not_meet(script: tuple[str, str, Path], override: str, message: str) -> None:
    path, config, folder = script
    done = run_ranks(path, config, override, check=False)
    assert done.codes == (2, 2), done.text
    assert all(message in output for output in done.outputs)
    assert written(folder) == {}


def _sum_of_ranks(rank: int, world_size: int, added: int) -> tuple[int, int, int]:
    import torch
    import torch.distributed as dist

    from pipeline.runtime.ranks import start_ranks, stop_ranks

    ranks = start_ranks(1, world_size, 1)
    total = torch.tensor(rank + added)
    dist.all_reduce(total)
    stop_ranks()
    return ranks.rank, ranks.world_size, int(total)


def _fail_on_one(rank: int, world_size: int) -> None:
    import torch.distributed as dist

    if rank == 1:
        raise ValueError("rank 1 has had enough")
    dist.barrier()


@pytest.mark.slow
def test_spawned_ranks_share_a_group_and_return_their_results() -> None:
    assert spawn_ranks(_sum_of_ranks, 2, 10) == [(0, 2, 21), (1, 2, 21)]


@pytest.mark.slow
def test_a_spawned_rank_that_fails_shows_its_traceback() -> None:
    with pytest.raises(AssertionError, match="rank 1 has had enough"):
        spawn_ranks(_fail_on_one, 2, timeout=60)
