# Every target sets up .venv by itself; a fresh machine needs python3 (3.11 or later) and make.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.moe_ops_dev
# Two workers that take over each other's tests, each with one thread. They keep bytecode, also where
# the environment says otherwise: compiling and rewriting all tests takes half of the time to start.
PYTEST := PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -q -n 2 --dist worksteal

EXAMPLES ?= 20000
PART ?= $(shell echo $$(($$(date +%s) / 86400 % 20)))
SEED ?= 0

.PHONY: venv demo check test test-all fuzz fuzz-sanitized native native-check docs tree compile-matrix test-gpu sanitize-cuda \
  lint bench bench-gpu bench-gpus clean

venv: $(STAMP)

NEW_VENV = if [ ! -x $(PY) ]; then \
  if $(PYTHON) -c 'import torch' 2>/dev/null; then \
    $(PYTHON) -m venv --system-site-packages $(VENV); \
  else \
    $(PYTHON) -m venv $(VENV); \
  fi; \
fi; $(PY) -c 'import torch' 2>/dev/null || $(PY) -m pip install $(TORCH)

# A torch that python3 already has is reused: a GPU box keeps the one built for its driver. Otherwise
# torch comes first and alone, so that nothing after it chooses another build of it. Installing builds
# the CPU kernels too, where there is a C++ compiler.
$(STAMP): pyproject.toml hatch_build.py $(wildcard moe_ops/csrc/cpu/*)
	@$(NEW_VENV)
	$(PY) -m pip install -q -e '.[dev]'
	@touch $@

# Two minutes on a machine with torch. The environment in use serves if it has all that the demo
# needs, else .venv, which gets that and nothing for development.
NEEDED := -W ignore -c 'import moe_ops.integrations.transformers, safetensors'
demo: export PYTHONPATH := .
demo:
	@for py in $(PYTHON) $(PY); do $$py $(NEEDED) 2>/dev/null && break; py=; done; \
	if [ -z "$$py" ]; then \
	  echo "installing into $(VENV): torch where there is none, transformers and this package"; \
	  $(NEW_VENV) && $(PY) -m pip install -e '.[transformers]' || exit 1; \
	  py=$(PY); \
	fi; \
	$$py hatch_build.py; echo "running examples/generate.py with $$py"; $$py examples/generate.py

# Lint, types and the fast tests, under two minutes on two cores: for each change.
check: venv
	@start=$$(date +%s); \
	$(MAKE) --no-print-directory lint && $(PYTEST) -m 'not slow and not gpu' tests && \
	echo "make check took $$(($$(date +%s) - start)) s"

# All tests that run without a GPU, with a twentieth of the cases of those that run over many:
# another twentieth each day, or PART=0 to 19. Under fifteen minutes on two cores.
test: venv
	$(PYTEST) --part $(PART) tests

# With all cases: before a release, and after a change of kernels. Twenty minutes and more.
test-all: venv
	$(PYTEST) tests

# Random calls of the public functions against the fp64 oracle, some ten minutes. A failure prints
# the seed and the smallest call that fails: make fuzz EXAMPLES=500 SEED=that runs it again.
fuzz: venv
	OMP_NUM_THREADS=1 $(PY) -W ignore -m tests.fuzz --examples $(EXAMPLES) --seed $(SEED)

# The same with the CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer; needs g++.
fuzz-sanitized: venv
	mkdir -p build
	g++ -g -O1 -std=c++20 -shared -fPIC -fopenmp -fsanitize=address,undefined \
	  -fno-sanitize-recover=undefined -o build/sanitized.so moe_ops/csrc/cpu/*.cpp
	for avx in 1024 512 2; do \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 $(PY) -W ignore -m tests.fuzz \
	    --examples $(EXAMPLES) --seed $(SEED) --kernels build/sanitized.so --avx $$avx || exit 1; \
	done

# The CUDA kernels of moe_ops/csrc, for each family of GPUs: some minutes and 6 GB of memory a job.
# Needs nvcc, and CUTLASS's headers, which CUTLASS_PATH or an installed nvidia-cutlass brings.
native: venv
	$(PY) -m moe_ops.csrc.build

# Compiles of the kernels of moe_ops/csrc what host checks need, and asks them on the host; needs
# nvcc. Some minutes on two cores where the sources changed, else seconds. CHECK=--all compiles every
# object in full.
native-check: venv
	OMP_NUM_THREADS=1 $(PY) -m tests.support.native_check $(CHECK)

# The site, in site/. Nothing is downloaded, and a warning is an error.
docs: venv
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

# The tree of files in DESIGN.md.
tree: venv
	$(PY) -m tools.tree --write

# Every configuration of every kernel with every supported Triton, for SM80, 89, 90, 100 and 120; no GPU
# is needed. An hour or two on two cores; the installed version's alone: tools/compile_matrix.py
compile-matrix: venv
	env -u TRITON_INTERPRET $(PY) tools/compile_matrix.py --triton

test-gpu: venv
	$(PY) -m pytest -q --failures-at-once -m gpu tests

# The kernels of moe_ops/csrc under compute-sanitizer's four tools; needs a GPU.
sanitize-cuda: venv
	$(PY) tools/sanitize_kernels.py --write

lint: venv
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: venv
	$(PY) benchmarks/cpu_layer.py
	$(PY) benchmarks/host_overhead.py

# Needs a GPU; peers run where they are installed.
bench-gpu: venv
	$(PY) benchmarks/experts.py --schemes bf16
	$(PY) benchmarks/experts.py --schemes fp8_block --shapes qwen3 mixtral dsv3
	$(PY) benchmarks/experts.py --schemes fp8_channel fp8_tensor_static int4_w4a8 --shapes qwen3 mixtral dsv3
	$(PY) benchmarks/experts.py --schemes bf16 fp8_block --shapes qwen3 mixtral --routing zipf \
	  --tokens 64 1024 --only moe_ops
	$(PY) benchmarks/experts.py --shapes gptoss120 glm45air scout dsv3_ep8 e64 e160 --only moe_ops
	$(PY) benchmarks/experts.py --only moe_ops --tokens 1 8 32 64 256 --shapes qwen3 mixtral gptoss20 gptoss120 \
	  --schemes fp8_w8a16:channel int8_w8a16:channel int4_w4a16:g64 mxfp4_w4a16 nvfp4_w4a16
	$(PY) benchmarks/experts.py --only moe_ops --tokens 1 8 32 64 256 --shapes qwen3 mixtral --schemes int4_w4a16:g128
	$(PY) benchmarks/end_to_end.py
	$(PY) benchmarks/residency.py
	$(PY) benchmarks/experts.py --report
	$(PY) benchmarks/end_to_end.py --report

# Needs two GPUs of one host.
bench-gpus: venv
	$(PY) -m torch.distributed.run --nproc-per-node 2 benchmarks/expert_parallel.py --peers
	$(PY) benchmarks/expert_parallel.py --report

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
