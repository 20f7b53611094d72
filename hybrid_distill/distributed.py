"""Launched processes: creation of every `Accelerator`, and refusal of launches that do not start what was asked for.

torch and accelerate are imported inside functions, because the command line uses this module before it loads them.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import itertools
import logging
import netrc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from .locking import InUse, locked

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import KwargsHandler

FSDP_MUST_BE_OFF = ("FSDP_OFFLOAD_PARAMS", "FSDP_ACTIVATION_CHECKPOINTING", "FSDP_CPU_RAM_EFFICIENT_LOADING")
"""accelerate's FSDP settings: two would be silently ignored, and the last (on by default!) loads empty teachers."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h
TRACKERS = ("tensorboard", "trackio", "wandb")
SUPPORTED = ("NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED")
"""Supported values of accelerate's DistributedType."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class WorldError(RuntimeError):
    """The running processes are not those that were asked for."""


class OtherProcessError(RuntimeError):
    """Another process of this launch failed; its own error message gives the reason."""


def make_accelerator(*, trackers: Sequence[str] = (), logging_dir: str | Path | None = None) -> Accelerator:
    """Make an accelerator for one process, DDP (NCCL or gloo), DeepSpeed or FSDP2 (GPU or CPU).

    Raises WorldError if fewer processes are connected than the launcher announced; ValueError for a tracker that is
    unknown or not installed.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, patch_environment

    check_trackers(trackers)
    _check_environment()
    _die_with_launcher()
    with_deepspeed = _flag("ACCELERATE_USE_DEEPSPEED")
    on_cpu = not torch.cuda.is_available()
    handlers: list[KwargsHandler] = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    if with_deepspeed and on_cpu:
        _prepare_deepspeed_on_cpu()
        handlers = [InitProcessGroupKwargs(backend="gloo")]
    if on_cpu:
        _name_gloo_interface()
    # Otherwise accelerate refuses a second accelerator with other settings.
    AcceleratorState._reset_state()
    with patch_environment(ACCELERATE_USE_FSDP="false"):  # see `is_fsdp2`
        accelerator = Accelerator(
            cpu=on_cpu and not with_deepspeed,
            mixed_precision="no",  # stages autocast to bfloat16 themselves, with or without DeepSpeed
            kwargs_handlers=handlers,
            log_with=list(trackers) or None,
            project_dir=None if logging_dir is None else str(logging_dir),
        )
    _check_world(accelerator)
    build_whole_models()
    return accelerator


def build_whole_models() -> None:
    """Make transformers build and load whole models; under ZeRO-3 it would return empty tensors.

    A student is built from its teacher's tensors. DeepSpeed shards it when a stage starts.
    """
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()


def connect() -> PartialState:
    """Connect and check the processes of this launch; the returned state has rank and world size outside stages too.

    ``PartialState()`` alone does not connect processes on a CPU. Raises WorldError as `make_accelerator` does.
    """
    from accelerate.state import PartialState

    make_accelerator()
    return PartialState()


def own_device() -> torch.device:
    """Return the device of this process."""
    import torch

    return torch.device(connect().device or "cpu")


def warn_of_emulation(device: torch.device, flag: str) -> None:
    """Warn if a CPU without bfloat16 instructions is about to compute in it; ``flag`` is the flag for float32."""
    import torch

    is_native = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    if device.type == "cpu" and is_launched_main() and not is_native():
        log.warning("this CPU emulates bfloat16, about ten times slower than float32; pass %s", flag)


def is_launched_main() -> bool:
    """Check whether this is the main or only process; works before and after processes are connected."""
    return int(os.environ.get("RANK", 0)) == 0


def is_launched_with_others() -> bool:
    """Check whether a launcher announced several processes; works before and after they are connected."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def is_first_on_machine() -> bool:
    """Check whether this is the first or only process on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def on_main_process(action: Callable[[], object]) -> None:
    """Run ``action`` on the main process; the others wait until it is done, however long it takes.

    They poll the rendezvous store: a collective would time out, with NCCL after 10 minutes.
    """
    from accelerate.state import PartialState, is_initialized

    if not is_initialized():
        connect()
    state = PartialState()
    if state.num_processes == 1:
        action()
        return
    from torch.distributed import distributed_c10d

    store, done = distributed_c10d._get_default_store(), f"hybrid-distill/done-{next(_actions)}"
    if state.is_main_process:
        action()
        store.set(done, "")
    else:
        pause = 0.001
        while not store.check([done]):
            time.sleep(pause)
            pause = min(2 * pause, 1.0)
    state.wait_for_everyone()


_actions = itertools.count()


@contextmanager
def alone_in(place: Path, *, beside: bool = False, patience: float = 0.0) -> Iterator[None]:
    """Lock a folder against other commands (`locking.locked`); the processes of this launch share the lock.

    The main process holds it. If that fails, all processes raise the same error: InUse or OSError.
    """
    from accelerate.utils import broadcast_object_list

    state = connect()
    refusal: list[InUse | OSError | None] = [None]
    with ExitStack() as held:
        if state.is_main_process:
            try:
                held.enter_context(locked(place, beside=beside, patience=patience))
            except (InUse, OSError) as error:
                refusal = [error]
        if state.num_processes > 1:
            broadcast_object_list(refusal)
        if refusal[0] is not None:
            raise refusal[0]
        yield


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and the number of processes: 0 and 1 if none are connected."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def own_share(items: Sequence[T]) -> list[T]:
    """Return this process's share of the items: every n-th, for n processes."""
    rank, world = rank_and_world()
    return list(items[rank::world])


def compute_everywhere(compute: Callable[[], T]) -> list[T]:
    """Run ``compute`` on every process and return all results, in rank order, on each; every process must call this.

    An error in one process is raised there and as `OtherProcessError` in the others, so that none keeps waiting.
    """
    import torch.distributed as dist

    _, world = rank_and_world()
    if world == 1:
        return [compute()]
    mine, error, message = list[T](), None, ""
    try:
        mine = [compute()]
    except Exception as raised:
        error, message = raised, f"{type(raised).__name__}: {raised}"
    outcomes: list[tuple[list[T], str]] = [([], "")] * world
    dist.all_gather_object(outcomes, (mine, message))
    if error is not None:
        raise error
    for rank, (_, message) in enumerate(outcomes):
        if message:
            raise OtherProcessError(f"process {rank} of {world} has failed ({message})")
    return [result for results, _ in outcomes for result in results]


def agree_on(compute: Callable[[], T]) -> T:
    """Run ``compute`` on every process and return the main process's result on each; see `compute_everywhere`."""
    return compute_everywhere(compute)[0]


def set_batch(accelerator: Accelerator, *, rows: int, micro_batch_size: int, clip: float) -> None:
    """Set how a process's ``rows`` of a step are split into micro-batches.

    DeepSpeed needs this and the clipping norm before it prepares a model.
    """
    accelerator.gradient_accumulation_steps = accumulation = -(-rows // micro_batch_size)
    if plugin := accelerator.state.deepspeed_plugin:
        plugin.deepspeed_config.update(
            train_micro_batch_size_per_gpu=min(micro_batch_size, rows),
            gradient_accumulation_steps=accumulation,
            gradient_clipping=clip,
        )


def is_deepspeed(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type.value == "DEEPSPEED"


def is_fsdp2(accelerator: Accelerator) -> bool:
    """Check whether the launch file asks for FSDP2. accelerate then only connects the processes, as for DDP, because
    its own FSDP2 never synchronizes gradients on a CPU; `fsdp2.Fsdp2` shards the stage.
    """
    return _flag("ACCELERATE_USE_FSDP") and accelerator.num_processes > 1


def check_trackers(trackers: Sequence[str]) -> None:
    """Raise ValueError for a tracker that is unknown or not installed. Without a key, switch wandb to offline mode."""
    for name in trackers:
        if name not in TRACKERS:
            raise ValueError(f"tracker {name!r} is unknown; pass one of {', '.join(TRACKERS)}.")
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"tracker {name!r} is not installed; run `pip install {name}` or leave it out.")
    if "wandb" in trackers and not _has_wandb_key():
        os.environ.setdefault("WANDB_MODE", "offline")


def _has_wandb_key() -> bool:
    try:
        return bool(os.environ.get("WANDB_API_KEY") or netrc.netrc().authenticators("api.wandb.ai"))
    except (OSError, netrc.NetrcParseError):
        return False


def _check_environment() -> None:
    """Raise WorldError for a launch that would start but train something other than was asked for."""
    if _flag("ACCELERATE_USE_FSDP"):
        version = os.environ.get("FSDP_VERSION", "1")
        if version != "2":
            raise WorldError(f"FSDP version {version} is not supported; launch with --config_file launch/fsdp2.yaml.")
        for name in filter(_flag, FSDP_MUST_BE_OFF):
            raise WorldError(
                f"{name.lower()} is on, which is not supported here; launch with --config_file launch/fsdp2.yaml, or "
                f"add --{name.lower()} false."
            )
    # accelerate's single-process launcher sets MASTER_ADDR if it was asked for several processes.
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ
    if launched and "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        raise WorldError(
            "several processes were asked for and accelerate started one (it does for `--cpu` and "
            "MULTI_CPU configs); launch with `accelerate launch --multi_gpu --num_processes N`, on CPU too."
        )


def _check_world(accelerator: Accelerator) -> None:
    announced, found = int(os.environ.get("WORLD_SIZE", 1)), accelerator.num_processes
    if announced != found:
        raise WorldError(
            f"the launcher announced {announced} processes and {found} run together; launch with "
            "`accelerate launch --multi_gpu --num_processes N` or the configs in launch/."
        )
    if (kind := accelerator.distributed_type.value) not in SUPPORTED:
        raise WorldError(f"{kind} is not supported; use DDP (`--multi_gpu`) or DeepSpeed.")


def _die_with_launcher() -> None:
    """Die with a launcher that is killed by SIGKILL, so as not to write alongside the next launch."""
    if "LOCAL_RANK" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _name_gloo_interface() -> None:
    """Point gloo to the network interface that reaches the main process, on several machines.

    By default, gloo takes the interface that the machine's host name resolves to, which is often 127.0.0.1.
    """
    import psutil

    machines = int(os.environ.get("WORLD_SIZE", 1)) > int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if not machines or os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    try:
        main = socket.getaddrinfo(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), type=socket.SOCK_DGRAM)[0]
        with socket.socket(main[0], socket.SOCK_DGRAM) as unused:
            unused.connect(main[4])  # a UDP socket: this picks a route and sends nothing
            own = unused.getsockname()[0]
    except (KeyError, OSError):
        return  # connecting will report what is wrong
    for name, addresses in psutil.net_if_addrs().items():
        if own in (address.address for address in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name


def _prepare_deepspeed_on_cpu() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.ops

    # Shared-memory communication takes a minute to compile and gains nothing at this size. Not a public name.
    compatible = getattr(deepspeed.ops, "__compatible_ops__", None)
    if isinstance(compatible, dict) and "deepspeed_shm_comm" in compatible:
        compatible["deepspeed_shm_comm"] = False


def _flag(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("1", "true", "yes")


def disconnect() -> None:
    """Leave the process group at the end of a program: gloo's threads must not outlive the interpreter.

    Frees unreferenced models first. If torch's reducer were the last to free the process group, it would hold the GIL
    and wait forever for a gloo thread that needs it.
    """
    if (torch := sys.modules.get("torch")) and torch.distributed.is_available() and torch.distributed.is_initialized():
        gc.collect()
        torch.distributed.destroy_process_group()
