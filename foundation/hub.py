"""Small files of repositories, in a folder or on huggingface.co."""

import logging
from functools import lru_cache
from pathlib import Path

from foundation.errors import UserError

log = logging.getLogger("retouch")


def repository_file(repository: str, filename: str, revision: str | None = None) -> Path | None:
    """Return the path of a small file of the repository, downloaded if necessary; None if it does not exist.

    Raises:
        UserError: the repository does not exist, is gated, or cannot be reached.
    """
    if Path(repository).is_dir():
        path = Path(repository, filename)
        return path if path.is_file() else None
    return _hub_file(repository, filename, revision)


@lru_cache(maxsize=64)
def _hub_file(repository: str, filename: str, revision: str | None) -> Path | None:
    from huggingface_hub import errors, hf_hub_download

    log.info(f"looking for {filename} of {repository} on huggingface.co")
    try:
        return Path(hf_hub_download(repository, filename, revision=revision))
    except errors.GatedRepoError as error:
        raise UserError(
            f"{repository} is gated: accept its licence at https://huggingface.co/{repository}, then log in with "
            "`hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{repository} has no revision {revision}") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{repository} is neither a folder here nor a repository you may read on huggingface.co: check the name; "
            "if it is private, log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.HFValidationError as error:
        raise UserError(f"{repository} is neither a folder here nor the name of a repository (owner/name)") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError) as error:
        if isinstance(error, errors.RemoteEntryNotFoundError):
            return None
        if isinstance(error, errors.LocalEntryNotFoundError) and _cached_without(repository, filename, revision):
            log.info(f"{repository} was downloaded without {filename}, and huggingface.co cannot be reached")
            return None
        raise UserError(
            f"{repository} is not a folder here and huggingface.co cannot be reached: check the network (and "
            "HF_HUB_OFFLINE), or pass the path of a downloaded copy; it is not in the hub's cache"
        ) from error


def _cached_without(repository: str, filename: str, revision: str | None) -> bool:
    """Return whether the repository is in the hub's cache without this file."""
    from huggingface_hub import errors, snapshot_download

    try:
        snapshot_download(repository, revision=revision, allow_patterns=[filename], local_files_only=True)
    except errors.LocalEntryNotFoundError:
        return False
    return True
