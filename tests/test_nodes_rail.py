"""TorchRail: the errors of epmoe that an exchange raises for those of torch, and how it waits for a GPU."""

import types

import pytest
import torch

import epmoe
from epmoe.comm import rail

pytestmark = pytest.mark.cpu_only

# What gloo and NCCL raise, the error of epmoe, and a part of its text.
ERRORS = {
    "gloo timeout": ("[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms "
                     "for recv operation to complete", epmoe.EpTimeout, "is stuck or makes another call"),
    "nccl timeout": ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLTOALL_BASE)",
                     epmoe.EpTimeout, "is stuck or makes another call"),
    "death": ("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
              "[127.0.0.1]:40213", epmoe.PeerDied, "died or left"),
    "other": ("Check failed: no elements to send", epmoe.EpError, "of other nodes failed"),
}


@pytest.fixture
def third(monkeypatch):
    """The rail of ranks 1, 5 and 9, as rank 9 has it, without process groups."""
    monkeypatch.setattr(rail.dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(rail.dist, "get_rank", lambda group: 2)
    return rail.TorchRail(None, None, [1, 5, 9], timeout_s=0.01)


@pytest.mark.parametrize("name", ERRORS)
def test_rail_error_is_named_by_the_text_of_torch(third, monkeypatch, name):
    """The error names the ranks of the rail, and has the text of torch."""
    text, kind, what = ERRORS[name]

    def all_to_all_single(*arguments, **options):
        raise RuntimeError(text)

    monkeypatch.setattr(rail.dist, "all_to_all_single", all_to_all_single)
    for call in (lambda: third.meet(b"x"), lambda: third.exchange(torch.empty(3), torch.ones(3))):
        with pytest.raises(epmoe.EpError) as error:
            call()
        assert type(error.value) is kind
        assert what in str(error.value) and text in str(error.value)
        assert str(error.value).startswith("rank 9") and "ranks 1, 5" in str(error.value)


def test_rail_wait_for_a_stuck_gpu_ends_at_the_timeout(third):
    """Or when the nodes have ended, because another rank has seen a death."""
    stuck = types.SimpleNamespace(query=lambda: False)
    with pytest.raises(epmoe.EpTimeout, match="rank 9 timed out: one of the ranks 1, 5, .* after 0.01 s"):
        third.wait_for(stuck)
    third.has_ended = lambda: True
    with pytest.raises(epmoe.PeerDied, match="rank 9: the nodes have ended"):
        third.wait_for(stuck)


def test_rail_wait_for_a_gpu_spins_before_it_sleeps(third, monkeypatch):
    """A read is usually short, and a sleep would delay it. A longer wait leaves the CPU to others."""
    now, looks, sleeps = [0.0], [], []

    def query():
        looks.append(now[0])
        now[0] += rail._SPIN_S / 8
        return now[0] > 20 * rail._SPIN_S

    def sleep(seconds):
        sleeps.append(now[0])
        now[0] += seconds

    monkeypatch.setattr(rail, "time", types.SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    third.timeout_s = 30 * rail._SPIN_S
    third.wait_for(types.SimpleNamespace(query=query))
    assert min(sleeps) > rail._SPIN_S
    assert len(sleeps) == sum(at > min(sleeps) for at in looks)  # it spins no more
