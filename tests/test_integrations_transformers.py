"""experts_implementation="epmoe" of transformers gives the results of transformers' own, in many families."""

import copy
import subprocess
import sys

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

import epmoe
import epmoe.integrations.transformers as integration
from cases import process_ranks

pytestmark = pytest.mark.cpu_only
SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             head_dim=8, max_position_embeddings=64, eos_token_id=None, pad_token_id=0, bos_token_id=1)
INNER = dict(moe_intermediate_size=24, intermediate_size=48)
# The sizes of each family's experts, and how epmoe computes their activation.
FAMILIES = {
    "qwen3_moe": (INNER | dict(num_experts=8, num_experts_per_tok=2), "swiglu"),
    "mixtral": (dict(intermediate_size=24, num_local_experts=8, num_experts_per_tok=2), "swiglu"),
    "deepseek_v3": (INNER | dict(n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
                                 first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
                                 qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4), "swiglu"),
    "gpt_oss": (dict(intermediate_size=24, num_local_experts=8, num_experts_per_tok=2), "gpt_oss"),
    "olmoe": (dict(intermediate_size=24, num_experts=8, num_experts_per_tok=2), "swiglu"),
    "qwen2_moe": (INNER | dict(shared_expert_intermediate_size=24, num_experts=8, num_experts_per_tok=2),
                  "swiglu"),
    "qwen3_next": (INNER | dict(shared_expert_intermediate_size=24, num_experts=8, num_experts_per_tok=2,
                                linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
                                linear_value_head_dim=8,
                                layer_types=["linear_attention", "full_attention"]), "swiglu"),
    "glm4_moe": (INNER | dict(n_routed_experts=8, num_experts_per_tok=2, first_k_dense_replace=1, n_group=1,
                              topk_group=1), "swiglu"),
    "minimax": (dict(intermediate_size=24, num_local_experts=8, num_experts_per_tok=2), "swiglu"),
    "ernie4_5_moe": (INNER | dict(moe_num_experts=8, moe_k=2), "swiglu"),
    "deepseek_v4": ({}, None),  # a gate of its own: clamped
    "nemotron_h": ({}, None),  # no gate
}


def make(family):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SIZES | FAMILIES[family][0]))
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for p in model.parameters():  # of the size at which a wrong gate or bias is seen
        p.data.normal_(0, 0.2)
    return model


def experts_of(model):
    return [m for m in model.modules() if hasattr(m, "has_post_expert_norm")]


def tokens(*shape, seed=1):
    return torch.randint(2, 64, shape, generator=torch.Generator().manual_seed(seed))


def run(model, implementation, ids, forward=None):
    """Return the logits, and {name: gradient}."""
    model.set_experts_implementation(implementation)
    model.zero_grad()
    logits = (forward or model)(input_ids=ids, use_cache=False).logits
    logits.square().mean().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def check_equal(got, want):
    torch.testing.assert_close(got[0], want[0], rtol=2e-5, atol=2e-6)
    assert got[1].keys() == want[1].keys()
    for name, grad in want[1].items():
        torch.testing.assert_close(got[1][name], grad, rtol=2e-4, atol=2e-6,
                                   msg=lambda m, n=name: f"{n}: {m}")


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


def test_integrations_transformers_longer_calls(monkeypatch):
    """A call with more tokens makes a larger layer.  The backward of an earlier call still works."""
    monkeypatch.setattr(integration, "_FEWEST_TOKENS", 4)
    monkeypatch.setattr(integration, "_layers", {})
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
    assert [layer.max_tokens for layers in integration._layers.values() for layer in layers] == [4, 32, 64]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_integrations_transformers_generates(family):
    model, ids = make(family), tokens(2, 5)
    texts = []
    for implementation in ("eager", "epmoe"):
        model.set_experts_implementation(implementation)
        texts.append(model.generate(ids, max_new_tokens=8, do_sample=False))
    assert torch.equal(*texts) and texts[0].shape == (2, 13)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v4"])
def test_integrations_transformers_compiled(family):
    model = make(family)
    want = run(model, "eager", tokens(2, 9))
    compiled = torch.compile(model.forward, backend="aot_eager")
    check_equal(run(model, "epmoe", tokens(2, 9), compiled), want)
    want = run(model, "eager", tokens(2, 12))
    check_equal(run(model, "epmoe", tokens(2, 12), compiled), want)


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


def test_integrations_transformers_refuses_a_norm_after_experts():
    experts = copy.deepcopy(experts_of(make("qwen3_moe"))[0])
    experts.has_post_expert_norm = True
    with pytest.raises(ValueError, match="norm after each expert"):
        integration.experts_forward(experts, torch.zeros(2, 32), torch.zeros(2, 2, dtype=torch.int64),
                                    torch.ones(2, 2))


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
    model = integration.spread_experts(make(family), max_tokens=16, device="cpu")
    spared = num_bytes - sum(p.nbytes for p in model.parameters())
    ddp = DistributedDataParallel(epmoe.prepare_ddp(model))
    logits = ddp(input_ids=all_tokens[rank], use_cache=False).logits
    logits.square().mean().backward()
    own = {id(p) for p in epmoe.expert_parameters(model)}
    grads = {n: (p.grad.clone(), id(p) in own) for n, p in model.named_parameters()}
    next(m for m in model.modules() if isinstance(m, epmoe.EPMoE)).layer.world.close()
    return logits.detach(), eager[rank][0], grads, want, spared


@pytest.mark.parametrize("family, num_ranks", [("qwen3_moe", 4), ("mixtral", 2), ("deepseek_v3", 2),
                                               ("gpt_oss", 2), ("gpt_oss", 4), ("olmoe", 2)])
def test_integrations_transformers_spread_experts(family, num_ranks):
    for rank, (got, logits, grads, want, spared) in enumerate(process_ranks(_spread, num_ranks, family)):
        torch.testing.assert_close(got, logits, rtol=2e-5, atol=2e-6)
        assert spared > 0 and grads.keys() == want.keys()
        for name, (grad, is_expert) in grads.items():
            part = want[name]
            if is_expert:
                part = part.chunk(num_ranks)[rank]
                part = part.transpose(1, 2) if family == "gpt_oss" and "bias" not in name else part
            torch.testing.assert_close(grad, part, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("family, text", [("nemotron_h", "a gate of its own"), ("llama", "no experts")])
def test_integrations_transformers_spread_experts_refuses(family, text):
    FAMILIES.setdefault("llama", (dict(intermediate_size=48), None))
    with pytest.raises(ValueError, match=text):
        integration.spread_experts(make(family), device="cpu")


def test_integrations_import_their_project_only_when_used():
    code = "import sys, epmoe, epmoe.integrations; print('transformers' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False"
