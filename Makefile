# make            build epmoe/_C in place, with CUDA if there is an nvcc (EPMOE_CUDA=0: without CUDA)
# make demo       train a small Mixture-of-Experts language model on four ranks; NODES=2 on two nodes of two
# make test       build, and run the C tests (quick) and pytest without the tests marked long, also on GPUs;
#                 ARGS=... goes to pytest
# make bench      measure epmoe and other libraries, one rank per GPU (without GPUs small shapes on the CPU);
#                 ARGS=... goes to python -m benchmarks
# make trace      record what the warps of the megakernels do: a table, and in build/trace_* a plot and files
#                 for Perfetto; ARGS=... goes to python -m benchmarks
# make report     write the tables and plots of README.md, docs/performance.md and docs/experiments
# make wheels     build wheels in dist, for the CPU and with nvcc for CUDA, and use each in an empty environment
# make docs       build the site in build/docs, with docs/requirements.txt in a venv; a warning is an error
# make types      check the types of epmoe with mypy, without the integrations; make test does it too
# make check      everything, of which .ci/run is a part; it runs each night: test with the long tests, format,
#                 style, the C tests in full, the models of the protocol, the documents, and with nvcc the kernels
# make tsan       the C tests with ThreadSanitizer
# make models     check the models of the protocol with spin
# make soak       long runs, tens of minutes: a million operations with random delays, 200,000 routings,
#                 10,000 programs of several threads, repeated creation and closing, leaks, killed ranks,
#                 wrong calls, and hostile peers
# make gpu        all tests that need GPUs, with a table at the end; ARGS=... goes to tests/on_gpus.py
# make cuda       build with nvcc, and check the machine code of the kernels for sm_90a
# make emulated   execute the kernels with CPU threads
# make format     format the C and CUDA sources
# make size       print the number of lines of every file
# make clean      remove all files that were built
#
# PYTHON=... selects the interpreter. Without it, make uses the first of these that exists:
#   1. .venv, if it has all packages;
#   2. python3, if it has torch 2.11 or newer and setuptools, and for tests also pytest, hypothesis, numpy and
#      transformers (for example on a GPU machine without a network);
#   3. a new .venv, made from requirements-dev.txt.

.DEFAULT_GOAL := build
.PHONY: build demo test gpu bench trace report wheels docs check rest soak tsan models cuda emulated with-nvcc format size clean python check-format check-style check-kernels types c-tests FORCE
# Each test has a deadline and uses all cores. So the targets do not run in parallel.
.NOTPARALLEL:

NEEDED := torch numpy pytest xdist hypothesis transformers accelerate matplotlib rich setuptools wheel auditwheel clang_format mypy
# The packages that an existing python3 must have. Targets that run tests need more packages.
AS_IT_IS := torch setuptools $(if $(filter-out build demo bench trace report wheels docs cuda,$(or $(MAKECMDGOALS),build)),pytest hypothesis numpy transformers) \
    $(if $(filter wheels,$(MAKECMDGOALS)),auditwheel)
HAS := import importlib.util as u, importlib.metadata as m, sys; sys.exit(sys.version_info < (3, 11) or any(u.find_spec(n) is None for n in sys.argv[1:]) \
    or tuple(map(int, m.version("torch").split(".")[:2])) < (2, 11))
ifndef PYTHON
PYTHON := $(shell if .venv/bin/python -c '$(HAS)' $(NEEDED) 2>/dev/null; then echo .venv/bin/python; \
    elif python3 -c '$(HAS)' $(AS_IT_IS) 2>/dev/null; then echo python3; else echo .venv/bin/python; fi)
endif
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
# Tests start hundreds of processes. Without bytecode each of them would compile epmoe again.
export PYTHONDONTWRITEBYTECODE :=

LIB := epmoe/_C.abi3.so
# pip builds the CUDA backend only where there is a GPU. make builds it wherever there is an nvcc, for developers.
NVCC := $(or $(if $(CUDA_HOME),$(wildcard $(CUDA_HOME)/bin/nvcc),$(shell command -v nvcc)),$(wildcard /usr/local/cuda/bin/nvcc))
WITH_CUDA := $(if $(EPMOE_CUDA),,$(if $(NVCC),EPMOE_CUDA=1))
SOURCES := $(shell find csrc -type f) setup.py
STYLED := $(filter %.h %.c %.cuh %.cu,$(SOURCES)) $(wildcard tests/c/*.[ch] tests/fakes/cuda/*.h tests/kernels/*.h tests/kernels/*.cpp)
# If one of these settings changes, make builds the module again.
SETTINGS := $(foreach v,EPMOE_CUDA EPMOE_CUDA_ARCH EPMOE_CHAOS EPMOE_TRACE EPMOE_WHEEL CUDA_HOME CC CFLAGS LDFLAGS,$(v)=$($(v))) $(NVCC)

build: $(LIB)
	@$(PYTHON) -c 'import importlib.util as u, os; s = u.spec_from_file_location("_C", "$(LIB)"); \
	    c = u.module_from_spec(s); s.loader.exec_module(c); \
	    print("$(LIB):", os.path.getsize("$(LIB)") // 1024, "KiB,", "with CUDA" if c.HAS_CUDA else \
	    "CPU ONLY: the CUDA backend was not compiled (no nvcc, or EPMOE_CUDA=0)")'

$(LIB): $(SOURCES) build/settings | python
	@echo "building $(LIB)"
	@$(WITH_CUDA) $(PYTHON) setup.py -q build_ext --inplace --build-temp build/temp
	@touch $(LIB)

build/settings: FORCE
	@mkdir -p build
	@echo '$(SETTINGS)' | cmp -s - $@ || echo '$(SETTINGS)' > $@

python:
	@if [ "$(PYTHON)" = .venv/bin/python ] && ! .venv/bin/python -c '$(HAS)' $(NEEDED) 2>/dev/null; then \
	    echo "installing requirements-dev.txt into .venv; this takes some minutes"; \
	    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "epmoe needs Python 3.11 or newer")' && \
	    python3 -m venv .venv && .venv/bin/pip install -qq --disable-pip-version-check -r requirements-dev.txt; \
	fi

demo: build
	$(PYTHON) examples/train_lm.py $(if $(NODES),--nodes $(NODES)) $(ARGS)

# The suite on the CPU. More files than cores run at the same time, because many tests wait for a process or
# a limit. With ARGS, one process runs the tests, so that a debugger works.
WORKERS = $(PYTHON) -c 'import xdist' 2>/dev/null && echo --numprocesses $$(($$(nproc) < 3 ? $$(nproc) + 2 : 4)) --dist loadfile --no-loadscope-reorder
ON_CPUS = $(PYTHON) -m pytest $(if $(filter check,$(MAKECMDGOALS)),--long) $(or $(ARGS),$$($(WORKERS)))

# With GPUs, the suite also runs on GPUs. It runs with 1, 2 and all ranks, in steps with a table at the end. On
# one GPU it runs with 1, 2 and 4 ranks, which share the GPU. With ARGS it runs with 1 rank and with all ranks,
# each in one step. With 16 or more cores, the CPU part runs at the same time, and its output is
# printed at the end. The check of the types and the C tests, most of whose time is waits, run beside all
# this. "make check test" runs the C tests once, in full.
test: build
	@code=0; $(MAKE) --no-print-directory types > build/types.log 2>&1 & types=$$!; \
	cpu=; c=; trap 'kill $$types $$c $$cpu 2>/dev/null' EXIT; trap 'exit 1' INT TERM; \
	$(if $(filter check,$(MAKECMDGOALS)),,echo "the C tests run beside pytest; their output is printed at the end"; \
	    $(PYTHON) tests/c/run_c_tests.py --quick > build/test_c.log 2>&1 & c=$$!;) \
	gpus=$$($(PYTHON) -c 'import torch; n = torch.cuda.device_count(); print(*sorted({1, n if n > 1 else 4} if n else ()))'); \
	if [ -n "$$gpus" ] && [ $$(nproc) -ge 16 ]; then $(ON_CPUS) > build/test_cpu.log 2>&1 & cpu=$$!; fi; \
	if [ -n "$$gpus" ] && [ -z "$(ARGS)" ]; then $(PYTHON) tests/on_gpus.py --only tests || code=1; \
	else for n in $$gpus; do \
	    echo "the same tests on $$n rank(s) on GPUs"; \
	    $(PYTHON) -m torch.distributed.run --standalone --nproc-per-node $$n -m pytest $(ARGS) || code=1; \
	done; fi; \
	[ -z "$$gpus" ] || echo "the same tests on the CPU"; \
	if [ -n "$$cpu" ]; then tail -n +1 -f --pid=$$cpu build/test_cpu.log; wait $$cpu; else $(ON_CPUS); fi || code=1; \
	if [ -n "$$c" ]; then wait $$c || code=1; echo "the C tests:"; cat build/test_c.log; fi; \
	wait $$types || code=1; cat build/types.log; exit $$code

bench: build
	$(PYTHON) -m benchmarks $(ARGS)

report: build
	$(PYTHON) -m benchmarks report benchmarks/results/h200x4.json --readme README.md --page docs/performance.md --plots docs/img
	$(PYTHON) -m benchmarks report docs/experiments/data/runs/decode_h200.json --page docs/experiments/decode.md --plots docs/img
	$(PYTHON) docs/tables.py

# A check that could not run is not a success. All checks that did not run are printed at the end.
check: rest test
	@if [ -s build/not_checked ]; then echo "check: passed, but NOT CHECKED:"; sed 's/^/  /' build/not_checked; \
	    else echo "check: passed"; fi

# The part of check that test does not include. After a failure, make continues with the other targets.
rest: | python
	@mkdir -p build && rm -f build/not_checked && touch build/not_checked
	@$(MAKE) -k --no-print-directory check-format check-style build c-tests models docs with-nvcc

# The clang-format in the folder of the interpreter, else the one on PATH. It must be version 19, because
# other versions format differently.
CLANG_FORMAT = $$(PATH=$(dir $(PYTHON)):$$PATH command -v clang-format)
IS_STYLED_BY = [ -n "$(CLANG_FORMAT)" ] && $(CLANG_FORMAT) --version | grep -q 'version 19\.'

check-format: | python
	@if $(IS_STYLED_BY); then \
	    bad=$$(for f in $(STYLED); do $(CLANG_FORMAT) --dry-run -Werror $$f 2>/dev/null || echo $$f; done); \
	    if [ -n "$$bad" ]; then echo "format: run \"make format\" for:" $$bad; exit 1; else echo "format: ok"; fi; \
	else mkdir -p build && echo "format (no clang-format 19)" | tee -a build/not_checked | sed 's/^/NOT CHECKED: /'; fi

# Check columns, chains of assignments, and circles of includes, calls and imports.
check-style: | python
	@$(PYTHON) tests/check_style.py

# The configuration is in pyproject.toml. Other versions of mypy may report other errors.
HAS_MYPY = grep -qx "mypy==$$($(PYTHON) -c 'from mypy.version import __version__ as v; print(v)' 2>/dev/null)" requirements-dev.txt
types: | python
	@if $(HAS_MYPY); then $(PYTHON) -m mypy --no-error-summary && echo "types: ok"; \
	else mkdir -p build && echo "types (no mypy of the version in requirements-dev.txt)" | tee -a build/not_checked | sed 's/^/NOT CHECKED: /'; fi

format: | python
	@$(IS_STYLED_BY) || { echo "needed: clang-format 19"; exit 1; }
	@$(CLANG_FORMAT) -i $(STYLED)

c-tests: | python
	@$(PYTHON) tests/c/run_c_tests.py

tsan: | python
	@$(PYTHON) tests/c/run_c_tests.py --only tsan

models: | python
	@command -v spin >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    { apt-get install -y spin || { apt-get update && apt-get install -y spin; }; } >/dev/null 2>&1; } || true
	@$(PYTHON) tests/models/run_models.py; code=$$?; \
	if [ $$code = 77 ]; then \
	    mkdir -p build && echo "models of the protocol (no spin)" | tee -a build/not_checked | sed 's/^/NOT CHECKED: /'; \
	else exit $$code; fi

# mkdocs reads the sources of epmoe and does not import them. So this venv needs no torch.
DOCS_VENV := build/docs-venv
docs: | python
	@mkdir -p build; if ! cmp -s docs/requirements.txt $(DOCS_VENV)/installed; then \
	    rm -rf $(DOCS_VENV); $(PYTHON) -m venv $(DOCS_VENV) >/dev/null 2>&1 && \
	    $(DOCS_VENV)/bin/pip install -qq --no-deps --disable-pip-version-check --retries 1 --timeout 20 -r docs/requirements.txt \
	        2>build/docs-pip.log && cp docs/requirements.txt $(DOCS_VENV)/installed; \
	fi; \
	if cmp -s docs/requirements.txt $(DOCS_VENV)/installed; then \
	    NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build -q --clean && echo "docs: ok, in build/docs/index.html"; \
	else echo "documents (docs/requirements.txt could not be installed)" | tee -a build/not_checked | sed 's/^/NOT CHECKED: /'; fi

# EPMOE_CUDA=0 makes the wheel for the CPU only.
wheels: | python
	@$(WITH_CUDA) $(PYTHON) tests/wheels.py dist

# The module with the profiler is built in another folder. The module in place has no profiler.
trace: python
	EPMOE_TRACE=1 $(WITH_CUDA) $(PYTHON) setup.py -q build --build-base build/trace --build-lib build/trace/lib
	cd build/trace/lib && PYTHONPATH=.:$(CURDIR) $(abspath $(PYTHON)) -m benchmarks overlap --trace $(CURDIR)/build/trace.json $(ARGS)

# Some tests run on a module with random delays in the operations. It is built in another folder.
gpu: build
	EPMOE_CHAOS=1 $(WITH_CUDA) $(PYTHON) setup.py -q build --build-base build/chaos --build-lib $(CHAOS)
	$(PYTHON) tests/on_gpus.py $(ARGS)

# The operations run on a module with random delays at points of the protocol. It is built in another folder.
CHAOS = build/chaos/lib
TORCHRUN = $(PYTHON) -m torch.distributed.run --standalone --nproc-per-node $$n
soak: build
	EPMOE_CHAOS=1 $(WITH_CUDA) $(PYTHON) setup.py -q build --build-base build/chaos --build-lib $(CHAOS)
	PYTHONPATH=$(CHAOS) $(PYTHON) tests/soak.py ops
	PYTHONPATH=$(CHAOS):. $(PYTHON) tests/soak_decode.py
	PYTHONPATH=$(CHAOS):. $(PYTHON) tests/soak_train.py --balance yes --each 50
	$(PYTHON) tests/fuzz_routing.py --cases 200000
	PYTHONPATH=.:tests $(PYTHON) tests/fuzz_nodes.py --cases 20000
	$(PYTHON) tests/soak.py cycles
	$(PYTHON) tests/soak.py leaks
	$(PYTHON) tests/faults.py --device cpu --kills 200
	PYTHONPATH=.:tests $(PYTHON) tests/faults_nodes.py
	$(PYTHON) tests/fuzz_module.py
	$(PYTHON) tests/stress_programs.py --programs 10000
	$(PYTHON) tests/c/run_c_tests.py --hostile 1000000
	@n=$$($(PYTHON) -c 'import torch; from epmoe import _C; print(max(4, torch.cuda.device_count()) if _C.HAS_CUDA and torch.cuda.device_count() else 0)'); if [ $$n -gt 0 ]; then \
	    set -ex; PYTHONPATH=$(CHAOS) $(TORCHRUN) tests/soak.py ops -n 100000; $(TORCHRUN) tests/fuzz_routing.py --device cuda --cases 2000; \
	    $(TORCHRUN) tests/soak.py cycles -n 200; \
	    $(PYTHON) tests/faults.py --device cuda; $(PYTHON) tests/soak.py leaks --device cuda -n 3; \
	    for soak in soak_fused.py soak_train.py "soak_train.py --balance yes" soak_decode.py soak_nodes.py; do \
	        PYTHONPATH=$(CHAOS):. $(TORCHRUN) tests/$$soak; done; \
	fi

# Also compile the profiler, but only to PTX. No other target here compiles it.
TRACED = nvcc -std=c++17 -Icsrc --expt-relaxed-constexpr -DEP_TRACE -arch=compute_90a -ptx csrc/kernels/fused/fused_bf16.cu -o /dev/null
cuda: build
	@$(TRACED) & $(PYTHON) tests/check_kernels.py build/temp; code=$$?; wait $$! && exit $$code

# CPU threads emulate GPU threads. The grouped GEMM for Hopper is compared with sums in double. Plan,
# dispatch (also in FP8), combine (also those of low latency), the communication warps of the megakernels, the
# gradients of activations, the quantisation and the expansion of 4 bits are compared with the CPU backend.
# ThreadSanitizer also runs, because it detects a missing barrier. nvcc is used for its headers only.
EMULATED = nvcc -std=c++17 -g -Icsrc -Xcompiler=-Wno-unknown-pragmas,-fno-ipa-icf,-ffp-contract=off
emulated: | python
	@mkdir -p build
	@for san in "" -fsanitize=thread; do \
	    for f in plan ops rows low_latency activation quantize transpose expand; do gcc -std=c11 -O1 -g $$san -D_GNU_SOURCE -ffp-contract=off -Icsrc -c csrc/cpu/$$f.c -o build/cpu_$$f.o || exit 1; done; \
	    for t in stages comm low_latency dispatch_fp8 activation quantize transpose expand; do \
	        $(EMULATED) -O1 $${san:+-Xcompiler=$$san} tests/kernels/test_$$t.cpp build/cpu_plan.o build/cpu_ops.o build/cpu_rows.o build/cpu_low_latency.o build/cpu_activation.o build/cpu_quantize.o build/cpu_transpose.o build/cpu_expand.o -o build/test_$$t -lpthread -lm && \
	        echo "$$t $$san" && \
	        TSAN_OPTIONS=exitcode=66 timeout 600 $$(setarch -R true 2>/dev/null && echo setarch -R) \
	            build/test_$$t 1 $$([ -z "$$san" ] || [ $$t = low_latency ] && echo 2 || echo 1) || exit 1; done; done
	@for san in "" -fsanitize=thread; do \
	    for t in gemm gemm_fp8 gemm_w4 gemm_accumulate gemm_save gemm_low_rank gemm_narrow wgrad_fp8; do \
	        $(EMULATED) -O2 $${san:+-Xcompiler=$$san} tests/kernels/test_$$t.cpp -o build/test_$$t -lpthread && echo "$$t $$san" && \
	        TSAN_OPTIONS=exitcode=66 timeout 600 $$(setarch -R true 2>/dev/null && echo setarch -R) build/test_$$t || exit 1; done; done

# Half a minute: the machine code that build has just made.
check-kernels: build
	@if [ -n "$(WITH_CUDA)" ] || [ "$(EPMOE_CUDA)" = 1 ]; then $(PYTHON) tests/check_kernels.py build/temp; \
	else mkdir -p build && echo "kernels (no nvcc, or EPMOE_CUDA=0)" | tee -a build/not_checked | sed 's/^/NOT CHECKED: /'; fi

with-nvcc: | python
	@if command -v nvcc >/dev/null && [ "$(EPMOE_CUDA)" != 0 ]; then $(MAKE) --no-print-directory cuda emulated; \
	else mkdir -p build && echo "kernels (no nvcc, or EPMOE_CUDA=0)" | tee -a build/not_checked | sed 's/^/NOT CHECKED: /'; fi

size:
	@find csrc epmoe benchmarks tests -type f \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.py' -o -name '*.pyi' \
	    -o -name '*.pml' \) -exec wc -l {} + | sort -rn | awk '$$2 == "total" {next} \
	    {split($$2, part, "/"); sum[part[1]] += $$1; printf "%6d  %s%s\n", $$1, $$2, ($$1 > 400 ? "  (over 400)" : "")} \
	    END {print ""; for (p in sum) printf "%6d  %s\n", sum[p], p}'

clean:
	rm -rf build dist *.egg-info $(LIB) demo.png .pytest_cache .hypothesis
	find epmoe benchmarks tests examples -name __pycache__ -exec rm -rf {} +
