#!/usr/bin/env bash
# Sets up this checkout. Without an option what a control machine needs: .venv with the tool and Ansible, and the
# collection's link; no package of the machine, no compiler, no root. What the machine lacks for that is named in one line.
# With any option also what tests need in .venv, and the machine's packages where they are missing:
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
wanted=, tests=false deepspeed=false cluster=false timed=false
while [ $# -gt 0 ]; do
  tests=true
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

if $tests; then wanted+=setup,; fi

new_enough() { command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# Ubuntu 22.04 and RHEL 9 have a newer Python beside the one that is called python3.
python=${PYTHON:-}
for name in python3 python3.13 python3.12 python3.11; do
  if [ -z "$python" ] && new_enough "$name"; then python=$name; fi
done
python=${python:-python3}

# The line that installs a package on this machine: Debian's name, then that of RHEL and its kind.
package_line() {
  local system sudo=""
  # shellcheck disable=SC1090  # the machine's
  system=$(. "${TUNETOOL_OS_RELEASE:-/etc/os-release}" 2>/dev/null && echo " ${ID:-} ${VERSION_ID:-} ${ID_LIKE:-} ") || true
  if [ "$(id -u)" != 0 ]; then sudo="sudo "; fi
  case $system in
    " debian 10 "* | " debian 11 "* | " ubuntu 20.04 "*) echo "this release has no package of it; the next one has" ;;
    *" debian "* | *" ubuntu "*) echo "${sudo}apt-get install $1" ;;
    *" rhel "* | *" fedora "* | *" centos "*) echo "${sudo}dnf install $2" ;;
    *) echo "install Python 3.11 or newer, with its modules venv and ensurepip, by this machine's package manager" ;;
  esac
}

# Without this, pip would leave Ansible out, and only the first command that needs it would fail.
need_new_python() {
  local chosen=$python
  if [ -x .venv/bin/python ]; then chosen=.venv/bin/python; fi
  if ! command -v "$chosen" >/dev/null; then
    # A set-up for tests installs it.
    if $tests && [ "${1:-}" != last ] && command -v apt-get >/dev/null; then return; fi
    echo "error: \`$chosen\` is missing" >&2
    echo "hint: $(package_line "python3 python3-venv" python3.11)" >&2
    exit 2
  fi
  if ! new_enough "$chosen"; then
    echo "error: \`$chosen\` is $("$chosen" --version 2>&1), and Ansible needs Python 3.11 or newer" >&2
    if [ "$chosen" = .venv/bin/python ]; then echo "hint: remove .venv, and name another: PYTHON=python3.11 make setup" >&2
    else echo "hint: name another: PYTHON=python3.11 make setup; where there is none: $(package_line python3.11-venv python3.11)" >&2
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

packages=() needs=()
while read -r name package needed_by; do
  case $name in "" | "#"*) continue ;; esac
  for group in ${needed_by//,/ }; do
    if [[ $wanted == *",$group,"* ]] && ! there "$name"; then
      needs+=("$package $name $needed_by")
      if [[ " ${packages[*]-} " != *" $package "* ]]; then packages+=("$package"); fi
      break
    fi
  done
done <tests/programs.txt

# Leaves out what this release has no package of, as Ubuntu of Chromium: one name would stop the whole `apt-get install`,
# and the tests that need the program fail by its name.
leave_out_unknown() {
  local line name="" package program needed_by need known=" " kept=()
  while IFS= read -r line; do
    case $line in
      "  Candidate: (none)") ;;
      "  Candidate: "*) known+="$name " ;;
      [!\ ]*:) name=${line%:} ;;
    esac
  done < <(LC_ALL=C apt-cache policy "${packages[@]}" || true)
  for need in "${needs[@]}"; do
    read -r package program needed_by <<<"$need"
    if [[ $known != *" $package "* ]]; then
      echo "\`$program\` ($needed_by) is left out: apt has no package \`$package\`"
    elif [[ " ${kept[*]-} " != *" $package "* ]]; then
      kept+=("$package")
    fi
  done
  packages=(${kept[@]+"${kept[@]}"})
}

if [ ${#packages[@]} -gt 0 ]; then
  if ! command -v apt-get >/dev/null; then
    echo "error: \`apt-get\` is missing" >&2
    echo "hint: install these by hand: ${packages[*]}" >&2
    exit 2
  fi
  as_root apt-get update -qq
  leave_out_unknown
fi
if [ ${#packages[@]} -gt 0 ]; then
  echo "installing ${packages[*]}"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
fi

# It may be installed only now.
need_new_python last
if [ ! -x .venv/bin/python ] && ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  echo "error: \`$python\` has no ensurepip, so that it makes no .venv" >&2
  echo "hint: $(package_line "python$version-venv" "python$version")" >&2
  exit 2
fi

# pip compiles on one core, and every module. Here all cores compile, and packages of which hardly a module is ever imported
# are left to the first import.
compile_packages() {
  local packages
  packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # A package may carry files that this Python cannot compile. Whoever imports one gets the message.
  local rarely='tests?|testing|ansible_test|ansible/modules|networkx|pygments/lexers|transformers/models'
  .venv/bin/python -m compileall -q -j 0 -x "site-packages/(.*/)?($rarely)/" "$packages" >/dev/null || true
}

# The stamp holds what the venv was made from, so that a changed lock makes it anew and an unchanged one costs nothing;
# after it, `tests` where .venv has what tests need, too.
key=$(cat pyproject.toml constraints.txt | sha256sum | cut -d' ' -f1)
extras=control stamp=$key
if $tests; then extras=control,dev stamp="$key tests"; fi
made=$(cat .venv/.stamp 2>/dev/null || true)
if [ "$made" != "$stamp" ] && [ "$made" != "$key tests" ]; then
  echo "making .venv"
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  .venv/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt --no-compile \
    --editable ".[$extras]"
  compile_packages
  printf '%s' "$stamp" >.venv/.stamp
  $tests || echo "done; \`.venv/bin/tunetool doctor\` names what this machine lacks for which command"
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
