"""The device to work on, its stream, and the folder of the headers for device code."""

import functools
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import _C


def pick_device(device: torch.device | str | None = None) -> torch.device:
    """Return the torch.device to work on.

    The argument decides; else EPMOE_BACKEND=cpu|cuda; else CUDA where there is a GPU and a CUDA build.
    """
    forced = os.environ.get("EPMOE_BACKEND", "")
    if forced not in ("", "cpu", "cuda"):
        raise ValueError(f"EPMOE_BACKEND={forced!r}: must be cpu or cuda")
    if device is None:
        device = forced or ("cuda" if _C.HAS_CUDA and torch.cuda.is_available() else "cpu")
    device = torch.device(device)
    if forced and device.type != forced:
        raise ValueError(f"device {device}, but EPMOE_BACKEND={forced}: change one of them")
    if device.type == "cuda" and not (_C.HAS_CUDA and torch.backends.cuda.is_built()):
        raise ValueError(f"device {device}: {'this torch' if _C.HAS_CUDA else 'this build of epmoe'} has no "
                         f"CUDA")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device}: epmoe works on cpu and cuda")
    if device.type == "cpu" and device.index is not None:
        if device.index:
            raise ValueError(f"device {device}: there is one CPU: leave the number out")
        device = torch.device("cpu")  # as tensors name it
    return device


class Capabilities(NamedTuple):
    """What a CUDA device can do."""

    major: int  # of the compute capability
    minor: int
    num_sms: int
    has_hopper: bool  # there are kernels for sm_90a, which include the fused kernels, and the GPU runs them


@functools.cache
def capabilities(device: torch.device) -> Capabilities:
    """Return the Capabilities of a torch.device of type cuda.  The module has asked the runtime once."""
    return Capabilities(*_C.device_query(device.index))


def stream_of(device: torch.device) -> int:
    """Return the current stream of a CUDA device as an integer, or 0 for the CPU."""
    try:
        return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    except RuntimeError:
        if not torch.cuda.is_initialized():
            return 0  # a forked child: the operation itself raises EpClosed
        raise


def integer(name: str, value: Any) -> int:
    """Return a number as an int.  Raises TypeError for what is none, ValueError for one with a fraction."""
    number: int | None
    try:
        number = int(value)
    except TypeError:
        raise TypeError(f"{name} {value!r}: must be an integer") from None
    except (ValueError, OverflowError):  # a text, NaN, infinity
        number = None
    if number is None or number != value:
        raise ValueError(f"{name} {value!r}: must be an integer")
    return number


def status_of(error: BaseException) -> int:
    """Return the code with which this rank reports an exception to the other ranks."""
    # torch has no class for a lack of memory on the CPU
    is_of_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    if is_of_cpu or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return _C.ENOMEM
    if isinstance(error, TypeError):
        return _C.ETYPE
    return _C.EINVAL if isinstance(error, ValueError) else _C.ERUNTIME


def include_dir() -> str:
    """Return the folder of epmoe_device.h, for the compiler's -I option.

    The header lets a kernel of your own use SymmetricHeap.device_handle(); see examples/06_device.py.

    Returns:
        An absolute path, a str.

    Examples:
        >>> import epmoe
        >>> import os
        >>> os.path.exists(os.path.join(epmoe.include_dir(), "epmoe_device.h"))
        True
    """
    here = Path(__file__).resolve().parents[1]
    return str(next(d for d in (here / "include", here.parent / "csrc") if (d / "epmoe_device.h").exists()))
