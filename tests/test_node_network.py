"""The network between two nodes is cut during calls: each side names the other node, within 3 s."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pace import HANG_S, is_soon

pytestmark = pytest.mark.cpu_only
UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
SCRIPT = Path(__file__).resolve().parent / "node_network.py"


def refusal():
    """Why this machine has no network namespaces for us, or ""."""
    make = "ip link add v0 type veth peer name v1 && ip addr add 10.9.0.1/24 dev v0 && unshare --net true"
    try:
        done = subprocess.run([*UNSHARE, "sh", "-c", make], capture_output=True, text=True, timeout=HANG_S)
    except FileNotFoundError as error:
        return str(error)
    return done.stderr.strip() or "unshare failed" if done.returncode else ""


def test_network_cut_is_named_as_a_node():
    why = refusal()
    if why:
        pytest.skip(f"no network namespaces on this machine ({why})")
    done = subprocess.run([*UNSHARE, sys.executable, str(SCRIPT)], capture_output=True, text=True,
                          timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    for rank, seen in enumerate(json.loads(done.stdout)):
        other = 1 - rank // 2
        assert seen["kind"] == seen["again"] == "PeerDied", seen
        assert f"node {other} (ranks {2 * other} to {2 * other + 1}) cannot be reached" in seen["text"], seen
        assert seen["lost"] == [2 * other, 2 * other + 1]
        assert is_soon(seen["latency"], 3), f"rank {rank}: seen {seen['latency']:.2f} s after the cut"
