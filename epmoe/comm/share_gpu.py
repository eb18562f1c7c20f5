"""Several ranks on one GPU: where a rank goes, and what a process needs whose threads are ranks."""

import contextlib
import gc
import os

import torch

# For ranks that are threads side by side on one GPU.  Set them before the process uses CUDA.
SIDE_BY_SIDE = {
    # By default all streams of a process share 8 hardware queues.  A kernel waits for the kernels before it
    # in its queue, also for a kernel of another rank, which waits for this rank: a deadlock.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # The first use of a kernel that CUDA loads lazily may wait for all running kernels: the same deadlock.
    "CUDA_MODULE_LOADING": "EAGER",
}


def shares_gpu():
    """Return whether EPMOE_SHARE_GPU=1 allows several ranks on one GPU, for development and tests."""
    return os.environ.get("EPMOE_SHARE_GPU") == "1"


def set_device(local_rank, num_local_ranks):
    """Make a GPU of this machine the current device of this rank.

    With more local ranks than GPUs, ranks share GPUs.  epmoe allows that only with EPMOE_SHARE_GPU=1 on all
    ranks.  NCCL refuses two ranks of one host on one GPU.  Therefore each rank then gets an NCCL_HOSTID of
    its own, and NCCL uses sockets on the loopback interface.  Call this before the first NCCL communicator is
    created.

    Args:
        local_rank: The number of this rank on this machine.
        num_local_ranks: The number of ranks on this machine.

    Returns:
        The torch.device of GPU local_rank % (number of GPUs).

    Raises:
        RuntimeError: Without a GPU that torch can use.

    Examples:
        >>> import torch
        >>> from epmoe.testing import set_device
        >>> device = set_device(0, 1) if torch.cuda.is_available() else torch.device("cpu")
    """
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        raise RuntimeError("there is no GPU that torch can use")
    if num_local_ranks > num_gpus:
        # An inherited NCCL_HOSTID is replaced: all ranks would have the same.
        os.environ["NCCL_HOSTID"] = f"epmoe-rank-{local_rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_IB_DISABLE", "1")
    device = torch.device("cuda", local_rank % num_gpus)
    torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def collector_off():
    """Stop Python's garbage collector in this process."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def side_by_side():
    """Check that this process is prepared for ranks as threads on one GPU, and stop the garbage collector.

    What frees CUDA memory waits for all kernels of the process.  The collector may free memory in any thread
    at any time, also while kernels of other ranks wait for the rank of this very thread.
    """
    missing = " ".join(f"{name}={value}" for name, value in SIDE_BY_SIDE.items() if name not in os.environ)
    if missing:
        raise RuntimeError(f"ranks that are threads on one GPU can deadlock without {missing}: set it before "
                           "the process uses CUDA")
    gc.collect()
    with collector_off():
        yield


@contextlib.contextmanager
def own_stream(device):
    """A CUDA stream for this thread alone; nothing on the CPU."""
    if torch.device(device).type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield
        stream.synchronize()
