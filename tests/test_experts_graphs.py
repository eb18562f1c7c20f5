"""A training step of EPMoE in a CUDA graph: forward and backward, replayed with new tokens, routings and
parameters, have the bits of the stages outside of the graph.
"""

import dataclasses

import pytest
import torch

from cases import same_bits
from experts_cases import NAMES, capture, make_moe, step
from fused_cases import LEAVES, Experts, grown, has_fused_path, inputs_of, tensors

PATTERNS = ("uniform", "one_expert", "sentinels", "all_dropped", "one_rank")
WEIGHTS = ("w1", "w2")


def train(moe, t):
    """y and all gradients of a step, those of main_grad and backward_dw among them."""
    options = moe._weight_gradients
    if options and options.fuses:
        for leaf in WEIGHTS:
            getattr(moe, NAMES[leaf]).main_grad.zero_()
    found = step(moe, t, LEAVES)
    if options and options.delays:
        moe.backward_dw()
    for leaf in WEIGHTS if options else ():
        p = getattr(moe, NAMES[leaf])
        found[leaf] = p.main_grad.clone() if options.fuses else p.grad
    return found


def make_pair(world, device, case, t, gradients):
    """An EPMoE that runs the stages, and one with the fused kernels and the same parameters."""
    pair = [make_moe(world, device, case, t, gradients, fused=fused) for fused in (False, True)]
    for name in NAMES.values():
        setattr(pair[1], name, getattr(pair[0], name))
    if gradients.get("fuse_wgrad_accumulation"):
        for leaf in WEIGHTS:
            p = getattr(pair[0], NAMES[leaf])
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    return pair


def renew(moe, t, case, world, number):
    """New tokens, routing and dy in place, and parameters as an optimizer changes them."""
    case = dataclasses.replace(case, seed=number, pattern=PATTERNS[number % len(PATTERNS)])
    for name, value in inputs_of(case, world.rank, world.size).items():
        getattr(t, name).copy_(value)
    with torch.no_grad():
        for p in moe.parameters():
            p.mul_(0.75)


def difference(got, want, what):
    """What differs, or ""."""
    assert set(got) == set(want)
    for name, value in want.items():
        try:
            same_bits(got[name], value, f"{what}: {name}")
        except AssertionError as error:
            return str(error)
    return ""


@pytest.mark.cuda_only
@pytest.mark.parametrize("activation, bias, gradients", [
    ("swiglu", False, {}),
    ("gpt_oss", True, {}),
    ("geglu_tanh", True, {"delay_wgrad_compute": True}),
    ("swiglu", False, {"fuse_wgrad_accumulation": True}),
    ("swiglu", True, {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True}),
], ids=["swiglu", "gpt_oss-bias", "delay", "main_grad", "delay-main_grad"])
def test_experts_in_a_cuda_graph(ranks, activation, bias, gradients):
    """One captured step is replayed with new inputs. Steps outside of the graph alternate with it.

    Ranks that are threads do not replay graphs beside each other, so without torchrun there is one.
    """
    case = grown(ranks, Experts(activation=activation, bias=bias, num_local=4, topk=4, hidden=192, inner=144,
                                tokens="full", capacity="roomy"), 12)

    def run(world, device):
        t = tensors(case, world.rank, world.size, device)
        plain, moe = make_pair(world, device, case, t, gradients)
        with torch.autograd.set_multithreading_enabled(False):  # the backward runs in this thread
            graph, captured = capture(world, moe, lambda: train(moe, t))
            wrong = []
            for i in range(12):
                renew(moe, t, case, world, i)
                want = train(plain, t)
                for value in captured.values():
                    value.fill_(torch.nan)
                graph.replay()
                moe.layer.synchronize()
                wrong.append(difference(captured, want, f"replay {i}"))
                if i % 3 == 2:
                    wrong.append(difference(train(moe, t), want, f"step {i} outside of the graph"))
        assert moe.layer.num_launches == (4 * 6 if has_fused_path(device) else 0)
        for m in (plain, moe):
            m.layer.synchronize()
            m.finalize()
        return list(filter(None, wrong))

    assert ranks(run, world_size=1) == [[]] * ranks.size(1)


@pytest.mark.parametrize("fused", [False, True], ids=["stages", "fused"])
def test_experts_with_a_capacity_ask_for_no_number_of_rows(ranks, fused):
    """With a capacity, no part of a step reads the plan's number of rows: a graph can capture it."""
    case = Experts(bias=True, capacity="roomy")

    def run(world, device):
        t = tensors(case, world.rank, world.size, device)
        moe = make_moe(world, device, case, t, fused=fused)
        want, asked = step(moe, t, LEAVES), []
        moe.layer._num_rows = lambda *_: asked.append("rows")
        got = step(moe, t, LEAVES)
        del moe.layer._num_rows
        assert not asked
        moe.layer.synchronize()
        moe.finalize()
        return difference(got, want, "the second step")

    assert not any(ranks(run, world_size=2))
