# Each target sets up all it needs in .venv; nothing has to be installed by hand but Python 3.11 or newer, and pip.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all check docs bench clean

demo: .venv/ready  ## baseline, RandAugment and MetaAugment on few digits, and what was learned
	@$(BIN)/python examples/demo.py

test: check .venv/peers  ## what CI runs
	$(BIN)/pytest -m "not slow" --numprocesses auto --dist loadfile

test-all: check .venv/peers
	$(BIN)/pytest --numprocesses auto --dist loadfile

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: .venv/ready  ## the site, into docs/_build/html
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

bench: .venv/peers  ## speed beside the peers
	$(BIN)/metaaugment bench ops

# torch comes first and pinned: a looser request would take the registry's newest CUDA build.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[lab,dev]'
	@touch $@

# The libraries that `bench` compares with, and those that a policy can be used in; without their own requirements, which
# would replace torch.
.venv/peers: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt huggingface_hub tokenizers regex psutil lightning-utilities
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps torchvision timm kornia kornia_rs lightning torchmetrics transformers accelerate
	@touch $@

clean:
	rm -rf .venv demo docs/_build
