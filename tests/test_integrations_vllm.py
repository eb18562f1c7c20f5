"""epmoe in vLLM's MoE layers: prepare, experts in plain torch, finalize, against epmoe.reference.moe.

Four processes start once for stand-ins of vLLM's classes, and once for vLLM's own files if EPMOE_VLLM_SOURCE
names their folder (vllm_modules.py). They run all cases in groups of 1, 2 and 4 ranks.
"""

import doctest
import os
import sys
import types

import pytest
import torch
import torch.distributed as dist

import vllm_modules
import vllm_quantized
from cases import generator, process_ranks
from epmoe import _C, reference

pytestmark = pytest.mark.cpu_only
NUM_RANKS = 4
SIZES = 1, 2, 4
H, F, E = 32, 24, 8
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# (T of each rank, K, dtype, what the experts leave to do, weights on the input), E where it is not 8, and
# the name of a vllm_quantized.QUANTS where the experts expect quantized input
CASES = [((9, 9, 9, 9), 2, F32, "NoOP", False), ((9, 9, 9, 9), 2, F32, "Contiguous", False),
         ((5, 0, 12, 1), 3, F32, "Delegate", False), ((0, 0, 0, 0), 2, F32, "NoOP", False),
         ((0, 7, 0, 3), 2, BF16, "Contiguous", False), ((4, 6, 2, 8), 2, F16, "NoOP", False),
         ((3, 11, 0, 7), 1, F32, "NoOP", True), ((3, 11, 0, 7), 1, F32, "Contiguous", True),
         ((40, 2, 0, 9), 2, F32, "NoOP", False),  # more than max_tokens: a larger layer
         ((9, 0, 12, 1), 2, F32, "Contiguous", False, 7), ((3, 11, 0, 7), 2, F32, "NoOP", False, 3),
         ((9, 0, 12, 1), 2, F32, "NoOP", False, 8, "block"),
         ((4, 6, 2, 8), 3, BF16, "Delegate", False, 8, "block"),
         ((0, 7, 0, 3), 2, F32, "Contiguous", False, 3, "transposed"),
         ((3, 11, 0, 7), 1, F32, "NoOP", True, 8, "token"), ((0, 0, 0, 0), 2, F32, "NoOP", False, 8, "token"),
         ((9, 9, 9, 9), 2, F32, "NoOP", False, 3, "static"),
         ((5, 0, 12, 1), 2, F32, "Contiguous", False, 3, "tensor"),
         ((5, 0, 12, 1), 2, F32, "NoOP", False, 8, "int8"), ((5, 0, 2, 1), 2, F32, "NoOP", False, 8, "nvfp4"),
         ((5, 0, 2, 1), 2, F32, "NoOP", False, 8, "mxfp8")]
MAX_TOKENS = 16
GRAPH = 13  # the most tokens of a rank in a CUDA graph
GRAPHS = 4, GRAPH


# ---- in the ranks ----


def num_experts(case):
    return case[5] if len(case) > 5 else E


def quant_of(case):
    return case[6] if len(case) > 6 else None


def own(case, size, rank):
    """The experts of a rank, as vLLM spreads them."""
    return range(num_experts(case))[sum(counts_of(case, size)[:rank]):sum(counts_of(case, size)[:rank + 1])]


def counts_of(case, size):
    num, more = divmod(num_experts(case), size)
    return [num + 1] * more + [num] * (size - more)


def inputs(rank, case):
    tokens, topk, dtype, _, _, *_ = case
    g = generator(rank, topk, 3)
    idx = torch.rand(tokens[rank], num_experts(case), generator=g).topk(topk).indices.int()
    idx[torch.rand(idx.shape, generator=g) < 0.2] = -1
    return torch.randn(tokens[rank], H, generator=g).to(dtype), idx, torch.rand(idx.shape, generator=g)


def parameters(dtype):
    g = generator(5)
    return [torch.randn(E, 2 * F, H, generator=g).div(6).to(dtype),
            torch.randn(E, H, F, generator=g).div(5).to(dtype)]


def experts(rows, scales, ids, weights, gate_up, down):
    """What vLLM's experts do with rows of one expert each. weights: None if they are applied later."""
    if scales is not None:
        rows = vllm_quantized.numbers(rows, scales).to(down.dtype)
    y = torch.empty_like(rows)
    for e in range(E):
        of = (ids[:, 0] == e).nonzero()[:, 0]
        y[of] = reference.activate(rows[of] @ gate_up[e].T) @ down[e].T
    return y if weights is None else y * weights.to(y.dtype)


def config_of(size, backend="allgather_reducescatter", ep=True, **changes):
    """What the adapter reads of vLLM's FusedMoEConfig."""
    # dp_size 1 would not be expert-parallel there; a group of one rank runs the same code.
    parallel = dict(tp_size=1, pcp_size=1, dp_size=max(2, size), ep_size=size, tp_rank=0, pcp_rank=0,
                    dp_rank=0, ep_rank=0, sp_size=1, use_ep=ep, all2all_backend=backend, enable_eplb=False)
    if vllm_modules.is_loaded("source"):
        from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

        parallel = FusedMoEParallelConfig(**parallel)
    else:
        parallel = types.SimpleNamespace(**parallel, use_all2all_kernels=ep)
    return types.SimpleNamespace(**dict(
        moe_parallel_config=parallel, num_experts=E, experts_per_token=2, hidden_dim=H, in_dtype=F32,
        device="cpu", max_num_tokens=MAX_TOKENS, is_lora_enabled=False,
        skip_final_all_reduce=False, elastic_ep_max_dp_size=size) | changes)


def settings(graphs="NONE", elastic=False, of_encoder=False):
    """A stand-in for get_current_vllm_config_or_none."""
    mode = types.SimpleNamespace(name=graphs)
    return lambda: types.SimpleNamespace(
        compilation_config=types.SimpleNamespace(cudagraph_mode=mode, max_cudagraph_capture_size=GRAPH,
                                                 cudagraph_mm_encoder=of_encoder),
        parallel_config=types.SimpleNamespace(enable_elastic_ep=elastic))


def run_kernel(mover, case, first, size, rank):
    """The same through vLLM's own FusedMoEKernelModularImpl, in the place of its MoE layer."""
    kernel = sys.modules[vllm_modules.OWN[0]]
    _, topk, dtype, left, on_input, *_ = case
    x, idx, weights = inputs(rank, case)
    gate_up, down = parameters(dtype)

    class Experts(kernel.FusedMoEExpertsModular):
        expects_unquantized_inputs = False
        quant_config = vllm_quantized.config_of(quant_of(case))
        moe_config = config_of(size)
        a2_scale = None

        def __init__(self):
            pass

        def workspace_shapes(self, rows, *args):
            return (0,), (0,), (rows, H)

        def workspace_dtype(self, dtype):
            return dtype

        def finalize_weight_and_reduce_impl(self):
            return getattr(sys.modules[vllm_modules.OWN[2]], f"TopKWeightAndReduce{left}")()

        def apply(self, output, hidden_states, topk_weights, topk_ids, a1q_scale, **_):
            applied = topk_weights if left == "NoOP" and not on_input else None
            output.copy_(experts(hidden_states, a1q_scale, topk_ids, applied, gate_up, down))

    Experts.__abstractmethods__ = frozenset()  # what chooses among vLLM's experts
    whole = kernel.FusedMoEKernelModularImpl(mover, Experts())
    ours = list(own(case, size, rank - first))
    return whole.apply(x, gate_up[ours], down[ours], idx, weights, global_num_experts=num_experts(case),
                       apply_router_weight_on_input=on_input)


def sent_to(ours, case, ranks):
    """The rows that the experts `ours` must get, not quantized: ordered by expert, source rank, token."""
    rows = [torch.empty(0, H, dtype=case[2])]
    for e in ours:
        for rank in ranks:
            x, idx, weights = inputs(rank, case)
            x = x * weights.to(x.dtype) if case[4] else x
            rows.append(x[(idx == e).any(1)])
    return torch.cat(rows)


def check_prepared(rows, scales, meta, ids, row_weights, ours, case, ranks, fixed):
    """Check what prepare returns, and return M. fixed: None, or sizes of graphs: zeros follow the rows."""
    chosen = torch.cat([inputs(r, case)[1].flatten() for r in ranks])
    counts = (chosen[None] == ours[:, None]).sum(1)
    num = int(counts.sum())
    assert meta is None  # vLLM's CutlassExpertsFp8 asserts that it has no counts
    total = num
    if fixed is not None:
        most = max(case[0][r] for r in ranks)
        total = len(ranks) * next(size for size in (*fixed, most) if size >= most) * case[1]
    assert len(rows) == total and ids.shape == row_weights.shape == (total, 1) and ids.dtype == torch.int32
    assert torch.equal(ids[:num, 0].long(), ours.repeat_interleave(counts))
    others = set(range(-1, num_experts(case))) - set(ours.tolist())
    assert set(ids[num:].flatten().tolist()) <= others and not row_weights[num:].any()
    assert len(ranks) == 1 or total == num or ids[num:].min() >= 0
    sent = torch.nn.functional.pad(sent_to(ours, case, ranks), (0, 0, 0, total - num)), None
    if quant_of(case) and total:
        sent = vllm_quantized.quantize(sent[0], quant_of(case))
        assert torch.equal(scales, sent[1]) and scales.stride() == sent[1].stride()
    assert (scales is None) == (sent[1] is None) and rows.dtype == sent[0].dtype
    assert torch.equal(rows.float(), sent[0].float())
    return num


def run_case(mover, case, first, size, rank, fixed=None):
    """Check what prepare returns. Return the output and what it must be."""
    _, topk, dtype, left, on_input, *_ = case
    x, idx, weights = inputs(rank, case)
    gate_up, down = parameters(dtype)
    quant = vllm_quantized.config_of(quant_of(case))
    rows, scales, meta, ids, row_weights = mover.prepare(x, weights, idx, num_experts(case), None, on_input,
                                                         quant, False)
    ours = torch.tensor(own(case, size, rank - first), dtype=torch.int64)
    num = check_prepared(rows, scales, meta, ids, row_weights, ours, case, range(first, first + size), fixed)
    y = experts(rows, scales, ids, row_weights if left == "NoOP" and not on_input else None, gate_up, down)
    y[num:] = torch.nan  # what vLLM's experts leave there
    output = torch.full((len(x), H), torch.nan, dtype=dtype)
    impl = getattr(sys.modules[vllm_modules.OWN[2]], f"TopKWeightAndReduce{left}")()
    shape = (len(rows), 1, H) if left == "Contiguous" else (len(rows), H)  # vLLM's experts return either
    mover.finalize(output, y.view(shape), row_weights, ids, on_input, impl)
    if on_input:
        x, weights = x * weights, torch.ones_like(weights)
    if quant_of(case) not in (None, "tensor") and len(x):
        x = vllm_quantized.numbers(*vllm_quantized.quantize(x, quant_of(case)))
    return output, reference.moe(x.float(), idx, weights, gate_up.float(), down.float())


def run_fixed(integration, case, group, size, rank):
    """The case where vLLM makes CUDA graphs. Return the output. Before them, numbers of rows are fixed."""
    first = rank // size * size
    tokens = case[0][first:first + size]
    integration.get_forward_context = lambda: types.SimpleNamespace(
        dp_metadata=types.SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(tokens)))
    mover = integration.EpmoePrepareAndFinalize(group, MAX_TOKENS, H, case[1], num_experts(case), case[2],
                                                "cpu", GRAPH)
    integration.is_workspace_manager_initialized = lambda: True
    for locked in (False, True):
        integration.current_workspace_manager = lambda: types.SimpleNamespace(is_locked=lambda: locked)
        is_fixed = max(tokens) <= GRAPH or not locked
        y, _ = run_case(mover, case, first, size, rank, GRAPHS if is_fixed else None)
    return y


def check_close(got, want):
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)


def run_without_graphs(integration, group, size, rank):
    """Where vLLM locks the memory without graphs of these calls, the first ones show the most rows."""
    tokens = [9, 0, 4, 2][:size]
    integration.get_forward_context = lambda: types.SimpleNamespace(
        dp_metadata=types.SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(tokens)))
    case = (tokens * 4, 2, F32, "NoOP", False)
    for locks in (False, True):
        mover = integration.EpmoePrepareAndFinalize(group, MAX_TOKENS, H, 2, E, F32, "cpu",
                                                    locks_memory=locks)
        integration.current_workspace_manager = lambda: types.SimpleNamespace(is_locked=lambda: False)
        check_close(*run_case(mover, case, rank // size * size, size, rank, () if locks else None))


def run_equal(integration, group, size, rank):
    """Context parallelism alone: all ranks have as many tokens, and vLLM has no metadata."""
    integration.get_forward_context = lambda: types.SimpleNamespace(dp_metadata=None)
    mover = integration.EpmoePrepareAndFinalize(group, MAX_TOKENS, H, 2, E, F32, "cpu", GRAPH,
                                                has_equal_tokens=True)
    integration.current_workspace_manager = lambda: types.SimpleNamespace(is_locked=lambda: True)
    for num_tokens in (GRAPH, 0, MAX_TOKENS):
        case = (num_tokens,) * 4, 2, F32, "NoOP", False
        check_close(*run_case(mover, case, rank // size * size, size, rank,
                              GRAPHS if num_tokens <= GRAPH else None))


def run_sequence_parallel(integration, group, rank):
    """Ranks 0 and 1 share the tokens of a data-parallel rank, and 2 and 3 those of another."""
    for of_dp, is_fixed in (((5, 3), True), ((13, 1), True), ((0, 9), True), ((25, 3), False),
                            ((1, 0), True)):
        integration.get_forward_context = lambda: types.SimpleNamespace(
            dp_metadata=types.SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(of_dp)))
        mover = integration.EpmoePrepareAndFinalize(group, MAX_TOKENS, H, 2, 7, F32, "cpu", -(-GRAPH // 2), 2)
        integration.current_workspace_manager = lambda: types.SimpleNamespace(is_locked=lambda: True)
        case = tuple(-(-of_dp[r // 2] // 2) for r in range(4)), 2, F32, "Contiguous", False, 7
        check_close(*run_case(mover, case, 0, 4, rank, (-(-GRAPH // 2),) if is_fixed else None))


def check_ids(integration):
    """vLLM's experts and those of the layer, where the first ranks have one more than the others."""
    for num, size in ((7, 4), (7, 3), (3, 4), (1, 2), (8, 4), (60, 8)):
        mover = types.SimpleNamespace(_num=num // size, _more=num % size,
                                      _num_physical=(num // size + (num % size > 0)) * size)
        ids = torch.arange(-1, num + 3, dtype=torch.int32)
        got = integration.EpmoePrepareAndFinalize._physical(mover, ids).tolist()
        local = mover._num_physical // size
        of_rank = [r * local + i for r in range(size) for i in range(num // size + (r < num % size))]
        assert got[:num + 2] == [-1, *of_rank, mover._num_physical]
        assert min(got[num + 2:]) > mover._num_physical  # wrong ids stay wrong


def errors_of(integration, size):
    """What each wrong configuration and call raises: the messages."""
    found = []

    def say(fn, *args, **options):
        try:
            fn(*args, **options)
            found.append("nothing")
        except (ValueError, NotImplementedError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")

    make = sys.modules[vllm_modules.OWN[1]].maybe_make_prepare_finalize
    say(make, config_of(size, backend="deepep_low_latency"), None, None, True)
    say(make, config_of(size), None, None, True, use_monolithic=True)
    say(make, config_of(size, is_lora_enabled=True), None, None, True)
    say(make, config_of(size, skip_final_all_reduce=True), None, None, True)
    integration.get_current_vllm_config_or_none = settings(elastic=True)
    say(make, config_of(size), None, None, True)
    on_gpu = config_of(size, device="cuda")
    for now, wanted in ((settings("PIECEWISE"), (GRAPH, True)), (settings(of_encoder=True), (0, True)),
                        (settings(), (0, False)), (lambda: None, (0, False))):  # None: as it was known
        integration.get_current_vllm_config_or_none = now
        assert tuple(integration._graph_options(on_gpu).values()) == wanted
    integration.get_current_vllm_config_or_none = settings("PIECEWISE")
    assert integration._graph_options(config_of(size)) == {}
    of_two = types.SimpleNamespace(sp_size=2)
    assert integration._graph_options(types.SimpleNamespace(
        device="cuda", moe_parallel_config=of_two))["graph_tokens"] == -(-GRAPH // 2)
    mover = make(config_of(size), None, None, True)  # without CUDA there are no graphs
    x, idx = torch.ones(1, H), torch.zeros(1, 2, dtype=torch.int32)
    call = x, torch.ones(1, 2), idx, E, None
    say(mover.prepare, *call, False, types.SimpleNamespace(quant_dtype="mxfp4"), False)
    say(mover.prepare, *call, True, types.SimpleNamespace(quant_dtype=None), False)
    say(mover.finalize, x, x, x, idx, False, None)
    mover.post_init_setup(types.SimpleNamespace(topk=1))
    mover.post_init_setup(types.SimpleNamespace())
    say(mover.post_init_setup, types.SimpleNamespace(topk=2))
    integration.torch.cuda.is_current_stream_capturing = lambda: True
    say(mover._layer_of_fixed_size, types.SimpleNamespace(is_cuda=True, shape=[17]), None)
    # The experts quantize themselves: the rows are moved as they are.
    quant = types.SimpleNamespace(quant_dtype=torch.float8_e4m3fn)
    rows, scales, _, ids, weights = mover.prepare(*call, False, quant, defer_input_quant=True)
    assert rows.dtype == F32 and scales is None
    say(mover.finalize, x, rows, weights, ids, False, object())
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    of_all_rows = dict(quant_dtype=torch.float8_e4m3fn, per_act_token_quant=False, block_shape=None,
                       a1_scale=None)
    say(mover.prepare, *call, False, types.SimpleNamespace(**of_all_rows), False)
    of_each_token = types.SimpleNamespace(**of_all_rows | {"per_act_token_quant": True})
    assert not integration._has_scale_of_all_rows(of_each_token)
    mover = make(config_of(size), None, None, True)
    mover.prepare(*call, False, types.SimpleNamespace(quant_dtype=None), False)
    assert mover._layout.layer._config.combine_mode == _C.COMBINE_SCATTER  # not first the rows of each rank
    del os.environ["VLLM_BATCH_INVARIANT"]
    return found


def main(rank, world_size, which):
    vllm_modules.load(which)
    from epmoe.integrations import vllm as integration

    other = sys.modules["vllm.other"] = types.ModuleType("vllm.other")
    other.maybe_make_prepare_finalize = integration._chosen_by_vllm
    integration.use()
    integration.use()
    make = sys.modules[vllm_modules.OWN[1]].maybe_make_prepare_finalize
    assert other.maybe_make_prepare_finalize is make is integration._choose
    integration.get_current_vllm_config_or_none = settings()
    vllm_quantized.prepare()
    if which == "source":
        vllm_modules.prepare_kernel()
    results = {}
    for size in SIZES:
        groups = [dist.new_group(list(range(r, r + size))) for r in range(0, NUM_RANKS, size)]
        group = types.SimpleNamespace(cpu_group=groups[rank // size])
        integration.get_ep_group = lambda group=group: group
        for case in CASES:
            config = config_of(size, experts_per_token=case[1], in_dtype=case[2],
                               num_experts=num_experts(case))
            mover = make(config, None, None, True)
            assert type(mover) is integration.EpmoePrepareAndFinalize
            assert isinstance(mover, sys.modules[vllm_modules.OWN[0]].FusedMoEPrepareAndFinalizeModular)
            assert mover.num_dispatchers() == size and mover.output_is_reduced() is True
            assert mover.max_num_tokens_per_rank() is None and not mover.supports_async()
            assert mover.activation_format.name == "Standard" and mover.topk_indices_dtype() == torch.int32
            with torch.inference_mode():
                for _ in range(2):
                    results[size, case] = run_case(mover, case, rank // size * size, size, rank)
                if which == "source":
                    y = run_kernel(mover, case, rank // size * size, size, rank)
                    assert torch.equal(y, results[size, case][0])
                results[size, case] += run_fixed(integration, case, group.cpu_group, size, rank),
        with torch.inference_mode():
            run_without_graphs(integration, group.cpu_group, size, rank)
            run_equal(integration, group.cpu_group, size, rank)
            if size == 4:
                run_sequence_parallel(integration, group.cpu_group, rank)
    check_ids(integration)
    return results, errors_of(integration, size)


# ---- the tests ----


@pytest.fixture(scope="module", params=("stand-in", "source"))
def results(request):
    if request.param == "source":
        vllm_modules.SOURCE.need()
    return process_ranks(main, NUM_RANKS, request.param)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES, ids=[str(c).replace("torch.", "") for c in CASES])
def test_integrations_vllm_equals_reference(results, size, case):
    atol = {F32: 2e-6, BF16: 2e-2, F16: 3e-3}[case[2]]
    if quant_of(case) == "tensor":  # no reference for a scale of all rows of a rank: the error of FP8
        atol = 0.1
    for cases, _ in results:
        got, want, fixed = cases[size, case]
        torch.testing.assert_close(got.float(), want, rtol=atol, atol=atol)
        assert torch.equal(got, fixed)
    assert sum(len(cases[size, case][0]) for cases, _ in results) == sum(case[0])


def test_integrations_vllm_refuses_what_it_does_not_have(results):
    texts = ("ValueError: EPMOE_VLLM=1 takes the place of --all2all-backend allgather_reducescatter",
             "NotImplementedError: the chosen experts also route",
             "NotImplementedError: epmoe does not move the LoRA ids",
             "NotImplementedError: this model adds up the partial sums",
             "NotImplementedError: epmoe's ranks are fixed",
             "NotImplementedError: the experts want rows of mxfp4",
             "ValueError: apply_router_weight_on_input with 2 experts",
             "RuntimeError: finalize without a prepare",
             "NotImplementedError: SimpleNamespace expects 2 experts for each row",
             "RuntimeError: a CUDA graph with 17 tokens: epmoe expects at most 0",
             "NotImplementedError: experts that leave object to do",
             "NotImplementedError: VLLM_BATCH_INVARIANT=1 with a dynamic scale of all rows")
    for _, messages in results:
        assert all(m.startswith(t) for m, t in zip(messages, texts, strict=True)), messages


def _alone(rank, world_size, which):
    """Where no tokens move, vLLM's own choice is made. Changed classes are errors. The examples run."""
    vllm_modules.load(which)
    from epmoe.integrations import vllm as integration

    tried = doctest.testmod(integration, extraglobs={"torch": torch})
    own = []
    integration._chosen_by_vllm = lambda *args: own.append(args) or "vLLM's own"
    make = sys.modules[vllm_modules.OWN[1]].maybe_make_prepare_finalize
    moe = config_of(1, ep=False)
    assert make(moe, "quant", allow_new_interface=True) == "vLLM's own"
    assert make(config_of(2), "quant") == "vLLM's own"  # without the interface of prepare and finalize
    assert own[0] == (moe, "quant", None, True, False, None, None)
    sys.modules[vllm_modules.OWN[1]].maybe_make_prepare_finalize = lambda moe, new: None
    try:
        integration.use()
    except ImportError as error:
        return tried, str(error)


@pytest.mark.parametrize("which", ("stand-in", "source"))
def test_integrations_vllm_choice(which):
    if which == "source":
        vllm_modules.SOURCE.need()
    (failed, attempted), message = process_ranks(_alone, 1, which, backend=None)[0]
    assert attempted > 4 and not failed
    assert "maybe_make_prepare_finalize has changed: its parameters are (moe new)" in message
