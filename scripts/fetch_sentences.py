"""Download 3,000 labelled sentences and write them as three splits, for fine-tuning.

The sentences (of reviews of films, products and restaurants: imdb, amazon, yelp; 500 negative and
500 positive ones of each) come in the npm package sentiment, under the MIT licence, as test data.
It names no source; they are the Sentiment Labelled Sentences of Kotzias, Denil, de Freitas and
Smyth, "From Group to Individual Labels using Deep Features" (KDD 2015), which the UCI repository
distributes under CC BY 4.0.

The splits are those of MeZO's protocol: 1,000 sentences for training, 500 for validation, 1,000
for testing, each with as many negative as positive ones and a third of each source, by a fixed
seed. Sentences that occur twice are taken once, and rows without a class are skipped.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np

from flops.storage.plain import parse_json

PACKAGE = "sentiment@5.0.2"
SHA512 = "ZeC3y0JsOYTdwujt5uOd7ILJNilbgFzUtg/LEG4wUv43LayFNLZ28ec8+Su+h3saHlJmIwYxBzfDHHZuiMA15g=="
SOURCES = ("imdb", "amazon", "yelp")
LABELS = ("negative", "positive")
SIZES = {"train": 1000, "validation": 500, "test": 1000}
SEED = 0

Sentence = tuple[str, str]  # text and source


def download(folder: Path) -> Path:
    """Download the package without installing it.

    Raises:
        FileNotFoundError: npm is not installed.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError(
            f"npm is not installed: install Node.js, or pass the archive of {PACKAGE} with "
            "--archive"
        )
    command = [npm, "pack", PACKAGE, "--silent", "--pack-destination", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return next(folder.glob("*.tgz"))


def check(archive: Path) -> None:
    """Verify the checksum of the package.

    Raises:
        ValueError: It is another file.
    """
    with archive.open("rb") as file:
        found = base64.b64encode(hashlib.file_digest(file, "sha512").digest()).decode()
    if found != SHA512:
        raise ValueError(f"{archive} is not the archive of {PACKAGE}: its checksum is another")


def read(archive: Path) -> dict[str, list[list[Sentence]]]:
    """The sentences by label, in a list for each source; only files of fixed names are read.

    Raises:
        ValueError: A file has another form.
    """
    found: dict[str, list[list[Sentence]]] = {label: [] for label in LABELS}
    seen: set[str] = set()
    with tarfile.open(archive) as packed:
        for source in SOURCES:
            file = packed.extractfile(f"package/test/fixtures/{source}.json")
            rows = parse_json(file.read()) if file is not None else None
            if not isinstance(rows, list):
                raise ValueError(f"{source}.json is not a list of sentences")
            lists: dict[str, list[Sentence]] = {label: [] for label in LABELS}
            for row in rows:
                text = row["text"].strip()
                if row["class"] is None or not text or text in seen:
                    continue
                seen.add(text)
                lists[LABELS[row["class"]]].append((text, source))
            for label in LABELS:
                found[label].append(lists[label])
    return found


def split(sentences: dict[str, list[list[Sentence]]]) -> dict[str, list[dict[str, str]]]:
    """The three splits, balanced, in a fixed random order."""
    source = np.random.RandomState(SEED)  # numpy guarantees its stream
    found: dict[str, list[dict[str, str]]] = {name: [] for name in SIZES}
    for label in LABELS:
        shuffled = [[of[i] for i in source.permutation(len(of))] for of in sentences[label]]
        in_turn = [s for s in chain(*zip_longest(*shuffled)) if s is not None]
        start = 0
        for name, size in SIZES.items():
            end = start + size // len(LABELS)
            if end > len(in_turn):
                raise ValueError(f"{len(in_turn)} {label} sentences are too few for the splits")
            rows = in_turn[start:end]
            found[name] += [{"text": t, "label": label, "source": s} for t, s in rows]
            start = end
    return {name: [rows[i] for i in source.permutation(len(rows))] for name, rows in found.items()}


def write(splits: dict[str, list[dict[str, str]]], folder: Path) -> None:
    """Write folder/split.jsonl and a note about the source, all or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        (made / "README.md").write_text(f"# Sentences\n\n{__doc__}", encoding="utf-8")
        for name, rows in splits.items():
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (made / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        made.rename(folder)


def main() -> None:
    """Download, verify and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write; must not exist yet")
    archive = f"archive of {PACKAGE}, if it was downloaded before"
    parser.add_argument("--archive", type=Path, metavar="FILE", help=archive)
    given = parser.parse_args()
    if given.folder.exists():
        parser.error(f"{given.folder} exists; choose a new folder, or use this one")
    try:
        with tempfile.TemporaryDirectory() as scratch:
            file = given.archive or download(Path(scratch))
            check(file)
            splits = split(read(file))
        write(splits, given.folder)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"no sentences were written: {error}")
    counts = ", ".join(f"{len(rows):,} for {name}" for name, rows in splits.items())
    print(f"{counts} in {given.folder}")


if __name__ == "__main__":
    main()
