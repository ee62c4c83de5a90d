"""Edit images with a trained LoRA; see `python predict.py --help`."""

import contextlib
import json
import signal
import sys

import hydra
from omegaconf import DictConfig

from cli.arguments import hydras_errors, read_arguments
from cli.check_keys import check_keys, check_read, chosen_task, import_task
from cli.check_values import check_ranges
from cli.folders import IN_CACHE_DIR, job_folder, output_in_use
from cli.resolvers import CONF
from cli.terminal import command_line, end_workers, one_line_errors
from runs.signals import INTERRUPTS, stop


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="predict")
def _run(cfg: DictConfig) -> None:
    from hydra.core.hydra_config import HydraConfig

    output_dir = job_folder()
    try:
        with one_line_errors(), stop.listening():
            task = chosen_task(cfg.task, "predict")
            check_keys(cfg, "predict")
            check_ranges(cfg, "predict")
            check_read(cfg.task, HydraConfig.get().overrides.task)
            with contextlib.nullcontext() if cfg.task in IN_CACHE_DIR else output_in_use(output_dir):
                import_task(task)(cfg, output_dir)
            stop.check()
    finally:
        end_workers()
        with contextlib.suppress(OSError):  # missing, or not empty
            output_dir.rmdir()


def _run_from_stdin() -> None:
    """Run the commands of stdin, each line a JSON list of argument lists, and keep the model loaded between them."""
    import_task("tasks.edit.edit")
    from tasks.edit import KEPT

    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)  # they end a command only
    KEPT.set({})
    for line in sys.stdin:
        with contextlib.suppress(SystemExit):  # a failed command is the last one of its line
            for arguments in json.loads(line):
                sys.argv[1:] = arguments
                main()
        print("done", flush=True)


def main() -> None:
    with command_line(), hydras_errors("predict"):
        sys.argv[1:] = read_arguments(sys.argv[1:], "predict")
        _run()


if __name__ == "__main__":
    _run_from_stdin() if sys.argv[1:] == ["--stdin"] else main()
