"""Kinds and ranges of all numbers and switches among the settings, and contradictions, checked before a task."""

import math
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from cli.resolvers import CONF
from cli.terminal import is_first_process
from foundation.errors import UserError, without_credentials


@dataclass(frozen=True)
class Number:
    """A number from `least` to `most`.

    Attributes:
        above: whether `least` itself is excluded.
        multiple: a divisor of the number.
        also: alternatives to a number: values; list, of numbers; dict, of patterns to numbers.
        alone: whether a number itself is allowed.
        length: that of a list; 0 for any but none.
    """

    least: float = -math.inf
    most: float = math.inf
    whole: bool = False
    above: bool = False
    multiple: int = 1
    also: tuple[Any, ...] = ()
    alone: bool = True
    length: int = 0

    def allows(self, value: Any) -> bool:
        """Return whether a setting may have this value."""
        if type(value) in self.also:
            right_length = len(value) == self.length if self.length else bool(value)
            return right_length and all(map(self._is_number, value.values() if isinstance(value, dict) else value))
        return value in self.also or (self.alone and self._is_number(value))

    def _is_number(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        in_range = self.least < value <= self.most if self.above else self.least <= value <= self.most
        return math.isfinite(value) and in_range and (self.multiple == 1 or value % self.multiple == 0)

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        if self.multiple > 1:
            kind += f", a multiple of {self.multiple},"
        if self.least > -math.inf:
            kind += f" above {self.least:g}" if self.above else f" from {self.least:g}"
            kind += f" to {self.most:.10g}" if self.most < math.inf else "" if self.above else " on"
        names = {None: "null", list: f"a list of {self.length or 'them'}", dict: "a mapping {PATTERN:NUMBER}"}
        others = " or ".join(names.get(one, one) for one in self.also)
        if not self.alone:
            return f"{others} with {kind} each"
        return f"{kind} or {others}" if others else kind


class Switch(Number):
    """True or false."""

    def allows(self, value: Any) -> bool:
        return isinstance(value, bool) or value in self.also

    def __str__(self) -> str:
        return " or ".join(["true", "false", *self.also])


COUNT, COUNT_OR_NONE = Number(1, whole=True), Number(0, whole=True)
SEED = Number(0, 2**32 - 1, whole=True)
POSITIVE, FROM_ZERO, SHARE = Number(0, above=True), Number(0), Number(0, 1)
# Larger images would need hundreds of gigabytes.
RESOLUTION = Number(16, 4096, whole=True)

# Settings of both commands by their rule. A setting that only repeats another one needs none.
_SETTINGS: dict[Number, str] = {
    Switch(): """
        trainer.enable_checkpointing trainer.enable_model_summary trainer.enable_progress_bar
        trainer.use_distributed_sampler model.offload.encoders model.offload.activations data.upscale
        data.flip data.caption_per_line data.alpha_mask early_stopping callbacks.validation.early_stopping hub.private
        adapter.full_matrix adapter.use_rslora adapter.text_encoders optimizer.fused optimizer.nesterov
        optimizer.decouple optimizer.use_bias_correction optimizer.safeguard_warmup optimizer.scale_parameter
        optimizer.relative_step optimizer.warmup_init model.quantization.rotation captioner.quantization.rotation fuse
        delete overwrite
    """,
    Switch(also=("auto",)): "model.compile",
    SEED: "seed model.seed data.seed data.source.seed adapter.seed objective.seed callbacks.sample_images.seed",
    COUNT: """
        trainer.num_nodes trainer.max_steps trainer.accumulate_grad_batches trainer.log_every_n_steps
        model.optimization.max_nonfinite_steps model.sampling.num_inference_steps data.batch_size data.preview_count
        data.crop_count keep_checkpoints callbacks.validation.patience callbacks.lora_checkpoint.keep_checkpoints
        adapter.rank objective.preserve.every scheduler.num_training_steps num_images_per_prompt num_inference_steps
        batch_size captioner.max_new_tokens captioner.batch_size model.recipe.rank model.recipe.max_steps
        model.recipe.accumulate_grad_batches model.recipe.batch_size
    """,
    COUNT_OR_NONE: """
        model.offload.blocks data.num_workers data.val_count trainer.num_sanity_val_steps save_every sample_every
        adapter.min_rank scheduler.num_warmup_steps callbacks.lora_checkpoint.save_every
        callbacks.sample_images.sample_every callbacks.sample_images.count
    """,
    replace(COUNT, also=(None,)): "data.max_tokens_per_batch rank",
    FROM_ZERO: """
        model.training_guidance_scale objective.preserve.outside objective.preserve.weight optimizer.lr
        optimizer.weight_decay model.recipe.lr model.timesteps.logit_std
    """,
    replace(FROM_ZERO, also=(None,)): """
        model.sampling.guidance_scale model.sampling.true_cfg_scale guidance_scale true_cfg_scale
        trainer.gradient_clip_val
    """,
    POSITIVE: """
        objective.loss.delta objective.beta optimizer.eps optimizer.fallback_lr_scale adapter.alpha_rank_scale
    """,
    replace(POSITIVE, also=(None,)): """
        watchdog_minutes adapter.alpha adapter.lora_plus_ratio model.recipe.alpha ema.half_life model.sampling.shift
        shift
    """,
    SHARE: """
        data.caption_dropout_rate data.reference_dropout objective.mask.outside objective.edit_weight.floor
        model.recipe.caption_dropout_rate
    """,
    Number(0, 0.999, above=True, also=(None,)): "model.sampling.shift_terminal shift_terminal",
    replace(POSITIVE, also=("dynamic", None)): "model.timesteps.shift",
    Number(): "model.timesteps.logit_mean",
    Number(1): "objective.contrastive_guidance",
    Number(1, 100_000, whole=True): "data.source.count",
    RESOLUTION: "model.resolution",
    replace(RESOLUTION, also=(None, list)): "data.resolution",
    Number(16, whole=True, multiple=16, also=(None,)): "height width",
    Number(256, whole=True): "max_area callbacks.sample_images.max_area captioner.max_area",
    Number(256, whole=True, also=(None,)): "model.vae_image_size model.condition_image_size",
    Number(32, whole=True): "model.output_resolution",
    Number(1, 512, whole=True): "model.max_sequence_length",
    Number(-1, whole=True, also=("auto", list)): "trainer.devices",
    Number(-1, whole=True, also=(None,)): "trainer.max_epochs",
    Number(-1, whole=True): "adapter.decompose_factor",
    Number(2, whole=True): "adapter.block_size",
    Number(1, whole=True, also=(None, dict), alone=False): "adapter.rank_pattern",
    Number(0, above=True, also=(None, dict), alone=False): "adapter.alpha_pattern adapter.lr_pattern",
    Number(0, 0.99999): "optimizer.momentum adapter.dropout",
    Number(0, 0.99999, also=(list,), alone=False, length=2): "optimizer.betas",
    Number(also=(None, list)): "lora_weights merge_weights",
    Number(also=(None, list, dict)): "lora_scale",
    # At 0.289 all checkpoints have equal weights (arXiv 2312.02696, equation 123).
    Number(0, 0.28, above=True, also=(list,)): "average.relative_std",
}
TRAINING = {key: rule for rule, keys in _SETTINGS.items() for key in keys.split()}
PREDICTION = TRAINING | dict.fromkeys(("seed", "model.seed", "data.seed"), replace(SEED, also=(list,)))
RULES = {"train": TRAINING, "predict": PREDICTION}
# Lightning's names of the one trainer.precision for each model.dtype.
PRECISIONS = {"float32": ("32-true", "32", 32, None), "bfloat16": ("bf16-mixed", "bf16")}
# Mappings whose keys are part of the value: patterns or roles.
OPEN_MAPPINGS = ("data.columns", "adapter.rank_pattern", "adapter.alpha_pattern", "adapter.lr_pattern", "lora_scale")
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
    if cfg.early_stopping and cfg.callbacks.get("validation") is None:
        raise UserError("early_stopping=true: callbacks.validation=null measures nothing. Leave one out.")
    if cfg.sample_root is not None and cfg.callbacks.get("sample_images") is None:
        raise UserError(
            f"sample_root={cfg.sample_root}: callbacks.sample_images=null samples no images. Leave one out."
        )


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
    for key, rule in RULES[script].items():
        value = OmegaConf.select(cfg, key, default=...)
        value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        if value is not ... and not rule.allows(value):
            text = re.sub("['\"]", "", str(value))
            with suppress(HydraException):
                meant = OverridesParser.create().parse_override(f"{key}={text}").value()
                if repr(meant) != repr(value) and rule.allows(meant):
                    raise UserError(f"{key}={value!r}: this is text. Write it without quotes: {key}={text}.")
            raise UserError(f"{key}={value}: must be {rule}")
    for key in ("pretrained_model_name_or_path", "transformer_name_or_path", "vae_name_or_path", "comfyui"):
        if not isinstance(name := OmegaConf.select(cfg, f"model.{key}"), str | None):
            raise UserError(f"model.{key}={name}: must be one path or name")
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
        if cfg.data[key] != plain[key]:
            raise UserError(
                f"data.{key}={cfg.data[key]} applies to images, and data.shards={without_credentials(cfg.data.shards)} "
                "contains encodings. Leave it out, or encode data.root with it."
            )
