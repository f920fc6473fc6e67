# make train              install raytrec, generate data, train and evaluate a model on 2 CPU workers
# make test               run all tests except those of the targets below
# make test-slow          run the slower tests of single parts, which test leaves out
# make test-whole         run test and test-slow at once, as continuous integration does
# make test-fast          run the tests that need neither Ray nor several processes (under 90 s)
# make test-all           run every test: test, test-slow, test-survive, mutations, parity, golden, cluster-test
# make smoke              run the smallest form of every target in this file
# make test-next          test the versions in requirements/next.txt, in .venv-next (7 GB)
# make mutations          test the messages for 2,000 invalid configurations, schemas, run folders and checkpoints
# make parity             compare sharded runs with one process in every combination
# make golden             compare the first 50 losses of every example configuration with recorded losses
# make chaos              run on several nodes with at least 20 faults, and measure the cost of faults
# make cluster-test       test clusters, notebooks and images
# make test-survive       run the slow tests of whole runs, most of them with faults
# make soak-serve         send 200,000 requests to a service during swaps, damaged exports and killed replicas
# make soak-online        send 100,000 requests to a service that follows a run, while processes are killed
# make gpu-check          test raytrec on the GPU of this machine
# make cuda-wheels        check the CUDA packages without a GPU, in .venv-cuda (6 GB)
# make gpu-lease          run tests and measurements on a GPU that is available for 30 minutes, by priority
# make lint               check formatting, import order, language, commits and types
# make weight             count lines of code, files, configuration keys, words and lines of tests
# make map                update the list of modules in docs/map.md
#
# Benchmarks; each writes benchmarks/results/ and the tables of a page:
#
# make bench              training speed compared with hand-written loops
# make bench-ingest, curves, overhead
#                         tables and plots of docs/benchmarks.md
# make bench-export       export of a table of 30 GiB, and lookups in the export
# make bench-gpu          speed of a GPU (docs/gpu.md)
# make bench-host         kernel launches and Python time of a step
# make bench-ids          cost of managed ids compared with a static table
# make bench-ids-quality DATA=DIR
#                         AUC on MovieLens-1M with managed ids, hashing and a vocabulary
# make bench-online       CPU time of deltas during training, and delay until a service has loaded them
# make bench-plan         predicted memory and step time compared with measurements
# make bench-precision    AUC with fp16 tables and quantized collectives
# make bench-requests     requests with candidates compared with one row per candidate
# make bench-scale        control plane with up to 1,024 simulated ranks and 1,000 tables (docs/scaling.md)
# make bench-sequences    step time by sequence length
# make bench-serve        serving speed compared with other services of the same model
# make bench-start        start time of a run, and restart time after a worker is killed
# make bench-sync         AUC lost by a served model that is synchronized only at intervals
# make bench-table-shards lookups in table shards compared with tables in process
# make bench-tiers        memory and speed of tables in memory and in files (docs/sharding.md)
# make quality DATA=DIR   every model on public data in DIR, with 5 seeds each (docs/quality.md)
# make quality-smoke      every row of docs/quality.md for three steps, on synthetic data

# Newest Python with venv, unless PYTHON is set. Evaluated only by targets that need Python.
PYTHONS := python3.13 python3.12 python3.11
PYTHON ?= $(or $(shell for python in $(PYTHONS); do \
	$$python -c 'import ensurepip, venv' 2>/dev/null && echo $$python && break; done), \
	$(error found no Python 3.11 to 3.13 with venv: install one (Debian, Ubuntu: python3.12 and python3.12-venv), \
	or name it: make PYTHON=/path/to/python3))
BIN := .venv/bin
# Device for which .venv was installed. It cannot change, because packages for two devices conflict.
INSTALLED := $(patsubst .venv/installed-%,%,$(wildcard .venv/installed-*))
DEVICE ?= $(or $(firstword $(INSTALLED)),cpu)
ifneq ($(filter-out clean,$(or $(MAKECMDGOALS),train)),)
ifneq ($(filter-out $(DEVICE),$(INSTALLED)),)
$(error .venv is for $(INSTALLED), and DEVICE is $(DEVICE): leave DEVICE out, or run `make clean` first)
endif
endif
ROWS ?= 300000
# Folder with ml-100k, ml-1m, toys and adult.
DATA ?= .
# Number of test processes. Tests that share the Ray cluster run one after another.
AT_ONCE ?= 2

.PHONY: train test test-fast test-slow test-whole test-next test-all smoke mutations cluster-test test-survive parity golden chaos bench overhead curves bench-ingest bench-scale bench-serve bench-online bench-sync bench-table-shards bench-start bench-sequences bench-requests bench-ids bench-precision quality quality-smoke gpu-check gpu-lease cuda-wheels bench-gpu bench-host bench-plan lint format install lock clean bench-tiers bench-export soak-serve soak-online bench-ids-quality weight map

train: install data/synthetic/schema.yaml
	$(BIN)/raytrec train jobs/synthetic.yaml

test: install
	$(BIN)/pytest -n $(AT_ONCE) --dist loadgroup --no-loadscope-reorder

test-fast: install
	$(BIN)/pytest -n $(AT_ONCE) --dist loadgroup --no-loadscope-reorder -m "not processes and not slow and not parity and not survive and not cluster and not mutations"

test-slow: install
	$(BIN)/pytest -n $(AT_ONCE) --dist loadgroup --no-loadscope-reorder -m "slow and not parity and not survive and not cluster and not mutations"

test-whole: install
	$(BIN)/pytest -n $(AT_ONCE) --dist loadgroup --no-loadscope-reorder -m "not parity and not survive and not cluster and not mutations"

# Losses are compared with those of the pinned versions, bit for bit or within 1e-4 over 10 steps (tests/golden).
test-next: .venv-next/installed
	.venv-next/bin/pytest tests/compat
	.venv-next/bin/pytest tests/golden -m "parity or not parity"
	.venv-next/bin/pytest tests/parity
	.venv-next/bin/pytest -n $(AT_ONCE) --dist loadgroup --no-loadscope-reorder tests/tracking tests/data

.venv-next/installed: requirements/next.txt requirements/dev.txt pyproject.toml
	$(PYTHON) -m venv .venv-next
	.venv-next/bin/python -m pip install --disable-pip-version-check --no-deps --only-binary :all: \
		-r requirements/next.txt -r requirements/dev.txt
	.venv-next/bin/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

test-all: test test-slow test-survive mutations parity golden cluster-test

mutations: install
	$(BIN)/pytest -n $(AT_ONCE) tests/mutations -m mutations

smoke: install
	$(BIN)/python -W ignore benchmarks/smoke.py

cluster-test: install
	$(BIN)/pytest $(addprefix tests/,cluster client deploy images notebooks security) -m "cluster or not cluster"

test-survive: install
	$(BIN)/pytest -m survive

chaos: install
	$(BIN)/python -W ignore benchmarks/chaos.py

bench-tiers: install
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/tiers.py

bench-export: install
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/export.py

bench-host: install
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/host.py

bench-plan: install
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/plan.py

bench-serve: install
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/serve.py

bench-table-shards: install
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/table_shards.py

bench-online: install
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/online.py

bench-sync: install
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/sync_interval.py

soak-serve: install
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/serving/soak.py

soak-online: install
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/serving/soak_online.py

bench-start: install
	$(BIN)/python -W ignore benchmarks/start.py

bench-sequences: install
	$(BIN)/python -W ignore benchmarks/sequences.py

bench-requests: install
	$(BIN)/python -W ignore benchmarks/grouped.py

bench-ids: install
	$(BIN)/python -W ignore benchmarks/ids.py

bench-ids-quality: install
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/ids_quality.py $(DATA)

quality: install
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/quality.py $(DATA)

quality-smoke: install
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/quality.py --smallest

bench-scale: install
	$(BIN)/python -W ignore benchmarks/scale.py

gpu-check: install
	$(BIN)/python -W ignore tests/gpu/check.py

cuda-wheels: install .venv-cuda/installed
	$(BIN)/python -W ignore tests/gpu/wheels.py record .venv-cuda/operators.json
	.venv-cuda/bin/python -W ignore tests/gpu/wheels.py check .venv-cuda/operators.json

.venv-cuda/installed: requirements/cuda.txt requirements/install.py
	$(PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/python requirements/install.py cuda
	@touch $@

gpu-lease: install
	PYTHON=$(BIN)/python tests/gpu/lease.sh

bench-gpu: install data/ingest/schema.yaml
	$(BIN)/python -W ignore benchmarks/gpu.py --readers 4

parity: install
	$(BIN)/pytest tests/parity -m "parity or not parity"

golden: install
	$(BIN)/pytest tests/golden -m "parity or not parity"

bench: install data/step/schema.yaml
	$(BIN)/python -W ignore benchmarks/step.py

data/step/schema.yaml: | install
	$(BIN)/raytrec prepare synthetic --out data/step --rows 1000000 --multi-hot 8

overhead: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/overhead.py

curves: install data/synthetic/schema.yaml
	$(BIN)/python benchmarks/curves.py

bench-precision: install data/synthetic/schema.yaml
	$(BIN)/python -W ignore benchmarks/precision.py

bench-ingest: install data/ingest/schema.yaml
	$(BIN)/python -W ignore benchmarks/ingest.py

data/ingest/schema.yaml: | install
	$(BIN)/raytrec prepare synthetic --out data/ingest --rows 1250000

weight: install
	@$(BIN)/python benchmarks/weight.py $(if $(AGAINST),--against $(AGAINST))

map: install
	$(BIN)/python benchmarks/module_map.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python benchmarks/language.py
	$(BIN)/python benchmarks/commits.py
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: .venv/installed-$(DEVICE)

# --no-deps: torchrec asks for the CUDA build of fbgemm-gpu, which breaks the CPU build. The pinned files are
# complete, so nothing is missing without dependency resolution. TORCH_INDEX=URL: a mirror of PyTorch's CPU index.
.venv/installed-$(DEVICE): requirements/$(DEVICE).txt requirements/dev.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python requirements/install.py $(DEVICE) -r requirements/dev.txt $(TORCH_INDEX:%=--torch-index %)
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

data/synthetic/schema.yaml: | install
	$(BIN)/raytrec prepare synthetic --out data/synthetic --rows $(ROWS)

# Requires uv. Each file states its command in its header. The files are resolved for Python 3.11. The last command
# checks that they are complete for newer versions of Python, and names packages without a wheel.
lock:
	cd requirements && uv pip compile cpu.in --excludes cpu.excludes --python-version 3.11 -o cpu.txt
	cd requirements && uv pip compile cuda.in --python-version 3.11 -o cuda.txt
	cd requirements && uv pip compile cloud.in --python-version 3.11 -o cloud.txt
	cd requirements && uv pip compile dev.in --python-version 3.11 -o dev.txt
	cd requirements && uv pip compile notebook.in --python-version 3.11 -o notebook.txt
	cd requirements && uv pip compile faiss.in --python-version 3.11 -o faiss.txt
	cd requirements && uv pip compile onnx.in --python-version 3.11 -o onnx.txt
	cd requirements && uv pip compile serve.in --no-deps --python-version 3.11 -o serve.txt
	cd requirements && cp cpu.txt next.txt && uv pip compile cpu.in next.in --overrides next.in --excludes next.excludes --python-version 3.11 -o next.txt
	cd requirements && for file in *.txt; do for python in 3.11 3.12 3.13 3.14; do \
		pins=$$(uv pip compile -q --no-header --no-annotate --only-binary :all: --python-version $$python $$file \
			$$(ls $${file%.txt}.excludes 2>/dev/null | sed 's/^/--excludes /')) \
		&& ! echo "$$pins" | grep -vxFf $$file || { echo "$$file is not complete for Python $$python"; exit 1; }; \
	done; done

clean:
	rm -rf .venv .venv-next build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
