"""Megatron-core's own MoELayer, with epmoe in its flex dispatcher and with its all-to-all dispatcher.

Four processes start once for groups of 2 and once for groups of 4, and run all cases. Each case builds two
MoELayers with the same parameters and compares outputs and gradients.
"""

import contextlib
import dataclasses
import doctest
import inspect
import types
from unittest import mock

import pytest
import torch
import torch.utils.checkpoint

import epmoe
import frameworks
from cases import process_ranks
from megatron_cases import BF16, E, F32, H, config_of, prepare
from rank_processes import run

pytestmark = [pytest.mark.cpu_only, pytest.mark.long]
NUM_RANKS = 4
# Megatron's router needs a token on each rank; padded() has none on one rank.
CASES = [((9, 9, 9, 9), 2, F32, False, None), ((9, 9, 9, 9), 2, BF16, False, None),
         ((3, 11, 1, 7), 2, F32, False, None), ((20, 2, 40, 1), 2, F32, False, None),
         ((9, 9, 9, 9), 4, F32, False, None), ((3, 11, 1, 7), 2, F32, True, None),
         ((9, 9, 9, 9), 2, F32, False, 0.5)]
# T of each rank in consecutive calls, and max_tokens of the layer in each group of 4 or of 2 ranks.
LENGTHS = [(4, 9, 2, 0), (4, 4, 9, 9), (0, 10, 0, 0), (3, 3, 3, 18), (1, 37, 100, 2)]
SIZES = {4: [[9, 9, 18, 18, 100]], 2: [[9, 9, 18, 18, 37], [2, 9, 9, 18, 100]]}


def layers_of(config):
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer

    parts = get_moe_module_spec(use_te=False, num_experts=E, moe_grouped_gemm=False)
    parts = parts.keywords["submodules"] if hasattr(parts, "keywords") else parts.submodules
    torch.manual_seed(0)
    theirs = MoELayer(config, parts)
    own = MoELayer(dataclasses.replace(config, moe_token_dispatcher_type="flex"), parts)
    own.load_state_dict(theirs.state_dict())
    return own, theirs


def step(layer, x, recompute):
    x = x.clone().requires_grad_()
    if recompute:
        y = torch.utils.checkpoint.checkpoint(lambda t: layer(t)[0], x, use_reentrant=False)
    else:
        y = layer(x)[0]
    y.float().square().sum().backward()
    return {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in layer.named_parameters()}


class NoEvent:
    """In the place of a CUDA event."""

    def record(self, stream=None):
        pass

    wait = record


def overlapped(layer, config, x):
    """A step as the schedule of overlap_moe_expert_parallel_comm makes it: the same as step() returns.

    Dispatch, experts and combine are nodes of Megatron, which frees the input of some after their forward.
    """
    from megatron.core.pipeline_parallel import utils

    try:
        from megatron.core.models.gpt.fine_grained_callables import should_free_input
    except ImportError:  # after 0.19
        from megatron.core.models.common.utils import should_free_input
    num_local = (E // config.expert_model_parallel_size,)
    more = num_local if "num_local_experts" in inspect.signature(should_free_input).parameters else ()
    dispatcher, of_node = layer.token_dispatcher, {}
    is_flex = config.moe_token_dispatcher_type == "flex"

    def node(name, forward):
        return utils.ScheduleNode(forward, None, NoEvent(), name=name,
                                  free_input=should_free_input(name, True, config, *more))

    def dispatch(tokens, probs):
        if is_flex:
            dispatcher._comm_manager.token_probs = probs
        rows, made = layer.dispatch(tokens, probs)
        of_node.update(made=made, probs=made.detach().requires_grad_(made.requires_grad))
        return rows

    def experts(rows):
        if is_flex:
            dispatcher._comm_manager.dispatched_probs = of_node["probs"]
        rows, counts, probs = dispatcher.dispatch_postprocess(rows, of_node["probs"])
        return dispatcher.combine_preprocess(layer.experts(rows, counts, probs)[0])

    def combine(rows):
        return dispatcher.combine_postprocess(dispatcher.token_combine(rows))

    x = x.clone().requires_grad_()
    tokens, probs = dispatcher.dispatch_preprocess(x, *reversed(layer.router(x)))
    nodes = node("moe_dispatch", dispatch), node("mlp", experts), node("moe_combine", combine)
    assert nodes[1].free_input
    with (mock.patch.object(torch.Tensor, "record_stream", lambda t, stream: None),
          mock.patch.object(torch.cuda.nvtx, "range_push"), mock.patch.object(torch.cuda.nvtx, "range_pop"),
          mock.patch.object(utils, "stream_acquire_context", lambda *_: contextlib.nullcontext(),
                            create=True)):  # newer versions have no such function
        y = nodes[2].forward(nodes[1].forward(nodes[0].forward((tokens, probs))))
        grad = nodes[1].backward(nodes[2].backward(2 * y.detach()))
        torch.autograd.backward([nodes[0].output, of_node["made"]], [grad, of_node["probs"].grad])
    torch.autograd.backward([tokens, probs], nodes[0].get_grad())
    return {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in layer.named_parameters()}


def both_overlapped(config, rank):
    pair = layers_of(config)
    for layer in pair:
        layer.config.overlap_moe_expert_parallel_comm = True
    x = torch.randn(9, 1, H, generator=torch.Generator().manual_seed(rank))
    return [overlapped(layer, layer.config, x) for layer in pair]


def too_many_choices(manager, rank, ep):
    """A token of rank 1 with three choices: the error of each rank. The next call works."""
    x, routing_map = torch.ones(4, H), torch.zeros(4, E, dtype=torch.bool)
    routing_map[:, :2] = True
    wrong = routing_map.clone()
    wrong[2, 5] = rank % ep == 1
    found = None
    manager.setup_metadata(wrong, wrong.float())
    try:
        manager.dispatch(x)
    except epmoe.EpIndexError as error:
        found = str(error)
    manager.setup_metadata(routing_map, routing_map.float())
    rows = manager.dispatch(x)
    assert torch.equal(manager.combine(rows), 2 * x)
    return found


def padded(manager, rank, ep):
    """Rows and probabilities with padding for FP8, through experts of which expert e multiplies by 1 + e."""
    manager.config = types.SimpleNamespace(**(vars(manager.config) | {
        "moe_router_padding_for_quantization": True, "fp8": "e4m3", "fp8_recipe": "tensorwise",
        "moe_router_dtype": "fp64"}))
    num_tokens = 0 if rank == 3 else 7
    torch.manual_seed(rank)
    idx = torch.rand(num_tokens, E).topk(2).indices
    routing_map = torch.zeros(num_tokens, E, dtype=torch.bool).scatter_(1, idx, True)
    routing_map[:, 0] = False  # an expert without rows
    x, scale = torch.randn(num_tokens, H, requires_grad=True), 1 + torch.arange(E)
    given = torch.rand(num_tokens, E, dtype=torch.float64).requires_grad_()
    manager.setup_metadata(routing_map, given * routing_map)
    rows, probs = manager.get_permuted_hidden_states_by_experts(manager.dispatch(x))
    counts = manager.get_number_of_tokens_per_expert()
    mine = scale.view(ep, -1)[rank % ep].repeat_interleave(counts)
    y = manager.combine(manager.get_restored_hidden_states_by_experts(
        (rows * (probs * mine)[:, None]).float()))
    grad = torch.randn(num_tokens, H)
    got = y, *torch.autograd.grad(y, (x, given), grad)
    factors = given * routing_map * scale
    wanted = x * factors.sum(1, keepdim=True)
    for t, want in zip(got, (wanted, *torch.autograd.grad(wanted, (x, given), grad.double()))):
        torch.testing.assert_close(t, want.to(t.dtype), rtol=1e-5, atol=1e-5)
    return rows.detach(), probs.detach(), counts


def growth(manager, rank, ep):
    """Calls of different lengths: the sizes of the layers that they use, and what they should be."""
    manager.router_topk = 1  # no other case has layers of this kind
    sizes = []
    for tokens in LENGTHS:
        x, routing_map = torch.randn(tokens[rank], H), torch.zeros(tokens[rank], E, dtype=torch.bool)
        routing_map[:, rank] = True
        manager.setup_metadata(routing_map, routing_map.float())
        rows = manager.dispatch(x)
        sizes.append(manager.handle.layer.max_tokens)
        assert torch.equal(manager.combine(rows), x)
    return sizes, SIZES[ep][rank // ep]


def main(rank, world_size, ep):
    prepare(ep)
    import epmoe.integrations.megatron as integration

    from megatron.core.transformer.moe import experts

    integration.use()
    integration.use()
    if not hasattr(experts, "GroupedMLP"):  # after 0.16
        with pytest.raises(ImportError, match="install megatron-core 0.16"):
            integration.use(experts=True)
    results = []
    for tokens, topk, dtype, recompute, capacity_factor in CASES:
        own, theirs = layers_of(config_of(ep, topk, dtype, capacity_factor))
        manager = own.token_dispatcher._comm_manager
        assert type(manager) is integration.EpmoeManager
        x = torch.randn(tokens[rank], 1, H, generator=torch.Generator().manual_seed(rank)).to(dtype)
        results.append((step(own, x, recompute), step(theirs, x, False)))
    refused = types.SimpleNamespace(**(vars(manager.config) | {"moe_pad_expert_input_to_capacity": True}))
    with pytest.raises(ValueError, match="does not pad the rows of an expert to a capacity"):
        integration.EpmoeManager(None, 1, 1, 1, refused)
    manager.router_topk = 2
    return (results, too_many_choices(manager, rank, ep), padded(manager, rank, ep),
            both_overlapped(config_of(ep, 2, F32, None), rank), growth(manager, rank, ep))


@pytest.fixture(scope="module", params=(2, 4))
def results(request):
    frameworks.need("megatron-core")
    return process_ranks(main, NUM_RANKS, request.param)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(c).replace("torch.", "") for c in CASES])
def test_integrations_megatron_equals_all_to_all(results, number):
    _, topk, dtype, _, _ = CASES[number]
    for rank, (cases, *_) in enumerate(results):
        got, wanted = cases[number]
        assert got.keys() == wanted.keys()
        for name in wanted:
            if wanted[name] is None:
                assert got[name] is None
            elif dtype == F32 and topk == 2:  # the sum of two numbers has one order
                assert torch.equal(got[name], wanted[name]), (rank, name)
            else:
                scale = wanted[name].float().abs().max().clamp_min(1e-30)
                torch.testing.assert_close(got[name].float() / scale, wanted[name].float() / scale, rtol=0,
                                           atol=2e-6 if dtype == F32 else 2e-2)


def test_integrations_megatron_too_many_choices(results):
    for _, message, *_ in results:
        assert message.startswith("a token has more than 2 experts in the routing map")
        assert "increase moe_router_topk" in message


def test_integrations_megatron_pads_rows(results):
    for _, _, (rows, probs, counts), *_ in results:
        assert all(n % 16 == 0 for n in counts.tolist()) and len(rows) == len(probs) == counts.sum()
        assert probs.dtype == torch.float64  # moe_router_dtype
        is_padding = probs == 0
        assert torch.equal(rows.eq(0).all(1), is_padding) and is_padding.any()
        for group in is_padding.split(counts.tolist()):
            assert torch.equal(group, group.sort(stable=True).values)  # padding comes last
    # An expert without rows gets no padding.
    assert min(counts[0] for _, _, (_, _, counts), *_ in results) == 0


def test_integrations_megatron_in_the_overlapped_schedule(results):
    """Megatron frees the rows of dispatch, and the experts need what they took for their backward."""
    for *_, (got, wanted), _ in results:
        assert got.keys() == wanted.keys() and got["router.weight"] is not None
        assert all(torch.equal(got[name], wanted[name]) for name in wanted if wanted[name] is not None)


def test_integrations_megatron_layer_grows(results):
    for *_, (sizes, wanted) in results:
        assert sizes == wanted


def test_integrations_megatron_page_runs(tmp_path):
    frameworks.need("megatron-core")
    output = frameworks.run_page("megatron.md", tmp_path, run, prepare="prepare_megatron")
    assert output.count("equal") == 2 and "different" not in output


def _examples(rank, world_size):
    frameworks.add_to_path()
    from epmoe.integrations import megatron

    return doctest.testmod(megatron, extraglobs={"torch": torch})


def test_integrations_megatron_examples_run():
    frameworks.need("megatron-core")
    failed, attempted = process_ranks(_examples, 1, backend=None)[0]
    assert attempted > 4 and not failed
