"""Start the ranks of the examples, with torchrun or without."""

import argparse
import os
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist

# So the examples also run in a checkout that was built in place.  An installed epmoe takes precedence.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from epmoe import _C  # noqa: E402
from epmoe.testing import run_ranks, set_device, shares_gpu  # noqa: E402


def launch(main, default_ranks=4, timeout_s=300.0):
    """Run main(rank, world_size, device) on every rank, then end the program.

    The exit status is 1 if a rank raises an error or returns a true value, else 0.  Under torchrun this
    process is one of the ranks.  Otherwise this function starts default_ranks processes.  Each rank has its
    own GPU if there are enough GPUs.  With EPMOE_SHARE_GPU=1 ranks share the GPUs.  Otherwise all ranks run
    on the CPU.
    """
    if isinstance(main, types.FunctionType):  # main parses no arguments, so --help is the only one
        argparse.ArgumentParser(description=sys.modules["__main__"].__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if "RANK" in os.environ:
        sys.exit(bool(_rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), main)))
    try:
        results = run_ranks(_rank, default_ranks, main, backend=_backend(default_ranks), timeout_s=timeout_s)
    except AssertionError as error:  # The text has the tracebacks of the ranks.
        sys.exit(str(error))
    sys.exit(any(results))


def num_gpus():
    """Return the number of GPUs that epmoe can use: 0 in a build for the CPU, or with EPMOE_BACKEND=cpu."""
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
