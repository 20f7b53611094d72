"""Connection of the processes of a launch: every `Accelerator` is made here.

torch and accelerate are imported inside functions, because the command line imports this module
before it loads them.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from .device_check import check_devices
from .devices import computes_on_gpu
from .exchange import close_exchange
from .launch import (
    CPU_REQUESTED,
    DEEPSPEED_REQUESTED,
    FSDP_REQUESTED,
    WorldError,
    check_environment,
    die_with_launcher,
    is_on,
    is_on_several_machines,
    launched_world,
)

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import KwargsHandler

SUPPORTED = ("NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED")
"""Supported values of accelerate's DistributedType."""
UNLIMITED_DAYS = 1000


def make_accelerator(
    *, trackers: Sequence[str] = (), logging_dir: str | Path | None = None
) -> Accelerator:
    """Make an accelerator for one process, DDP (NCCL or gloo), DeepSpeed or FSDP2 (GPU or CPU).

    Raises WorldError if fewer processes are connected than the launcher announced, or if a process
    would compute on another device than the launch is for.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import (
        DistributedDataParallelKwargs,
        InitProcessGroupKwargs,
        patch_environment,
    )

    check_environment()
    die_with_launcher()
    check_devices()
    with_deepspeed = is_on(DEEPSPEED_REQUESTED)
    on_cpu = not computes_on_gpu()
    # Gradients that are views of DDP's buckets do not take their memory twice.
    handlers: list[KwargsHandler] = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    if with_deepspeed and on_cpu:
        _prepare_deepspeed_on_cpu()
        # Without a named backend, DeepSpeed on a CPU ends with an assertion about train_batch_size.
        handlers = [InitProcessGroupKwargs(backend="gloo")]
    if on_cpu:
        _name_gloo_interface()
    project_dir = None
    if logging_dir is not None:
        project_dir = str(logging_dir)
    # accelerate's state is global: without a reset, it refuses a second accelerator with other
    # settings.
    AcceleratorState._reset_state()
    # `cpu` below says where to compute; accelerate's own reading of that variable would keep
    # DeepSpeed from connecting. FSDP2 is ours (`train.parallel.fsdp2`): accelerate's never
    # synchronizes gradients on a CPU.
    with patch_environment(**{FSDP_REQUESTED: "false", CPU_REQUESTED: "false"}):
        accelerator = Accelerator(
            cpu=on_cpu and not with_deepspeed,
            # Stages autocast to bfloat16 themselves, with or without DeepSpeed.
            mixed_precision="no",
            kwargs_handlers=handlers,
            log_with=list(trackers) or None,
            project_dir=project_dir,
        )
    _check_world(accelerator)
    build_whole_models()
    return accelerator


def build_whole_models() -> None:
    """Make transformers build and load whole models.

    Once an accelerator with ZeRO-3 exists, transformers would return empty tensors, for that
    setting is global (transformers#28106). A student is built from its teacher's tensors; DeepSpeed
    shards it when a stage starts.
    """
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()


def connect() -> PartialState:
    """Connect and check the processes of this launch.

    The returned state has rank and world size outside stages too. Raises WorldError as
    `make_accelerator` does.
    """
    from accelerate.state import PartialState

    # `PartialState()` alone does not connect processes on a CPU.
    make_accelerator()
    return PartialState()


def own_device() -> torch.device:
    """Return the device of this process."""
    import torch

    return torch.device(connect().device or "cpu")


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and the number of processes: 0 and 1 if none are connected."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def limit_collectives(minutes: float | None) -> None:
    """Set how long a collective of the existing process groups may take before it fails.

    None stands for as long as it takes. Processes that wait through `compute_everywhere` or
    `on_main_process` run no collective.
    """
    from torch.distributed import distributed_c10d

    _, world = rank_and_world()
    if world == 1:
        return
    limit = timedelta(days=UNLIMITED_DAYS)
    if minutes is not None:
        limit = timedelta(minutes=minutes)
    # Neither name is public. A group takes its own limit from its backend, not from the default
    # group.
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(limit, group)


def disconnect() -> None:
    """Leave the process group at the end of a program.

    gloo's threads must not outlive the interpreter: they abort the process if they then free a
    tensor (pytorch#179291).
    """
    torch = sys.modules.get("torch")
    if (
        torch is None
        or not torch.distributed.is_available()
        or not torch.distributed.is_initialized()
    ):
        return
    close_exchange()
    # Frees models that nothing refers to. Their reducers hold the process group: if one of them
    # were the last to free it, it would keep the interpreter's lock and wait forever for a gloo
    # thread that needs it (pytorch#56297).
    gc.collect()
    torch.distributed.destroy_process_group()


def _check_world(accelerator: Accelerator) -> None:
    announced = launched_world()
    connected = accelerator.num_processes
    if announced != connected:
        raise WorldError(
            f"the launcher announced {announced} processes and {connected} run together; launch "
            "with `accelerate launch --multi_gpu --num_processes N` or the configs in launch/."
        )
    kind = accelerator.distributed_type.value
    if kind not in SUPPORTED:
        raise WorldError(f"{kind} is not supported; use DDP (`--multi_gpu`) or DeepSpeed.")


def _name_gloo_interface() -> None:
    """Point gloo to the network interface that reaches the main process, on several machines.

    By default, gloo takes the interface that the machine's host name resolves to (gloo#70), which
    is often 127.0.0.1.
    """
    import psutil

    if not is_on_several_machines() or os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    try:
        host = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        main = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(main[0], socket.SOCK_DGRAM) as unused:
            # On a UDP socket, this picks a route and sends nothing.
            unused.connect(main[4])
            own_address = unused.getsockname()[0]
    except (KeyError, OSError):
        # Connecting will report what is wrong.
        return
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == own_address for address in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name


def _prepare_deepspeed_on_cpu() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.ops

    # Shared-memory communication takes a minute to compile, where it compiles at all
    # (DeepSpeed#7108), and gains nothing at this size. Not a public name.
    compatible = getattr(deepspeed.ops, "__compatible_ops__", None)
    if isinstance(compatible, dict) and "deepspeed_shm_comm" in compatible:
        compatible["deepspeed_shm_comm"] = False
