# Two commands need nothing but Python 3.11, git, make and a package index: `make demo` and `make test`.

# Libraries and tests start much sooner where Python keeps what it has compiled.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Of what is installed a third is ever imported: Python compiles that when it is, and keeps it.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q --no-compile -c constraints.txt
# make test WORKERS=3: more at once than there are cores, where tests wait for processes and clocks.
WORKERS ?= auto
UNIT := $(BIN)/pytest -n $(WORKERS) --dist worksteal
FUZZ_CASES ?= 20000
FUZZ_EXECUTIONS ?= 200000
SGLANG_VENV := .venv-sglang
VLLM_VENV ?= .venv-vllm
CONFORMANCE ?=

.PHONY: demo test lint types layers loops unit page-test fuzz fuzz-inputs checked equality soak lab bench conformance-sglang conformance-vllm traces golden docs mutants coverage clean

demo: $(VENV)/.runtime
	@mkdir -p build
	@echo "# a clean trace of a real engine: exit code 0"
	$(BIN)/kvcanary-replay --report build/clean.report data/clean_llama.arrow
	@echo
	@echo "# an engine that gave a page back too early: exit code 1, an incident with its cause, and its page"
	$(BIN)/kvcanary-replay --report build/demo.report data/simulated/mla_free_too_early.arrow || test $$? -eq 1
	@echo
	@echo "# kvcanary on the PATH: . $(VENV)/bin/activate here, or for good: uv tool install '.[replay]', or pipx install '.[replay]'"
	@echo "# then: kvcanary triage build/demo.report    docs/guide/tutorial.md goes on from there"

# Two at a time: while pip installs what tests need, which keeps one core busy, the code is checked and compiled.
test:
	@$(MAKE) --no-print-directory -j2 $(VENV)/.tests loops types layers lint
	$(UNIT)

lint: $(VENV)/.tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The root is the package: an alias that carries the package's name, so that nothing hangs on what the clone is called, or on
# what lies beside it.
.typing/kvcanary:
	mkdir -p .typing && ln -sfn .. $@

types: $(VENV)/.tools .typing/kvcanary
	cd .typing && ../$(BIN)/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache -m kvcanary.cli -p kvcanary.kernels -p kvcanary.recorder -p kvcanary.replayer -p kvcanary.analysis

layers: $(VENV)/.tools .typing/kvcanary
	cd .typing && ../$(BIN)/lint-imports --config ../pyproject.toml --no-cache

# Compiled loops first, each once: pytest's workers would each compile the same ones, at the same time.
loops: $(VENV)/.runtime
	$(BIN)/python tests/compile_loops.py

unit: $(VENV)/.tests loops
	$(UNIT)

# The long runs: every kernel against the published canary, 20,000 cases each; a flipped bit in every byte of a trace;
# whole traces against the published canary, 2,000 of broken engines, 500 of broken pairs, 40 of each fault of the lab;
# 160 random simulated engines and 60 pairs, which must all replay clean; every fault of the lab against its clean run; and all
# tests with all their cases, of which a normal run goes through a part (`one_in`): every bug of the corpus, every way to draft.
fuzz: $(VENV)/.tests
	$(BIN)/pytest tests/kernels tests/recorder/test_damage.py tests/recorder/test_torn.py --conformance-cases $(FUZZ_CASES) --timeout 7200
	$(BIN)/pytest tests/replayer/test_published_sim.py tests/replayer/test_published_pair.py tests/replayer/test_published_lab.py tests/replayer/test_against_published.py --conformance-cases $(FUZZ_CASES) --timeout 7200
	$(BIN)/pytest tests/recorder/simulated/test_clean_runs.py --conformance-cases 5000 --timeout 7200
	$(BIN)/pytest tests/analysis/diff --conformance-cases 1000 --timeout 7200
	$(UNIT) --conformance-cases 501 --timeout 7200

# What a stranger may send - headers, traces, tails, workloads, events, report folders - changed at random, or by what an input
# reaches where atheris can be had: nothing may end otherwise than documented. What is found is kept in build/fuzz_inputs.
# Then every I/O call of recorder, replay and recovery fails once, and some of store and page.
fuzz-inputs: $(VENV)/.fuzz
	$(BIN)/python -m tests.fuzz_inputs.run --executions $(FUZZ_EXECUTIONS)
	$(BIN)/pytest tests/recorder/failures/test_failing_calls.py --conformance-cases $(FUZZ_CASES) --timeout 7200

$(VENV)/.fuzz: $(VENV)/.tests
	-$(PIP) atheris
	touch $@

# Every executor against stepwise replay, row for row: all saved traces, each fault of the lab with 40 seeds over its configurations,
# 240 histories that no engine has, 40 bent traces of random engines and 40 of pairs.
equality: $(VENV)/.tests
	$(UNIT) tests/replayer/equality --conformance-cases $(FUZZ_CASES) --timeout 7200

# Compiled loops that look at every index: one outside its array ends the tests with SIGILL. Numbers from files are hostile.
checked: $(VENV)/.tests
	$(BIN)/python -m pytest -n auto --dist worksteal -p tests.support.checked_indices tests/kernels tests/replayer tests/recorder/simulated tests/test_golden.py --timeout 7200

# The recorder over minutes: 200 engines killed with SIGKILL, a disk of 1 MB/s, engines of the lab in segments, 240 random
# engines under a recorder that fails somewhere; a fleet replayed by Ray, whose workers, machines and driver are killed.
soak: $(VENV)/.ray
	$(BIN)/pytest tests/soak -s --timeout 7200

$(VENV)/.ray: $(VENV)/.tests
	$(PIP) -e '.[ray]'
	touch $@

# The page of every trace in data/ in a real Chromium, which must be installed (KVCANARY_CHROMIUM names another).
page-test: $(VENV)/.browser
	$(BIN)/pytest tests/browser

$(VENV)/.browser: $(VENV)/.tests
	$(PIP) playwright
	touch $@

# Every fault of the lab, twenty seeds each, and 200 clean runs: what is detected, how soon, by what.
lab: $(VENV)/.runtime
	$(BIN)/kvcanary lab matrix --seeds 20

bench: $(VENV)/.tests
	$(BIN)/python benchmarks/cpu_kernels.py
	$(BIN)/python benchmarks/triage.py

# SGLang on the CPU with its own online canary and the recorder attached: what both find must be the same, row for row.
# Then the kinds of requests and of pools that a healthy engine has, pairs of a prefill and a decode engine, and engines of
# two ranks. Writes docs/results/conformance-sglang.md, -pairs.md and -ranks.md. A part of it: make conformance-sglang CONFORMANCE="--only llama --seeds 1 --no-write"
conformance-sglang: $(SGLANG_VENV)/.ready
	$(SGLANG_VENV)/bin/python tests/conformance/sglang/run.py $(CONFORMANCE)
	$(SGLANG_VENV)/bin/python tests/conformance/sglang/request_kinds.py
	$(SGLANG_VENV)/bin/python tests/conformance/sglang/pools.py
	$(SGLANG_VENV)/bin/python tests/conformance/sglang/pairs.py $(CONFORMANCE)
	$(SGLANG_VENV)/bin/python tests/conformance/sglang/ranks.py $(CONFORMANCE)
	$(SGLANG_VENV)/bin/python tests/conformance/injected.py sglang

$(SGLANG_VENV)/.ready: tests/conformance/sglang/install.sh tests/conformance/sglang/standin/sitecustomize.py pyproject.toml
	test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	. $(SGLANG_VENV)/bin/activate && tests/conformance/sglang/install.sh
	touch $@

# vLLM on the CPU with the recorder attached: clean runs must replay clean with the same tokens, injected faults be found.
# Writes docs/results/conformance-vllm.md. A part of it: make conformance-vllm CONFORMANCE="--only hybrid --seeds 1 --no-write"
conformance-vllm: $(VLLM_VENV)/.ready
	$(VLLM_VENV)/bin/python tests/conformance/vllm/run.py $(CONFORMANCE)
	$(VLLM_VENV)/bin/python tests/conformance/injected.py vllm

$(VLLM_VENV)/.ready: tests/conformance/vllm/install.sh pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	. $(VLLM_VENV)/bin/activate && tests/conformance/vllm/install.sh
	touch $@

# One place of kernels/ and recorder/state changed at a time: do the tests notice? All take a night; MUTANTS=200 a sample.
MUTANTS ?=
mutants: $(VENV)/.tests
	$(BIN)/python -m tests.mutants.run $(if $(MUTANTS),--sample $(MUTANTS)) --write

# The unit tests once more, with the lines that they reach: a table, and build/coverage/index.html.
coverage: $(VENV)/.tests
	$(UNIT) --cov=kvcanary --cov-report=term:skip-covered --cov-report=html:build/coverage

# The pages as a site in build/site, with the Python API out of the docstrings; a warning is an error.
docs: $(VENV)/.docs
	rm -rf build/api && mkdir -p build/api/kvcanary
	for part in __init__.py kernels recorder replayer analysis; do ln -s ../../../$$part build/api/kvcanary/$$part; done
	$(BIN)/mkdocs build --strict

$(VENV)/.docs: $(VENV)/.runtime
	$(PIP) -r docs/requirements.txt
	touch $@

# Record the traces in data/ anew, from the real engine and from the simulated one, and the verdicts that tests expect of them.
traces: $(VENV)/.tests
	$(BIN)/python data/record.py -o data
	$(BIN)/python data/record_simulated.py

golden: $(VENV)/.tests
	$(BIN)/python tests/golden/make.py

$(VENV)/.runtime: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvcanary needs Python 3.11 or later; name one with: make PYTHON=python3.11 ..."; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[replay]'
	touch $@

# What checks the code without running it: all that `lint`, `types` and `layers` need.
$(VENV)/.tools: $(VENV)/.runtime
	$(PIP) ruff mypy import-linter
	touch $@

# sglang holds the published canary that the kernels are tested against; its own requirements are not wanted, and of its
# 4,700 modules some twenty are imported.
$(VENV)/.tests: $(VENV)/.tools tests/requirements.txt
	$(PIP) -r tests/requirements.txt
	$(PIP) --no-deps sglang==0.5.23
	touch $@

clean:
	rm -rf $(VENV) $(SGLANG_VENV) .venv-vllm .typing build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis kernels/__pycache__
