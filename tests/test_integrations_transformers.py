"""experts_implementation="epmoe" of transformers gives the results of transformers' own, in many families."""

import copy
import subprocess
import sys
import threading
import types

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, PretrainedConfig

import epmoe
import epmoe.integrations.transformers as integration
from cases import process_ranks
from epmoe import reference
from epmoe.integrations import transformers_experts as parts
from epmoe.testing import run_threads
from outcomes import outcome
from pace import HANG_S
from transformers_cases import FAMILIES, check_equal, experts_of, make, run, tokens

pytestmark = pytest.mark.cpu_only
BOUND = {torch.bfloat16: 2**-8, torch.float16: 2**-11}  # of one rounding


@pytest.mark.parametrize("family", FAMILIES)
def test_integrations_transformers_family(family):
    model = make(family)
    experts = experts_of(model)
    assert experts
    want = run(model, "eager", tokens(2, 9))
    check_equal(run(model, "epmoe", tokens(2, 9)), want)
    for e in experts:
        expected = FAMILIES[family][1]
        assert (str(e._epmoe_activation).lower().startswith("gptoss") if expected == "gpt_oss"
                else e._epmoe_activation == expected)


@pytest.mark.parametrize("limit, activation, found", [
    (1e5, epmoe.SwiGLU(limit=1e5), epmoe.SwiGLU(limit=1e5)),
    (1e5, epmoe.SwiGLU(1.702, 1e5, 1), epmoe.SwiGLU(1.702, 1e5, 1)),
    (7.0, "gpt_oss", epmoe.GptOss()),
    (7.0, "swiglu", "swiglu"),
    (-1, "swiglu", "swiglu"),
    (None, "geglu_tanh", "geglu_tanh"),
    (7.0, epmoe.SwiGLU(limit=6.0), None),
], ids=str)
def test_integrations_transformers_recognises_a_gate(limit, activation, found):
    """A limit that the experts have is tried, and taken only where their gate has it too."""
    experts = types.SimpleNamespace(limit=limit, alpha=1.702,
                                    _apply_gate=lambda h: reference.activate(h, activation))
    assert parts.activation_of(experts) == found


def test_integrations_transformers_longer_calls(monkeypatch):
    """A call with more tokens makes a larger layer.  The backward of an earlier call still works."""
    monkeypatch.setattr(parts, "FEWEST_TOKENS", 4)
    monkeypatch.setattr(integration._alone, "of_shape", {})
    model = make("qwen3_moe")
    model.set_experts_implementation("epmoe")

    def backward():
        losses = [model(input_ids=tokens(2, n), use_cache=False).logits.square().mean()
                  for n in (2, 9, 30, 3)]
        sum(losses).backward()

    backward()
    got = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.set_experts_implementation("eager")
    model.zero_grad()
    backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(got[n], p.grad, rtol=2e-4, atol=2e-6)
    (layers,) = integration._alone.of_shape.values()
    assert [layer.max_tokens for layer in layers] == [4, 32, 64]


def gradients(forward, experts, inputs):
    """y and all gradients of a step, with inputs (x, weight, dy)."""
    x, weight, dy = (t.detach().to(experts.down_proj.dtype).requires_grad_() for t in inputs)
    idx = torch.randint(8, weight.shape, generator=torch.Generator().manual_seed(3))
    y = forward(experts, x, idx, weight)
    y.backward(dy.detach())
    return {"y": y.detach(), "x": x.grad, "weight": weight.grad,
            **{n: p.grad for n, p in experts.named_parameters()}}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "openai_privacy_filter", "gemma4_text",
                                    "nemotron_h", "glm4_moe", "muse_spark_text"])
def test_integrations_transformers_trains_in_16_bits(monkeypatch, family, dtype):
    """A step runs as that of EPMoE if that can compute the experts. Results are right."""
    calls, run_step = [], parts.experts_ops.run
    monkeypatch.setattr(parts.experts_ops, "run",
                        lambda *args, **options: calls.append(1) or run_step(*args, **options))
    exact = experts_of(make(family))[0].to(dtype).double()
    exact.config._experts_implementation = "eager"
    experts = integration.store_as_epmoe_reads(copy.deepcopy(exact).to(dtype))
    hidden = parts.up_and_down(exact)[1][0].shape[1]
    inputs = [torch.randn(9, n, generator=torch.Generator().manual_seed(i)).to(dtype)
              for i, n in enumerate((hidden, 2, hidden))]
    got = gradients(integration.experts_forward, experts, inputs)
    can = family not in ("glm4_moe", "muse_spark_text")
    assert len(calls) == can
    with torch.no_grad():
        integration.experts_forward(experts, inputs[0], torch.zeros(9, 2, dtype=torch.int64), inputs[1])
    assert len(calls) == 2 * can  # inference, too
    want = gradients(type(exact).forward, exact, inputs)
    assert got.keys() == want.keys()
    for name, value in want.items():
        error = (got[name].double() - value).norm()
        assert got[name].dtype == dtype and error <= 4 * BOUND[dtype] * value.norm(), name


def test_integrations_transformers_trains_in_16_bits_over_ranks(ranks):
    """Expert parallelism gives each rank a part of the experts, and the gradients of that part."""
    exact = experts_of(make("gpt_oss"))[0].bfloat16().double()
    exact.config._experts_implementation = "eager"
    inputs = [[torch.randn(9, n, generator=torch.Generator().manual_seed(10 * rank + n)).bfloat16()
               for n in (32, 2, 32)] for rank in range(2)]

    def run_rank(world, device):
        own = integration.store_as_epmoe_reads(copy.deepcopy(exact).bfloat16())
        for p in own.parameters():
            p.data = p.data.chunk(world.size)[world.rank]
        with epmoe.EpAll2AllFusedOp(world, 9, 32, 2, num_tot_experts=8, device=device) as layer:
            return gradients(lambda experts, x, idx, weight: parts.compute(experts, layer, x, idx, weight),
                             own, inputs[world.rank])

    got = ranks(run_rank, world_size=2)
    want = [gradients(type(exact).forward, exact, its) for its in inputs]
    # the gradients of the parameters add up over both calls of exact, and each rank has its part of them
    for rank, found in enumerate(got):
        for name, value in found.items():
            exactly = want[rank][name]
            if name in dict(exact.named_parameters()):
                exactly = want[-1][name].chunk(2)[rank]
            error = (value.double() - exactly).norm()
            assert error <= 4 * BOUND[torch.bfloat16] * exactly.norm(), (rank, name)


def test_integrations_transformers_chooses_again_for_training():
    """Without fused=, the layer decides whether training uses the fused kernels. fused=True stays True."""
    for fused, num_tokens, want in ((None, 9, (False, False)), (None, 999, (True, True)),
                                    (True, 999, (True, False)), (False, 999, (False, False))):
        layers = parts.Layers(fused=fused) if fused is not None else parts.Layers()
        layer = layers.get(num_tokens, 32, 2, 8, torch.bfloat16, torch.device("cpu"))
        assert (layer.fused, layer._config.fused == 2) == want
        layer.finalize()


def test_integrations_transformers_in_several_threads(monkeypatch):
    """Two models of one shape, each in a thread: they share a communication layer, which one thread makes."""
    monkeypatch.setattr(integration, "_alone", parts.Layers())
    experts = [experts_of(make("qwen3_moe"))[0] for _ in range(2)]
    given = [(torch.randn(800, 32), torch.randint(0, 8, (800, 2)), torch.rand(800, 2)) for _ in experts]
    start, wrong, done = threading.Barrier(2), [], []

    def run_one(i):
        with torch.no_grad():
            start.wait(HANG_S)
            results = [integration.experts_forward(experts[i], *given[i]) for _ in range(20)]
            wanted = experts[i](*given[i])
        wrong.extend(n for n, y in enumerate(results) if not torch.allclose(y, wanted, rtol=1e-4, atol=1e-5))
        done.append(i)

    threads = [threading.Thread(target=run_one, args=(i,), daemon=True) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(HANG_S)
    assert sorted(done) == [0, 1] and not wrong
    assert all(len(layers) == 1 for layers in integration._alone.of_shape.values())


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_integrations_transformers_generates(family):
    model, ids = make(family), tokens(2, 5)
    texts = []
    for implementation in ("eager", "epmoe"):
        model.set_experts_implementation(implementation)
        texts.append(model.generate(ids, max_new_tokens=8, do_sample=False))
    assert torch.equal(*texts) and texts[0].shape == (2, 13)


@pytest.mark.long
@pytest.mark.parametrize("family, lengths", [("qwen3_moe", [9]), ("glm4_moe", [9, 12])])
def test_integrations_transformers_compiled(family, lengths):
    model = make(family)
    compiled = torch.compile(model.forward, backend="aot_eager")
    for length in lengths:
        want = run(model, "eager", tokens(2, length))
        check_equal(run(model, "epmoe", tokens(2, length), compiled), want)


def test_integrations_transformers_with_checkpointing():
    model = make("mixtral")
    want = run(model, "eager", tokens(2, 9))
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check_equal(run(model, "epmoe", tokens(2, 9)), want)


def test_integrations_transformers_under_autocast():
    """Autocast changes the dtype of the tokens, not that of the parameters."""
    model = make("qwen3_moe")
    outs = []
    for implementation in ("eager", "epmoe"):
        model.set_experts_implementation(implementation)
        with torch.autocast("cpu", torch.bfloat16):
            outs.append(model(input_ids=tokens(2, 9), use_cache=False).logits.float())
    torch.testing.assert_close(*outs, rtol=0.1, atol=0.1)


def test_integrations_transformers_loads_and_saves(tmp_path):
    model = make("gpt_oss")
    model.set_experts_implementation("epmoe")
    want = model(input_ids=tokens(1, 6)).logits
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="epmoe",
                                                 dtype=torch.float32)
    torch.testing.assert_close(again.eval()(input_ids=tokens(1, 6)).logits, want)


def test_integrations_transformers_refuses_quantized_weights():
    experts = experts_of(make("qwen3_moe"))[0]
    experts.down_proj.data = experts.down_proj.data.to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="Qwen3MoeExperts has quantized weights, torch.float8_e4m3fn"):
        integration.experts_forward(experts, torch.zeros(2, 32), torch.zeros(2, 2, dtype=torch.int64),
                                    torch.ones(2, 2))


def test_integrations_transformers_transposed_weights_without_copies(tmp_path):
    """epmoe reads the parameters. store_as_epmoe_reads changes strides alone: training and saving work."""
    model, ids = make("gpt_oss"), tokens(2, 9)
    want = run(model, "eager", ids)
    before = {n: p.clone() for n, p in model.named_parameters()}
    for experts in experts_of(model):
        for (weight, *_), p in zip(parts.up_and_down(experts), (experts.gate_up_proj, experts.down_proj)):
            assert weight.data_ptr() == p.data_ptr() and p.is_contiguous()
    assert integration.store_as_epmoe_reads(model) is model
    for n, p in model.named_parameters():
        assert torch.equal(p, before[n]) and p.shape == before[n].shape
    for experts in experts_of(model):
        for (weight, *_), p in zip(parts.up_and_down(experts), (experts.gate_up_proj, experts.down_proj)):
            assert weight.data_ptr() == p.data_ptr() and not p.is_contiguous()
    check_equal(run(model, "epmoe", ids), want)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.step()
    trained = run(model, "epmoe", ids)
    check_equal(trained, run(model, "eager", ids))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    torch.testing.assert_close(again(input_ids=ids).logits, trained[0])


def test_integrations_transformers_stores_no_parameters_on_meta():
    with torch.device("meta"):
        experts = experts_of(AutoModelForCausalLM.from_config(make("gpt_oss").config))[0]
    with pytest.raises(ValueError, match="gate_up_proj is on the meta device"):
        integration.store_as_epmoe_reads(experts)


def test_integrations_transformers_drops_the_index_of_no_expert():
    """transformers marks a choice of another rank's expert by the number of experts."""
    experts = experts_of(make("qwen3_moe"))[0]
    x = torch.randn(3, 32)
    got = integration.experts_forward(experts, x, torch.tensor([[0, 8], [8, 8], [1, 8]]), torch.ones(3, 2))
    want = integration.experts_forward(experts, x[[0, 2]], torch.tensor([[0], [1]]), torch.ones(2, 1))
    torch.testing.assert_close(got[[0, 2]], want)
    assert not got[1].any()


def _data_parallel(rank, world_size):
    """Rank main: the gradients under plain DistributedDataParallel, with both implementations."""
    found = []
    for implementation in ("eager", "epmoe"):
        model = make("qwen3_moe")
        model.set_experts_implementation(implementation)
        ddp = DistributedDataParallel(model)
        ddp(input_ids=tokens(2, 5 + rank, seed=rank), use_cache=False).logits.square().mean().backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters()})
    return found


def test_integrations_transformers_under_ddp():
    for eager, own in process_ranks(_data_parallel, 2):
        for name, grad in eager.items():
            torch.testing.assert_close(own[name], grad, rtol=2e-4, atol=2e-6)


# ---- spread over ranks ----


def _spread(rank, world_size, family):
    """Rank main: a step with spread experts under DistributedDataParallel, and its right results."""
    model = make(family)
    all_tokens = [tokens(2, 5 + r, seed=r) for r in range(world_size)]
    eager = [run(model, "eager", ids) for ids in all_tokens]
    want = {n: sum(grads[n] for _, grads in eager) / world_size for n in eager[0][1]}
    num_bytes = sum(p.nbytes for p in model.parameters())
    room = {"num_physical": 12} if world_size == 3 else {}  # and 8 experts are no multiple of 3
    model = integration.spread_experts(make(family), max_tokens=16, device="cpu", **room)
    spared = num_bytes - sum(p.nbytes for p in model.parameters())
    ddp = DistributedDataParallel(epmoe.prepare_ddp(model))
    logits = ddp(input_ids=all_tokens[rank], use_cache=False).logits
    logits.square().mean().backward()
    own = {id(p) for p in epmoe.expert_parameters(model)}
    grads = {n: (p.grad.clone(), id(p) in own) for n, p in model.named_parameters()}
    next(m for m in model.modules() if isinstance(m, epmoe.EPMoE)).layer.world.close()
    return logits.detach(), eager[rank][0], grads, want, spared


@pytest.mark.parametrize("family, num_ranks", [("qwen3_moe", 4), ("mixtral", 2), ("deepseek_v3", 2),
                                               ("gpt_oss", 2), ("gpt_oss", 4), ("olmoe", 2),
                                               ("olmoe", 3), ("nemotron_h", 2)])
def test_integrations_transformers_spread_experts(family, num_ranks):
    for rank, (got, logits, grads, want, spared) in enumerate(process_ranks(_spread, num_ranks, family)):
        torch.testing.assert_close(got, logits, rtol=2e-5, atol=2e-6)
        want = {n.replace(".experts.up_proj", ".experts.gate_up_proj"): grad for n, grad in want.items()}
        assert spared > 0 and grads.keys() == want.keys()
        for name, (grad, is_expert) in grads.items():
            part = want[name]
            if is_expert:
                part = part.chunk(num_ranks)[rank]
                part = part.transpose(1, 2) if family == "gpt_oss" and "bias" not in name else part
                assert not grad[len(part):].any() and len(grad) == (4 if num_ranks == 3 else len(part))
                grad = grad[:len(part)]
            torch.testing.assert_close(grad, part, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("family, text", [("glm4_moe", "an activation that EPMoE does not have"),
                                          ("llama", "no experts"),
                                          ("muse_spark_text", "a norm after each expert")])
def test_integrations_transformers_spread_experts_refuses(monkeypatch, family, text):
    monkeypatch.setitem(FAMILIES, "llama", (dict(intermediate_size=48), None))
    with pytest.raises(ValueError, match=text):
        integration.spread_experts(make(family), device="cpu")


@pytest.mark.parametrize("frozen", [("gate_up_proj",), ("down_proj",), ("gate_up_proj", "down_proj"), ()])
def test_integrations_transformers_spread_experts_keeps_what_trains(frozen):
    model = make("qwen3_moe")
    for name, p in model.named_parameters():
        p.requires_grad_(not name.endswith(frozen))
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    spread = integration.spread_experts(model, max_tokens=16, device="cpu")
    assert {name: p.requires_grad for name, p in spread.named_parameters()} == before


def test_integrations_transformers_spread_experts_of_one_module_under_two_paths():
    model = make("qwen3_moe")
    layers = model.model.layers
    layers[1].mlp.experts = layers[0].mlp.experts
    num = len(list(model.parameters()))
    spread = integration.spread_experts(model, max_tokens=16, device="cpu")
    assert type(layers[0].mlp.experts) is epmoe.EPMoE and layers[1].mlp.experts is layers[0].mlp.experts
    assert len(list(spread.parameters())) == num
    model = make("qwen3_moe")
    layers = model.model.layers
    layers[1].mlp.experts.down_proj = layers[0].mlp.experts.down_proj
    with pytest.raises(ValueError, match="layers.1.mlp.experts.down_proj is a parameter of model.layers.0"):
        integration.spread_experts(model, max_tokens=16, device="cpu")


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("failing", [1, 2])
def test_integrations_transformers_spread_experts_is_done_or_not(monkeypatch, failing, num_ranks):
    """One rank has no memory for the first or second module: all ranks keep their models as they were."""
    models, left = [make("qwen3_moe") for _ in range(num_ranks)], threading.local()
    load = epmoe.EPMoE.load_state_dict

    def loads(moe, *args, **kwargs):
        left.number = getattr(left, "number", 0) - 1
        if left.number == 0:
            raise torch.OutOfMemoryError("no memory")
        return load(moe, *args, **kwargs)

    monkeypatch.setattr(epmoe.EPMoE, "load_state_dict", loads)

    def main(world):
        model = models[world.rank]
        names = [type(m) for m in model.modules()]
        left.number = failing if world.rank == 1 else 0
        got = outcome(lambda: integration.spread_experts(model, world, max_tokens=16, device="cpu"))
        same = names == [type(m) for m in model.modules()]
        left.number = 0
        made = [m for m in integration.spread_experts(model, world, max_tokens=16, device="cpu").modules()
                if isinstance(m, epmoe.EPMoE)]
        made[0].layer.finalize()
        return got.kind, same, len(made)

    for rank, (kind, same, num) in enumerate(run_threads(main, num_ranks, timeout_s=HANG_S)):
        assert kind == ("OutOfMemoryError" if rank == 1 else "PeerError") and same and num > 1


def _from_experts(rank, world_size):
    """Rank main: (output of a part of the experts, output of all in one process), and the error of a rank."""
    experts = experts_of(make("gpt_oss"))[0]
    g = torch.Generator().manual_seed(rank)
    x, idx, weight = torch.randn(5, 32, generator=g), torch.randint(8, (5, 2), generator=g), torch.ones(5, 2)
    moe = epmoe.EPMoE.from_experts(experts, max_tokens=8)
    outs = moe(x, idx, weight), integration.experts_forward(experts, x, idx, weight)
    if rank == 1:
        experts.to("meta")
    try:
        epmoe.EPMoE.from_experts(experts, max_tokens=8)
    except (ValueError, epmoe.PeerError) as error:
        text = f"{type(error).__name__}: {error}"
    again = epmoe.EPMoE.from_experts(experts_of(make("olmoe"))[1], topk=1, max_tokens=8)  # the world works
    again(x, idx[:, :1].contiguous(), weight[:, :1])
    return *outs, text, str(moe)


def test_integrations_transformers_from_experts():
    for rank, (got, want, text, moe) in enumerate(process_ranks(_from_experts, 2)):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)
        assert f"local_experts=4, topk=2, activation=GptOss(alpha=1.702, limit=7.0), rank={rank} of 2" in moe
        assert ("PeerError: " if rank == 0 else "ValueError: GptOssExperts: the parameters are on the meta "
                "device: load them first") in text


def test_integrations_transformers_from_experts_refuses_other_modules():
    with pytest.raises(ValueError, match="Linear: wanted the experts of a transformers model"):
        epmoe.EPMoE.from_experts(torch.nn.Linear(2, 2))


def test_integrations_transformers_from_experts_requires_topk():
    """A configuration may name it otherwise. Then topk= gives it."""
    experts = experts_of(make("olmoe"))[0]
    experts.config = PretrainedConfig()
    with pytest.raises(ValueError, match="Config does not say how many experts a token has: pass topk="):
        epmoe.EPMoE.from_experts(experts, max_tokens=8)
    moe = epmoe.EPMoE.from_experts(experts, topk=2, max_tokens=8)
    assert moe.layer.topk == 2
    moe.finalize()


def test_integrations_import_their_project_only_when_used():
    code = "import sys, epmoe, epmoe.integrations.transformers_experts; print('transformers' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False"
