# make run: the notebooks, executed, and one page with their results.  make test: every test.  make lab: JupyterLab.
# make test-gpu: the contract on a GPU.  make test-tritons: what depends on Triton, under three versions of it.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: run test test-gpu test-tritons lab setup clean

run: setup
	$(BIN)/mla-lab run

# Two workers with one thread each: with torch's own count, one for each core, they wait for each other three times as long.
test test-tritons: export OMP_NUM_THREADS := 1
test: setup
	$(BIN)/ruff check .
	$(BIN)/python tools/normalise_notebooks.py --check
	$(BIN)/python -m pytest -n 2 --dist worksteal -rs tests
	$(BIN)/python -m pytest -n 2 --dist loadfile --nbval notebooks

# The contract's tests on the device that is there, with the Python that has its torch: .venv's, else $(PYTHON).
CONTRACT := codec cache attention sparse_mla laws faults flashmla operator size fuzz p_scale numerics cdna hopper
test-gpu:
	PYTHONPATH=. $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m pytest -n $(or $(WORKERS),12) -rs --durations=5 $(CONTRACT:%=tests/test_%.py)

# What depends on Triton's version, under each of these, in an environment of its own over .venv's. Triton 3.6's interpreter
# reads arrays as scalars, which numpy 2.4 forbids.
TRITONS := 3.6.0 3.7.1 3.9.0
test-tritons: setup
	@for version in $(TRITONS); do \
	  folder=.tritons/$$version; \
	  test -x $$folder/bin/python || $(BIN)/python -m venv $$folder || exit 1; \
	  for site in $$folder/lib/python*/site-packages; do ls -d $$PWD/$(VENV)/lib/python*/site-packages > $$site/over.pth; done; \
	  $$folder/bin/python -m pip install --quiet --disable-pip-version-check --no-deps triton==$$version "numpy<2.4" || exit 1; \
	  echo "triton $$version"; \
	  PYTHONPATH=. $$folder/bin/python -m pytest -n 2 -q tests/test_compile.py tests/test_compiled.py tests/test_cdna.py tests/test_codec.py tests/test_sparse_mla.py || exit 1; \
	done

lab: setup
	$(BIN)/jupyter lab notebooks

setup: $(STAMP)

# An interrupted installation leaves no stamp, and the next one starts over in the same environment.
$(STAMP): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else "PYTHON: got Python %d.%d; accepted: 3.11, 3.12, 3.13 (make PYTHON=python3.12 ...)" % v)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf $(VENV) .tritons runs
