"""torchtitan's own Mixture-of-Experts layer, with epmoe's token dispatcher and with torchtitan's.

Four processes start once and run all cases of CASES; each test looks at the results of one. Every case builds
two torchtitan MoE modules with the same parameters, through torchtitan's own configuration, overrides,
parallelize and meshes.
"""

import contextlib
import dataclasses
import doctest
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

import epmoe
import frameworks
from cases import process_ranks
from epmoe.integrations import layers
from pace import HANG_S
from rank_processes import run

pytestmark = [pytest.mark.cpu_only, pytest.mark.long]
NUM_RANKS = 4
OVERRIDE = "epmoe.integrations.torchtitan.token_dispatcher"
EXPERTS = "epmoe.integrations.torchtitan.grouped_experts"
D, F, E = 32, 48, 8


@dataclasses.dataclass(frozen=True)
class Case:
    ep: int = 4  # the ranks of an expert-parallel group; 1: torchtitan has no mesh for it
    tokens: tuple = (9, 9, 9, 9)  # T of each rank
    topk: int = 2
    dtype: torch.dtype = torch.float32
    backend: str = "standard"  # torchtitan's moe_comm_backend, which epmoe replaces
    options: tuple = ()  # of the override
    checkpoint: str | None = None
    pad: int | None = None
    experts: tuple = ()  # the options of the override for FP8, if it is there

    def __str__(self):
        return "-".join(str(v).removeprefix("torch.") for v in dataclasses.astuple(self))


SIZES = (("max_tokens", 16), ("hidden", D), ("dtype", "float32"))
FP8 = {"dtype": torch.bfloat16, "experts": (("compute_dtype", "float8_e4m3fn"),)}
CASES = [
    *(Case(ep=ep, dtype=dtype) for ep in (1, 2, 4) for dtype in (torch.float32, torch.bfloat16)),
    Case(ep=2, tokens=(3, 11, 0, 7)), Case(tokens=(5, 0, 12, 1)), Case(tokens=(0, 0, 0, 0)),
    Case(topk=4), Case(ep=2, topk=3, dtype=torch.bfloat16),
    Case(options=SIZES), Case(backend="deepep", options=SIZES), Case(backend="hybridep"),
    Case(ep=2, checkpoint="full", tokens=(3, 11, 0, 7)), Case(checkpoint="selective"),
    Case(checkpoint="epmoe"), Case(ep=1, pad=16), Case(ep=4, pad=16), Case(ep=2, pad=32, tokens=(3, 0, 0, 7)),
    Case(**FP8), Case(ep=1, checkpoint="epmoe", **FP8), Case(ep=2, pad=16, tokens=(3, 11, 0, 7), **FP8),
    Case(**FP8 | {"experts": (*FP8["experts"], ("wgrad_dtype", "bfloat16"))}),
]


# ---- in the ranks ----


def config_of(case, with_epmoe):
    """torchtitan's configuration of a MoE layer, made by the helpers of its model registries."""
    import spmd_types as spmd
    from torchtitan.components.quantization.utils import swap_token_dispatcher
    from torchtitan.models.common.config_utils import (make_moe_config, make_routed_experts_config,
                                                       make_router_config)
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config

    backend = case.backend if with_epmoe else "standard"
    normal = partial(torch.nn.init.normal_, std=0.2)
    sharding = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}
    router = make_router_config(dim=D, num_experts=E, gate_param_init={"weight": normal}, top_k=case.topk,
                                score_func="softmax", route_norm=True)
    routed = make_routed_experts_config(dim=D, hidden_dim=F, num_experts=E, top_k=case.topk,
                                        param_init=dict.fromkeys(sharding, normal), comm_backend=backend)
    config = make_moe_config(num_experts=E, router=router, routed_experts=routed)
    set_moe_sharding_config(config, enable_ep=case.ep > 1, enable_sp=False, expert_param_layout=sharding)
    if case.pad and with_epmoe:  # as the converters for FP8 and MXFP8 do
        swap_token_dispatcher(config.routed_experts, case.pad)
    return config


def build(case, dims, with_epmoe):
    from torchtitan.config.override import apply_overrides, OverrideConfig

    config = config_of(case, with_epmoe)
    if with_epmoe:
        experts = [(EXPERTS, dict(case.experts))] if case.experts else []
        apply_overrides(OverrideConfig(imports=[(OVERRIDE, dict(case.options)), *experts]), config)
    torch.manual_seed(0)
    moe = config.build()
    moe.parallelize(dims)
    moe.init_states()
    return moe


def checkpointed(moe, kind):
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    from epmoe.integrations.torchtitan import selective_ac

    no_shapes = {"force_recompute_mm_shapes_by_fqns": []}
    config = {"full": FullAC.Config, "selective": partial(SelectiveAC.Config, **no_shapes),
              "epmoe": lambda: selective_ac(SelectiveAC.Config(**no_shapes))}[kind]()
    return config.build()._wrap_block(moe, base_fqn="layers.0.moe")


@contextlib.contextmanager
def counted_plans():
    """Count the plans that epmoe makes inside of the block, in a list."""
    plan, found = epmoe.EPAll2AllLayer._plan, []
    epmoe.EPAll2AllLayer._plan = lambda *args: found.append(1) or plan(*args)
    try:
        yield found
    finally:
        epmoe.EPAll2AllLayer._plan = plan


def step(moe, x, dims):
    """One forward and backward inside of torchtitan's context. Return what must be equal, by name."""
    from torchtitan.distributed.utils import get_spmd_context

    x = x.clone().requires_grad_()
    with get_spmd_context(parallel_dims=dims)():
        y = moe(x)
        y.float().square().sum().backward()
    return {"y": y.detach(), "x": x.grad} | {n: p.grad.clone() for n, p in moe.named_parameters()}


def run_case(case, rank, dims):
    with counted_plans() as plans:
        own = build(case, dims, True)
        dispatcher = own.routed_experts.token_dispatcher
        made_early = dispatcher.layer is not None
        if case.dtype != torch.float32:
            own.to(case.dtype)
        x = torch.randn(1, case.tokens[rank], D, generator=torch.Generator().manual_seed(rank)).to(case.dtype)
        seen = {}
        inner = own.routed_experts.inner_experts
        inner.register_forward_pre_hook(lambda m, args: seen.update(rows=args[0], counts=args[1]))
        got = step(checkpointed(own, case.checkpoint) if case.checkpoint else own, x, dims)
    theirs = build(case, dims, False).to(case.dtype)
    wanted = step(theirs, x, dims)
    got = {name.replace("_checkpoint_wrapped_module.", ""): t for name, t in got.items()}
    return {"got": got, "wanted": wanted, "num_plans": len(plans), "made_early": made_early,
            "type": type(dispatcher).__name__, "rows": seen["rows"].detach(), "counts": seen["counts"],
            "max_tokens": dispatcher.layer.max_tokens}


def growth(rank, dims):
    """Calls of different lengths with one module: which layers they use, and whether results are right."""
    case = Case(topk=1)  # no other case has layers of this kind
    own, theirs = build(case, dims, True), build(case, dims, False)
    sizes, right = [], True
    lengths = [(4, 9, 2, 0), (4, 4, 9, 9), (0, 10, 0, 0), (3, 3, 3, 18), (1, 37, 100, 2), (20, 20, 20, 20)]
    for i, tokens in enumerate(lengths):
        x = torch.randn(1, tokens[rank], D, generator=torch.Generator().manual_seed(10 * i + rank))
        got, wanted = step(own, x, dims), step(theirs, x, dims)
        right = right and all(torch.equal(got[n], wanted[n]) for n in ("y", "x"))
        sizes.append(own.routed_experts.token_dispatcher.layer.max_tokens)
    return sizes, right


def mistakes(rank, dims):
    """A wrong call on one rank: an error on every rank, and the next call works."""
    from epmoe.integrations.torchtitan import EpmoeTokenDispatcher

    dispatcher = EpmoeTokenDispatcher.Config(num_experts=E, top_k=2).build()
    dispatcher.wire_meshes(ep_mesh=dims.get_optional_mesh("ep"))
    x, scores, ids = torch.randn(6, D), torch.rand(6, 2), torch.randint(E, (6, 2))
    dispatcher.dispatch(x, scores, ids, None)
    found = []
    for bad_scores, bad_ids in ((scores[:3] if rank == 1 else scores, ids), (scores, ids + E * (rank == 2))):
        try:
            dispatcher.dispatch(x, bad_scores, bad_ids, None)
        except (ValueError, epmoe.EpError) as error:
            found.append(type(error).__name__)
    rows, _, metadata = dispatcher.dispatch(x, scores, ids, None)
    y = dispatcher.combine(rows, metadata, x)
    torch.testing.assert_close(y, x * scores.sum(1, keepdim=True))
    return found


def compiled(rank, dims):
    """fullgraph=True, as torchtitan compiles its blocks, with the sizes from the override and without."""
    own = build(Case(options=SIZES), dims, True).routed_experts.token_dispatcher
    late = build(Case(topk=3), dims, True).routed_experts.token_dispatcher

    def moved(dispatcher, x, scores, ids):
        rows, _, metadata = dispatcher.dispatch(x, scores, ids, None)
        return dispatcher.combine(rows * 2, metadata, x)

    step_of = torch.compile(moved, backend="eager", fullgraph=True, dynamic=True)
    torch.manual_seed(rank)
    x, scores, ids = torch.randn(7, D), torch.rand(7, 2), torch.randint(E, (7, 2))
    y = step_of(own, x, scores, ids)
    torch.testing.assert_close(y, 2 * x * scores.sum(1, keepdim=True))
    try:
        step_of(late, x, scores, ids)
    except Exception as error:  # dynamo wraps it
        message = str(error)
    return message, experts_compiled(rank, dims)


def experts_compiled(rank, dims):
    """The experts in FP8 with DTensors, eager and compiled without a graph break: the results of both."""
    experts, mesh = build(Case(**FP8), dims, True).routed_experts.inner_experts, dims.get_optional_mesh("ep")
    for name, p in list(experts.named_parameters()):
        shard = DTensor.from_local(p.detach().bfloat16(), mesh, [Shard(0)])
        setattr(experts, name, torch.nn.Parameter(shard))
    torch.manual_seed(rank)
    x, counts, results = torch.randn(9, D).bfloat16(), torch.tensor([5, 4]), []
    for call in (experts, torch.compile(experts, backend="aot_eager", fullgraph=True, dynamic=True)):
        rows = x.clone().requires_grad_()
        y = call(rows, counts)
        y.square().sum().backward()
        results.append([y.detach(), rows.grad, *(p.grad.to_local().clone() for p in experts.parameters())])
        experts.zero_grad()
    return results


def uneven_all_to_all(outputs, inputs, group):
    """torch.distributed.all_to_all, for tensors of different sizes too, which gloo refuses."""
    received = torch.cat(outputs)
    dist.all_to_all_single(received, torch.cat(inputs), [len(t) for t in outputs], [len(t) for t in inputs],
                           group=group)
    for out, t in zip(outputs, received.split([len(t) for t in outputs])):
        out.copy_(t)


def main(rank, world_size):
    frameworks.add_to_path()
    dist.all_to_all = uneven_all_to_all  # torchtitan's own dispatcher calls it
    import torchtitan.distributed.parallel_dims as parallel_dims

    parallel_dims.device_type = "cpu"  # else that of the machine's accelerator
    meshes = {}
    for ep in (1, 2, 4):
        meshes[ep] = parallel_dims.ParallelDims(dp_replicate=1, dp_shard=world_size, cp=1, tp=1, pp=1, ep=ep,
                                                world_size=world_size)
        meshes[ep].build_mesh()
    results = {str(case): run_case(case, rank, meshes[case.ep]) for case in CASES}
    return results | {"growth": growth(rank, meshes[4]), "mistakes": mistakes(rank, meshes[4]),
                      "compiled": compiled(rank, meshes[4])}


# ---- tests ----


@pytest.fixture(scope="module")
def results():
    frameworks.need("torchtitan")
    return process_ranks(main, NUM_RANKS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_integrations_torchtitan_equals_its_own_dispatcher(results, case):
    for rank, of_rank in enumerate(r[str(case)] for r in results):
        assert of_rank["type"] == "EpmoeTokenDispatcher"
        assert of_rank["got"].keys() == of_rank["wanted"].keys()
        for name, wanted in of_rank["wanted"].items():
            got = of_rank["got"][name]
            assert got.dtype == wanted.dtype and got.shape == wanted.shape
            # The sum of two numbers has one order. The GEMMs of padded rows sum more numbers.
            exact = case.dtype == torch.float32
            if case.experts:
                # The loss is y squared, so gradients have the error of y too. In those of the router,
                # numbers cancel.
                bound = (0.4 if "router" in name else 0.2) * wanted.float().norm()
                assert (got.float() - wanted.float()).norm() <= bound, (rank, name)
                assert name != "y" or not case.tokens[rank] or not torch.equal(got, wanted)
            elif exact and case.topk == 2 and not (case.pad and name not in "yx"):
                assert torch.equal(got, wanted), (rank, name)
            else:
                scale = max([1e-30, *wanted.float().abs().flatten().tolist()])
                torch.testing.assert_close(got.float() / scale, wanted.float() / scale, rtol=0,
                                           atol=2e-6 if exact else 2e-2)


def test_integrations_torchtitan_layer_is_made_early_if_sizes_are_known(results):
    for case in CASES:
        assert results[0][str(case)]["made_early"] == bool(case.options)


def test_integrations_torchtitan_saves_communication(results):
    num_plans = {kind: results[0][str(Case(checkpoint=kind))]["num_plans"] for kind in ("selective", "epmoe")}
    assert num_plans == {"selective": 2, "epmoe": 1}
    assert results[0][str(Case())]["num_plans"] == 1


@pytest.mark.parametrize("case", [case for case in CASES if case.pad], ids=str)
def test_integrations_torchtitan_pads_rows(results, case):
    """Groups of rows have torchao's sizes: multiples, and one block for an expert without rows."""
    num_padding = 0
    for of_rank in (r[str(case)] for r in results):
        rows, counts = of_rank["rows"], of_rank["counts"]
        assert all(n > 0 and n % case.pad == 0 for n in counts.tolist())
        assert len(rows) >= counts.sum() and len(rows) % case.pad == 0
        is_empty = rows.eq(0).all(1)
        num_padding += int(is_empty.sum())
        for group in is_empty.split([*counts.tolist(), len(rows) - int(counts.sum())])[:-1]:
            assert torch.equal(group, group.sort(stable=True).values)  # zero rows come last
    assert num_padding


def test_integrations_torchtitan_layer_grows(results):
    assert all(r["growth"] == ([9, 9, 18, 18, 100, 100], True) for r in results)


def test_integrations_torchtitan_mistakes_are_errors_on_all_ranks(results):
    for rank, of_rank in enumerate(results):
        assert of_rank["mistakes"] == ["ValueError" if rank == 1 else "PeerError", "EpIndexError"]


def test_integrations_torchtitan_compiles(results):
    for of_rank in results:
        message, (eager, compiled) = of_rank["compiled"]
        assert "set max_tokens, hidden and dtype in the override" in message
        assert all(map(torch.equal, eager, compiled))


def test_integrations_torchtitan_page_runs(tmp_path):
    frameworks.need("torchtitan")
    assert "equal" in frameworks.run_page("torchtitan.md", tmp_path, run)


def _examples(rank, world_size, name):
    frameworks.add_to_path()
    import importlib

    module = importlib.import_module(name)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    return doctest.testmod(module, extraglobs={"torch": torch}, optionflags=flags)


def test_integrations_torchtitan_examples_run():
    frameworks.need("torchtitan")
    failed, attempted = process_ranks(_examples, 1, "epmoe.integrations.torchtitan", backend=None)[0]
    assert attempted > 5 and not failed


def test_integrations_layers_examples_run():
    failed, attempted = doctest.testmod(layers, extraglobs={"torch": torch})
    assert attempted > 10 and not failed


def _without_memory(rank, world_size):
    """Rank 1 has no memory for what a dispatch of the adapters returns: all learn of it, and go on."""
    torch.manual_seed(rank)
    x, idx, weight = torch.randn(6, 16), torch.randint(8, (6, 2)), torch.rand(6, 2)
    empty, found = epmoe.EPAll2AllLayer._empty, []

    def fail(self, *sizes, **options):
        if len(sizes) > 1:
            raise torch.OutOfMemoryError("simulated")
        return empty(self, *sizes, **options)

    for fails in (False, True, False):
        epmoe.EPAll2AllLayer._empty = fail if fails and rank == 1 else empty
        try:
            layers.dispatch(dist.group.WORLD, x, idx, weight, 8)
            found.append("")
        except Exception as error:
            found.append(type(error).__name__)
    epmoe.EPAll2AllLayer._empty = empty
    epmoe.World.of(dist.group.WORLD).close()
    return found


def test_integrations_layers_dispatch_without_memory_on_one_rank():
    assert process_ranks(_without_memory, 2) == [["", "PeerError", ""], ["", "OutOfMemoryError", ""]]


def _refusals(rank, world_size):
    frameworks.add_to_path()
    from torchtitan.components.quantization import float8, mx
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.models.common.token_dispatcher import DeepEPTokenDispatcher, HybridEPTokenDispatcher
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

    from epmoe.integrations.torchtitan import (EpmoeGroupedExperts, EpmoeTokenDispatcher, grouped_experts,
                                               token_dispatcher)

    class Swapped(torch.Tensor):
        """As torchao's subclasses of Tensor are."""

    def experts_of(cls, **options):
        return grouped_experts(cls.Config(dim=D, hidden_dim=F, num_experts=1),
                               **{"compute_dtype": "float8_e4m3fn"} | options)

    def swapped():
        experts = EpmoeGroupedExperts.Config(dim=D, hidden_dim=F, num_experts=1,
                                             compute_dtype=torch.float8_e4m3fn).build()
        experts.w2_EDF = torch.nn.Parameter(experts.w2_EDF.detach().as_subclass(Swapped))
        experts(torch.ones(2, D), torch.tensor([2]))

    sizes = dict(num_experts=E, top_k=2)
    found = []
    for make in (lambda: token_dispatcher(DeepEPTokenDispatcher.Config(**sizes, cudagraphable=True)),
                 lambda: token_dispatcher(HybridEPTokenDispatcher.Config(**sizes,
                                                                         non_blocking_capacity_factor=1.0)),
                 lambda: token_dispatcher(HybridEPTokenDispatcher.Config(**sizes), dtype="bf16"),
                 lambda: EpmoeTokenDispatcher.Config(**sizes, pad_multiple=0).build(),
                 lambda: experts_of(float8._get_float8_grouped_experts_cls(GroupedExperts)),
                 lambda: experts_of(mx._get_mxfp8_grouped_experts_cls(GroupedExperts)),
                 lambda: experts_of(GptOssGroupedExperts), swapped,
                 lambda: experts_of(GroupedExperts, compute_dtype="fp8"),
                 lambda: experts_of(GroupedExperts, compute_dtype="float8_e5m2").build(),
                 lambda: experts_of(GroupedExperts, wgrad_dtype="float16").build()):
        try:
            make()
        except (ValueError, TypeError) as error:
            found.append(str(error))
    return found


def test_integrations_torchtitan_refuses_what_it_does_not_have():
    frameworks.need("torchtitan")
    found = process_ranks(_refusals, 1, backend=None)[0]
    texts = ("no cudagraphable", "no non_blocking_capacity_factor", "dtype 'bf16'", "pad_multiple 0",
             "leave Float8GroupedExpertsConverter out", "leave MXFP8GroupedExpertsConverter out",
             "GptOssGroupedExperts: epmoe has products in FP8 for torchtitan's GroupedExperts",
             "w2_EDF is a Swapped: a converter of quantised experts has swapped the parameters",
             "compute_dtype 'fp8': must be the name of a dtype",
             "compute_dtype torch.float8_e5m2: must be torch.float8_e4m3fn",
             "wgrad_dtype torch.float16: must be torch.bfloat16, or None")
    assert all(text in message for text, message in zip(texts, found, strict=True))


def test_integrations_say_which_version_they_need():
    for name in ("torchtitan 0.3", "megatron-core 0.16"):
        module = name.split()[0].removesuffix("-core")
        code = f"import sys; sys.modules[{module!r}] = None; import epmoe.integrations.{module}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S)
        assert f"epmoe.integrations.{module} needs {name}" in done.stderr, done.stderr


def test_integrations_changed_methods_are_errors():
    with pytest.raises(ImportError, match=r"EPAll2AllLayer.combine has changed: its parameters are \(self"):
        layers.check_methods("torch", epmoe.EPAll2AllLayer, combine="self rows")
    with pytest.raises(ImportError, match=r"EPAll2AllLayer.absent has changed: its parameters are \(missing"):
        layers.check_methods("torch", epmoe.EPAll2AllLayer, absent="self")
    with pytest.raises(ImportError, match="no-such-package of unknown version: EPAll2AllLayer.absent has"):
        layers.check_methods("no-such-package", epmoe.EPAll2AllLayer, absent="self")
