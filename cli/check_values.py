"""Values of the settings, and contradictions among them, checked before a task."""

import re
from contextlib import suppress
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from cli.terminal import is_first_process, log
from foundation.errors import UserError, without_credentials
from foundation.settings import CONF, declared, flat_settings

# Lightning's names of the one trainer.precision for each model.dtype.
PRECISIONS = {"float32": ("32-true", "32", 32, None), "bfloat16": ("bf16-mixed", "bf16")}
# Ratio to the usual learning rate from which one is noted: sweeps cover an order of magnitude or two.
UNUSUAL = 100
ACCELERATORS = ("auto", "cpu", "cuda", "gpu", "mps", "tpu")
# Settings of conf/data/pairs.yaml that do not change the encodings in data.shards, or have a check of their own.
KEPT_BY_SHARDS = {
    *("_target_", "root", "source", "val_root", "val_count", "batch_size", "num_workers", "seed", "preview_count"),
    *("caption_dropout_rate", "reference_dropout"),
}


def check_run(cfg: DictConfig) -> None:
    """Raise a UserError for settings of a run that contradict each other."""
    repository = OmegaConf.select(cfg, "hub.push")
    in_sweep = HydraConfig.get().mode is RunMode.MULTIRUN
    if in_sweep and repository is not None and not OmegaConf.is_interpolation(cfg.hub, "push"):
        raise UserError(
            f"hub.push={repository}: the jobs of a sweep would replace each other's weights there; name one "
            "for each, hub.push='owner/name-${hydra:job.num}'"
        )
    if repository is not None and is_first_process():
        check_hub(repository)
    if (epochs := cfg.trainer.max_epochs) not in (None, -1):
        length = f"{epochs} x samples / (data.batch_size x trainer.accumulate_grad_batches x processes)"
        raise UserError(
            f"trainer.max_epochs={epochs}: the length of a run is counted in steps. Pass trainer.max_steps, {length}"
        )
    fitting, precision = PRECISIONS.get(str(cfg.model.dtype)), cfg.trainer.get("precision")
    if fitting is not None and precision not in fitting:
        other = f"is not compatible with model.dtype={cfg.model.dtype}: use {fitting[0]}"
        raise UserError(f"trainer.precision={precision} {other}, which keeps trainable weights in float32")
    if (accelerator := cfg.trainer.accelerator) not in ACCELERATORS:
        raise UserError(f"trainer.accelerator={accelerator}: choose {', '.join(ACCELERATORS)}")
    if cfg.trainer.devices == 0:
        raise UserError("trainer.devices=0: at least one device trains; -1 uses all")
    if cfg.early_stopping and cfg.callbacks.get("validation") is None:
        raise UserError("early_stopping=true: callbacks.validation=null measures nothing. Leave one out.")
    note_learning_rate(cfg)
    if cfg.sample_root is not None and cfg.callbacks.get("sample_images") is None:
        raise UserError(
            f"sample_root={cfg.sample_root}: callbacks.sample_images=null samples no images. Leave one out."
        )


def note_learning_rate(cfg: DictConfig) -> None:
    """Log a note if the learning rate is far from the one that conf/optimizer names for this optimizer."""
    name = HydraConfig.get().runtime.choices.get("optimizer")
    usual, lr = None, OmegaConf.select(cfg, "optimizer.lr")
    while isinstance(name, str) and usual is None:  # of the file, or of the one that it builds on
        file: Any = OmegaConf.to_container(OmegaConf.load(CONF / "optimizer" / f"{name}.yaml"))
        usual = file.get("optimizer", file).get("lr")
        name = next((one for one in file.get("defaults", []) if one in declared("train").groups["optimizer"]), None)
    if not usual or not lr:
        return
    expected = OmegaConf.merge(cfg, {"optimizer": {"lr": usual}}).optimizer.lr
    if max(ratio := lr / expected, 1 / ratio) >= UNUSUAL:
        what = "weights hardly change" if ratio < 1 else "training diverges"
        how = f"{max(ratio, 1 / ratio):.0f} times {'below' if ratio < 1 else 'above'} {expected:g}"
        log.warning(f"note: optimizer.lr={lr:g} is {how}, the usual rate of {cfg.optimizer._target_}: {what}")


def check_hub(repository: str) -> None:
    """Raise a UserError for an upload that cannot succeed, before anything is computed."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
        _owner, _name = repository.split("/")
    except ValueError as error:
        raise UserError(f"hub.push={repository}: give owner/name, of letters, digits, -, _ and .") from error
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"hub.push={repository}: it needs the network, but HF_HUB_OFFLINE=1 is set. Unset one of them.")
    if get_token() is None:
        raise UserError(
            f"hub.push={repository}: it needs a token that may write. Log in with `hf auth login`, or set HF_TOKEN."
        )


def check_ranges(cfg: DictConfig, script: str) -> None:
    """Raise a UserError for a setting of train.py or predict.py that is of another kind, not finite or out of range."""
    rules = {key: one.rule for key, one in declared(script).settings.items() if one.rule is not None}
    written = flat_settings(cast(dict[str, Any], OmegaConf.to_container(cfg)))
    for key, rule in rules.items():
        value, other = OmegaConf.select(cfg, key, default=...), re.fullmatch(r"\$\{([\w.]+)\}", str(written.get(key)))
        if value is ... or (other is not None and other[1] in rules):  # then it is checked by the other's name
            continue
        value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        if not rule.allows(value):
            text = re.sub("['\"]", "", str(value))
            with suppress(HydraException):
                meant = OverridesParser.create().parse_override(f"{key}={text}").value()
                if repr(meant) != repr(value) and rule.allows(meant):
                    raise UserError(f"{key}={value!r}: this is text. Write it without quotes: {key}={text}.")
            raise UserError(f"{key}={value}: must be {rule}")
    steps, warmup = (OmegaConf.select(cfg, key) for key in ("trainer.max_steps", "scheduler.num_warmup_steps"))
    if steps is not None and warmup is not None and warmup > steps:
        raise UserError(f"scheduler.num_warmup_steps={warmup}: must not be above trainer.max_steps={steps}")


def check_shards(cfg: DictConfig) -> None:
    """Raise a UserError for a setting of images next to data.shards, where it would have no effect."""
    if cfg.data.get("shards") is None:
        return
    defaults = OmegaConf.load(CONF / "data" / "pairs.yaml")
    plain = OmegaConf.merge(cfg, {"data": defaults}).data
    for key in sorted(map(str, defaults.keys() - KEPT_BY_SHARDS)):
        if (value := cfg.data[key]) != plain[key]:
            if OmegaConf.is_dict(value) and OmegaConf.is_dict(plain[key]):  # a group
                key, value = next((f"{key}.{name}", one) for name, one in value.items() if one != plain[key].get(name))
            raise UserError(
                f"data.{key}={value} applies to images, and data.shards={without_credentials(cfg.data.shards)} "
                "contains encodings. Leave it out, or encode data.root with it."
            )
