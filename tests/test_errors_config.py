"""Layers with a wrong configuration: all ranks raise an exception, also if only one rank has the mistake."""

import pytest
import torch

import epmoe
import epmoe.env
from cases import (
    MISTAKE_LIMIT_S, Case, afterwards, check_afterwards, check_outcomes, keep, make_layer, outcome,
)
from epmoe.a2a.base import NO_CONFIG
from epmoe.comm.validation import agree

GOOD = {"max_tokens": 8, "hidden": 16, "topk": 2, "num_tot_experts": 12, "dtype": torch.bfloat16}

WRONG = [
    ({"hidden": 7}, "ValueError", ("hidden 7", "16 bytes", "14")),
    ({"hidden": 12}, "ValueError", ("hidden 12", "24")),
    ({"hidden": 0}, "ValueError", ("hidden 0",)),
    ({"hidden": -16}, "ValueError", ("hidden -16: must be 1 to 1048576",)),
    ({"hidden": 1 << 21}, "ValueError", ("hidden 2097152", "1 to 1048576")),
    ({"topk": 33}, "ValueError", ("topk 33", "32")),
    ({"topk": 0}, "ValueError", ("topk 0",)),
    ({"topk": -1}, "ValueError", ("topk -1",)),
    ({"num_tot_experts": 13}, "ValueError", ("13 experts",)),
    ({"num_tot_experts": 0}, "ValueError", ("0 experts",)),
    ({"num_tot_experts": 12 * 1024}, "ValueError", ("12288 experts", "1024")),
    ({"num_tot_experts": None}, "TypeError", ("num_tot_experts",)),
    ({"max_tokens": 0}, "ValueError", ("max_tokens 0",)),
    ({"max_tokens": -5}, "ValueError", ("-5",)),
    ({"max_tokens": 1 << 31}, "ValueError", ("2^31",)),
    ({"max_tokens": 1 << 40}, "ValueError", (f"max_tokens {1 << 40}",)),
    ({"dtype": torch.float64}, "TypeError", ("float64", "bfloat16")),
    ({"dtype": torch.int32}, "TypeError", ("int32", "bfloat16")),
    ({"dtype": "bfloat16"}, "TypeError", ("bfloat16",)),
    ({"weight_dtype": torch.int64}, "TypeError", ("int64", "floating")),
    ({"combine_mode": "pull"}, "ValueError", ("'pull'", "scatter", "gather")),
    ({"capacity": 0}, "ValueError", ("capacity 0",)),
    ({"capacity": 1 << 31}, "ValueError", (f"capacity {1 << 31}",)),
    ({"capacity": -1}, "ValueError", ("capacity -1: must be 1 to 2^31 - 1 rows",)),
    ({"capacity": -(1 << 70)}, "ValueError", ("must be 1 to 2^31 - 1 rows",)),
    ({"hidden": 32.5}, "ValueError", ("hidden 32.5: must be an integer",)),
    ({"max_tokens": float("inf")}, "ValueError", ("max_tokens inf: must be an integer",)),
    ({"topk": [2]}, "TypeError", ("topk [2]: must be an integer",)),
    ({"expert_alignment": 0}, "ValueError", ("expert_alignment 0", "at least 1")),
    ({"expert_alignment": "many"}, "ValueError", ("many",)),
    ({"expert_alignment": 1 << 30}, "ValueError", (f"expert_alignment {1 << 30}", "experts", "2^31")),
    ({"expert_capacity": 0}, "ValueError", ("expert_capacity 0", "at least 1")),
    ({"expert_capacity": 1 << 30}, "ValueError", ("capacity ",)),
    ({"expert_capacity": 4, "capacity": 24}, "ValueError", ("capacity 24 with expert_capacity 4", "leave")),
    ({"expert_capacity": 4, "expert_alignment": 2}, "ValueError", ("expert_alignment 2", "must be 1")),
    ({"host_counts": True, "capacity": 24}, "ValueError", ("host_counts with a capacity",)),
    ({"num_buffers": 0}, "ValueError", ("num_buffers 0",)),
    ({"num_buffers": 17}, "ValueError", ("num_buffers 17", "16")),
    ({"num_sm": 0}, "ValueError", ("num_sm 0",)),
    ({"num_sm": 5000}, "ValueError", ("num_sm 5000", "1024")),
    ({"reserve_sms": -1}, "ValueError", ("reserve_sms -1", "two are left")),
    ({"reserve_sms": 1023}, "ValueError", ("reserve_sms 1023", "two are left")),
    ({"reserve_sms": 5000}, "ValueError", ("reserve_sms 5000",)),
    ({"reserve_sms": "some"}, "ValueError", ("some",)),
    ({"device": "meta"}, "ValueError", ("meta",)),
]
IDS = ["-".join(f"{k}={v}".removeprefix("torch.") for k, v in w[0].items()) for w in WRONG]
ONE_RANK = [w for w in WRONG if w[0].keys() & {"hidden", "topk", "dtype", "capacity"}][::2]


def build(world, device, options, all_ranks, shared):
    """Make a layer with wrong options, on all ranks or on rank 1 only. Then make and use a good layer."""
    heap = None
    if shared:
        heap = epmoe.SymmetricHeap(world, 1 << 20, device)
        keep(world, heap)
    world.set_timeout(MISTAKE_LIMIT_S)
    # The number of experts must be a multiple of the number of ranks.
    num_experts = 12 if 12 % world.size == 0 else 2 * world.size
    good = GOOD | {"num_tot_experts": num_experts} | ({"heap": heap} if shared else {"device": device})
    arguments = good | options if all_ranks or world.rank == 1 else good
    got = outcome(lambda: keep(world, epmoe.EPAll2AllLayer(world, **arguments)))
    in_heap = {"heap": heap} if shared else {}
    return got, afterwards(world, lambda: make_layer(world, device, Case(), **in_heap), Case())


@pytest.mark.parametrize("options, kind, texts", WRONG, ids=IDS)
def test_errors_config_on_all_ranks(ranks, options, kind, texts):
    results = ranks(build, options, True, False, world_size=2, at_least=2)
    check_outcomes([r[0] for r in results], kind, *texts)
    check_afterwards([r[0] for r in results], [r[1] for r in results], Case())


@pytest.mark.parametrize("shared", [False, True], ids=["own-heap", "shared-heap"])
@pytest.mark.parametrize("options, kind, texts", ONE_RANK, ids=[IDS[WRONG.index(w)] for w in ONE_RANK])
def test_errors_config_on_one_rank(ranks, options, kind, texts, shared):
    """The rank with the wrong option raises the reason. The other ranks do not wait for it."""
    results = ranks(build, options, False, shared, world_size=2, at_least=2)
    check_afterwards([r[0] for r in results], [r[1] for r in results], Case())
    check_outcomes([r[0] for r in results],
                   [kind if rank == 1 else "EpError" for rank in range(len(results))], *texts, on_rank=1,
                   elsewhere=["rank 1"])


@pytest.mark.parametrize("shared", [False, True], ids=["own-heap", "shared-heap"])
@pytest.mark.parametrize("options", [{"hidden": 32}, {"max_tokens": 9}, {"topk": 7}, {"num_buffers": 2},
                                     {"dtype": torch.float32}], ids=str)
def test_errors_config_differs_in_size(ranks, options, shared):
    """The constructor names the field that differs, although the size of the layer's heap may differ too."""
    (field, value), = options.items()
    results = ranks(build, options, False, shared, world_size=2, at_least=2)
    check_outcomes([r[0] for r in results], "EpMismatch",
                   f"ranks disagree in {field}: rank 1 has {str(value).removeprefix('torch.')}, rank 0 has")
    check_afterwards([r[0] for r in results], [r[1] for r in results], Case())


@pytest.mark.parametrize("field, options, texts", [
    ("dtype", {"dtype": torch.float16}, ("has float16", "has bfloat16")),
    ("combine_mode", {"combine_mode": "gather"}, ("has gather", "has scatter")),
    ("combine_mode", {"enable_local_combine": True}, ("has local", "has scatter")),
    ("capacity", {"capacity": 20}, ("20", "21")),
    ("expert_alignment", {"expert_alignment": 8}, ("has 8", "has 1")),
    ("expert_capacity", {"expert_capacity": 8}, ("has 8", "has 0")),
], ids=["dtype", "gather", "local", "capacity", "expert_alignment", "expert_capacity"])
def test_errors_config_differs_in_option(ranks, field, options, texts):
    """The constructor also detects a difference that changes no size. It names the field and both values."""

    def run(world, device):
        arguments = {"num_tot_experts": 2 * world.size, "topk": 1, "max_tokens": 8, "hidden": 16,
                     "device": device}
        if field == "capacity":
            arguments["capacity"] = 21
        if world.rank == 1:
            arguments |= options
        world.set_timeout(MISTAKE_LIMIT_S)
        return outcome(lambda: keep(world, epmoe.EPAll2AllLayer(world, **arguments)))

    check_outcomes(ranks(run, world_size=2, at_least=2), "EpMismatch", field, "rank 1", "rank 0", *texts)


def test_errors_config_wrong_group_or_timeout():
    with pytest.raises(TypeError, match="ProcessGroup.*str"):
        epmoe.World("a group")
    with pytest.raises(ValueError, match="this rank is not in the group"):
        epmoe.World(torch.distributed.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(ValueError, match="8"):
        epmoe.thread_worlds(9)
    with pytest.raises(ValueError):
        epmoe.thread_worlds(0)
    for bad in (0, -1, float("nan"), 1e9):
        with pytest.raises(ValueError, match="timeout.* more than 0 and less than 1e6"):
            epmoe.thread_worlds(1, bad)
        with pytest.raises(ValueError, match="timeout.* more than 0 and less than 1e6"):
            epmoe.thread_worlds(1)[0].set_timeout(bad)


def test_errors_set_timeout_rejects_wrong_values(ranks):
    def run(world, device):
        return [outcome(lambda s=s: world.set_timeout(s)) for s in (0, -3, float("nan"), "soon")]

    for got in ranks(run, world_size=2):
        check_outcomes(got[:3], "ValueError", "timeout")
        assert got[3].kind in ("ValueError", "TypeError")


@pytest.mark.parametrize("text", ["soon", "-1"])
def test_errors_wrong_timeout_in_environment(monkeypatch, text):
    monkeypatch.setenv("EPMOE_TIMEOUT_S", text)
    with pytest.raises(ValueError, match="timeout|EPMOE_TIMEOUT_S"):
        epmoe.thread_worlds(1)


def test_errors_wrong_backend_in_environment(monkeypatch):
    monkeypatch.setenv("EPMOE_BACKEND", "tpu")
    with pytest.raises(ValueError, match="tpu"):
        epmoe.comm.heap.pick_device()
    monkeypatch.setenv("EPMOE_BACKEND", "cpu")
    assert epmoe.comm.heap.pick_device().type == "cpu"
    assert epmoe.comm.heap.pick_device("cpu:0") == torch.device("cpu")  # as tensors on it say
    with pytest.raises(ValueError, match="cpu:1"):
        epmoe.comm.heap.pick_device("cpu:1")
    with pytest.raises(ValueError, match="EPMOE_BACKEND=cpu"):
        epmoe.comm.heap.pick_device("cuda:0")


@pytest.mark.parametrize("epmoe_has_cuda, torch_has_cuda, text", [
    (0, True, "this build of epmoe has no CUDA"),
    (1, False, "this torch has no CUDA"),
])
def test_errors_device_cuda_without_cuda_build(monkeypatch, epmoe_has_cuda, torch_has_cuda, text):
    monkeypatch.setattr(epmoe._C, "HAS_CUDA", epmoe_has_cuda)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: torch_has_cuda)
    with pytest.raises(ValueError, match=f"device cuda: {text}"):
        epmoe.comm.heap.pick_device("cuda")
    monkeypatch.setenv("EPMOE_BACKEND", "cuda")
    assert epmoe.env.backend() == f"none: device cuda: {text}"


def test_errors_exchange_of_different_sizes(ranks):
    """If the sizes of an exchange differ, the exception names both. The next exchange works."""

    def run(world, device):
        got = [outcome(lambda: world.exchange(b"x" * (3 if world.rank == 1 else 2))) for _ in range(5)]
        return got, world.exchange(bytes([world.rank])) == [bytes([r]) for r in range(world.size)]

    results = ranks(run, world_size=3, at_least=2)
    for of_all in zip(*(got for got, _ in results)):
        check_outcomes(of_all, "EpMismatch", "3", "2")
    assert all(works for _, works in results)


def test_errors_inherit_builtin_exceptions():
    """Each class inherits the built-in exception that fits, so that general code can catch it."""
    builtins = {epmoe.EpIndexError: IndexError, epmoe.EpTimeout: TimeoutError, epmoe.EpMismatch: ValueError,
                epmoe.HeapExhausted: MemoryError}
    for name in ("PeerDied", "EpTimeout", "EpMismatch", "EpOverflow", "EpIndexError", "HeapExhausted",
                 "PeerError", "EpClosed"):
        cls = getattr(epmoe, name)
        assert issubclass(cls, epmoe.EpError) and issubclass(cls, RuntimeError)
        assert issubclass(cls, builtins.get(cls, RuntimeError))


def test_errors_config_that_nobody_has_checked():
    """Questions about it have an answer, and no number is divided by zero."""
    assert not epmoe._C.layer_has_many_rows(NO_CONFIG._replace(ranks=0, num_experts=4, topk=2, max_tokens=9))
    assert epmoe._C.layer_decodes(NO_CONFIG)


def make_layers_until_error(world, device):
    """Make layers with 16 buffers each until it fails. Then finalize one layer and make another.

    Return (number of layers, class of the exception, its text).
    """
    heap = epmoe.SymmetricHeap(world, 1 << 26, device)
    layers = []
    try:
        while len(layers) < 20:
            layers.append(make_layer(world, device, Case(num_buffers=16), heap=heap))
    except Exception as error:
        name, text = type(error).__name__, str(error)
    num_layers = len(layers)
    layers.pop().finalize()
    make_layer(world, device, Case(num_buffers=16), heap=heap).finalize()
    return num_layers, name, text


def test_errors_config_too_many_buffers(ranks):
    """A world has at most 256 communication buffers. The heap uses one of them. The message has the limit."""
    for num_layers, name, text in ranks(make_layers_until_error, world_size=2, at_least=2):
        assert (num_layers, name) == (15, "HeapExhausted"), text
        assert "at most 256 communication buffers, one for each heap and num_buffers for each layer" in text


def test_errors_config_agree_sees_the_end_of_a_long_text(ranks):
    def run(world, device):
        agree(world, "x" * 5000, "rank {rank}")
        return outcome(lambda: agree(world, "x" * 5000 + "y" * world.rank, "rank {rank} has {its}"))

    for error in ranks(run, world_size=2, at_least=2):
        assert error.kind == "EpMismatch" and error.text.startswith("ranks disagree: rank 1 has xxx")
