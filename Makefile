# The whole vocabulary of the project. Needs make and Python 3.10 or later; everything else goes into .venv.

PYTHON ?= python3
# More for pytest, as in `make test ARGS="-k digest -x"`, or for the corpus.
ARGS ?=
BIN := .venv/bin
READY := .venv/.ready
# Files that end in _job.py are what the others start.
BENCHMARKS = $(filter-out %_job.py,$(wildcard benchmarks/*.py))

.DEFAULT_GOAL := help
.PHONY: help demo test lint docs bench corpus screenshots

help: ## say what can be made
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' Makefile | tr '|' '\t'

demo: $(READY) ## watch a small broken job and a sound one
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo.sh

# A file of tests stays on one worker: its tests share the jobs they look at.
test: $(READY) ## run all tests
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 25 $(ARGS)

lint: $(READY) ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Links and anchors that lead nowhere, pages that the navigation leaves out, and anything to be loaded fail it.
docs: $(READY) ## build the documentation site into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(READY) ## measure what watching costs
	@missed=0; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python "$$script" || missed=1; done; exit $$missed

corpus: $(READY) ## run every known fault and sound job, and write docs/corpus.md; ARGS="--only GLOB" for some
	$(BIN)/python -m tests.corpus $(or $(ARGS),--docs docs/corpus.md)

screenshots: $(READY) ## run the jobs that README and docs picture, and draw the pictures anew; needs root and Chromium
	$(BIN)/python -m tests.screenshots

# torch goes first and alone: named with its exact version, pip takes the build that this machine prefers.
$(READY): pyproject.toml setup.py probes/sketches/native.c constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("ddpcheck needs Python 3.10 or later" if sys.version_info < (3, 10) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	@touch $@
