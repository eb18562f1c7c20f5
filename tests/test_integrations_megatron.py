"""Megatron-core's own MoELayer, with epmoe in its flex dispatcher and with its all-to-all dispatcher.

Four processes start once for groups of 2 and once for groups of 4, and run all cases. Each case builds two
MoELayers with the same parameters and compares outputs and gradients.
"""

import contextlib
import dataclasses
import doctest
import types

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint

import epmoe
import frameworks
from cases import process_ranks

pytestmark = pytest.mark.cpu_only
NUM_RANKS = 4
H, E = 32, 8
# (T of each rank, K, dtype, recompute, expert capacity factor)
F32, BF16 = torch.float32, torch.bfloat16
# Megatron's router needs a token on each rank; padded() has none on one rank.
CASES = [((9, 9, 9, 9), 2, F32, False, None), ((9, 9, 9, 9), 2, BF16, False, None),
         ((3, 11, 1, 7), 2, F32, False, None), ((20, 2, 40, 1), 2, F32, False, None),
         ((9, 9, 9, 9), 4, F32, False, None), ((3, 11, 1, 7), 2, F32, True, None),
         ((9, 9, 9, 9), 2, F32, False, 0.5)]


class Stream:
    """A stand-in for a CUDA stream, which Megatron's all-to-all dispatcher uses without a GPU too."""

    def wait_stream(self, other):
        pass

    def record_event(self):
        return self

    def synchronize(self):
        pass


def prepare(ep):
    """Import Megatron-core on a machine without a GPU, and make its groups."""
    frameworks.add_to_path()
    torch.cuda.Stream = Stream
    torch.cuda.current_stream = lambda *args: None
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.current_device = lambda: torch.device("cpu")
    exchange = dist.all_to_all_single

    def with_lists(out, x, output_split_sizes=None, input_split_sizes=None, **options):
        """Megatron makes arrays of the sizes only where they come from a GPU."""
        sizes = (None if s is None else [int(n) for n in s] for s in (output_split_sizes, input_split_sizes))
        return exchange(out, x, *sizes, **options)

    dist.all_to_all_single = with_lists
    from megatron.core import jit

    jit.disable_jit_fuser()  # it would compile for a minute
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # undefined there without Transformer Engine
        moe_utils.te_general_gemm = None
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)


def config_of(ep, topk, dtype, capacity_factor):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1, hidden_size=H, num_attention_heads=4, num_moe_experts=E, moe_router_topk=topk,
        moe_ffn_hidden_size=48, ffn_hidden_size=48, expert_model_parallel_size=ep, add_bias_linear=False,
        use_cpu_initialization=True, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none", params_dtype=dtype,
        bf16=dtype == BF16, moe_expert_capacity_factor=capacity_factor)


def layers_of(config):
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer

    parts = get_moe_module_spec(use_te=False, num_experts=E, moe_grouped_gemm=False).submodules
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


def padded(manager, rank):
    """Rows and probabilities with padding for FP8, and what combine makes of them."""
    manager.config = types.SimpleNamespace(**(vars(manager.config) | {
        "moe_router_padding_for_quantization": True, "fp8": None, "fp4": None}))
    num_tokens = 0 if rank == 3 else 7
    idx = torch.rand(num_tokens, E, generator=torch.Generator().manual_seed(rank)).topk(2).indices
    routing_map = torch.zeros(num_tokens, E, dtype=torch.bool).scatter_(1, idx, True)
    routing_map[:, 0] = False  # an expert without rows
    x = torch.randn(num_tokens, H)
    manager.setup_metadata(routing_map, routing_map.float())
    rows, probs = manager.get_permuted_hidden_states_by_experts(manager.dispatch(x))
    counts = manager.get_number_of_tokens_per_expert()
    y = manager.combine(manager.get_restored_hidden_states_by_experts(rows))
    torch.testing.assert_close(y, x * routing_map.sum(1, keepdim=True))
    return rows, probs, counts


def main(rank, world_size, ep):
    prepare(ep)
    import epmoe.integrations.megatron as integration

    integration.use()
    integration.use()
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
    return results, too_many_choices(manager, rank, ep), padded(manager, rank)


@pytest.fixture(scope="module", params=(2, 4))
def results(request):
    frameworks.need("megatron-core")
    return process_ranks(main, NUM_RANKS, request.param)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(c).replace("torch.", "") for c in CASES])
def test_integrations_megatron_equals_all_to_all(results, number):
    _, topk, dtype, _, _ = CASES[number]
    for rank, (cases, _, _) in enumerate(results):
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
    for _, message, _ in results:
        assert message.startswith("a token has more than 2 experts in the routing map")
        assert "increase moe_router_topk" in message


def test_integrations_megatron_pads_rows(results):
    for _, _, (rows, probs, counts) in results:
        assert all(n % 16 == 0 for n in counts.tolist()) and len(rows) == len(probs) == counts.sum()
        assert torch.equal(rows.eq(0).all(1), probs == 0) and (probs == 0).any()
    assert min(counts[0] for _, _, (_, _, counts) in results) == 0  # an expert without rows gets no padding


def _examples(rank, world_size):
    frameworks.add_to_path()
    from epmoe.integrations import megatron

    return doctest.testmod(megatron, extraglobs={"torch": torch})


def test_integrations_megatron_examples_run():
    frameworks.need("megatron-core")
    failed, attempted = process_ranks(_examples, 1, backend=None)[0]
    assert attempted > 4 and not failed
