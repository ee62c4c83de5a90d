"""task=cache, preview and clean: the data of data.root, and its caches."""

import re
import shlex
import shutil
import time
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.filesize import decimal

from cli.placement import frozen_model, place_trainer, require_card
from cli.terminal import log
from datamodules.shards.cache import USED, Cache
from foundation.errors import UserError, count_of, listing, without_credentials
from foundation.locks import ON_WINDOWS, in_use
from report.images import write_figure
from report.quoting import program
from tasks.contact_sheet import contact_sheet
from tasks.encode import build_cache, cached_data

DAY = 24 * 3600  # seconds


def cache(cfg: DictConfig, _: Path) -> None:
    """Encode data.root, as train.py does before it trains."""
    data = cached_data(cfg)
    require_card(cfg)
    place_trainer(cfg)
    filled = build_cache(cfg, data)
    manifest = filled.manifest()
    if not manifest.get("samples"):
        raise UserError(f"data.root={listing([str(root) for root in data.roots])}: no usable pair is left")
    content = f"{count_of(manifest['samples'], 'samples')}, {decimal(manifest['bytes'])}"
    log.info(f"done: {filled} contains {content}; encoded for data.buckets={data.sample_set.framing.buckets}")
    given = given_settings("data|model") if filled.on_disk else [*given_settings("model"), f"data.shards={filled}"]
    log.info(f"train on it: {' '.join([program('train'), *given])}")


def given_settings(pattern: str) -> list[str]:
    """Return the command's settings whose keys start like a regular expression, quoted for another command."""
    overrides = HydraConfig.get().overrides.task
    return [shlex.quote(override) for override in overrides if re.match(rf"({pattern})[./=]", override)]


def preview(cfg: DictConfig, output_dir: Path) -> None:
    """Draw the contact sheet of the training samples; no weights are loaded."""
    data = cached_data(cfg)
    data.configure_for(frozen_model(cfg))
    data.scan()
    write_figure(contact_sheet(data), output_dir / "preview.png")
    for note in data.notes:
        log.info(f"note: {note}")
    log.info(f"done: {output_dir / 'preview.png'}")


def clean(cfg: DictConfig, _: Path) -> None:
    """List the caches that these settings do not use; with delete=true, delete them."""
    data, module = cached_data(cfg), frozen_model(cfg)
    used = data.cache(module).folder
    if "://" in data.cache_dir:
        where = without_credentials(data.cache_dir)
        raise UserError(f"data.cache_dir={where}: task=clean deletes folders of this machine only. Name one of these.")
    # A cache of the last day, and the one that was used last, are likely to be used again.
    notes = sorted(used.parent.glob(f"{'?' * len(used.name)}/{USED}"), key=lambda note: note.stat().st_mtime)
    freed = 0
    for note in notes:
        cache, last_used = Cache(note.parent, {}), note.stat().st_mtime
        if cache.folder == used:
            continue
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(last_used))
        if note == notes[-1] or time.time() - last_used < DAY:
            log.info(f"{cache}, {_described(cache)}, last used {when}: it stays. Delete the folder to free it.")
            continue
        try:
            with in_use(cache.folder):
                size = sum(path.stat().st_size for path in cache.folder.iterdir() if path.is_file())
                log.info(f"{cache}  {decimal(size)}, {_described(cache)}, last used {when}")
                freed += size
                if cfg.delete:
                    shutil.rmtree(cache.folder, ignore_errors=ON_WINDOWS)  # where its lock is open
        except UserError:
            log.info(f"{cache} is being filled: it stays")
    if freed == 0:
        log.info(f"nothing to free in {used.parent}; {used.name} is in use by these settings")
    else:
        verb = "freed" if cfg.delete else "delete=true frees"
        log.info(f"{verb} {decimal(freed)}; {used.name}, which these settings use, stays")


def _described(cache: Cache) -> str:
    manifest = cache.manifest()
    if not (parts := manifest.get("parts")):
        return "never finished"
    model = parts.get("model", {}).get("repository", "a local model")
    return f"{manifest['samples']} samples of {parts.get('family')} ({model}, {parts.get('dtype')})"
