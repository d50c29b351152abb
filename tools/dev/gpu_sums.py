"""Makes tools/tunetool/checkpoint/gpu_sums.ptx from gpu_sums.cu: `python tools/dev/gpu_sums.py LIBNVRTC`.

LIBNVRTC: `libnvrtc.so` of CUDA 11.8, from the wheel `nvidia-cuda-nvrtc-cu11`. That is the oldest that knows an H100,
and a driver reads the code of each toolkit that is not newer than itself. No GPU is needed.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "tunetool/checkpoint/gpu_sums.cu"
OPTIONS = (b"--gpu-architecture=compute_70", b"--std=c++14")


def compiled(library: ctypes.CDLL, source: bytes) -> bytes:
    """The code as PTX. Raises ``SystemExit`` with the compiler's messages."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(program), source, SOURCE.name.encode(), 0, None, None)
    status = library.nvrtcCompileProgram(program, len(OPTIONS), (ctypes.c_char_p * len(OPTIONS))(*OPTIONS))
    get = ("nvrtcGetProgramLog", "nvrtcGetPTX")[status == 0]
    getattr(library, f"{get}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(library, get)(program, text)
    if status:
        raise SystemExit(text.value.decode())
    return text.value


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    source = SOURCE.read_bytes()
    code = compiled(ctypes.CDLL(parser.parse_args().library), source).decode()
    lines = [line for line in code.splitlines() if line and not line.startswith("//")]
    head = f"// Made from {SOURCE.name}, sha256 {hashlib.sha256(source).hexdigest()}, by tools/dev/gpu_sums.py."
    SOURCE.with_suffix(".ptx").write_text("\n".join([head, *lines, ""]))


if __name__ == "__main__":
    main()
