"""Record what commands show in a terminal in their first ten seconds, each line with the second at which it came.

    python benchmarks/first_seconds.py > benchmarks/results/first_seconds.txt

The commands run in a pseudo-terminal of 120 columns, in a temporary folder, and are stopped after ten seconds.
"""

import fcntl
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECONDS = 10.0
COMMANDS = (
    "train.py",
    "train.py task=dry_run",
    f"predict.py image={ROOT / 'assets/shapes/example.png'} prompt='turn the shapes blue'",
    "predict.py task=inspect data=shapes",
)
# What terminals do not show: colours, and movements of the cursor.
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def record(command: str, folder: str) -> None:
    """Run a command of this repository and print its lines as they come."""
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    script, *arguments = shlex.split(command)
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, ROOT / script, *arguments],
        cwd=folder,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    print(f"$ python {command.replace(f'{ROOT}/', '')}")
    while (left := started + SECONDS - time.monotonic()) > 0:
        if not select.select([screen], [], [], left)[0]:
            break
        try:
            shown = os.read(screen, 2**16).decode(errors="replace")
        except OSError:  # the command has ended
            break
        for line in re.split(r"[\r\n]+", ESCAPES.sub("", shown)):
            if line.strip():
                print(f"{time.monotonic() - started:5.2f} s  {line.rstrip()}")
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
    process.wait()
    print()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        for one in COMMANDS:
            record(one, place)
