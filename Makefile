# make train   everything from nothing to a trained, evaluated model on 2 CPU workers
# make test    installs what it needs and runs the tests
# make test-fast  those that need neither Ray nor several processes: under 90 s
# make test-all  every test that there is: those of make test, test-survive, mutations, parity, golden, cluster-test
# make smoke   the smallest form of every target here, one after the other
# make test-next  the tests of upstream's parts with the newer torch, TorchRec, FBGEMM, MLflow and pyarrow of
#              requirements/next.txt, in .venv-next (7 GB)
# make mutations  2,000 broken configurations, schemas, run folders and checkpoints: each ends in a message
# make parity  the sharded run against one process, in every combination; writes benchmarks/results/parity.json
# make golden  the first 50 losses of every example configuration against the committed ones, bit for bit
# make chaos   a run on several nodes with at least 20 faults, and what faults cost; writes benchmarks/results/
# make cluster-test  every way to run on a cluster, from a notebook and in an image, for real
# make test-survive  the slower tests of whole runs, most of which disturb them
# make weight   lines of code, files, keys, words and lines of tests; make map: the list of modules in
#              ARCHITECTURE.md
# make bench   how fast training is, against the loop you would write by hand
# make bench-growth, make overhead, make curves, make bench-ingest, make bench-checkpoint, make bench-watching
#              what the figures of docs/benchmarks.md come from
# make bench-scale  the control plane with up to 1,024 simulated ranks and 1,000 tables (docs/scaling.md)
# make bench-metrics  what metrics of evaluations take of a rank's memory, at 100,000 to 10,000,000 rows
# make bench-tiers  what tables in memory and in files take of memory, and how fast they train (docs/sharding.md)
# make bench-sequences  what a step over sequences costs as they get longer
# make bench-requests  what rows that are requests with candidates save, against a row for each
# make bench-precision  what fp16 tables and quantized collectives cost in AUC
# make bench-ids  what managed ids cost, against a table without them
# make bench-ids-resume  distinct ids through few rows, resumed by other numbers of workers: what is equal
# make bench-ids-quality DATA=DIR  AUC on MovieLens-1M with managed ids, against hashing and a vocabulary
# make quality DATA=DIR  every model on public data in DIR, with 5 seeds each (docs/quality.md)
# make quality-smoke  every row of it for three steps, on made-up data
# make bench-export  what the export of a table of 30 GiB takes, and how fast its rows are looked up
# make bench-host  what the host does for a step: kernels that it would launch, milliseconds of Python
# make bench-serve  how fast raytrec serves, next to other services of the same model
# make bench-table-shards  lookups in tables apart from the replicas, next to tables in process
# make bench-online  CPU time of deltas during training, and time from a step until a service answers with it
# make soak-online  100,000 requests to a service that follows a run, while ranks, replicas and table shards are killed
# make bench-sync  the AUC that a served model loses if it is synchronized with training only at intervals
# make bench-swap  how long requests take while a service loads another export
# make soak-serve  200,000 requests to a service through swaps, damaged exports and killed replicas
# make bench-plan  memory and time that raytrec plan predicts, against measured ones
# make bench-start  how long a run takes to start, and to train again when a worker has been killed
# make gpu-check, make bench-gpu  whether a machine's GPU does what raytrec promises, and how fast (docs/gpu.md)
# make gpu-lease  tests and measurements on a GPU that is available for 30 minutes, the most valuable ones first
# The newest of these that runs and has venv; PYTHON=… is another one. Looked for only where one is needed.
PYTHONS := python3.13 python3.12 python3.11
PYTHON ?= $(or $(shell for python in $(PYTHONS); do \
	$$python -c 'import ensurepip, venv' 2>/dev/null && echo $$python && break; done), \
	$(error found no Python 3.11 to 3.13 with venv: install one (Debian, Ubuntu: python3.12 and python3.12-venv), \
	or name it: make PYTHON=/path/to/python3))
BIN := .venv/bin
# What .venv was installed for stays its device: packages for another one would break it.
INSTALLED := $(patsubst .venv/installed-%,%,$(wildcard .venv/installed-*))
DEVICE ?= $(or $(firstword $(INSTALLED)),cpu)
ifneq ($(filter-out clean,$(or $(MAKECMDGOALS),train)),)
ifneq ($(filter-out $(DEVICE),$(INSTALLED)),)
$(error .venv is for $(INSTALLED), and DEVICE=$(DEVICE) is asked for: leave DEVICE out, or run `make clean` first)
endif
endif
ROWS ?= 300000
# The folder with ml-100k, ml-1m, toys and adult.
DATA ?= .
# Tests that run at the same time; those that share the Ray cluster run one after the other.
AT_ONCE ?= 2

.PHONY: train test test-fast test-next test-all smoke mutations cluster-test test-survive parity golden chaos bench bench-growth overhead curves bench-ingest bench-checkpoint bench-watching bench-scale bench-serve bench-swap bench-online bench-sync bench-table-shards bench-start bench-metrics bench-sequences bench-requests bench-ids bench-precision quality quality-smoke gpu-check gpu-lease bench-gpu bench-host bench-plan lint format install lock clean bench-tiers bench-export soak-serve soak-online bench-ids-resume bench-ids-quality weight map

train: install data/synthetic/schema.yaml
	$(BIN)/raytrec train jobs/synthetic.yaml

test: install
	$(BIN)/pytest -n $(AT_ONCE) --dist loadgroup --no-loadscope-reorder

test-fast: install
	$(BIN)/pytest -n $(AT_ONCE) --dist loadgroup --no-loadscope-reorder -m "not processes and not parity and not survive and not cluster and not mutations"

# Losses are held against those of the older pair, bit for bit or to 1e-4 over 10 steps (tests/golden).
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

test-all: test test-survive mutations parity golden cluster-test

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
	$(BIN)/python -W ignore benchmarks/share.py

bench-checkpoint: install
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/checkpoint.py

bench-watching: install
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/watching.py

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

bench-swap: install
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/swap.py

soak-serve: install
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/serving/soak.py

soak-online: install
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/serving/soak_online.py

bench-start: install
	$(BIN)/python -W ignore benchmarks/start.py

bench-metrics: install
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/metric_memory.py

bench-sequences: install
	$(BIN)/python -W ignore benchmarks/sequences.py

bench-requests: install
	$(BIN)/python -W ignore benchmarks/grouped.py

bench-ids: install
	$(BIN)/python -W ignore benchmarks/ids.py

bench-ids-resume: install
	$(BIN)/python -W ignore benchmarks/ids_resume.py

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

bench-growth: install
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/growth.py

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

# The commands stand in the heads of the files, too. uv must be installed. Resolved for Python 3.11, the files
# have to do for the newer ones: the last command names what has no wheel or would be missing.
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
		&& ! echo "$$pins" | grep -vxFf $$file || { echo "$$file does not do for Python $$python"; exit 1; }; \
	done; done

clean:
	rm -rf .venv .venv-next build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
