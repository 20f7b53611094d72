"""Launched processes: creation of every `Accelerator`, and refusal of launches that do not start what was asked for.

torch and accelerate are imported inside functions, because the command line uses this module before it loads them.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import logging
import netrc
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from .devices import DeviceFacts, computes_on_gpu, flag, note_on_launch, problem_of_launch, unusable_gpu
from .exchange import FAREWELL_S, Exchange, OtherProcessError, describe_error, wait_for_keys
from .io import write_text
from .locking import InUse, locked

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import KwargsHandler
    from torch._C._distributed_c10d import Store

FSDP_MUST_BE_OFF = ("FSDP_OFFLOAD_PARAMS", "FSDP_ACTIVATION_CHECKPOINTING", "FSDP_CPU_RAM_EFFICIENT_LOADING")
"""accelerate's FSDP settings: two would be silently ignored, and the last (on by default!) loads empty teachers."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h
TRACKERS = ("tensorboard", "trackio", "wandb")
SEEN_WITHIN_S = 30.0
"""Seconds in which a file of the main process must be seen on all machines."""
UNLIMITED_DAYS = 1000
SUPPORTED = ("NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED")
"""Supported values of accelerate's DistributedType."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class WorldError(RuntimeError):
    """The running processes are not those that were asked for."""


class LaunchRefused(WorldError):
    """All processes of a launch found, together, that they must not compute; each of them raises this."""


def make_accelerator(*, trackers: Sequence[str] = (), logging_dir: str | Path | None = None) -> Accelerator:
    """Make an accelerator for one process, DDP (NCCL or gloo), DeepSpeed or FSDP2 (GPU or CPU).

    Raises WorldError if fewer processes are connected than the launcher announced, or if a process would compute on
    another device than the launch is for; ValueError for a tracker that is unknown or not installed.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, patch_environment

    check_trackers(trackers)
    _check_environment()
    _die_with_launcher()
    check_devices()
    with_deepspeed = flag("ACCELERATE_USE_DEEPSPEED")
    on_cpu = not computes_on_gpu()
    handlers: list[KwargsHandler] = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    if with_deepspeed and on_cpu:
        _prepare_deepspeed_on_cpu()
        handlers = [InitProcessGroupKwargs(backend="gloo")]
    if on_cpu:
        _name_gloo_interface()
    # Otherwise accelerate refuses a second accelerator with other settings.
    AcceleratorState._reset_state()
    # `cpu` says it; accelerate's own reading of the variable would keep DeepSpeed from connecting. FSDP: `is_fsdp2`.
    with patch_environment(ACCELERATE_USE_FSDP="false", ACCELERATE_USE_CPU="false"):
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


def check_devices() -> None:
    """Compare the devices of all processes, before they connect: NCCL here and gloo there would wait for each other.

    The processes read one another's facts in the rendezvous store, once. Raises WorldError unless all may compute, and
    on the same kind of device.
    """
    global _facts
    if _facts is not None:
        return
    own = DeviceFacts.find()
    if not own.problem and (lost := unusable_gpu()):
        log.warning("warning: %s", lost)
    everyone = _facts_of_launch(own)
    if problem := problem_of_launch(everyone):
        raise (LaunchRefused if len(everyone) > 1 else WorldError)(problem)
    if (note := note_on_launch(everyone)) and is_launched_main():
        log.warning("warning: %s", note)
    _facts = own


_facts: DeviceFacts | None = None
_held_stores: list[Store] = []


def device_summary(kernels: str) -> str:
    """Describe what this process computes on, with which kernels, and how many processes there are."""
    check_devices()
    assert _facts is not None
    world = int(os.environ.get("WORLD_SIZE", 1))
    processes = f", {world} processes" if world > 1 else ""
    return f"{_facts.summary(kernels)}{processes}"


def _facts_of_launch(own: DeviceFacts) -> list[DeviceFacts]:
    """Return the facts of all processes by rank; only this one's if it was started alone.

    Raises WorldError naming processes that do not come within the time that torch waits for them.
    """
    import torch

    dist: Any = torch.distributed
    world = int(os.environ.get("WORLD_SIZE", 1))
    is_connecting = int(os.environ.get("LOCAL_RANK", -1)) >= 0 and "MASTER_ADDR" in os.environ
    if world == 1 or not is_connecting:
        return [own]
    # The same store as the process group's. Process 0 may hold it, and must not close it before the group opens it.
    whole_store, rank, world = next(dist.rendezvous("env://"))
    _held_stores.append(whole_store)
    store = dist.PrefixStore("hybrid-distill/devices", whole_store)
    store.set(str(rank), json.dumps(asdict(own)))
    keys = [str(number) for number in range(world)]
    patience = dist.constants.default_pg_timeout.total_seconds()
    if missing := wait_for_keys(store, keys, patience):
        raise WorldError(
            f"processes {', '.join(missing)} of {world} did not start within {patience:g} s; start the same command "
            "on every machine, each with its own NODE_RANK."
        )
    facts = [DeviceFacts(**json.loads(store.get(key))) for key in keys]
    # Process 0 may hold the store: if all are about to end, it ends after the others have read.
    store.set(f"{rank} has read", "")
    if rank == 0 and problem_of_launch(facts):
        wait_for_keys(store, [f"{number} has read" for number in range(world)], FAREWELL_S)
    return facts


def on_main_process(action: Callable[[], object]) -> None:
    """Run ``action`` on the main process; all wait until it is done and all have come, however long it takes.

    An error is raised there and, as `OtherProcessError`, on the others.
    """

    def act() -> None:
        action()

    from_main(act)


def from_main(compute: Callable[[], T]) -> T:
    """Run ``compute`` on the main process and return its result on all processes; see `on_main_process`."""
    exchange = _exchange()
    return compute() if exchange is None else exchange.from_main(compute)


def wait_for_all() -> None:
    """Wait until all processes have come here, however long it takes."""
    compute_everywhere(lambda: None)


def _exchange() -> Exchange | None:
    """Return the exchange of the connected processes; None for one process alone."""
    global _open_exchange
    from accelerate.state import is_initialized

    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return None
    if not is_initialized():
        connect()
    rank, world = rank_and_world()
    if world == 1:
        return None
    if _open_exchange is None:
        from torch.distributed import distributed_c10d

        _open_exchange = Exchange(distributed_c10d._get_default_store(), rank, world)
    return _open_exchange


_open_exchange: Exchange | None = None


@contextmanager
def alone_in(place: Path, *, beside: bool = False, patience: float = 0.0) -> Iterator[None]:
    """Lock a folder against other commands (`locking.locked`); the processes of this launch share the lock.

    The main process holds it. If that fails, all processes raise the same error: InUse or OSError. Raises ValueError
    unless all processes see the folder (`check_shared`).
    """
    connect()
    with ExitStack() as held:

        def lock() -> InUse | OSError | None:
            try:
                held.enter_context(locked(place, beside=beside, patience=patience))
            except (InUse, OSError) as error:
                return error
            return None

        refusal = from_main(lock)
        if refusal is not None:
            raise refusal
        check_shared(place.parent if beside else place)
        yield


def check_shared(folder: Path) -> None:
    """Raise ValueError unless all processes see this folder of the main process: results would be lost silently.

    The main process writes a file with a random name and value, which the others must read. An NFS may show it late.
    """
    _, world = rank_and_world()
    if world == 1:
        return
    token = from_main(lambda: _write_token(folder))
    seen = compute_everywhere(lambda: (socket.gethostname(), _reads(folder / token.name, token.value)))
    on_main_process(lambda: (folder / token.name).unlink(missing_ok=True))
    blind = [f"{rank} on {host}" for rank, (host, sees) in enumerate(seen) if not sees]
    if blind:
        raise UnsharedFolder(
            f"process 0 on {seen[0][0]} writes to {token.folder}, which {len(blind)} of {world} processes do not see "
            f"(process {', '.join(blind)}); pass an --out on a file system that all machines share."
        )


class UnsharedFolder(ValueError):
    """Some processes of a launch do not see the main process's folder; each of them raises this."""


class _Token(NamedTuple):
    folder: str
    name: str
    value: str


def _write_token(folder: Path) -> _Token:
    token = _Token(str(folder.resolve()), f".{secrets.token_hex(8)}.token", secrets.token_hex(16))
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / token.name, token.value)
    return token


def _reads(path: Path, value: str) -> bool:
    """Check whether a file has this content, now or within `SEEN_WITHIN_S`."""
    end = time.monotonic() + SEEN_WITHIN_S
    while True:
        with suppress(OSError):
            if path.read_text() == value:
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.1)


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

    An error in one process is raised there and as `OtherProcessError` in the others, so that none keeps waiting. Takes
    as long as the slowest process.
    """
    exchange = _exchange()
    if exchange is None:
        return [compute()]
    try:
        mine = compute()
    except Exception as error:
        exchange.gather(([], describe_error(error)))
        raise
    outcomes = exchange.gather(([mine], ""))
    for rank, (_, message) in enumerate(outcomes):
        if message:
            raise OtherProcessError(f"process {rank} of {exchange.world} has failed ({message})")
    return [results[0] for results, _ in outcomes]


def agree_on(compute: Callable[[], T]) -> T:
    """Run ``compute`` on every process and return the main process's result on each; see `compute_everywhere`."""
    return compute_everywhere(compute)[0]


def limit_collectives(minutes: float | None) -> None:
    """Set how long a collective may take before it ends in an error: of every process group that exists now.

    None stands for as long as it takes. Processes that wait through `compute_everywhere` or `on_main_process` run no
    collective.
    """
    from torch.distributed import distributed_c10d

    _, world = rank_and_world()
    if world == 1:
        return
    limit = timedelta(days=UNLIMITED_DAYS) if minutes is None else timedelta(minutes=minutes)
    # Neither name is public. A group takes its own limit from its backend, not from the default group.
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(limit, group)


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
    return flag("ACCELERATE_USE_FSDP") and accelerator.num_processes > 1


def check_trackers(trackers: Sequence[str]) -> None:
    """Raise ValueError for a tracker that is unknown or not installed. Without a key, switch wandb to offline mode."""
    for name in trackers:
        if name not in TRACKERS:
            raise ValueError(f"tracker {name!r} is unknown; pass one of {', '.join(TRACKERS)}.")
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"tracker {name!r} is not installed; run `pip install {name}`, or leave it out: `--trackers` without a "
                "name writes metrics.jsonl alone."
            )
    if "wandb" in trackers and not _has_wandb_key():
        # Without a key, wandb.init asks for one on a terminal, and raises UsageError anywhere else.
        os.environ.setdefault("WANDB_MODE", "offline")


def _has_wandb_key() -> bool:
    """Check whether `wandb login`, or the environment, has left a key for wandb's server or the user's own."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    server = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    try:
        return netrc.netrc().authenticators(server) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _check_environment() -> None:
    """Raise WorldError for a launch that would start but train something other than was asked for."""
    if flag("ACCELERATE_USE_FSDP"):
        version = os.environ.get("FSDP_VERSION", "1")
        if version != "2":
            raise WorldError(f"FSDP version {version} is not supported; launch with --config_file launch/fsdp2.yaml.")
        for name in filter(flag, FSDP_MUST_BE_OFF):
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


def disconnect() -> None:
    """Leave the process group at the end of a program: gloo's threads must not outlive the interpreter.

    Frees unreferenced models first. If torch's reducer were the last to free the process group, it would hold the GIL
    and wait forever for a gloo thread that needs it.
    """
    global _open_exchange
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    if _open_exchange is not None:
        _open_exchange.farewell()
        _open_exchange = None
    gc.collect()
    torch.distributed.destroy_process_group()
