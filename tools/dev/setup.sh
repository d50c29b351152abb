#!/usr/bin/env bash
# Sets up this checkout: the machine's packages where they are missing, .venv, the collection's link.
#   --for GROUPS  also the programs that groups of tests need (comma between them): tests/programs.txt
#   --lab         also what virtual nodes need: the same as `--for node`
#   --containers  also podman and mmdebstrap, where neither podman nor docker works: `--for containers`
#   --deepspeed   also torch, DeepSpeed and what checkpoints need; DeepSpeed's I/O op compiled (six minutes the first
#                 time on a machine)
#   --cluster     also what two nodes on this machine need: programs unpacked into the user's cache, none installed
#   --timed       leave the seconds taken in .venv/.setup-seconds for the table of time boxes
set -euo pipefail
if [ "$(uname -s)" != Linux ]; then
  echo "error: this is $(uname -s), and tunetool needs a control machine with Linux" >&2
  echo "hint: set it up on a Linux machine, virtual machine or container that reaches the nodes by ssh" >&2
  exit 2
fi
cd "$(dirname "$0")/../.."
started=$SECONDS
wanted=,setup, deepspeed=false cluster=false timed=false
while [ $# -gt 0 ]; do
  case $1 in
    --for)
      if [ $# -lt 2 ]; then echo "error: \`--for\` names no group" >&2; exit 2; fi
      wanted+="$2,"
      shift
      ;;
    --lab) wanted+=node, ;;
    --containers) wanted+=containers, ;;
    --deepspeed) deepspeed=true wanted+=deepspeed, ;;
    --cluster) cluster=true ;;
    --timed) timed=true ;;
    *) echo "error: \`$1\` is not an option of setup.sh" >&2; exit 2 ;;
  esac
  shift
done

python=${PYTHON:-python3}

# Without this, pip would leave Ansible out, and only the first command that needs it would fail.
need_new_python() {
  local chosen=$python
  if [ -x .venv/bin/python ]; then chosen=.venv/bin/python; fi
  if command -v "$chosen" >/dev/null && ! "$chosen" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "error: \`$chosen\` is $("$chosen" --version 2>&1), and Ansible needs Python 3.11 or newer" >&2
    if [ "$chosen" = .venv/bin/python ]; then echo "hint: remove .venv, and name another: PYTHON=python3.11 make setup" >&2
    else echo "hint: name another: PYTHON=python3.11 make setup" >&2
    fi
    exit 2
  fi
}
need_new_python

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"
  elif command -v sudo >/dev/null; then sudo "$@"
  else
    echo "error: packages are missing, and only root can install them" >&2
    echo "hint: as root: apt-get install --no-install-recommends ${packages[*]}" >&2
    exit 2
  fi
}

# Whether a line of tests/programs.txt is there already.
there() {
  case $1 in
    python3) command -v "$python" >/dev/null ;;
    python3:*) "$python" -c "import ${1#python3:}" 2>/dev/null ;;
    python3-headers) [ -e "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ;;
    container-runtime) podman info >/dev/null 2>&1 || docker info >/dev/null 2>&1 ;;
    unpacked:*) true ;;
    /*) [ -e "$1" ] ;;
    *) PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin command -v "$1" >/dev/null ;;
  esac
}

packages=()
while read -r name package needed_by; do
  case $name in "" | "#"*) continue ;; esac
  for group in ${needed_by//,/ }; do
    if [[ $wanted == *",$group,"* ]] && [[ " ${packages[*]-} " != *" $package "* ]] && ! there "$name"; then
      packages+=("$package")
    fi
  done
done <tests/programs.txt
if [ ${#packages[@]} -gt 0 ]; then
  echo "installing ${packages[*]}"
  if ! command -v apt-get >/dev/null; then
    echo "error: \`apt-get\` is missing" >&2
    echo "hint: install these by hand: ${packages[*]}" >&2
    exit 2
  fi
  as_root apt-get update -qq
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
fi

# It may be installed only now.
need_new_python

# pip compiles on one core, and every module. Here all cores compile, and packages of which hardly a module is ever imported
# are left to the first import.
compile_packages() {
  local packages
  packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # A package may carry files that this Python cannot compile. Whoever imports one gets the message.
  .venv/bin/python -m compileall -q -j 0 -x 'site-packages/(.*/)?(tests?|testing|networkx|transformers/models)/' \
    "$packages" >/dev/null || true
}

# The stamp holds what the venv was made from, so that a changed lock makes it anew and an unchanged one costs nothing.
key=$(cat pyproject.toml constraints.txt | sha256sum | cut -d' ' -f1)
if [ "$(cat .venv/.stamp 2>/dev/null)" != "$key" ]; then
  echo "making .venv"
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  .venv/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt --no-compile \
    --editable '.[control,dev]'
  compile_packages
  printf '%s' "$key" >.venv/.stamp
fi

# torch from the default index brings gigabytes of CUDA. Where there is no GPU to use them, only a CPU wheel is taken
# (from a `find-links` or `extra-index-url` of pip's configuration); without one DeepSpeed is left out, and says so.
if $deepspeed && [ "$(cat .venv/.stamp-deepspeed 2>/dev/null)" != "$key" ]; then
  pip=(.venv/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt)
  # tests/skips.py lets tests of DeepSpeed be skipped where this file is, and nowhere else.
  rm -f .venv/.deepspeed-left-out
  if [ ! -e /dev/nvidiactl ] && "${pip[@]}" --dry-run --ignore-installed --report - torch | grep -q '"name": "nvidia-'; then
    echo "DeepSpeed is left out: the only torch for this Python comes with CUDA, and there is no GPU"
    echo "hint: let pip find a CPU wheel of torch (PIP_EXTRA_INDEX_URL), or use Python 3.11 where that has one"
    touch .venv/.deepspeed-left-out
  else
    echo "installing torch and DeepSpeed"
    "${pip[@]}" --no-compile --editable '.[control,dev,deepspeed,checkpoint,engines,finetune,lightning]'
    compile_packages
    printf '%s' "$key" >.venv/.stamp-deepspeed
  fi
fi
# Compiled into the user's own cache, where the next clone finds it.
if $deepspeed && [ -e .venv/.stamp-deepspeed ]; then .venv/bin/tunetool build-ops --op async_io; fi

# Some seconds the first time. Without root there is no cluster, and its tests say so.
if $cluster && [ "$(id -u)" = 0 ]; then .venv/bin/python tests/cluster_layer.py >/dev/null || true; fi

# A clone is its own collection: ansible.cfg looks under .ansible/collections, and this leads back here.
mkdir -p .ansible/collections/ansible_collections/tunetool
ln -sfn ../../../.. .ansible/collections/ansible_collections/tunetool/node

if $timed; then echo $((SECONDS - started)) >.venv/.setup-seconds; fi
