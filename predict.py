"""Edit pictures with a trained LoRA: `python predict.py --help` tells how."""

import contextlib
import sys

import hydra
from omegaconf import DictConfig

from callbacks.run_folder import shorten
from callbacks.signals import stop
from tasks.chosen import check_task_settings, chosen_task
from tasks.folders import in_use
from tasks.resolvers import CONF
from tasks.settings import PREDICTION, check_settings
from tasks.terminal import command_line, end_workers, one_line_errors, quote_values

# By task=. They are imported when they are chosen: a mistake in the settings is answered before that.
TASKS = {
    "edit": "tasks.edit.edit",
    "cache": "tasks.caches.cache",
    "preview": "tasks.caches.preview",
    "clean": "tasks.caches.clean",
    "quantize": "tasks.quantize.quantize",
    "inspect": "tasks.inspect.inspect",
    "compare_precision": "tasks.compare_precision.compare_precision",
    "caption": "tasks.caption.caption",
    "export": "tasks.export.export",
    "average": "tasks.average.average",
    "lora_info": "tasks.lora_info.lora_info",
}
# These write to data.cache_dir, not to output_dir.
IN_CACHE_DIR = ("cache", "clean")


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="predict")
def run(cfg: DictConfig) -> None:
    from hydra.core.hydra_config import HydraConfig
    from hydra.utils import get_method

    output_dir = shorten(HydraConfig.get().runtime.output_dir)
    try:
        with one_line_errors(), stop.listening():
            check_settings(cfg, PREDICTION)
            task = chosen_task(cfg, TASKS)
            check_task_settings(cfg.task, HydraConfig.get().overrides.task)
            with contextlib.nullcontext() if cfg.task in IN_CACHE_DIR else in_use(output_dir):
                get_method(task)(cfg, output_dir)
            stop.check()
    finally:
        end_workers()
        with contextlib.suppress(OSError):  # not there, or not empty
            output_dir.rmdir()


def main() -> None:
    """The command line."""
    with command_line():
        sys.argv[1:] = quote_values(sys.argv[1:])
        run()


if __name__ == "__main__":
    main()
