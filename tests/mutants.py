#!/usr/bin/env python3
"""Change the code in one place at a time, and see whether the tests that concern the file notice.

    mutants.py [--num N] [--seed S] [--jobs N] [--limit S] [--state FILE] [--only FOLDER] [--report] [--list]

The places are drawn from csrc/protocol, csrc/runtime, csrc/cpu, epmoe and benchmarks. A change is one
operator, one number, one condition, or one call that is left out. It is made in a copy of the tree in
build/mutants, so the tree itself can be used meanwhile; each job has a copy of its own. A change that does
not compile is no mutant, and the next one takes its place. A test that has failed must pass without the
change: a file of tests that fails by itself catches nothing, is named at the end, and is not used again. The
results go to tests/mutants.jsonl, one line each with the commit: so 200 places can be changed on several
days.

--report prints the survivors and the share that was caught. Look at each survivor, and add "why" to its line:
"equivalent: ..." if nobody can see the change, or "mended: ..." with the test that notices it now.
"""

import argparse
import ast
import fnmatch
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import tokenize
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from endurance import commit

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = "csrc/protocol", "csrc/runtime", "csrc/layer", "csrc/cpu", "epmoe", "benchmarks"
# The tests of a file: those of the first pattern that fits. "C" means the C tests, other words for
# tests/test_WORD.py. A file of epmoe that is not listed has the tests whose names begin with its first word.
CONCERN = {
    "csrc/protocol/low_latency*": "C low_latency errors_low_latency",
    "csrc/protocol/gemm*": "C gemm_products",
    "csrc/protocol/quantize*": "C fp8 fp8_quantize",
    "csrc/protocol/wgrad_fp8*": "fp8_wgrad",
    "csrc/protocol/balance*": "balance",
    "csrc/layer/balance*": "balance",
    "csrc/protocol/expert_map*": "expert_map",
    "csrc/layer/expert_map*": "expert_map",
    "csrc/protocol/activation*": "moe_activations activation_gradients",
    "csrc/protocol/*": "C stages plan_* dispatch_rows combine_sums layer_padding low_latency errors_after",
    "csrc/layer/experts*": "experts_* moe_arguments moe_layer moe_decode fused_forward balance moe_lora",
    "csrc/layer/grouped_gemm*": "gemm_arguments gemm_products gemm_four_bit gemm_low_rank fp8",
    "csrc/layer/four_bit*": "gemm_four_bit",
    "csrc/layer/room*": "C layer_rows",
    "csrc/layer/path*": "fused_* layer_capacity moe_decode moe_fp8",
    "csrc/layer/prepare_low_latency*": "low_latency errors_low_latency",
    "csrc/layer/prepare_*": "errors_layer* errors_calls fused_mistakes dispatch_* combine_sums layer_padding",
    "csrc/layer/quantize*": "fp8_quantize",
    "csrc/layer/wgrad_fp8*": "fp8_wgrad",
    "csrc/cpu/gemm*": "gemm_products moe_arguments fused_forward",
    "csrc/runtime/heap*": "C heap_*",
    "csrc/runtime/allocator*": "C heap_alloc heap_mistakes",
    "csrc/runtime/memory*": "C heap_alloc heap_large heap_sharing",
    "csrc/runtime/deferred_free*": "C",
    "csrc/runtime/shar*": "C heap_sharing",
    "csrc/runtime/tensor*": "C errors_objects written_tensors dispatch_rows",
    "csrc/runtime/*": "C world_* errors_meeting errors_order limits",
    "csrc/cpu/low_latency*": "C low_latency errors_low_latency",
    "csrc/cpu/plan*": "C stages plan_* layer_padding",
    "csrc/cpu/activation*": "moe_activations activation_gradients",
    "csrc/cpu/quantize*": "fp8 fp8_quantize",
    "csrc/cpu/transpose*": "fp8_wgrad",
    "csrc/cpu/expand*": "gemm_four_bit",
    "csrc/cpu/rows*": "C stages dispatch_rows dispatch_fp8 combine_sums fp8_quantize low_latency",
    "csrc/cpu/*": "C stages dispatch_rows combine_sums layer_padding plan_slots heap_access",
    "epmoe/integrations/layers.py": "integrations_torchtitan integrations_megatron",
    "epmoe/integrations/deep_ep/*": "integrations_deep_ep* docstrings",
    "epmoe/integrations/*": "integrations_{word}*",
    "benchmarks/*": "bench*",
    "epmoe/a2a/internode/*": "nodes* docstrings",
    "epmoe/comm/liveness.py": "liveness nodes_topology docstrings",
    "epmoe/comm/node*": "nodes* docstrings",
    "epmoe/comm/validation.py": "nodes*",
    "epmoe/comm/rail.py": "nodes*",
    "epmoe/gemm/activation*": "moe_activations *activation*",
    "epmoe/torch_modes.py": "gemm_direct written_tensors errors_forward_mode errors_gradients "
                            "layer_gradients",
    "epmoe/moe/decode.py": "moe_decode",
    "epmoe/comm/device.py": "errors_config env import",
    "epmoe/errors.py": "errors_local errors_objects",
    "epmoe/a2a/inductor.py": "moe_inductor moe_compile",
    "epmoe/a2a/base.py": "layer_* fused_mistakes errors_layer errors_calls errors_anywhere",
    "epmoe/a2a/layer.py": "layer_* dispatch_* fused_mistakes errors_layer errors_calls",
    "epmoe/a2a/fused.py": "fused_* moe_fp8*",
    "epmoe/a2a/layout.py": "stages layer_padding dispatch_rows plan_slots plan_routing",
    "epmoe/a2a/low_latency*": "low_latency errors_low_latency",
    "epmoe/a2a/ops.py": "layer_gradients errors_gradients fused_gradients moe_compile written_tensors",
    "epmoe/moe/parallel*": "moe_parallel shards",
    "epmoe/comm/error_propagation.py": "errors_after errors_anywhere errors_gradients layer_gradients "
                                        "moe_arguments",
    "epmoe/reference.py": "stages plan_routing combine_sums moe_activations moe_module fp8 docstrings",
    "epmoe/comm/rendezvous.py": "world_meeting world_groups errors_meeting",
    "epmoe/moe/shards.py": "shards moe_experts",
    "epmoe/testing.py": "world_deaths errors_local threads routing_patterns heap_sharing",
    "epmoe/moe/guards.py": "shards moe_parallel",
    "epmoe/trace.py": "moe_traced bench_overlap",
    "epmoe/moe/experts.py": "experts_* moe_arguments moe_layer fused_gradients",
    "epmoe/moe/placement.py": "expert_map moe_map moe_move",
    "epmoe/moe/move.py": "moe_move",
    "epmoe/moe/balance.py": "balance",
    "epmoe/moe/statistics.py": "moe_statistics",
    "epmoe/moe/chunks.py": "nodes_chunks",
    "epmoe/moe/numerics.py": "numerics docstrings",
    "epmoe/moe/cost_model.py": "bench_scale nodes_chunks docstrings",
    "epmoe/moe/*": "moe_arguments moe_layer moe_module moe_experts moe_map moe_copies moe_fp8",
    "epmoe/gemm/grouped.py": "gemm_* fp8 fused_forward",
    "epmoe/gemm/quantize.py": "fp8 fp8_quantize gemm_four_bit",
    "epmoe/gemm/wgrad_fp8.py": "fp8_wgrad fp8_training",
    "epmoe/moe/fp8_training.py": "fp8_training moe_four_bit",
    "epmoe/moe/fp8_rows.py": "fp8_rows",
    "epmoe/gemm/weight_gradients.py": "moe_weight_gradients gemm_products gemm_accumulate",
}
SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&", "+": "-",
         "-": "+", "true": "false", "false": "true", "True": "False", "False": "True", "and": "or",
         "or": "and"}
C_TOKEN = re.compile(r"(?<=[\w\])] )(<=|>=|<|>|==|!=|&&|\|\||\+|-)(?= )|\b(true|false)\b|"
                     r"(?<![\w.])(\d+)(?=u?\b)")
C_CALL = re.compile(r"^( +)([a-z]\w*\([^;{}]*\);)$", re.MULTILINE)
C_IF = re.compile(r"\bif \(")


@dataclass(frozen=True)
class Change:
    """Replace code[begin:end], which is `old`, by `new`."""

    file: str
    line: int
    begin: int
    end: int
    old: str
    new: str

    @property
    def name(self):
        return f"{self.file}:{self.line}: {self.old} -> {self.new}"


# ---- the places ----


def blank(code, pattern):
    """Replace what matches by spaces, so that positions and lines stay."""
    return re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m[0]), code, flags=re.DOTALL | re.MULTILINE)


def swap(token):
    return str(int(token) + 1) if token.isdigit() else SWAPS[token]


def closing(code, at):
    """The position of the parenthesis that closes the one at `at`."""
    depth = 0
    for i in range(at, len(code)):
        depth += {"(": 1, ")": -1}.get(code[i], 0)
        if depth == 0:
            return i
    raise ValueError("an open parenthesis")


def places_in_c(code):
    """Yield (begin, end, new) in a C source, outside of comments, texts and the preprocessor."""
    whole = code
    code = blank(code, r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'')
    code = blank(code, r"^ *#(?:[^\n]*\\\n)*[^\n]*|_Static_assert\([^;]*;")
    for m in C_TOKEN.finditer(code):
        yield *m.span(), swap(m[0])
    for m in C_CALL.finditer(code):
        yield *m.span(2), ";"
    for m in C_IF.finditer(code):
        end = closing(code, m.end() - 1)
        yield m.end() - 1, end + 1, f"(!{whole[m.end() - 1:end + 1]})"


def places_in_python(code):
    """Yield (begin, end, new) in a Python source, outside of comments and texts."""
    starts = [0]
    for line in code.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for t in tokenize.generate_tokens(io.StringIO(code).readline):
        begin = starts[t.start[0] - 1] + t.start[1]
        is_number = t.type == tokenize.NUMBER and t.string.isdigit()
        if is_number or (t.type in (tokenize.OP, tokenize.NAME) and t.string in SWAPS):
            yield begin, begin + len(t.string), swap(t.string)
    for node in ast.walk(ast.parse(code)):
        part = node.test if isinstance(node, (ast.If, ast.IfExp)) else node
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if not (is_call or isinstance(node, (ast.If, ast.IfExp, ast.Raise))):
            continue
        # ast counts bytes; a line with other characters than ASCII is left out.
        lines = code.splitlines()[part.lineno - 1:part.end_lineno]
        if all(line.isascii() for line in lines):
            begin = starts[part.lineno - 1] + part.col_offset
            end = starts[part.end_lineno - 1] + part.end_col_offset
            yield begin, end, "pass" if part is node else f"(not ({code[begin:end]}))"


def changes_of(file, code):
    """Return the changes that can be made to a file."""
    places = places_in_c(code) if file.endswith((".c", ".h")) else places_in_python(code)
    return [Change(file, code.count("\n", 0, begin) + 1, begin, end, code[begin:end], new)
            for begin, end, new in places]


def apply(code, change):
    assert code[change.begin:change.end] == change.old, change.name
    return code[:change.begin] + change.new + code[change.end:]


def draw(seed, only=""):
    """Return all changes of the tree in an order that follows from the seed."""
    files = [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*"))
             if p.suffix in (".c", ".h", ".py")]
    changes = [c for p in files for c in changes_of(str(p.relative_to(ROOT)), p.read_text())
               if c.file.startswith(only)]
    random.Random(seed).shuffle(changes)
    return changes


# ---- the tests ----


def tests_of(file):
    """Return the tests that concern a file: whether the C tests do, and the files of pytest."""
    word = re.split(r"[_.]", Path(file).name)[0]
    words = next((w for pattern, w in CONCERN.items() if fnmatch.fnmatch(file, pattern)), f"{word}*")
    words = words.replace("{word}", word).split()
    names = sorted(p.stem.removeprefix("test_") for p in (ROOT / "tests").glob("test_*.py"))
    return "C" in words, [f"tests/test_{n}.py" for n in names if any(fnmatch.fnmatch(n, w) for w in words)]


class Tree:
    """A copy of the tree, in which one file at a time is changed."""

    def __init__(self, folder, limit_s):
        self.folder, self.limit_s, self.failing = folder, limit_s, set()
        shutil.rmtree(folder, ignore_errors=True)
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
        for name in filter(None, listed.decode().split("\0")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
        if not self.run("make", "-s", "build", f"PYTHON={sys.executable}"):
            raise SystemExit("the tree does not build")

    def run(self, *command):
        """Return whether a command succeeds. What hangs does not. Its output goes to output.log."""
        # Python takes bytecode for that of a file if its second and size fit, which a change may not alter.
        env = os.environ | {"EPMOE_CUDA": "0", "PYTHONPATH": f"{self.folder}:{self.folder / 'tests'}",
                            "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}  # there may be many jobs
        with (self.folder / "output.log").open("w") as log:
            child = subprocess.Popen(command, cwd=self.folder, env=env, stdout=log, stderr=log,
                                     start_new_session=True)
            try:
                return child.wait(self.limit_s) == 0  # a test that hangs has noticed the change
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, 9)
                child.wait()
                return False

    def failing_test(self, with_c, files):
        """Return the first of these tests that fails, or None: "C", or files of pytest."""
        if with_c and not self.run(sys.executable, "tests/c/run_c_tests.py", "--quick", "--only", "plain"):
            return "C"
        if not files or self.run(sys.executable, "-m", "pytest", "-q", "-x", "-rfE", *files):
            return None
        named = re.findall(r"^(?:FAILED|ERROR) (tests/\w+\.py)", (self.folder / "output.log").read_text(),
                           re.MULTILINE)
        return named[0] if named else " ".join(files)  # pytest itself has ended, or did not end

    def failing_with(self, change):
        """Make the change, and undo it. Return "no mutant", or the test that has failed, or None."""
        path, code = self.folder / change.file, (ROOT / change.file).read_text()
        path.write_text(apply(code, change))
        try:
            if change.file.startswith("csrc") and not self.run("make", "-s", "build",
                                                               f"PYTHON={sys.executable}"):
                return "no mutant"
            with_c, files = tests_of(change.file)
            return self.failing_test(with_c and "C" not in self.failing,
                                     [f for f in files if f not in self.failing])
        finally:
            path.write_text(code)
            if change.file.startswith("csrc"):
                self.run("make", "-s", "build", f"PYTHON={sys.executable}")

    def judge(self, change):
        """Return "no mutant", "survived", or the test that has noticed the change."""
        while (failed := self.failing_with(change)) not in (None, "no mutant"):
            alone = self.failing_test(failed == "C", [] if failed == "C" else failed.split())
            if alone is None:
                return failed
            print(f"{alone} fails without a change: mend it", flush=True)
            self.failing |= set(alone.split())
        return failed or "survived"


def report(results):
    """Print the survivors, and the share that was caught. Return the number of survivors."""
    judged = [r for r in results if r["result"] != "no mutant"]
    survivors = [r for r in judged if r["result"] == "survived"]
    for r in survivors:
        print(f"survived: {Change(**r['change']).name}" + (f"  ({r['why']})" if "why" in r else ""))
    same, mended = (sum(r.get("why", "").startswith(word) for r in survivors)
                    for word in ("equivalent", "mended"))
    print(f"{len(judged)} mutants, {len(judged) - len(survivors)} caught, {len(survivors)} survived: "
          f"{same} equivalent, {mended} mended since")
    return len(survivors)


_lock = threading.Lock()  # of `todo`, `results` and the state file


def run_job(tree, todo, results, args):
    """Judge changes in a tree until enough are judged by all jobs."""
    while True:
        with _lock:
            change = next(todo, None)
            if change is None or sum(r["result"] != "no mutant" for r in results) >= args.num:
                return
        try:
            result = tree.judge(change)
        except BaseException:
            with _lock:
                list(todo)  # so that the other jobs end, too
            raise
        with _lock:
            results.append({"change": asdict(change), "result": result, "commit": commit()})
            with args.state.open("a") as out:
                print(json.dumps(results[-1]), file=out)
            print(f"{result:40} {change.name}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=200, help="mutants to judge, with those of the state file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="changes that are judged at the same time")
    parser.add_argument("--limit", type=float, default=900, metavar="S", help="seconds for a run of tests")
    parser.add_argument("--state", type=Path, default=ROOT / "tests/mutants.jsonl")
    parser.add_argument("--only", default="", metavar="FOLDER", help="only files whose names begin so")
    parser.add_argument("--report", action="store_true", help="only print the results so far")
    parser.add_argument("--list", action="store_true", help="only print the changes")
    args = parser.parse_args()
    lines = args.state.read_text().splitlines() if args.state.exists() else []
    results = [json.loads(line) for line in lines]
    if args.report:
        report(results)
        return
    changes = draw(args.seed, args.only)
    if args.list:
        print("\n".join(c.name for c in changes[:args.num]))
        return
    done = {Change(**r["change"]) for r in results}
    todo = iter([c for c in changes if c not in done])
    args.state.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        trees = list(pool.map(lambda i: Tree(ROOT / f"build/mutants/{i}", args.limit), range(args.jobs)))
        list(pool.map(lambda tree: run_job(tree, todo, results, args), trees))  # raises what a job has raised
    report(results)
    failing = set().union(*(tree.failing for tree in trees))
    if failing:
        raise SystemExit("fail without a change: " + " ".join(sorted(failing)))


if __name__ == "__main__":
    main()
