"""Your own kernel on the symmetric heap: it puts data, sends signals and waits.  The host only launches it.

    python examples/06_device.py
    torchrun --nproc-per-node 4 examples/06_device.py

ring.cu has the ring of 01_heap.py in one kernel.  nvcc compiles it for heaps on GPUs, gcc for heaps on the
CPU.
"""

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from _launch import launch

import epmoe

SOURCE = Path(__file__).with_name("ring.cu")


def build(device, folder):
    """Compile ring.cu and load it as a library."""
    out = Path(folder) / "ring.so"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        command = [shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc", f"-arch=sm_{major}{minor}",
                   "-Xcompiler=-fPIC"]
    else:
        command = ["gcc", "-x", "c", "-std=c11", "-fPIC", "-D_GNU_SOURCE"]
    subprocess.run([*command, "-O2", "-shared", "-I", epmoe.include_dir(), str(SOURCE), "-o", str(out)],
                   check=True)
    return ctypes.CDLL(str(out))


def main(rank, world_size, device):
    n = 1000
    heap = epmoe.SymmetricHeap(num_bytes=1 << 20, device=device)
    with tempfile.TemporaryDirectory() as folder, heap:
        library = build(device, folder)
        inbox = heap.malloc_symmetric((world_size, n), torch.float32)
        arrived = heap.malloc_symmetric(1, torch.int64)
        barrier_words = heap.malloc_symmetric(world_size, torch.int64)
        mine = torch.full((n,), float(rank), device=device)
        ok = torch.zeros(1, dtype=torch.int64, device=device)
        stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (inbox, arrived, barrier_words, mine, ok)]
        code = library.start_ring(heap.device_handle(), *pointers[:4], ctypes.c_uint64(n), pointers[4],
                                  ctypes.c_void_p(stream))
        heap.synchronize()
        assert code == 0, f"rank {rank}: the launch failed with CUDA error {code}"
        assert int(ok) == 1, f"rank {rank}: a wait in the kernel timed out, or a peer died"
        want = torch.tensor([(rank - 1 - step) % world_size for step in range(world_size)],
                            dtype=torch.float32, device=device)
        assert torch.equal(inbox, want[:, None].expand(world_size, n)), inbox
        if rank == 0:
            order = want.int().tolist()
            print(f"{world_size} ranks on {device.type}: rank 0 received the numbers of ranks {order}")
            print("ring by kernels: ok")
        heap.barrier()  # no rank frees memory that another still writes


if __name__ == "__main__":
    launch(main)
