"""Files that are there whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datamodules.errors import UserError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; what was written there takes `path`'s place at the end.

    When writing fails, an older file at `path` stays as it was and the temporary one is removed.

    Raises:
        UserError: the file could not be written (disk full, no permission).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        kept = "; the file that was there before is untouched" if path.exists() else ""
        raise UserError(f"cannot write {path}: {error.strerror or error}{kept}") from error
    finally:
        temporary.unlink(missing_ok=True)
