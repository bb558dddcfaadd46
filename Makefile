# tierd: what can be built and run. `make` alone lists the targets.

SHELL := /bin/sh
.DEFAULT_GOAL := help

# Nothing of the caller's build flags may change what is built here: not those of the
# environment, and, because this is not empty, not those of Go's own settings file.
export GOFLAGS := -buildvcs=auto
export GOWORK := off
# Some packages with C code use symbols that their own headers call deprecated.
export CGO_CFLAGS := -g -O2 -Wno-deprecated-declarations

BUILD := .build
TIERD := bin/tierd
STATICCHECK_VERSION := v0.8.2
STATICCHECK := $(BUILD)/bin/staticcheck-$(STATICCHECK_VERSION)
# Directories with Go code; each directory under MODULES is a module of its own.
CODE := abi specs registry plugins gpu host
MODULES := examples/window-go examples/policy-go examples/short-tail examples/window-proc
SHORT_TAIL := examples/demo/refused/short-tail.wasm
# Where `make guests` leaves the rules of the examples.
GUESTS := $(BUILD)/guests
GUESTS_GO := window-go policy-go short-tail
ASC := $(CURDIR)/$(BUILD)/as/node_modules/.bin/asc
# How long `make fuzz` runs each fuzz test.
FUZZTIME ?= 10s
# What `make soak` and `make sim` play: from seed SEED on, SEEDS of them.
SEED ?= 1
SEEDS ?= $(if $(filter sim,$(MAKECMDGOALS)),10000,50)

.PHONY: help
help: ## list the targets
	@echo "make demo and make test are the two to begin with."
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

.PHONY: build
build: ## build bin/tierd
	@$(MAKE) --no-print-directory need-go
	go build -trimpath -o $(TIERD) ./host/cmd/tierd

.PHONY: demo
demo: build wasm ## check, serve, replay 300 requests in legs pd and probe, show two refusals (one to two minutes)
	sh examples/demo/run.sh

.PHONY: demo-pytorch
demo-pytorch: build ## two PyTorch engines that pull KV through their daemons (fetches 2 GB once, then half a minute)
	sh examples/pytorch-pd/run.sh --tierd $(TIERD)

.PHONY: wasm
wasm: ## build the demo's rule that ships as a wasm file
	cd examples/short-tail && GOOS=wasip1 GOARCH=wasm CGO_ENABLED=0 go build -buildmode=c-shared -trimpath \
		-buildvcs=false -ldflags='-s -w' -o ../demo/refused/short-tail.wasm .

# The examples' rules in four languages. Tests that need them are skipped where they are
# not built, and `make test` says that they must be.
.PHONY: guests
guests: need-go need-clang need-rust $(ASC) ## build the rules of the examples, in Go, C, Rust and AssemblyScript
	@mkdir -p $(GUESTS)
	@set -e; for g in $(GUESTS_GO); do $(MAKE) --no-print-directory -B -C examples/$$g WASM=$(CURDIR)/$(GUESTS)/$$g.wasm; done
	@for g in window-c window-rust window-as; do \
		$(MAKE) --no-print-directory -C examples/$$g WASM=$(CURDIR)/$(GUESTS)/$$g.wasm ASC=$(ASC) || exit 1; done
	cd examples/window-proc && go build -trimpath -o $(CURDIR)/$(GUESTS)/window-proc .

.PHONY: test
test: export TIERD_GUESTS := required
test: export TIERD_CHROMIUM := required
test: need-go need-gcc need-clang need-rust need-npm need-chromium fmt-check vet ## format, vet, staticcheck, race-enabled tests, fuzz seeds, wasm twins, real processes
	@env --default-signal=INT $(MAKE) --no-print-directory pytorch & \
		$(MAKE) --no-print-directory staticcheck wasm guests test-go test-modules test-judges; status=$$?; \
		wait; [ $$status -eq 0 ] || exit $$status; \
		$(MAKE) --no-print-directory test-e2e && $(MAKE) --no-print-directory test-pytorch

# What allocates much and keeps little: with its garbage collected less often it takes up to a
# quarter less time. Not so what starts daemons, which are to run as they do elsewhere.
vet staticcheck test-judges: export GOGC := 400

# Packages that the race detector does not see whole. The processes that e2e and faults start
# do not have it. The rest judges, reads or writes rules: pure functions, spread over workers in one
# place, that take three to ten times as long under it; $(RACED) are their tests of what runs at the
# same time.
PROCESSES := ./host/e2e ./host/e2e/page ./host/faults
JUDGES := ./registry/check ./registry/check/attention ./registry/stock ./registry/evidence ./registry \
	./abi/abitest ./host/rules ./host/tryout ./host/sim ./host/inspect ./host/scaffold ./host/cmd/tierd ./plugins/zoo
RACED := Workers|Budget|Cancel|Context|Concurrency|Period|Drawings|WrongKinds|Serve|Status

.PHONY: test-go
test-go: need-gcc wasm
	@set -e; all=$$(go list ./...); apart=$$(go list $(PROCESSES) $(JUDGES)); \
		raced=$$(echo "$$all" | grep -v -x -F "$$apart"); \
		echo go test -race -timeout 20m $$raced; go test -race -timeout 20m $$raced
	go test -race -timeout 20m -run '$(RACED)' ./registry ./registry/check ./registry/stock ./host/rules ./host/tryout ./host/cmd/tierd

# Then, without the race detector, all of what judges, with its whole domains (the tests
# that have a smaller one under the detector say so).
.PHONY: test-judges
test-judges: wasm
	go test -timeout 20m ./plugins/wasm ./plugins/proc -run 'Twins|Laws'
	go test -timeout 20m $(JUDGES)

# The real processes run alone, because they measure themselves against deadlines of less
# than a second, which other tests on the same two cores would eat. -count=1, because they
# build the program themselves: Go would give an old result when only the program has changed.
.PHONY: test-e2e
test-e2e: wasm
	go test -count=1 -timeout 20m ./host/e2e
	go test -count=1 -timeout 20m ./host/faults
	go test -count=1 -timeout 20m ./host/e2e/page

.PHONY: test-modules
test-modules:
	@set -e; for m in $(MODULES); do \
		echo "cd $$m && go vet . && go test ./..."; \
		(cd $$m && go vet ./... && go test ./...); \
	done

# Fetching PyTorch and unpacking it takes a minute: `make test` has it done beside the tests
# that no clock measures. What is wrong with it test-pytorch says again. A shell has what runs
# beside it ignore Ctrl-C, with which the fetching is to end as well: hence env.
.PHONY: pytorch
pytorch:
	@[ "$(PYTORCH)" = no ] || sh examples/pytorch-pd/run.sh --install || [ $$? -eq 75 ]

# PYTORCH=no leaves it out; PYTHON=/path/to/python takes a Python that has torch. Status 75
# says that PyTorch cannot be had here.
.PHONY: test-pytorch
test-pytorch: build
	@if [ "$(PYTORCH)" = no ]; then echo "skipped: examples/pytorch-pd (PYTORCH=no)"; exit 0; fi; \
	sh examples/pytorch-pd/run.sh --tierd $(TIERD) $(PAIR); status=$$?; \
	if [ $$status -eq 75 ]; then echo "skipped: examples/pytorch-pd, see above"; exit 0; fi; exit $$status

.PHONY: fmt-check
fmt-check:
	@bad=$$(gofmt -l $(CODE) examples); if [ -n "$$bad" ]; then \
		echo "not formatted (run make fmt):"; echo "$$bad"; exit 1; fi

.PHONY: fmt
fmt: ## format the Go code
	gofmt -w $(CODE) examples

.PHONY: vet
vet:
	go vet ./...

.PHONY: staticcheck
staticcheck: $(STATICCHECK)
	$(STATICCHECK) ./...

$(STATICCHECK):
	GOBIN=$(CURDIR)/$(BUILD)/tmp go install honnef.co/go/tools/cmd/staticcheck@$(STATICCHECK_VERSION)
	mkdir -p $(BUILD)/bin && mv $(BUILD)/tmp/staticcheck $@

.PHONY: fuzz
fuzz: ## run each fuzz test for FUZZTIME (10s)
	@set -e; for p in $$(go list ./...); do \
		for f in $$(go test -list '^Fuzz' $$p | grep '^Fuzz' || true); do \
			echo "$$p $$f"; go test -run '^$$' -fuzz "^$$f\$$" -fuzztime $(FUZZTIME) $$p; \
		done; \
	done

.PHONY: soak
soak: ## play SEEDS (50) random deployments end to end, from seed SEED (1), under the race detector
	go test -race -timeout 60m ./host -run TestDrawnDeployments -seed $(SEED) -seeds $(SEEDS)

# A run makes much garbage and keeps nothing: collecting it less often is a quarter faster.
.PHONY: sim
sim: export GOGC := 400
sim: ## play SEEDS (10000) simulated clusters under faults, from seed SEED (1), and print the table of faults
	go test -timeout 12h ./host/sim -run TestSeeds -v -seed $(SEED) -seeds $(SEEDS)

# Alone on the machine, or the times say how busy it was.
.PHONY: test-faults
test-faults: need-go need-net ## real daemons under real faults in every leg; writes host/session/FAULTS.md (15 minutes)
	TIERD_GARBAGE_SECONDS=30 go test -timeout 10m ./host -run TestGarbageOnEveryPort
	go test -timeout 40m ./host/faults -v -full -table $(CURDIR)/host/session/FAULTS.md

.PHONY: check-models
check-models: build ## judge every model of examples/models over its whole length (20 minutes)
	TIERD=$(CURDIR)/$(TIERD) sh examples/models/check.sh

.PHONY: bench
bench: ## run the benchmarks
	go test -run '^$$' -bench . -benchmem ./...

# Test binaries, which also run on a machine that has a GPU and no Go: cuda.test in a
# directory with gpu/cuda/testdata. TIERD_SOAK_GPU=6m makes their soaks last that long.
GPU := $(CURDIR)/$(BUILD)/gpu
.PHONY: gpu-binaries
gpu-binaries: need-go need-gcc
	@mkdir -p $(GPU)
	CGO_ENABLED=0 go test -c -trimpath -o $(GPU)/cuda.test ./gpu/cuda
	CGO_ENABLED=1 go test -c -trimpath -o $(GPU)/nvml.test ./gpu/nvml
	CGO_ENABLED=1 go test -c -trimpath -o $(GPU)/host.test ./host

.PHONY: test-gpu
test-gpu: gpu-binaries build ## tests that need an NVIDIA GPU (skipped where there is none)
	@if [ ! -e /dev/nvidiactl ]; then echo "skipped: this machine has no NVIDIA GPU (no /dev/nvidiactl)"; exit 0; fi; \
		set -e; export TIERD_GPU=required; \
		(cd gpu/cuda && $(GPU)/cuda.test -test.v -test.timeout 5m); (cd gpu/nvml && $(GPU)/nvml.test -test.v); \
		(cd host && $(GPU)/host.test -test.run '^TestGPU' -test.v -test.timeout 10m)
	@[ -e /dev/nvidiactl ] || exit 0; $(MAKE) --no-print-directory test-pytorch PAIR=--gpus

.PHONY: bench-gpu
bench-gpu: gpu-binaries ## the tables of gpu/BENCHMARKS.md (skipped where there is no NVIDIA GPU)
	@if [ ! -e /dev/nvidiactl ]; then echo "skipped: this machine has no NVIDIA GPU (no /dev/nvidiactl)"; exit 0; fi; \
		cd gpu/cuda && TIERD_GPU=required TIERD_BENCH_GPU=1 $(GPU)/cuda.test -test.run '^TestBench$$' -test.v -test.timeout 10m && \
		cd ../../host && TIERD_GPU=required TIERD_BENCH_GPU=1 $(GPU)/host.test -test.run '^TestGPUBench$$' -test.v -test.timeout 10m

.PHONY: proto
proto: ## generate the code of the .proto files again (needs protoc)
	@command -v protoc >/dev/null || { echo "protoc is missing: install the package protobuf-compiler"; exit 1; }
	GOBIN=$(CURDIR)/$(BUILD)/bin go install google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12
	GOBIN=$(CURDIR)/$(BUILD)/bin go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2
	@set -e; for p in host/engine/enginepb/engine host/session/sessionpb/session abi/kvpb/kv; do \
		echo "protoc $$p.proto"; \
		(cd $$(dirname $$p) && PATH="$(CURDIR)/$(BUILD)/bin:$$PATH" protoc --go_out=. --go_opt=paths=source_relative \
			--go-grpc_out=. --go-grpc_opt=paths=source_relative $$(basename $$p).proto); \
	done
	protoc -I tierd_engine=host/engine/enginepb --python_out=examples/pytorch-pd tierd_engine/engine.proto

.PHONY: specs
specs: ## build the embedded wasm module of the shipped rules again
	go generate ./specs/module

.PHONY: clean
clean: ## remove what was built
	rm -rf bin $(BUILD) $(SHORT_TAIL)

# What must be there, or is installed where that is possible.

.PHONY: need-go
need-go:
	@command -v go >/dev/null || { echo "Go is missing: install Go $$(sed -n 's/^go //p' go.mod) or later"; exit 1; }

.PHONY: need-gcc
need-gcc:
	@command -v gcc >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "gcc is missing (the race detector needs it); installing it"; \
		apt-get update -qq && apt-get install -y -qq gcc libc6-dev; \
	else \
		echo "gcc is missing, and the race detector needs it: install gcc and the C library's headers"; exit 1; \
	fi

.PHONY: need-clang
need-clang:
	@command -v $${CLANG:-clang} >/dev/null && command -v wasm-ld >/dev/null && exit 0; \
	$(call install,clang with its linker for WebAssembly,clang lld,install clang and lld)

.PHONY: need-rust
need-rust:
	@for r in $${RUSTC:-rustc /usr/bin/rustc}; do \
		[ -d "$$($$r --print sysroot 2>/dev/null)/lib/rustlib/wasm32-unknown-unknown" ] && exit 0; done; \
	$(call install,rustc with the library for WebAssembly,rustc libstd-rust-dev-wasm32,run rustup target add wasm32-unknown-unknown)

.PHONY: need-npm
need-npm:
	@command -v npm >/dev/null && exit 0; \
	$(call install,npm,nodejs npm,install Node.js 20 or later)

# The browser in which the tests open the page of tierd check --html.
.PHONY: need-chromium
need-chromium:
	@for b in chromium chromium-browser google-chrome; do command -v $$b >/dev/null && exit 0; done; \
	$(call install,Chromium,chromium,install chromium)

# What cuts and thins out a network. Where it cannot be had, or the caller is not root, the
# cases that need it are skipped and FAULTS.md says so.
.PHONY: need-net
need-net:
	@command -v ip >/dev/null && command -v nft >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "ip or nft is missing; installing them"; \
		apt-get update -qq && apt-get install -y -qq iproute2 nftables || true; \
	else \
		echo "ip or nft is missing: install iproute2 and nftables; cases that need them are skipped"; \
	fi

# The compiler for AssemblyScript, beside the example and not in it.
$(ASC): examples/window-as/package.json examples/window-as/package-lock.json | need-npm
	@mkdir -p $(BUILD)/as && cp $^ $(BUILD)/as/
	cd $(BUILD)/as && npm ci --no-audit --no-fund
	@touch $@

# install WHAT,PACKAGES,REMEDY: install Debian's packages, or say what to do.
define install
if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	echo "$(1) is missing; installing it"; \
	apt-get update -qq && apt-get install -y -qq $(2); \
else \
	echo "$(1) is missing: $(3)"; exit 1; \
fi
endef
