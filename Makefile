# make demo · make test need nothing but Python >= 3.11 and make; tests of the release and of the commit hook also need git.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BY_FILE := --dist loadfile --no-loadscope-reorder # tests/conftest.py says which files begin
TOGETHER ?= 2 # integration files at a time: much of their time is waiting
ACTION_STEPS ?= 2000 # of each seed of the simulated actions: a few minutes; 50000 is a million steps in all

unexport PYTHONDONTWRITEBYTECODE # else each worker and each process that a test starts compiles every module again

.PHONY: demo test setup integration integration-outside simulation explore fuzz fuzz-guided soak bench docs docs-run lint lock sbom release clean

demo: $(VENV)/.installed ## set up and run the main job: a simulated fleet, forecasts, placements, the console
	$(BIN)/fleetcast demo $(ARGS)

test: $(VENV)/.installed-dev ## set up and pass the tests
	$(BIN)/python -m pytest -m "not integration and not outside and not simulation" --ignore=tests/integration -n auto $(BY_FILE) $(ARGS)

integration: $(VENV)/.installed-dev ## the slower suite: real processes, a real browser
	$(BIN)/python -m pytest -m integration -n $(TOGETHER) $(BY_FILE) $(ARGS)

integration-outside: $(VENV)/.installed-dev ## suites of components that take long to build: Karpenter, scheduler-plugins, Helm, Ray, torchrun, TorchFT
	$(BIN)/python -m tests.integration.outside $(ARGS)

simulation: $(VENV)/.installed-dev ## a million steps of the service, and 40,000 of actions, by seeds; then each defect is found
	$(BIN)/python -m tests.simulation --seed 1 --seeds 20 --steps 50000 --processes 2 $(ARGS)
	$(BIN)/python -m tests.simulation --world actions --seed 1 --seeds 20 --steps $(ACTION_STEPS) --processes 2
	$(BIN)/python -m pytest tests/simulation -n 2 --dist worksteal

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --strict sdk/fleetcast_client

explore: $(VENV)/.installed-dev ## property tests with a fresh seed, for four minutes; prints how to replay a failure
	$(BIN)/python -m tests.explore $(ARGS)

fuzz: $(VENV)/.installed-dev ## ten million requests, right and wrong, with a fresh seed; ARGS="--seed N" goes on with one
	$(BIN)/python -m tests.fuzz.campaign --keep var/fuzz.json $(ARGS)

fuzz-guided: $(VENV)/.installed-dev ## the decoders, guided by coverage; goes on where it was stopped
	$(BIN)/python -m tests.fuzz.guided $(ARGS)

soak: $(VENV)/.installed-dev ## the long runs of the integration suite, longer: hours of processor time
	FLEETCAST_SOAK_GPUS=1024 FLEETCAST_SOAK_HOURS=48 CRASH_KILLS=300 CRASH_PIPELINE_KILLS=200 BACKPRESSURE_S=60 \
	$(BIN)/python -m pytest -m integration tests/integration/test_soak.py tests/integration/crash/test_kills.py \
	  tests/integration/crash/test_streams.py tests/integration/crash/test_backpressure.py $(ARGS)
	FLEETCAST_FUZZ=40 $(BIN)/python -m pytest tests/laws/test_play_laws.py tests/cli/test_hostile_options.py $(ARGS)

bench: $(VENV)/.installed ## every hot path at its sizes, one JSON line a case
	$(BIN)/fleetcast bench --json - $(ARGS)

docs-run: $(VENV)/.installed-dev ## every command of the documents, the slow ones too: command, exit code, seconds
	FLEETCAST_DOCS=slow $(BIN)/python -m pytest -m integration -n 0 tests/integration/test_documents.py $(ARGS); \
	code=$$?; cat var/docs-run.txt; exit $$code

docs: $(VENV)/.installed-dev ## the documentation as a site that needs no network: var/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict $(ARGS)

setup: $(VENV)/.installed-dev ## the development set, and a hook that checks the subjects of commits
	@$(BIN)/python deploy/commit_message.py --install

# One pip call a target; a second `make` does nothing until the lock changes.
$(VENV)/.installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "fleetcast needs Python >= 3.11, found " + sys.version.split()[0] + "; set PYTHON=/path/to/python3.11")'
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python deploy/install_locked.py requirements.lock
	@$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.lock
	@$(BIN)/python deploy/install_locked.py requirements-dev.lock
	@touch $@

lock: ## refresh the lock files (needs uv)
	uv pip compile -q --universal --python-version 3.11 --no-emit-index-url --no-annotate --no-header --generate-hashes --extra lab pyproject.toml requirements-build.in -o requirements.lock
	uv pip compile -q --universal --python-version 3.11 --no-emit-index-url --no-annotate --no-header --generate-hashes --extra dev --extra lab pyproject.toml requirements-build.in -o requirements-dev.lock
	uv pip compile -q --universal --python-version 3.11 --no-emit-index-url --no-annotate --no-header --generate-hashes --extra grpc --extra kubernetes --extra lab -c requirements-dev.lock pyproject.toml requirements-build.in -o requirements-image.lock

sbom: $(VENV)/.installed-dev ## what the lock files install, with licences and hashes, as CycloneDX JSON in var/
	$(BIN)/python -m fleetcast.cli.sbom $(ARGS)

release: $(VENV)/.installed-dev ## VERSION=0.2.0: bump, changelog, files in dist/, commit and tag; ARGS=--dry-run shows the plan
	$(BIN)/python -m deploy.release $(VERSION) $(ARGS)

clean:
	rm -rf $(VENV) var build dist
