# All commands of the project. Needs make and Python 3.10 or later; everything else is installed into .venv.

PYTHON ?= python3
# Further arguments for pytest, as in `make test ARGS="-k digest -x"`, or for the corpus.
ARGS ?=
BIN := .venv/bin
READY := .venv/.ready
# Files that end in _job.py are started by the benchmarks; cost_table.py writes the docs.
BENCHMARKS = $(filter-out %_job.py %_table.py,$(wildcard benchmarks/*.py))

.DEFAULT_GOAL := help
.PHONY: help demo test lint docs bench corpus chaos compat schedulers screenshots wheel

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' Makefile | tr '|' '\t'

demo: $(READY) ## run a healthy job and a faulty one under ddpcheck
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo.sh

# The tests of one file run on one worker, because they share jobs.
test: $(READY) ## run all tests; those that need Chromium, root or gcc are skipped if it is missing
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 25 $(ARGS)

lint: $(READY) ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Fails on broken links and anchors, on pages outside the navigation, and on anything that loads from the network.
docs: $(READY) ## build the documentation site into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Without a network: the build backend is installed already. auditwheel fails if the compiled part needs a recent system.
wheel: $(READY) ## build the sdist and the wheel into build/dist, for glibc 2.17 and later
	rm -rf build/dist && mkdir -p build/dist/plain
	$(BIN)/python -m build --no-isolation --outdir build/dist/plain . > build/dist/log 2>&1 || { cat build/dist/log; exit 1; }
	PATH="$(CURDIR)/$(BIN):$$PATH" auditwheel repair --plat manylinux_2_17_$$(uname -m) --wheel-dir build/dist build/dist/plain/*.whl > build/dist/log 2>&1 || { cat build/dist/log; exit 1; }
	mv build/dist/plain/*.tar.gz build/dist && rm -r build/dist/plain build/dist/log
	@ls build/dist

bench: $(READY) ## measure the cost of watching
	@missed=0; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python "$$script" || missed=1; done; exit $$missed

corpus: $(READY) ## run all known faults and healthy jobs, and write docs/corpus.md; ARGS="--only GLOB" runs some
	$(BIN)/python -m tests.corpus $(or $(ARGS),--docs docs/corpus.md)

# Not part of CI. Torch without its CUDA libraries is downloaded into build/compat.
compat: $(READY) ## run corpus and promise tests with TORCH=VERSION, and write a row of docs/compatibility.md
	$(BIN)/python -m tests.compat --torch $(TORCH) --python $(PYTHON) $(ARGS)

# Not part of CI. Packages are installed into an overlay in build/schedulers, not on this machine.
chaos: $(READY) ## jobs with a fault at a random moment and damaged files, and the tables of docs/reliability.md; needs root
	$(BIN)/python -m tests.chaos --docs docs/reliability.md $(ARGS)

schedulers: $(READY) ## install Slurm, OpenMPI, Ray and podman in a copy of this machine, and run their cases; needs root
	$(BIN)/python -m tests.schedulers $(ARGS)

screenshots: $(READY) ## run the jobs of the images in README and docs, and create the images; needs root and Chromium
	$(BIN)/python -m tests.screenshots

# torch is installed first: with its exact version, pip takes the build that this machine is configured for.
$(READY): pyproject.toml setup.py probes/scan/kernels.c probes/scan/scan.c constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("ddpcheck needs Python 3.10 or later" if sys.version_info < (3, 10) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	@touch $@
