"""Short samples of soak_decode.py, and a test that it detects a fault."""

import pytest
import torch

import soak_decode


@pytest.mark.parametrize("number", range(4))
def test_soak_decode_sample(ranks, number):
    """4 ranks, halves and two buffers, with epochs near a limit in most batches."""
    def run(world, device):
        return soak_decode.run_batch(world, device, 5, number, 40, graphs=ranks.is_torchrun)

    results = ranks(run)
    assert results == [0] * len(results)


def test_soak_decode_batches_cross_all_limits():
    epochs = {soak_decode.make_batch(0, n, 4, False)[1] for n in range(40)}
    assert len(epochs) == 4 and max(epochs) < 2**48


def test_soak_decode_detects_one_wrong_number(ranks):
    def run(world, device):
        batch = soak_decode.Batch(world, device, 5, 1)
        for wanted in batch.wanted:
            for t in wanted:
                if t.numel():
                    t[-1, -1] += 1
        with torch.no_grad():
            for i in range(soak_decode.NUM_INPUTS):
                batch.call(i, False)
        batch.a2a.finalize()
        return int(batch.wrong)

    assert sum(ranks(run)) > 0
