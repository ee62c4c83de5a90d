"""task=cache, preview and clean: the data of data.root, and what is encoded of it."""

import re
import shlex
import shutil
import time
from contextlib import ExitStack
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.filesize import decimal

from datamodules.errors import UserError, count_of, listing, without_credentials
from datamodules.shards.cache import USED, Cache
from datamodules.shards.manifest import MANIFEST
from tasks.contact_sheet import write_contact_sheet
from tasks.encode import build_cache, cached_data
from tasks.folders import in_use
from tasks.inspect import count_kinds, faults_of
from tasks.placement import frozen_model, place_trainer
from tasks.terminal import log


def cache(cfg: DictConfig, _: Path) -> None:
    """Encode data.root, as train.py does before it trains."""
    place_trainer(cfg)
    filled = build_cache(cfg, data := cached_data(cfg))
    manifest = filled.manifest()
    if not manifest.get("samples"):
        raise UserError(f"data.root={listing([str(root) for root in data.roots])}: no usable pair is left")
    holds = f"{count_of(manifest['samples'], 'samples')}, {decimal(manifest['bytes'])}"
    log.info(f"done: {filled} holds {holds}; encoded for data.buckets={data.sample_set.framing.buckets}")
    given = _given("data|model") if filled.on_disk else [*_given("model"), f"data.shards={filled}"]
    log.info(f"train on it: {' '.join(['python train.py', *given])}")


def _given(groups: str) -> list[str]:
    """Return the command's settings of these groups, for another command."""
    overrides = HydraConfig.get().overrides.task
    return [shlex.quote(override) for override in overrides if re.match(rf"({groups})[.=]", override)]


def preview(cfg: DictConfig, output_dir: Path) -> None:
    """Draw the contact sheet of what would be trained on; no weights are loaded."""
    data = cached_data(cfg)
    data.configure_for(frozen_model(cfg))
    data.scan()
    write_contact_sheet(data, output_dir / "preview.png")
    for note in data.notes:
        log.info(f"note: {note}")
    if found := faults_of(data):
        command = " ".join(["python predict.py task=inspect", *_given("data|model")])
        log.info(f"note: inspect: {count_kinds(found)}; this shows them: {command}")
    log.info(f"done: {output_dir / 'preview.png'}")


def clean(cfg: DictConfig, _: Path) -> None:
    """Name the caches that the present settings do not use; with delete=true, delete them."""
    data, module = cached_data(cfg), frozen_model(cfg)
    used = data.cache(module).folder
    if "://" in data.cache_dir:
        where = without_credentials(data.cache_dir)
        raise UserError(f"data.cache_dir={where}: task=clean deletes folders of this machine only. Name one of these.")
    found: list[tuple[Path, str, float]] = []
    held = ExitStack()  # until they are deleted
    for note in used.parent.glob(f"{'?' * len(used.name)}/{USED}"):
        cache = Cache(note.parent, {})
        if cache.folder == used:
            continue
        try:
            held.enter_context(in_use(cache.folder))
            found.append((cache.folder, _described(cache), note.stat().st_mtime))
        except UserError:
            log.info(f"{cache.folder} is being filled: it stays")
    # The one that was used last, even after that of these settings, is likely to be used again.
    newest = max((one for one in found if (one[0] / MANIFEST).is_file()), key=lambda one: one[2], default=None)
    if newest is not None and newest[2] > _last_used(used):
        log.info(f"{newest[0]}, {newest[1]}, was used last: it stays. Remove the folder by hand to free it")
        found.remove(newest)
    total = 0
    for folder, what, last_used in sorted(found):
        size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(last_used))
        total += size
        log.info(f"{folder}  {decimal(size)}, {what}, last used {when}")
        if cfg.delete:
            shutil.rmtree(folder)
    held.close()
    if total == 0:
        log.info(f"nothing to free in {used.parent}; {used.name} is what these settings use")
    elif cfg.delete:
        log.info(f"freed {decimal(total)}; kept {used.name}, which these settings use")
    else:
        log.info(f"delete=true frees {decimal(total)}; {used.name}, which these settings use, stays")


def _last_used(folder: Path) -> float:
    return (folder / USED).stat().st_mtime if (folder / USED).is_file() else 0.0


def _described(cache: Cache) -> str:
    """What the cache holds, in a few words."""
    manifest = cache.manifest()
    parts = manifest.get("parts", {})
    model = parts.get("model", {}).get("repository", "a local model")
    what = f"{manifest.get('samples')} samples of {parts.get('family')} ({model}, {parts.get('dtype')})"
    users = cache.users()
    by = f", used by {'; '.join(reversed(users[-3:]))}{' and others' if len(users) > 3 else ''}" if users else ""
    return (what if parts else "never finished") + by
