# `make demo` runs the main job, `make test` the tests; both set up everything they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo smoke test test-all services test-services soak-views lint site bench soak oracle rapids-plans gpu-verify clean
.DEFAULT_GOAL := test

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
		echo "gpu-join needs Python 3.11 to 3.13, and $(PYTHON) is $$($(PYTHON) --version 2>&1): say PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[demo,metrics]' --group dev
	touch $@

demo: $(VENV)/.ready  ## stream a left join with retractions, stop it, resume it, check it
	$(BIN)/gpu-join demo $(ARGS)

smoke: $(VENV)/.ready  ## a minute: golden cases of Flink, bad input, engines over DataFrames, chains of joins on Spark
	$(BIN)/python -m pytest -q -n 2 -m "not slow and not thorough" --backends cpu tests/conformance tests/test_bad_input.py \
		tests/test_frames.py tests/spark/test_chains.py $(ARGS)

PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

$(VENV)/classes.jsa: $(VENV)/.ready  # without it, sessions take longer to start, and that is all
	-$(BIN)/python tests/class_archive.py $@ >$(VENV)/classes.log 2>&1

test: $(VENV)/.ready $(VENV)/classes.jsa  ## what proves the product, in about eight minutes on two cores; needs no GPU
	$(PYTEST) -m "not slow and not thorough" tests $(ARGS)

test-all: $(VENV)/.ready $(VENV)/classes.jsa  ## more proof, in about fourteen minutes; needs no GPU
	$(PYTEST) --nbmake -m "thorough and not slow" tests notebooks $(ARGS)

services:  ## Kafka, Postgres and the jars of Spark's sinks, in .services
	tests/services/start.sh .services

test-services: $(VENV)/.ready services  ## the sinks with real parts, which stay up (`tests/services/start.sh .services stop`)
	GPU_JOIN_SERVICES=.services $(BIN)/python -m pytest -q -rs tests/services $(ARGS)

soak-views: $(VENV)/.ready services  ## kills while views write (KILLS=50 SEED=1 say how many and which)
	GPU_JOIN_SERVICES=.services GPU_JOIN_KILLS=$(or $(KILLS),50) GPU_JOIN_SEED=$(or $(SEED),1) \
		$(BIN)/python -m pytest -q -s -rs tests/services/test_killed_views.py $(ARGS)

soak: $(VENV)/.ready  ## all other tests: more parameters, more random traces, then more kills, which want the machine for themselves
	HYPOTHESIS_PROFILE=soak $(PYTEST) --nbmake -m slow --ignore tests/faults tests notebooks $(ARGS)
	$(BIN)/python -m pytest -m slow tests/faults $(ARGS)

lint: $(VENV)/.ready  ## style and strict types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint docker/*.Dockerfile

site: $(VENV)/.ready  ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/peers/.ready: $(VENV)/.ready  # Pathway brings a hundred packages, so it has an environment of its own
	$(PYTHON) -m venv $(VENV)/peers
	$(VENV)/peers/bin/pip install --quiet --upgrade pip
	$(VENV)/peers/bin/pip install --quiet --group peers
	touch $@

bench: $(VENV)/.ready $(VENV)/peers/.ready  ## all benchmarks (ARGS=peers: that one), then docs/measured.md and build/measured.html
	$(BIN)/python -m benchmarks $(ARGS)
	$(BIN)/python -m benchmarks.report

oracle: $(VENV)/.ready  ## random cases against a live Flink (GPU_JOIN_ORACLE names its folder)
	$(BIN)/python -m pytest -q tests/oracle/test_flink.py tests/oracle/test_flink_multi.py $(ARGS)

rapids-plans: $(VENV)/.ready  ## every operator planned by NVIDIA's plugin, without a card (JAR names its jar)
	@test -f "$(JAR)" || { echo "say JAR=rapids-4-spark_2.13-26.08.1-cuda13.jar; docs/rapids.md says where it is from"; exit 2; }
	GPU_JOIN_RAPIDS_JAR=$(abspath $(JAR)) $(BIN)/python -m pytest -q tests/spark/test_rapids_plans.py $(ARGS)

# .venv, where there is one and nobody says PYTHON=; the extra for the card is not in it by itself
GPU_PYTHON = $(if $(filter command,$(origin PYTHON)),$(PYTHON),$(or $(wildcard $(BIN)/python),$(PYTHON)))

gpu-verify:  ## on a host with a card: contract tests, golden cases, random traces, benchmarks, demo; no skip allowed
	$(GPU_PYTHON) -m benchmarks.gpu.verify $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist
