"""What a process holds while it lives, and what is left when it is gone."""

import collections
import contextlib
import gc
import os
import types

import torch

from epmoe import _C


def _links():
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return links


def held():
    """What this process holds that a world, heap or layer may have taken; rss is in KiB."""
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
    """What there is more of, as text; "" when nothing."""
    room = {"fds": 0, "memfds": 0, "heaps": 0, "threads": 0,
            "maps": maps} | ({} if rss_kib is None else {"rss": rss_kib})
    return ", ".join(f"{what}: {before[what]} became {after[what]}" for what,
                     more in room.items() if after[what] > before[what] + more)


def left_over(before, after, kind, maps=8):
    """grown(), where CUDA and NCCL keep what they like."""
    return grown(before, after, maps) if kind == "cpu" else grown(before,
                                                                  after | {k: min(before[k], after[k])
                                                                           for k in ("heaps", "memfds")},
                                                                  maps=200)


def holdings():
    """The kinds of its open files and the names of its threads, counted: what held() has only the numbers of.
    """
    with open("/proc/net/unix") as f:
        local = {f"socket:[{line.split()[6]}]" for line in f
                 if line[0] != "N"}  # behind the heading; a socket's inode
    things = collections.Counter("unix socket" if link in local else link.split(":")[0] for link in _links())
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as f:
            things[f"thread {f.read().strip()}"] += 1
    return things


def more_of_ours(before, after):
    """Of two holdings(), what there is more of that can only be epmoe's: as text, "" when nothing.  On GPUs,
    where torch and CUDA keep more than that as they like: as much as a gloo group has was seen to stay where
    ranks had trained."""
    return ", ".join(f"{num} {what} more" for what, num in sorted((after - before).items())
                     if what.startswith(("unix socket", "thread epmoe")))


def kept(ref, steps=4):
    """What keeps an object that should be gone, and what keeps that, as text; "" when it is gone."""
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
    """Bytes of a GPU that are in use; 0 on the CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def files_in_use():
    """Paths below /dev/shm and /tmp that this process has open or mapped, and that have a name: a kill would
    leave them.
    """
    with open("/proc/self/maps") as f:
        parts = [line.split(maxsplit=5) for line in f]
    names = {p[5].strip() for p in parts if len(p) == 6 and p[1].endswith("s")}  # shared ones: not libraries
    return {n for n in names | set(_links()) if n.startswith(("/dev/shm/", "/tmp/"))
            and not n.endswith("(deleted)") and os.path.exists(n)}


def shared_memory_names():
    return {n for n in os.listdir("/dev/shm") if "epmoe" in n} if os.path.isdir("/dev/shm") else set()


def abstract_names():
    with open("/proc/net/unix") as f:
        return {line.split()[-1] for line in f if "@" in line}


def remember_names():
    """The abstract socket names that this process will choose from now on."""
    names, real = [], _C.world_listen

    def listen():
        fd, name, nonce = real()
        names.append("@" + name[1 : name[0]].decode())
        return fd, name, nonce

    _C.world_listen = listen
    return names
