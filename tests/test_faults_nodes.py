"""A node dies, and the network between two nodes is cut: a sample of faults_nodes.py."""

import subprocess
import sys
from pathlib import Path

import pytest

from faults_nodes import UNSHARE
from pace import HANG_S

pytestmark = [pytest.mark.cpu_only, pytest.mark.long]
SCRIPT = Path(__file__).resolve().parent / "faults_nodes.py"


def refusal():
    """Why this machine has no network namespaces for us, or ""."""
    make = "ip link add v0 type veth peer name v1 && ip addr add 10.9.0.1/24 dev v0 && unshare --net true"
    try:
        done = subprocess.run([*UNSHARE, "sh", "-c", make], capture_output=True, text=True, timeout=HANG_S)
    except FileNotFoundError as error:
        return str(error)
    return done.stderr.strip() or "unshare failed" if done.returncode else ""


def test_faults_of_a_node_are_named_by_all_others():
    why = refusal()
    if why:
        pytest.skip(f"no network namespaces on this machine ({why})")
    done = subprocess.run([sys.executable, str(SCRIPT), "--each", "1", "--kinds", "node,cut"],
                          capture_output=True, text=True, timeout=HANG_S)
    output = done.stdout + done.stderr
    assert done.returncode == 0 and "2 ranks raised" in output and "4 ranks raised" in output, output
