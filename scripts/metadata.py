"""Metadata of the package that depends on where the repository is: URLs, and links of the README.

The page of an index has no files beside it, so relative links of the README become absolute ones,
to the files of this version. The address is FLOPS_REPOSITORY (`make release REPOSITORY=..`), or
git's remote `origin` if that is an https address. Without either there are no URLs of the
repository, and links stay as they are.

Run by hatchling whenever the package is built.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

AUTHORS = "https://github.com/RTkenny/FLOPS-Forward-Learning-with-OPtimal-Sampling"
LINK = re.compile(r"(!?)(\[(?:[^]\[]|\[[^]]*\])*\]\()(?!https?:|#)([^)\s]+)(?=\))")


class Metadata(MetadataHookInterface):
    """`readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill them in."""
        root = Path(self.root)
        text = (root / "README.md").read_text("utf-8")
        address = repository(root)
        metadata["urls"] = {"Paper's own code": AUTHORS}
        if address:
            version = re.findall(r'"([\d.]+)"', (root / "src/flops/version.py").read_text("utf-8"))
            text = absolute(text, address, f"v{version[0]}")
            metadata["urls"] |= urls(address)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def repository(root: Path) -> str | None:
    """Address of the repository, without a slash or .git at its end."""
    address = os.environ.get("FLOPS_REPOSITORY", "")
    if not address and (root / ".git").exists():
        asked = ["git", "remote", "get-url", "origin"]
        try:
            address = subprocess.run(asked, cwd=root, capture_output=True).stdout.decode().strip()
        except OSError:  # no git
            return None
    address = address.rstrip("/").removesuffix(".git")
    return address if re.fullmatch(r"https://[^\s@]+", address) else None


def urls(address: str) -> dict[str, str]:
    """Links of the project."""
    return {
        "Homepage": address,
        "Documentation": f"{address}/blob/main/docs/index.md",
        "Source": address,
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def absolute(text: str, address: str, tag: str) -> str:
    """The README with absolute links; pictures as files, the others as pages."""

    def link(found: re.Match[str]) -> str:
        kind = "raw" if found[1] else "blob"
        return f"{found[1]}{found[2]}{address}/{kind}/{tag}/{found[3]}"

    return LINK.sub(link, text)
