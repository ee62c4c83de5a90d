"""Which task a command is for, and the settings that only it has."""

from collections.abc import Mapping, Sequence

from omegaconf import DictConfig

from datamodules.errors import UserError

# Settings of predict.py that only some tasks look at; what stands below them is meant too.
OF_TASKS = {
    **dict.fromkeys(("format", "rank", "merge", "merge_weights", "extract", "fuse", "export"), ("export",)),
    **dict.fromkeys(("lora_scale", "lora_weights", "merge_lora"), ("edit",)),
    "average": ("average",),
    "overwrite": ("caption", "export", "average"),
    "delete": ("clean",),
}


def chosen_task(cfg: DictConfig, tasks: Mapping[str, str]) -> str:
    """What `tasks` has for task=; raises UserError where there is no such task."""
    if cfg.task not in tasks:
        *names, last = tasks
        raise UserError(f"task={cfg.task}: choose {', '.join(names)} or {last}")
    return tasks[cfg.task]


def check_task_settings(task: str, overrides: Sequence[str]) -> None:
    """Raise a UserError for a setting on the command line that the task does not look at."""
    for override in overrides:
        key = override.lstrip("+").partition("=")[0]
        tasks = OF_TASKS.get(key.partition(".")[0], (task,))
        if task not in tasks:
            raise UserError(f"{key} has no effect with task={task}: it is a setting of task={' and task='.join(tasks)}")
