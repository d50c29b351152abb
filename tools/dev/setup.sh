#!/usr/bin/env bash
# Sets up this checkout: the machine's packages where they are missing, .venv, the collection's link.
#   --lab         also what virtual nodes and fio measurements need
#   --deepspeed   also torch, DeepSpeed and what checkpoints need; DeepSpeed's I/O op compiled (six minutes the first
#                 time on a machine)
#   --containers  also podman and mmdebstrap, where neither podman nor docker works
#   --cluster     also what two nodes on this machine need: programs unpacked into the user's cache, none installed
#   --timed       leave the seconds taken in .venv/.setup-seconds for the table of time boxes
set -euo pipefail
cd "$(dirname "$0")/../.."
started=$SECONDS
lab=false containers=false deepspeed=false cluster=false timed=false
for argument in "$@"; do
  case $argument in
    --lab) lab=true ;;
    --containers) containers=true ;;
    --deepspeed) deepspeed=true ;;
    --cluster) cluster=true ;;
    --timed) timed=true ;;
    *) echo "error: \`$argument\` is not an option of setup.sh" >&2; exit 2 ;;
  esac
done

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

packages=()
python=${PYTHON:-python3}
command -v "$python" >/dev/null || packages+=(python3)
"$python" -c 'import ensurepip' 2>/dev/null || packages+=(python3-venv)
if $lab; then
  command -v qemu-system-x86_64 >/dev/null || packages+=(qemu-system-x86)
  command -v qemu-img >/dev/null || packages+=(qemu-utils)
  command -v mmdebstrap >/dev/null || packages+=(mmdebstrap)
  command -v mke2fs >/dev/null || [ -x /sbin/mke2fs ] || packages+=(e2fsprogs)
  command -v fio >/dev/null || packages+=(fio)
  command -v ssh >/dev/null || packages+=(openssh-client)
  command -v shellcheck >/dev/null || packages+=(shellcheck)
fi
if $deepspeed; then
  [ -e /usr/include/libaio.h ] || packages+=(libaio-dev)
  command -v c++ >/dev/null || packages+=(g++)
fi
if $cluster; then
  command -v ip >/dev/null || packages+=(iproute2)
  command -v ssh >/dev/null || [[ " ${packages[*]} " == *" openssh-client "* ]] || packages+=(openssh-client)
fi
if $containers; then
  if ! podman info >/dev/null 2>&1 && ! docker info >/dev/null 2>&1; then
    # runc beside it: crun refuses the hybrid cgroups that some build machines still have.
    packages+=(podman runc)
  fi
  command -v mmdebstrap >/dev/null || [[ " ${packages[*]} " == *" mmdebstrap "* ]] || packages+=(mmdebstrap)
fi
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

# The stamp holds what the venv was made from, so that a changed lock makes it anew and an unchanged one costs nothing.
key=$(cat pyproject.toml constraints.txt | sha256sum | cut -d' ' -f1)
if [ "$(cat .venv/.stamp 2>/dev/null)" != "$key" ]; then
  echo "making .venv"
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  .venv/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt \
    --editable '.[control,dev]'
  printf '%s' "$key" >.venv/.stamp
fi

# torch from the default index brings gigabytes of CUDA. Where there is no GPU to use them, only a CPU wheel is taken
# (from a `find-links` or `extra-index-url` of pip's configuration); without one DeepSpeed is left out, and says so.
if $deepspeed && [ "$(cat .venv/.stamp-deepspeed 2>/dev/null)" != "$key" ]; then
  pip=(.venv/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt)
  if [ ! -e /dev/nvidiactl ] && "${pip[@]}" --dry-run --ignore-installed --report - torch | grep -q '"name": "nvidia-'; then
    echo "DeepSpeed is left out: the only torch for this Python comes with CUDA, and there is no GPU"
    echo "hint: let pip find a CPU wheel of torch (PIP_EXTRA_INDEX_URL), or use Python 3.11 where that has one"
  else
    echo "installing torch and DeepSpeed"
    "${pip[@]}" --editable '.[control,dev,deepspeed,checkpoint,engines,finetune,lightning]'
    printf '%s' "$key" >.venv/.stamp-deepspeed
  fi
fi
# Compiled into the user's own cache, where the next clone finds it.
if $deepspeed && [ -e .venv/.stamp-deepspeed ]; then .venv/bin/tunetool prebuild --op async_io; fi

# Some seconds the first time. Without root there is no cluster, and its tests say so.
if $cluster && [ "$(id -u)" = 0 ]; then .venv/bin/python tests/cluster_layer.py >/dev/null || true; fi

# A clone is its own collection: ansible.cfg looks under .ansible/collections, and this leads back here.
mkdir -p .ansible/collections/ansible_collections/tunetool
ln -sfn ../../../.. .ansible/collections/ansible_collections/tunetool/node

if $timed; then echo $((SECONDS - started)) >.venv/.setup-seconds; fi
