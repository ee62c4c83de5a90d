"""Fine-tune a LoRA: `python train.py --help` tells how."""

import contextlib
import gc
import sys

import hydra
from omegaconf import DictConfig

from callbacks.run_folder import shorten
from callbacks.signals import stop
from tasks.chosen import chosen_task
from tasks.folders import in_use
from tasks.mirror import mirrored
from tasks.resolvers import CONF
from tasks.resuming import with_run_settings
from tasks.settings import TRAINING, check_settings
from tasks.slurm import queued_again
from tasks.terminal import command_line, configure_logging, end_workers, one_line_errors, quote_values

# By task=. They are imported when they are chosen: a mistake in the settings is answered before that.
TASKS = {"fit": "tasks.fit.fit", "dry_run": "tasks.dry_run.dry_run"}


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def run(cfg: DictConfig) -> float | None:
    # A launcher may send a copy of this function to another machine; what the modules hold must be theirs there.
    import train

    return train.job(cfg)


def job(cfg: DictConfig) -> float | None:
    """One run; several in a sweep."""
    configure_logging()
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from hydra.utils import get_method

    hydra_cfg = HydraConfig.get()
    in_sweep = hydra_cfg.mode is RunMode.MULTIRUN
    output_dir = shorten(hydra_cfg.runtime.output_dir)
    url = cfg.output_dir if "://" in cfg.output_dir else None
    if url is not None and in_sweep:
        url = f"{url.rstrip('/')}/{hydra_cfg.sweep.subdir}"
    cfg.output_dir = str(output_dir)
    cfg.model_name = str(cfg.model_name)  # the name itself, for the run's config.yaml
    resumes = cfg.resume is not None or cfg.ckpt_path is not None
    try:
        with one_line_errors(in_sweep), stop.listening():
            check_settings(cfg, TRAINING)
            task = chosen_task(cfg, TASKS)
            if cfg.task != "fit":
                return get_method(task)(cfg, output_dir)
            with in_use(output_dir), queued_again(cfg.resume), mirrored(url, output_dir, resumes):
                return get_method(task)(cfg, output_dir)
    finally:
        with contextlib.suppress(OSError):  # not there, or not empty
            output_dir.rmdir()
        end_workers()
        # A sweep's next job loads a model of its own: this one's memory must be free by then.
        gc.collect()


def with_examples(arguments: list[str]) -> list[str]:
    """The command line; where it names no model, with the embedded one's settings, and without data its examples."""

    def names(*keys: str) -> bool:
        return any(one.startswith(keys) and one != "model=embedded" for one in arguments)

    own_config = names("-cp", "-cn", "-cd", "--config")
    if own_config or names("experiment=", "model=", "model.pretrained_model_name_or_path="):
        return arguments
    # What only shows the settings shows those that one's own data would get.
    own_data = names("data=", "data.root=", "data.shards=", "-c", "--cfg")
    if "data=shapes" in arguments:
        return arguments
    # Both experiments set a learning rate for AdamW and a LoRA.
    if names("optimizer=", "adapter=full"):
        chosen = [] if own_data else ["data=shapes"]
    else:
        chosen = ["experiment=embedded" if own_data else "experiment=shapes"]
    # Overrides must stand together: options may come before or after them.
    first = next((place for place, one in enumerate(arguments) if "=" in one and not one.startswith("-")), 0)
    return [*arguments[:first], *chosen, *arguments[first:]]


def main() -> None:
    """The command line."""
    with command_line():
        sys.argv[1:] = with_examples(with_run_settings(quote_values(sys.argv[1:])))
        run()


if __name__ == "__main__":
    main()
