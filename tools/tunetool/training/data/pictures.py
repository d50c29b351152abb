"""Synthetic pictures with a question that only the picture answers: its colour. No download is needed."""

from __future__ import annotations

import io
import json
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tunetool.ctrl_c import Threads
from tunetool.errors import UsageProblem
from tunetool.stage.destination import making
from tunetool.stage.room import need_room

NAME = "tunetool_colours"
COLOURS = {
    "red": (190, 20, 20),
    "green": (20, 170, 20),
    "blue": (20, 20, 190),
    "yellow": (190, 180, 20),
    "cyan": (20, 180, 190),
    "magenta": (190, 20, 190),
    "orange": (190, 100, 20),
    "white": (195, 195, 195),
}
"""Colours with distinct initial letters, which the first token identifies; each channel leaves room for noise."""
QUESTIONS = ("What colour is this picture?", "Which colour do you see?", "Name the colour of the picture.")
_NOISE = 60
_QUALITY = 95
BYTES_PER_PIXEL = 1.45
"""Upper estimate for a JPEG of such noise without chroma subsampling: 3.2 MB at 1928x1208."""


def make(
    directory: Path,
    images: int,
    width: int = 1928,
    height: int = 1208,
    seed: int = 0,
    tick: Callable[[int], None] = lambda _: None,
) -> None:
    """Make ``directory``: a dataset in LLaMA-Factory's format (dataset_info.json, sharegpt) with ``images`` samples.

    A JPEG of 1928x1208 is about 3 MB, so that a batch of 2 is 6 MB. The picture and question of a sample depend only on
    ``seed`` and the sample's number. ``tick`` gets the bytes written so far. Raises ``UsageProblem`` where the
    directory exists, ``CannotJudge`` where the dataset does not fit.
    """
    with making(directory, "the pictures") as built:
        need_room(built, room(images, width, height), f"{images} pictures of {width}x{height}")
        write(built, images, width, height, seed, tick)


def room(images: int, width: int, height: int) -> int:
    """Upper limit in bytes of the space that ``make`` needs, with every file rounded up to whole pages."""
    return images * (int(width * height * BYTES_PER_PIXEL) + 8192) + (1 << 20)


def write(
    directory: Path, images: int, width: int, height: int, seed: int, tick: Callable[[int], None] = lambda _: None
) -> None:
    """As ``make``, into an existing empty directory; on an error, what is written remains."""
    if images < 1 or width < 28 or height < 28:
        raise UsageProblem(f"`{images}` pictures of {width}x{height}", "at least 1, of 28x28 pixels or more")
    import numpy as np

    (directory / "images").mkdir()
    noise = np.random.default_rng(seed).integers(0, _NOISE, (height, width, 3), dtype=np.uint8)
    written, samples, cores = 0, list[dict[str, object]](), len(os.sched_getaffinity(0))
    # Pillow releases the GIL while it encodes a JPEG.
    with Threads(cores, "tunetool-pictures") as threads:
        make_one = partial(_write_sample, directory, seed, noise)
        for sample, size in threads.each(make_one, range(images)):
            samples.append(sample)
            written += size
            tick(written)
    (directory / "data.json").write_text(json.dumps(samples, indent=1) + "\n")
    entry = {
        "file_name": "data.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "images"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    }
    (directory / "dataset_info.json").write_text(json.dumps({NAME: entry}, indent=2) + "\n")


def _write_sample(directory: Path, seed: int, noise: Any, number: int) -> tuple[dict[str, object], int]:
    import numpy as np
    from PIL import Image

    chosen = random.Random(f"{seed}-{number}")  # noqa: S311  (a choice of colours, not a secret)
    name, colour = chosen.choice(list(COLOURS.items()))
    shift = (chosen.randrange(noise.shape[0]), chosen.randrange(noise.shape[1]))
    picture = np.roll(noise, shift, (0, 1)) + np.array(colour, dtype=np.uint8)
    path = directory / "images" / f"{number:06d}.jpg"
    encoded = io.BytesIO()
    Image.fromarray(picture).save(encoded, "JPEG", quality=_QUALITY, subsampling=0)
    with path.open("wb") as stream:
        # A tmpfs with `huge=within_size` gives huge pages to nothing beyond the size.
        stream.truncate(len(encoded.getbuffer()))
        stream.write(encoded.getbuffer())
    messages = [
        {"role": "user", "content": f"<image>{chosen.choice(QUESTIONS)}"},
        {"role": "assistant", "content": name},
    ]
    return {"messages": messages, "images": [f"images/{path.name}"]}, path.stat().st_size
