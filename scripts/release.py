"""Build a release into dist/ and check it; nothing is uploaded.

Checked are: the changelog has a section of this version; twine accepts both files; no link of the
description is relative; the wheel installs into a fresh environment and runs there.

Run it with `make release REPOSITORY=https://host/owner/flops`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
PINS = {name: str(ROOT / "constraints.txt") for name in ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")}
USES = ["import flops; print(flops.__version__)", "import flops.cli.main"]


def main() -> None:
    """Build, check, and stop.

    Raises:
        SystemExit: A check failed.
    """
    version = re.findall(r'"([\d.]+)"', (ROOT / "src/flops/version.py").read_text("utf-8"))[0]
    if f"## [{version}]" not in (ROOT / "CHANGELOG.md").read_text("utf-8"):
        sys.exit(f"CHANGELOG.md has no section [{version}]: give what is unreleased this heading")
    if not os.environ.get("FLOPS_REPOSITORY"):
        print("no REPOSITORY=https://.. was given: that of git's remote origin is used, if any")
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT))
    built = sorted(map(str, DIST.iterdir()))
    run(sys.executable, "-m", "twine", "check", "--strict", *built)
    wheel = next(path for path in DIST.glob("*.whl"))
    relative = relative_links(wheel)
    if relative:
        sys.exit(f"links that an index cannot follow: {relative[:5]}; give REPOSITORY=https://..")
    with tempfile.TemporaryDirectory() as fresh:
        venv.create(fresh, with_pip=True)
        binaries = Path(fresh) / ("Scripts" if os.name == "nt" else "bin")
        run(str(binaries / "pip"), "install", "--quiet", str(wheel))
        for code in USES:
            run(str(binaries / "python"), "-W", "error", "-c", code)
        run(str(binaries / "flops"), "--help", quiet=True)
    print(
        f"{', '.join(Path(path).name for path in built)} in dist/; to upload: twine upload dist/*"
    )


def relative_links(wheel: Path) -> list[str]:
    """Links of the description that are neither absolute nor within it."""
    with ZipFile(wheel) as files:
        name = next(n for n in files.namelist() if n.endswith(".dist-info/METADATA"))
        text = message_from_bytes(files.read(name)).get_payload(decode=True).decode()
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [
        link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"https:|#", link)
    ]


def run(*command: str, quiet: bool = False) -> None:
    """Run a command outside of the repository, so that the installed copy is imported."""
    print("$", *command, flush=True)
    output = subprocess.DEVNULL if quiet else None
    environment = {**os.environ, **PINS}
    elsewhere = tempfile.gettempdir()
    if subprocess.run(command, cwd=elsewhere, env=environment, stdout=output).returncode:
        sys.exit("the release is not complete")


if __name__ == "__main__":
    main()
