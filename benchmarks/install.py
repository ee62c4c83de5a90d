"""Count the versions of each package that pip tries in a fresh environment, and measure the time to resolve.

    python benchmarks/install.py
    python benchmarks/install.py --what .

Installs nothing; what pip downloads on the way is deleted. Exit status 1 if pip tries more versions of a package than
allowed, since then it searches: a release of one package that another does not admit yet makes it go back through them.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
import venv
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What pip -v says when it looks at a version, by the name of its file.
LOOKED_AT = re.compile(
    r"^(?:Downloading|Using cached|Processing|Obtaining dependency information for .* from) "
    r"(?:\S*/)?(?P<name>[\w.]+(?:-[a-zA-Z_]\w*)*)-(?P<version>\d[^-\s]*?)(?:-\S+\.whl|\.tar\.gz|\.zip)"
)


def tried(lines: list[str]) -> dict[str, list[str]]:
    """Return the versions that pip looked at, by package, in order."""
    versions: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        if found := LOOKED_AT.match(line.strip()):
            known = versions[re.sub(r"[-_.]+", "-", found["name"]).lower()]
            if found["version"] not in known:
                known.append(found["version"])
    return versions


def resolve(what: str, limit: float) -> tuple[list[str], float, bool]:
    """pip's output, the seconds that it took, and whether it came to an end."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        command = [f"{folder}/bin/pip", "install", "--dry-run", "-v", "--no-cache-dir", "-e", what]
        start = time.perf_counter()
        try:
            output, ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=limit), True
            print(output.stderr if output.returncode else "", end="", file=sys.stderr)
            text, ended = output.stdout, output.returncode == 0
        except subprocess.TimeoutExpired as stopped:
            text, ended = (stopped.stdout or b"").decode(), False
        return text.splitlines(), time.perf_counter() - start, ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", default=".[dev]", help="as pip takes it")
    parser.add_argument("--most", type=int, default=3, help="versions of one package")
    parser.add_argument("--seconds", type=float, default=1200, help="give up after them")
    args = parser.parse_args()
    lines, seconds, ended = resolve(args.what, args.seconds)
    versions = tried(lines)
    for name, found in sorted(versions.items(), key=lambda item: -len(item[1])):
        if len(found) > 1:
            print(f"{name}: {len(found)} versions: {' '.join(found)}")
    most = max(map(len, versions.values()), default=0)
    print(f"{len(versions)} packages, at most {most} versions of one, {seconds:.0f} s{'' if ended else ', no end'}")
    sys.exit(not ended or most > args.most)


if __name__ == "__main__":
    main()
