"""EPMoE with delay_wgrad_compute and fuse_wgrad_accumulation: the gradients, where they go, and when."""

import copy
import functools
import gc
import threading

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import epmoe
from cases import check_outcomes, outcome, process_ranks
from epmoe import _C
from epmoe.gemm.weight_gradients import DeferredWgrad
from epmoe.testing import run_threads
from moe_cases import Model, inputs_of, make_moe
from pace import HANG_S, when_waiting

WEIGHTS = ("gate_up_proj", "down_proj")
DELAY, FUSE = {"delay_wgrad_compute": True}, {"fuse_wgrad_accumulation": True}
OPTIONS = (DELAY, FUSE, DELAY | FUSE)
SIZES = (1, 2, 4)


def with_main_grads(moe, dtype=torch.float32, is_megatron=False):
    for p in moe.parameters():
        p.main_grad = torch.full_like(p, 0.5, dtype=dtype)
        if is_megatron:
            p.grad_added_to_main_grad = False
    return moe


def backward(moe, world, device, model, step, call=lambda moe, *inputs: moe(*inputs)):
    """Gradients of the inputs of one step."""
    x, idx, weight, dy = (t.to(device) for t in inputs_of(model, world.rank, world.size, step))
    x.requires_grad_()
    weight.requires_grad_()
    y = call(moe, x, idx, weight)
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad, "weight": weight.grad}


def error_of(fn, kind=RuntimeError):
    with pytest.raises(kind) as caught:
        fn()
    return str(caught.value)


def gradients(moe):
    return {n: None if p.grad is None else p.grad.clone() for n, p in moe.named_parameters()}


def train(world, device, model, options, scale=1.0):
    """Three backward passes, two of them before the first backward_dw. Returns all gradients."""
    moe = with_main_grads(make_moe(world, device, model, **options))
    moe.gradient_scale = scale
    seen = [backward(moe, world, device, model, step) for step in (0, 1)]
    waiting = gradients(moe)
    seen.append(backward(moe, world, device, model, 2))
    if "delay_wgrad_compute" in options:
        assert waiting["gate_up_proj"] is None and waiting["down_proj"] is None
        for _ in range(3):
            moe.backward_dw()
    main = {n: p.main_grad for n, p in moe.named_parameters()}
    moe.finalize()
    return seen, gradients(moe), main


def train_all(world, device, model, scale=1.0):
    return [train(world, device, model, options, scale) for options in ({}, *OPTIONS)]


MODELS = (Model(bias=True), Model(dtype=torch.bfloat16, pattern="one", hidden=32, inner=48),
          Model(activation="gpt_oss", capacity=True))


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_moe_gradients_have_the_same_bits(ranks, model, world_size):
    """Of inputs always, of weights where they are delayed, and of main_grad with and without delay."""
    scale = 1 / world_size
    for plain, delayed, fused, both in ranks(train_all, model, scale, world_size=world_size):
        want, grads, unused = plain
        for seen, *_ in (delayed, fused, both):
            for got, step in zip(seen, want, strict=True):
                for name, value in step.items():
                    assert torch.equal(got[name], value), name
        for name in grads:
            if name not in WEIGHTS:
                for got in (delayed[1][name], fused[1][name], both[1][name]):  # no fixed order on a GPU
                    torch.testing.assert_close(got, grads[name], rtol=1e-4, atol=1e-4)
                continue
            assert torch.equal(delayed[1][name], grads[name]), name
            assert fused[1][name] is None and both[1][name] is None
            assert torch.equal(fused[2][name], both[2][name]), name
            assert torch.equal(delayed[2][name], unused[name])
            eps = torch.finfo(grads[name].dtype).eps
            want, bound = grads[name].float(), 8 * eps * grads[name].float().abs().max().clamp_min(1)
            assert (fused[2][name] - 0.5 - want).abs().max() <= bound, name


def unfused_and_frozen(world, device, model, name):
    """EPAll2AllLayer, and only one weight that requires a gradient: name."""
    found, frozen = [], next(n for n in WEIGHTS if n != name)
    for options in ({}, *OPTIONS):
        moe = make_moe(world, device, model, fused=False)
        moe = with_main_grads(epmoe.EPMoE(model.hidden, model.inner, moe.num_experts, model.topk,
                                          dtype=model.dtype, layer=moe.layer, **options))
        moe.load_state_dict({n: torch.full_like(p, 0.1) for n, p in moe.named_parameters()})
        moe.get_parameter(frozen).requires_grad_(False)
        for step in (0, 1):
            backward(moe, world, device, model, step)
        if "delay_wgrad_compute" in options:
            for _ in range(2):
                moe.backward_dw()
        p, other = moe.get_parameter(name), moe.get_parameter(frozen)
        found.append(p.main_grad - 0.5 if "fuse_wgrad_accumulation" in options else p.grad)
        assert other.grad is None and (other.main_grad == 0.5).all()
        moe.finalize()
    return found


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("model", (Model(), Model(dtype=torch.bfloat16, hidden=32, inner=48)), ids=str)
def test_moe_gradients_of_one_weight(ranks, model, name):
    for plain, delayed, fused, both in ranks(functools.partial(unfused_and_frozen, model=model, name=name),
                                             world_size=2):
        assert plain.any() and torch.equal(delayed, plain) and torch.equal(both, fused)
        bound = 8 * torch.finfo(model.dtype).eps * plain.float().abs().max()
        assert (fused.float() - plain.float()).abs().max() <= bound


@pytest.mark.parametrize("options", [{}, FUSE], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moe_gradients_of_several_backwards_of_a_graph(ranks, dtype, options):
    """Each backward pass waits for a backward_dw of its own, also one of the same forward."""

    def run(world, device):
        model, found = Model(dtype=dtype, hidden=32, inner=48), []
        for more in ({}, DELAY):
            moe = with_main_grads(make_moe(world, device, model, **options, **more))
            x, idx, weight, dy = (t.to(device) for t in inputs_of(model, world.rank, world.size, 0))
            y = moe(x, idx, weight)
            for num_later in (1, 0, 2):  # how many calls of backward_dw follow
                y.backward(dy, retain_graph=True)
                for _ in range(num_later if more else 0):
                    moe.backward_dw()
            assert not more or "no backward pass" in error_of(moe.backward_dw)
            found.append([p.main_grad if options else p.grad for p in map(moe.get_parameter, WEIGHTS)])
            moe.finalize()
        assert all(map(torch.equal, *found))

    ranks(run, world_size=2)


def checkpointed(use_reentrant):
    return lambda moe, *inputs: checkpoint(moe, *inputs, use_reentrant=use_reentrant)


def called(world, device, way):
    """A module, and the same called in other ways."""
    model, found = Model(), []
    if way == "compile":
        calls = [torch.compile(backend="aot_eager")(lambda moe, x, idx, w: moe(x * 1, idx, w) * 1)]
    else:
        calls = [checkpointed(False), checkpointed(True)]
    for options in OPTIONS:
        found.append([])
        for call in (None, *calls):
            moe = with_main_grads(make_moe(world, device, model, **options))
            seen = backward(moe, world, device, model, 0, call or type(moe).__call__)
            if "delay_wgrad_compute" in options:
                moe.backward_dw()
                error_of(moe.backward_dw)
            main = {n: moe.get_parameter(n).main_grad for n in WEIGHTS}
            found[-1].append(seen | {"grads": gradients(moe), "main": main})
            moe.finalize()
    return found


# Ranks that are threads do not compile at the same time: torch.compiler.is_compiling() is of the process.
@pytest.mark.parametrize("way, world_size", [("checkpoint", 2), ("compile", 1)])
def test_moe_gradients_of_calls(ranks, way, world_size):
    for of_options in ranks(called, way, world_size=world_size):
        for plain, *others in of_options:
            for other in others:
                for got, want in ((other, plain), *((other[k], plain[k]) for k in ("grads", "main"))):
                    for name, value in want.items():
                        if isinstance(value, torch.Tensor):
                            assert torch.equal(got[name], value), name


def on_a_stream(world, device, is_delayed):
    """The gradients after two steps, with backward_dw on a stream of its own beside the next forward."""
    model, side = MODELS[1], torch.cuda.Stream(device)
    moe = make_moe(world, device, model, **(DELAY if is_delayed else {}))
    for step in range(3):
        backward(moe, world, device, model, step)
        if is_delayed:
            with torch.cuda.stream(side):
                moe.backward_dw()
    torch.cuda.current_stream().wait_stream(side)
    found = gradients(moe)
    moe.layer.synchronize()
    moe.finalize()
    return found


@pytest.mark.cuda_only
def test_moe_gradients_on_another_stream(ranks):
    for got, want in zip(ranks(on_a_stream, True), ranks(on_a_stream, False)):
        assert all(torch.equal(got[n], want[n]) for n in WEIGHTS)


def steps_of(world, device):
    """The sinks that remain after steps of a module, and of calls whose backward never runs."""
    for options in OPTIONS:
        moe = with_main_grads(make_moe(world, device, Model(), **options))
        for step in range(2):
            backward(moe, world, device, Model(), step)
            moe(*(t.to(device) for t in inputs_of(Model(), world.rank, world.size)[:3]))
            if "delay_wgrad_compute" in options:
                moe.backward_dw()
        moe.finalize()
    gc.collect()
    return sum(type(o) is DeferredWgrad for o in gc.get_objects())


def test_moe_gradients_leave_nothing_in_memory(ranks):
    assert not any(ranks(steps_of, world_size=1))


@pytest.mark.cpu_only
def test_moe_gradients_break_the_graph():
    with epmoe.thread_worlds(1)[0] as world:
        moe = make_moe(world, torch.device("cpu"), Model(), **DELAY)
        call = torch.compile(moe, backend="eager", fullgraph=True)
        x, idx, weight, _ = inputs_of(Model(), 0, 1)
        with pytest.raises(torch._dynamo.exc.Unsupported):
            call(x, idx, weight)
        moe.finalize()


def copied(world, device):
    """A copy of a module for which a gradient waits has none that waits; the original keeps it."""
    moe = make_moe(world, device, Model(), **DELAY)
    backward(moe, world, device, Model(), 0)
    other = copy.deepcopy(moe)
    texts = [error_of(other.backward_dw)]
    backward(other, world, device, Model(), 0)
    for module in (moe, other):
        module.backward_dw()
        texts.append(error_of(module.backward_dw))
    moe.finalize()
    return texts, moe.gate_up_proj.grad, other.gate_up_proj.grad


def test_moe_gradients_of_a_copy(ranks):
    for texts, grad, others in ranks(copied, world_size=1):
        assert all("no backward pass of this module waits" in text for text in texts)
        assert torch.equal(grad, others)


# ---- hooks, and Megatron's convention ----


def hooked(world, device):
    """The order in which hooks run, and what they see."""
    found = []
    for options in OPTIONS:
        moe = with_main_grads(make_moe(world, device, Model(), **options), is_megatron=True)
        events = []
        for name in WEIGHTS:
            p = getattr(moe, name)
            p.zero_out_wgrad = name == "down_proj"
            p.register_post_accumulate_grad_hook(
                lambda p, name=name: events.append((name, p.grad.abs().max().item() == 0)))
        backward(moe, world, device, Model(), 0)
        events.append("backward")
        if "delay_wgrad_compute" in options:
            moe.backward_dw()
        found.append((events, [getattr(moe, n).grad_added_to_main_grad for n in WEIGHTS]))
        moe.finalize()
    return found


def test_moe_gradients_run_hooks_where_they_are_made(ranks):
    for delayed, fused, both in ranks(hooked, world_size=2):
        assert delayed[0] == ["backward", ("down_proj", False), ("gate_up_proj", False)]
        names = [e if e == "backward" else e[0] for e in fused[0]]
        assert names == ["down_proj", "gate_up_proj", "backward"]
        names = [e if e == "backward" else e[0] for e in both[0]]
        assert names == ["backward", "down_proj", "gate_up_proj"]
        assert ("down_proj", True) in fused[0] and ("down_proj", True) in both[0]  # zero_out_wgrad
        assert delayed[1] == [False, False] and fused[1] == both[1] == [True, True]


# ---- mistakes ----


def mistakes(world, device):
    """The errors that this rank alone can make, each followed by a backward that works."""
    model, texts = Model(), {}
    moe = make_moe(world, device, model, **DELAY)
    texts["twice"] = error_of(moe.backward_dw)
    optimizer = torch.optim.SGD(moe.parameters(), 0.1)
    backward(moe, world, device, model, 0)
    texts["step"] = error_of(optimizer.step)
    texts["clip"] = error_of(lambda: torch.nn.utils.clip_grad_norm_(moe.parameters(), 1.0))
    torch.amp.GradScaler(device.type, enabled=False).unscale_(optimizer)  # does nothing
    texts["unscale"] = error_of(lambda: torch.amp.GradScaler(device.type).unscale_(optimizer))
    moe.backward_dw()
    torch.nn.utils.clip_grad_norm_(moe.parameters(), 1.0)
    optimizer.step()
    x, idx, weight, _ = (t.to(device) for t in inputs_of(model, world.rank, world.size))
    x.requires_grad_()
    texts["grad"] = error_of(lambda: torch.autograd.grad(moe(x, idx, weight).sum(), x))
    moe.layer.synchronize()
    moe.finalize()
    plain = make_moe(world, device, model)
    texts["plain"] = error_of(plain.backward_dw)
    plain.finalize()
    return texts


def test_moe_backward_dw_mistakes(ranks):
    for texts in ranks(mistakes, world_size=1):
        assert "no backward pass of this module waits for it" in texts["twice"]
        assert "call it once for each backward pass before the step" in texts["step"]
        assert "clip_grad_norm_ scales gradients, but gradients of its parameters wait" in texts["clip"]
        assert "GradScaler.unscale_ scales gradients, but gradients of its parameters" in texts["unscale"]
        assert "call backward(), then backward_dw()" in texts["grad"]
        assert "create it with delay_wgrad_compute=True" in texts["plain"]


def wrong_buffer(world, device, wrong):
    """A call in which rank 1 has a main_grad that does not fit, and a call after it that works."""
    model = Model()
    moe = with_main_grads(make_moe(world, device, model, **FUSE))
    right = moe.down_proj.main_grad
    if world.rank == 1:
        if wrong is None:
            del moe.down_proj.main_grad
        else:
            moe.down_proj.main_grad = wrong(right)
    result = outcome(lambda: backward(moe, world, device, model, 0) and 0, moe.layer)
    moe.down_proj.main_grad = right
    backward(moe, world, device, model, 0)
    changed = bool((right != 0.5).any())
    moe.finalize()
    return result, changed


WRONG = {"none": None, "dtype": lambda t: t.double(), "shape": lambda t: t[:, 1:].contiguous(),
         "strides": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
         "grad": lambda t: t.clone().requires_grad_()}


@pytest.mark.parametrize("wrong", WRONG)
def test_moe_main_grad_that_does_not_fit(ranks, wrong):
    results = ranks(wrong_buffer, WRONG[wrong], world_size=2, at_least=2)
    text = "down_proj has no main_grad" if wrong == "none" else "main_grad of down_proj: wanted a tensor"
    wanted = ["RuntimeError" if rank == 1 else "PeerError" for rank in range(len(results))]
    check_outcomes([result for result, _ in results], wanted, text, on_rank=1,
                   elsewhere=["rank 1 failed before its plan: RuntimeError"])
    assert all(changed for _, changed in results)


# ---- DistributedDataParallel and FSDP ----


def data_parallel(rank, world_size):
    """Replicas of one expert on two ranks: DDP averages what backward_dw computes, and refuses main_grad."""
    model, seen = Model(unequal=False), []
    for options in ({}, DELAY):
        moe = make_moe(epmoe.thread_worlds(1)[0], torch.device("cpu"), model, **options)
        ddp = DistributedDataParallel(moe)
        for step in (0, 1):
            x, idx, weight, dy = inputs_of(model, 0, 1, 2 * step + rank)
            ddp(x, idx, weight).backward(dy)
            if options:
                moe.backward_dw()
        seen.append(gradients(moe))
    moe = with_main_grads(make_moe(epmoe.thread_worlds(1)[0], torch.device("cpu"), model, **FUSE))
    ddp = DistributedDataParallel(moe)
    return seen, error_of(lambda: ddp(*inputs_of(model, 0, 1)[:3])), sharded()


def sharded():
    moe = make_moe(epmoe.thread_worlds(1)[0], torch.device("cpu"), Model(), **DELAY)
    return error_of(lambda: fully_shard(moe), ValueError)


@pytest.mark.cpu_only
def test_moe_gradients_beside_data_parallelism():
    (first, refused, sharding), (second, *_) = process_ranks(data_parallel, 2, timeout_s=HANG_S)
    for name in WEIGHTS:
        assert torch.equal(first[1][name], first[0][name]) and torch.equal(first[1][name], second[1][name])
    assert "leave fuse_wgrad_accumulation out" in refused
    assert "leave delay_wgrad_compute and fuse_wgrad_accumulation out" in sharding


# ---- errors ----


def failed_backward(world, device, options):
    """The backward of rank 1 fails after another rank has deferred a gradient. The next steps are right."""
    moe = epmoe.EPMoE(32, 32, 4, 2, world, max_tokens=16, device=device, **options)
    dtype = moe.layer.dtype
    plain = epmoe.EPMoE(32, 32, 4, 2, layer=moe.layer, compute_dtype=options.get("compute_dtype"),
                        dtype=dtype)
    plain.load_state_dict(moe.state_dict())
    for p in moe.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    g = torch.Generator().manual_seed(world.rank)
    x = torch.randn(8, 32, generator=g).to(device, dtype).requires_grad_()
    weight, idx = (t.to(device) for t in torch.rand(8, 4, generator=g).topk(2))
    inputs = {"inputs": [x]} if world.rank == 1 else {}
    kind = outcome(lambda: moe(x, idx, weight).float().sum().backward(**inputs), moe.layer).kind
    same = []
    for scale in (1, 2):
        for m in (moe, plain):
            m.zero_grad()
            m((scale * x).detach(), idx, weight).float().sum().backward()
        moe.backward_dw()
        for p, q in zip(moe.parameters(), plain.parameters(), strict=True):
            got = p.main_grad if "fuse_wgrad_accumulation" in options else p.grad
            same.append((got - q.grad).abs().max() <= 0.01 * q.grad.abs().max())
            p.main_grad.zero_()
    moe.finalize()
    return kind, all(same), len(moe._weight_gradients.pending)


@pytest.mark.parametrize("options", (DELAY, DELAY | FUSE), ids=str)
@pytest.mark.parametrize("dtypes", ({}, {"compute_dtype": torch.float8_e4m3fn}, {"dtype": torch.float32}),
                         ids=str)
def test_moe_gradients_of_a_backward_that_failed_are_not_kept(ranks, options, dtypes):
    options = options | dtypes
    results = ranks(failed_backward, options, world_size=2, at_least=2)
    for rank, (kind, same, num_waiting) in enumerate(results):
        assert kind == ("RuntimeError" if rank == 1 else "PeerError") and same and num_waiting == 0


@pytest.mark.cpu_only
def test_moe_gradients_of_a_backward_whose_error_comes_later_are_not_kept(monkeypatch):
    """As on CUDA: backward returns, and a later call raises the error.  The second of two has failed."""
    moe = epmoe.EPMoE(32, 32, 4, 2, max_tokens=16, device="cpu", **DELAY)
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.1)
    x, (weight, idx) = torch.randn(8, 32).bfloat16(), torch.rand(8, 4).topk(2)
    calls, wanted = [], None
    for _ in range(2):
        moe(x, idx, weight).float().sum().backward()
        calls.append(_C.layer_newest_call(moe.layer._c, 0))
    monkeypatch.setattr(_C, "layer_was_void", lambda layer, buffer, number: number == calls[1])
    moe.backward_dw()
    wanted = [p.grad.clone() for p in moe.parameters()]
    optimizer.step()  # nothing waits
    with pytest.raises(RuntimeError, match="no backward pass of this module waits"):
        moe.backward_dw()
    assert all(torch.equal(p.grad, w) for p, w in zip(moe.parameters(), wanted, strict=True))


@pytest.mark.cpu_only
@pytest.mark.parametrize("options", (DELAY, DELAY | FUSE), ids=str)
def test_moe_backward_dw_that_failed_can_be_repeated(options):
    moe = epmoe.EPMoE(32, 32, 4, 2, max_tokens=16, device="cpu", **options)
    for p in moe.parameters():
        p.main_grad, p.grad_added_to_main_grad = torch.zeros_like(p, dtype=torch.float32), False
    x, (weight, idx) = torch.randn(8, 32).bfloat16(), torch.rand(8, 4).topk(2)
    wanted, left = [], [1]

    def raises_once(grad):
        if left:
            raise MemoryError(left.pop())

    for fails in (False, True):
        if fails:
            moe.down_proj.register_hook(raises_once)
        moe(x, idx, weight).float().sum().backward()
        if fails:
            with pytest.raises(MemoryError):
                moe.backward_dw()
            with pytest.raises(RuntimeError, match="wait for backward_dw"):
                torch.optim.SGD(moe.parameters(), 0.1).step()
        moe.backward_dw()
        wanted.append([(p.main_grad if "fuse_wgrad_accumulation" in options else p.grad).clone()
                       for p in moe.parameters()])
        for p in moe.parameters():
            p.main_grad.zero_()
        moe.zero_grad()
    assert all(torch.equal(a, b) and a.any() for a, b in zip(*wanted, strict=True)) and not left
    moe.finalize()


@pytest.mark.cpu_only
def test_moe_gradients_that_wait_do_not_hold_up_other_optimizers():
    """A step of an optimizer of other parameters waits for no rank, where ranks are threads."""
    waits = threading.Event()

    def main(world):
        moe = epmoe.EPMoE(32, 32, 4, 2, world, max_tokens=16, device="cpu", **DELAY)
        x, (weight, idx) = torch.randn(8, 32).bfloat16(), torch.rand(8, 4).topk(2)
        moe(x, idx, weight).float().sum().backward()
        world.exchange(b"x")
        if world.rank == 0:
            assert waits.wait(HANG_S)  # for this rank
            other = torch.nn.Linear(2, 2)
            other(torch.ones(2)).sum().backward()
            torch.optim.SGD(other.parameters(), lr=0.1).step()
        else:
            when_waiting(world, "plan", waits.set)
        moe(x, idx, weight).float().sum().backward()
        moe.backward_dw()
        moe.backward_dw()
        moe.finalize()
        return True

    assert run_threads(main, 2) == [True, True]
