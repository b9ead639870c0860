# make run: the notebooks, executed, and one page with their results.  make test: every test.  make lab: JupyterLab.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: run test test-gpu lab setup clean

run: setup
	$(BIN)/mla-lab run

test: setup
	$(BIN)/python -m pytest -n 2 -rs tests
	$(BIN)/python -m pytest -n 2 --dist loadfile --nbval notebooks

# The contract's tests on the device that is there, with the Python that has its torch: .venv's, else $(PYTHON).
CONTRACT := codec cache attention sparse_mla laws faults flashmla operator size fuzz p_scale numerics cdna
test-gpu:
	PYTHONPATH=. $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m pytest -n $(or $(WORKERS),12) -rs --durations=5 $(CONTRACT:%=tests/test_%.py)

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
	rm -rf $(VENV) runs
