"""epmoe in SGLang's MoE layers: dispatch, experts in plain torch, combine, against epmoe.reference.moe.

Four processes start once for stand-ins of SGLang's classes, and once for SGLang's own files if
EPMOE_SGLANG_SOURCE names their folder (sglang_modules.py). They run all cases in groups of 1, 2 and 4 ranks.
"""

import importlib
import inspect
import os
import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

import sglang_modules
from cases import generator, process_ranks
from epmoe import reference
from sglang_modules import message, parallel, recorded, server

pytestmark = pytest.mark.cpu_only
NUM_RANKS = 4
SIZES = 1, 2, 4
H, F, E, MAX_TOKENS = 512, 24, 8, 16
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# (mode, T of each rank, K, dtype, is_fp8, is_split).  is_fp8: whether the rows are fp8, or "ue8m0" for packed
# scales.  is_split: whether dispatch and combine are called in halves.
CASES = [("normal", (9, 9, 9, 9), 2, F32, False, False), ("normal", (5, 0, 12, 1), 3, F32, False, True),
         ("normal", (0, 0, 0, 0), 2, F32, False, False), ("normal", (0, 7, 0, 3), 2, BF16, False, False),
         ("normal", (40, 2, 0, 9), 2, F16, False, False), ("normal", (9, 3, 0, 5), 2, BF16, True, False),
         ("normal", (9, 0, 2, 5), 2, BF16, "ue8m0", True),
         *(("low_latency", *case) for case in (
             ((9, 9, 9, 9), 2, F32, False, False), ((5, 0, 12, 1), 3, F32, False, True),
             ((0, 0, 0, 0), 2, F32, False, False), ((0, 7, 0, 3), 1, F16, False, False),
             ((16, 2, 0, 9), 2, BF16, True, False), ((3, 8, 1, 9), 2, BF16, "ue8m0", True)))]


# ---- in the ranks ----


def inputs(rank, case):
    _, tokens, topk, dtype, _, _ = case
    g = generator(rank, topk, 3)
    idx = torch.rand(tokens[rank], E, generator=g).topk(topk).indices.int()
    idx[torch.rand(idx.shape, generator=g) < 0.2] = -1
    return torch.randn(tokens[rank], H, generator=g).to(dtype), idx, torch.rand(idx.shape, generator=g)


def parameters():
    g = generator(5)
    return torch.randn(E, 2 * F, H, generator=g).div(24), torch.randn(E, H, F, generator=g).div(5)


def expert(e, rows):
    gate_up, down = parameters()
    return reference.activate(rows @ gate_up[e].T) @ down[e].T


def decoded(rows, scales):
    """Return the numbers of rows and their scales as float32."""
    if scales is None:
        return rows.float()
    if scales.dtype == torch.int32:  # the exponents of four powers of two, + 127
        exponents = torch.stack([scales >> shift & 255 for shift in (0, 8, 16, 24)], -1).flatten(-2)
        scales = torch.exp2(exponents.float() - 127)
    return (rows.float().unflatten(-1, (-1, 128)) * scales[..., None]).flatten(-2)


def experts(sent, first, dtype):
    """What SGLang's runners do with the rows: return the combine input."""
    deepep = sys.modules[sglang_modules.DEEPEP]
    rows = decoded(sent.hidden_states, sent.hidden_states_scale)
    if hasattr(sent, "masked_m"):
        y = torch.full(rows.shape, torch.nan, dtype=dtype)  # combine must not read the rows after the last
        for e, m in enumerate(sent.masked_m.tolist()):
            y[e, :m] = expert(first + e, rows[e, :m]).to(dtype)
        return deepep.DeepEPLLCombineInput(y, sent.topk_ids, sent.topk_weights)
    y = torch.zeros_like(rows)
    for k in range(sent.topk_ids.shape[1]):
        for e in range(E - first):
            at = (sent.topk_ids[:, k] == e).nonzero()[:, 0]
            y[at] += sent.topk_weights[at, k, None] * expert(first + e, rows[at])
    return deepep.DeepEPNormalCombineInput(y.to(dtype), sent.topk_ids, sent.topk_weights)


def make(group, num_experts=E, num_local_experts=None, mode="auto", **changes):
    """Make a dispatcher as SGLang's FusedMoE layer does."""
    vars(server).update(deepep_mode=mode)
    moe = sys.modules[f"{sglang_modules.MOE}.utils"]
    moe.initialize_moe_config()
    sizes = dict(num_experts=num_experts, num_local_experts=num_local_experts or num_experts // group.size(),
                 hidden_size=H, params_dtype=F32) | changes
    if sglang_modules.SOURCE in sys.meta_path:
        layer = __import__(sglang_modules.LAYER, fromlist=["create_moe_dispatcher"])
        parallel.tp_group.device_group = group
        return layer.create_moe_dispatcher(types.SimpleNamespace(top_k=2, runner_backend=None, **sizes), None)
    return sys.modules[sglang_modules.DEEPEP].DeepEPDispatcher(
        group=group, router_topk=2, permute_fusion=True, deepep_mode=moe.DeepEPMode(mode), async_finish=True,
        return_recv_hook=True, runner_backend=None, **sizes)


def check_sent(sent, case, first, size, rank):
    """Check what dispatch returned and what SGLang's recorder got."""
    mode, tokens, topk, dtype, is_fp8, _ = case
    all_idx = [inputs(r, case)[1] for r in range(first, first + size)]
    counts = reference.plan(all_idx, E)["counts"].sum(0).view(size, -1)[rank - first]
    assert sent.hidden_states.dtype == (torch.float8_e4m3fn if is_fp8 else dtype)
    assert (sent.hidden_states_scale is not None) == bool(is_fp8)
    assert recorded[-1][0] == mode
    if mode == "low_latency":
        assert sent.format in ("deepep_ll", getattr(sent.format, "DEEPEP_LL", None))
        assert torch.equal(sent.masked_m.long(), counts) and recorded[-1][1] is sent.masked_m
        assert sent.hidden_states.shape == (E // size, size * MAX_TOKENS, H)
        assert sent.expected_m == (tokens[rank] * size * topk + E) // E
        if is_fp8:
            assert sent.hidden_states_scale.stride(1) == 1  # as DeepGEMM's TMA wants them
        return
    assert sent.format in ("deepep_normal", getattr(sent.format, "DEEPEP_NORMAL", None))
    aligned = [-(-n // 128) * 128 for n in counts.tolist()] if is_fp8 else counts.tolist()
    assert sent.num_recv_tokens_per_expert == aligned == recorded[-1][1]
    own = torch.arange(E).view(size, -1)[rank - first]
    arrives = [i[torch.isin(i, own).any(1)] for i in all_idx]  # one row for each token that comes here
    ids = torch.cat(arrives).long() - own[0]
    assert torch.equal(sent.topk_ids, torch.where((ids >= 0) & (ids < len(own)), ids, -1))
    assert len(sent.hidden_states) == len(sent.topk_weights) == len(ids)
    totals = torch.stack([(inputs(rank, case)[1] == e).sum() for e in range(E)])
    assert torch.equal(recorded[-1][2].long(), totals)


def run_case(dispatcher, case, first, size, rank):
    """Return the output, and what it must be."""
    mode, _, _, dtype, is_fp8, is_split = case
    x, idx, weights = inputs(rank, case)
    vars(server).update(is_extend=mode == "normal", has_deep_gemm=bool(is_fp8),
                        is_blackwell=is_fp8 == "ue8m0")
    dispatcher.set_quant_config({"dispatcher_output_dtype": "fp8" if is_fp8 else "bf16"})
    topk = types.SimpleNamespace(topk_weights=weights, topk_ids=idx)
    given = x.clone()
    if is_split:
        dispatcher.dispatch_a(hidden_states=given, topk_output=topk)
        if mode == "low_latency":
            given.fill_(torch.nan)  # the program may reuse it
        sent = dispatcher.dispatch_b()
    else:
        sent = dispatcher.dispatch(hidden_states=given, topk_output=topk)
    check_sent(sent, case, first, size, rank)
    results = experts(sent, E // size * (rank - first), dtype)
    memory = StorageWeakRef(sent.hidden_states.untyped_storage())
    sent.hidden_states.set_(sent.hidden_states.new_empty(0))  # SGLang's dispose_tensor
    assert memory.expired(), case
    if is_split:
        dispatcher.combine_a(combine_input=results)
        y = dispatcher.combine_b()
    else:
        y = dispatcher.combine(combine_input=results)
    x = decoded(*(reference.quantize_fp8(x, pow2=is_fp8 == "ue8m0") if is_fp8 else (x, None)))
    return y, reference.moe(x, idx, weights, *parameters())


def run_two_batches(group, mode, first, size, rank):
    """Two micro-batches of which one communicates while the other computes, as SGLang's two-batch overlap."""
    vars(server).update(has_two_batches=True, is_extend=mode == "normal", has_deep_gemm=False)
    pairs = [{}, {}]
    if sglang_modules.SOURCE in sys.meta_path:
        both = make(group)
        dispatchers, pairs = [both, both], [{"tbo_subbatch_index": 0}, {"tbo_subbatch_index": 1}]
        assert len(both._inners) == 2 and both._inners[0] is not both._inners[1]
    else:
        dispatchers = [make(group), make(group)]
    sent = [None, None]
    cases = [(mode, tokens, 2, F32, False, True) for tokens in ((4, 0, 9, 2), (7, 3, 0, 1))]
    data = [inputs(rank, case) for case in cases]
    for d in dispatchers:
        d.set_quant_config({"dispatcher_output_dtype": "bf16"})
    for _ in range(2):
        for d, pair, (x, idx, weights) in zip(dispatchers, pairs, data):
            topk = types.SimpleNamespace(topk_weights=weights, topk_ids=idx)
            d.dispatch_a(hidden_states=x, topk_output=topk, **pair)
        for i, (d, pair) in enumerate(zip(dispatchers, pairs)):
            sent[i] = experts(d.dispatch_b(**pair), E // size * (rank - first), F32)
        for i, (d, pair) in enumerate(zip(dispatchers, pairs)):
            d.combine_a(combine_input=sent[i], **pair)
        found = [d.combine_b(**pair) for d, pair in zip(dispatchers, pairs)]
    server.has_two_batches = False
    return [(y, reference.moe(*tensors, *parameters())) for y, tensors in zip(found, data)]


def with_setting(where, name, value, fn, *args, **options):
    """Call fn while a setting has another value."""
    before = getattr(where, name)
    setattr(where, name, value)
    try:
        return message(fn, *args, **options)
    finally:
        setattr(where, name, before)


def errors_of(group, rank):
    """What each wrong configuration and call raises: the messages."""
    deepep = sys.modules[sglang_modules.DEEPEP]
    found = [with_setting(parallel, "nnodes", 2, make, group),
             message(make, types.SimpleNamespace(size=lambda: 16)), message(make, group, 17, 4),
             message(deepep.DeepEPDispatcher, group, 2),
             with_setting(server, "deepep_config", "{}", make, group),
             with_setting(server, "output_dtype", "nvfp4", make, group)]
    vars(server).update(is_extend=False, has_deep_gemm=False)
    d = make(group)
    found.append(message(d.set_quant_config, {"input_global_scale": 1}))
    # where SGLang overlaps only dispatch, or nothing
    for nothing in None, types.SimpleNamespace(overlap=False):
        d.set_overlap_args(nothing, {})
    found.append(message(d.set_overlap_args, types.SimpleNamespace(overlap=True), {}))
    d.set_quant_config({"dispatcher_output_dtype": "bf16"})
    found += [message(d.combine, combine_input=None), message(d.dispatch_b)]
    topk = types.SimpleNamespace(topk_ids=torch.zeros(1, 2, dtype=torch.int32), topk_weights=torch.ones(1, 2))
    sent = d.dispatch(hidden_states=torch.ones(1, H), topk_output=topk)
    results = deepep.DeepEPLLCombineInput(sent.hidden_states, sent.topk_ids, sent.topk_weights)
    found.append(message(d.combine_b))
    d.combine_a(combine_input=results)
    found.append(message(d.dispatch_a, hidden_states=torch.ones(1, H), topk_output=topk))
    d.combine_b()
    sent = d.dispatch(hidden_states=torch.ones(1, H), topk_output=topk)
    results = deepep.DeepEPLLCombineInput(sent.hidden_states, sent.topk_ids, sent.topk_weights)
    found.append(message(d.combine, combine_input=deepep.DeepEPNormalCombineInput(*results)))
    found.append(message(d.combine, combine_input=results._replace(topk_weights=torch.ones(1, 2))))
    d.dispatch(hidden_states=torch.ones(1, H), topk_output=topk)
    num_tokens = MAX_TOKENS + 1 if rank == 0 else 1
    topk = types.SimpleNamespace(topk_ids=torch.zeros(num_tokens, 2, dtype=torch.int32),
                                 topk_weights=torch.ones(num_tokens, 2))
    found.append(message(d.dispatch, hidden_states=torch.ones(num_tokens, H), topk_output=topk))
    return found


def main(rank, world_size, which):
    os.environ[sglang_modules.MAX_TOKENS] = str(MAX_TOKENS)
    sglang_modules.load(which)
    sglang_modules.plug_in(which)
    from epmoe.integrations import sglang as integration

    deepep, base = sys.modules[sglang_modules.DEEPEP], sys.modules[sglang_modules.BASE]
    assert deepep.DeepEPDispatcher is integration.EpmoeDispatcher
    assert issubclass(deepep.DeepEPDispatcher, base.BaseDispatcher)
    assert not inspect.isabstract(deepep.DeepEPDispatcher)
    deepep.DeepEPBuffer.clean_buffer()
    assert deepep.Buffer.num_sms > 0  # SGLang's two-batch overlap reads it, also without DeepEP
    results = {}
    for size in SIZES:
        groups = [dist.new_group(list(range(r, r + size))) for r in range(0, NUM_RANKS, size)]
        group, first = groups[rank // size], rank // size * size
        with torch.inference_mode():
            dispatcher = make(group)
            for case in CASES:
                for _ in range(2):
                    results[size, case] = run_case(dispatcher, case, first, size, rank)
            for mode in ("normal", "low_latency"):
                results[size, mode] = run_two_batches(group, mode, first, size, rank)
            hooked = run_hooks(group, first, size, rank)
            check_barriers(dispatcher, first, size, rank)
    with torch.inference_mode():
        return results, hooked, errors_of(group, rank)


def check_barriers(dispatcher, first, size, rank):
    """While DeepGEMM compiles, each operation has a barrier of SGLang before it, and the first one too."""
    from epmoe.integrations import sglang_transport

    os.environ["SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE"] = "1"
    barrier, shared = parallel.tp_group.barrier, sglang_transport._shared
    for mode, num_first in (("normal", 3), ("low_latency", 2)):
        sglang_transport._shared, num_made = {}, []
        barrier.reset_mock()
        barrier.side_effect = lambda: num_made.append(len(sglang_transport._shared))
        for num_barriers in (num_first, num_first + 2):
            run_case(dispatcher, (mode, (2, 0, 3, 1), 2, F32, False, False), first, size, rank)
            assert barrier.call_count == num_barriers
        assert num_made[0] == 0 and num_made[-1] == 1  # the creation of the buffers comes after a barrier
    barrier.side_effect, sglang_transport._shared = None, shared
    del os.environ["SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE"]


def run_hooks(group, first, size, rank):
    """A hook of SGLang runs between the halves of dispatch: return how often, and whether y is the same."""
    calls = []
    for mode in ("normal", "low_latency"):
        case = mode, (3, 0, 2, 9), 2, F32, False, False
        dispatcher = make(group, mode=mode)
        y = run_case(dispatcher, case, first, size, rank)[0]

        def hook(inner):  # removes itself, as that of SGLang's DeepSeek models
            calls.append(inner)
            for handle in handles if isinstance(handles, list) else [handles]:
                handle.remove()

        handles = dispatcher.register_deepep_dispatch_hook(hook)
        again = run_case(dispatcher, case, first, size, rank)[0]
        run_case(dispatcher, case, first, size, rank)
        calls.append(torch.equal(y, again))
    return [c if isinstance(c, bool) else type(c).__name__ for c in calls]


# ---- the tests ----


@pytest.fixture(scope="module", params=("stand-in", "source"))
def results(request):
    if request.param == "source":
        sglang_modules.SOURCE.need()
    return process_ranks(main, NUM_RANKS, request.param)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES, ids=[str(c).replace("torch.", "") for c in CASES])
def test_integrations_sglang_equals_reference(results, size, case):
    atol = {F32: 2e-6, BF16: 2e-2, F16: 3e-3}[case[3]]
    for cases, _, _ in results:
        got, want = cases[size, case]
        torch.testing.assert_close(got.float(), want, rtol=atol, atol=atol)
    assert sum(len(cases[size, case][0]) for cases, _, _ in results) == sum(case[1])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ("normal", "low_latency"))
def test_integrations_sglang_overlaps_two_batches(results, size, mode):
    for cases, _, _ in results:
        for got, want in cases[size, mode]:
            torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)


def test_integrations_sglang_hooks(results):
    for _, hooked, _ in results:
        assert hooked == ["EpmoeDispatcher", True] * 2


def test_integrations_sglang_refuses_what_it_does_not_have(results):
    texts = ("ValueError: 4 expert-parallel ranks on 2 nodes",
             "ValueError: 16 expert-parallel ranks on 1 nodes",
             "ValueError: 17 experts on 4 ranks", "TypeError: num_experts is missing",
             "ValueError: --deepep-config",
             "NotImplementedError: the experts want rows of nvfp4",
             "NotImplementedError: the experts want rows of nvfp4",
             "NotImplementedError: epmoe's combine does not overlap",
             "RuntimeError: combine without a dispatch", "RuntimeError: dispatch_b without a dispatch_a",
             "RuntimeError: combine_b without a combine_a", "RuntimeError: dispatch before the combine_b",
             "TypeError: combine after a dispatch in the mode low_latency: wanted a DeepEPLLCombineInput",
             "RuntimeError: combine has other topk_weights")
    for rank, (_, _, messages) in enumerate(results):
        last = "PeerError" if rank else "ValueError: 17 tokens in a low-latency dispatch, which has room for"
        assert all(m.startswith(t) for m, t in zip(messages, (*texts, last), strict=True)), messages
