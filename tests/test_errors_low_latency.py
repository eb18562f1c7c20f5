"""Wrong calls of LowLatencyAll2All: an error on every rank that takes part, and the next call works."""

import re

import pytest
import torch

import epmoe
from low_latency_cases import Call, Shape, check_call, make, run_call
from outcomes import check_outcomes, outcome

SHAPE = Shape()
GOOD = Call(seed=7, tokens="full")


def wrong(change):
    """A function that makes the wrong call."""

    def call(a2a):
        x, idx, weights = (t.to(a2a.device) for t in GOOD.inputs(SHAPE, a2a.rank, a2a.world_size))
        arguments = {"x": x, "topk_idx": idx, "topk_weights": weights}
        return a2a.dispatch(**arguments | change(arguments))

    return call


CASES = {
    "dtype": (lambda a: {"x": a["x"].float()}, "TypeError", "bfloat16"),
    "hidden": (lambda a: {"x": a["x"][:, :64].contiguous()}, "ValueError", "128"),
    "strides": (lambda a: {"x": a["x"].repeat(1, 2)[:, ::2]}, "ValueError", "contiguous"),
    "dimensions": (lambda a: {"x": a["x"][None]}, "ValueError", "dimensions"),
    "five dimensions": (lambda a: {"x": a["x"][None, None, None]}, "ValueError", "at most 4"),
    "no tensor": (lambda a: {"x": "x"}, "TypeError", "str"),
    "tokens": (lambda a: {"x": a["x"].new_zeros(10, 128)}, "ValueError", "max_tokens"),
    "topk": (lambda a: {"topk_idx": a["topk_idx"][:, :2].contiguous()}, "ValueError", "topk_idx"),
    "index dtype": (lambda a: {"topk_idx": a["topk_idx"].to(torch.int16)}, "TypeError", "int16"),
    "index tokens": (lambda a: {"topk_idx": torch.cat([a["topk_idx"], a["topk_idx"]])[:10]}, "ValueError",
                     "topk_idx"),
    "weights": (lambda a: {"topk_weights": a["topk_weights"][:, :1].contiguous()}, "ValueError",
                "topk_weights"),
    "weight dtype": (lambda a: {"topk_weights": a["topk_idx"]}, "TypeError", "topk_weights"),
    "weights in a list": (lambda a: {"topk_weights": a["topk_weights"].tolist()}, "TypeError", "list"),
    "fp8": (lambda a: {"fp8": "e5m2"}, "ValueError", "pow2"),
    "fp8 of a small hidden": (lambda a: {"fp8": "ue8m0"}, "ValueError", "512"),
    "layout": (lambda a: {"layout": "dense"}, "ValueError", "masked or compact"),
    "out": (lambda a: {"out": [1, 2, 3, 4]}, "TypeError", "the tuple that a dispatch returned, got list"),
    "out's handle": (lambda a: {"out": (1, 2, 3, 4)}, "TypeError", "LowLatencyHandle"),
    "gradient": (lambda a: {"x": a["x"].clone().requires_grad_()}, "RuntimeError", "no_grad"),
}


def on_last(world):
    return world.rank == world.size - 1


def run_wrong(ranks, call, is_on_all=False):
    """The outcomes of call(a2a) on the last rank, or on all, and a good call after it."""

    def run(world, device):
        a2a = make(world, device, SHAPE)
        bad = is_on_all or on_last(world)
        got = outcome(lambda: (call if bad else wrong(lambda a: {}))(a2a), a2a)
        result = run_call(a2a, SHAPE, GOOD)
        a2a.synchronize()
        a2a.finalize()
        return got, result

    results = ranks(run, at_least=2)
    check_call(SHAPE, GOOD, [r[1] for r in results])
    return [r[0] for r in results]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("is_on_all", [False, True])
def test_errors_low_latency_dispatch(ranks, name, is_on_all):
    change, error, text = CASES[name]
    got = run_wrong(ranks, wrong(change), is_on_all)
    last = len(got) - 1
    if is_on_all:
        check_outcomes(got, error, text)
    else:
        check_outcomes(got, ["PeerError"] * last + [error], text, on_rank=last, elsewhere=(f"rank {last}",))


@pytest.mark.parametrize("index", [-2, 16, 2**31 + 1])
def test_errors_low_latency_index(ranks, index):
    """The rank that has the wrong index says which; the others say where."""

    def change(arguments):
        idx = arguments["topk_idx"].clone()
        idx[1, 2] = index if index != 16 else idx.max() * 0 + 10000
        return {"topk_idx": idx}

    got = run_wrong(ranks, wrong(change))
    last = len(got) - 1
    text = str(index if index != 16 else 10000)
    check_outcomes(got, "EpIndexError", text, f"rank {last}", on_rank=last,
                   elsewhere=(f"rank {last}", "token 1, choice 2"))


def test_errors_low_latency_index_on_all_ranks(ranks):
    """All ranks have a wrong index at the same choice. The rank that an error names says the index."""

    def call(a2a):
        def change(arguments):
            idx = arguments["topk_idx"].clone()
            idx[1, 2] = 10000 + a2a.rank
            return {"topk_idx": idx}

        return wrong(change)(a2a)

    got = run_wrong(ranks, call, is_on_all=True)
    check_outcomes(got, "EpIndexError", "token 1, choice 2")
    for one in got:
        named = int(re.search(r"rank (\d+)", one.text)[1])
        assert str(10000 + named) in got[named].text, (one.text, got[named].text)


@pytest.mark.parametrize("options", [{"fp8": True}, {"fp8": "pow2"}])
def test_errors_low_latency_fp8_differs(ranks, options):
    got = run_wrong(ranks, wrong(lambda a: options))
    check_outcomes(got, "EpMismatch", "fp8")


def test_errors_low_latency_order_of_calls(ranks):
    """One rank combines while the others dispatch."""

    def run(world, device):
        a2a = make(world, device, SHAPE)
        with torch.no_grad():
            again = wrong(lambda a: {})
            rows, _, _, handle = again(a2a)
            got = outcome(lambda: a2a.combine(rows, handle) if on_last(world) else again(a2a), a2a)
        result = run_call(a2a, SHAPE, GOOD)
        a2a.synchronize()
        a2a.finalize()
        return got, result

    results = ranks(run, at_least=2)
    check_outcomes([r[0] for r in results], "EpMismatch", "low-latency combine", "low-latency dispatch")
    check_call(SHAPE, GOOD, [r[1] for r in results])


def test_errors_low_latency_handles_differ(ranks):
    """Ranks combine with the handles of different dispatches."""

    def run(world, device):
        a2a = make(world, device, SHAPE)
        with torch.no_grad():
            calls = [wrong(lambda a: {})(a2a) for _ in range(2)]
            rows, _, _, handle = calls[on_last(world)]
            got = outcome(lambda: a2a.combine(rows, handle), a2a)
        result = run_call(a2a, SHAPE, GOOD)
        a2a.finalize()
        return got, result

    results = ranks(run, at_least=2)
    check_outcomes([r[0] for r in results], "EpMismatch", "handle")
    check_call(SHAPE, GOOD, [r[1] for r in results])


def test_errors_low_latency_combine(ranks):
    def run(world, device):
        a2a = make(world, device, SHAPE)
        other = make(world, device, SHAPE)
        got = []
        with torch.no_grad():
            for change in (lambda y, h: (y.float(), h), lambda y, h: (y[:1], h), lambda y, h: (y, "h"),
                           lambda y, h: (y, foreign), lambda y, h: ("y", h), lambda y, h: (y, h, "pow2"),
                           lambda y, h: (y.clone().requires_grad_(), h)):
                foreign = wrong(lambda a: {})(other)[3]
                rows, _, _, handle = wrong(lambda a: {})(a2a)
                y, h, *fp8 = change(rows, handle) if on_last(world) else (rows, handle)
                with torch.enable_grad():
                    got.append(outcome(lambda: a2a.combine(y, h, fp8=fp8[0] if fp8 else False), a2a))
        result = run_call(a2a, SHAPE, GOOD)
        a2a.finalize()
        other.finalize()
        return got, result

    results = ranks(run, at_least=2)
    last = len(results) - 1
    for i, (error, text) in enumerate([("TypeError", "rows"), ("ValueError", "rows"), ("TypeError", "handle"),
                                       ("ValueError", "another"), ("TypeError", "str"),
                                       ("TypeError", "True or False, got 'pow2'"),
                                       ("RuntimeError", "no_grad")]):
        check_outcomes([r[0][i] for r in results], ["PeerError"] * last + [error], text, on_rank=last,
                       elsewhere=(f"rank {last}",))
    check_call(SHAPE, GOOD, [r[1] for r in results])


@pytest.mark.parametrize("shape, error, text", [(Shape(dtype=torch.float32), "TypeError", "not float32"),
                                                (Shape(hidden=192), "ValueError", "multiple of 128"),
                                                (Shape(local=False), "ValueError", "enable_local_combine")])
def test_errors_low_latency_sums_in_fp8(ranks, shape, error, text):
    """A layer whose sums cannot travel in FP8, and then fp8 that differs between ranks."""

    def run(world, device):
        got = []
        for of in (shape, SHAPE):
            a2a = make(world, device, of)
            x, idx, weights = (t.to(device) for t in GOOD.inputs(of, world.rank, world.size))
            with torch.no_grad():
                rows, _, _, handle = a2a.dispatch(x, idx, weights)
                fp8 = of is shape or on_last(world)
                got.append(outcome(lambda: a2a.combine(rows.zero_(), handle, fp8=fp8), a2a))
                again = a2a.combine(rows, handle)
            a2a.synchronize()
            a2a.finalize()
        return got, bool((again == 0).all())

    results = ranks(run, at_least=2)
    check_outcomes([got[0] for got, _ in results], error, text)
    check_outcomes([got[1] for got, _ in results], "EpMismatch", "fp8")
    assert all(is_right for _, is_right in results)


def test_errors_low_latency_out(ranks):
    """An out of another layout or layer, one that is in use, and sums of another size."""

    def run(world, device):
        a2a, other = (make(world, device, Shape(num_buffers=2)) for _ in "ab")
        x, idx, weights = (t.to(device) for t in GOOD.inputs(SHAPE, world.rank, world.size))
        got = []

        def attempt(call, **options):
            got.append(outcome(lambda: call(**options if on_last(world) else {}), a2a))

        def dispatch(**options):
            return a2a.dispatch(x, idx, weights, **options)

        with torch.no_grad():
            compact, foreign = dispatch(layout="compact"), other.dispatch(x, idx, weights)
            attempt(dispatch, out=compact)
            attempt(dispatch, out=foreign)
            pending = a2a.dispatch_send(x, idx, weights, buffer=1)
            attempt(dispatch, out=pending._result)
            rows, _, _, handle = pending.recv()
            attempt(lambda **o: a2a.combine(rows, handle, **o), out=x[1:])
            attempt(lambda **o: a2a.combine(rows, handle, **o), out=x.float())
        result = run_call(a2a, SHAPE, GOOD)
        a2a.finalize()
        other.finalize()
        return got, result

    results = ranks(run, at_least=2)
    last = len(results) - 1
    for i, (error, text) in enumerate([("ValueError", "layout='masked'"), ("ValueError", "another"),
                                       ("RuntimeError", "under way"), ("ValueError", "9 rows"),
                                       ("TypeError", "output")]):
        check_outcomes([r[0][i] for r in results], ["PeerError"] * last + [error], text, on_rank=last,
                       elsewhere=(f"rank {last}",))
    check_call(SHAPE, GOOD, [r[1] for r in results])


def flat(t, dtype=None):
    """The memory of a contiguous tensor as rows of SHAPE, as many as fit."""
    numbers = t.view(-1).view(dtype or t.dtype)
    return numbers[:len(numbers) // SHAPE.hidden * SHAPE.hidden].view(-1, SHAPE.hidden)


def overlapping_dispatches(layout):
    """Name -> (fp8, what the call gets instead of x, topk_idx and topk_weights, the names in the error).

    The functions take out= of the call, the result of an earlier dispatch, and the right arguments.
    """
    def scales(t):  # of the first expert, [rows, 1]; a column is contiguous
        return t[0] if t.dim() == 3 else t

    cases = {
        "the first rows": (False, lambda kept, a: {"x": flat(kept[0])[:len(a["x"])]}, "rows", "x"),
        "the last rows": (False, lambda kept, a: {"x": flat(kept[0])[-len(a["x"]):]}, "rows", "x"),
        "another dtype": (True, lambda kept, a: {"x": flat(kept[0], SHAPE.dtype)[:len(a["x"])]}, "rows", "x"),
        "scales": (True, lambda kept, a: {"topk_weights": scales(kept[1])[:4, 0].view(1, 4), "x": a["x"][:1],
                                          "topk_idx": a["topk_idx"][:1]}, "scales", "weight"),
        "counts": (False, lambda kept, a: {"topk_idx": kept[2].view(1, 4), "x": a["x"][:1],
                                           "topk_weights": None}, "counts", "indices"),
    }
    if layout == "compact":
        cases["the handle"] = (False, lambda kept, a: {"topk_idx": kept[3].expert_offsets[1:].view(1, 4),
                                                       "x": a["x"][:1], "topk_weights": None},
                               "handle", "indices")
    return cases


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("layout", ["compact", "masked"])
def test_errors_low_latency_outputs_in_the_memory_of_inputs(ranks, layout, world_size):
    """Refused on the rank that passes them, in both halves of a call, and nothing is written."""

    def run(world, device):
        a2a = make(world, device, SHAPE)
        x, idx, weights = (t.to(device) for t in GOOD.inputs(SHAPE, world.rank, world.size))
        right = {"x": x, "topk_idx": idx, "topk_weights": weights}
        got, bad, changed = [], on_last(world), []

        def attempt(call, halves, memory, **arguments):
            before = memory.clone()
            whole = getattr(a2a, call)
            send = getattr(a2a, call + "_send")
            got.append(outcome(lambda: send(**arguments).recv() if halves else whole(**arguments), a2a))
            changed.append(bad and not torch.equal(memory, before))

        with torch.no_grad():
            for i, (fp8, change, *_) in enumerate(overlapping_dispatches(layout).values()):
                kept = a2a.dispatch(**right, fp8=fp8, layout=layout)
                kept[0].view(torch.uint8).fill_(1)
                given = right | (change(kept, right) if bad else {})
                attempt("dispatch", i % 2, kept[0].view(torch.uint8), **given, fp8=fp8, layout=layout,
                        out=kept)
            for overlap in (len(x), 1):  # all rows of out, or its first one
                kept = a2a.dispatch(**right, layout=layout)
                num = flat(kept[0]).shape[0]
                memory = torch.zeros(num + len(x), SHAPE.hidden, dtype=SHAPE.dtype, device=device)
                y = memory[:num].view_as(kept[0])
                out = memory[num - overlap:][:len(x)] if bad else torch.empty_like(x)
                attempt("combine", overlap == 1, memory, y=y, handle=kept[3], out=out)
        result = run_call(a2a, SHAPE, GOOD)
        a2a.synchronize()
        a2a.finalize()
        return got, any(changed), result

    results = ranks(run, world_size=world_size, at_least=2)
    last = len(results) - 1
    names = [case[2:] for case in overlapping_dispatches(layout).values()] + 2 * [("out", "rows")]
    for i, (output, other) in enumerate(names):
        check_outcomes([r[0][i] for r in results], ["PeerError"] * last + ["ValueError"],
                       f"{output} shares memory with {other}", on_rank=last, elsewhere=(f"rank {last}",))
    assert not any(r[1] for r in results)
    check_call(SHAPE, GOOD, [r[2] for r in results])


def test_errors_low_latency_outputs_in_the_memory_of_each_other(ranks):
    def run(world, device):
        a2a = make(world, device, SHAPE)
        arguments = [t.to(device) for t in GOOD.inputs(SHAPE, world.rank, world.size)]
        with torch.no_grad():
            kept = a2a.dispatch(*arguments)
            words, rows, scales, _, *numbers = kept[3]._outputs
            if on_last(world):
                kept[3]._outputs = (words, rows, scales, words[-SHAPE.num_local:], *numbers)
            got = outcome(lambda: a2a.dispatch(*arguments, out=kept), a2a)
        result = run_call(a2a, SHAPE, GOOD)
        a2a.finalize()
        return got, result

    results = ranks(run, at_least=2)
    last = len(results) - 1
    check_outcomes([r[0] for r in results], ["PeerError"] * last + ["ValueError"],
                   "handle shares memory with counts", on_rank=last, elsewhere=(f"rank {last}",))
    check_call(SHAPE, GOOD, [r[1] for r in results])


def test_errors_low_latency_halves(ranks):
    """A second call on a buffer before recv, and a second recv, are errors of this rank alone."""

    def run(world, device):
        a2a = make(world, device, SHAPE)
        x, idx, weights = (t.to(device) for t in GOOD.inputs(SHAPE, world.rank, world.size))
        with torch.no_grad():
            pending = a2a.dispatch_send(x, idx, weights)
            twice = outcome(lambda: a2a.dispatch(x, idx, weights))
            pending.recv()
            again = outcome(pending.recv)
        result = run_call(a2a, SHAPE, GOOD)
        a2a.finalize()
        return twice, again, result

    results = ranks(run)
    check_outcomes([r[0] for r in results], "RuntimeError", "under way")
    check_outcomes([r[1] for r in results], "RuntimeError", "already")
    check_call(SHAPE, GOOD, [r[2] for r in results])


@pytest.mark.parametrize("is_lost_on_all", [False, True])
def test_errors_low_latency_lost_call(ranks, is_lost_on_all):
    """A call that is sent, and whose PendingCall is dropped, does not block its buffer."""

    def run(world, device):
        a2a = make(world, device, SHAPE)
        x, idx, weights = (t.to(device) for t in GOOD.inputs(SHAPE, world.rank, world.size))
        with torch.no_grad():
            pending = a2a.dispatch_send(x, idx, weights)
            if not is_lost_on_all and not on_last(world):
                pending.recv()
            del pending
        results = [run_call(a2a, SHAPE, GOOD) for _ in range(3)]
        a2a.synchronize()
        a2a.finalize()
        return results

    results = ranks(run, at_least=2)
    for i in range(3):
        check_call(SHAPE, GOOD, [r[i] for r in results])


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("is_alone", [False, True])
def test_errors_low_latency_wrong_buffer_while_a_call_is_under_way(ranks, is_lost, is_alone):
    """The wrong number leaves the call on the first buffer as it was: its recv() and later calls work."""

    def run(world, device):
        a2a = make(world, device, SHAPE)
        x, idx, weights = (t.to(device) for t in GOOD.inputs(SHAPE, world.rank, world.size))
        result, got = None, []
        with torch.no_grad():
            pending = a2a.dispatch_send(x, idx, weights)
            if is_lost:
                del pending
            if not is_alone or on_last(world):
                for buffer in (2, -1, None, 1.0):
                    got.append(outcome(lambda b=buffer: a2a.dispatch(x, idx, weights, buffer=b)))
                    if is_alone and is_lost:
                        break
            elif is_lost:
                got.append(outcome(lambda: a2a.dispatch(x, idx, weights), a2a))
            if not is_lost:
                rows, _, counts, handle = pending.recv()
                result = counts.sum().item()
        result = result, run_call(a2a, SHAPE, GOOD), run_call(a2a, SHAPE, GOOD)
        a2a.synchronize()
        a2a.finalize()
        return got, result

    results = ranks(run, at_least=2)
    for rank, (got, (total, *calls)) in enumerate(results):
        kinds = [o.kind for o in got]
        if is_lost and is_alone:
            assert kinds == ["ValueError" if rank == len(results) - 1 else "PeerError"]
        elif not is_alone or rank == len(results) - 1:
            assert kinds == ["ValueError"] * 2 + ["TypeError"] * 2
        assert is_lost or total > 0
    for i in (1, 2):
        check_call(SHAPE, GOOD, [r[1][i] for r in results])


def test_errors_low_latency_lost_call_writes_into_nothing(ranks):
    """out= of a call that is lost belongs to its user again, also when the next call receives for it."""

    def run(world, device):
        a2a = make(world, device, SHAPE)
        x, idx, weights = (t.to(device) for t in GOOD.inputs(SHAPE, world.rank, world.size))
        found = []
        with torch.no_grad():
            kept = a2a.dispatch(x, idx, weights)
            sums = a2a.combine(kept[0], kept[3])
            mine = [*(t for t in kept[:3] if t is not None), sums]
            for send in (lambda: a2a.combine_send(kept[0], kept[3], out=sums),
                         lambda: a2a.dispatch_send(x, idx, weights, out=kept)):
                send()  # nobody keeps what it returns
                for t in mine:
                    t.fill_(7)
                versions = [t._version for t in mine]
                found.append(run_call(a2a, SHAPE, GOOD))
                assert all((t == 7).all() for t in mine) and versions == [t._version for t in mine]
        a2a.finalize()
        return found

    results = ranks(run)
    for i in range(2):
        check_call(SHAPE, GOOD, [r[i] for r in results])


def test_errors_low_latency_failed_dispatch_leaves_the_handle(ranks):
    def run(world, device):
        a2a = make(world, device, Shape(num_buffers=2))
        x, idx, weights = (t.to(device) for t in GOOD.inputs(SHAPE, world.rank, world.size))
        with torch.no_grad():
            kept = a2a.dispatch(x, idx, weights)
            want = a2a.combine(kept[0], kept[3])
            got = outcome(lambda: a2a.dispatch(x[:1], idx[:1].float(), weights[:1], out=kept, buffer=1))
            same = torch.equal(a2a.combine(kept[0], kept[3]), want)
        a2a.finalize()
        return got, same, kept[3].num_tokens == len(x), kept[3].buffer

    for got, *others in ranks(run):
        assert got.kind == "TypeError" and others == [True, True, 0]


@pytest.mark.cpu_only
def test_errors_low_latency_without_memory(ranks):
    """torch's error of the CPU's memory is no MemoryError, but the other ranks learn what it was."""

    def run(world, device):
        a2a = make(world, device, SHAPE)
        allocator = a2a._allocator
        if on_last(world):
            a2a._allocator = lambda: lambda *_: torch.empty(1 << 60, dtype=torch.uint8)
        got = outcome(lambda: wrong(lambda a: {})(a2a))
        a2a._allocator = allocator
        result = run_call(a2a, SHAPE, GOOD)
        a2a.finalize()
        return got, result

    results = ranks(run)
    last = len(results) - 1
    check_outcomes([r[0] for r in results], ["PeerError"] * last + ["RuntimeError"], "allocate", on_rank=last,
                   elsewhere=(f"rank {last}", "no memory"))
    check_call(SHAPE, GOOD, [r[1] for r in results])


def test_errors_low_latency_receive_alone(ranks):
    """A rank that has sent cannot receive.  Its peers receive, and the next call works on all ranks."""

    def run(world, device):
        a2a = make(world, device, SHAPE)
        x, idx, weights = (t.to(device) for t in GOOD.inputs(SHAPE, world.rank, world.size))
        with torch.no_grad():
            pending = a2a.dispatch_send(x, idx, weights)
            if on_last(world):
                pending._arguments = (x.float(), *pending._arguments[1:])
            got = outcome(lambda: pending.recv() and None, a2a)  # a result cannot be pickled
        results = [run_call(a2a, SHAPE, GOOD) for _ in range(3)]
        a2a.synchronize()
        a2a.finalize()
        return got, results

    results = ranks(run, at_least=2)
    last = len(results) - 1
    check_outcomes([r[0] for r in results], ["nothing"] * last + ["TypeError"], "bfloat16", on_rank=last)
    for i in range(3):
        check_call(SHAPE, GOOD, [r[1][i] for r in results])


@pytest.mark.parametrize("change, error, text", [
    ({"max_tokens": 0}, "ValueError", "max_tokens"), ({"max_tokens": 5000}, "ValueError", "max_tokens"),
    ({"topk": 33}, "ValueError", "topk"), ({"hidden": 7}, "ValueError", "16 bytes"),
    ({"num_experts": 0}, "ValueError", "experts"), ({"dtype": torch.int32}, "TypeError", "dtype"),
    ({"num_buffers": 17}, "ValueError", "num_buffers"),
    ({"max_tokens": 4096, "topk": 32, "num_experts": 960}, "ValueError", "shared memory")], ids=str)
def test_errors_low_latency_creation(ranks, change, error, text):
    def run(world, device):
        sizes = {"max_tokens": 4, "hidden": 16, "topk": 2, "num_experts": 2 * world.size}
        sizes |= change if on_last(world) else {}
        return outcome(lambda: epmoe.LowLatencyAll2All(world, device=device, **sizes))

    got = ranks(run, at_least=2)
    last = len(got) - 1
    check_outcomes(got, ["PeerError"] * last + [error], text, on_rank=last, elsewhere=(f"rank {last}",))


def test_errors_low_latency_operations_are_its_own(ranks):
    """A layer has the operations of its kind only."""

    def run(world, device):
        a2a = make(world, device, SHAPE)
        plan = torch.zeros(1000, dtype=torch.int32, device=device)
        got = outcome(lambda: epmoe._C.layer_plan(a2a._c, 0, (plan, None, plan, 0)))
        result = run_call(a2a, SHAPE, GOOD)
        a2a.finalize()
        return got, result

    results = ranks(run)
    check_outcomes([r[0] for r in results], "ValueError", "low-latency operations only")
    check_call(SHAPE, GOOD, [r[1] for r in results])


def test_errors_low_latency_after_finalize(ranks):
    def run(world, device):
        a2a = make(world, device, SHAPE)
        a2a.finalize()
        a2a.finalize()
        return outcome(lambda: wrong(lambda a: {})(a2a))

    check_outcomes(ranks(run), "EpClosed", "finalized")
