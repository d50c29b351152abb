#!/usr/bin/env bash
# One virtual node with eight blank drives: built by site.yml, verified, judged. The node stays up to look at;
# `tunetool lab down` ends it.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PATH="$PWD/.venv/bin:$PATH"
step() { printf '\n== %s (%d s)\n' "$1" "$SECONDS"; }

step "a node with eight blank NVMe drives"
tunetool lab up --nodes 1
tunetool lab reset node1
step "ansible-playbook site.yml -i inventory/lab"
ansible-playbook site.yml -i inventory/lab
step "tunetool verify -i inventory/lab --expect 50MBps"
# A figure that emulation reaches: what is rehearsed is the way, not the speed.
echo "the node stays up: \`tunetool lab ssh node1\` looks at it, \`tunetool lab down\` ends it" >&2
tunetool verify -i inventory/lab --expect 50MBps --duration 2s
