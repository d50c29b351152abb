# Every target sets up what it needs by itself, which is quick when done.
SHELL := /bin/bash
.DEFAULT_GOAL := help
# The groups of tests/timeboxes.toml, in the order in which they run, and what only `make test-all` has time for.
GROUPS := lint unit pages fresh containers measurement tune checkpoint finetune node
SLOW_GROUPS := frameworks
comma := ,
empty :=
GROUPS_COMMA := $(subst $(empty) $(empty),$(comma),$(GROUPS))
.PHONY: help setup setup-deepspeed check fresh test test-all bench rehearse rehearse-training dist docs clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

setup:  ## .venv with the tool and ansible-playbook, and the collection link: what a control machine needs
	@tools/dev/setup.sh

setup-deepspeed:  ## the same with torch and DeepSpeed, whose I/O op is compiled once for each user: minutes
	@tools/dev/setup.sh --deepspeed

check:  ## lint and unit tests: the fast part, for every edit
	@tools/dev/setup.sh --for lint,unit
	@.venv/bin/python tools/dev/groups.py lint unit

fresh: ## a clone of what is committed, set up and checked in a Debian 12 container that has nothing; NODE=1: in a virtual node
	@tools/dev/setup.sh --for fresh$(if $(NODE),$(comma)node)
	@.venv/bin/python tools/dev/fresh.py $(if $(NODE),--node)

test: ## everything that must hold
	@tools/dev/setup.sh --timed --for $(GROUPS_COMMA) --deepspeed --cluster
	@.venv/bin/python tools/dev/groups.py --setup-timed --pythons $(GROUPS)

test-all: ## the same and what exceeds its time box; tools/dev/slices.py --list: when each part of that was seen to pass
	@tools/dev/setup.sh --timed --for $(GROUPS_COMMA) --deepspeed --cluster
	@.venv/bin/python tools/dev/groups.py --setup-timed --pythons --slow $(GROUPS) $(SLOW_GROUPS)

bench: ## tunetool's goals for itself without a GPU, by `tunetool accept` and programs: perf/README.md; BENCH="stage tune": these alone; TARGET: a directory on the disk
	@tools/dev/setup.sh --deepspeed --cluster
	@.venv/bin/python tools/dev/benchmarks.py --target $${TARGET:-/var/tmp} $(BENCH)

rehearse: ## a virtual node with eight blank drives: built, verified, judged
	@tools/dev/setup.sh --lab
	@tools/dev/rehearse.sh

rehearse-training: ## two virtual nodes from blank drives to one record of the reference benchmarks: an hour or two under emulation
	@tools/dev/setup.sh --lab
	@tools/dev/rehearse_training.sh

dist: ## dist/: the wheel, which carries the collection, the sdist, and the collection for ansible-galaxy
	@tools/dev/setup.sh
	@.venv/bin/python tools/dev/dist.py

docs: ## build/site/index.html: the documents as a site that needs no server and no network
	@tools/dev/setup.sh --for docs
	@.venv/bin/python tools/dev/website.py

clean: ## .venv and what tests left; never the cached image
	@rm -rf .venv .ansible build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
