"""LowLatencyAll2All with NaN and infinity, which FP8 cannot represent, and with rows that nobody writes."""

import pytest
import torch

import epmoe
from epmoe import reference


def test_low_latency_fp8_scale_ignores_a_signaling_nan(ranks):
    def run(world, device):
        x = torch.ones(2, 128, dtype=torch.bfloat16)
        x[:, 5] = 896
        x.view(torch.int16)[0, 60] = 0x7f81  # NaN: the first bit of its mantissa is 0
        a2a = epmoe.LowLatencyAll2All(world, 2, 128, 1, world.size, device=device)
        inputs = x, torch.full((2, 1), world.rank), torch.ones(2, 1)
        rows, scales, _, _ = a2a.dispatch(*(t.to(a2a.device) for t in inputs), fp8=True)
        results = rows[0, :2].view(torch.uint8).cpu(), scales[0, :2].cpu()
        a2a.synchronize()
        a2a.finalize()
        return results

    for rows, scales in ranks(run):
        assert scales.flatten().tolist() == [2.0, 2.0]
        assert rows[0, 60] & 0x7f == 0x7f
        rows[0, 60] = rows[1, 60]
        assert torch.equal(rows[0], rows[1])


@pytest.mark.parametrize("fp8", [True, "pow2", "ue8m0"])
def test_low_latency_fp8_scale_of_infinity(ranks, fp8):
    """The scale of a group with an infinity is infinity, also as a power of two."""
    def run(world, device):
        x = torch.ones(1, 512, dtype=torch.bfloat16)
        x[0, 130] = torch.inf
        a2a = epmoe.LowLatencyAll2All(world, 1, 512, 1, world.size, device=device)
        idx = torch.full((1, 1), world.rank, device=device)
        rows, scales, _, _ = a2a.dispatch(x.to(device), idx, fp8=fp8)
        results = rows[0, :1].view(torch.uint8).cpu(), scales[0, :1].cpu()
        a2a.synchronize()
        a2a.finalize()
        return x, *results

    for x, rows, scales in ranks(run):
        q, wanted = reference.quantize_fp8(x, pow2=fp8 is not True)
        assert wanted[0, 1] == torch.inf
        assert torch.equal(scales, reference.pack_ue8m0(wanted) if fp8 == "ue8m0" else wanted)
        q = q.view(torch.uint8)
        assert rows[0, 130] & 0x7f == q[0, 130] & 0x7f == 0x7f  # NaN of either sign
        rows[0, 130] = q[0, 130]
        assert torch.equal(rows, q)


def test_low_latency_rows_that_stay_unwritten_are_filled(ranks):
    """As torch.empty, the memory of the outputs follows torch.use_deterministic_algorithms()."""
    def run(world, device):
        a2a = epmoe.LowLatencyAll2All(world, 4, 64, 1, world.size, dtype=torch.float32, device=device)
        idx = torch.full((1, 1), world.rank, device=device)
        rows, _, counts, _ = a2a.dispatch(torch.ones(1, 64, device=device), idx)
        a2a.synchronize()
        a2a.finalize()
        return counts, rows

    for counts, rows in ranks(run):
        assert counts.tolist() == [1] and (rows[0, 0] == 1).all() and rows[0, 1:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_low_latency_nan_with_all_bits_set_arrives_as_nan(ranks, dtype):
    """A word with all bits set would be the empty word on its way.  Another NaN travels in its place."""
    def run(world, device):
        peer = (world.rank + 1) % world.size
        x = torch.arange(64.0).to(dtype)[None]
        x.view(torch.uint8)[0, 32:40] = 0xff
        weight = torch.ones(1, 2)
        weight.view(torch.uint8)[0, :4] = 0xff
        idx = torch.tensor([[2 * peer, 2 * peer + 1]])
        a2a = epmoe.LowLatencyAll2All(world, 1, 64, 2, 2 * world.size, dtype=dtype, device=device)
        inputs = [t.to(a2a.device) for t in (x, idx, weight)]
        rows, _, counts, handle = a2a.dispatch(*inputs, layout="compact")
        rows = rows[:int(counts.sum())].cpu()
        sums = a2a.combine(torch.ones_like(inputs[0]).expand(2 * world.size, -1).contiguous(), handle).cpu()
        a2a.synchronize()
        a2a.finalize()
        return x, rows, sums

    for x, rows, sums in ranks(run, at_least=2):
        assert rows.shape == (2, 64) and sums.isnan().all()
        assert torch.equal(rows.isnan(), x.isnan().expand(2, -1)) and x.isnan().any()
        assert torch.equal(rows.nan_to_num(), x.nan_to_num().expand(2, -1))
