"""ep_implementation="epmoe": models that transformers shards equal the unmodified models in one process.

The ranks start once for each world size and do everything; the tests read their results.
"""

import logging
import tempfile
import traceback

import pytest
import torch

pytest.importorskip("accelerate", reason="transformers needs accelerate to load a model that it shards")
pytest.importorskip("transformers.distributed.expert_parallel")

import epmoe
import epmoe.integrations.transformers as integration
from cases import process_ranks
from epmoe.integrations import transformers_ep
from epmoe.integrations import transformers_experts as parts
from pace import HANG_S
from transformers_cases import SPREAD, experts_of, make, tokens
from transformers_ranks import LARGEST, check, compare, compiled, sharded, train

pytestmark = [pytest.mark.cpu_only, pytest.mark.long]
# World size -> the grids of ranks, and their families.
GRIDS = {
    2: {(("fsdp_size", 2), ("ep_size", 2)): SPREAD,
        (("tp_size", 2), ("ep_size", 2)): ["qwen3_moe", "gpt_oss"]},
    4: {(("fsdp_size", 4), ("ep_size", 4)): SPREAD,
        (("fsdp_size", 4), ("ep_size", 2)): ["qwen3_moe", "gpt_oss", "muse_spark_text"],
        (("fsdp_size", 2), ("tp_size", 2), ("ep_size", 4)): ["qwen3_moe", "gpt_oss", "nemotron_h"]},
}
CASES = [(size, name, dict(grid)) for size, grids in GRIDS.items() for grid, names in grids.items()
         for name in names]
# Training and compilation take seconds for each rank.  So each family is trained with two or with four ranks,
# and one is compiled.  transformers_ranks.py does both for all families with two and with four, and also
# compiles with dynamic sizes.
TRAINED = [(2, family) for family in SPREAD[::2]] + [(4, family) for family in SPREAD[1::2]]
COMPILED = [(2, "qwen3_moe")]


def key(grid, family):
    return "-".join([family, *(f"{name.removesuffix('_size')}{n}" for name, n in grid.items())])


def generate(rank, num_ranks, folder):
    """Each rank has a prompt of another length; the ranks' texts, and those of the unmodified model."""
    prompt = tokens(2, 3 + 4 * rank, seed=rank)
    prompt[0, 0] = 0  # padding
    options = dict(attention_mask=(prompt != 0).long(), max_new_tokens=6, do_sample=False)
    model = sharded(folder, "qwen3_moe", fsdp_size=num_ranks, ep_size=num_ranks)
    return model.generate(prompt, **options), make("qwen3_moe").generate(prompt, **options)


def rows_without_decoration(rank, num_ranks, folder):
    """Experts that epmoe cannot compute run their own forward; also where a rank receives no row."""
    is_plain, parts.is_plain = parts.is_plain, lambda experts: False
    try:
        found = [compare(rank, num_ranks, folder, family, dict(fsdp_size=num_ranks, ep_size=num_ranks))
                 for family in ("qwen3_moe", "gpt_oss")]
        model = sharded(folder, "qwen3_moe", fsdp_size=num_ranks, ep_size=num_ranks)
        model(input_ids=tokens(1, 3))
        x = torch.ones(2, 32)
        y = experts_of(model)[0](x, torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2))  # all to rank 0
    finally:
        parts.is_plain = is_plain
    want = experts_of(make("qwen3_moe"))[0](x, torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2))
    return found, (y - want).abs().max().item()


def sizes(rank, num_ranks, folder):
    """Layers grow with the longest call of any rank, also where a rank has no token; and set_ep_options."""
    parts.FEWEST_TOKENS, before = 4, parts.FEWEST_TOKENS
    integration.set_ep_options(num_sm=3)  # options of its own: new layers
    model = sharded(folder, "qwen3_moe", fsdp_size=num_ranks, ep_size=num_ranks)
    want = make("qwen3_moe")
    with torch.no_grad():
        worst = max((model(input_ids=ids)[0] - want(input_ids=ids)[0]).abs().max().item()
                    for ids in (tokens(1, 3), tokens(1, 3 + 20 * rank), tokens(2, 9)))
        x = torch.ones(0 if rank == 0 else 2, 32)
        shape = list(experts_of(model)[0](x, torch.zeros(len(x), 2, dtype=torch.int64), torch.ones(len(x), 2))
                     .shape)
    layers = experts_of(model)[0].forward.__closure__
    (ep,) = [c.cell_contents for c in layers if isinstance(c.cell_contents, integration.EpmoeEP)]
    grown = [layer.max_tokens for of in ep.layers.of_shape.values() for layer in of]
    parts.FEWEST_TOKENS = before

    integration.set_ep_options(max_tokens=6)
    exchange, transformers_ep._most_tokens = transformers_ep._most_tokens, None  # not called
    model = sharded(folder, "qwen3_moe", fsdp_size=num_ranks, ep_size=num_ranks)
    texts = []
    for n in (6, 6 + rank):
        try:
            with torch.no_grad():
                model(input_ids=tokens(1, n))
            texts.append("")
        except (ValueError, epmoe.PeerError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    transformers_ep._most_tokens = exchange
    integration.set_ep_options()
    return worst, shape, grown, texts


def main(rank, num_ranks, folder):
    """Do everything; a dict of results, or of tracebacks."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    jobs = {key(grid, family): (compare, family, grid) for size, family, grid in CASES if size == num_ranks}
    jobs |= {f"train-{family}": (train, family) for size, family in TRAINED if size == num_ranks}
    jobs |= {"rows": (rows_without_decoration,), "sizes": (sizes,), "generate": (generate,)}
    jobs |= {f"compiled-{family}": (compiled, family) for size, family in COMPILED if size == num_ranks}
    results = {}
    for name, (job, *arguments) in jobs.items():
        try:
            results[name] = job(rank, num_ranks, folder, *arguments)
        except Exception:  # the test of this job shows it
            results[name] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def results():
    """Return a function: (world size, name of a job) -> the results of all ranks."""
    done = {}

    def get(num_ranks, name):
        if num_ranks not in done:
            with tempfile.TemporaryDirectory() as folder:
                for family in SPREAD:
                    make(family).save_pretrained(f"{folder}/{family}")
                done[num_ranks] = process_ranks(main, num_ranks, folder, timeout_s=HANG_S)
        found = [of_rank[name] for of_rank in done[num_ranks]]
        assert not any(isinstance(r, str) for r in found), "\n".join(map(str, found))
        return found

    return get


# ---- tests ----


@pytest.mark.parametrize("num_ranks, family, grid", CASES, ids=[key(g, f) for _, f, g in CASES])
def test_integrations_transformers_ep_family(results, num_ranks, family, grid):
    for logits, grads, name in results(num_ranks, key(grid, family)):
        assert logits <= LARGEST and grads <= LARGEST, (logits, grads, name)


@pytest.mark.parametrize("num_ranks, family", TRAINED)
def test_integrations_transformers_ep_trains_and_saves(results, num_ranks, family):
    """Three steps of AdamW with gradient checkpointing; the checkpoint is loaded in one process."""
    for result in results(num_ranks, f"train-{family}"):
        check(family, "train", result)


@pytest.mark.parametrize("num_ranks, family", COMPILED)
def test_integrations_transformers_ep_compiled(results, num_ranks, family):
    for result in results(num_ranks, f"compiled-{family}"):
        check(family, "compiled", result)


@pytest.mark.parametrize("num_ranks", GRIDS)
def test_integrations_transformers_ep_generates(results, num_ranks):
    for rank, (got, want) in enumerate(results(num_ranks, "generate")):
        assert torch.equal(got, want) and got.shape == (2, 9 + 4 * rank)


@pytest.mark.parametrize("num_ranks", GRIDS)
def test_integrations_transformers_ep_other_experts(results, num_ranks):
    for found, alone in results(num_ranks, "rows"):
        assert alone <= LARGEST
        for logits, grads, name in found:
            assert logits <= LARGEST and grads <= LARGEST, (logits, grads, name)


@pytest.mark.parametrize("num_ranks", GRIDS)
def test_integrations_transformers_ep_sizes(results, num_ranks):
    for rank, (worst, shape, grown, (first, second)) in enumerate(results(num_ranks, "sizes")):
        assert worst <= LARGEST and shape == [0 if rank == 0 else 2, 32]
        assert grown == [4, 32 if num_ranks == 2 else 64]
        kind = "PeerError" if rank == 0 else "ValueError"
        assert not first and second.startswith(kind) and (rank == 0 or "set_ep_options" in second), second


def test_integrations_transformers_ep_refuses_unknown_options():
    with pytest.raises(TypeError, match="max_token: not an option of EpAll2AllFusedOp"):
        integration.set_ep_options(max_token=3)
