"""The meeting of all ranks at the start: the device, the process group and the group for messages.

Nothing here depends on the layout. `parallel/mesh.py` divides the ranks into groups afterwards.
"""

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.base.errors import LayoutError
from megatron.base.host_limits import allow_open_files
from megatron.parallel.launcher import read_meeting_point
from megatron.parallel.rank_progress import TimeLimit
from megatron.parallel.roll_call import store_is_rank_zeros
from megatron.parallel.store_values import read_text

_NAMED = 16
"""Number of missing ranks that a message names."""
_STORE_SECONDS = 2.0
"""Time for which rank 0 keeps the store after a failed meeting."""
_MANY_RANKS = 256
"""From this number of ranks on, gloo connects two ranks when they first exchange a message.

A rank would otherwise have a socket for each other rank and each group. A ring needs two.
"""
_SHARED_GPU = "shared gpu"
"""Key of the store, which is set if ranks share a GPU."""


def choose_device(local_rank: int) -> torch.device:
    """Return the GPU of this local rank, or the CPU if there is no GPU.

    If there are fewer GPUs than local ranks, the ranks share them in turn.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def start_process_group(
    backend: str | None,
    timeout_minutes: float,
    device: torch.device | None = None,
    *,
    hang_timeout: float | None = None,
) -> None:
    """Join the world that the launcher's environment describes.

    It reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Args:
        backend: nccl or gloo. None: nccl if each rank has a GPU of its own, else gloo. NCCL cannot
            connect two ranks of the same GPU.
        timeout_minutes: Limit of the meeting, from which the limit of collectives is derived.
        device: This rank's device, see `choose_device`. None: the CPU.
        hang_timeout: See `TimeLimit`.

    Raises:
        LayoutError: `backend` is nccl, and torch sees no GPU or ranks share one. Or ranks have not
            arrived within the limit. Or gloo cannot connect them.
    """
    if backend == "nccl" and not torch.cuda.is_available():
        raise LayoutError(
            "--distributed-backend nccl needs GPUs and torch sees none on this host; "
            "use --distributed-backend gloo"
        )
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    store = _meet(rank, world_size, timedelta(minutes=timeout_minutes), _name_gpu(device))
    sharing = read_text(store, _SHARED_GPU) if store.check([_SHARED_GPU]) else ""
    if backend == "nccl" and sharing:
        if rank == 0:
            # The store ends with this rank. The others still read from it that a GPU is shared.
            time.sleep(_STORE_SECONDS)
        raise LayoutError(
            f"--distributed-backend nccl needs a GPU for each rank, but {sharing}; start fewer "
            "ranks on a host, or use --distributed-backend gloo"
        )
    if backend is None:
        has_own_gpu = device is not None and device.type == "cuda" and not sharing
        backend = "nccl" if has_own_gpu else "gloo"
    limit = TimeLimit(timeout_minutes, hang_timeout)
    # Each group may have a connection to each of its ranks.
    allow_open_files(2 * world_size)
    if world_size >= _MANY_RANKS:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    # `device_id` is left out on purpose. With it, all messages between pipeline stages would share
    # one communicator of NCCL, and messages to different ranks would wait for each other.
    # Keys that only the ranks of this job know. A process of another job that reaches the port, or
    # an earlier start of this one, then writes other keys.
    own = dist.PrefixStore(read_text(store, "arrived/0"), store)
    with _explain_gloo(backend):
        dist.init_process_group(
            backend, store=own, rank=rank, world_size=world_size, timeout=limit.collective
        )


@contextlib.contextmanager
def _explain_gloo(backend: str) -> Iterator[None]:
    """Turn an error of gloo's connections into one that names the interface.

    Raises:
        LayoutError: gloo cannot connect the ranks.
    """
    try:
        yield
    except RuntimeError as error:
        # Only the first group of a world can have another backend, and NCCL's errors are its own.
        if backend != "gloo":
            raise
        host = os.uname().nodename
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        if interface is None:
            used = f"the interface of the address that the name {host} has"
        else:
            used = f"the interface of GLOO_SOCKET_IFNAME={interface}"
        raise LayoutError(
            f"gloo cannot connect the ranks. On {host} it uses {used}: {error}; set "
            "GLOO_SOCKET_IFNAME to the interface that connects the hosts (ip -br address lists "
            "them)"
        ) from error


def _name_gpu(device: torch.device | None) -> str:
    """Return the unique name of a GPU, or an empty string for a CPU.

    The index is not unique. Each rank of a host may see only its own GPU, as number 0.
    """
    if device is None or device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def _meet(rank: int, world_size: int, limit: timedelta, gpu: str) -> dist.Store:
    """Return the store of the world, after all ranks have arrived at it.

    Its key `_SHARED_GPU` is set if two ranks have the same GPU.

    Raises:
        LayoutError: Some ranks have not arrived within the limit. The message names them.
    """
    host, port = read_meeting_point()
    keeps_it = rank == 0 and store_is_rank_zeros()
    try:
        store = _connect(host, port, limit, keeps_it=keeps_it)
    except dist.DistError as error:
        if keeps_it:
            raise LayoutError(
                f"rank 0 on {os.uname().nodename} cannot listen at {host}:{port}, where the "
                f"processes meet: {error}; if another program uses the port, give another "
                "MASTER_PORT (torchrun: --master-port)"
            ) from error
        raise LayoutError(
            f"rank {rank} on {os.uname().nodename} cannot reach the store at {host}:{port} within "
            f"--distributed-timeout-minutes {limit / timedelta(minutes=1):g}: {error}; "
            "check that rank 0 was started there and that this host can connect to that port"
        ) from error
    # torchrun's agent keeps one store over all its restarts. A prefix for each restart separates
    # its keys from those of earlier ones.
    if restart := os.environ.get("TORCHELASTIC_RESTART_COUNT", ""):
        store = dist.PrefixStore(f"restart{restart}", store)
    # Each rank counts its GPU before it arrives. After the meeting, all ranks read the same key.
    if gpu and store.add(f"gpu/{gpu}", 1) > 1:
        store.set(_SHARED_GPU, f"ranks on {os.uname().nodename} share a GPU")
    keys = [f"arrived/{other}" for other in range(world_size)]
    store.set(keys[rank], uuid.uuid4().hex)
    try:
        store.wait(keys, limit)
    except dist.DistError as error:
        missing = _name_missing(store, keys)
        if keeps_it:
            # The store ends with this rank. The others still ask it who is missing.
            time.sleep(_STORE_SECONDS)
        raise LayoutError(
            f"these of {world_size} ranks have not joined within --distributed-timeout-minutes "
            f"{limit / timedelta(minutes=1):g}: {missing}; "
            "check that each was started with this WORLD_SIZE and that its host can connect to "
            f"{host}:{port}"
        ) from error
    return store


def _connect(host: str, port: int, limit: timedelta, *, keeps_it: bool) -> dist.Store:
    """Return the store at an address. The rank that keeps it starts it.

    Raises:
        dist.DistError: The address cannot be used, or nobody listens there within the limit.
        LayoutError: A program listens there, and does not answer within the limit.
    """
    # torch waits for the first answer without a limit. In a thread the wait can be abandoned.
    # `wait_for_workers` would wait inside torch as well, and its error does not name missing ranks.
    # With `multi_tenant`, stores of one process at the same port share a server.
    found: list[dist.Store] = []
    failed: list[Exception] = []

    def connect() -> None:
        try:
            store = dist.TCPStore(
                host,
                port,
                is_master=keeps_it,
                timeout=limit,
                wait_for_workers=False,
                multi_tenant=True,
            )
            found.append(store)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=connect, name="rendezvous", daemon=True)
    thread.start()
    # torch's own error at its limit says more.
    thread.join(limit.total_seconds() + 1)
    if failed:
        raise failed[0]
    if not found:
        try:
            socket.create_connection((host, port), timeout=1).close()
        except OSError as error:
            # On a busy machine torch notices later that nothing listens.
            raise dist.DistNetworkError(str(error)) from error
        raise LayoutError(
            f"the program that listens at {host}:{port} has not answered {os.uname().nodename} "
            f"within --distributed-timeout-minutes {limit / timedelta(minutes=1):g}, so it is not "
            "the store of this run, or it hangs; give another MASTER_PORT (torchrun: "
            "--master-port), or end that program"
        )
    return found[0]


def _name_missing(store: dist.Store, keys: Sequence[str]) -> str:
    """Return the ranks that have not set their key, for a message."""
    try:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
    except dist.DistError:
        if store_is_rank_zeros():
            return "rank 0 has ended before this one, and its message names them"
        return "the launcher that keeps the store has ended, so they are not known"
    if len(missing) > _NAMED:
        missing = [*missing[:_NAMED], "..."]
    return ", ".join(missing)


def build_control_group(
    timeout_minutes: float, hang_timeout: float | None = None
) -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks for small messages. All ranks call it together.

    Args:
        timeout_minutes: The limit that the group's time-out is derived from.
        hang_timeout: See `TimeLimit`.

    Raises:
        LayoutError: gloo cannot connect the ranks.
    """
    if dist.get_backend() == "gloo":
        return dist.group.WORLD
    with _explain_gloo("gloo"):
        limit = TimeLimit(timeout_minutes, hang_timeout)
        return dist.new_group(backend="gloo", timeout=limit.collective)
