"""The processes of a run: who this one is, and a refusal to go on when they are not those that were asked for.

Ranks are laid out as a grid of dp rows and tp columns: rank = dp_rank * tp_size + tp_rank. The ranks of one row hold one copy
of the target together; rows work on different samples.
"""

import logging
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeline.errors import LaunchError
from pipeline.runtime.heap import keep_freed_memory
from pipeline.runtime.launcher import asked_processes

log = logging.getLogger(__name__)

CPU_LAUNCH = "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes N --num_machines 1 stages/…"


@dataclass(frozen=True)
class Ranks:
    """This process among `world_size`. `mesh` has the dimensions "dp" and "tp", and is None for a single process;
    `tp_group` is None for tp_size 1. `device` is this rank's own."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    tp_size: int
    tp_rank: int
    dp_rank: int
    dp_size: int
    mesh: DeviceMesh | None
    tp_group: dist.ProcessGroup | None

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes what all share and speaks to the console."""
        return self.rank == 0


def start_ranks(tp_size: int, devices: int | None, num_nodes: int, timeout_seconds: int | None = None) -> Ranks:
    """Join the other processes (by accelerate) and check that they are as many as asked for; nothing is written before. A collective fails
    after `timeout_seconds` of waiting for another rank (None: as torch has it).

    Raises `LaunchError` when accelerate's world size differs from WORLD_SIZE, from what the parent `accelerate launch` was
    asked for, or from `devices * num_nodes` where `devices` is given, and when `tp_size` does not divide it.
    """
    keep_freed_memory()
    limit = {} if timeout_seconds is None else {"timeout": timedelta(seconds=timeout_seconds)}
    state = PartialState(cpu=_on_cpu(), **limit)
    world_size, rank = int(state.num_processes), int(state.process_index)
    fault = _fault(world_size, tp_size, devices, num_nodes)
    if fault is not None:
        stop_ranks()
        raise LaunchError(fault)

    local_rank = max(0, int(state.local_process_index))
    device = torch.device(torch.device(state.device).type)
    if device.type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    mesh = None
    if world_size > 1:
        mesh = init_device_mesh(device.type, (world_size // tp_size, tp_size), mesh_dim_names=("dp", "tp"))
    ranks = Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        device=device,
        tp_size=tp_size,
        tp_rank=rank % tp_size,
        dp_rank=rank // tp_size,
        dp_size=world_size // tp_size,
        mesh=mesh,
        tp_group=mesh.get_group("tp") if mesh is not None and tp_size > 1 else None,
    )
    if ranks.is_main:
        grid = f" (dp {ranks.dp_size} x tp {tp_size})" if world_size > 1 else ""
        backend = f" over {state.backend}" if state.backend else ""
        log.info("world size %d%s on %s%s", world_size, grid, device.type, backend)
    return ranks


def start_alone() -> tuple[Ranks, int, int]:
    """This process by itself, on the device that the launcher meant for it, in no process group: it never waits for the others and they
    never wait for it. With it, its rank and the number of processes of the launch.

    Raises `LaunchError` when accelerate was asked for another number of processes.
    """
    rank, local_rank, processes = (int(os.environ.get(name, default)) for name, default in _LAUNCHED)
    asked = asked_processes()
    if asked is not None and asked[0] != processes:
        raise LaunchError(
            f"accelerate launch was asked for {asked[0]} processes ({asked[1]}), but {processes} run. For CPU processes: {CPU_LAUNCH}"
        )
    keep_freed_memory()
    cpu = _on_cpu()
    for name, _ in _LAUNCHED:
        os.environ.pop(name, None)  # accelerate would form a group
    if not cpu and torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    device = torch.device(torch.device(PartialState(cpu=cpu).device).type)
    if device.type == "cuda":
        device = torch.device("cuda", local_rank)
    return Ranks(0, 1, 0, device, 1, 0, 0, 1, None, None), rank, processes


_LAUNCHED = (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"))


def stop_ranks() -> None:
    """Leave the process group, so that another `start_ranks` could follow. Never waits for other ranks.

    `Ranks.mesh` keeps gloo's threads: do not hold one in a module, an interpreter that ends with it can abort (torch 2.13).
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    PartialState._reset_state()


def _on_cpu() -> bool:
    """Whether ranks are CPU processes. Accelerate's launcher decides it by ACCELERATE_USE_CPU and is believed, wrong or not (the
    check of the world size tells); under torchrun, which has no such word, it is the absence of a GPU."""
    if "ACCELERATE_USE_CPU" in os.environ:
        return bool(parse_flag_from_env("ACCELERATE_USE_CPU"))
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in os.environ
    if by_accelerate or torch.cuda.is_available() or "LOCAL_RANK" not in os.environ:
        return False
    os.environ["ACCELERATE_USE_CPU"] = "true"  # so that an Accelerator made later decides the same
    return True


def _fault(world_size: int, tp_size: int, devices: int | None, num_nodes: int) -> str | None:
    """Why these processes are not those that were asked for, and what to do; None when they are."""
    claimed = os.environ.get("WORLD_SIZE")
    if claimed is not None and int(claimed) != world_size:
        return (
            f"WORLD_SIZE is {claimed}, but accelerate sees a world of {world_size}: every process would believe that it is the only "
            f"one. A MULTI_GPU configuration does so where there is no GPU. For CPU ranks: {CPU_LAUNCH}"
        )
    asked = asked_processes()
    if asked is not None and asked[0] != world_size:
        return (
            f"accelerate launch was asked for {asked[0]} processes ({asked[1]}), but {world_size} run. `--cpu` starts a single "
            f"process whatever number is given, and so does a machine without the GPUs. For CPU ranks: {CPU_LAUNCH}"
        )
    if devices is not None and devices * num_nodes != world_size:
        return (
            f"trainer.devices={devices} x trainer.num_nodes={num_nodes} asks for {devices * num_nodes} processes, but {world_size} run. "
            "Launch as many, or change these fields."
        )
    if world_size % tp_size:
        return (
            f"model.target.tp_size={tp_size} does not divide the world size {world_size}. "
            f"Launch a multiple of {tp_size} processes, or choose another tp_size."
        )
    return None
