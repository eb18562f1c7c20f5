"""What a process holds while it lives, and what is left after it has ended."""

import collections
import contextlib
import gc
import os
import types

import torch

from epmoe import _C


def _links():
    """The targets of this process's file descriptors."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return links


def held():
    """Counts of what this process holds and a world, heap or layer may have created. rss is in KiB."""
    gc.collect()
    links = [link.split(":")[0] for link in _links()]
    with open("/proc/self/maps") as f:
        maps = f.readlines()
    with open("/proc/self/statm") as f:
        rss = int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
    return {"fds": len(links), "memfds": sum("memfd" in link for link in links),
            "heaps": sum("memfd:epmoe" in m for m in maps), "maps": len(maps),
            "threads": len(os.listdir("/proc/self/task")), "rss": rss}


def grown(before, after, maps=0, rss_kib=None):
    """Which numbers of two held() grew by more than is allowed, as text. "" if none grew.

    maps and rss_kib are the allowed growth. Without rss_kib, rss is not compared.
    """
    allowed = {"fds": 0, "memfds": 0, "heaps": 0, "threads": 0, "maps": maps}
    if rss_kib is not None:
        allowed["rss"] = rss_kib
    return ", ".join(f"{what}: {before[what]} became {after[what]}" for what, more in allowed.items()
                     if after[what] > before[what] + more)


def left_over(before, after, kind, maps=8):
    """grown(), but on GPUs it ignores what CUDA and NCCL may keep: memfds and up to 200 maps."""
    if kind == "cpu":
        return grown(before, after, maps)
    return grown(before, after | {k: min(before[k], after[k]) for k in ("heaps", "memfds")}, maps=200)


def holdings():
    """Counts of the kinds of this process's open files and of the names of its threads.

    held() has only their total numbers.
    """
    with open("/proc/net/unix") as f:
        inodes = [line.split()[6] for line in f if line[0] != "N"]  # without the heading, "Num ..."
    local = {f"socket:[{inode}]" for inode in inodes}
    things = collections.Counter("unix socket" if link in local else link.split(":")[0] for link in _links())
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as f:
            things[f"thread {f.read().strip()}"] += 1
    return things


def more_of_ours(before, after):
    """What things of epmoe grew between two holdings(), as text. "" if none grew.

    This is for GPUs, where torch and CUDA may keep other things. After ranks had trained, for example, as
    many descriptors and threads were left as a gloo group has.
    """
    return ", ".join(f"{num} {what} more" for what, num in sorted((after - before).items())
                     if what.startswith(("unix socket", "thread epmoe")))


def kept(ref, steps=4):
    """Which objects refer to an object that should have been freed, and which refer to them, as text.

    "" if the object was freed. steps is the length of the chain of references.
    """
    gc.collect()
    objects, chain, seen = [ref()], [], set()
    if objects[0] is None:
        return ""
    for _ in range(steps):
        seen |= {id(objects), *map(id, objects)}
        objects = [o for o in gc.get_referrers(*objects) if id(o) not in seen
                   and not (isinstance(o, types.FrameType) and o.f_code is kept.__code__)]
        chain.append(", ".join(o.f_code.co_qualname if isinstance(o, types.FrameType) else type(o).__name__
                               for o in objects[:5]))
    return f"the {type(ref()).__name__} is kept by " + " <- ".join(chain)


def gpu_held(device):
    """The bytes of a GPU that are in use. 0 on the CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def files_in_use():
    """Paths below /dev/shm and /tmp that this process has open or mapped. They would remain after a kill."""
    with open("/proc/self/maps") as f:
        parts = [line.split(maxsplit=5) for line in f]
    names = {p[5].strip() for p in parts if len(p) == 6 and p[1].endswith("s")}  # shared maps, no libraries
    return {n for n in names | set(_links()) if n.startswith(("/dev/shm/", "/tmp/"))
            and not n.endswith("(deleted)") and os.path.exists(n)}


def shared_memory_names():
    return {n for n in os.listdir("/dev/shm") if "epmoe" in n} if os.path.isdir("/dev/shm") else set()


def abstract_names():
    with open("/proc/net/unix") as f:
        return {line.split()[-1] for line in f if "@" in line}


def remember_names():
    """A list to which every abstract socket name is added that this process chooses from now on."""
    names, real = [], _C.world_listen

    def listen():
        fd, name, nonce = real()
        names.append("@" + name[1 : name[0]].decode())
        return fd, name, nonce

    _C.world_listen = listen
    return names
