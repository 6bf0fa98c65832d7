# make help tells what there is.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

export CGO_ENABLED := 0
export PATH := $(PATH):/usr/sbin:/sbin
# Tests run what this Makefile built.
export PODWEIR_BIN := $(CURDIR)/bin

BPF_SOURCES := $(wildcard bpf/*.c bpf/*.h)
PATH_CORE := $(wildcard test/bench/path/core/*.c test/bench/path/core/*.h)
GENERATED := internal/bpf/dp_bpfel.go
CLANG_FORMAT ?= clang-format-19
PACKAGES ?= ./...
# What the programs say they are; empty: the tag or commit of the tree.
VERSION ?=

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

.PHONY: deps
deps: ## installs what is missing (apt, as root)
	@tools/deps.sh

.PHONY: generate
generate: $(GENERATED) ## compiles bpf/ and writes its Go bindings

$(GENERATED): $(BPF_SOURCES) tools/bpf2go.sh go.mod | deps
	@echo "compiling bpf/"
	@tools/bpf2go.sh
	@touch $@

.PHONY: build
build: generate ## builds bin/podweir-agent, bin/podweir-cni, bin/podweir and the test programs
	@mkdir -p bin
	@stamp=$$(tools/ldflags.sh "$(VERSION)"); \
	go build -ldflags "$$stamp" -o bin/podweir-agent ./cmd/agent; \
	go build -ldflags "$$stamp" -o bin/podweir-cni ./cmd/cni; \
	go build -ldflags "$$stamp" -o bin/podweir ./cmd/podweir
	@go build -o bin/ ./test/tools/pw-server ./test/tools/pw-client
	@go build -o bin/pw-demo ./test/demo
	@go build -o bin/pw-bench-path ./test/bench/path
	@go build -o bin/pw-bench-control ./test/bench/control
	@go build -o bin/pw-bench-programs ./test/bench/programs
	@clang-19 -O2 -Wall -Wextra -Werror -static -o bin/pw-path-core $(filter %.c,$(PATH_CORE))

IMAGE ?= podweir:dev

.PHONY: image
image: generate ## builds bin/podweir-image.tar, a container image; IMAGE=NAME:TAG VERSION=v1.2.3
	@tools/image.sh bin/podweir-image.tar $(IMAGE) "$(VERSION)"

.PHONY: fmt
fmt: ## formats Go and C
	@gofmt -w $$(git ls-files '*.go')
	@$(CLANG_FORMAT) -i $(BPF_SOURCES) $(PATH_CORE)

.PHONY: lint lint-gofmt lint-vet lint-clang-format
lint: lint-gofmt lint-vet lint-clang-format ## checks formats and vets

lint-gofmt:
	@out=$$(gofmt -l $$(git ls-files '*.go')); \
	if [[ -n $$out ]]; then echo "not formatted, run make fmt:"; echo "$$out"; exit 1; fi

lint-vet: generate
	@go vet ./...

lint-clang-format: | deps
	@$(CLANG_FORMAT) --dry-run -Werror $(BPF_SOURCES) $(PATH_CORE)

.PHONY: test
test: root deps build ## runs every check and test (as root); PACKAGES=./internal/... for some
	@go build -o bin/testsum ./tools/testsum
	@bin/testsum \
		-check 'gofmt=$(MAKE) -s lint-gofmt' \
		-check 'go vet=$(MAKE) -s lint-vet' \
		-check 'clang-format=$(MAKE) -s lint-clang-format' -- \
		-count=1 -timeout 30m $(PACKAGES)

.PHONY: test-kernels
test-kernels: root deps generate ## runs the datapath on Linux 6.1 and 6.12 in emulated machines, and here
	@go test -count=1 -v ./test/kernels

.PHONY: demo
demo: root deps build ## shows two nodes at work, checks what it shows, cleans up (as root)
	@bin/pw-demo run

.PHONY: demo-keep
demo-keep: root deps build ## the same, and leaves it up to look around
	@bin/pw-demo keep

.PHONY: demo-down
demo-down: root ## removes what demo-keep left
	@if [[ ! -x bin/pw-demo ]]; then $(MAKE) deps build; fi
	@bin/pw-demo down

.PHONY: cluster
cluster: root build image ## Kubernetes on this machine, three nodes, podweir on it (as root); PROXY=kube-proxy-nftables CNI=bridge for its peers
	@tools/deps.sh cluster
	@go build -o bin/pw-cluster ./test/realcluster/pw-cluster
	@bin/pw-cluster up -proxy '$(PROXY)' -cni '$(CNI)'

.PHONY: test-chart
test-chart: ## renders the Helm chart and the kustomize base and compares them
	@cd deploy/helm/test && go vet ./... && go test -count=1 ./...

.PHONY: test-cluster
test-cluster: ## tests what runs on the cluster that make cluster brought up; CLUSTER_TESTS='-run Policy'
	@go vet -tags realcluster ./test/realcluster/...
	@go build -o bin/pw-cluster ./test/realcluster/pw-cluster
	@tools/older-image.sh bin/older/podweir-image.tar podweir:older
	@go test -tags realcluster -count=1 -timeout 30m -parallel 64 -v -exec '$(CURDIR)/bin/pw-cluster outside' $(CLUSTER_TESTS) ./test/realcluster/e2e

.PHONY: test-all
test-all: root deps build image ## make test, then the tests of clusters that it brings up for that and takes down
	@go build -o bin/testsum ./tools/testsum
	@go build -o bin/pw-cluster ./test/realcluster/pw-cluster
	@tools/test-all.sh

.PHONY: cluster-down
cluster-down: root ## removes what make cluster brought up, but for its cache
	@go build -o bin/pw-cluster ./test/realcluster/pw-cluster
	@bin/pw-cluster down

BENCH ?=

.PHONY: bench
bench: root deps build ## podweir beside kube-proxy and plain forwarding, 10 minutes (as root); BENCH='--modes ... --paths ... --rounds ...'
	@bin/pw-bench-path peers --json bin/bench.json --svg bin/bench $(BENCH)

BENCH_PATH ?= --json bin/bench-path.json

.PHONY: bench-path
bench-path: root deps build ## measures the path against plain kernel forwarding (as root); BENCH_PATH='--family 6 ...'
	@bin/pw-bench-path $(BENCH_PATH)

BENCH_STREAMS ?= --streams 2 --json bin/bench-streams.json

.PHONY: bench-streams
bench-streams: root deps build ## iperf3 over every mode, offloads on and off: throughput, retransmits, checksum errors (as root)
	@command -v iperf3 >/dev/null || DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends iperf3 >/dev/null
	@bin/pw-bench-path $(BENCH_STREAMS)

BENCH_CONTROL ?= --json bin/bench-control.json

.PHONY: bench-control
bench-control: root deps build ## the control plane beside the real kube-proxy's, up to 10,000 services (as root); BENCH_CONTROL='--sizes 1000x4 ...'
	@bin/pw-bench-control $(BENCH_CONTROL)

BENCH_PROGRAMS ?= -benchtime 3x -count 5

.PHONY: bench-programs
bench-programs: root deps build ## nanoseconds of each program on each path (as root); bin/bench-programs.txt is for benchstat
	@go test -run '^$$' -bench 'Nothing|Programs|LiveFlows|Many' $(BENCH_PROGRAMS) ./test/packet > bin/bench-programs.txt || { cat bin/bench-programs.txt; exit 1; }
	@bin/pw-bench-programs --json bin/bench-programs.json < bin/bench-programs.txt

.PHONY: root
root:
	@[[ $$(id -u) == 0 ]] || { echo "this needs root: network namespaces and BPF programs" >&2; exit 1; }

.PHONY: clean
clean: ## removes what was built and generated
	@rm -rf bin {internal/bpf,test/packet/parts}/*_bpfe[lb].{go,o}
