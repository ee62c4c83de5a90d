"""What every number and switch among the settings may be: one table, looked through when the config is composed."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from datamodules.errors import UserError
from tasks.values import ByPattern, Number, Rule, Switch

COUNT = Number(1, whole=True)
COUNT_OR_NONE = Number(0, whole=True)
SEED = Number(0, 2**32 - 1, whole=True)
POSITIVE = Number(0, above=True)
PIXELS = Number(1024, whole=True, null=True)
SIDE = Number(16, whole=True, multiple=16, null=True)
SCALE = Number(0)
SHIFT = Number(0, 1000, above=True, null=True)
SHIFT_TERMINAL = Number(0, 0.999, above=True, null=True)
# Beyond it a training step would take hundreds of gigabytes.
RESOLUTION = Number(16, 4096, whole=True)

# By key; a * at the end of a part stands for anything. A setting that only repeats another one needs no rule.
SHARED: dict[str, Rule] = {
    "seed": SEED,
    "trainer.devices": Number(-1, whole=True, words=("auto",), several=True),
    "trainer.num_nodes": COUNT,
    "trainer.enable_*": Switch(),
    "trainer.use_distributed_sampler": Switch(),
    "model.seed": SEED,
    "model.max_nonfinite_steps": COUNT,
    "model.max_sequence_length": Number(1, 512, whole=True),
    "model.training_guidance_scale": SCALE,
    "model.resolution": RESOLUTION,
    "model.vae_image_size": PIXELS,
    "model.condition_image_size": PIXELS,
    "model.compile": Switch(),
    "model.offload.encoders": Switch(),
    "model.offload.activations": Switch(),
    "model.offload.blocks": COUNT_OR_NONE,
    "model.quantization.bnb_4bit_use_double_quant": Switch(),
    "model.quantization.cache": Switch(),
    "model.timesteps.logit_mean": Number(-10, 10),
    "model.timesteps.logit_std": Number(0, 10),
    "model.timesteps.shift": Number(0, 1000, above=True, null=True, words=("dynamic",)),
    "model.sampling.num_inference_steps": COUNT,
    "model.sampling.guidance_scale": Number(0, null=True),
    "model.sampling.true_cfg_scale": Number(0, null=True),
    "model.sampling.shift": SHIFT,
    "model.sampling.shift_terminal": SHIFT_TERMINAL,
    "data.resolution": replace(RESOLUTION, null=True, several=True),
    "data.upscale": Switch(),
    "data.crop_count": Number(1, 100, whole=True),
    "data.flip": Switch(),
    "data.caption_per_line": Switch(),
    "data.alpha_mask": Switch(),
    "data.batch_size": COUNT,
    "data.num_workers": COUNT_OR_NONE,
    "data.val_count": COUNT_OR_NONE,
    "data.preview_count": COUNT,
    "data.seed": SEED,
    "data.caption_dropout_rate": Number(0, 1),
    "data.max_tokens_per_batch": Number(1, whole=True, null=True),
    "data.shard_size": COUNT,
    "data.source.count": COUNT,
    "data.source.seed": SEED,
    "data.source.change_weight": POSITIVE,
}
# After the settings that take these, whose names the user knows.
RECIPE: dict[str, Rule] = {
    "model.recipe.lr": Number(0),
    "model.recipe.rank": COUNT,
    "model.recipe.alpha": Number(0, above=True, null=True),
    "model.recipe.max_steps": COUNT,
    "model.recipe.batch_size": COUNT,
    "model.recipe.accumulate_grad_batches": COUNT,
    "model.recipe.caption_dropout_rate": Number(0, 1),
}
# By pattern or by role: mappings whose keys are part of the value.
OPEN_MAPPINGS = ("data.columns", "adapter.rank_pattern", "adapter.alpha_pattern", "adapter.lr_pattern", "lora_scale")
TRAINING: dict[str, Rule] = {
    **SHARED,
    "trainer.max_steps": COUNT,
    "trainer.accumulate_grad_batches": COUNT,
    "trainer.log_every_n_steps": COUNT,
    "trainer.gradient_clip_val": Number(0, null=True),
    "trainer.max_epochs": Number(-1, whole=True, null=True),
    "trainer.num_sanity_val_steps": COUNT_OR_NONE,
    "save_every": COUNT_OR_NONE,
    "sample_every": COUNT_OR_NONE,
    "keep_checkpoints": COUNT,
    "early_stopping": Switch(),
    "callbacks.validation.early_stopping": Switch(),
    "callbacks.validation.patience": Number(1, whole=True),
    "watchdog_minutes": replace(POSITIVE, null=True),
    "ema.half_life": Number(1, null=True),
    "hub.private": Switch(),
    "adapter.rank": COUNT,
    "adapter.alpha": Number(0, above=True, null=True),
    "adapter.decompose_factor": Number(-1, whole=True),
    "adapter.full_matrix": Switch(),
    "adapter.block_size": Number(2, whole=True),
    "adapter.use_rslora": Switch(),
    "adapter.rank_pattern": ByPattern(1, whole=True),
    "adapter.alpha_pattern": ByPattern(0, above=True),
    "adapter.lr_pattern": ByPattern(0, above=True),
    "adapter.lora_plus_ratio": replace(POSITIVE, null=True),
    "adapter.dropout": Number(0, 0.999),
    "adapter.seed": SEED,
    "adapter.min_rank": COUNT_OR_NONE,
    "adapter.alpha_rank_scale": Number(0.01, 10),
    "adapter.text_encoders": Switch(),
    "objective.loss.delta": POSITIVE,
    "objective.mask.outside": Number(0, 1),
    "objective.edit_weight.floor": Number(0, 1),
    "objective.contrastive_guidance": Number(1),
    "objective.preserve.outside": SCALE,
    "objective.preserve.weight": SCALE,
    "objective.preserve.every": COUNT,
    "objective.seed": SEED,
    "objective.beta": POSITIVE,
    "optimizer.lr": Number(0),
    "optimizer.betas": Number(0, 0.99999, several=True),
    "optimizer.eps": POSITIVE,
    "optimizer.momentum": Number(0, 0.99999),
    "optimizer.weight_decay": Number(0),
    "optimizer.fallback_lr_scale": POSITIVE,
    "optimizer.fused": Switch(),
    "optimizer.nesterov": Switch(),
    "optimizer.decouple": Switch(),
    "optimizer.use_bias_correction": Switch(),
    "optimizer.safeguard_warmup": Switch(),
    "optimizer.scale_parameter": Switch(),
    "optimizer.relative_step": Switch(),
    "optimizer.warmup_init": Switch(),
    "scheduler.num_warmup_steps": COUNT_OR_NONE,
    "scheduler.num_training_steps": COUNT,
    "callbacks.metrics.window": COUNT,
    "callbacks.progress.line_every": POSITIVE,
    "callbacks.lora_checkpoint.save_every": COUNT_OR_NONE,
    "callbacks.lora_checkpoint.keep_checkpoints": COUNT,
    "callbacks.report.preview_count": COUNT,
    "callbacks.sample_images.sample_every": COUNT_OR_NONE,
    "callbacks.sample_images.count": COUNT_OR_NONE,
    "callbacks.sample_images.max_area": Number(256, whole=True),
    "callbacks.sample_images.seed": SEED,
    **RECIPE,
}
PREDICTION: dict[str, Rule] = {
    **SHARED,
    **dict.fromkeys(("seed", "model.seed", "data.seed"), replace(SEED, several=True)),
    "num_images_per_prompt": COUNT,
    "num_inference_steps": COUNT,
    "guidance_scale": Number(0, null=True),
    "true_cfg_scale": Number(0, null=True),
    "shift": SHIFT,
    "shift_terminal": SHIFT_TERMINAL,
    "lora_weights": Number(null=True, several=True),
    "lora_scale": Number(null=True, several=True, by_pattern=True),
    "height": SIDE,
    "width": SIDE,
    "max_area": Number(256, whole=True),
    "batch_size": COUNT,
    "merge_lora": Switch(),
    "rank": replace(COUNT, null=True),
    "merge_weights": Number(null=True, several=True),
    "fuse": Switch(),
    # At 0.289 all savings weigh alike (arXiv 2312.02696, equation 123).
    "average.relative_std": Number(0, 0.28, above=True, several=True),
    "delete": Switch(),
    "overwrite": Switch(),
    "captioner.max_new_tokens": COUNT,
    "captioner.max_area": Number(1024, whole=True),
    "captioner.batch_size": COUNT,
    "captioner.quantization.bnb_4bit_use_double_quant": Switch(),
    "captioner.quantization.cache": Switch(),
    **RECIPE,
}


def check_settings(cfg: DictConfig, rules: Mapping[str, Rule]) -> None:
    """Compare a composed config with `TRAINING` or `PREDICTION`, before anything is made of it.

    Raises:
        UserError: a setting that is of another kind, not finite, or out of its range; its name is in the message.
    """
    for pattern, rule in rules.items():
        for key, value in _select(cfg, pattern.split(".")):
            if not rule.allows(value):
                raise UserError(f"{key}={value}: must be {rule}")
    for group, key in (("export", "dtype"), ("hub", "push"), ("ema", "half_life"), ("average", "relative_std")):
        if group in cfg and not isinstance(cfg[group], DictConfig):
            raise UserError(f"{group}={cfg[group]}: write {group}.{key}={cfg[group]}")
    steps, warmup = (OmegaConf.select(cfg, key) for key in ("trainer.max_steps", "scheduler.num_warmup_steps"))
    if steps is not None and warmup is not None and warmup > steps:
        raise UserError(f"scheduler.num_warmup_steps={warmup}: must not be above trainer.max_steps={steps}")


def _select(cfg: Any, parts: list[str], path: str = "") -> Iterator[tuple[str, Any]]:
    """The settings that a pattern matches, each with its name; a config has only some of them."""
    if not isinstance(cfg, DictConfig):
        return
    first, *rest = parts
    names = [name for name in cfg if str(name).startswith(first[:-1])] if first.endswith("*") else [first]
    for name in names:
        if name not in cfg:
            continue
        key, value = f"{path}{name!s}", cfg[name]
        if rest:
            yield from _select(value, rest, f"{key}.")
        else:
            yield key, OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
