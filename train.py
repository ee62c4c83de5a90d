"""Fine-tune a LoRA; see `python train.py --help`."""

import contextlib
import gc
import os
import re
import sys

import hydra
from omegaconf import DictConfig

from cli.arguments import hydras_errors, read_arguments, take_addresses
from cli.check_keys import check_keys, chosen_task, import_task
from cli.check_values import check_ranges, check_run, check_shards
from cli.folders import job_folder, output_in_use
from cli.placement import queued_again
from cli.resolvers import CONF
from cli.terminal import command_line, configure_logging, end_workers, is_first_process, kept_log, one_line_errors
from runs.run_folder import RunFolder
from runs.signals import stop


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def _run(cfg: DictConfig) -> float | None:
    """Run one job; a launcher may send a copy of this function to another machine, which needs its own modules."""
    import train

    return train.job(cfg)


def job(cfg: DictConfig) -> float | None:
    """Run one task; in a sweep, one job."""
    # Sample images between steps would leave the GPU's memory in pieces. PyTorch reads this as CUDA starts.
    if sys.platform == "linux" and not any(re.fullmatch("PYTORCH_.*ALLOC_CONF", name) for name in os.environ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra_cfg = HydraConfig.get()
    output_dir = job_folder()
    configure_logging(str(output_dir))
    in_sweep = hydra_cfg.mode is RunMode.MULTIRUN
    cfg.output_dir = str(output_dir)
    cfg.model_name = str(cfg.model_name)  # the resolved name, for the run's config.yaml
    try:
        with one_line_errors(in_sweep), stop.listening():
            task = chosen_task(cfg.task, "train")
            check_keys(cfg, "train")
            check_ranges(cfg, "train")
            check_shards(cfg)
            check_run(cfg)
            with contextlib.ExitStack() as around:
                if cfg.task == "fit":
                    around.enter_context(output_in_use(output_dir))
                    if is_first_process():
                        around.enter_context(kept_log(RunFolder(output_dir)))
                    around.enter_context(queued_again(cfg.resume))
                return import_task(task)(cfg, output_dir)
    finally:
        with contextlib.suppress(OSError):  # missing, or not empty
            output_dir.rmdir()
        end_workers()
        # The next job of a sweep loads a model of its own: this one's memory must be free by then.
        gc.collect()


def main() -> None:
    with command_line(trains=True), hydras_errors("train"):
        sys.argv[1:] = read_arguments(take_addresses(sys.argv[1:]), "train")
        _run()


if __name__ == "__main__":
    main()
