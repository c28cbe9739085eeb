# make demo and make test are all that a fresh machine needs; both make .venv when it is missing.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(wildcard protos/hacrl_fed/v1/*.proto)

.PHONY: demo test test-slow check protos clean

demo: $(VENV)/.ready
	$(BIN)/hacrl-fed simulate --config configs/demo.yaml

test: $(VENV)/.ready check
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(VENV)/.ready
	$(BIN)/python -m pytest -m slow -s

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

protos: $(VENV)/.ready
	$(BIN)/python -m grpc_tools.protoc -I protos --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[client,dev,bench]'
	touch $@

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
