# Everything runs in .venv, made here from pyproject.toml and constraints.txt; `make help` lists the targets.
SHELL := /bin/sh
PIP := .venv/bin/python -m pip --disable-pip-version-check
RUN := JAX_PLATFORMS=cpu .venv/bin/python

.PHONY: help demo liger-demo newcomer notebooks docs test test-all test-faults test-gpu test-aot lint clean

help:
	@echo "make demo      train, evaluate and sample a small language model on this machine's CPU"
	@echo "make liger-demo  make a pretrained transformer linear, tune and compare it, on this machine's CPU"
	@echo "make newcomer  walk a newcomer's path in a fresh clone and time it: demo, own text, own method, own loop"
	@echo "make notebooks  execute the notebooks as a reader does, and print the seconds of each: under ten minutes"
	@echo "make docs      build the documentation's site into docs/_build/html; warnings and broken links are errors"
	@echo "make test      the tests that fit in minutes: one method of each class of transition"
	@echo "make test-all  every test that needs no GPU"
	@echo "make test-faults  kill runs 200 times and read 1,000 damaged inputs: under 20 minutes on two cores"
	@echo "make test-gpu  the fused kernels on this machine's NVIDIA GPU (needs the extra [cuda13])"
	@echo "make test-aot  compile the fused kernels for H200, three TPUs and, with Triton, six NVIDIA generations that need not be here, count spilled registers, and compile models for several H200s"
	@echo "make lint      ruff and the type checker"
	@echo "make clean     remove .venv and caches (runs/ stays)"

.venv/.base: pyproject.toml constraints.txt
	@python="$$(scripts/find-python)" && echo "Python: $$python" && \
	{ [ -x .venv/bin/python ] || "$$python" -m venv .venv; }
	$(PIP) install --quiet --constraint constraints.txt --editable .
	@touch $@

.venv/.test: .venv/.base
	$(PIP) install --quiet --constraint constraints.txt --editable ".[test]"
	@touch $@

demo: .venv/.base
	$(RUN) demo.py

liger-demo: .venv/.base
	$(RUN) liger_demo.py

newcomer: .venv/.base
	$(RUN) -m scripts.newcomer

notebooks: .venv/.test
	$(RUN) -m scripts.run_notebooks --no-store

.venv/.docs: .venv/.base
	$(PIP) install --quiet --constraint constraints.txt --editable ".[docs]"
	@touch $@

docs: .venv/.docs
	$(RUN) -m sphinx -W --keep-going -q -b html docs docs/_build/html
	$(RUN) -m scripts.check_links docs/_build/html
	@echo "open docs/_build/html/index.html"

test: .venv/.test
	$(RUN) -m pytest -n 2 --dist worksteal --durations=30 --durations-min=5

test-all: .venv/.test
	$(RUN) -m pytest -n 2 --dist worksteal -m "not gpu and not aot"

test-faults: .venv/.test
	$(RUN) -m tests.faults.campaign

test-gpu: .venv/.test
	JAX_PLATFORMS= .venv/bin/python -m pytest -m gpu -n $(or $(JOBS),0) tests/kernels tests/ops/test_grouped_product.py tests/ops/test_grouped_fp8.py

# Compilers alone, in a folder of their own: jax would look for their devices in every other run.
.venv/.aot: .venv/.base
	$(PIP) install --quiet --no-deps --target .venv/aot "jax-cuda13-plugin==0.11.2" "jax-cuda13-pjrt==0.11.2" "libtpu==0.0.48.*" "nvidia-cuda-nvdisasm==13.*"
	@touch $@

test-aot: .venv/.test .venv/.aot
	CUDA_ROOT=$(CURDIR)/.venv/aot/nvidia/cu13 PYTHONPATH=.venv/aot TPU_SKIP_MDS_QUERY=1 $(RUN) -m pytest -s -m aot tests/kernels/test_aot.py tests/kernels/test_aot_versions.py tests/kernels/test_aot_token_step.py tests/kernels/test_aot_models.py tests/kernels/test_aot_triton.py tests/linearize/test_memory.py tests/models/test_memory.py tests/parallel/test_cards.py

lint: .venv/.test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyrefly check

clean:
	rm -rf .venv .pytest_cache .ruff_cache
