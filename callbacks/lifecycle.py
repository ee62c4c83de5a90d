"""The start and the end of a run: schedule, settings, signals, a hang, and training on a single sample."""

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import lightning.pytorch as L
from torch.optim import Optimizer

from datamodules.pairs import PairsDataModule
from foundation.errors import UserError
from foundation.internals import ignore_sigterm
from lightning_modules.edit_module import EditModule
from lightning_modules.timing import LOADING
from report.quoting import shareable
from runs.config_file import write_config
from runs.run_folder import REQUESTS, RunFolder
from runs.shares import is_lost_peer, of_any, of_first
from runs.signals import stop

log = logging.getLogger("retouch")

# Seconds until a process exits after another one has failed: NCCL calls that wait for the failed one never return.
SECONDS_TO_END = 100.0


class StartOfTraining(L.Callback):
    """Prepare training before the other callbacks start."""

    def on_train_start(self, trainer: L.Trainer, pl_module: EditModule) -> None:
        stop.install_handlers()  # Lightning has just installed its own, which would exit without saving
        if (step := of_first(trainer, trainer.global_step)) != trainer.global_step:
            raise UserError(
                f"process {trainer.global_rank} starts after step {trainer.global_step}, the first one after step "
                f"{step}: output_dir must be a folder that all machines see"
            )
        pl_module.optimization.follow_schedule(pl_module.lr_schedulers(), trainer.global_step)


class SaveConfig(L.Callback):
    """Write config.yaml once all callbacks before this one have started, since each of them may refuse the run.

    The file marks a folder as a run's. `Report` reads it from the first epoch on. Loggers get the resolved settings.
    """

    def __init__(self, run: RunFolder, settings: dict[str, Any], resolved: Any) -> None:
        self.run = run
        self.settings = settings
        self.resolved = resolved

    def setup(self, trainer: L.Trainer, pl_module: EditModule, stage: str) -> None:
        for logger in trainer.loggers:  # before Lightning makes them write their files
            logger.log_hyperparams(shareable(self.resolved))

    def on_train_start(self, trainer: L.Trainer, pl_module: EditModule) -> None:
        if trainer.is_global_zero:
            write_config(self.run.config, self.settings)


class GracefulStop(L.Callback):
    """Stop training after the current step or sample image, and prediction after the current image or sample.

    Training ends as after its last step, and so saves; prediction raises `Stopped`. This must be the last callback,
    because the work of the others after a batch is part of that batch. A training run also acts on `REQUESTS`.
    """

    def __init__(self, run: RunFolder | None = None) -> None:
        self.run = run
        self._next_look = 0.0
        self._known = {*REQUESTS}

    def setup(self, trainer: L.Trainer, pl_module: EditModule, stage: str) -> None:
        def pass_on(number: int) -> None:
            if trainer.strategy.launcher is not None:
                trainer.strategy.launcher.kill(number)
            if trainer.predicting:
                trainer.should_stop = True  # no further image of this batch is begun

        stop.on_signal = pass_on
        if self.run is not None and trainer.is_global_zero:  # later requests wait for the model and the first step
            self.run.close_requests()
            self.run.requests.mkdir(exist_ok=True)

    def on_train_start(self, trainer: L.Trainer, pl_module: EditModule) -> None:
        if trainer.world_size > 1:
            ignore_sigterm(trainer)  # our own handler has replaced Lightning's
            of_any(trainer, 0)  # not first in a step, by when processes have sampled different numbers of images

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: EditModule, *args: Any) -> None:
        # Never reset in training: once something is learned, no signal may interrupt before it is saved.
        stop.busy_with = "this batch"

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: EditModule, optimizer: Optimizer) -> None:
        assert self.run is not None
        stop.requests = of_first(trainer, self._look(self.run) if trainer.is_global_zero else set())

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: EditModule, *args: Any) -> None:
        assert self.run is not None
        if number := of_any(trainer, int(stop.signal or 0)):
            stop.signal = signal.Signals(number)
        if "stop" in stop.requests and trainer.global_step != trainer.max_steps:
            stop.signal, stop.file = signal.SIGINT, str(self.run.requests / "stop")
        trainer.should_stop |= bool(number or stop.file)
        for name in stop.requests if trainer.is_global_zero else ():
            with suppress(OSError):  # of a shared disk
                (self.run.requests / name).unlink()
        stop.requests = set()

    def _look(self, run: RunFolder) -> set[str]:
        """Return the requests, at most every half second."""
        names: set[str] = set()
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + 0.5
            with suppress(OSError):  # of a shared disk
                names = set(os.listdir(run.requests))
        for name in sorted(names - self._known):
            log.warning(f"note: {run.requests / name} is not a request. Use {', '.join(REQUESTS)}.")
        self._known |= names
        return names & {*REQUESTS}

    def on_predict_start(self, trainer: L.Trainer, pl_module: EditModule) -> None:
        stop.install_handlers()  # Lightning has just installed its own, with which prediction would continue

    def on_predict_batch_start(self, trainer: L.Trainer, pl_module: EditModule, *args: Any) -> None:
        stop.busy_with = "this one"

    def on_predict_batch_end(self, trainer: L.Trainer, pl_module: EditModule, *args: Any) -> None:
        stop.busy_with = None
        stop.check()

    def on_exception(self, trainer: L.Trainer, pl_module: EditModule, exception: BaseException) -> None:
        if is_lost_peer(exception):
            faulthandler.dump_traceback_later(SECONDS_TO_END, exit=True, file=2)
        self.teardown(trainer, pl_module, "")

    def teardown(self, trainer: L.Trainer, pl_module: EditModule, stage: str) -> None:
        """Remove references to the trainer from `stop`, which outlives the run and would keep the model in memory."""
        stop.busy_with = None
        stop.on_signal = lambda number: None
        if self.run is not None:
            self.run.close_requests()


class Watchdog(L.Callback):
    """Print the stacks of all threads and exit if nothing completes for too long.

    Steps, images, encoded samples and validation losses count. Time in which a component is loaded does not, since
    downloads take long; nor does time in which the process is suspended.

    Args:
        minutes: without progress; None disables the watchdog.
    """

    def __init__(self, minutes: float | None) -> None:
        self.minutes = minutes
        self._steps = 0
        self._ended = threading.Event()

    def setup(self, trainer: L.Trainer, pl_module: EditModule, stage: str) -> None:
        if self.minutes is not None:
            self._ended.clear()
            arguments = pl_module, 60 * self.minutes
            threading.Thread(target=self._watch, args=arguments, daemon=True, name="watchdog").start()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: EditModule, *args: Any) -> None:
        self._steps += 1

    def teardown(self, trainer: L.Trainer, pl_module: EditModule, stage: Any) -> None:
        self._ended.set()

    on_exception = teardown

    def _watch(self, module: EditModule, seconds: float) -> None:
        """Count the idle time; runs in a thread of its own."""
        tick, idle, before = min(10.0, seconds / 10), 0.0, None
        while not self._ended.wait(tick):
            timer = module.base.timer
            done = self._steps, timer.done
            idle = idle + tick if done == before and LOADING not in timer.running else 0.0
            before = done
            if idle >= seconds:
                self._abort()

    def _abort(self) -> None:
        sys.stderr.flush()
        faulthandler.dump_traceback(file=2, all_threads=True)
        line = f"error: nothing was done for {self.minutes:g} minutes (watchdog_minutes): where it waits is above"
        os.write(2, f"{line}; start again; a run resumes from its last checkpoint by ckpt_path=last\n".encode())
        os._exit(1)


class Overfit(L.Callback):
    """Train on the first sample only."""

    def setup(self, trainer: L.Trainer, pl_module: EditModule, stage: str) -> None:
        data = PairsDataModule.of(trainer)
        data.training = data.training.first()
