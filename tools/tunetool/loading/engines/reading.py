"""How an engine's weight files are read: the options of `--model-loader-extra-config`, and the tensors of the files
that the engine chose."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import os
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from tunetool.errors import TunetoolError, UsageProblem
from tunetool.loading.fill import Progress
from tunetool.loading.iteration import iterate
from tunetool.loading.safetensors_files import files_of

Tensors: TypeAlias = Generator[tuple[str, torch.Tensor], None, None]
"""Names with their tensors."""
NUMBERS = ("threads", "buffer_bytes", "ahead_bytes")
DEVICE = "device"
_RANKS = "LOCAL_WORLD_SIZE"
"""By which a load knows how many ranks of its machine load the same files (``local_ranks``)."""


class Options(NamedTuple):
    """``arguments`` are those of ``iterate``; ``device``: where the engine gets the tensors, None for its choice."""

    arguments: dict[str, Any]
    device: str | None


def options_of(extra: Any, of_engine: Collection[str] = ()) -> tuple[Options, dict[str, Any]]:
    """The options, and those which the engine itself knows and takes. Raises ``ValueError`` for any other."""
    if not isinstance(extra, Mapping):
        raise ValueError(f"`--model-loader-extra-config` is no JSON object but `{extra!r}`")
    known = sorted({*NUMBERS, DEVICE, *of_engine})
    for name, value in extra.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(f'`{each}`' for each in known)}"
            raise ValueError(
                f"`--model-loader-extra-config`: `{name}` is no option of the load format tunetool; {hint}"
            )
        if name in NUMBERS and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"`--model-loader-extra-config`: `{name}` is a whole number above 0, not `{value!r}`")
        if name == DEVICE and not isinstance(value, str):
            raise ValueError(f'`--model-loader-extra-config`: `device` is a name such as "cpu", not `{value!r}`')
    arguments = {name: extra[name] for name in NUMBERS if name in extra}
    return Options(arguments, extra.get(DEVICE)), {name: extra[name] for name in of_engine if name in extra}


def chosen(prepare: Callable[[], tuple[str, list[str], bool]], path: str, own: Any) -> tuple[str, list[str]] | None:
    """Directory and files that the engine chose by ``prepare``, its own function.

    None for files of another kind that the model names by itself (``own`` is not None), such as a .pt of one layer
    beside the weights. Raises ``ValueError`` for a model whose weights are of another kind.
    """
    try:
        folder, files, _ = prepare()
    except RuntimeError as error:
        if "Cannot find any model weights" in str(error):
            raise _no_safetensors(path) from error
        raise
    if all(file.endswith(".safetensors") for file in files):
        return folder, files
    if own is None:
        raise _no_safetensors(path)
    return None


def _no_safetensors(path: str) -> ValueError:
    return ValueError(
        f"`{path}` holds no .safetensors files, and the load format tunetool reads no others; "
        "leave `--load-format` out for .bin, .pt and .gguf"
    )


def tensors(
    files: Sequence[str],
    device: str | torch.device,
    options: Options,
    *,
    ranks: int = 1,
    told: Callable[[str], None] = lambda _: None,
) -> Tensors:
    """Name and tensor of everything in ``files``. ``ranks``: processes of this machine that may read them too.
    ``told``: called with what was read, how fast and from where.

    Raises ``ValueError`` and ``RuntimeError``, since an engine shows their words alone, and not a hint beside them.
    """
    last: list[Progress] = []
    for path in _together(files):
        try:
            with contextlib.closing(
                iterate(path, options.device or device, progress=last.append, **options.arguments)
            ) as tensors_of_path:
                with _with_ranks(ranks):  # known when the files are opened, and threads started
                    first = list(itertools.islice(tensors_of_path, 1))
                while first:
                    yield first.pop()
                yield from tensors_of_path
        except UsageProblem as error:
            raise ValueError(error.line) from error
        except TunetoolError as error:
            raise RuntimeError(error.line) from error
        told(f"`{path}`: {last[-1]}" if last else f"`{path}` holds no tensors")
        last.clear()


def _together(files: Sequence[str]) -> list[Path]:
    """Their directory where they are all that its index lists, so that they are read in one pass; else each of them."""
    paths = sorted(map(Path, files))
    directories = {path.parent for path in paths}
    if len(directories) == 1:
        (directory,) = directories
        with contextlib.suppress(UsageProblem):
            if set(files_of(directory)) == {path.name for path in paths}:
                return [directory]
    return paths


@contextlib.contextmanager
def _with_ranks(count: int) -> Iterator[None]:
    """Engines start several processes and set no variable that says how many, as launchers of training do."""
    if _RANKS in os.environ or count < 2:
        yield
        return
    os.environ[_RANKS] = str(count)
    try:
        yield
    finally:
        os.environ.pop(_RANKS, None)
