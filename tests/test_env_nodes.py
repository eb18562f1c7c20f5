"""python -m epmoe.env --nodes: what it measures, and what it warns about."""

import contextlib
import io
import json
import os
import socket

import pytest

from cases import process_ranks
from epmoe import env

pytestmark = pytest.mark.cpu_only


def of_torchrun(rank, size, port):
    """Rank main: the command, as torchrun on two nodes of two ranks starts it.  Returns what it printed."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    env._MIB["cpu"] = 1
    with contextlib.redirect_stdout(io.StringIO()) as out:
        env.main(["--nodes", "--json"])
    return out.getvalue()


def test_env_nodes_measures_each_rail_between_each_two_nodes():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    first, *others = process_ranks(of_torchrun, 4, port, backend=None)
    assert others == [""] * 3  # only rank 0 prints
    (pair,) = json.loads(first)["rates"]
    assert pair["nodes"] == [0, 1] and len(pair["bytes_per_second"]) == 2
    assert all(0 < rate < 1e12 for rate in pair["bytes_per_second"])


def test_env_nodes_warns_about_slow_and_uneven_rails():
    good = {(0, 1): [44e9, 45e9], (0, 2): [46e9, 44e9], (1, 2): [45e9, 45e9]}
    assert env.rail_warnings(good, 35.0) == []
    assert "no rail is slow" in env.rails_text(good, [])
    bad = good | {(0, 2): [46e9, 12e9]}
    assert env.rail_warnings(bad, 35.0) == [
        "slow: rail 1 between nodes 0 and 2: 12.0 GB/s, expected at least 35",
        "uneven: rail 1 between nodes 0 and 2: 12.0 GB/s, 27 % of the median 45.0"]
    assert env.rail_warnings({(0, 1): [1e9, 1.1e9]}, None) == []  # no rate of a CPU is too low
    assert env.rails_text(bad, ["slow: x"]).splitlines()[1:] == [
        "  nodes       rail 0  rail 1", "  0 - 1        44.00   45.00", "  0 - 2        46.00   12.00",
        "  1 - 2        45.00   45.00", "", "slow: x"]


def test_env_nodes_says_how_it_is_started(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="torchrun"):
        env.main(["--nodes"])
