"""The programs that compute-sanitizer checks: two ranks, which are processes on one GPU under NVIDIA MPS.

    compute-sanitizer [--tool racecheck] --target-processes all torchrun --nproc-per-node 2 \
        tests/sanitized.py move|fused|fp8|decode

move: plan, dispatch and each form of combine, checked against the oracle.
fused: the two megakernels with each of their options, compared with the separate stages.
fp8: quantisation, the megakernels of FP8 and grouped GEMMs in FP8, compared with the separate stages.
decode: the low-latency dispatch and combine, whole and in halves, compared with those of EPAll2AllLayer.

Under MPS the kernels of both ranks run at the same time; without MPS they alternate.  As threads of one
process the ranks did not pass their first wait for each other under memcheck (H200, CUDA 13.0).
"""

import argparse

import torch
import torch.distributed as dist

import epmoe
from cases import MODES, Case, check_case, make_layer, poison_memory, run_routing
from soak import RANK, torchrun_world
from soak_fused import inputs_of

# racecheck makes a kernel some hundred times slower.  So each kernel uses few CTAs, and a wait may take
# minutes.
NUM_CTAS = 8
TIMEOUT_S = 400

FUSED_OPTIONS = (
    {},
    {"num_sm": 6, "num_tail_sms": 2, "block_wise_barrier": False},
    {"enable_local_combine": False, "combine_order": "serial", "num_reduce_sms": 3},
)


def move(world, device):
    """One routing through a layer of each form of combine; rank 0 checks the results of all ranks."""
    for mode in MODES:
        case = Case(num_local=3, topk=3, hidden=136, max_tokens=40, tokens="unequal", pattern="sentinels",
                    mode=mode, seed=5)
        layer = make_layer(world, device, case)
        mine = {name: t.cpu() if isinstance(t, torch.Tensor) else t
                for name, t in run_routing(layer, case).items()}
        results = [None] * world.size
        dist.all_gather_object(results, mine)
        if world.rank == 0:
            check_case(results, case)
        layer.finalize()


def run_fused(world, device, options):
    """Both megakernels once; the result must equal that of the separate stages in every bit."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    generator = torch.Generator().manual_seed(7 + world.rank)
    sizes = dict(max_tokens=40, hidden=144, topk=3, num_tot_experts=3 * world.size, device=device,
                 reserve_sms=num_sms // world.size - NUM_CTAS, **options)
    with (epmoe.EpAll2AllFusedOp(world, fused=False, **sizes) as plain,
          epmoe.EpAll2AllFusedOp(world, fused=True, **sizes) as op, torch.no_grad()):
        gate_up = torch.randn(3, 96, op.hidden, generator=generator).to(device, op.dtype)
        down = torch.randn(3, op.hidden, 48, generator=generator).to(device, op.dtype)
        x, idx, weight = inputs_of(op, "sentinels", world.rank, generator)
        results = []
        for layer in (plain, op):
            assert layer._is_fused(gate_up) == layer.fused, "there is no megakernel for this GPU"
            rows, row_weight, layout = layer.mega_dispatch_group_gemm(
                x, idx, weight=weight, gemm_weight=gate_up, activation="swiglu")
            results.append(layer.mega_group_gemm_combine(rows, down, layout, row_weight))
            layer.synchronize()
        assert torch.equal(*(y.view(torch.int16) for y in results)), f"{options}: wrong on rank {world.rank}"


def fused(world, device):
    for options in FUSED_OPTIONS:
        run_fused(world, device, options)


def fp8(world, device):
    """Experts in FP8, with the two megakernels, and with the separate stages."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    generator = torch.Generator().manual_seed(9 + world.rank)
    sizes = dict(max_tokens=40, hidden=144, topk=3, num_tot_experts=3 * world.size, device=device,
                 reserve_sms=num_sms // world.size - NUM_CTAS)
    with (epmoe.EpAll2AllFusedOp(world, fused=True, **sizes) as op,
          epmoe.EpAll2AllFusedOp(world, fused=False, **sizes) as plain, torch.no_grad()):
        gate_up = torch.randn(3, 128, op.hidden, generator=generator).to(device, op.dtype)
        down = torch.randn(3, op.hidden, 64, generator=generator).to(device, op.dtype)
        (gate_up, gate_up_scale), (down, down_scale) = map(epmoe.quantize_fp8_weight, (gate_up, down))
        x, idx, weight = inputs_of(op, "sentinels", world.rank, generator)
        results = []
        for layer in (op, plain):
            h, row_weight, layout = layer.mega_dispatch_group_gemm(
                x, idx, weight=weight, gemm_weight=gate_up, gemm_scale=gate_up_scale, activation="swiglu")
            results.append(layer.mega_group_gemm_combine(h, down, layout, row_weight, gemm_scale=down_scale))
            layer.synchronize()
        assert torch.equal(*(y.view(torch.int16) for y in results)), f"wrong on rank {world.rank}"


def decode(world, device):
    """Both layouts and each form of FP8.  Of rows in bf16, combine must have the bits of EPAll2AllLayer."""
    generator = torch.Generator().manual_seed(11 + world.rank)
    sizes = {"max_tokens": 24, "hidden": 512, "topk": 3}
    with torch.no_grad(), \
            epmoe.LowLatencyAll2All(world, num_experts=3 * world.size, num_sm=NUM_CTAS, device=device,
                                    **sizes) as a2a, \
            epmoe.EPAll2AllLayer(world, num_tot_experts=3 * world.size, num_sm=NUM_CTAS, device=device,
                                 enable_local_combine=True, **sizes) as layer:
        for fp8, layout in ((False, "masked"), (False, "compact"), (True, "masked"), ("ue8m0", "compact")):
            x, idx, weight = inputs_of(layer, "sentinels", world.rank, generator)
            weight = weight.float()
            rows, _, counts, handle = a2a.dispatch(x, idx, weight, fp8=fp8, layout=layout)
            pending = a2a.dispatch_send(x, idx, weight, fp8=fp8, layout=layout)
            again = pending.recv()
            assert torch.equal(counts, again[2]), f"{fp8}, {layout}: other counts on rank {world.rank}"
            if fp8:
                y = torch.randn(rows.shape, generator=generator).to(device, a2a.dtype)
                sums = [a2a.combine(y, handle, fp8=True), a2a.combine_send(y, handle, fp8=True).recv()]
                assert torch.equal(*sums), f"{fp8}, {layout}: other sums on rank {world.rank}"
                continue
            got, row_weight, plan = layer.dispatch(x, idx, weight)
            want = layer.combine(got, plan, row_weight)
            y = [a2a.combine(rows, handle), a2a.combine_send(again[0], again[3]).recv()]
            assert all(torch.equal(t, want) for t in y), f"{layout}: wrong on rank {world.rank}"
        a2a.synchronize()


PARTS = {"move": move, "fused": fused, "fp8": fp8, "decode": decode}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    part = parser.parse_args().part
    with torchrun_world() as (world, device):
        world.set_timeout(TIMEOUT_S)
        poison_memory()
        PARTS[part](world, device)
        world.exchange(b"x")
        if RANK == 0:
            print(f"sanitized: {part} on {world.size} ranks: right", flush=True)


if __name__ == "__main__":
    main()
