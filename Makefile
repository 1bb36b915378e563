# make demo   exports ViT-Tiny/16 to ONNX, compiles it, checks it against ONNX Runtime, prints both latencies
# make test   ruff, mypy and the whole test suite (what .ci/run calls), in TEST_PROCESSES (2) of 2 to 3 GB each
# make lint   ruff and mypy alone
# make check-models  the whole family: compiled, compared, raced, its fallback stages; JSON in build/. An hour or so:
#             make check-models CHECK_FLAGS="--no-peers --part 1/4" takes a share of it
# make check-paper-models  the nine models of the paper's Table I, compiled and verified (minutes)
# make check-cuda    GPUs without one: every model compiled for every architecture, more whole models emulated (hours);
#             images are kept in build/cuda-images, so that a second run is shorter; a part of it:
#             make check-cuda PYTEST_FLAGS="-k 'machine_code and swin'"
# make check-arm     AArch64 under qemu-user: kernels of every family with features on and off, every model of the family
#             (hours); a part of it: make check-arm PYTEST_FLAGS="-k kernels"
# make check-fuzz    mutated models and libraries for SECONDS (default 240): no crash, no traceback; SEED=N repeats a run
# make check-random  20000 random graphs against ONNX Runtime, failures shrunk into build/random/:
#             make check-random CHECK_FLAGS="--seconds 600 --seed 1" (python -m tests.random --help)
# make check-rates   the whole test suite under a table of rates that is wrong by drawn factors; SEED=N draws others
# make check-scheduled  all other tests that take minutes, one of them 13 GB; a part of them:
#             make check-scheduled PYTEST_FLAGS="-k ctrl_c"
# make docs   the pages of docs/ as a site, in build/site
# make bench  eight of the 13 models of docs/results.md beside their peers; JSON in build/bench/
#
# Each makes what it needs in build/venv; a second call finds it there. Needs python 3.10 or later with venv, and gcc;
# the tests need g++ too.
# torch is pinned to a release whose CPU build is about 200 MB. Where pip would take a CUDA build of it, name an index of
# CPU builds: make test PIP_FLAGS="--extra-index-url URL".

PYTHON ?= python3
PIP_FLAGS ?=
PYTEST_FLAGS ?=
TEST_PROCESSES ?= 2
SECONDS ?= 240
SEED ?=
FUZZ_FLAGS ?=
CHECK_FLAGS ?=

VENV := build/venv
BIN := $(VENV)/bin
DEMO := build/demo
CODE := gtco models bench tests setup.py

.PHONY: demo test lint docs bench check-models check-paper-models check-cuda check-arm check-fuzz check-random \
  check-rates check-scheduled clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo $(DEMO)/vit-ti-16.onnx
	$(BIN)/gtco compile $(DEMO)/vit-ti-16.onnx -o $(DEMO)/vit-ti-16.so --tune off --verify
	$(BIN)/gtco bench $(DEMO)/vit-ti-16.onnx --library $(DEMO)/vit-ti-16.so --peers onnxruntime

test: lint
	$(BIN)/python -m pytest -q --timeout 600 --durations 10 -n $(TEST_PROCESSES) --dist loadfile $(PYTEST_FLAGS) tests

lint: $(VENV)/.test
	$(BIN)/ruff check --quiet $(CODE)
	$(BIN)/mypy

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --quiet

check-paper-models: $(VENV)/.test
	$(BIN)/python -m pytest -q -s -m scheduled --timeout 3600 $(PYTEST_FLAGS) tests/end_to_end/test_paper_models.py

check-cuda: $(VENV)/.test
	$(BIN)/python -m pytest -q -m scheduled --timeout 3600 --durations 20 -n $(TEST_PROCESSES) --dist loadgroup \
	  $(PYTEST_FLAGS) tests/cuda

check-arm: $(VENV)/.test
	$(BIN)/python -m pytest -q -m scheduled --timeout 3600 --durations 20 -n $(TEST_PROCESSES) $(PYTEST_FLAGS) tests/arm

bench: $(VENV)/.bench
	mkdir -p build/bench
	$(BIN)/python -m bench end_to_end --json build/bench/end_to_end.json

check-models: $(VENV)/.bench
	$(BIN)/python -m bench check_models --json build/check-models.json $(CHECK_FLAGS)

check-fuzz: $(VENV)/.test
	$(BIN)/python -m pytest -q -s -m scheduled tests/fuzz --fuzz-seconds $(SECONDS) $(if $(SEED),--fuzz-seed $(SEED)) \
	  $(FUZZ_FLAGS)

check-random: $(VENV)/.test
	$(BIN)/python -m tests.random $(CHECK_FLAGS)

check-rates: $(VENV)/.test
	$(BIN)/python -m tests.wrong_rates $(or $(SEED),1) build/wrong-rates
	GTCO_CACHE=$(CURDIR)/build/wrong-rates $(MAKE) test

# Without the tests of the targets above.
check-scheduled: $(VENV)/.test
	$(BIN)/python -m pytest -q -m scheduled --timeout 3600 --durations 20 -n $(TEST_PROCESSES) --dist loadfile \
	  $(PYTEST_FLAGS) tests --ignore tests/cuda --ignore tests/arm --ignore tests/fuzz \
	  --ignore tests/end_to_end/test_paper_models.py

clean:
	rm -rf build

$(DEMO)/vit-ti-16.onnx: $(VENV)/.demo
	mkdir -p $(DEMO)
	$(BIN)/python -m models export vit-ti-16 -o $@

$(VENV)/.made:
	@command -v gcc >/dev/null || command -v cc >/dev/null || \
	  { echo "make: no C compiler; install gcc (apt-get install gcc, dnf install gcc)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "make: $(PYTHON) is too old; name another: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "make: $(PYTHON) has no venv; install it (apt-get install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# One stamp an extra: installed again when setup.py has changed.
$(VENV)/.demo $(VENV)/.test $(VENV)/.bench $(VENV)/.docs: $(VENV)/.%: setup.py | $(VENV)/.made
	$(BIN)/python -m pip -qq --disable-pip-version-check install $(PIP_FLAGS) -e '.[$*]'
	@touch $@
