"""How the examples get their ranks: from torchrun, or as processes that are started here."""

import argparse
import os
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist

# So that a checkout that was built in place runs without being installed; an installed epmoe goes first.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from epmoe import _C  # noqa: E402
from epmoe.testing import run_ranks, set_device, shares_gpu  # noqa: E402


def launch(main, default_ranks=4, timeout_s=300.0):
    """Run main(rank, world_size, device) on every rank and end the program: with status 0, or with 1 when a
    rank raises or returns something true.

    Under torchrun this process is one of the ranks; otherwise default_ranks processes are started.  Each rank
    has a GPU of its own where there are enough of them; with EPMOE_SHARE_GPU=1 ranks share the GPUs; otherwise all
    work on the CPU.
    """
    if isinstance(main, types.FunctionType):  # no arguments were looked at: there are none, but --help
        argparse.ArgumentParser(description=sys.modules["__main__"].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if "RANK" in os.environ:
        sys.exit(bool(_rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), main)))
    try:
        results = run_ranks(_rank, default_ranks, main, backend=_backend(default_ranks), timeout_s=timeout_s)
    except AssertionError as error:  # its text is the tracebacks of the ranks
        sys.exit(str(error))
    sys.exit(any(results))


def num_gpus():
    """GPUs that epmoe can work on: none in a build for the CPU, or with EPMOE_BACKEND=cpu."""
    return torch.cuda.device_count() if _C.HAS_CUDA and os.environ.get("EPMOE_BACKEND") != "cpu" else 0


def _backend(num_local_ranks):
    return "cpu:gloo,cuda:nccl" if num_gpus() >= (1 if shares_gpu() else num_local_ranks) else "gloo"


def _rank(rank, world_size, main):
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    backend, device = _backend(num_local_ranks), torch.device("cpu")
    if backend != "gloo":
        device = set_device(int(os.environ.get("LOCAL_RANK", rank)), num_local_ranks)
    if not dist.is_initialized():
        dist.init_process_group(backend)
    result = main(rank, world_size, device)
    dist.destroy_process_group()
    return result
