"""Makes the files that are read, in the directory of the run: tokens in Megatron's format, images, and tar shards."""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path

from tunetool.bench.dataset import corpus, megatron
from tunetool.bench.dataset.corpus import Extent
from tunetool.bench.dataset.engines import NUMBER_BYTES
from tunetool.bench.dataset.megatron import TokenFiles
from tunetool.bench.dataset.request import Request
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure.progress import MovingProgress
from tunetool.node.units import format_size
from tunetool.training.data import pictures

SHARDS = 8
RECORD_SHARD_BYTES = 128 << 20
"""Bytes of a TFRecord shard: TensorFlow's guide to performance of input advises files of 100 MB and more."""
_RECORD_FRAME = 16
"""Length and two sums of a record in TFRecord."""
_NAME = "corpus_text_document"
"""As Megatron names the files of the key ``text``."""
_TAR_MEMBER = 512 + 511
"""Bytes that a member takes beside its content, at most."""
_TAR_END = 10240


@dataclass(frozen=True)
class Images:
    """The same images in files of their own and in tar shards."""

    directory: Path
    shards: Path


def extent_of(request: Request) -> Extent:
    """Of the corpus: that of a user is read once. Raises ``UsageProblem``, which names a broken line."""
    if request.jsonl is not None:
        return corpus.measure_corpus(request.jsonl, request.key)
    text = request.size // megatron.TOKEN_BYTES
    documents = max(1, text // corpus.MEAN_DOCUMENT)
    return Extent(documents, max(1, text - documents))


def room_for_tokens(request: Request, extent: Extent) -> int:
    """Bytes that the corpus, if it is made, and the token files take at most. Documents have no fixed length."""
    made = 0 if request.jsonl is not None else 2 * extent.text_bytes
    return (
        made
        + megatron.bytes_of_tokens(extent.documents, extent.text_bytes)
        + megatron.bytes_of_index(2 * extent.documents)
    )


def make_tokens(request: Request, extent: Extent, directory: Path, progress: MovingProgress) -> TokenFiles:
    """The .bin and the .idx. A made corpus is a file as a user's, gone when they are written.

    Raises ``CannotJudge`` for a line that was broken since the corpus was looked at.
    """
    source = request.jsonl or directory / "corpus.jsonl"
    key = request.key if request.jsonl is not None else "text"
    if request.jsonl is None:
        with progress.moving("a corpus is made", extent.text_bytes) as tick:
            corpus.write_made_corpus(source, extent.text_bytes, request.seed, tick)
    size = megatron.bytes_of_tokens(extent.documents, extent.text_bytes)
    with progress.moving(f"`{source.name}` becomes tokens, {format_size(size)}", size) as tick:
        try:
            written = megatron.write_token_files(directory / _NAME, corpus.read_documents(source, key), tick)
        except UsageProblem as error:
            raise CannotJudge(error.message, error.hint) from None
    if request.jsonl is None:
        source.unlink()
    return written


def make_images(request: Request, directory: Path, progress: MovingProgress) -> Images:
    """The images and the shards, which Pillow and numpy are there for."""
    made = Images(directory / "pictures" / "images", directory / "shards")
    made.directory.parent.mkdir()
    made.shards.mkdir()
    size = pictures.room(request.images, request.image_side, request.image_side)
    with progress.moving(f"{request.images} images are made", size) as tick:
        pictures.write(
            made.directory.parent, request.images, request.image_side, request.image_side, request.seed, tick
        )
    write_shards(made)
    return made


def record_shards(samples: int, sample_bytes: int) -> int:
    """Number of TFRecord shards."""
    return max(1, min(samples, -(-samples * sample_bytes // RECORD_SHARD_BYTES)))


def room_for_records(samples: int, sample_bytes: int) -> int:
    """Bytes that the TFRecord shards take."""
    return samples * (sample_bytes + NUMBER_BYTES + _RECORD_FRAME)


def write_shards(images: Images) -> None:
    """Tar files with the same images, each image in one of them."""
    paths = sorted(images.directory.iterdir())
    count = min(SHARDS, len(paths))
    for number in range(count):
        with tarfile.open(images.shards / f"{number:06d}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for path in paths[number::count]:
                archive.add(path, arcname=path.name, recursive=False)


def room_for_images(request: Request) -> int:
    """Bytes that images and shards take at most."""
    one = pictures.room(request.images, request.image_side, request.image_side)
    return 2 * one + request.images * _TAR_MEMBER + SHARDS * _TAR_END
