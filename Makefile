# `make demo`, `make test`: the rest is for developers. PIP_CONSTRAINT may choose a torch build.
PYTHON ?= python3
VENV ?= .venv
OLDEST ?= 5.17.0
RUN := $(VENV)/bin/python

.PHONY: demo test test-long coverage drift quality bench readme pictures docs studies wheel clean

$(VENV)/run: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --editable '.[plots]'
	touch $@

$(VENV)/dev: $(VENV)/run
	$(RUN) -m pip install --quiet --editable '.[dev]'
	touch $@

demo: $(VENV)/run  ## the whole road, about ten minutes on two cores
	$(RUN) scripts/demo.py --output_dir runs/demo

test: $(VENV)/dev  ## the tests
	$(RUN) -m pytest -n 2 --dist loadfile

test-long: $(VENV)/dev  ## the tests that take minutes each
	$(RUN) -m pytest -m long

coverage: $(VENV)/dev  ## every text and image model type of transformers, into docs/coverage.md; goes on where it was stopped
	$(RUN) -m tests.coverage

drift: $(VENV)/oldest  ## a sample of it on the oldest transformers that is supported
	$(VENV)/oldest/bin/python -m pytest tests/test_coverage.py tests/test_zoo.py

$(VENV)/oldest: pyproject.toml
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet --editable . 'transformers==$(OLDEST)' pytest
	touch $@

quality: $(VENV)/dev  ## lint and format check
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

bench: $(VENV)/run  ## speed, as ratios measured side by side
	$(RUN) scripts/bench.py

readme: $(VENV)/run  ## write the generated parts of README.md and docs/
	$(RUN) scripts/readme.py

pictures: $(VENV)/run  ## every scheme draws itself into docs/pictures
	$(RUN) -m hf_posswap.drawing --output_dir docs/pictures

docs: readme pictures  ## every table and picture that is made from the code

studies: $(VENV)/run  ## the studies of docs/, five hours on one core
	$(RUN) scripts/longrope_study.py --output_dir docs/longrope
	$(RUN) scripts/dilution.py --output_dir docs/dilution
	$(RUN) scripts/fixed_or_learned.py --output_dir docs/fixed_or_learned
	$(RUN) scripts/recovery_study.py --output_dir docs/recovery --scratch_seeds 1
	$(RUN) scripts/document_study.py --output_dir docs/documents
	$(RUN) scripts/image_study.py --output_dir docs/images

wheel: $(VENV)/dev
	$(RUN) -m hatchling build

clean:
	rm -rf $(VENV) dist runs
