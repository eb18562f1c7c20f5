"""Calls of every function of epmoe._C with arguments of every kind.

    python tests/fuzz_module.py [--examples N] [--seed S]

An example is a short sequence of calls. Worlds, heaps and layers may be closed. Numbers may be out of range.
Tensors have any dtype, shape, stride and device, and one tensor may be passed twice. Capsules may be of the
wrong kind. A call may return or raise an ordinary exception. It must not crash, hang or raise SystemError.

hypothesis generates the examples in a child process. The child logs each call before it starts, so the call
that ended the child is known. If an example fails without ending the child, hypothesis shrinks it.
"""

import argparse
import contextlib
import faulthandler
import gc
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile

from fuzz_tensors import scribble, shared_tensors, weird_tensors

CALL_LIMIT_S = 300  # only a hang reaches this limit, also on a busy machine
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


# ---- the child ----


def limit_resources():
    """Limit file sizes, so that a wrong size cannot use up the memory of the machine. Disable core dumps."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 28, 1 << 28))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def make_setting(torch, _C):
    """The objects on which calls are made.

    They are a working world of one rank with a heap and a layer, both ranks of a world in which neither
    answers the other, and closed objects.
    """
    one, (two, silent) = _C.world_threads(1, 0.05)[0], _C.world_threads(2, 0.02)
    closed = _C.world_threads(1, 0.05)[0]
    heap = _C.heap_create(one, _C.CPU, 0, 1 << 20, 0)
    fused = 2, 2, 0, 1, 0, 0, 1, 1
    config = (1, 4, 2, 6, 16, _C.F32, _C.COMBINE_SCATTER, 1, 0, 12, 2, 1, 0, 1, 0, *fused)
    layer, closed_heap = _C.layer_create(heap, config), _C.heap_create(closed, _C.CPU, 0, 1 << 17, 0)
    closed_config = (1, 4, 2, 2, 8, _C.F32, _C.COMBINE_LOCAL, 1, 0, 4, 1, 1, 0, 0, 0, *fused)
    closed_layer = _C.layer_create(closed_heap, closed_config)
    _C.layer_close(closed_layer)
    _C.heap_close(closed_heap)
    _C.world_close(closed, True)
    off, words = _C.heap_alloc(heap, 4096, 128, 0), _C.plan_layout(config, 3)["num_words"]
    fast_config = (1, 4, 2, 6, 128, _C.F16, _C.LOW_LATENCY, 1, 0, 12, 2, 1, 0, 0, 0, *fused)
    fast = _C.layer_create(heap, fast_config)
    good = {"x": torch.ones(3, 16), "idx": torch.tensor([[0, 1], [2, -1], [3, 3]]),
            "weight": torch.ones(3, 2),
            "plan": torch.zeros(words, dtype=torch.int32), "rows": torch.zeros(5, 16),
            "row_weight": torch.ones(5), "recv": torch.zeros(6 * 3, dtype=torch.int32),
            "out": torch.zeros(3, 16), "out_scalar": torch.zeros(3, 2),
            "scatter": torch.zeros(3, 2, dtype=torch.int32),
            "fp8_x": torch.zeros(3, 16, dtype=torch.uint8), "fp8_scale": torch.ones(3, 1),
            "group_scales": torch.ones(1, 3), "num_rows": torch.tensor([2], dtype=torch.int32),
            "fp8_rows": torch.zeros(5, 16, dtype=torch.uint8), "fp8_row_scale": torch.ones(5, 1),
            "fast_x": torch.ones(3, 128).half(), "masked": torch.zeros(4, 6, 128).half(),
            "compact": torch.zeros(12, 128).half(), "counts": torch.zeros(4, dtype=torch.int32),
            "handle": torch.zeros(_C.ll_handle_words(fast_config)[0], dtype=torch.int32),
            "tag": torch.arange(3, dtype=torch.int32), "row_tag": torch.zeros(5, dtype=torch.int32),
            "compact_tag": torch.zeros(12, dtype=torch.int32)}
    _C.layer_ll_dispatch(fast, 0, (good["fast_x"], good["idx"], good["weight"], good["handle"],
                                   good["compact"], None, good["counts"], good["tag"],
                                   good["compact_tag"], 0, 0, 3))
    _C.layer_plan(layer, 0, (good["idx"], None, good["plan"], 0))
    _C.layer_dispatch(layer, 0, (good["x"], None, None, good["plan"], good["rows"], None, None, good["recv"],
                                 good["tag"], good["row_tag"], False, False))
    in_heap = torch.from_dlpack(Capsule(_C.heap_tensor(heap, off, 0, (64,), 2, 32)))
    return {"world": [one, two, silent, closed], "heap": [heap, closed_heap], "config": config,
            "layer": [layer, closed_layer, fast], "off": off, "good": good, "in_heap": in_heap}


class Capsule:
    """Lets torch.from_dlpack read a DLPack capsule of the module."""

    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack__(self, **options):
        return self.capsule

    def __dlpack_device__(self):
        return 1, 0


class Odd:
    """An object with the methods of a number, each of which raises KeyError."""

    def __index__(self):
        raise KeyError("odd")

    __float__ = __bool__ = __len__ = __index__


def strategies(st, torch, _C):
    """A hypothesis strategy for each kind of argument in SIGNATURES.

    A strategy yields plain values, and tuples such as ("world", 1), which Example.resolve turns into objects.
    """
    edges = [0, 1, 2, 3, 7, 8, 127, 128, 255, 256, 4096, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**46, 2**46 + 1,
             2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**300]
    number = st.one_of(st.integers(0, 4), st.sampled_from(edges), st.sampled_from([-e for e in edges]),
                       st.integers())
    short = st.sampled_from([0.01, 0.02, 0.03])  # timeouts in seconds
    odd_times = st.sampled_from([0, -1, 0.0, -0.0, math.nan, math.inf, -math.inf, 1e300, 10**400, 2**64, None,
                                 "1", b"", ()])
    junk = st.one_of(st.none(), st.booleans(), number, st.floats(), st.binary(max_size=40),
                     st.text(max_size=8), st.just(Odd()), st.just([]), st.just({}),
                     st.tuples(number, number), st.sampled_from([("world", i) for i in range(4)]),
                     st.sampled_from([("heap", 0), ("heap", 1)]),
                     st.sampled_from([("layer", i) for i in range(3)]), st.just(("weird", "conj")),
                     st.just(("weird", "fake")))
    tensor = st.one_of(st.sampled_from(TENSORS).map(lambda n: ("good", n)),
                       st.sampled_from(WEIRD).map(lambda n: ("weird", n)),
                       st.tuples(st.just("scribbled"), st.sampled_from(["plan", "handle"]),
                                 st.integers(0, 300),
                                 st.sampled_from([-(2**31), -2, -1, 0, 1, 2, 3, 5, 100, 2**31 - 1])))
    config = st.one_of(st.just(("config",)), st.tuples(st.just("config"), st.integers(0, 22), number),
                       st.tuples(st.just("config"), st.integers(0, 22), junk))

    def mostly(right, *others):
        return st.integers(0, 9).flatmap(lambda n: right if n < 9 else st.one_of(*others) if others else junk)

    def of(name, first=0):
        all_of_kind = [(name, i) for i in range({"world": 4, "heap": 2, "layer": 3}[name])]
        return mostly(st.sampled_from([(name, first)] * 8 + all_of_kind))

    def mostly_good(name):
        others = st.one_of(tensor, junk)
        return st.integers(0, 9).flatmap(lambda n: st.just(("good", name)) if n < 7 else others)

    kinds = {"W": of("world"), "H": of("heap"), "L": of("layer"), "LL": of("layer", 2), "n": mostly(number),
             "small": mostly(st.sampled_from([0, 0, 0, 0, 0, 0, 1, 2])), "zero": mostly(st.just(0)),
             "off": mostly(st.just(("off", 0)), st.builds(lambda d: ("off", d), st.integers(-64, 4200)),
                           number, junk), "seconds": mostly(short, odd_times),
             "bytes": mostly(st.one_of(st.binary(max_size=20), st.binary(min_size=500, max_size=530))),
             "any": junk, "config": mostly(config), "flag": mostly(st.booleans()),
             "size": mostly(st.sampled_from([0, 1, 256, 4096, 1 << 16, 1 << 47, 1 << 60, 2**64 - 1, -1])),
             "fd": mostly(st.sampled_from([("listen",), ("pipe",), -1, 1 << 20])),
             "shape": mostly(st.lists(st.sampled_from([0, 1, 2, 3, 1 << 31, 1 << 46, 1 << 63, -1]),
                                      max_size=9).map(tuple)),
             "dl": mostly(st.sampled_from([0, 1, 2, 4, 5, 6, 17, 255, 256 + 2])),
             "bits": mostly(st.sampled_from([0, 1, 4, 8, 12, 16, 32, 64, 128, 1 << 27, 2**32 - 1])),
             "epoch": mostly(st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])),
             "no": mostly(st.none(), tensor, junk),
             "code": mostly(st.integers(-15, 2)), "part": mostly(st.sampled_from([1, 2, 3, 3, 3])),
             "text": mostly(st.text(max_size=300)),
             "nonce": mostly(st.sampled_from([b"n" * 16, b"", b"n" * 17])),
             "helps": mostly(st.sampled_from([[], [(0, 1, 5)], [(1, 0)], [(0,)], [(9, 9, 9)] * 65, (0, 1)])),
             "act": mostly(st.one_of(st.tuples(st.integers(0, 10), short, short), st.just((0, 0, 0)),
                                     st.lists(st.one_of(number, odd_times), max_size=4))),
             "names": mostly(st.sampled_from([b"\x06abcde\0\0" * i for i in range(9)])),
             "dict": st.sampled_from([{}, {"ValueError": 3}, {"ValueError": int}, {1: 2}, None, [],
                                      {"TypeError": TypeError}])}
    kinds |= {name: mostly_good(name) for name in TENSORS}
    kinds["tensor"] = mostly(tensor)
    optional = ("x", "weight", "scatter", "row_weight", "out", "out_scalar", "num_rows", "rows", "tag",
                "row_tag", "compact_tag", "tensor")
    kinds |= {f"{name}?": st.one_of(kinds[name], st.none()) for name in optional}
    return kinds


TENSORS = ["x", "idx", "weight", "plan", "rows", "row_weight", "recv", "out", "out_scalar", "scatter",
           "fp8_x", "fp8_scale", "fp8_rows", "fp8_row_scale", "group_scales", "num_rows",
           "fast_x", "masked", "compact", "counts", "handle", "tag", "row_tag", "compact_tag"]
WEIRD = ["scalar", "none of it", "no tokens", "5 dims", "double", "bool", "complex", "conj", "neg", "neg idx",
         "half", "f4", "meta", "fake", "sparse", "nested", "expanded", "vast", "vaster", "strided",
         "transposed", "misaligned", "parameter", "too many", "huge idx", "wild idx", "in heap",
         "plan as rows", "plan as idx", "plan of zeros", "wild plan", "negative plan", "wild recv", "a type",
         "storage"]
# The kinds of each function's arguments: keys of strategies().  Those after a | are elements of a tuple.  An
# `or` is between the arguments of 16 bits and those of FP8.
SIGNATURES = {
    "set_exceptions": "dict", "world_listen": "", "world_unlisten": "fd",
    "world_create": "small small seconds fd nonce names",
    "world_threads": "n seconds", "world_check": "W", "world_lost_ranks": "W",
    "world_set_timeout": "W seconds", "world_close": "W flag", "world_all_gather": "W bytes",
    "world_propagate_error": "W code", "world_flight_record": "W", "world_reason": "W",
    "world_abort": "W code text", "world_set_place": "W small small",
    "world_check_handler": "", "world_set_waiting": "flag",
    "heap_create": "W small n size code", "heap_alloc": "H size n code", "heap_free": "H off",
    "heap_translate": "H off small", "heap_offset": "H n size", "heap_stats": "H",
    "heap_tensor": "H off small shape dl bits", "heap_put": "H off tensor small",
    "heap_get": "H off tensor small", "heap_signal": "H off n small small zero",
    "heap_wait": "H off n small zero", "heap_barrier": "H zero", "heap_sync": "H zero", "heap_close": "H",
    "heap_handle": "H", "worlds_settle": "",
    "layer_bytes": "config", "layer_agree": "W config code", "layer_create": "H config", "layer_close": "L",
    "layer_has_many_rows": "config", "layer_decodes": "config", "layer_unread_rows": "config",
    "layer_room": "L n n", "layer_set_room": "L n n n",
    "layer_fuses": "config flag n n n flag flag flag",
    "plan_layout": "config n", "layer_plan": "L small | idx scatter? plan small",
    "layer_num_rows": "L small plan", "layer_expert_rows": "L small plan",
    "layer_waited": "L", "find_helps": "config small small shape",
    "layer_helps": "L small", "layer_set_staging": "L H off size small",
    "layer_restore_weights": "L small plan helps tensor weight? tensor weight?",
    "layer_dispatch": "L small | x no weight? plan rows no row_weight? recv tag? row_tag? small small"
                      " or L small | fp8_x fp8_scale weight? plan fp8_rows fp8_row_scale row_weight? recv"
                      " no no zero small",
    "layer_combine": "L small | rows row_weight? row_weight? x? x? plan recv out out_scalar? small small",
    "layer_propagate_error": "L small n code zero", "layer_barrier": "L small zero",
    "layer_dispatch_gemm": "L small | x no weight? plan rows no row_weight? recv tensor no weight? out out?"
                           " act small small small"
                           " or L small | fp8_x fp8_scale weight? plan fp8_rows fp8_row_scale row_weight?"
                           " recv tensor weight weight? out no act zero zero small",
    "layer_gemm_combine": "L small | rows no tensor no weight? rows? tensor? out row_weight? row_weight? plan"
                          " recv out out_scalar? small small"
                          " or L small | fp8_rows fp8_row_scale tensor weight weight? no no out row_weight?"
                          " no plan recv out no zero zero",
    "layer_experts": "L small | x idx weight tensor weight? no no tensor weight? no no plan no no recv rows"
                     " row_weight out? tensor tensor out tensor? tensor? rows? tensor? tensor? rows? tag?"
                     " row_tag? small act small small small small zero small",
    "layer_experts_down": "L small | x tensor plan rows row_weight recv tensor tensor tensor row_weight"
                          " tensor? tensor? rows? act",
    "layer_experts_up": "L small | rows tensor row_weight plan recv rows rows rows out? rows out out_scalar"
                        " out? tensor? tensor? rows?",
    "layer_ll_experts": "LL small | fast_x idx weight tensor weight? no no tensor weight? no no handle"
                        " compact counts tensor compact fast_x tensor? tensor? rows? tensor? tensor? rows?"
                        " tag? compact_tag? small act",
    "layer_trace": "L small tensor small",
    "grouped_gemm": "small act seconds x rows plan weight? row_weight? plan out small no no no"
                    " rows? rows? tensor? small flag"
                    " or zero act seconds x rows plan weight? row_weight? plan out small tensor"
                    " tensor no no no no small flag",
    "quantize_fp8": "act x num_rows? fp8_x group_scales flag flag",
    "expand_fp8": "tensor tensor tensor? fp8_x fp8_scale tensor? flag",
    "rescale_fp8_weight": "fp8_x fp8_scale fp8_scale",
    "map_choices": "idx tensor idx small",
    "fill_expert_map": "tensor tensor tensor tensor",
    "transpose_fp8": "fp8_x fp8_scale plan fp8_x fp8_scale",
    "quantize_fp8_weight": "x fp8_x fp8_x fp8_scale fp8_scale",
    "wgrad_fp8": "fp8_x fp8_x fp8_scale fp8_scale plan plan out seconds",
    "activation": "act x x plan weight? x x weight no no flag",
    "gemm_has_counter": "x", "device_query": "n",
    "ll_handle_words": "config",
    "layer_ll_dispatch": "LL small | fast_x idx weight? handle compact weight? counts tag? compact_tag? small"
                         " small part",
    "layer_ll_combine": "LL small | compact handle fast_x small part",
    "layer_sync": "L zero", "layer_newest_call": "L small", "layer_was_void": "L small epoch",
    "layer_set_epoch": "L small epoch zero",
}
# After one of these calls, most others fail. So examples contain them rarely.
CLOSING_CALLS = ("world_close", "heap_close", "layer_close", "set_exceptions", "world_set_waiting")


class Example:
    """The objects of one example, and its calls."""

    def __init__(self, torch, _C, say, classes):
        self.torch, self._C, self.say, self.classes = torch, _C, say, classes
        self.fds = []
        self.setting = make_setting(torch, _C)
        self.weird = weird_tensors(torch) | shared_tensors(torch, self.setting["good"]["plan"],
                                                           self.setting["in_heap"])

    def resolve(self, v):
        """The argument for a value of a strategy."""
        if not isinstance(v, tuple) or not v or not isinstance(v[0], str):
            return v
        what, s = v[0], self.setting
        if what in ("world", "heap", "layer"):
            return s[what][v[1]]
        if what == "tuple":
            return tuple(self.resolve(element) for element in changed_length(v[1], v[2]))
        if what == "good":
            return s["good"][v[1]]
        if what == "weird":
            return self.weird[v[1]]
        if what == "scribbled":
            return scribble(self.torch, s["good"][v[1]], v[2], v[3])
        if what == "off":
            return s["off"] + v[1]
        if what == "config":
            c = list(s["config"])
            if len(v) == 3:
                c[v[1]] = v[2]
            return tuple(c)
        fd = self._C.world_listen()[0] if what == "listen" else os.pipe()[0]
        self.fds.append((fd, os.fstat(fd)))
        return fd

    def call(self, name, values):
        """Log and make one call. Only SystemError is a failure here."""
        self.say(f"{name}({', '.join(describe(v) for v in values)})")
        arguments = [self.resolve(v) for v in values]
        faulthandler.dump_traceback_later(CALL_LIMIT_S, exit=True)
        try:
            got = getattr(self._C, name)(*arguments)
            if name == "world_listen":
                self.fds.append((got[0], os.fstat(got[0])))
            if name == "heap_tensor":
                with contextlib.suppress(Exception):  # a dtype that torch does not have
                    self.torch.from_dlpack(Capsule(got)).sum()
        except SystemError:
            raise
        except Exception as e:
            str(e)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def end(self):
        self._C.world_set_waiting(False)
        self._C.set_exceptions(self.classes)
        for fd, stat in self.fds:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(fd), stat):  # otherwise a world has already closed it
                    os.close(fd)
        self.setting = self.weird = None


def changed_length(values, number):  # the values, sometimes one fewer or one more
    return values[:-1] if number == 29 else values + (None,) if number == 28 else values


def describe(v):
    text = repr(v) if not isinstance(v, int) or abs(v) < 2**70 else f"an integer of {v.bit_length()} bits"
    return text if len(text) < 60 else text[:57] + "..."


def child(examples, seed, log_path):
    """Main of the child: run the examples, and log the calls of the current example to a file."""
    import hypothesis
    import torch
    from hypothesis import strategies as st

    import epmoe
    from epmoe import _C

    limit_resources()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # garbage collections after the examples skip the objects of torch
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    names = [n for n in dir(_C) if callable(getattr(_C, n)) and not n.startswith("_")]
    missing = set(names) ^ set(SIGNATURES)
    assert not missing, f"SIGNATURES and the module differ: {missing}"
    kinds = strategies(st, torch, _C)
    unknown = {k for text in SIGNATURES.values() for k in text.split() if k not in ("|", "or")} - set(kinds)
    assert not unknown, f"kinds of arguments that do not exist: {unknown}"
    often = [n for n in names if n not in CLOSING_CALLS] * 3 + list(CLOSING_CALLS)

    def arguments_of(signature):
        alone, *together = ([kinds[k] for k in part.split()] for part in signature.split("|"))
        return st.tuples(*alone, *(st.tuples(st.just("tuple"), st.tuples(*part), st.integers(0, 29))
                                   for part in together))

    def call_of(name):  # (function, arguments, number that decides whether to drop or add an argument)
        arguments = st.one_of(*map(arguments_of, SIGNATURES[name].split(" or ")))
        return st.tuples(st.just(name), arguments, st.integers(0, 29))

    one_call = st.sampled_from(often).flatmap(call_of)
    classes = {c.__name__: c for c in vars(epmoe.errors).values()
               if isinstance(c, type) and issubclass(c, Exception)}
    classes |= {"ValueError": ValueError, "TypeError": TypeError}
    counts = {"calls": 0, "examples": 0}

    def say(line):
        os.write(log, (line + "\n").encode(errors="backslashreplace"))

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=examples, deadline=None, database=None,
                         suppress_health_check=list(hypothesis.HealthCheck), print_blob=False,
                         phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink])
    @hypothesis.given(st.lists(one_call, min_size=1, max_size=10))
    def example(calls):
        os.ftruncate(log, 0)
        os.lseek(log, 0, os.SEEK_SET)
        e = Example(torch, _C, say, classes)
        try:
            for name, values, more in calls:
                counts["calls"] += 1
                e.call(name, changed_length(values, more))
        finally:
            e.end()
        counts["examples"] += 1

    example()
    print(f"{counts['examples']} examples, {counts['calls']} calls", flush=True)
    os._exit(0)  # without cleanup of what the calls have left


# ---- the parent ----


def fuzz(examples, seed, timeout_s=None, module=__file__):
    """Run the examples in a child process. Returns (None or text of the failure, output of the child).

    After a failure, the output ends with the calls of the last example.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "calls")
        command = [sys.executable, "-X", "faulthandler", module, "--child", log, "--examples", str(examples),
                   "--seed", str(seed)]
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), ROOT, f"{ROOT}/tests"]))
        environment = os.environ | {"PYTHONPATH": path}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
            code, out = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as e:
            code, out = "a timeout", f"{e.stdout or ''}{e.stderr or ''}"
        if code == 0:
            return None, done.stdout.strip()
        with contextlib.suppress(OSError), open(log) as f:
            out += "\nthe calls of the last example:\n  " + f.read().replace("\n", "\n  ")
        return f"the child ended with {code} (seed {seed})", out


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--examples", type=int, default=20000)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--child", metavar="LOG", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.child:
        return child(a.examples, a.seed, a.child)
    failure, out = fuzz(a.examples, a.seed)
    print(out if failure is None else f"{out}\nFAILED: {failure}")
    return failure is not None


if __name__ == "__main__":
    sys.exit(main())
