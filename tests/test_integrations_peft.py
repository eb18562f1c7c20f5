"""peft on models of transformers whose experts epmoe computes: in one process, and spread over ranks.

What peft computes with transformers' own experts in float64 is the truth.
"""

import contextlib
import doctest
import os
import re

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import epmoe
import frameworks
from cases import generator, process_ranks

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from epmoe.integrations import transformers as integration  # noqa: E402
from epmoe.integrations import transformers_experts as parts  # noqa: E402
from epmoe.moe import lora, lora_products  # noqa: E402
from rank_processes import run  # noqa: E402
from transformers_cases import experts_of, make, tokens  # noqa: E402

pytestmark = [pytest.mark.cpu_only, pytest.mark.long]
R, ALPHA = 3, 7
BOUND = 1e-6  # of the largest value
# The families and the names of the experts' first weight.
UP = {"qwen3_moe": "gate_up_proj", "gpt_oss": "gate_up_proj", "glm4_moe": "gate_up_proj",
      "nemotron_h": "up_proj", "muse_spark_text": "gate_up_proj"}


@pytest.fixture(autouse=True)
def peft():
    frameworks.need("peft")


def config_for(family, **options):
    from peft import LoraConfig

    targets = [f"experts.{UP[family]}", "experts.down_proj"]
    return LoraConfig(**({"r": R, "lora_alpha": ALPHA, "target_modules": ["q_proj", "v_proj"],
                          "target_parameters": targets} | options))


def adapted(family, config, seed=1, name="default"):
    """Return a model of peft with random factors, the same in all processes."""
    from peft import get_peft_model

    model = get_peft_model(eager(family), config, adapter_name=name)
    fill(model, seed)
    return model


def eager(family):
    model = make(family)
    model.set_experts_implementation("eager")
    return model


def fill(model, seed, name=""):
    """Give the factors of an adapter of a model of peft random numbers."""
    g = generator(seed, 78)
    with torch.no_grad():
        for n, p in sorted(model.named_parameters(), key=lambda pair: pair[0]):
            if "lora_" in n and name in n:
                p.copy_(torch.randn(p.shape, generator=g) * 0.2)


def step(model, ids):
    """Return the logits, and {name: gradient}."""
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False)[0]
    logits.square().mean().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def close(got, want, what, bound=BOUND):
    assert got.shape == want.shape, what
    error = (got.double() - want.double()).abs().max() / want.abs().max()
    assert error <= bound, f"{what}: {error}"


def check(got, want, own):
    """Compare a step with one in float64; own: the same step by peft in float32, whose errors are allowed."""
    assert got[1].keys() == want[1].keys() and len(want[1]) > 0
    got, want, own = ({"logits": logits} | grads for logits, grads in (got, want, own))
    bound = max(BOUND, 2 * max(float((own[n].double() - t).abs().max() / t.abs().max())
                               for n, t in want.items()))
    assert bound < 1e-4
    for name, t in want.items():
        close(got[name], t, name, bound)


@contextlib.contextmanager
def counted():
    """Count the products of adapters."""
    add, calls = lora_products.add_product, []
    lora_products.add_product = lambda *args: calls.append(args) or add(*args)
    try:
        yield calls
    finally:
        lora_products.add_product = add


# ---- one process ----


def _one_process(rank, world_size, family):
    """Rank main: peft, unchanged, on a model whose experts_implementation is "epmoe"."""
    frameworks.add_to_path()
    ids, num = tokens(2, 7), 2 * len(experts_of(make(family)))
    models = [adapted(family, config_for(family)) for _ in range(3)]
    models[1].double()
    models[2].base_model.model.set_experts_implementation("epmoe")
    own, want = (step(model, ids) for model in models[:2])
    with counted() as calls:
        check(step(models[2], ids), want, own)
    assert len(calls) == num
    with torch.no_grad():
        close(models[2](input_ids=ids, use_cache=False)[0], want[0], "without gradients", 1e-5)
        with models[2].disable_adapter():
            base = models[2](input_ids=ids, use_cache=False)[0]
    close(base, step(eager(family).double(), ids)[0], "base", 1e-5)

    for model in models:  # the weights are trained, too
        model.requires_grad_(True)
    own, want, got = (step(model, ids) for model in models)
    assert len(want[1]) == len(list(models[1].parameters()))
    check(got, want, own)


@pytest.mark.parametrize("family", UP)
def test_integrations_peft_in_one_process(family):
    process_ranks(_one_process, 1, family)


def _other_states(rank, world_size):
    """Rank main: what peft does beside one active adapter of plain LoRA."""
    frameworks.add_to_path()
    family, ids = "qwen3_moe", tokens(2, 7)
    models = [adapted(family, config_for(family)) for _ in range(3)]

    def check_all():
        own, want, got = (step(model, ids) for model in models)
        check(got, want, own)

    for model in models:
        model.add_adapter("second", config_for(family, r=2))
        fill(model, 2, "second")
        model.base_model.set_adapter(["default", "second"])
    models[1].double()
    models[2].base_model.model.set_experts_implementation("epmoe")
    with counted() as calls:  # peft adds the sum of two adapters to the weights
        check_all()
    assert not calls
    for model in models:
        model.set_adapter("second")
    check_all()
    for model in models:
        model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    with counted() as calls:
        check_all()
    assert len(calls) == 8  # forward and again in the backward, of two layers
    with torch.no_grad():
        want = models[1](input_ids=ids, use_cache=False)[0]
        with counted() as calls:
            close(models[2].merge_and_unload()(input_ids=ids, use_cache=False)[0], want, "merged", 1e-5)
        assert not calls

    # 16 bits: about as far from the truth as peft's sums of weights, which are rounded to 16 bits
    truth = step(adapted(family, config_for(family)).bfloat16().double(), ids)[0]
    errors = []
    for implementation in ("eager", "epmoe"):
        model = adapted(family, config_for(family)).bfloat16()
        model.base_model.model.set_experts_implementation(implementation)
        errors.append(((step(model, ids)[0].double() - truth).norm(dim=-1) / truth.norm(dim=-1)).median())
    assert errors[1] < 1.5 * errors[0] < 0.1, errors


def test_integrations_peft_other_states():
    process_ranks(_other_states, 1)


# ---- spread over ranks ----


def spread(family):
    return integration.spread_experts(make(family), max_tokens=32, device="cpu")


def end(model):
    next(m for m in model.modules() if isinstance(m, epmoe.EPMoE)).layer.world.close()


def read(folder):
    from safetensors.torch import load_file

    return load_file(f"{folder}/adapter_model.safetensors")


def mean_step(model, ids):
    """Return the logits of each rank's tokens, and {name in peft's files: gradient of the mean}."""
    steps = [step(model, of_rank) for of_rank in ids]
    return [logits for logits, _ in steps], {
        n.replace(".default", ""): sum(grads[n] for _, grads in steps) / len(steps) for n in steps[0][1]}


def _spread(rank, world_size, family, options, folder):
    """Rank main: a file of peft, a step under DistributedDataParallel, and back to peft."""
    frameworks.add_to_path()
    from peft import PeftModel

    from epmoe.integrations.peft import add_lora, load_lora, save_lora, set_lora

    theirs = adapted(family, config_for(family, **options))
    if rank == 0:
        theirs.save_pretrained(f"{folder}/theirs")
    dist.barrier()
    ids = [tokens(2, 5 + r, seed=r) for r in range(world_size)]
    own, want = mean_step(theirs, ids), mean_step(theirs.double(), ids)
    model = load_lora(spread(family), f"{folder}/theirs")
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {n for n, _ in model.named_parameters() if "lora_" in n}
    save_lora(model, f"{folder}/ours")
    saved, ours = read(f"{folder}/theirs"), read(f"{folder}/ours")
    assert saved.keys() == ours.keys() and all(torch.equal(ours[key], t) for key, t in saved.items())

    ddp = DistributedDataParallel(epmoe.prepare_ddp(model))
    logits, grads = step(ddp, ids[rank])
    assert {n.removeprefix("module.") for n in grads} == trained
    with torch.no_grad():
        set_lora(model, None)
        plain = eager(family).double()(input_ids=ids[rank])[0]
        close(model(input_ids=ids[rank])[0], plain, "without the adapter", 1e-5)
        assert not any(p.requires_grad for p in model.parameters())
        set_lora(model, "default")
        for n, p in model.named_parameters():  # the gradients of all ranks under the names of peft
            if n in trained:
                p.copy_(grads[f"module.{n}"])
    assert {n for n, p in model.named_parameters() if p.requires_grad} == trained
    save_lora(model, f"{folder}/gradients")
    check((logits, read(f"{folder}/gradients")), (want[0][rank], want[1]), (own[0][rank], own[1]))

    # peft reads what was saved, here the gradients
    loaded = PeftModel.from_pretrained(eager(family), f"{folder}/gradients")
    with torch.no_grad():
        close(model(input_ids=ids[rank])[0], loaded(input_ids=ids[rank])[0], "loaded by peft", 1e-5)
    end(model)

    # a new adapter, trained and saved
    torch.manual_seed(3)
    model = add_lora(spread(family), config_for(family, **options))
    assert {n for n, p in model.named_parameters() if p.requires_grad} == trained
    ddp = DistributedDataParallel(epmoe.prepare_ddp(model))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.05)
    for _ in range(3):
        step(ddp, ids[rank])
        optimizer.step()
    assert all(p.any() for n, p in model.named_parameters() if "lora_B" in n)
    save_lora(model, f"{folder}/new")
    loaded = PeftModel.from_pretrained(eager(family), f"{folder}/new")
    with torch.no_grad():
        close(model(input_ids=ids[rank])[0], loaded(input_ids=ids[rank])[0], "trained, in peft", 1e-5)
    end(model)
    return sorted(os.listdir(f"{folder}/ours"))


# all-linear: gate_proj, up_proj and down_proj of each expert in transformers 4, and the router
SPREAD = {"qwen3": ("qwen3_moe", {}), "gpt_oss": ("gpt_oss", {}), "no_gate": ("nemotron_h", {}),
          "all_linear": ("qwen3_moe", {"target_modules": "all-linear", "target_parameters": None}),
          "down": ("qwen3_moe", {"target_modules": [], "target_parameters": ["mlp.experts.down_proj",
                                                                             "mlp.gate.weight"]}),
          "patterns": ("qwen3_moe", {"rank_pattern": {"layers.1.mlp.experts.*": 2, "q_proj": 4},
                                     "alpha_pattern": {".*experts.*": 5}, "use_rslora": True})}


@pytest.mark.parametrize("case, size", [*((case, 2) for case in SPREAD), ("qwen3", 1), ("all_linear", 1)])
def test_integrations_peft_spread(tmp_path, case, size):
    for files in process_ranks(_spread, size, *SPREAD[case], os.fspath(tmp_path)):
        assert files == ["adapter_config.json", "adapter_model.safetensors"]


def _sixteen_bits(rank, world_size, folder):
    """Rank main: a model in bfloat16."""
    frameworks.add_to_path()
    from epmoe.integrations.peft import load_lora

    ids = tokens(2, 5, seed=rank)
    theirs = adapted("qwen3_moe", config_for("qwen3_moe")).bfloat16()
    if rank == 0:
        theirs.save_pretrained(folder)
    dist.barrier()
    with torch.no_grad():
        own, want = theirs(input_ids=ids)[0], theirs.double()(input_ids=ids)[0]
        model = integration.spread_experts(make("qwen3_moe").bfloat16(), max_tokens=32, device="cpu")
        logits = load_lora(model, folder)(input_ids=ids)[0]
    # the median of the tokens, because rounding can give a token another expert
    errors = [((t.double() - want).norm(dim=-1) / want.norm(dim=-1)).median() for t in (own, logits)]
    assert errors[1] < 1.5 * errors[0] < 0.1, errors
    dtypes = {n.split(".lora_")[0].rpartition(".")[2]: p.dtype for n, p in model.named_parameters()
              if p.requires_grad}
    end(model)
    return dtypes


def test_integrations_peft_in_sixteen_bits(tmp_path):
    for dtypes in process_ranks(_sixteen_bits, 2, os.fspath(tmp_path)):
        assert dtypes == {"q_proj": torch.float32, "v_proj": torch.float32, "gate_up_proj": torch.bfloat16,
                          "down_proj": torch.bfloat16}


# ---- errors ----

# Fields of a LoraConfig, and what the message says.
WRONG = {"dora": ({"use_dora": True}, r"LoraConfig\(use_dora=True\): not for experts"),
         "dropout": ({"lora_dropout": 0.1}, r"LoraConfig\(lora_dropout=0.1\): not for experts"),
         "bias": ({"bias": "all"}, "bias='all'"),
         "init": ({"init_lora_weights": "gaussian"}, "init_lora_weights='gaussian'"),
         "saved": ({"modules_to_save": ["mlp.experts"]}, "modules_to_save="),
         "no_experts": ({"target_parameters": None}, "none of them is a weight of experts"),
         "unknown": ({"target_parameters": ["experts.down"]}, "no parameter of the model is called"),
         "r": ({"rank_pattern": {".*experts.down_proj": 5}}, "must have the same lora_alpha / r"),
         "kind": (None, "wanted a LoraConfig of peft, got str")}


def outcome(call):
    try:
        call()
    except Exception as error:
        kinds = (kind for kind in type(error).__mro__ if not kind.__module__.startswith("peft"))
        return next(kinds).__name__, str(error)
    return "", ""


def state_of(model):
    return ([(n, p.requires_grad) for n, p in model.named_parameters()],
            [m.active_adapter for m in model.modules() if isinstance(m, epmoe.EPMoE)])


def _errors(rank, world_size, folder):
    """Rank main: rank 1 makes a mistake, and the other learns of it; the model is as it was."""
    frameworks.add_to_path()
    from peft import PeftModel, get_peft_model
    from safetensors.torch import save_file

    from epmoe.integrations.peft import add_lora, load_lora, save_lora, set_lora

    model, found = spread("qwen3_moe"), {}
    before = state_of(model)

    def note(name, call):
        found[name] = outcome(call)
        assert state_of(model) == before, name

    for name, (options, _) in WRONG.items():
        options = options if rank == 1 else {}
        config = "text" if options is None else config_for("qwen3_moe", **options)
        note(name, lambda config=config: add_lora(model, config))
    note("ranks", lambda: add_lora(model, config_for("qwen3_moe", r=2 + rank)))
    note("name", lambda: add_lora(model, config_for("qwen3_moe"), "a.b" if rank == 1 else "a"))
    note("no module", lambda: add_lora(model, config_for("qwen3_moe", target_modules=["nowhere"])))
    note("no adapter", lambda: set_lora(model, "absent"))
    note("not saved", lambda: save_lora(model, folder, "absent"))
    note("no file", lambda: load_lora(model, f"{folder}/absent"))
    note("list", lambda: set_lora(model, ["a"]))
    saved = add_lora(spread("qwen3_moe"), config_for("qwen3_moe"))
    save_lora(saved, f"{folder}/first")
    if rank == 0:
        tensors = read(f"{folder}/first")
        tensors.pop(next(key for key in tensors if "q_proj.lora_A" in key))
        save_file(tensors, f"{folder}/first/adapter_model.safetensors")
    dist.barrier()
    note("first", lambda: load_lora(model, f"{folder}/first"))
    assert not hasattr(model, "peft_config")

    add_lora(model, config_for("qwen3_moe"))
    before = state_of(model)
    note("taken", lambda: add_lora(model, config_for("qwen3_moe")))
    save_lora(model, f"{folder}/right")
    right, dense, experts = read(f"{folder}/right"), "layers.1.self_attn.q_proj.lora_A", "experts.lora_B"
    more = {"base_model.model.model.norm.lora_A.weight": torch.ones(2, 2)}
    files = {"less dense": {key: t for key, t in right.items() if dense not in key},
             "less experts": {key: t for key, t in right.items() if experts not in key}, "more": right | more}
    for name, tensors in files.items():
        save_lora(model, f"{folder}/{name}")
        if rank == 0:
            save_file(tensors, f"{folder}/{name}/adapter_model.safetensors")
        dist.barrier()
        note(name, lambda name=name: load_lora(model, f"{folder}/{name}", "second"))
    note("unwritable", lambda: save_lora(model, "/proc/self/nowhere"))
    load_lora(model, f"{folder}/right", "second", dtype=torch.bfloat16)  # and then all is well
    ids = tokens(2, 5, seed=rank)
    with torch.no_grad():
        first, second = model(input_ids=ids)[0], set_lora(model, "default") or model(input_ids=ids)[0]
    close(first, second, "two adapters", 1e-2)

    last = [m for m in model.modules() if isinstance(m, epmoe.EPMoE)][-1]
    last.merge_adapter()
    before = state_of(model)
    note("set while merged", lambda: set_lora(model, "second"))
    note("added while merged", lambda: add_lora(model, config_for("qwen3_moe"), "third"))
    last.unmerge_adapter()
    set_lora(model, "second")

    # peft's own functions on spread experts, and spread_experts after peft
    other = get_peft_model(spread("qwen3_moe"), config_for("qwen3_moe"))
    found["ddp"] = outcome(lambda: epmoe.prepare_ddp(other))
    found["fsdp"] = outcome(lambda: epmoe.prepare_fsdp(other))
    found["peft model"] = outcome(lambda: add_lora(other, config_for("qwen3_moe")))
    whole = get_peft_model(make("qwen3_moe"), config_for("qwen3_moe"))
    found["spread"] = outcome(lambda: integration.spread_experts(whole, max_tokens=8, device="cpu"))
    found["not spread"] = outcome(lambda: add_lora(make("qwen3_moe"), config_for("qwen3_moe")))
    assert isinstance(other, PeftModel)
    for m in (model, saved, other):
        end(m)
    return found


def _switched(rank, world_size):
    """Rank main: DistributedDataParallel does not average an adapter that did not train when it was made."""
    frameworks.add_to_path()
    from epmoe.integrations.peft import add_lora, set_lora

    model, ids = spread("qwen3_moe"), tokens(2, 5, seed=rank)
    for name in "ab":
        add_lora(model, config_for("qwen3_moe"), name)
    found = []
    for name, steps_first in ("a", True), ("b", True), ("a", False):
        set_lora(model, name)
        ddp = DistributedDataParallel(epmoe.prepare_ddp(model))
        if steps_first:
            step(ddp, ids)
        set_lora(model, "b" if name == "a" else "a")
        with torch.no_grad():
            ddp(input_ids=ids)
        found.append(outcome(lambda: step(ddp, ids)))
        del ddp
    end(model)
    return found


def test_integrations_peft_wants_a_new_ddp_for_another_adapter():
    for found in process_ranks(_switched, 2):
        assert len(found) == 3
        for kind, text in found:
            assert kind == "RuntimeError" and "make a new DistributedDataParallel after set_lora" in text


class Pair(torch.nn.Module):
    """Two parameters of one module: peft puts one wrapper into another."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Parameter(torch.randn(16, 16)) for _ in range(2))

    def forward(self, x):
        return x @ self.first @ self.second


def _unwrapped(rank, world_size):
    """Rank main: a first add_lora that fails leaves a module with two wrappers as it was."""
    frameworks.add_to_path()
    from peft import LoraConfig

    from epmoe.integrations.peft import add_lora

    moe = epmoe.EPMoE(16, 32, 2, 1, dtype=torch.float32, device="cpu")
    model, x = torch.nn.ModuleDict({"experts": moe, "pair": Pair()}), torch.randn(3, 16)
    want, before = model.pair(x), state_of(model)
    config = LoraConfig(r=4, target_modules=[],
                        target_parameters=["experts.down_proj", "pair.first", "pair.second"])
    moe.add_adapter = None  # fails after peft has made its wrappers
    kind, _ = outcome(lambda: add_lora(model, config))
    del moe.add_adapter
    assert state_of(model) == before and type(model.pair) is Pair and torch.equal(model.pair(x), want)
    add_lora(model, config)
    moe.layer.world.close()
    return kind


def test_integrations_peft_unwraps_what_it_has_wrapped_twice():
    assert process_ranks(_unwrapped, 1) == ["TypeError"]


def _examples(rank, world_size):
    """Rank main: the examples of the docstrings."""
    frameworks.add_to_path()
    from epmoe.integrations import peft

    return doctest.testmod(peft)


def test_integrations_peft_examples():
    [(num_failed, num_tried)] = process_ranks(_examples, 1)
    assert (num_failed, num_tried > 20) == (0, True)


def test_integrations_peft_page_runs(tmp_path):
    frameworks.run_page("lora.md", tmp_path, run)


def test_integrations_peft_errors(tmp_path):
    found = process_ranks(_errors, 2, os.fspath(tmp_path))
    for name, (_, text) in WRONG.items():
        kind, message = found[1][name]
        assert kind in ("ValueError", "TypeError") and re.search(text, message), (name, kind, message)
        assert found[0][name][0] == "PeerError", (name, found[0][name])
    assert found[1]["name"][0] == "ValueError" and found[0]["name"][0] == "PeerError"
    both = {"ranks": ("EpMismatch", "configuration .*: r=3"),
            "no adapter": ("ValueError", "no adapter 'absent'"),
            "no module": ("ValueError", "Target modules .*nowhere.* not found"),
            "not saved": ("ValueError", "no adapter 'absent'"),
            "no file": ("FileNotFoundError", "has no adapter_config.json"),
            "list": ("TypeError", "a list of adapters is for EPMoE.set_adapter"),
            "first": ("ValueError", "does not fit the model: missing .*q_proj"),
            "taken": ("ValueError", "has an adapter 'default' already"),
            "set while merged": ("RuntimeError", "set_lora: .* hold the adapter 'default' now"),
            "added while merged": ("RuntimeError", "add_lora: .* hold the adapter 'default' now"),
            "less dense": ("ValueError", "does not fit the model: missing .*q_proj"),
            "more": ("ValueError", "does not fit the model: .* unexpected .*norm.lora_A"),
            "less experts": ("ValueError", "wanted tensors with the ranks"),
            "ddp": ("ValueError", "peft has put an adapter around an EPMoE"),
            "fsdp": ("ValueError", "peft has put an adapter around an EPMoE"),
            "peft model": ("TypeError", "got PeftModel"), "spread": ("ValueError", "peft has put an adapter"),
            "not spread": ("ValueError", "call spread_experts first")}
    for name, (kind, text) in both.items():
        for of_rank in found:
            assert of_rank[name][0] == kind and re.search(text, of_rank[name][1]), (name, of_rank[name])
    assert found[0]["unwritable"][0] in ("FileNotFoundError", "PermissionError", "OSError")
    assert found[1]["unwritable"][0] == "PeerError"
